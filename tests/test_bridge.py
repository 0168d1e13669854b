"""The bridge between NumPy and torch: every dtype, both directions, zero-copy."""

import os
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmtensor
from mmtensor import DtypeError, MemoryMappedTensor, to_numpy, to_torch
from mmtensor.dtypes import DTYPES, numpy_dtype
from mmtensor.testing import arrays, chains, dtypes, tensors


@given(arrays())
def test_to_torch(array):
    """A writeable array of any dtype becomes a regular tensor on the same memory."""
    tensor = to_torch(array, copy=False)
    assert type(tensor) is torch.Tensor
    assert tensor.dtype is getattr(torch, array.dtype.name)
    assert tuple(tensor.shape) == array.shape
    assert bytes(tensor.clone().untyped_storage()) == array.tobytes()
    if array.size:
        assert tensor.data_ptr() == array.ctypes.data
        array.reshape(-1).view(np.uint8)[:1] ^= 1
        assert bytes(tensor.clone().untyped_storage()) == array.tobytes()


@given(tensors())
def test_to_numpy(tensor):
    """A tensor of any dtype and layout becomes an array on the same memory."""
    array = to_numpy(tensor, copy=False)
    assert array.dtype == numpy_dtype(tensor.dtype)
    assert array.shape == tuple(tensor.shape)
    assert array.size == 0 or array.strides == tuple(
        step * tensor.itemsize for step in tensor.stride()
    )
    contiguous = tensor.clone(memory_format=torch.contiguous_format)
    assert array.tobytes() == bytes(contiguous.untyped_storage())
    assert array.size == 0 or array.ctypes.data == tensor.data_ptr()


@given(arrays())
def test_there_and_back(array):
    """An array comes back from torch as the same memory, dtype and shape."""
    again = to_numpy(to_torch(array, copy=False), copy=False)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert array.size == 0 or again.ctypes.data == array.ctypes.data
    assert again.flags.writeable


@given(arrays(), st.sampled_from(["r", "r+", "c"]), st.data())
def test_files_both_ways(tmp_path, array, mode, data):
    """Arrays and tensors of files cross in both directions with file, mode and geometry."""
    mmtensor.save_array(tmp_path / "x", array, existsok=True)
    opened = mmtensor.open_array(tmp_path / "x", array.dtype, array.shape, mode=mode)
    x = to_torch(opened, copy=False)
    assert type(x) is MemoryMappedTensor
    assert (x.filename, x.mode) == (str(tmp_path / "x"), mode)
    view = data.draw(chains(array.shape))(x)
    back = to_numpy(view, copy=False)
    assert back.flags.writeable == (mode != "r")
    assert back.size == 0 or mmtensor.locate(back) == mmtensor.locate(view)
    assert to_torch(back, copy=False).untyped_storage() is x.untyped_storage()


@given(dtypes(), st.sampled_from(["r+", "c"]))
def test_writes_go_both_ways(tmp_path, name, mode):
    """A write on one side is seen on the other, in every dtype."""
    x = MemoryMappedTensor.zeros(4, dtype=name, filename=tmp_path / "x", existsok=True)
    x = MemoryMappedTensor.from_filename(tmp_path / "x", name, 4, mode=mode)
    array = to_numpy(x)
    one = np.ones((), array.dtype)
    array[1] = one
    x[2] = torch.ones((), dtype=x.dtype)
    expected = [x[0].item(), 1, 1, x[0].item()]
    assert [item.item() for item in x] == expected
    assert array.tolist() == expected
    raw = np.fromfile(tmp_path / "x", np.uint8)
    assert (raw.tobytes() == array.tobytes()) == (mode == "r+")


@pytest.mark.parametrize("name", DTYPES)
def test_values_agree(name):
    """Both sides read the same numbers from the same bytes."""
    array = np.arange(1, 7).astype(numpy_dtype(name))
    tensor = to_torch(array)
    if name.startswith("complex"):
        assert tensor.tolist() == array.tolist()
    else:
        assert tensor.double().tolist() == array.astype(float).tolist()


@pytest.mark.parametrize("name", DTYPES)
def test_doors_of_a_tensor(name, path):
    """`np.asarray`, ``x.numpy()`` and `from_numpy` are zero-copy in every dtype."""
    x = MemoryMappedTensor.ones(3, dtype=name, filename=path)
    for array in (np.asarray(x), x.numpy(), to_numpy(x)):
        assert array.ctypes.data == x.data_ptr()
        assert array.dtype == numpy_dtype(name)
    again = MemoryMappedTensor.from_numpy(x.numpy())
    assert (again.data_ptr(), again.filename) == (x.data_ptr(), path)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0)[::-1],
        np.arange(6.0).reshape(2, 3)[:, ::-1],
        np.zeros(3, [("a", "i1"), ("b", "f4")])["b"],
        np.frombuffer(bytearray(25), "f8", offset=1),
        np.arange(4, dtype=ml_dtypes.bfloat16)[::-1],
    ],
    ids=["reversed", "reversed columns", "packed field", "unaligned", "reversed bfloat16"],
)
@pytest.mark.parametrize("writeable", [True, False])
def test_copies_where_it_must(array, writeable):
    """What torch cannot describe is copied, unless copying is forbidden."""
    array = array.view()
    array.flags.writeable = writeable
    tensor = to_torch(array)
    np.testing.assert_array_equal(to_numpy(tensor), array)
    assert not np.shares_memory(to_numpy(tensor), array)
    assert tensor.data_ptr() % tensor.itemsize == 0
    with pytest.raises(ValueError, match="copy=False, but a copy is needed"):
        to_torch(array, copy=False)
    with pytest.raises(ValueError, match=r"Pass a copy: array\.copy\(\)"):
        MemoryMappedTensor.from_numpy(array)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_copy_on_demand(name):
    """``copy=True`` always copies, in both directions, into writeable memory."""
    array = np.ones(3, numpy_dtype(name))
    array.flags.writeable = False
    tensor = to_torch(array, copy=True)
    assert type(tensor) is torch.Tensor
    tensor[0] = 2
    again = to_numpy(tensor, copy=True)
    again[1] = 3
    assert (array.tolist(), tensor.tolist(), again.tolist()) == ([1] * 3, [2, 1, 1], [2, 3, 1])
    x = MemoryMappedTensor.from_numpy(array)
    assert to_numpy(x, copy=True).flags.writeable
    assert np.array(x).flags.writeable


def test_read_only_arrays():
    """A read-only array becomes a read-only tensor, which no regular tensor can be."""
    array = np.broadcast_to(np.arange(3.0), (2, 3))
    x = to_torch(array, copy=False)
    assert (type(x), x.mode) == (MemoryMappedTensor, "r")
    assert x.sum() == 6
    with pytest.raises(RuntimeError, match="the array that it stands on is not writeable"):
        x += 1
    x = to_torch(array[0], copy=False)
    with pytest.raises(RuntimeError, match="data pointer"):
        torch._foreach_add_([x], 1)


def test_conjugated_views():
    """A conjugated or negated view is copied with its values, unless that is forbidden."""
    z = MemoryMappedTensor.from_tensor(torch.tensor([1 + 2j, 3 - 4j]))
    for view in (z.conj(), torch.conj(z), z.conj().imag):
        expected = view.resolve_conj().resolve_neg().tolist()
        assert to_numpy(view).tolist() == expected
        with pytest.raises(ValueError, match="conjugated or negated view"):
            to_numpy(view, copy=False)
    with pytest.raises(RuntimeError, match=r"conjugate bit .* x\.resolve_conj\(\)\.numpy\(\)"):
        z.conj().numpy()
    with pytest.raises(RuntimeError, match=r"negative bit .* x\.resolve_neg\(\)\.numpy\(\)"):
        z.conj().imag.numpy()
    assert z.conj().numpy(force=True).tolist() == [1 - 2j, 3 + 4j]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(2, ">f4" if sys.byteorder == "little" else "<f4"), r"newbyteorder\('='\)"),
        (np.zeros(2, "M8[s]"), 'Open it as "int64"'),
        (np.zeros(2, [("a", "i4")]), "one field at a time"),
        (np.array(["a"]), 'Open it as "uint8"'),
        (np.array([None]), "Python objects"),
        (np.zeros(2, np.longdouble), "array.astype"),
        (np.zeros(2, ml_dtypes.int4), "array.astype"),
    ],
)
def test_dtypes_that_torch_lacks(array, message):
    """A dtype that torch has not is a TypeError that names the way out."""
    for door in (to_torch, MemoryMappedTensor.from_numpy):
        with pytest.raises(DtypeError, match=message):
            door(array)


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (np.ones(3), TypeError, "to_numpy takes a torch tensor, got <class 'numpy.ndarray'>"),
        ([1], TypeError, "to_numpy takes a torch tensor"),
        (torch.ones(3, requires_grad=True), RuntimeError, r"Pass x\.detach\(\)"),
        (torch.eye(3).to_sparse(), TypeError, r"Use x\.to_dense\(\)"),
        (torch.empty(2, dtype=torch.bits8), DtypeError, "got torch.bits8"),
    ],
)
def test_what_has_no_array(tensor, error, message):
    """What has no array is an error that says why."""
    with pytest.raises(error, match=message):
        to_numpy(tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    """A nested tensor has no array and no place: a TypeError, and None, in both layouts."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(TypeError, match="expected a dense tensor, got"):
        to_numpy(nested)
    assert mmtensor.locate(nested) is None


@pytest.mark.parametrize("thing", [torch.ones(3), [1.0], 3, None, "x"])
def test_what_is_no_array(thing):
    """`to_torch` takes arrays only."""
    with pytest.raises(TypeError, match="to_torch takes a NumPy array, got"):
        to_torch(thing)


def test_masked_arrays():
    """A masked array is refused: its mask would be lost."""
    array = np.ma.masked_array([1.0, 2.0], [True, False])
    for door in (to_torch, MemoryMappedTensor.from_numpy):
        with pytest.raises(TypeError, match=r"room for its mask\. Pass array\.filled"):
            door(array)


@pytest.mark.parametrize("mode", ["r", "r+", "c", "w+"])
def test_numpy_memmap(numbers, mode):
    """A `numpy.memmap` keeps its file and what its mode means, slices too."""
    path, values = numbers
    array = np.memmap(path, np.float32, mode, shape=(3, 4))
    array_mode = "r+" if mode == "w+" else mode
    if mode == "w+":
        array[...] = values
    for view, expected in ((array, values), (array[1:, 2:], values[1:, 2:])):
        for x in (to_torch(view, copy=False), MemoryMappedTensor.from_numpy(view)):
            assert type(x) is MemoryMappedTensor
            assert (x.filename, x.mode) == (path, array_mode)
            np.testing.assert_array_equal(x.numpy(), expected)
    x = MemoryMappedTensor.from_numpy(array)
    if array_mode == "r":
        with pytest.raises(RuntimeError, match='opened with mode "r"'):
            x[0, 0] = 50
        return
    x[0, 0] = 50
    assert array[0, 0] == 50
    assert np.fromfile(path, "f4")[0] == (50 if array_mode == "r+" else 0)


def test_numpy_memmap_with_offset(numbers):
    """A `numpy.memmap` that begins in the middle of its file is found where it is."""
    path, values = numbers
    array = np.memmap(path, np.float32, "r+", offset=16, shape=(2, 4))[:, 1:]
    x = MemoryMappedTensor.from_numpy(array)
    assert mmtensor.locate(x).offset == 20
    np.testing.assert_array_equal(x.numpy(), values[1:, 1:])


def test_numpy_memmap_of_a_replaced_file(numbers):
    """A `numpy.memmap` whose file was replaced keeps its own bytes."""
    path, values = numbers
    array = np.memmap(path, np.float32, "r+", shape=(3, 4))
    mmtensor.save_array(path, values + 100, existsok=True)
    x = MemoryMappedTensor.from_numpy(array)
    np.testing.assert_array_equal(x.numpy(), values)
    x[0, 0] = 9
    assert array[0, 0] == 9
    np.testing.assert_array_equal(np.fromfile(path, "f4").reshape(3, 4), values + 100)


def test_array_that_was_made_read_only(numbers):
    """An array of an ``r+`` file whose flag was cleared gives a read-only tensor of the file."""
    path, _ = numbers
    array = mmtensor.open_array(path, "f4", (3, 4), mode="r+")[1:]
    array.flags.writeable = False
    x = MemoryMappedTensor.from_numpy(array)
    assert (x.mode, x.filename, mmtensor.locate(x).offset) == ("r", path, 16)
    with pytest.raises(RuntimeError, match='opened with mode "r"'):
        x.zero_()
    assert array.tolist() == x.tolist()


def test_array_protocol(numbers):
    """`np.asarray` with a dtype copies where it must, and refuses where it may not."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r")
    assert np.asarray(x, dtype=float).dtype == float
    assert np.asarray(x, dtype="f4").ctypes.data == x.data_ptr()
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(x, dtype=float, copy=False)


def test_dlpack(numbers):
    """DLPack is zero-copy in both directions, and NumPy learns that ``r`` is read-only."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r")
    array = np.from_dlpack(x)
    assert not array.flags.writeable
    assert array.ctypes.data == x.data_ptr()
    with pytest.raises(BufferError, match="from_dlpack ignores that memory is read-only"):
        torch.from_dlpack(x)
    y = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r+")
    torch.from_dlpack(y)[0, 0] = 50
    assert np.fromfile(path, "f4")[0] == 50
    np.testing.assert_array_equal(array[1:], values[1:])


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_where_arrays_of_numpy_are(tmp_path, mode):
    """The position in the file counts from its start, whoever has opened it, views included."""
    path = str(tmp_path / "x")
    np.arange(100, dtype="f4").tofile(path)
    opened = np.memmap(path, np.float32, mode, offset=40, shape=80)
    if mode == "r+":
        os.replace(shutil.copy(path, f"{path}2"), path)  # no second map of it can be made
    for array in (opened, opened[10:], opened[10:][::3], np.asarray(opened)[10:20]):
        x = MemoryMappedTensor.from_numpy(array)
        where = mmtensor.locate(x[1:])
        assert (where.path, where.mode) == (path, mode)
        with open(path, "rb") as file:
            file.seek(where.offset)
            assert np.frombuffer(file.read(4), "f4").item() == x[1]
