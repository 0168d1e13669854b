"""New memory for the rows of a batch: with its pages at once, and used again for the next."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmtensor.prefetch import has_bytes
from mmtensor.syscalls import LINUX, PAGE, is_resident, madvise

__all__ = ["LARGE", "keep_memory", "new_memory", "new_rows", "populate"]

# New memory of so many bytes gets its pages from the kernel at once.
LARGE = 1 << 20
_LONGEST_PAUSE = 15
# madvise(2), Linux 5.14
_POPULATE_WRITE = 23
# Several batches are free at a time, and glibc learns nothing from a block above 32 MiB.
_TIMES, _LARGEST_BLOCK = 8, (32 << 20) - (1 << 16)

_storage: Any = torch.UntypedStorage


def populate(address: int, nbytes: int) -> None:
    """Give new memory its pages, if the kernel can: one by one each takes a page fault.

    3 MB took 0.9 ms instead of 1.7 so (measured).
    """
    first, last = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
    if not LINUX or first >= last:
        return
    try:
        madvise(first, last - first, _POPULATE_WRITE)
    except OSError:
        pass  # an older kernel, or no memory: touching it will tell


# The largest block that came and went.
_kept = 0


def keep_memory(nbytes: int) -> None:
    """Let the C library keep batches of a size when they are freed, for the next ones.

    glibc gives what is free at the end of its heap back to the system from twice the size on of
    the largest block that was a map of its own and has been freed (mallopt(3), M_TRIM_THRESHOLD
    and M_MMAP_THRESHOLD). With batches of 3 MB that happened to most of them or to none,
    depending on what else lay on the heap: an epoch of 78 took 107 to 160 ms and 38,400 page
    faults, or 33 ms and none (measured). One larger block that comes and goes, of which no page
    is touched, ends that. Where a program has set the limits itself, it changes nothing, nor for
    batches of 32 MiB and more, which are maps of their own each time.

    Parameters
    ----------
    nbytes
        Size of a batch.
    """
    global _kept
    block = min(_TIMES * nbytes, _LARGEST_BLOCK)
    if block <= _kept or nbytes >= _LARGEST_BLOCK:
        return
    _kept = block
    try:
        _storage(block, device="cpu")
    except RuntimeError:
        pass  # so little address space is left that it is none of our business


# How many calls do not look, and how many did not before the last one that did.
_rest = _pause = 0


def new_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return new memory, whose pages are there if it is large and what was looked at was not.

    Each page of memory that the system has just given is a page fault: gathering a batch of 3 MB
    took 1.15 ms there, 0.85 ms if all pages are asked for first, and 0.42 ms on memory that was
    there (measured). Looking takes a tenth of the latter, so where memory was there the next
    calls do not look; threads that count at the same time miscount, no more.
    """
    global _rest, _pause
    memory = torch.empty(shape, dtype=dtype, device="cpu")
    if not LINUX or type(memory) is not Tensor or memory.nbytes < LARGE:
        return memory
    if _rest > 0:
        _rest -= 1
        return memory
    address = memory.data_ptr()
    if is_resident(address + memory.nbytes // 2):
        _rest = _pause = min(2 * _pause + 1, _LONGEST_PAUSE)
    else:
        _pause = 0
        keep_memory(memory.nbytes)
        populate(address, memory.nbytes)
    return memory


def new_rows(tensor: Tensor, count: int) -> Tensor | None:
    """Return new memory for as many rows, if it is large; None: let torch make it.

    So it is where the memory of the last batches was there: it will be again.
    """
    global _rest
    if _rest > 0:
        _rest -= 1
        return None
    if not has_bytes(tensor):
        return None
    if tensor.dim() == 0 or count * tensor.stride(0) * tensor.itemsize < LARGE:
        return None
    rows = new_memory((count, *tensor.shape[1:]), tensor.dtype)
    return rows if type(rows) is Tensor else None  # it is being traced
