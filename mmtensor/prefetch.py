"""Asking the kernel to read rows before they are touched."""

from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtensor.geometry import span
from mmtensor.mapping import FileMapping, Mapping
from mmtensor.storage import mapping_of
from mmtensor.syscalls import LINUX, PAGE, is_resident, touch

__all__ = [
    "FEW_ROWS",
    "are_absent",
    "byte_ranges",
    "has_bytes",
    "is_warm",
    "read_ahead",
    "read_ranges_ahead",
    "will_need_elements",
    "will_need_ranges",
    "will_need_rows",
]

# Touching rows that are not in memory one after the other waits for the device once per
# row, and reads a whole read-ahead window each time: 256 rows of 12 KB of a 1.2 GB file
# took 734 ms, 6 ms when all were asked for first (ext4 on a virtual disk, 8 MiB of
# read-ahead, measured). So four rows of a batch are looked at, and batches that are too small
# to gain are left alone.
_SAMPLES = 4
FEW_ROWS = 16
_FEW_BYTES = 1 << 18
# Looking at a row takes 2 us, and all of it 10 % of a batch of 3 MB, whose copying has emptied the
# caches of the processor. So a file is not looked at again for a while where all was in
# memory; reading one row after the other goes on for no longer than that, or for one batch.
_WHILE = 100_000_000  # ns
# A byte that is in memory is read in 10 us at most, one that is not in 100 at least (measured).
_ABSENT = 25_000  # ns


def has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor is its bytes: subclasses may hold more than those, or none at all.

    The latter are what a tensor is while it is being traced.
    """
    return type(tensor) is Tensor or mapping_of(tensor) is not None


def read_ahead(tensor: Tensor, ids: Tensor) -> None:
    """Ask the kernel for all rows of a large batch if some of them are not in memory.

    Parameters
    ----------
    tensor
        On a mapping.
    ids
        1-D row numbers.
    """
    count = ids.numel()
    mapping = _to_look_at(tensor, count)
    if mapping is None:
        return
    itemsize = tensor.itemsize
    step = tensor.stride(0) * itemsize
    length = tensor.size(0)
    if count * step < _FEW_BYTES or not tensor.numel():
        return
    some = ids[:: -(-count // _SAMPLES)].tolist()
    base = tensor.storage_offset() * itemsize
    if are_absent(mapping, [base + number % length * step for number in some]):
        try:
            will_need_rows(mapping, tensor, ids)
        except IndexError:
            pass  # the error of the gathering itself says the same as torch's


def read_ranges_ahead(values: Tensor, starts: Any, offsets: Any) -> None:
    """Ask the kernel for all of many ranges if some of them are not in memory.

    Parameters
    ----------
    values
        A 1-D tensor, of any memory.
    starts
        int64: from which of its elements.
    offsets
        int64: where the ranges begin, and the last ends, when one follows the other.
    """
    mapping = _to_look_at(values, len(starts))
    if mapping is None or offsets[-1] * values.itemsize < _FEW_BYTES:
        return
    begins, ends = byte_ranges(values, starts, starts + np.diff(offsets))
    if are_absent(mapping, begins[:: -(-len(begins) // _SAMPLES)].tolist()):
        will_need_ranges(mapping, begins, ends)


def _to_look_at(tensor: Tensor, count: int) -> FileMapping | None:
    """Return the file that so many rows are read from, if they may be worth a look."""
    if count < FEW_ROWS or not LINUX:
        return None
    mapping = getattr(tensor.untyped_storage(), "mapping", None)
    return None if type(mapping) is not FileMapping or is_warm(mapping) else mapping


def byte_ranges(values: Tensor, starts: Any, stops: Any) -> tuple[Any, Any]:
    """Return which bytes of its mapping some ranges of a 1-D tensor are, empty ones left out.

    Parameters
    ----------
    values
        On a mapping.
    starts, stops
        int64 arrays: from which of its elements to before which.
    """
    kept = starts < stops
    itemsize = values.itemsize
    base = int(values.storage_offset()) * itemsize
    return base + starts[kept] * itemsize, base + stops[kept] * itemsize


def will_need_elements(values: Tensor, starts: Any, stops: Any) -> None:
    """Ask for the pages of some ranges of a 1-D tensor, of any memory.

    Parameters
    ----------
    values, starts, stops
        As for `byte_ranges`; of ranges that lead out of the tensor, what is in it.
    """
    mapping = mapping_of(values)
    if mapping is not None:
        inside = [np.clip(bounds, 0, len(values)) for bounds in (starts, stops)]
        will_need_ranges(mapping, *byte_ranges(values, *inside))


def is_warm(mapping: FileMapping) -> bool:
    """Whether all that was looked for was in memory a moment ago."""
    return perf_counter_ns() < mapping.warm_until


def are_absent(mapping: FileMapping, positions: list[int]) -> bool:
    """Whether a byte at one of some positions of a mapping is not in memory."""
    if not LINUX:
        return False
    address, nbytes = mapping.address, mapping.nbytes
    # Rows without bytes, and elements that damaged offsets speak of, may be anywhere.
    positions = [position for position in positions if 0 <= position < nbytes]
    for position in positions:
        if not is_resident(address + position):
            return True
    # Of files that this process may not write to, the kernel says yes whatever is true.
    before = perf_counter_ns()
    for position in positions:
        touch(address + position, 1)
    now = perf_counter_ns()
    if now - before > _ABSENT * len(positions):
        return True
    mapping.warm_until = now + _WHILE
    return False


def will_need_rows(mapping: Mapping, tensor: Tensor, ids: Any) -> None:
    """Ask for the pages of some rows of a tensor on a mapping; neighbours in one call.

    Raises
    ------
    IndexError
        If a number is out of range.
    TypeError
        If `ids` are not integers.
    """
    length = tensor.size(0)
    if isinstance(ids, slice):
        ids = range(*ids.indices(length))
    numbers = np.asarray(torch.as_tensor(ids, device="cpu") if isinstance(ids, Tensor) else ids)
    if numbers.size == 0:
        return
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {numbers.dtype}.")
    low, high = int(numbers.min()), int(numbers.max())
    if low < -length or high >= length:
        worst = low if low < -length else high
        raise IndexError(f"row {worst} is out of range for {length} rows.")
    numbers = np.unique(numbers.astype(np.int64).reshape(-1))
    if numbers[0] < 0:
        numbers = np.unique(np.where(numbers < 0, numbers + length, numbers))
    itemsize = tensor.itemsize
    extent = span(tensor.size()[1:], tensor.stride()[1:], itemsize)
    if extent == 0:
        return
    begins = tensor.storage_offset() * itemsize + numbers * (tensor.stride(0) * itemsize)
    will_need_ranges(mapping, begins, begins + extent)


def will_need_ranges(mapping: Mapping, begins: Any, ends: Any) -> None:
    """Ask for the pages of ranges of bytes; those that share or touch pages in one call.

    Parameters
    ----------
    mapping
        Of a file.
    begins, ends
        int64 arrays, in bytes.
    """
    if not len(begins) or not LINUX or mapping.path is None:
        return
    order = begins.argsort(kind="stable")
    begins, ends = begins[order], ends[order]
    shift = mapping.address % PAGE
    low, high = (begins + shift) // PAGE, -(-(ends + shift) // PAGE)
    top = np.maximum.accumulate(high)
    breaks = np.flatnonzero(low[1:] > top[:-1]) + 1
    starts = low[np.concatenate(([0], breaks))] * PAGE - shift
    stops = top[np.concatenate((breaks - 1, [-1]))] * PAGE - shift
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        first = max(start, 0)
        mapping.advise("willneed", first, min(stop, mapping.nbytes) - first)
