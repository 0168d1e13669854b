"""The constructors of memory-mapped tensors."""

import os
import re
import warnings
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import torch
from conftest import descriptors, settled_descriptors
from hypothesis import given
from hypothesis import strategies as st

import mmtensor
from mmtensor import GradientError, MemoryMappedTensor
from mmtensor.dtypes import DTYPES
from mmtensor.testing import dtypes, shapes, tensors


def raw(tensor):
    """Return the bytes of a tensor in C order, with torch alone."""
    return bytes(tensor.clone(memory_format=torch.contiguous_format).untyped_storage())


@given(tensors(), st.booleans())
def test_from_tensor(tmp_path, tensor, on_file):
    """A tensor of any dtype, shape and layout is written in C order and comes back."""
    path = tmp_path / "x" if on_file else None
    x = MemoryMappedTensor.from_tensor(tensor, filename=path, existsok=True)
    assert type(x) is MemoryMappedTensor
    assert (x.dtype, x.shape, x.mode) == (tensor.dtype, tensor.shape, "r+")
    assert x.is_contiguous()
    assert raw(x) == raw(tensor)
    if on_file:
        assert path.read_bytes() == raw(tensor)
        again = MemoryMappedTensor.from_filename(path, tensor.dtype, tensor.shape, mode="r")
        assert raw(again) == raw(tensor)


@given(tensors(dtype="complex64"))
def test_from_conjugated_tensor(tensor):
    """Conjugated and negated views are written as the values that they show."""
    x = MemoryMappedTensor.from_tensor(tensor.conj())
    y = MemoryMappedTensor.from_tensor(tensor.conj().imag)
    assert not x.is_conj()
    assert not y.is_neg()
    assert raw(x) == raw(tensor.conj().resolve_conj())
    assert raw(y) == raw(tensor.conj().imag.resolve_neg())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4_000_000.0).view(2000, 2000).t(),
        torch.arange(4_000_000.0)[::2],
        torch.randn(2, 700_000, dtype=torch.complex64).conj(),
        torch.randn(1_400_000, dtype=torch.complex64).conj(),
        torch.arange(3.0).expand(700_000, 3),
        torch.arange(3_000_000.0).view(1, 1, 3_000_000)[..., ::2],
    ],
    ids=["transposed", "strided", "conjugated", "conjugated vector", "expanded", "nested"],
)
def test_large_conversions(tensor, path):
    """Tensors that are converted piece by piece arrive whole."""
    x = MemoryMappedTensor.from_tensor(tensor, filename=path)
    assert torch.equal(x, tensor)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_copy_of_a_file(numbers, mode, tmp_path):
    """A tensor of a file in any mode can be written to another file, views as well."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode=mode)
    with pytest.raises(RuntimeError, match=f"has a file already.*{path}.*copy_existing=True"):
        MemoryMappedTensor.from_tensor(x, filename=tmp_path / "y")
    assert not (tmp_path / "y").exists()
    y = MemoryMappedTensor.from_tensor(x.t()[1:], filename=tmp_path / "y", copy_existing=True)
    assert y.filename == str(tmp_path / "y")
    assert (tmp_path / "y").read_bytes() == values.T[1:].tobytes()
    z = MemoryMappedTensor.from_tensor(x)
    assert z.tolist() == values.tolist()
    with pytest.raises(RuntimeError, match="this tensor has no file"):
        _ = z.filename


def test_tensor_that_is_there_already(numbers):
    """A tensor that is where it should go is returned on the same memory."""
    path, _ = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r+")
    assert MemoryMappedTensor.from_tensor(x, filename=path).data_ptr() == x.data_ptr()
    y = MemoryMappedTensor.ones(3)
    assert MemoryMappedTensor.from_tensor(y).data_ptr() == y.data_ptr()


def test_tensor_whose_file_was_replaced(numbers):
    """A tensor whose file was replaced is not there any more, and can be written again."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r+")
    mmtensor.save_array(path, values + 1, existsok=True)
    with pytest.raises(FileExistsError, match="existsok=True"):
        MemoryMappedTensor.from_tensor(x, filename=path)
    y = MemoryMappedTensor.from_tensor(x, filename=path, existsok=True)
    assert y.data_ptr() != x.data_ptr()
    np.testing.assert_array_equal(np.fromfile(path, "f4").reshape(3, 4), values)


@pytest.mark.parametrize(
    "view", [lambda x: x[1:], lambda x: x.t(), lambda x: x.view(torch.uint8)[:, ::2]]
)
def test_view_onto_its_own_file(numbers, view):
    """A view that is not the whole file replaces it only with existsok, by its own values."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r+")
    expected = view(torch.from_numpy(values.copy()))
    with pytest.raises(FileExistsError, match="existsok=True"):
        MemoryMappedTensor.from_tensor(view(x), filename=path)
    y = MemoryMappedTensor.from_tensor(view(x), filename=path, existsok=True)
    assert torch.equal(y, expected)
    assert x.tolist() == values.tolist()


def test_private_changes_onto_their_own_file(numbers):
    """Changes in ``c`` can be written over the file that they were made on."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="c")
    x[0, 0] = 50
    MemoryMappedTensor.from_tensor(x, filename=path, existsok=True)
    values[0, 0] = 50
    np.testing.assert_array_equal(np.fromfile(path, "f4").reshape(3, 4), values)


@pytest.mark.parametrize("on_file", [True, False])
def test_without_data(path, on_file):
    """``copy_data=False`` makes room only: zeros of the shape and dtype."""
    filename = path if on_file else None
    x = MemoryMappedTensor.from_tensor(
        torch.ones(3, dtype=torch.int16), filename=filename, copy_data=False
    )
    assert (x.tolist(), x.dtype) == ([0, 0, 0], torch.int16)


@pytest.mark.parametrize(
    ("shape", "expected"), [((2, 3), (2, 3)), ([2, 3], (2, 3)), (3, (3,)), (torch.Size([3]), (3,))]
)
def test_shape_of_a_tensor(shape, expected):
    """``shape=`` is what the input is broadcast to."""
    x = MemoryMappedTensor.from_tensor(torch.arange(3.0), shape=shape)
    assert tuple(x.shape) == expected
    assert torch.equal(x, torch.arange(3.0).expand(expected))


def test_wrong_shape_of_a_tensor(path, unchanged):
    """A shape to which the input does not broadcast is torch's error, and no file appears."""
    with unchanged(), pytest.raises(RuntimeError, match="expanded size|must match"):
        MemoryMappedTensor.from_tensor(torch.arange(3.0), filename=path, shape=(2, 4))


def test_parameters_are_written_detached():
    """A parameter without gradients is written like any tensor."""
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    x = MemoryMappedTensor.from_tensor(parameter)
    assert type(x) is MemoryMappedTensor
    assert not isinstance(x, torch.nn.Parameter)


CONSTRUCTORS = {
    "empty": (MemoryMappedTensor.empty, 0),
    "zeros": (MemoryMappedTensor.zeros, 0),
    "ones": (MemoryMappedTensor.ones, 1),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_filled(path, name, dtype):
    """Zeros and ones of every dtype are what torch makes of the number."""
    make, value = CONSTRUCTORS[name]
    x = make(2, 3, dtype=dtype, filename=path)
    assert type(x) is MemoryMappedTensor
    assert raw(x) == raw(torch.full((2, 3), value, dtype=getattr(torch, dtype)))
    assert np.fromfile(path, np.uint8).tobytes() == raw(x)


@given(dtypes(), shapes(), st.sampled_from([0, 1, True, False, 2, 0.0, -0.0, 1.5, 1e30]))
def test_full(dtype, shape, value):
    """`full` gives what `torch.full` gives, and its error where the value overflows."""
    found = getattr(torch, dtype)
    try:
        # Of one element torch makes what fits; here the shape makes no difference.
        expected = torch.full((4,), value, dtype=found)[0].expand(shape)
    except (RuntimeError, TypeError) as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            MemoryMappedTensor.full(shape, fill_value=value, dtype=found)
        return
    assert raw(MemoryMappedTensor.full(shape, fill_value=value, dtype=found)) == raw(expected)
    like = MemoryMappedTensor.full_like(torch.empty(shape, dtype=found), value)
    assert raw(like) == raw(expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1 + 2j, 3])
def test_full_special_values(value):
    """Not-a-number, infinities, the negative zero and complex numbers keep their bits."""
    dtype = torch.complex64 if isinstance(value, complex) else torch.float32
    x = MemoryMappedTensor.full((1000,), fill_value=value, dtype=dtype)
    assert raw(x) == raw(torch.full((1000,), value, dtype=dtype))


def test_large_fill():
    """A large tensor has the value everywhere."""
    x = MemoryMappedTensor.full((3_000_001,), fill_value=7, dtype=torch.int16)
    assert torch.equal(x, torch.full((3_000_001,), 7, dtype=torch.int16))


@pytest.mark.parametrize("make", [MemoryMappedTensor.empty, MemoryMappedTensor.zeros])
@pytest.mark.parametrize(
    ("sizes", "keywords", "expected"),
    [
        ((2, 3), {}, (2, 3)),
        (((2, 3),), {}, (2, 3)),
        (([2, 3],), {}, (2, 3)),
        ((torch.Size([2, 3]),), {}, (2, 3)),
        ((4,), {}, (4,)),
        ((), {"shape": (2, 3)}, (2, 3)),
        ((), {"shape": 4}, (4,)),
        ((), {"shape": ()}, ()),
        (((),), {}, ()),
        ((0,), {}, (0,)),
        ((2, 0), {}, (2, 0)),
        ((np.int64(2), 3), {}, (2, 3)),
        ((torch.tensor([2, 3]),), {}, (2, 3)),
    ],
)
def test_sizes(make, sizes, keywords, expected):
    """Sizes come as integers, as one sequence, or as ``shape=``."""
    x = make(*sizes, **keywords)
    assert tuple(x.shape) == expected
    assert x.dtype is torch.float32


def test_full_value_by_position():
    """`full` takes its value after a sequence of sizes, as `torch.full` does."""
    assert MemoryMappedTensor.full((2, 3), 7.0).tolist() == [[7] * 3] * 2
    assert MemoryMappedTensor.full(2, 3, fill_value=7.0).shape == (2, 3)
    assert MemoryMappedTensor.full(shape=(2,), fill_value=0).tolist() == [0, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: MemoryMappedTensor.full((2, 3)),
        lambda: MemoryMappedTensor.full(2, 3),
        lambda: MemoryMappedTensor.full(shape=(2, 3)),
    ],
)
def test_full_without_a_value(call):
    """`full` without a value is a TypeError with an example."""
    with pytest.raises(TypeError, match="full needs a fill_value, for example"):
        call()


def test_full_like_nothing():
    """None is no value to fill with."""
    with pytest.raises(TypeError, match="fill_value|NoneType|must be Number"):
        MemoryMappedTensor.full_like(torch.ones(3), None)


@pytest.mark.parametrize("name", ["empty_like", "zeros_like", "ones_like", "full_like"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e5m2])
def test_like(path, name, dtype):
    """The ``*_like`` constructors take shape and dtype, contiguous, on a file or not."""
    arguments = (1,) if name == "full_like" else ()
    model = torch.zeros(4, 3, dtype=dtype).t()
    for filename in (None, path):
        x = getattr(MemoryMappedTensor, name)(model, *arguments, filename=filename)
        assert (tuple(x.shape), x.dtype, x.is_contiguous()) == ((3, 4), dtype, True)
        value = 0 if name in ("empty_like", "zeros_like") else 1
        assert raw(x) == raw(torch.full((3, 4), value, dtype=dtype))
    assert x.filename == path


def test_like_of_a_tensor_with_gradients():
    """Only shape and dtype of the model count: it may require gradients."""
    model = torch.ones(3, requires_grad=True)
    assert not MemoryMappedTensor.zeros_like(model).requires_grad


@pytest.mark.parametrize("name", ["empty_like", "zeros_like", "ones_like"])
@pytest.mark.parametrize("model", [[1, 2], 3, None, "x"])
def test_like_of_no_tensor(name, model):
    """A model that is no tensor is a TypeError."""
    with pytest.raises(TypeError, match="expected a torch tensor"):
        getattr(MemoryMappedTensor, name)(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_default_dtype(dtype):
    """Without a dtype, constructors use torch's default."""
    torch.set_default_dtype(dtype)
    try:
        assert MemoryMappedTensor.zeros(3).dtype is dtype
        assert MemoryMappedTensor.full((2,), fill_value=1).dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device(numbers, path):
    """A default device other than the CPU disturbs no constructor and no index."""
    file, values = numbers
    with torch.device("meta"):
        made = [
            MemoryMappedTensor.from_filename(file, "f4", (3, 4), mode=mode)
            for mode in ("r", "r+", "c")
        ]
        made.append(
            MemoryMappedTensor.from_tensor(made[0], filename=path + "2", copy_existing=True)
        )
        made.append(MemoryMappedTensor.from_numpy(values))
        ones = MemoryMappedTensor.ones(3, 4)
        ones += MemoryMappedTensor.full((3, 4), fill_value=-1)
        made.append(made[0][[0, 1, 2]])
        made.append(made[0][[True, True, True]])
        ones[[0, 2]] = made[0][[0, 2]]
        made[1].prefetch([0, 2])
        made[0].take([0, 1])
        bfloat = MemoryMappedTensor.zeros(3, dtype=torch.bfloat16)
        bfloat[[1]] = 2.0
    for x in made:
        assert x.device.type == "cpu"
        assert x.tolist() == values.tolist()
    assert ones[[0, 2]].tolist() == values[[0, 2]].tolist()
    assert bfloat.tolist() == [0, 2, 0]


# --- from_filename ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+", "c", None])
def test_from_filename(numbers, mode):
    """A file that NumPy wrote opens in every mode with its values."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, torch.float32, (3, 4), mode=mode)
    assert (x.mode, x.filename) == (mode or "r+", path)
    assert x.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("index", "expected"),
    [(0, [0, 1, 2, 3]), ((1, 2), 6), (slice(1), [[0, 1, 2, 3]]), ([2, 0], None), (..., None)],
)
def test_index_of_a_file(numbers, index, expected):
    """``index`` is applied to the result; an index of 0 is one."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), index)
    assert x.tolist() == (values[index].tolist() if expected is None else expected)


@pytest.mark.parametrize("mode", ["r", "r+", "c", None])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), -1, (-1, 3)])
def test_empty_files(path, mode, shape):
    """A file of no bytes opens in every mode, and everything works on it."""
    with open(path, "wb"):
        pass
    x = MemoryMappedTensor.from_filename(path, "f4", shape, mode=mode)
    assert x.numel() == 0
    assert x.numpy().size == x.sum() == 0
    assert x.clone().shape == x.t().t().shape if x.dim() == 2 else True
    x.flush()
    x.advise("dontneed")
    assert os.path.getsize(path) == 0


def test_offset_and_part(numbers):
    """An offset skips a header, and ``partial`` leaves a trailer."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (1, 4), mode="r+", offset=16, partial=True)
    assert x.tolist() == [values[1].tolist()]
    x[0, 0] = 50
    assert np.fromfile(path, "f4")[4] == 50
    assert os.path.getsize(path) == 48


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_unaligned_offset(numbers, offset):
    """An offset that is no multiple of the element size is a ValueError with the way out."""
    with pytest.raises(
        ValueError, match=rf"multiple of the 4 bytes .* got {offset}\. Open .*array"
    ):
        MemoryMappedTensor.from_filename(numbers[0], "f4", -1, offset=offset, partial=True)


def test_files_beyond_four_gigabytes(path):
    """Offsets beyond 4 GiB are exact, in the map and in the tensor."""
    with open(path, "wb") as file:
        file.truncate(5 << 30)
        file.seek((9 << 29) + 8)
        file.write(np.arange(4.0).tobytes())
    for mode in ("r", "r+", "c"):
        x = MemoryMappedTensor.from_filename(path, torch.float64, -1, mode=mode)
        assert x[(9 << 26) + 1 : (9 << 26) + 5].tolist() == [0, 1, 2, 3]
        part = MemoryMappedTensor.from_filename(
            path, torch.float64, 4, mode=mode, offset=(9 << 29) + 8, partial=True
        )
        assert part.tolist() == [0, 1, 2, 3]
        assert mmtensor.locate(x[-1]).offset == (5 << 30) - 8


# --- from_storage ----------------------------------------------------------------------


def test_from_storage():
    """A storage in memory becomes a tensor on the same memory, in the shape asked for."""
    plain = torch.arange(6.0)
    x = MemoryMappedTensor.from_storage(plain.untyped_storage(), dtype="f4", shape=(2, 3))
    assert type(x) is MemoryMappedTensor
    x[0, 0] = 50
    assert plain[0] == 50
    with pytest.raises(RuntimeError, match="this tensor has no file"):
        _ = x.filename
    assert MemoryMappedTensor.from_storage(plain.untyped_storage()).shape == (24,)
    assert MemoryMappedTensor.from_storage(plain.untyped_storage(), dtype="f4", index=1) == 1


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_from_typed_storage():
    """A typed storage brings its dtype."""
    x = MemoryMappedTensor.from_storage(torch.arange(6.0).storage(), shape=(2, 3))
    assert (x.dtype, x[1, 2]) == (torch.float32, 5)


def test_from_storage_of_a_file(numbers):
    """A storage that torch mapped from a file keeps it; a name that fits may be given."""
    path, values = numbers
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=48)
    for filename in (None, path):
        x = MemoryMappedTensor.from_storage(storage, dtype="f4", shape=(3, 4), filename=filename)
        assert (x.filename, x.mode, x.tolist()) == (path, "r+", values.tolist())
    again = MemoryMappedTensor.from_storage(x.untyped_storage(), dtype="f4", shape=12)
    assert again.filename == path


def test_from_storage_of_another_file(numbers, tmp_path):
    """A storage of another file than the one named is a RuntimeError."""
    path, values = numbers
    values.tofile(tmp_path / "y")
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=48)
    with pytest.raises(RuntimeError, match=r"is of the file .*x\.bin', not of filename=.*y"):
        MemoryMappedTensor.from_storage(storage, dtype="f4", filename=tmp_path / "y")


@pytest.mark.parametrize("private", [True, False])
def test_from_storage_that_is_no_map_of_the_file(numbers, private):
    """A private map, or memory, is not the file that is named: a RuntimeError."""
    path, _ = numbers
    storage = (
        torch.UntypedStorage.from_file(path, shared=False, nbytes=48)
        if private
        else torch.zeros(12).untyped_storage()
    )
    with pytest.raises(RuntimeError, match="is not a shared map of the file"):
        MemoryMappedTensor.from_storage(storage, dtype="f4", filename=path)


@pytest.mark.parametrize(
    ("storage", "keywords", "error", "message"),
    [
        (np.zeros(3), {}, TypeError, "expected a torch storage, got <class 'numpy.ndarray'>"),
        (torch.zeros(3), {}, TypeError, "expected a torch storage"),
        (torch.zeros(3).untyped_storage(), {"shape": 5}, ValueError, "storage must have 5 bytes"),
        (torch.zeros(3).untyped_storage(), {"dtype": "f8"}, ValueError, "whole rows of 8 bytes"),
        (torch.zeros(3).untyped_storage(), {"device": "cuda"}, RuntimeError, "lives on the CPU"),
        (torch.zeros(3).untyped_storage(), {"dtype": "f33"}, TypeError, "got 'f33'"),
    ],
)
def test_wrong_storage(storage, keywords, error, message):
    """What does not fit a storage is an error."""
    with pytest.raises(error, match=message):
        MemoryMappedTensor.from_storage(storage, **keywords)


# --- from_shared_memory ----------------------------------------------------------------


@pytest.fixture
def block():
    """Return a block of shared memory that the test owns."""
    shared = SharedMemory(create=True, size=64)
    yield shared
    shared.close()
    shared.unlink()


@pytest.mark.parametrize("by", ["name", "object"])
def test_from_shared_memory(block, by):
    """A block is attached by name or object: both sides see the same memory."""
    x = MemoryMappedTensor.from_shared_memory(
        block if by == "object" else block.name, "int64", 4, offset=16
    )
    x[1] = 5
    assert bytes(block.buf[24:32]) == (5).to_bytes(8, "little")
    assert x.mode == "r+"
    again = MemoryMappedTensor.from_shared_memory(block, "int64", 4, offset=16)
    assert again.data_ptr() == x.data_ptr()


def test_inferred_shape_of_a_block(block):
    """One size is inferred from the block."""
    assert MemoryMappedTensor.from_shared_memory(block, "int64", (-1, 2)).shape == (4, 2)


@pytest.mark.parametrize(
    ("what", "arguments", "error", "message"),
    [
        ("nowhere-to-be-found", ("i8", 1), FileNotFoundError, "no shared-memory block of this"),
        (None, ("i8", 9), ValueError, "block .* must have 72 bytes .* its size is 64 bytes"),
        (None, ("i8", -5), ValueError, "non-negative"),
        (None, ("i9", 1), TypeError, "got 'i9'"),
        (3, ("i8", 1), TypeError, "SharedMemory or its name, got 3"),
        (b"name", ("i8", 1), TypeError, "SharedMemory or its name, got b'name'"),
    ],
)
def test_wrong_blocks(block, what, arguments, error, message):
    """What does not fit a block is an error, and no descriptor is left."""
    before = settled_descriptors()
    with pytest.raises(error, match=message):
        MemoryMappedTensor.from_shared_memory(block if what is None else what, *arguments)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("offset", "message"),
    [(4, "multiple of the 8 bytes"), (-8, "non-negative"), (72, "beyond its end")],
)
def test_wrong_offsets_in_a_block(block, offset, message):
    """An offset that is unaligned, negative or beyond the end is a ValueError."""
    with pytest.raises(ValueError, match=message):
        MemoryMappedTensor.from_shared_memory(block, "i8", 1, offset=offset)


# --- the class itself ------------------------------------------------------------------


def test_class_of_a_file(numbers):
    """The class opens a file that it is given by name, with an index."""
    path, values = numbers
    x = MemoryMappedTensor(path, dtype="f4", shape=(3, 4), index=1)
    assert (x.filename, x.tolist()) == (path, values[1].tolist())


def test_class_of_data(path):
    """The class takes tensors, arrays and storages, and writes them where it is told to."""
    plain = torch.arange(3.0)
    x = MemoryMappedTensor(plain)
    assert type(x) is MemoryMappedTensor
    assert type(plain) is torch.Tensor
    assert x.data_ptr() == plain.data_ptr()
    assert MemoryMappedTensor(np.arange(3.0)).tolist() == [0, 1, 2]
    assert MemoryMappedTensor(plain.untyped_storage(), dtype="f4", shape=3).tolist() == [0, 1, 2]
    y = MemoryMappedTensor(plain, filename=path)
    assert (y.filename, y.tolist()) == (path, [0, 1, 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_class_writes_arrays_of_every_dtype(path, dtype):
    """An array of any dtype, read-only or not, is written to the file that is named."""
    array = mmtensor.to_numpy(torch.ones(3, dtype=getattr(torch, dtype)))
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = MemoryMappedTensor(array, filename=path)
    assert np.fromfile(path, np.uint8).tobytes() == array.tobytes()
    assert (x.filename, x.mode) == (path, "r+")


def test_class_copies_arrays_of_files(numbers, tmp_path):
    """An array of one file is written to another."""
    array = mmtensor.open_array(numbers[0], "f4", (3, 4))
    x = MemoryMappedTensor(array, filename=tmp_path / "y")
    assert (x.filename, x.tolist()) == (str(tmp_path / "y"), numbers[1].tolist())


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        (("x",), {"dtype": "f4"}, TypeError, "opening a file needs dtype and shape"),
        (("x",), {"shape": 3}, TypeError, "opening a file needs dtype and shape"),
        (("x",), {"filename": "y"}, TypeError, "two filenames"),
        ((torch.ones(3),), {"dtype": "f4"}, TypeError, "cannot be given with data that has one"),
        ((torch.ones(3),), {"shape": (2, 3)}, TypeError, "shape=.* goes with"),
        ((torch.ones(3, requires_grad=True),), {}, GradientError, "cannot require gradients"),
        ((torch.ones(3),), {"device": "cuda"}, ValueError, "lives on the CPU"),
        ((torch.ones(3),), {"device": "meta"}, RuntimeError, "lives on the CPU"),
        ((torch.ones(3, device="meta"),), {}, TypeError, "got one on the device 'meta'"),
        ((), {}, TypeError, "missing 1 required positional argument"),
        ((torch.ones(3),), {"mode": "r"}, TypeError, "unexpected keyword argument 'mode'"),
        (([1, 2],), {}, TypeError, "expected a torch tensor, got <class 'list'>"),
    ],
)
def test_wrong_arguments_of_the_class(arguments, keywords, error, message):
    """What the class cannot make a tensor of is an error that says why."""
    with pytest.raises(error, match=message):
        MemoryMappedTensor(*arguments, **keywords)


def test_constructors_under_inference_mode(path):
    """Constructors work under `torch.inference_mode`."""
    with torch.inference_mode():
        x = MemoryMappedTensor.from_tensor(torch.ones(3), filename=path)
        y = MemoryMappedTensor.from_filename(path, "f4", 3, mode="r")
        assert torch.equal(x, y)
