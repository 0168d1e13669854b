"""Memory for the rows of a batch: whole pages at once, and used again for the next batch."""

import ctypes
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

import mmtensor
from mmtensor import MemoryMappedTensor, TensorDict, allocation, syscalls
from mmtensor.syscalls import PAGE

# Six batches of 3 MB are alive at a time, and freed together: more than glibc keeps by itself
# once it has seen a block of 3 MB, if nothing else lies at the end of its heap.
_ROUNDS = """
import resource, sys
import torch, mmtensor

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

x = mmtensor.TensorDict.load_memmap(sys.argv[1])
if sys.argv[2] != "container":
    x = x[sys.argv[2]]
ids = torch.arange(256)
mmtensor.allocation.populate = lambda address, nbytes: None  # pages made so are not counted
for _ in range(10):
    before = faults()
    batches = [x[ids] for _ in range(6)]
    del batches
    last = faults() - before
print(last)
"""
# How many blocks of 16 MB are maps of their own, before and after batches of 3 MB are kept.
_MAPS = """
import ctypes
import torch
from mmtensor import allocation

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ord small maps b c d e f g".split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

def maps():
    before = mallinfo().maps
    block = torch.empty(16 << 20, dtype=torch.uint8)
    return mallinfo().maps - before, block

first, block = maps()
allocation.keep_memory(3 << 20)
print(first, maps()[0])
"""


def _child(code, *arguments):
    """Return what a new process prints, whose heap is its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    # As glibc is by itself: limits that the environment sets are kept.
    given = {key: os.environ[key] for key in os.environ if not key.startswith(("MALLOC", "GLIBC"))}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=given).stdout


def _has_mallinfo():
    try:
        return bool(ctypes.CDLL(None).mallinfo2)
    except (AttributeError, OSError, TypeError):
        return False  # no glibc, or one before 2.33


@pytest.mark.parametrize(("start", "length"), [(0, 8), (1, 3), (100, 5 * PAGE), (0, 0), (7, 2)])
def test_new_memory_gets_its_pages(start, length):
    """Whole pages of new memory are there afterwards, and its values stay as they are."""
    array = np.zeros(16 * PAGE, np.uint8)
    array[start] = 3
    address = array.ctypes.data + start
    allocation.populate(address, length)
    first, last = -(-address // PAGE) * PAGE, (address + length) // PAGE * PAGE
    assert all(syscalls.is_resident(page) for page in range(first, last, PAGE))
    assert array[start] == 3
    assert array.sum() == 3


def test_a_kernel_that_cannot_populate(monkeypatch):
    """An older kernel's refusal is none of the caller's business."""

    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(allocation, "madvise", refuse)
    array = np.zeros(4 * PAGE, np.uint8)
    allocation.populate(array.ctypes.data, array.nbytes)


def test_new_memory_that_is_there_is_seldom_looked_at(monkeypatch, path):
    """The longer the C library hands out memory that is there, the less often it is looked at."""
    there, calls, looks = True, 0, []

    def is_resident(_):
        looks.append(calls)
        return there

    monkeypatch.setattr(allocation, "is_resident", is_resident)
    monkeypatch.setattr(allocation, "_rest", 0)
    monkeypatch.setattr(allocation, "_pause", 0)
    x = MemoryMappedTensor.zeros(64, 1 << 14, filename=path)
    for calls in range(50):  # noqa: B007  # `is_resident` uses it
        allocation.new_rows(x, 64)
    assert looks == [0, 2, 6, 14, 30, 46]
    there = False
    for calls in range(50, 70):  # noqa: B007
        allocation.new_rows(x, 64)
    assert looks[6:] == list(range(62, 70))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("there", [True, False])
def test_large_batch(monkeypatch, path, dtype, there):
    """A batch of megabytes holds the rows that were asked for, on memory old or new."""
    monkeypatch.setattr(allocation, "is_resident", lambda _: there)
    monkeypatch.setattr(allocation, "_rest", 0)
    values = torch.arange(64 << 16).view(64, -1).remainder(100).to(dtype)
    x = MemoryMappedTensor.from_tensor(values, filename=path)
    ids = torch.arange(-32, 32)
    expected = values.view(torch.uint8)[ids]
    assert type(x[ids]) is torch.Tensor
    assert torch.equal(x[ids].view(torch.uint8), expected)
    assert torch.equal(TensorDict({"x": x}, [64])[ids]["x"].view(torch.uint8), expected)
    assert torch.equal(x[ids.view(4, 16)].view(torch.uint8), expected.view(4, 16, -1))
    with pytest.raises(IndexError, match="index 64 is out of bounds for dimension 0 with size 64"):
        x[ids + 64]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="speaks of glibc's heap")
@pytest.mark.parametrize("kind", ["dense", "container", "jagged"])
def test_batches_of_a_size_use_their_memory_again(tmp_path, kind):
    """Their pages come from the system once, not for each batch."""
    values = torch.ones(256, 3 << 12, dtype=torch.uint8)
    leaves = {"dense": values, "jagged": mmtensor.JaggedTensor.from_tensors(list(values))}
    if kind == "container":
        del leaves["jagged"]
    TensorDict(leaves, [256]).save(tmp_path / "td")
    assert int(_child(_ROUNDS, tmp_path / "td", kind)) < 6 * (3 << 20) // PAGE // 4


@pytest.mark.skipif(not _has_mallinfo(), reason="asks glibc's mallinfo2")
def test_the_c_library_keeps_larger_blocks():
    """A block that was a map of its own, and went back to the system, now lies on the heap."""
    assert _child(_MAPS).split() == ["1", "0"]


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ([3 << 20, 3 << 20, 2 << 20], [24 << 20]),
        ([3 << 20, 3 << 21, 3 << 22], [24 << 20, (32 << 20) - (1 << 16)]),
        ([64 << 20], []),
    ],
)
def test_how_often_memory_is_kept(monkeypatch, sizes, blocks):
    """One block comes and goes for each new largest size that the heap can keep."""
    taken = []

    def storage(nbytes, device):
        assert device == "cpu"
        taken.append(nbytes)
        raise RuntimeError("no address space left")

    monkeypatch.setattr(allocation, "_kept", 0)
    monkeypatch.setattr(allocation, "_storage", storage)
    for nbytes in sizes:
        allocation.keep_memory(nbytes)
    assert taken == blocks
