"""Asking the kernel for rows."""

import re
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmtensor.pages
from mmtensor import (
    JaggedTensor,
    MemoryMappedTensor,
    SizeError,
    TensorDict,
    prefetch,
    syscalls,
)
from mmtensor.syscalls import PAGE


@pytest.fixture
def asked(monkeypatch):
    """Return a list of the ranges of addresses for which the kernel is asked."""
    ranges = []

    def madvise(address, length, advice):
        assert advice == 3
        assert address % PAGE == 0
        ranges.append((address, address + length))
        syscalls.madvise(address, length, advice)

    monkeypatch.setattr(mmtensor.pages, "madvise", madvise)
    return ranges


@pytest.mark.parametrize("offset", [0, 8, 4096, 5000])
@pytest.mark.parametrize("row", [4, 1000, 1024, 3000])
@given(data=st.data())
def test_rows_are_asked_for(tmp_path_factory, monkeypatch, offset, row, data):
    """Every byte of every row is asked for, and no page that holds none of them."""
    path = tmp_path_factory.mktemp("rows") / "x"
    count = 50
    with open(path, "wb") as file:
        file.truncate(offset + 4 * row * count)
    x = MemoryMappedTensor.from_filename(path, "f4", (count, row), mode="r", offset=offset)
    view = x[data.draw(st.integers(0, 20)) :: data.draw(st.integers(1, 3))]
    ids = data.draw(st.lists(st.integers(-len(view), len(view) - 1), max_size=8))
    ranges = []
    monkeypatch.setattr(
        mmtensor.pages, "madvise", lambda address, length, _: ranges.append((address, length))
    )
    view.prefetch(ids)
    pages = {
        page
        for address, length in ranges
        for page in range(address // PAGE, -(-(address + length) // PAGE))
    }
    needed = set()
    for number in ids:
        first = view[number].data_ptr()
        needed.update(range(first // PAGE, (first + 4 * row - 1) // PAGE + 1))
    assert pages == needed


def test_neighbours_are_one_call(path, asked):
    """Rows that share or touch pages are asked for in one call, in any order."""
    x = MemoryMappedTensor.zeros(100, 1024, filename=path)
    x.prefetch([5, 4, 6, 50, 5])
    base = x.data_ptr()
    expected = [(base + 4 * PAGE, base + 7 * PAGE), (base + 50 * PAGE, base + 51 * PAGE)]
    assert asked == expected


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2],
        (1, 2),
        np.array([1, 2]),
        np.array([1, 2], np.uint8),
        torch.tensor([1, 2]),
        torch.tensor([1, 2], dtype=torch.int32),
        slice(1, 3),
        range(1, 3),
        [[1], [2]],
        [-99, -98],
        slice(-99, -97),
    ],
)
def test_ids(path, asked, ids):
    """Row numbers come in any sequence, tensor or slice, negative ones from the end."""
    x = MemoryMappedTensor.zeros(100, 1024, filename=path)
    x.prefetch(ids)
    assert asked == [(x.data_ptr() + PAGE, x.data_ptr() + 3 * PAGE)]


@pytest.mark.parametrize("ids", [[], slice(5, 5), torch.zeros(0, dtype=torch.int64), np.array([])])
def test_no_rows(path, asked, ids):
    """For no rows nothing is asked."""
    MemoryMappedTensor.zeros(10, 1024, filename=path).prefetch(ids)
    assert asked == []


def test_one_row(path, asked):
    """A single number is one row."""
    x = MemoryMappedTensor.zeros(10, 1024, filename=path)
    x.prefetch(3)
    assert asked == [(x.data_ptr() + 3 * PAGE, x.data_ptr() + 4 * PAGE)]


@pytest.mark.parametrize("ids", [[10], [-11], [0, 10], torch.tensor([2**40])])
def test_out_of_range(path, asked, ids):
    """A row that is not there is an IndexError, and nothing is asked for."""
    x = MemoryMappedTensor.zeros(10, 1024, filename=path)
    with pytest.raises(IndexError, match=r"row -?\d+ is out of range for 10 rows"):
        x.prefetch(ids)
    assert asked == []


@pytest.mark.parametrize("ids", [[1.5], ["a"], [True, False], torch.tensor([1.0]), None])
def test_no_numbers(path, ids):
    """What are no integers is a TypeError."""
    x = MemoryMappedTensor.zeros(10, 1024, filename=path)
    with pytest.raises(TypeError, match="ids must be integers, got"):
        x.prefetch(ids)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MemoryMappedTensor.ones(10, 4),
        lambda: MemoryMappedTensor.from_numpy(np.ones((10, 4))),
        lambda: MemoryMappedTensor(torch.ones(10, 4)),
    ],
)
def test_memory(asked, make):
    """Memory without a file is there already: nothing is asked, numbers are checked."""
    x = make()
    x.prefetch([1, 2])
    assert asked == []
    assert x.sum() == 40


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, :0],
        lambda x: x[0].expand(7, 1024),
        lambda x: x.t()[3:, 2:],
        lambda x: x.unfold(1, 5, 5),
        lambda x: x[:, 5],
        lambda x: x[0, 0],
    ],
)
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_any_view(path, asked, mode, view):
    """Rows of any view lie inside the file, and so does what is asked for."""
    MemoryMappedTensor.zeros(10, 1024, filename=path)
    x = MemoryMappedTensor.from_filename(path, "f4", (10, 1024), mode=mode)
    part = view(x)
    part.prefetch([0, 2, -1] if part.dim() else [])
    low, high = x.data_ptr(), x.data_ptr() + x.nbytes
    assert all(low <= first < last <= high for first, last in asked)


class TestReadAhead:
    """Gathering a large batch asks the kernel for the rows that are not in memory."""

    @pytest.fixture
    def cold(self, monkeypatch):
        """Let no page be in memory."""
        monkeypatch.setattr(prefetch, "is_resident", lambda _: False)

    @pytest.fixture
    def rows(self, path):
        """Return 64 rows of 16 KiB in a file, and the same in memory."""
        values = torch.arange(64 * 4096, dtype=torch.float32).view(64, 4096)
        return MemoryMappedTensor.from_tensor(values, filename=path), values

    @pytest.mark.usefixtures("cold")
    def test_cold_batch(self, rows, asked):
        """All rows of a large batch are asked for if one that is looked at is not in memory."""
        x, values = rows
        ids = torch.arange(0, 64, 2)
        assert torch.equal(x[ids], values[ids])
        expected = [
            (x.data_ptr() + i * 16384, x.data_ptr() + (i + 1) * 16384) for i in range(0, 64, 2)
        ]
        assert asked == expected
        out = torch.empty(32, 4096)
        assert torch.equal(x.take(ids, out=out), values[ids])
        assert asked == expected * 2

    @pytest.mark.usefixtures("cold")
    def test_cold_batch_of_a_container(self, rows, asked):
        """A container asks for the rows of each leaf, and so does a loader's batch."""
        x, values = rows
        td = TensorDict({"x": x, "n": {"y": x[:, :2048]}}, [64])
        ids = torch.arange(0, 64, 2)
        starts = [x.data_ptr() + i * 16384 for i in range(0, 64, 2)]
        assert torch.equal(td[ids]["n", "y"], values[ids, :2048])
        assert asked == [(s, s + 16384) for s in starts] + [(s, s + 8192) for s in starts]
        asked.clear()
        assert torch.equal(td.__getitems__(ids.tolist())["x"], values[ids])
        assert len(asked) == 64

    @pytest.mark.usefixtures("cold")
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
    def test_cold_batch_of_a_jagged_tensor(self, path, asked, dtype):
        """A large batch of elements is asked for as well, empty elements left out."""
        elements = [torch.full((i % 5, 16384), i % 100, dtype=dtype) for i in range(40)]
        j = JaggedTensor.from_tensors(elements, filename=path)
        ids = np.arange(39, -1, -2)
        for index in (ids, torch.from_numpy(ids), ids.tolist()):
            asked.clear()
            for number, element in zip(ids, j[index], strict=True):
                assert torch.equal(element, elements[number])
            first = j.values.data_ptr()
            pages = {page for low, high in asked for page in range(low // PAGE, high // PAGE)}
            needed = set()
            for number in ids:
                low = first + j.offsets[number] * j.dtype.itemsize
                high = first + j.offsets[number + 1] * j.dtype.itemsize
                needed.update(range(low // PAGE, -(-high // PAGE)))
            assert pages == needed
        asked.clear()
        assert torch.equal(j[1:3][[0, 1]][1], elements[2])
        assert torch.equal(TensorDict({"j": j}, [40])[torch.from_numpy(ids)]["j"][1], elements[37])
        assert len(asked) == 13  # 16 have elements, and 3 pairs only an empty one between them

    @pytest.mark.usefixtures("cold")
    def test_jagged_tensors_that_are_left_alone(self, path, asked):
        """Few elements or bytes, and memory that is no file."""
        small = JaggedTensor.from_tensors([torch.ones(3)] * 40, filename=path)
        assert len(small[range(40)]) == 40
        regular = JaggedTensor.from_tensors([torch.ones(1 << 14)] * 40)
        assert len(regular[range(40)]) == 40
        regular.prefetch(range(40))
        assert asked == []

    def test_asking_for_elements(self, path, asked):
        """`prefetch` asks for what is named, slices and masks too."""
        j = JaggedTensor.from_tensors([torch.ones(1024)] * 4 + [torch.ones(0)], filename=path)
        first = j.values.data_ptr()
        for ids in ([1, -2], slice(1, 4, 2), torch.tensor([False, True, False, True, False])):
            asked.clear()
            j.prefetch(ids)
            assert asked == [(first + i * PAGE, first + (i + 1) * PAGE) for i in (1, 3)]
        asked.clear()
        j[::-1].prefetch([0, 1])
        assert asked == [(first + 3 * PAGE, first + 4 * PAGE)]
        with pytest.raises(IndexError, match="element 5 is out of range for 5 elements"):
            j.prefetch([5])
        with pytest.raises(TypeError, match="an index must be"):
            j.prefetch([0.5])

    @pytest.mark.usefixtures("cold")
    def test_negative_numbers(self, rows, asked):
        """Negative numbers are asked for as the rows they mean."""
        x, values = rows
        ids = torch.arange(-64, -32)
        assert torch.equal(x[ids], values[ids])
        assert asked == [(x.data_ptr(), x.data_ptr() + 32 * 16384)]

    def test_warm_batch(self, rows, asked):
        """A batch that is in memory is not asked for."""
        x, values = rows
        ids = torch.arange(32)
        assert torch.equal(x[ids], values[ids])
        assert asked == []

    def test_a_file_that_is_in_memory_is_not_looked_at_for_a_while(self, rows, asked, monkeypatch):
        """Where all was in memory nobody looks again, until some time has passed."""
        x, values = rows
        ids = torch.arange(32)
        monkeypatch.setattr(prefetch, "_WHILE", 3_600_000_000_000)
        assert torch.equal(x[ids], values[ids])
        looked = []
        monkeypatch.setattr(prefetch, "is_resident", looked.append)
        assert torch.equal(x[ids], values[ids])
        assert len(list(TensorDict({"x": x}, [64]).batches(32))) == 2
        assert looked == []
        x.untyped_storage().mapping.warm_until = 0
        assert torch.equal(x[ids], values[ids])
        assert looked == [x.data_ptr()]
        assert len(asked) == 1

    def test_somebody_elses_file(self, rows, asked, monkeypatch):
        """Linux says that every page of it is in memory; how long it takes to read tells."""
        x, values = rows
        monkeypatch.setattr(prefetch, "is_resident", lambda _: True)
        monkeypatch.setattr(prefetch, "touch", lambda *_: time.sleep(0.001))
        ids = torch.arange(32)
        for number in range(2):
            assert torch.equal(x[ids], values[ids])
            assert len(asked) == number + 1

    @pytest.mark.usefixtures("cold")
    def test_small_batch(self, rows, asked):
        """A batch of few rows or few bytes is left alone."""
        x, values = rows
        assert torch.equal(x[[1, 2, 3]], values[[1, 2, 3]])
        narrow = MemoryMappedTensor.from_tensor(
            values[:, :8].contiguous(), filename=x.filename + ".narrow"
        )
        assert torch.equal(narrow[torch.arange(32)], values[:32, :8])
        assert asked == []

    @pytest.mark.usefixtures("cold")
    def test_out_of_range(self, rows):
        """A number out of range raises torch's own error, cold as well."""
        x, values = rows
        ids = torch.arange(40, 72)
        with pytest.raises(IndexError, match="out of") as expected:
            values[ids]
        with pytest.raises(IndexError, match=re.escape(str(expected.value))):
            x[ids]

    @pytest.mark.parametrize("first", [0, 1 << 28])
    def test_rows_without_bytes(self, path, first):
        """Rows that have no bytes are nowhere, and nobody looks for them there."""
        x = MemoryMappedTensor.zeros(1 << 12, 1024, filename=path)
        assert x[:, 1024:][torch.full((1000,), 4095)].shape == (1000, 0)
        empty = MemoryMappedTensor.zeros(first + (1 << 18), 0, filename=f"{path}.empty")
        assert empty[torch.arange(first, first + (1 << 18))].shape == (1 << 18, 0)
        ids = torch.arange(first, first + 20)
        assert empty.take(ids).shape == (20, 0)

    def test_damaged_offsets(self, path):
        """Elements that would be elsewhere are an error, also for whoever looks ahead."""
        j = JaggedTensor.from_tensors([torch.ones(4096)] * 64, filename=path)
        offsets = np.memmap(path.replace(".bin", ".offsets.bin"), np.int64, "r+")
        offsets[1:-1] += 1 << 40
        offsets.flush()
        j = JaggedTensor.from_filename(path, torch.float32)
        j.prefetch(range(64))
        td = TensorDict({"j": j}, [64])
        for gather in (lambda: j[range(64)], lambda: next(td.batches(32, shuffle=True))):
            with pytest.raises(SizeError, match="element|offsets"):
                gather()

    def test_residency(self, path):
        """A page of a file counts as in memory once it was touched, and not before."""
        with open(path, "wb") as file:
            file.truncate(1 << 24)  # a hole, which nobody has read
        x = MemoryMappedTensor.from_filename(path, torch.uint8, (-1,), mode="r")
        address = x.data_ptr() + (1 << 23)
        assert not syscalls.is_resident(address)
        assert x[1 << 23] == 0
        assert syscalls.is_resident(address)
