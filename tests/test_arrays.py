"""The NumPy side: open, create, save, locate."""

import copy
import os
import pickle
import sys

import numpy as np
import pytest
from conftest import descriptors, mapped, settled_descriptors
from hypothesis import given
from hypothesis import strategies as st

import mmtensor
from mmtensor.testing import arrays, shapes

MODES = ["r", "r+", "c"]


@given(arrays(), st.sampled_from(MODES))
def test_round_trip(tmp_path, array, mode):
    """What `save_array` writes is what `np.fromfile` reads and `open_array` opens."""
    path = mmtensor.save_array(tmp_path / "x", array, existsok=True)
    assert path.read_bytes() == array.tobytes()
    opened = mmtensor.open_array(path, array.dtype, array.shape, mode=mode)
    assert (opened.dtype, opened.shape) == (array.dtype, array.shape)
    assert opened.tobytes() == array.tobytes()
    assert opened.flags.c_contiguous


@given(arrays(), st.data())
def test_layouts(tmp_path, array, data):
    """A transposed, reversed or strided array is saved in C order of its elements."""
    axes = data.draw(st.permutations(range(array.ndim)))
    view = array.transpose(axes)[tuple(slice(None, None, -1) for _ in axes)]
    path = mmtensor.save_array(tmp_path / "x", view, existsok=True)
    assert path.read_bytes() == np.ascontiguousarray(view).tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(1_500_000, dtype=">f4"),
        np.arange(3_000_000, dtype="f4")[::2],
        np.arange(3_000_000, dtype="f4")[::-1],
        np.asfortranarray(np.arange(3_000_000, dtype="f8").reshape(3, 1_000_000)),
        np.broadcast_to(np.arange(1_200_000.0), (2, 1_200_000)),
        np.arange(3_000_000, dtype="f8").reshape(1, 1, 3, 1_000_000)[..., ::2],
    ],
    ids=["foreign", "strided", "reversed", "fortran", "broadcast", "nested"],
)
def test_large_conversions(tmp_path, array):
    """Arrays that are converted piece by piece arrive whole."""
    path = mmtensor.save_array(tmp_path / "x", array)
    expected = array.astype(array.dtype.newbyteorder("="))
    np.testing.assert_array_equal(np.fromfile(path, expected.dtype), expected.reshape(-1))


@pytest.mark.parametrize(
    "value", [3.5, [1, 2, 3], [[True, False]], np.float32(2), np.arange(4).reshape(2, 2)]
)
def test_save_what_numpy_takes(tmp_path, value):
    """Numbers and lists are saved as the arrays that NumPy makes of them."""
    path = mmtensor.save_array(tmp_path / "x", value)
    assert path.read_bytes() == np.asarray(value).tobytes()


@pytest.mark.parametrize(
    "dtype", [">f4", "<f4", "M8[us]", "S5", "U3", [("a", "<i2"), ("b", "f8")]]
)
def test_plain_numpy_dtypes(tmp_path, dtype):
    """Structures, dates, strings and foreign byte order open as arrays."""
    data = np.arange(24, dtype=np.uint8).tobytes() * np.dtype(dtype).itemsize
    (tmp_path / "x").write_bytes(data)
    array = mmtensor.open_array(tmp_path / "x", dtype, (4, 6))
    assert array.dtype == np.dtype(dtype)
    assert array.tobytes() == data


def test_foreign_byte_order_is_saved_native(tmp_path):
    """A saved file is in the byte order of this machine."""
    path = mmtensor.save_array(
        tmp_path / "x", np.array([1, 2], ">i4" if sys.byteorder == "little" else "<i4")
    )
    assert np.fromfile(path, "i4").tolist() == [1, 2]


def test_objects_are_refused(tmp_path, unchanged):
    """An array of Python objects is a TypeError, and no file appears."""
    with unchanged(), pytest.raises(TypeError, match="whose elements are Python objects"):
        mmtensor.save_array(tmp_path / "x", np.array([{}, []], object))


def test_masked_arrays_are_refused(tmp_path, unchanged):
    """A masked array is a TypeError: a raw file has no room for its mask."""
    array = np.ma.masked_array([1, 2], [False, True])
    with unchanged(), pytest.raises(TypeError, match="mask.*filled"):
        mmtensor.save_array(tmp_path / "x", array)


@pytest.mark.parametrize("mode", MODES)
def test_modes(numbers, mode):
    """``r`` cannot be written to, ``r+`` reaches the file, ``c`` stays private."""
    path, values = numbers
    array = mmtensor.open_array(path, "f4", (3, 4), mode=mode)
    if mode == "r":
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 9
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag to True"):
            array.flags.writeable = True
    else:
        array[0, 0] = 9
        assert array[0, 0] == 9
    expected = values.copy()
    expected[0, 0] = 9 if mode == "r+" else 0
    np.testing.assert_array_equal(np.fromfile(path, "f4").reshape(3, 4), expected)


def test_default_mode_is_read_only(numbers):
    """Without a mode an array is opened ``r``."""
    assert mmtensor.open_array(numbers[0], "f4").mode == "r"


@pytest.mark.parametrize("mode", MODES)
def test_attributes(numbers, mode):
    """The array has NumPy's attributes, and its views have them too."""
    path, _ = numbers
    array = mmtensor.open_array(path, "f4", (2, 4), mode=mode, offset=16)
    for view in (array, array[1], array.T):
        assert isinstance(view, np.memmap)
        assert (view.filename, view.offset, view.mode) == (path, 16, mode)
        view.flush()


def test_holds_no_descriptor(numbers):
    """An open array holds no descriptor, and dropped it leaves no map."""
    path, _ = numbers
    before = settled_descriptors()
    array = mmtensor.open_array(path, "f4", mode="r+")
    view = array[3:5]
    assert (descriptors(), mapped(path)) == (before, 1)
    del array
    assert (view.tolist(), mapped(path)) == ([3, 4], 1)
    del view
    assert mapped(path) == 0


def test_results_are_regular_arrays(numbers):
    """Arithmetic, copies and pickles are regular arrays with the values."""
    array = mmtensor.open_array(numbers[0], "f4", (3, 4))
    for result in (array + 1, array.copy(), copy.deepcopy(array), copy.copy(array)):
        result[...] = 0
        assert result.base is None or not isinstance(result.base, np.memmap)
    again = pickle.loads(pickle.dumps(array[1:, ::2]))
    assert type(again) is np.ndarray
    np.testing.assert_array_equal(again, numbers[1][1:, ::2])
    assert array.sum() == numbers[1].sum()
    np.testing.assert_array_equal(array, numbers[1])


def test_fortran_order(numbers):
    """``order="F"`` reads the same bytes with the first index fastest."""
    path, values = numbers
    array = mmtensor.open_array(path, "f4", (4, -1), order="F")
    assert array.flags.f_contiguous
    np.testing.assert_array_equal(array, values.T)


def test_unknown_order(numbers):
    """Another order is a ValueError."""
    with pytest.raises(ValueError, match='order must be "C" or "F", got \'A\''):
        mmtensor.open_array(numbers[0], "f4", order="A")


@pytest.mark.parametrize("offset", [0, 1, 4, 47, 48, np.int64(8)])
def test_offset(numbers, offset):
    """An offset may be any number of bytes up to the end of the file."""
    path, values = numbers
    array = mmtensor.open_array(path, "u1", offset=offset)
    assert array.tobytes() == values.tobytes()[offset:]


@given(shapes(min_dims=1, max_dims=3), st.data())
def test_inferred_size(tmp_path, shape, data):
    """One -1 in the shape is inferred from the size of the file."""
    values = np.zeros(shape, "i2")
    mmtensor.save_array(tmp_path / "x", values, existsok=True)
    position = data.draw(st.integers(0, len(shape) - 1))
    asked = (*shape[:position], -1, *shape[position + 1 :])
    opened = mmtensor.open_array(tmp_path / "x", "i2", asked)
    if 0 not in asked:
        assert opened.shape == shape
    assert opened.size == values.size


def test_partial(numbers):
    """With ``partial=True`` the file may be longer, and never shorter."""
    path, _ = numbers
    assert mmtensor.open_array(path, "f4", 5, partial=True).tolist() == [0, 1, 2, 3, 4]
    assert mmtensor.open_array(path, "u1", (-1, 5), partial=True).shape == (9, 5)
    with pytest.raises(ValueError, match="must have 52 bytes .* its size is 48 bytes"):
        mmtensor.open_array(path, "f4", 13, partial=True)


@pytest.mark.parametrize("mode", [*MODES, None])
@pytest.mark.parametrize("shape", [-1, 0, (0, 3), (3, 0), (-1, 3)])
def test_empty_file(path, mode, shape):
    """A file of no bytes opens in every mode with a shape of no elements."""
    with open(path, "wb"):
        pass
    array = mmtensor.open_array(path, "f4", shape, mode=mode)
    assert array.size == 0
    assert os.path.getsize(path) == 0
    array.flush()


@pytest.mark.parametrize("mode", MODES)
def test_zero_dimensions(path, mode):
    """A shape of no dimensions is one element."""
    mmtensor.save_array(path, np.float64(2.5))
    array = mmtensor.open_array(path, float, (), mode=mode)
    assert (array.shape, float(array)) == ((), 2.5)


def test_create(path):
    """A created array is all zeros, writable, and its file is there with its full size."""
    array = mmtensor.create_array(path, "int16", (3, 4))
    assert (array.mode, array.any(), os.path.getsize(path)) == ("r+", False, 24)
    array[1] = 7
    assert np.fromfile(path, "i2").reshape(3, 4)[1].tolist() == [7] * 4


@pytest.mark.parametrize("shape", [(), 0, (0, 5), (2, 0)])
def test_create_small(path, shape):
    """Arrays without dimensions or elements can be created."""
    array = mmtensor.create_array(path, "f4", shape)
    assert array.size == os.path.getsize(path) // 4


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (-1, "non-negative"),
        ((2, -3), "non-negative"),
        ((2**62, 2), "at most"),
        ((2**40, 2**40, 0), "at most"),
        ((1,) * 65, "at most 64 dimensions"),
    ],
)
def test_create_impossible_shapes(path, unchanged, shape, message):
    """A shape that cannot be is a ValueError, and no file appears."""
    with unchanged(), pytest.raises(ValueError, match=message):
        mmtensor.create_array(path, "f4", shape)


def test_created_file_is_the_one_that_opens(path):
    """Opening a file that was just created shares its mapping."""
    array = mmtensor.create_array(path, "f4", 3)
    again = mmtensor.open_array(path, "f4", 3, mode="r+")
    assert again.ctypes.data == array.ctypes.data


def test_sparse_files(run, path):
    """A file of 64 GiB, more than memory, opens in every mode, and its end is in reach."""
    with open(path, "wb") as file:
        file.truncate(64 << 30)
        file.seek(-8, 2)
        file.write(np.int64(77).tobytes())
    program = """
        import sys, mmtensor
        for mode in ("r", "c", "r+"):
            array = mmtensor.open_array(sys.argv[1], "i8", mode=mode)
            assert array.shape == (1 << 33,)
            value = int(array[-1])
            if mode != "r":
                array[-1] = value + 1
            print(mode, value, int(array[-1]))
    """
    assert run(program, path).splitlines() == ["r 77 77", "c 77 78", "r+ 77 78"]
    assert os.stat(path).st_blocks * 512 < 1 << 20


def test_locate_views(numbers):
    """`locate` gives path, mode, offset, dtype, shape and strides of any view."""
    path, _ = numbers
    array = mmtensor.open_array(path, "f4", (2, 4), mode="c", offset=16)
    where = mmtensor.locate(array[1:, ::-2].T)
    assert where == mmtensor.Location(path, "c", 16 + 16 + 12, np.dtype("f4"), (2, 1), (-8, 16))
    assert mmtensor.locate(np.asarray(array).view("u1")).offset == 16
    assert mmtensor.locate(array[:0]).shape == (0, 4)


@given(arrays(dtype="int16", shape=(4, 5)), st.data())
def test_location_is_true(tmp_path, array, data):
    """Reading the file where `locate` says gives the values of the view."""
    mmtensor.save_array(tmp_path / "x", array, existsok=True)
    opened = mmtensor.open_array(tmp_path / "x", "i2", (4, 5))
    steps = st.sampled_from([slice(None), slice(1, 4), slice(None, None, -1), slice(0, 4, 2), 2])
    view = opened[data.draw(steps), data.draw(steps)]
    if not isinstance(view, np.ndarray):
        return
    where = mmtensor.locate(view)
    content = np.frombuffer((tmp_path / "x").read_bytes(), np.uint8)
    there = np.ndarray(where.shape, where.dtype, content, where.offset, where.strides)
    np.testing.assert_array_equal(there, view)


@pytest.mark.parametrize("thing", [np.zeros(3), np.zeros(0), np.array(1.0)])
def test_locate_elsewhere(thing):
    """Memory that no mapping holds is nowhere."""
    assert mmtensor.locate(thing) is None


@pytest.mark.parametrize("thing", [None, [1, 2], "x", 3.0, memoryview(b"ab")])
def test_locate_wrong_things(thing):
    """Only arrays and tensors can be located."""
    with pytest.raises(TypeError, match="locate takes a NumPy array or a torch tensor, got"):
        mmtensor.locate(thing)


class TestResults:
    """What comes of an opened array is what comes of a regular one, but for views."""

    @pytest.fixture
    def x(self, tmp_path):
        """Return an opened array and a regular one with the same values."""
        values = np.arange(6, dtype="f4").reshape(2, 3)
        values.tofile(tmp_path / "x.bin")
        return mmtensor.open_array(tmp_path / "x.bin", "f4", (2, 3), mode="c"), values

    @pytest.mark.parametrize(
        "operation",
        [
            lambda x: x + 1,
            lambda x: x > 2,
            lambda x: x @ x.T,
            np.sqrt,
            lambda x: x[[0, 1]],
            lambda x: x[x > 3],
            lambda x: x[x > 30],
            lambda x: x.sum(axis=0),
            lambda x: x.sum(),
            lambda x: x.max(),
            lambda x: x.mean(),
            np.std,
            lambda x: x[1, 2],
            lambda x: {x.min(): 1}[x.min()],
        ],
    )
    def test_copies_are_regular(self, x, operation):
        """Arithmetic, gathering and reductions give regular arrays and scalars."""
        found, expected = operation(x[0]), operation(x[1])
        assert type(found) is type(expected)
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize(
        "view", [lambda x: x[0], lambda x: x[:, 1:], lambda x: x.T, lambda x: x[...], np.ravel]
    )
    def test_views_keep_their_class(self, x, view):
        """Views are of the class, and know their file."""
        array = view(x[0])
        assert type(array) is mmtensor.MemoryMappedArray
        assert (array.filename, array.mode) == (x[0].filename, "c")

    def test_targets_keep_their_class(self, x):
        """What is written to stays what it is."""
        array = x[0]
        assert np.add(array, 1, out=array) is array
        before = array
        array += 1
        assert array is before
        np.testing.assert_array_equal(array, x[1] + 2)
