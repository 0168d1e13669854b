"""Gathering elements of a jagged tensor into memory, and asking for them beforehand."""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mmtensor.allocation import LARGE, keep_memory, new_memory
from mmtensor.copying import COMPILED, copy_ranges, is_listened_to, look_up
from mmtensor.jagged_layout import Integers, check_rows, gather_bytes, positions, row_numbers
from mmtensor.jagged_parts import Parts
from mmtensor.prefetch import byte_ranges, read_ranges_ahead, will_need_elements
from mmtensor.storage import as_array

__all__ = ["Gathered", "JaggedGathering"]

# Below this many bytes per element, an index of every single number is the faster way to
# gather (measured: 0.1 us per piece against 1 ns per number).
_TINY = 64
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class JaggedGathering:
    """What a `JaggedTensor` does with many elements at once.

    It looks at some rows of its parts: `_first`, `_first` + `_step` and so on.
    """

    __slots__ = ()

    _parts: Parts
    _first: int
    _step: int
    _length: int
    _memory: Any

    @classmethod
    def _of(cls, parts: Parts) -> Self:
        raise NotImplementedError  # JaggedTensor has it

    def _rows(self) -> slice:
        """Return the rows of the parts that this looks at."""
        stop = self._first + self._length * self._step
        return slice(self._first, None if stop < 0 else stop, self._step)

    def _bounds(self) -> tuple[Integers, Integers]:
        """Return where the elements start and stop."""
        rows = self._rows()
        offsets = self._parts.offsets
        return offsets[:-1][rows], offsets[1:][rows]

    def _check(self) -> None:
        """Raise a `SizeError` that names the first element that is damaged, if there is one."""
        parts = self._parts
        rows = self._rows()
        check_rows(*self._bounds(), parts.shapes[rows], len(parts.values))

    def _gather(self, ids: Integers) -> Self:
        """Copy elements into regular memory."""
        rows = ids if self._step == 1 else ids * self._step
        if self._first:
            rows = rows + self._first
        parts = self._parts
        count = len(rows)
        starts, offsets = np.empty(count, np.int64), np.empty(count + 1, np.int64)
        shapes = np.empty((count, parts.shapes.shape[1]), np.int64)
        total = len(parts.values)
        if not look_up(total, rows, parts.offsets, parts.shapes, starts, offsets, shapes):
            starts, offsets, shapes = _looked_up(parts, rows, total)
        read_ranges_ahead(parts.values, starts, offsets)
        return self._of(Parts(self._copy(starts, offsets), offsets, shapes))

    def _copy(self, starts: Integers, offsets: Integers) -> Tensor:
        count = int(offsets[-1])
        values = self._parts.values
        dtype, itemsize = values.dtype, values.itemsize
        # Who writes down operators would hear of memory, and not of what is copied into it.
        if COMPILED and count and not is_listened_to():
            memory = new_memory((count,), dtype)
            if copy_ranges(
                memory.data_ptr(), count * itemsize, itemsize, self._bytes(), starts, offsets
            ):
                return memory
            del memory
        return _copied(self._bytes(), starts, offsets, dtype)

    def _bytes(self) -> memoryview:
        """Return the memory of all values."""
        if self._memory is None:
            self._memory = as_array(self._parts.values).view(np.uint8).data
        return self._memory  # type: ignore[no-any-return]  # it was set above

    def _compact(self) -> Self:
        """Return a copy in regular memory, of these elements only."""
        return self._gather(np.arange(self._length))

    def __getitems__(self, indices: list[int]) -> list[Self]:
        """Gather a batch for `torch.utils.data.DataLoader`: a list of one jagged tensor."""
        return Gathered([self._gather(row_numbers(indices, self._length))])

    def prefetch(self, ids: Any) -> None:
        """Ask the kernel to read these elements from the file, and do not wait for it.

        ``j[ids]`` does so itself where elements are not in memory.

        Parameters
        ----------
        ids
            Numbers of elements: a 1-D sequence, array or tensor of integers, a mask, or a slice.

        Raises
        ------
        IndexError
            If a number is out of range.
        TypeError
            If `ids` are no such numbers.

        Examples
        --------
        >>> j = mmtensor.JaggedTensor.zeros([[2, 3], [4, 1]], filename="prefetched.bin")
        >>> j.prefetch([1])
        """
        numbers = row_numbers(ids, self._length)
        bounds = [part.take(numbers) for part in self._bounds()]
        will_need_elements(self._parts.values, *bounds)

    def _positions(self, ids: list[int]) -> list[int]:
        """Return where in their mapping some elements begin, in bytes; empty ones left out."""
        bounds = [part.take(ids) for part in self._bounds()]
        begins: list[int] = byte_ranges(self._parts.values, *bounds)[0].tolist()
        return begins


def _looked_up(parts: Parts, rows: Integers, total: int) -> tuple[Integers, Integers, Integers]:
    """Return where some elements begin, where they will when gathered, and their shapes.

    Raises
    ------
    SizeError
        If one of them is damaged.
    """
    starts, stops = parts.offsets.take(rows), parts.offsets.take(rows + 1)
    shapes = parts.shapes.take(rows, 0)
    check_rows(starts, stops, shapes, total)
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(stops - starts, out=offsets[1:])
    return starts, offsets, shapes


def _copied(memory: memoryview, starts: Integers, offsets: Integers, dtype: torch.dtype) -> Tensor:
    """Return the values of some elements, one after the other, by NumPy and joined slices."""
    count, itemsize = int(offsets[-1]), dtype.itemsize
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    counts = np.diff(offsets)
    if count * itemsize < _TINY * len(starts):
        # One number after the other, as words of their size.
        words = np.frombuffer(memory, _WORDS[itemsize])
        pieces = words.take(positions(starts, counts, offsets))
        return torch.from_numpy(pieces.view(np.uint8)).view(dtype)
    if count * itemsize >= LARGE:
        keep_memory(count * itemsize)
    return torch.frombuffer(gather_bytes(memory, starts, starts + counts, itemsize), dtype=dtype)


class Gathered(list[Any]):
    """A batch that is gathered already, as a list of one, which a `DataLoader` asks for."""
