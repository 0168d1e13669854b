"""`JaggedTensor`: elements of different shapes in one buffer, with one array of offsets."""

from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from mmtensor.adoption import check_device
from mmtensor.arrays import mapping_of_array
from mmtensor.creation import check_regular
from mmtensor.errors import DtypeError, ShapeError, SizeError
from mmtensor.jagged_bridges import JaggedConversions, read_nested
from mmtensor.jagged_constructors import JaggedConstructors
from mmtensor.jagged_files import Files
from mmtensor.jagged_gathering import Gathered, JaggedGathering
from mmtensor.jagged_layout import (
    Integers,
    complaint,
    row_number,
    row_numbers,
)
from mmtensor.jagged_parts import (
    Parts,
    filled_parts,
    make_parts,
    on_block,
    on_files,
    on_storage,
    with_shapes,
)
from mmtensor.jagged_reference import refer, reopen
from mmtensor.jagged_searching import JaggedSearch
from mmtensor.jagged_source import dtype_of
from mmtensor.modes import ModeName
from mmtensor.reference import UNREADABLE, for_checkpoint, keep_until_started
from mmtensor.shared_memory import SharedMapping
from mmtensor.storage import as_array, mapping_of, refuse_write
from mmtensor.tables import register_jagged
from mmtensor.tensor import MemoryMappedTensor

__all__ = ["JaggedTensor"]

_as_strided = Tensor.as_strided


class JaggedTensor(
    JaggedConstructors, JaggedConversions, JaggedGathering, JaggedSearch, Sequence[Tensor]
):
    """A sequence of tensors of different shapes, stored as one buffer.

    Element `i` is ``values[offsets[i]:offsets[i + 1]].view(*shapes[i])``. All have one dtype
    and one number of dimensions. Reading an element takes the same time however many there
    are, and so does opening the files.

    Make one with a class method: `from_tensors` writes a list, `from_filename` opens files,
    `from_nested` and `from_strings` convert, `empty`, `zeros`, `ones` and `full` make room,
    and `mmtensor.JaggedWriter` appends. Without a filename the data is in anonymous shared
    memory.

    ``j[i]`` and ``j[2:5]`` are views; ``j[ids]`` and ``j[mask]`` gather into regular memory.
    It goes to other processes as a reference, as its elements do.

    Parameters
    ----------
    values
        A 1-D tensor: all elements in C order, one after the other. It is not copied.
    shapes
        One row of sizes per element.
    offsets
        n + 1 positions in `values`; None: computed from the shapes. They are checked.

    Attributes
    ----------
    ndim : int
        Number of dimensions of each element.
    dtype : torch.dtype
        Of the elements.

    Raises
    ------
    SizeError, ShapeError
        A `ValueError`: values, shapes and offsets do not fit together.

    Examples
    --------
    >>> j = mmtensor.JaggedTensor(torch.arange(5), [[2], [0], [3]])
    >>> j[2]
    tensor([2, 3, 4])
    >>> [len(element) for element in j]
    [2, 0, 3]
    """

    __slots__ = (
        "__weakref__",
        "_at",
        "_base",
        "_first",
        "_kind",
        "_length",
        "_memory",
        "_parts",
        "_sizes",
        "_step",
        "_view",
        "dtype",
        "ndim",
    )

    dtype: torch.dtype
    ndim: int

    def __init__(self, values: Tensor, shapes: Any, offsets: Any = None) -> None:
        check_regular(values)
        check_device(values.device)
        self._set(with_shapes(values, shapes, offsets))

    def _set(self, parts: Parts, first: int = 0, step: int = 1, length: int | None = None) -> None:
        """Look at some elements of the parts: `first`, `first + step` and so on."""
        values = parts.values
        self._parts = parts
        self.dtype = values.dtype
        self.ndim = parts.shapes.shape[1]
        self._first = first
        self._step = step
        self._length = len(parts.shapes) if length is None else length
        # What j[i] needs, at hand: memoryviews give Python integers at half of NumPy's time.
        self._at: Any = parts.offsets.data
        self._sizes: Any = parts.shapes.reshape(-1).data
        self._view = _as_strided.__get__(values)
        self._base = values.storage_offset()
        self._kind = type(values)
        self._memory: Any = None

    @classmethod
    def _of(cls, parts: Parts, *window: int) -> Self:
        self = cls.__new__(cls)
        self._set(parts, *window)
        return self

    # --- elements ----------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int:
            return self._select(index)
        if index < 0:
            index += self._length
        if not 0 <= index < self._length:
            given = index if index >= 0 else index - self._length
            raise IndexError(f"element {given} is out of range for {self._length} elements.")
        row = self._first + index * self._step
        at = self._at
        start = at[row]
        ndim = self.ndim
        size = self._sizes[row * ndim : row * ndim + ndim].tolist()
        strides = []
        step = 1
        for n in reversed(size):
            if n <= 0:  # as_strided takes negative sizes now and then
                return self._unusual(row)
            strides.append(step)
            step *= n
        if step != at[row + 1] - start or start < 0:
            return self._unusual(row)
        strides.reverse()
        try:
            result = self._view(size, strides, self._base + start)
        except RuntimeError:  # beyond the end of the storage
            return self._unusual(row)
        result.__class__ = self._kind
        return result

    def _unusual(self, row: int) -> Tensor:
        """Return an empty element, or say what is wrong with this one."""
        start, stop = self._at[row], self._at[row + 1]
        shape = tuple(self._parts.shapes[row].tolist())
        values = self._parts.values
        if start == stop and 0 in shape and min(shape) >= 0 and 0 <= start <= len(values):
            try:
                return values[start:stop].view(shape)
            except RuntimeError:
                pass  # the product of the other sizes overflows
        raise SizeError(complaint(row, start, stop, shape, len(values)))

    def _select(self, index: Any) -> Any:
        if isinstance(index, slice):
            chosen = range(self._length)[index]
            if not chosen:
                return self._of(self._parts, 0, 1, 0)
            first, step = self._first + chosen.start * self._step, self._step * chosen.step
            return self._of(self._parts, first, step, len(chosen))
        number = row_number(index)
        if number is None:
            return self._gather(row_numbers(index, self._length))
        return self[number]

    def _table(self) -> Integers:
        return self._parts.shapes[self._rows()]

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._length):
            yield self[index]

    def unbind(self) -> tuple[Any, ...]:
        """Return all elements, as views."""
        return tuple([self[index] for index in range(self._length)])

    def to_list(self) -> list[Any]:
        """Return all elements in a list, as views: the inverse of `from_tensors`."""
        return list(self.unbind())

    def tolist(self) -> list[Any]:
        """Return all elements as nested lists of Python numbers."""
        return [element.tolist() for element in self]

    def __setitem__(self, index: Any, value: Any) -> None:
        number = row_number(index)
        if number is None:
            raise TypeError(
                f"elements are assigned one at a time, j[i] = tensor, got index {index!r}."
            )
        refuse_write(self._parts.values, "j[...] = ...")
        element = self[number]
        dtype = dtype_of(value)
        if tuple(value.shape) != tuple(element.shape):
            raise ShapeError(
                f"element {number} has shape {tuple(element.shape)}, which cannot change, got "
                f"{tuple(value.shape)}."
            )
        if dtype != self.dtype:
            raise DtypeError(
                f"the elements have dtype {self.dtype}, got {dtype}. Nothing is converted "
                "silently: convert the value first."
            )
        if isinstance(value, Tensor):
            element.copy_(value)
        elif value.flags.c_contiguous and value.size:
            start = (element.storage_offset() - self._base) * self.dtype.itemsize
            data = value.reshape(-1).view(np.uint8).data
            self._bytes()[start : start + len(data)] = data
        else:
            np.copyto(as_array(element), value, casting="no")

    def fill_(self, value: Any) -> Self:
        """Set every number of every element; returns the jagged tensor."""
        refuse_write(self._parts.values, "j.fill_()")
        if self._step == 1:
            self.values.fill_(value)
        else:
            for element in self:
                element.fill_(value)
        return self

    # --- the parts ---------------------------------------------------------------------

    def _contiguous(self) -> tuple[int, int] | None:
        """Return where the elements start and stop if they lie one after the other.

        Raises
        ------
        SizeError
            If that is outside of the values.
        """
        if self._step != 1:
            return None
        start, stop = self._at[self._first], self._at[self._first + self._length]
        if not 0 <= start <= stop <= len(self._parts.values):
            self._check()
        return start, stop

    @property
    def values(self) -> Tensor:
        """All elements one after the other, in one dimension.

        Of a slice, its own part: a view; of a slice with a step, which leaves some out, a copy.
        """
        bounds = self._contiguous()
        if bounds is None:
            return self._compact().values
        values = self._parts.values
        return values if bounds == (0, len(values)) else values[bounds[0] : bounds[1]]

    @property
    def offsets(self) -> Tensor:
        """Where each element starts in `values`, and where the last one stops: int64, n + 1.

        A view; of a slice that does not start at the first element, a copy that starts at 0.
        """
        bounds = self._contiguous()
        if bounds is None:
            return self._compact().offsets
        window = self._parts.offsets[self._first : self._first + self._length + 1]
        return torch.from_numpy(window - bounds[0]) if bounds[0] else _tensor(window)

    @property
    def shapes(self) -> Tensor:
        """The shape of each element: int64, n x ndim. A view, but for a negative step."""
        table = self._table()
        return torch.from_numpy(table.copy()) if self._step < 0 else _tensor(table)

    def numel(self) -> int:
        """Return how many numbers all elements have together."""
        bounds = self._contiguous()
        if bounds is not None:
            return bounds[1] - bounds[0]
        starts, stops = self._bounds()
        return int((stops - starts).sum())

    @property
    def nbytes(self) -> int:
        """The bytes of all elements together."""
        return self.numel() * self.dtype.itemsize

    @property
    def filename(self) -> str:
        """The absolute path of the file of the values.

        Raises
        ------
        RuntimeError
            If the values are in memory without a file.
        """
        mapping = mapping_of(self._parts.values)
        if mapping is None or mapping.path is None:
            raise RuntimeError("the values are in memory and have no file.")
        return mapping.path

    @property
    def mode(self) -> ModeName | None:
        """``"r"``, ``"r+"`` or ``"c"``; None for regular memory."""
        mapping = mapping_of(self._parts.values)
        return None if mapping is None else mapping.mode.name

    def flush(self) -> None:
        """Write changes to stable storage, in mode ``"r+"``; of a slice with a step, all of them.

        Raises
        ------
        OSError
            If the device reports an error.
        """
        whole = self
        if self._contiguous() is None:  # what it has of its own are copies
            whole = self._of(self._parts)
        for part in (whole.values, whole.offsets, whole.shapes):
            if isinstance(part, MemoryMappedTensor):
                part.flush()

    def __repr__(self) -> str:
        mapping = mapping_of(self._parts.values)
        where = "" if mapping is None else f", filename={mapping.path!r}, mode={self.mode!r}"
        what = f"len={self._length}, ndim={self.ndim}, dtype={self.dtype}"
        return f"{type(self).__name__}({what}{where})"

    # --- copies and references ---------------------------------------------------------

    def _chunks(self) -> Iterator[memoryview]:
        """Yield the bytes of all elements, for `rawfile.write_chunks`.

        Raises
        ------
        SizeError
            Before the first byte, if an element is damaged: it would be what it is not.
        """
        bounds = self._contiguous()
        self._check()
        if bounds is not None:
            itemsize = self.dtype.itemsize
            yield self._bytes()[bounds[0] * itemsize : bounds[1] * itemsize]
            return
        for start in range(0, self._length, 1024):
            yield self[start : start + 1024]._compact()._bytes()

    def __copy__(self) -> Self:
        return self._of(self._parts, self._first, self._step, self._length)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = self._compact()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not for_checkpoint(protocol) and (reduced := self._reference()) is not None:
            return reduced
        copy = self._compact()._parts
        values = copy.values
        if values.dtype in UNREADABLE:  # the class knows how to pickle it all the same
            values = values.as_subclass(MemoryMappedTensor)
        return _from_values, (type(self), values, copy.shapes)

    def _reference(self) -> tuple[Any, ...] | None:
        """Describe this for another process; None if only a copy of the values will do."""
        parts = self._parts
        window = (self._first, self._step, self._length)
        if isinstance(parts.source, Files):
            described = refer(parts.source)
            if described is None:
                return None
            # The name of a dtype is shorter than its reference.
            return _from_files, (type(self), str(self.dtype)[6:], *window, *described)
        if parts.source is None and isinstance(parts.values, MemoryMappedTensor):
            # The values know themselves how they travel; offsets are computed again.
            if self._step == 1:
                return _from_values, (type(self), self.values, _tensor(self._table()))
            return _from_values, (type(self), parts.values, _tensor(parts.shapes), *window)
        return None

    def _reduce_across(self) -> Any:
        """Reduce for `multiprocessing`, which can send descriptors."""
        reduced = self._reference()
        if reduced is not None:
            return keep_until_started(reduced)
        parts, window = self._parts, (self._first, self._step, self._length)
        if not isinstance(parts.source, SharedMapping):
            # One block and one descriptor, whatever it consists of.
            table = np.ascontiguousarray(self._table())
            parts, window = make_parts(self.dtype, table, self._chunks(), None), (0, 1, len(self))
        return _from_block, (type(self), parts.source, self.dtype, parts.shapes.shape, window)


def _tensor(array: Integers) -> Tensor:
    if mapping_of_array(array) is not None:
        return MemoryMappedTensor.from_numpy(array)
    return torch.from_numpy(array)


def _from_files(
    kind: type[JaggedTensor], dtype: str, first: int, step: int, length: int, *described: Any
) -> JaggedTensor:
    found: torch.dtype = getattr(torch, dtype)
    return kind._of(
        on_files(reopen(*described, itemsize=found.itemsize), found), first, step, length
    )


def _from_block(
    kind: type[JaggedTensor],
    block: SharedMapping,
    dtype: torch.dtype,
    size: tuple[int, int],
    window: tuple[int, int, int],
) -> JaggedTensor:
    return kind._of(on_block(block, dtype, *size), *window)


def _from_values(
    kind: type[JaggedTensor], values: Tensor, shapes: Any, *window: int
) -> JaggedTensor:
    return kind._of(with_shapes(values, shapes), *window)


def _collate(batch: list[Any], **_: Any) -> Any:
    """Take a batch that `__getitems__` has gathered as it is; samples stay a list."""
    return batch[0] if type(batch) is Gathered else list(batch)


class _Door:
    """What `MemoryMappedTensor` makes of a table of shapes, and of a nested tensor."""

    @staticmethod
    def filled(
        shapes: Any, dtype: Any, value: Any, filename: Any, existsok: bool, preallocate: bool
    ) -> JaggedTensor:
        return JaggedTensor._of(
            filled_parts(
                shapes, dtype, value, filename, existsok=existsok, preallocate=preallocate
            )
        )

    @staticmethod
    def open_tensor(
        filename: Any, dtype: Any, shapes: Any, mode: Any, offset: int, partial: bool
    ) -> JaggedTensor:
        if offset or partial:
            raise TypeError("a jagged tensor is a whole file: offset and partial are not for it.")
        return JaggedTensor.from_filename(filename, dtype, shapes, mode)

    @staticmethod
    def from_nested(
        nested: Tensor, filename: Any, existsok: bool, copy_data: bool, shape: Any
    ) -> JaggedTensor:
        if shape is not None:
            raise TypeError("a nested tensor has the shapes that it has: leave shape= out.")
        dtype, shapes, chunks = read_nested(nested)
        return JaggedTensor._of(
            make_parts(dtype, shapes, chunks if copy_data else None, filename, existsok=existsok)
        )

    @staticmethod
    def from_storage(storage: Any, shapes: Any, dtype: Any, filename: Any) -> JaggedTensor:
        return JaggedTensor._of(on_storage(storage, dtype, shapes, filename))


register_jagged(_Door)
ForkingPickler.register(JaggedTensor, JaggedTensor._reduce_across)
default_collate_fn_map[JaggedTensor] = _collate
