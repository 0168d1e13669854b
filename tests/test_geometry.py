"""Shapes, sizes, strides, and whether a file fits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmtensor import ShapeError, SizeError
from mmtensor.geometry import as_offset, as_shape, byte_count, c_strides, fit, span
from mmtensor.testing import shapes

F4 = np.dtype("f4")


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (3, (3,)),
        ((), ()),
        ([], ()),
        ([2, 3], (2, 3)),
        ((np.int64(2), True), (2, 1)),
        (torch.Size([2, 3]), (2, 3)),
        (np.array([2, 3]), (2, 3)),
        (np.int32(4), (4,)),
        (torch.tensor([2, 3]), (2, 3)),
        (torch.tensor(4), (4,)),
        (range(2, 4), (2, 3)),
        ((n for n in (1, 2)), (1, 2)),
        (0, (0,)),
    ],
)
def test_shapes(given_, expected):
    """A shape is an integer or anything that iterates over integers."""
    assert as_shape(given_) == expected


@pytest.mark.parametrize(
    "shape",
    [
        "3",
        "",
        b"\x03",
        2.0,
        [2.0],
        None,
        [None],
        "ab",
        [[2, 3]],
        {"a": 1},
        1j,
        torch.zeros(2, 2, dtype=torch.int64),
        torch.tensor([1.0]),
    ],
)
def test_no_shapes(shape):
    """Anything else is a TypeError that shows what came."""
    with pytest.raises(TypeError, match="shape must be an integer or a sequence of integers, got"):
        as_shape(shape)


@pytest.mark.parametrize("shape", [-1, (-1,), (2, -2), (-(2**70),)])
def test_negative_sizes(shape):
    """A negative size is a ShapeError."""
    with pytest.raises(ShapeError, match="shape must have non-negative sizes only, got"):
        as_shape(shape)


@pytest.mark.parametrize("shape", [(-1, -1), (-1, 2, -1)])
def test_two_unknown_sizes(shape):
    """One -1 can be inferred, two are a ShapeError."""
    with pytest.raises(ShapeError, match=r"shape must have at most one -1, got \(-1, "):
        as_shape(shape, infer=True)


@pytest.mark.parametrize("shape", [-2, (-1, -2), (3, -5)])
def test_other_negative_sizes(shape):
    """A negative size other than -1 is a ShapeError where -1 may stand."""
    with pytest.raises(ShapeError, match="non-negative sizes only, or one -1"):
        as_shape(shape, infer=True)


@pytest.mark.parametrize(
    "shape", [(2**63,), (2**62, 2), (2**40, 2**40), (2**64, 0), (2**40, 2**40, 0), (2**1000,)]
)
def test_overflow(shape):
    """Bytes or strides that no address can hold are a ShapeError."""
    with pytest.raises(ShapeError, match=r"at most 2\*\*63 - 1 bytes"):
        byte_count(shape, 4)


def test_too_many_dimensions():
    """NumPy and torch stop at 64 dimensions, and a longer shape is a ShapeError."""
    assert byte_count((1,) * 64, 4) == 4
    with pytest.raises(ShapeError, match="at most 64 dimensions, got 65"):
        byte_count((1,) * 65, 4)


@pytest.mark.parametrize("offset", [-1, -(2**40)])
def test_negative_offsets(offset):
    """A negative offset is a ValueError."""
    with pytest.raises(ValueError, match="offset must be non-negative"):
        as_offset(offset)


@pytest.mark.parametrize("offset", [None, "4", 4.0, "", [], 0.0])
def test_no_offsets(offset):
    """What is no integer is no offset: a TypeError."""
    with pytest.raises(TypeError, match=r"offset must be an integer \(bytes\), got"):
        as_offset(offset)


@given(shapes())
def test_strides(shape):
    """The strides of a C-contiguous array are torch's, and its span is its size."""
    assert c_strides(shape) == torch.empty(shape).stride()
    assert span(shape, c_strides(shape), 4) == byte_count(shape, 4)


@given(shapes(), st.data())
def test_span(shape, data):
    """The span of a strided array is where its last element ends, found by brute force."""
    strides = tuple(data.draw(st.integers(0, 7)) for _ in shape)
    ends = [
        sum(i * s for i, s in zip(index, strides, strict=True)) + 1 for index in np.ndindex(*shape)
    ]
    assert span(shape, strides, 2) == 2 * max(ends, default=0)


@given(shapes(min_dims=1), st.integers(0, 3), st.integers(0, 40), st.booleans(), st.data())
def test_fit(shape, offset, extra, partial, data):
    """A shape fits a file of offset and bytes; with `partial` bytes may be left over."""
    nbytes = byte_count(shape, 4)
    size = offset + nbytes + extra
    if extra == 0 or partial:
        assert fit(shape, F4, size, offset=offset, partial=partial) == (shape, nbytes)
    else:
        with pytest.raises(SizeError, match=f"must have {offset + nbytes} bytes .* is {size} byt"):
            fit(shape, F4, size, offset=offset)
    position = data.draw(st.integers(0, len(shape) - 1))
    unknown = (*shape[:position], -1, *shape[position + 1 :])
    row = byte_count([n for n in unknown if n != -1], 4)
    available = size - offset
    if row and (partial or available % row == 0):
        inferred, used = fit(unknown, F4, size, offset=offset, partial=partial)
        assert inferred[position] == available // row
        assert used == inferred[position] * row <= available
    elif row or (available and not partial):
        with pytest.raises(SizeError, match=f"its size is {size} bytes: .* too many"):
            fit(unknown, F4, size, offset=offset, partial=partial)


@pytest.mark.parametrize(
    ("shape", "dtype", "size", "hint"),
    [
        ((10,), "f4", 20, r"What would fit: shape \(5,\); a dtype of 2 bytes per element\."),
        ((10, 2), "f4", 40, r"shape \(5, 2\); a dtype of 2 bytes"),
        ((10,), "f4", 80, r"shape \(20,\); a dtype of 8 bytes .*; partial=True"),
        ((10,), "f8", 10, "a dtype of 1 byte per element"),
        ((10,), "f4", 43, "partial=True, to map a part on purpose"),
        ((10,), "f4", 39, "Correct shape, dtype or offset"),
        ((10,), "f4", 0, r"shape \(0,\)"),
        ((0,), "f4", 4, r"shape \(1,\)"),
        ((), "f4", 8, "a dtype of 8 bytes"),
    ],
)
def test_hints(shape, dtype, size, hint):
    """The error names both sizes and what would fit."""
    with pytest.raises(SizeError, match=f"its size is {size} bytes.*{hint}"):
        fit(shape, np.dtype(dtype), size)


def test_offset_beyond_the_end():
    """An offset beyond the end is a SizeError, whatever the shape, and with `partial`."""
    for partial in (False, True):
        with pytest.raises(SizeError, match="The offset is beyond its end"):
            fit((1,), F4, 4, offset=8, partial=partial)
        with pytest.raises(SizeError, match="less than the offset"):
            fit((-1,), F4, 4, offset=8, partial=partial)
