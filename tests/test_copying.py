"""Rows and elements that lie far apart, and what is left to others."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from mmtensor import JaggedTensor, MemoryMappedTensor, copying
from mmtensor.copying import copied

_copying = pytest.importorskip("mmtensor._copying", reason="nothing was compiled")

INT64 = np.int64


@pytest.mark.parametrize("row", [1, 63, 512, 1024, 1025, 5000])
@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_copy_rows(row, count):
    """Rows are copied by their numbers, and nothing beside them."""
    random = np.random.default_rng(row)
    source = random.integers(0, 255, (50, row), np.uint8)
    ids = random.integers(0, 50, count)
    target = np.full((count + 1, row), 7, np.uint8)
    arguments = target.ctypes.data, source.ctypes.data, ids.ctypes.data, count, row
    assert _copying.copy_rows(*arguments, 50) is True
    np.testing.assert_array_equal(target[:-1], source[ids])
    assert (target[-1] == 7).all()


@pytest.mark.parametrize("bad", [-1, 50, 1 << 62, -(1 << 63)])
@pytest.mark.parametrize("place", [0, 5, 9])
def test_copy_rows_that_are_not_there(bad, place):
    """If one of them does not exist, none is copied."""
    source, target = np.ones((50, 600), np.uint8), np.zeros((10, 600), np.uint8)
    ids = np.arange(10)
    ids[place] = bad
    arguments = target.ctypes.data, source.ctypes.data, ids.ctypes.data, 10, 600
    assert _copying.copy_rows(*arguments, 50) is False
    assert not target.any()


def test_copy_rows_wrong_arguments():
    """They are refused before anything is touched."""
    with pytest.raises(TypeError, match="takes 6 arguments, got 1"):
        _copying.copy_rows(1)
    for arguments in ((0, 0, 0, -1, 1, 1), (0, 0, 0, 1, 0, 1), (0, 0, 0, 1, 1, -1)):
        with pytest.raises(OverflowError, match="is out of range"):
            _copying.copy_rows(*arguments)


def elements(shapes, dtype=np.uint8):
    """Return the parts of a jagged tensor with elements of some shapes."""
    table = np.array(shapes, INT64).reshape(len(shapes), -1)
    offsets = np.concatenate(([0], np.cumsum(table.prod(1))))
    values = np.random.default_rng(0).integers(0, 200, offsets[-1]).astype(dtype)
    return values, offsets, table


def look_up(ids, offsets, shapes, total):
    """Return whether it succeeds, and what it writes."""
    n, ndim = len(ids), shapes.shape[1]
    found = np.empty(n, INT64), np.empty(n + 1, INT64), np.empty((n, ndim), INT64)
    return _copying.look_up(total, ids, offsets, shapes, *found), *found


def copy_ranges(values, starts, offsets, room=None):
    """Return whether it succeeds, and what it writes, in front of what must stay as it is."""
    size = values.itemsize
    target = np.full(max(int(offsets[-1]), 0) * size + 64, 7, np.uint8)
    room = len(target) - 64 if room is None else room
    done = _copying.copy_ranges(target.ctypes.data, room, size, values, starts, offsets)
    assert (target[-64:] == 7).all()
    return done, target[:-64].view(values.dtype)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 700)), min_size=1, max_size=20),
    st.sampled_from([np.uint8, np.int16, np.float32, np.float64, np.complex128]),
    st.data(),
)
def test_elements(shapes, dtype, data):
    """Elements are found and copied as NumPy would, whatever their sizes."""
    values, offsets, table = elements(shapes, dtype)
    numbers = st.lists(st.integers(0, len(shapes) - 1), max_size=30)
    ids = np.array(data.draw(numbers), INT64)
    found, starts, picked, sizes = look_up(ids, offsets, table, len(values))
    assert found
    np.testing.assert_array_equal(starts, offsets[ids])
    np.testing.assert_array_equal(np.diff(picked), np.diff(offsets)[ids])
    np.testing.assert_array_equal(sizes, table[ids])
    pieces = [values[offsets[i] : offsets[i + 1]] for i in ids]
    if len(ids):
        done, target = copy_ranges(values, starts, picked)
        assert done
        np.testing.assert_array_equal(target, np.concatenate(pieces))


DAMAGE = {
    "before the values": ("offsets", 3, -1),
    "beyond the values": ("offsets", 4, 10_000),
    "far beyond": ("offsets", 4, 2**63 - 1),
    "far before": ("offsets", 3, -(2**63)),
    "backwards": ("offsets", 4, 1),
    "before the values, of the right size": ("offsets", slice(3, 5), (-4, 4)),
    "beyond the values, of the right size": ("offsets", slice(7, 9), (60, 68)),
    "negative size": ("shapes", (3, 0), -4),
    "two negative sizes": ("shapes", 3, (-4, -2)),
    "another size": ("shapes", (3, 0), 3),
    "overflowing size": ("shapes", (3, 0), 2**63 - 1),
    "overflow to what is right": ("shapes", 3, (2**62 + 2, 4)),
    "no such element": ("ids", 2, 8),
    "negative number": ("ids", 2, -1),
    "far away": ("ids", 2, 2**62),
    "other side": ("ids", 2, -(2**63)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_elements(damage):
    """Whatever is wrong with one element, it is for Python to say."""
    values, offsets, shapes = elements([(4, 2)] * 8)
    ids = np.array([0, 7, 3, 3], INT64)
    part, place, value = DAMAGE[damage]
    {"offsets": offsets, "shapes": shapes, "ids": ids}[part][place] = value
    assert not look_up(ids, offsets, shapes, len(values))[0]


def test_too_many_numbers():
    """As many as no memory has: their sum does not overflow."""
    offsets, shapes = np.array([0, 2**62 + 1]), np.array([[2**62 + 1]])
    assert look_up(np.zeros(1, INT64), offsets, shapes, 2**63 - 1)[0]
    assert not look_up(np.zeros(2, INT64), offsets, shapes, 2**63 - 1)[0]


def test_memory_is_let_go():
    """Nothing holds the memory of arrays afterwards, taken or refused."""
    values, offsets, shapes = elements([(2, 3)] * 5)
    room = [bytearray(8 * n) for n in (2, 3, 4)]
    arrays = [bytearray(np.arange(2)), bytearray(offsets), bytearray(shapes)]
    words = [memoryview(array).cast("q") for array in (*arrays, *room)]
    assert _copying.look_up(len(values), *words)
    for bad in range(6):
        refused = [*words]
        refused[bad] = arrays[0]  # of bytes
        assert not _copying.look_up(len(values), *refused)
    source, target = bytearray(values), np.empty(12, np.uint8)
    call = target.ctypes.data, 12, 1
    assert _copying.copy_ranges(*call, source, words[3], words[4])
    assert not _copying.copy_ranges(*call, source, arrays[0], words[4])
    assert not _copying.copy_ranges(*call, source, words[3], arrays[0])
    for word in words:
        word.release()
    for array in (source, *arrays, *room):
        array.append(0)  # BufferError while somebody holds it


@pytest.mark.parametrize("ids", [[], [0, 1, 0]])
def test_elements_without_dimensions(ids):
    """Numbers are elements too."""
    shapes, offsets = np.empty((2, 0), INT64), np.arange(3)
    found, starts, picked, sizes = look_up(np.array(ids, INT64), offsets, shapes, 2)
    assert found
    assert (starts.tolist(), picked.tolist()) == (ids, list(range(len(ids) + 1)))
    assert sizes.shape == (len(ids), 0)


def odd(array):
    """Return an array of which no number lies at its place."""
    room = np.empty(array.nbytes + 1, np.uint8)
    moved = room[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize(
    "change",
    [
        odd,
        lambda a: np.repeat(a, 2, 0)[::2],
        lambda a: np.repeat(a, 2, -1).astype(np.int32),
        np.ndarray.tolist,
    ],
)
@pytest.mark.parametrize("which", range(6))
def test_arrays_that_are_left_alone(change, which):
    """Arrays that are no plain int64 in a row are looked at by NumPy, also read-only ones."""
    values, offsets, shapes = elements([(2, 3)] * 5)
    arrays = [np.arange(2), offsets, shapes]
    arrays += [np.empty(2, INT64), np.empty(3, INT64), np.empty((2, 2), INT64)]
    arrays[which] = change(arrays[which])
    assert _copying.look_up(len(values), *arrays) is False
    if which > 2:
        arrays[which] = np.zeros((2, 2), INT64) if which == 5 else np.zeros(which - 1, INT64)
        arrays[which].flags.writeable = False
        assert _copying.look_up(len(values), *arrays) is False
        assert not arrays[which].any()


@pytest.mark.parametrize("sizes", [(1, 3, 2), (2, 2, 2), (2, 3, 1), (3, 3, 2)])
def test_room_for_something_else(sizes):
    """Nothing is written beyond arrays that are too small, or into ones too large."""
    values, offsets, shapes = elements([(2, 3)] * 5)
    n, m, k = sizes
    found = np.empty(n, INT64), np.empty(m, INT64), np.empty((k, 2), INT64)
    assert _copying.look_up(len(values), np.arange(2), offsets, shapes, *found) is False


def test_tables_of_another_size():
    """Sizes that are no table of all elements are left alone."""
    values, offsets, shapes = elements([(2, 3)] * 5)
    found = np.empty(2, INT64), np.empty(3, INT64), np.empty((2, 1), INT64)
    for sizes in (shapes.ravel()[:-1].copy(), np.full(9, 6)):
        assert _copying.look_up(len(values), np.arange(2), offsets, sizes, *found) is False


@pytest.mark.parametrize(
    ("starts", "offsets"),
    [
        ([0, 5], [0, 3, 9]),  # 6 from 5 on, of 10
        ([0, -1], [0, 3, 6]),
        ([11, 0], [0, 0, 3]),
        ([0, 2**62], [0, 3, 6]),
        ([0, 0], [0, 3, 2]),
        ([0, 0], [0, -1, 2]),
        ([0, 0], [0, 2**62, 2]),
        ([0, 0], [0, 3]),
        ([0, 0], [1, 3, 6]),
        ([], [0]),
    ],
)
def test_pieces_that_are_not_there(starts, offsets):
    """Nothing outside of the source is read, nothing outside of the room written."""
    arrays = np.array(starts, INT64), np.array(offsets, INT64)
    assert copy_ranges(np.arange(10.0), *arrays)[0] is False


@pytest.mark.parametrize("room", [0, 40, 47, 49, 56])
def test_pieces_of_another_size(room):
    """What was made room for is what is written."""
    arrays = np.array([0, 4]), np.array([0, 3, 6])
    assert copy_ranges(np.arange(10.0), *arrays, room)[0] is (room == 48)
    assert copy_ranges(np.arange(10.0), *arrays, 48)[0]


def test_wrong_arguments():
    """They are refused before anything is touched."""
    for function, count in ((_copying.look_up, 7), (_copying.copy_ranges, 6)):
        with pytest.raises(TypeError, match=f"takes {count} arguments, got 1"):
            function(1)
    empty = np.empty(0, INT64)
    for arguments in ((0, -1, 1), (0, 1, 0)):
        with pytest.raises(OverflowError, match="is out of range"):
            _copying.copy_ranges(*arguments, empty, empty, empty)
    with pytest.raises(TypeError, match="integer"):
        _copying.look_up("1", *[empty] * 6)


def test_bytes_anywhere():
    """The values may begin at any byte."""
    values = odd(np.arange(10.0))
    done, target = copy_ranges(values, np.array([8, 1]), np.array([0, 2, 3]))
    assert done
    assert target.tolist() == [8.0, 9.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128, torch.bool])
@pytest.mark.parametrize("sizes", [(1, 2), (2000, 3000), (300_000, 900_000)])
def test_the_same_without_it(monkeypatch, dtype, sizes):
    """Tiny, usual and large elements: what is compiled and what is not gather the same."""
    tensors = [torch.arange(n).remainder(2).to(dtype) for n in sizes]
    j = JaggedTensor.from_tensors([*tensors, tensors[0][:0]])
    batches = [j[[1, 0, 2, 1]]]
    for name in ("look_up", "copy_ranges"):
        monkeypatch.setattr(f"mmtensor.jagged_gathering.{name}", copying._nothing)
    batches.append(j[[1, 0, 2, 1]])
    assert torch.equal(batches[0].values, batches[1].values)
    np.testing.assert_array_equal(batches[0].offsets, batches[1].offsets)
    np.testing.assert_array_equal(batches[0].shapes, batches[1].shapes)


def test_rows_are_copied_so():
    """Long rows in a row are; short or few ones, and what lies in one another, are not."""
    source = torch.arange(100 * 4096, dtype=torch.int16).view(100, 4096)
    ids = torch.tensor([3, 1, 99, 3])
    target = torch.empty(4, 4096, dtype=torch.int16)
    version = target._version
    assert not copied(source[:, :64].clone(), ids, target[:, :64].clone())
    ids = ids.repeat(10)
    target = target.repeat(10, 1)
    assert copied(source, ids, target)
    assert torch.equal(target, source[ids])
    assert target._version > version
    assert not copied(source, ids, source[:40])
    assert not copied(source, ids - 2, target)


def test_another_interface(run):
    """What was compiled from other sources is not used."""
    code = """
        import sys, types

        sys.modules["mmtensor._copying"] = fake = types.ModuleType("mmtensor._copying")
        fake.copy_rows = fake.copy_ranges = fake.look_up = None
        fake.INTERFACE = 0
        import mmtensor

        mmtensor._copying = fake
        from mmtensor import copying

        print(copying.COMPILED, copying.look_up(1))
    """
    assert run(code) == "False False"


@pytest.mark.parametrize("how", ["jit", "make_fx"])
def test_what_is_written_down(how):
    """Who records operators gets the values of a gathered batch, and not memory without any."""
    j = JaggedTensor.from_tensors([torch.arange(4000.0)] * 4)
    x = torch.zeros(8000)

    def function(x):
        return x + j[[1, 2]].values

    if how == "jit":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing is deprecated, and tells so
            recorded = torch.jit.trace(function, x, check_trace=False)
    else:
        recorded = make_fx(function)(x)
    assert torch.equal(recorded(x), torch.arange(4000.0).repeat(2))
    assert "empty" not in str(recorded.graph)


def test_numbers_in_what_is_written():
    """Writing would change the numbers of the rows that are still to come."""
    source = torch.arange(1000 * 512).view(1000, 512)
    target = torch.zeros(64, 512, dtype=torch.int64)
    ids = target.view(-1)[64 * 512 - 64 :]
    ids.copy_(torch.arange(100, 164))
    assert not copied(source, ids, target)
    assert ids.tolist() == list(range(100, 164))
    with pytest.raises(RuntimeError, match="single memory location"):
        MemoryMappedTensor.from_tensor(source).take(ids, out=target)
