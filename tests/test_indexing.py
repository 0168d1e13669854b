"""Gathering and scattering rows: the fast road against plain torch."""

import contextlib
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from mmtensor import MemoryMappedTensor, ReadOnlyError
from mmtensor.dtypes import numpy_dtype
from mmtensor.testing import row_indices, shapes, tensors


def memory_mapped(tensor):
    """Return a memory-mapped tensor with the values and the strides of a regular one."""
    content = np.frombuffer(bytearray(tensor.untyped_storage()), numpy_dtype(tensor.dtype))
    return MemoryMappedTensor.from_numpy(content).as_strided(tensor.shape, tensor.stride())


def outcome(function):
    """Return what a call does: its result, or its error's type and text, and its warnings."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = function()
    except Exception as error:  # noqa: BLE001  # whatever torch raises
        return type(error), str(error), len(caught)
    finally:
        torch.set_warn_always(always)
    return result, len(caught)


def same_bytes(a, b):
    """Whether two tensors agree in dtype, shape and every bit of their elements."""
    a, b = (t.clone(memory_format=torch.contiguous_format) for t in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bytes(a.untyped_storage()) == bytes(
        b.untyped_storage()
    )


def assert_same(actual, expected):
    """Compare two outcomes."""
    if isinstance(expected[0], torch.Tensor):
        assert isinstance(actual[0], torch.Tensor), actual
        assert same_bytes(actual[0], expected[0])
        assert actual[1:] == expected[1:]
    else:
        assert actual == expected


@given(st.data())
def test_gather(data):
    """``x[ids]`` has torch's result, in regular memory, or torch's error."""
    tensor = data.draw(tensors(shape=data.draw(shapes(min_dims=1, max_dims=3))))
    index = data.draw(row_indices(tensor.shape[0]))
    x = memory_mapped(tensor)
    expected = outcome(lambda: tensor[index])
    actual = outcome(lambda: x[index])
    assert_same(actual, expected)
    if isinstance(actual[0], torch.Tensor):
        assert type(actual[0]) is torch.Tensor


@given(st.data())
def test_take(data):
    """``x.take(ids, out=buffer)`` fills the buffer with ``x[ids]``."""
    tensor = data.draw(tensors(shape=data.draw(shapes(min_dims=1, max_dims=3, min_side=1))))
    length = tensor.shape[0]
    ids = data.draw(st.lists(st.integers(-length, length - 1), max_size=6))
    form = data.draw(st.sampled_from([list, tuple, np.array, torch.tensor]))
    numbers = form(ids)
    if not ids and form in (np.array, torch.tensor):
        numbers = form(ids, dtype=int)
    x = memory_mapped(tensor)
    expected = tensor[torch.tensor(ids, dtype=torch.int64)]
    buffer = torch.empty(expected.shape, dtype=expected.dtype)
    assert x.take(numbers, out=buffer) is buffer
    assert same_bytes(buffer, expected)
    assert same_bytes(x.take(numbers), expected)


@st.composite
def values(draw, rows, tensor):
    """Draw what may stand on the right of ``x[ids] = ...`` for so many rows."""
    name = str(tensor.dtype).removeprefix("torch.")
    shape = (*rows, *tensor.shape[1:])
    ones = (1,) * draw(st.integers(0, len(shape) + 1))
    strange = [float("nan"), float("inf"), 2**70, -1, 300, 1j, "x", None]
    return draw(
        st.one_of(
            tensors(dtype=name, shape=shape),
            tensors(dtype=name, shape=tuple(tensor.shape[1:])),
            tensors(dtype=name, shape=ones),
            tensors(dtype=name, shape=()),
            tensors(dtype=name, shape=(*shape, 7)),
            tensors(dtype="int32", shape=shape),
            st.just(np.ones(shape, np.float32)),
            st.sampled_from([0, 1, True, 1.5, -3]),
            st.sampled_from(strange),
        )
    )


@given(st.data())
def test_scatter(data):
    """``x[ids] = v`` does what torch does, or raises torch's error and changes nothing."""
    shape = data.draw(shapes(min_dims=1, max_dims=3))
    tensor = data.draw(tensors(shape=shape))
    index = data.draw(row_indices(shape[0]))
    with contextlib.suppress(IndexError):
        rows = tensor[:, None][index].shape[:-1] if tensor.dim() == 1 else tensor[index].shape
        rows = rows[: len(rows) - max(tensor.dim() - 1, 0)] if tensor.dim() > 1 else rows
    value = data.draw(values(locals().get("rows", (1,)), tensor))
    x = memory_mapped(tensor)
    plain = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage().clone(), 0, tensor.shape, tensor.stride()
    )
    expected = outcome(lambda: plain.__setitem__(index, value))
    actual = outcome(lambda: x.__setitem__(index, value))
    if expected[0] is NotImplementedError and actual[0] is None:
        # torch assigns no rows of uint16 and its like; here the bytes are what matters.
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        if not isinstance(value, torch.Tensor):
            value = torch.scalar_tensor(value, dtype=tensor.dtype)
        assert value.dtype is tensor.dtype
        outcome(lambda: plain.view(words).__setitem__(index, value.view(words)))
    else:
        assert actual == expected
    # torch leaves open which value stands in a row that is named twice.
    ids = torch.empty(0)
    if actual[0] is None and x.numel():
        ids = torch.arange(shape[0])[index].reshape(-1)
    named, counts = ids.unique(return_counts=True)
    clear = [row for row in range(shape[0]) if row not in named[counts > 1]]
    assert all(same_bytes(x[row], plain[row]) for row in clear)


@pytest.mark.parametrize("ids", [[0, 0], [1, 2, 1], [-1, 2, 0, 2], [0, -3, 0]])
def test_scatter_to_one_row_twice(ids):
    """Of two values for one row the last one stands, as it does with torch."""
    x, plain = MemoryMappedTensor.zeros(3, 2), torch.zeros(3, 2)
    for tensor in (x, plain):
        tensor[ids] = torch.arange(1.0, 2 * len(ids) + 1).view(-1, 2)
    assert torch.equal(x, plain)


@pytest.mark.parametrize("source_mode", ["r", "r+", "c"])
def test_scatter_from_memory_mapped_rows(numbers, source_mode):
    """Rows of a tensor of a file in any mode can be assigned, plain views as well."""
    path, values_ = numbers
    source = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode=source_mode)
    target = MemoryMappedTensor.zeros(4, 4)
    target[torch.tensor([0, 3])] = source[1:]
    target[torch.tensor([1])] = torch.narrow(source, 0, 0, 1)
    expected = np.zeros((4, 4), np.float32)
    expected[[0, 3]], expected[1] = values_[1:], values_[0]
    assert target.tolist() == expected.tolist()
    target[torch.tensor([2, 2])] = source.t()[0, 0]
    assert target[2].tolist() == [0] * 4


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_memory_mapped_ids(path, mode):
    """Row numbers and masks may themselves be of a file, in any mode."""
    np.array([2, -1, 0]).tofile(path)
    ids = MemoryMappedTensor.from_filename(path, int, 3, mode=mode)
    x = MemoryMappedTensor.from_tensor(torch.arange(12.0).view(4, 3))
    plain = torch.arange(12.0).view(4, 3)
    assert torch.equal(x[ids], plain[[2, -1, 0]])
    assert torch.equal(x[torch.t(ids)], plain[[2, -1, 0]])
    for index in (ids, torch.t(ids)):
        x[index] = torch.full((3,), 5.0)
        plain[index.clone()] = torch.full((3,), 5.0)
        assert torch.equal(x, plain)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_memory_mapped_mask(path, mode):
    """A mask may itself be of a file, in any mode."""
    np.array([True, False, True, False]).tofile(path)
    mask = MemoryMappedTensor.from_filename(path, bool, 4, mode=mode)
    x = MemoryMappedTensor.from_tensor(torch.arange(12.0).view(4, 3))
    assert x[mask].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert x[torch.t(mask)].tolist() == [[0, 1, 2], [6, 7, 8]]
    x[mask] = torch.ones(3)
    x[torch.t(mask)] += 1
    assert x[:, 0].tolist() == [2, 3, 2, 9]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag.to_sparse(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.tensor([1.0, 2.0], requires_grad=True),
        torch.tensor([1.0, 2.0]).expand(3, 2),
        torch.tensor([1.0, 2.0], dtype=torch.float16),
        torch.tensor(5.0),
        torch.ones(2, device="meta"),
    ],
    ids=["conj", "sparse", "neg", "grad", "expanded", "half", "scalar", "meta"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_odd_values(path, value, dtype):
    """Values that NumPy cannot read end as torch has it: written, or its own error."""
    plain = torch.zeros(5, 2, dtype=dtype)
    x = MemoryMappedTensor.from_tensor(plain, filename=path)
    ids = torch.tensor([4, 0, 2])
    values = [value, value.to(dtype)] if dtype.is_complex or not value.is_complex() else []
    for rows in values:
        with torch.no_grad():
            try:
                plain[ids] = rows
            except Exception as error:  # noqa: BLE001  # whatever torch raises
                with pytest.raises(type(error), match=re.escape(str(error)[:30])):
                    x[ids] = rows
            else:
                x[ids] = rows
        assert torch.equal(x, plain)


def test_scatter_onto_itself():
    """Rows of the same tensor are read before they are written, as far as torch does."""
    x = MemoryMappedTensor.from_tensor(torch.arange(12.0).view(4, 3))
    plain = torch.arange(12.0).view(4, 3)
    for tensor in (x, plain):
        tensor[torch.tensor([0, 1, 2])] = tensor[torch.tensor([1, 2, 3])]
        tensor[torch.tensor([3, 0])] = tensor[:2].clone()
    assert torch.equal(x, plain)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugated_views(dtype):
    """A conjugated view is gathered, taken and assigned with the values that it shows."""
    plain = torch.randn(4, 3, dtype=dtype)
    x = MemoryMappedTensor.from_tensor(plain)
    ids = torch.tensor([2, -4])
    for view, expected in (
        (x.conj(), plain.conj().resolve_conj()),
        (x.conj().imag, plain.conj().resolve_conj().imag.clone()),
    ):
        assert torch.equal(view[ids], expected[ids])
        buffer = torch.empty(2, 3, dtype=expected.dtype)
        assert torch.equal(view.take(ids, out=buffer), expected[ids])
    new = torch.randn(2, 3, dtype=dtype)
    x.conj()[ids] = new
    x[torch.tensor([1, 3])] = new.conj()
    plain.conj()[ids] = new
    plain[torch.tensor([1, 3])] = new.conj()
    assert torch.equal(x, plain)


@pytest.mark.parametrize(
    "index",
    [
        None,
        ...,
        True,
        False,
        0,
        -1,
        slice(1, 3),
        slice(None, None, 2),
        torch.tensor(1),
        torch.tensor(True),
        np.int64(2),
        (0, 1),
        (slice(None), 1),
        (..., 0),
        (None, 0),
        (),
        [],
        [[0, 1], [1, 0]],
        ([0, 1], [1, 2]),
        (torch.tensor([0, 1]), slice(0, 2)),
        (slice(None), [2, 0]),
        (slice(None), torch.tensor([True, False, True])),
        torch.tensor([[True, False, True]] * 4),
        np.array([True, False, True, False]),
        np.array([1, 2], np.int16),
        np.array([1, 2], np.uint8),
        np.array([3, 0])[::-1],
        np.array(1),
        torch.tensor([1, 2], dtype=torch.uint8),
        torch.tensor([1, 0, 1, 0], dtype=torch.uint8),
        torch.tensor([1, 2], dtype=torch.int16),
        torch.tensor([1.0]),
        [0, 1.5],
        [0, True],
        [True, False, True, False],
        [np.int64(1), np.int64(2)],
        (1, 2, 3),
        4,
        -5,
        "x",
        1.5,
        {},
        range(2),
        torch.tensor([4]),
        torch.tensor([-5]),
        [-5],
        [4],
        [2**70],
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0),
        torch.zeros(0, dtype=torch.bool),
        torch.zeros(2, 0, dtype=torch.int64),
    ],
    ids=repr,
)
def test_every_kind_of_index(index):
    """Reading and assigning with any index does what torch does, errors and warnings too."""
    plain = torch.arange(12.0).view(4, 3)
    x = MemoryMappedTensor.from_tensor(plain.clone())
    expected, actual = outcome(lambda: plain[index]), outcome(lambda: x[index])
    assert_same(actual, expected)
    if isinstance(actual[0], torch.Tensor):
        on_mapping = actual[0].untyped_storage() is x.untyped_storage()
        on_memory = expected[0].untyped_storage() is plain.untyped_storage()
        assert on_mapping == on_memory == (type(actual[0]) is MemoryMappedTensor)
    for value in (7.0, torch.tensor(3.0), torch.ones(3), torch.ones(2, 3)):
        expected = outcome(lambda: plain.__setitem__(index, value))  # noqa: B023
        actual = outcome(lambda: x.__setitem__(index, value))  # noqa: B023
        assert actual == expected
        assert torch.equal(x, plain)


@pytest.mark.parametrize(
    "index", [0, [0], torch.tensor([0]), slice(0, 1), ..., torch.tensor([[True]])]
)
def test_zero_dimensions(index):
    """A tensor without dimensions takes the indices that torch takes, and no others."""
    x, plain = MemoryMappedTensor.from_tensor(torch.tensor(5.0)), torch.tensor(5.0)
    assert_same(outcome(lambda: x[index]), outcome(lambda: plain[index]))
    assert outcome(lambda: x.__setitem__(index, 1)) == outcome(lambda: plain.__setitem__(index, 1))


@pytest.mark.parametrize("index", [0, slice(1), [0], torch.tensor([0]), ..., (0, 0), None])
def test_read_only(numbers, index, unchanged):
    """In mode ``r`` every assignment raises first, with the mode and the file."""
    path, _ = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r")
    with unchanged(), pytest.raises(ReadOnlyError, match=rf'x\[...\] = ....*{path}.*mode "r"'):
        x[index] = 1.0


def test_assignment_counts_as_a_change():
    """Autograd notices that a saved tensor was assigned to on the fast road."""
    x = MemoryMappedTensor.ones(3, 2)
    weight = torch.ones(2, requires_grad=True)
    result = (x * weight).sum()
    x[torch.tensor([0])] = 5.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_gradients_flow_to_what_was_gathered():
    """A gathered row takes part in autograd as any tensor."""
    x = MemoryMappedTensor.from_tensor(torch.arange(6.0).view(3, 2))
    weight = torch.ones(2, requires_grad=True)
    (x[[2, 0]] * weight).sum().backward()
    assert weight.grad.tolist() == [4, 6]


def _set_rows(x, ids):
    x[ids] = 1.0
    return x * 1


def _rows_of(x, ids):
    return x[ids]


@pytest.mark.parametrize("function", [_set_rows, _rows_of])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_tracing(path, function):
    """A tracer sees what happens: its function does the same with other numbers."""
    ids, other = torch.tensor([-2, 1]), torch.tensor([3, -1])
    plain = torch.arange(5.0)
    expected = function(plain.clone(), other)
    x = MemoryMappedTensor.from_tensor(plain, filename=path)
    graph = make_fx(function)(x.clone(), ids)
    assert torch.equal(graph(plain.clone(), other), expected)
    graph = make_fx(function)(x, ids)
    assert torch.equal(graph(plain.clone(), other), expected)
    traced = torch.jit.trace(function, (x, ids), check_trace=False)
    assert torch.equal(traced(plain.clone(), other), expected)


def test_vectorized_maps():
    """`torch.func.vmap` over rows and over row numbers gives torch's results."""
    plain = torch.arange(12.0).view(4, 3)
    x = MemoryMappedTensor.from_tensor(plain)
    ids = torch.tensor([2, 0])
    assert torch.equal(torch.func.vmap(lambda i: x[i])(ids), plain[ids])
    assert torch.equal(torch.func.vmap(lambda row: row[ids])(x), plain[:, ids])


def test_inference_mode():
    """Gathering and scattering work under `torch.inference_mode`."""
    with torch.inference_mode():
        x = MemoryMappedTensor.zeros(3, 2)
        x[torch.tensor([2])] = torch.ones(2)
        assert x[[2, 0]].tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([3], IndexError, "out of (range|bounds)"),
        ([-4], IndexError, "out of (range|bounds)"),
        ([0, -4], IndexError, "out of (range|bounds)"),
        ([0.5], IndexError, "ids must be a 1-D sequence of integers"),
        ([True, False, True], IndexError, "ids must be a 1-D sequence of integers"),
        (1, IndexError, "ids must be a 1-D sequence of integers"),
        ([[0, 1]], IndexError, "ids must be a 1-D sequence of integers"),
    ],
)
def test_take_wrong_ids(ids, error, message):
    """Row numbers out of range, or that are none, are an IndexError, with a buffer too."""
    x = MemoryMappedTensor.ones(3, 2)
    buffer = torch.zeros(len(ids), 2) if isinstance(ids, list) else torch.zeros(1, 2)
    with pytest.raises(error, match=message):
        x.take(ids)
    with pytest.raises(error, match=message):
        x.take(ids, out=buffer)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(3, 2),
        torch.zeros(2),
        torch.zeros(2, 2, dtype=torch.float64),
        torch.zeros(2, 4)[:, ::2],
        np.zeros((2, 2), np.float32),
    ],
)
def test_take_wrong_buffer(out):
    """A buffer of another shape, dtype, layout or kind is an error that says what it must be."""
    x = MemoryMappedTensor.ones(3, 2)
    with pytest.raises(
        (ValueError, TypeError), match=r"out must be a contiguous tensor of shape \(2, 2\)"
    ):
        x.take([0, 1], out=out)


def test_take_into_a_file(path, numbers):
    """The buffer may be a memory-mapped tensor, and must not be read-only."""
    del path
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r")
    buffer = MemoryMappedTensor.zeros(2, 4)
    x.take([2, 1], out=buffer)
    assert buffer.tolist() == numbers[1][[2, 1]].tolist()
    for target in (x[:2], torch.narrow(x, 0, 0, 2)):
        with pytest.raises(ReadOnlyError, match=r"x\.take\(out=\.\.\.\) would write"):
            x.take([2, 1], out=target)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_take_of_long_rows(path, dtype, mode):
    """Rows that are copied without torch are the same ones, from whatever first row on."""
    values = torch.randn(60, 3, 100).to(dtype)
    MemoryMappedTensor.from_tensor(values, filename=path)
    x = MemoryMappedTensor.from_filename(path, dtype, values.shape, mode=mode)
    ids = torch.randint(0, 57, (400,))
    out = torch.empty(400, 3, 100, dtype=dtype)
    version = out._version
    assert torch.equal(x[3:].take(ids, out=out), values[3:][ids])
    assert out._version > version  # autograd knows of it
    assert torch.equal(x[3:].take(ids - 57, out=out), values[3:][ids])
    assert torch.equal(x[3:].take(ids.int(), out=out), values[3:][ids])
    assert torch.equal(x[:, 1].take(ids, out=out[:, 1].clone()), values[:, 1][ids])
    assert torch.equal(x[ids], values[ids])


def test_take_of_long_rows_that_do_not_exist(path):
    """A number that is out of range is torch's error."""
    x = MemoryMappedTensor.from_tensor(torch.ones(60, 300), filename=path)
    for bad in (60, -61):
        ids, out = torch.full((400,), 59), torch.zeros(400, 300)
        ids[-1] = bad
        with pytest.raises(IndexError, match="out of range"):
            x.take(ids, out=out)


def test_take_into_its_own_rows(path):
    """What reads and writes the same memory is left to torch, which refuses."""
    x = MemoryMappedTensor.from_tensor(torch.arange(90_000.0).view(300, 300), filename=path)
    ids = torch.arange(299, 99, -1)
    expected = outcome(lambda: torch.index_select(x, 0, ids, out=torch.Tensor.detach(x)[:200]))
    assert outcome(lambda: x.take(ids, out=x[:200])) == expected
    assert expected[0] is RuntimeError
