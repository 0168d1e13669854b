"""`in`, `index` and `count` of jagged tensors, against those of a list of tensors."""

import ml_dtypes
import numpy as np
import pytest
import torch

from mmtensor import JaggedTensor

ELEMENTS = [
    torch.tensor([1.0, 2.0]),
    torch.tensor([1.0]),
    torch.empty(0),
    torch.tensor([1.0, 2.0]),
    torch.tensor([2.0, 1.0]),
]


@pytest.fixture
def five():
    """Return five elements, two of them the same."""
    return JaggedTensor.from_tensors(ELEMENTS)


@pytest.mark.parametrize("number", range(5))
def test_every_element_is_found(number, five):
    """The first of those that are equal."""
    first = next(i for i, x in enumerate(ELEMENTS) if torch.equal(x, ELEMENTS[number]))
    assert ELEMENTS[number] in five
    assert five.index(ELEMENTS[number]) == first
    assert five.count(ELEMENTS[number]) == sum(torch.equal(x, ELEMENTS[number]) for x in ELEMENTS)


def test_arrays_and_other_dtypes(five):
    """What equals in value is equal, as for tensors of the same shape."""
    assert np.array([2, 1]) in five
    assert five.index(np.array([2.0, 1.0], "f4")) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[::-1].copy()[::-1],
        lambda x: x.astype(">f4"),
        lambda x: x.astype(ml_dtypes.bfloat16),
        lambda x: x.astype(ml_dtypes.float8_e5m2),
        lambda x: np.frombuffer(x.tobytes(), x.dtype),
        lambda x: x.astype("u2"),
    ],
)
def test_arrays_of_every_kind(change, five):
    """Reversed, of foreign byte order, of an ml_dtypes dtype, read-only."""
    assert five.index(change(np.array([2.0, 1.0], "f4"))) == 4


def test_dtypes_without_a_common_one():
    """Torch compares neither float8 with float32 nor uint16 with int64."""
    for dtype, other in ((torch.float8_e5m2, torch.float32), (torch.uint16, torch.int64)):
        j = JaggedTensor.from_tensors([torch.ones(2).to(dtype), torch.ones(1).to(dtype)])
        assert torch.ones(1, dtype=other) in j


def test_where_to_look(five):
    """`start` and `stop` count as in `list.index`, negative ones too; slices search themselves."""
    assert five.index(ELEMENTS[0], 1) == 3
    assert five.index(ELEMENTS[0], -2, -1) == 3
    assert five[1:].index(ELEMENTS[0]) == 2
    assert five[::-1].index(ELEMENTS[4]) == 0
    with pytest.raises(ValueError, match=r"no element equals the tensor of shape \(2,\)"):
        five.index(ELEMENTS[0], 1, 3)


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(1, 2), torch.tensor(1.0)])
def test_what_is_not_there(value, five):
    """Of another shape, or of another number of dimensions."""
    assert value not in five
    assert five.count(value) == 0
    with pytest.raises(ValueError, match="no element equals"):
        five.index(value)


def test_what_is_no_tensor(five):
    """A number is no element."""
    with pytest.raises(TypeError, match="expected a tensor or an array to look for, got 3"):
        _ = 3 in five


def test_no_elements():
    """Nothing is in it."""
    assert torch.empty(0) not in JaggedTensor.from_tensors([torch.ones(1)])[:0]
