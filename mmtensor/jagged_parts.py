"""How the three parts of a jagged tensor come to be: on files, in a block, in regular memory."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmtensor.adoption import from_storage
from mmtensor.creation import repeated
from mmtensor.dtypes import numpy_dtype
from mmtensor.errors import ShapeError, SizeError
from mmtensor.jagged_files import Files, int64_on, open_files
from mmtensor.jagged_layout import Integers, as_shapes, check_rows, counts_of, offsets_of
from mmtensor.jagged_saving import write_files
from mmtensor.mapping import map_file
from mmtensor.rawfile import Chunk, Path, absolute
from mmtensor.shared_memory import SharedMapping
from mmtensor.storage import native_dtype, tensor_on
from mmtensor.tensor import MemoryMappedTensor

__all__ = [
    "Parts",
    "filled_parts",
    "make_parts",
    "on_block",
    "on_files",
    "on_storage",
    "open_parts",
    "with_shapes",
]

# Where the values start in a block: no dtype needs more.
_ALIGNMENT = 64


class Parts(NamedTuple):
    """Values, offsets and shapes of a jagged tensor.

    Parameters
    ----------
    values
        1-D; memory-mapped or regular.
    offsets, shapes
        int64; n + 1, and n x d.
    source
        The mappings that hold all three, if they are on files or in one block.
    """

    values: Tensor
    offsets: Integers
    shapes: Integers
    source: Files | SharedMapping | None = None


def on_files(files: Files, dtype: torch.dtype) -> Parts:
    """Return parts that stand on three mapped files."""
    values = tensor_on(files.values, dtype, (files.total,))
    values.__class__ = MemoryMappedTensor
    writeable = files.offsets.mode.writeable
    offsets, shapes = int64_on(files.offsets), int64_on(files.shapes)
    if not writeable:
        offsets.flags.writeable = shapes.flags.writeable = False
    return Parts(values, offsets, shapes.reshape(files.length, files.ndim), files)


def on_block(block: SharedMapping, dtype: torch.dtype, length: int, ndim: int) -> Parts:
    """Return parts that stand in one block: offsets, shapes, values, one after the other."""
    words = block.view(np.dtype(np.int64), (_header(length, ndim) // 8,))
    offsets = words[: length + 1]
    shapes = words[length + 1 : length + 1 + length * ndim].reshape(length, ndim)
    start = _header(length, ndim) // dtype.itemsize
    values = tensor_on(block, dtype, (int(offsets[-1]),), (1,), start)
    values.__class__ = MemoryMappedTensor
    return Parts(values, offsets, shapes, block)


def _header(length: int, ndim: int) -> int:
    nbytes = 8 * (length + 1 + length * ndim)
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def make_parts(
    dtype: torch.dtype,
    shapes: Integers,
    chunks: Iterable[Chunk] | None,
    filename: Path | None,
    *,
    existsok: bool = False,
    preallocate: bool = True,
) -> Parts:
    """Write values, shapes and offsets to three files, or to a block of shared memory.

    Parameters
    ----------
    dtype, shapes
        Of the elements.
    chunks
        The bytes of all values; None for zeros.
    filename
        Of the values; None for anonymous memory.
    existsok, preallocate
        As for `arrays.create_array`.
    """
    offsets = offsets_of(counts_of(shapes), dtype.itemsize)
    if filename is not None:
        files = write_files(
            absolute(filename),
            numpy_dtype(dtype),
            shapes,
            offsets,
            chunks,
            existsok=existsok,
            preallocate=preallocate,
        )
        return on_files(files, dtype)
    length, ndim = shapes.shape
    header = np.zeros(_header(length, ndim) // 8, np.int64)
    header[: length + 1] = offsets
    header[length + 1 : length + 1 + shapes.size] = shapes.reshape(-1)

    def pieces() -> Iterable[Chunk]:
        yield header.data
        yield from chunks or ()

    nbytes = header.nbytes + int(offsets[-1]) * dtype.itemsize
    return on_block(SharedMapping.create(nbytes, pieces()), dtype, length, ndim)


def filled_parts(
    shapes: Any,
    dtype: Any,
    fill_value: Any,
    filename: Path | None,
    *,
    existsok: bool = False,
    preallocate: bool = True,
) -> Parts:
    """Make elements of given shapes with one value everywhere."""
    table = as_shapes(shapes)
    found = torch.get_default_dtype() if dtype is None else native_dtype(dtype)
    chunks = None
    if fill_value is not None and (type(fill_value) is not int or fill_value != 0):
        total = int(offsets_of(counts_of(table), found.itemsize)[-1])
        chunks = repeated(fill_value, found, total * found.itemsize)
    return make_parts(found, table, chunks, filename, existsok=existsok, preallocate=preallocate)


def open_parts(filename: Path, dtype: Any, shapes: Any, mode: str | None) -> Parts:
    """Open files; see `JaggedTensor.from_filename`."""
    found = native_dtype(dtype)
    path = absolute(filename)
    if shapes is None:
        return on_files(open_files(path, mode, numpy_dtype(found)), found)
    table, offsets = _layout(shapes, found)
    mapping, _ = map_file(path, mode, numpy_dtype(found), (int(offsets[-1]),))
    values = tensor_on(mapping, found, (int(offsets[-1]),))
    values.__class__ = MemoryMappedTensor
    return Parts(values, offsets, table)


def on_storage(storage: Any, dtype: Any, shapes: Any, filename: Path | None) -> Parts:
    """Return parts whose values are a storage; see `MemoryMappedTensor.from_storage`."""
    if isinstance(storage, torch.TypedStorage) and dtype is None:
        dtype = storage.dtype
    found = torch.uint8 if dtype is None else native_dtype(dtype)
    table, offsets = _layout(shapes, found)
    values = from_storage(MemoryMappedTensor, storage, (int(offsets[-1]),), found, filename)
    return Parts(values, offsets, table)


def with_shapes(values: Tensor, shapes: Any, offsets: Any = None) -> Parts:
    """Return parts of values that are there.

    Parameters
    ----------
    values
        1-D.
    shapes
        As for `jagged_layout.as_shapes`.
    offsets
        One more than there are shapes; None: computed from the shapes.

    Raises
    ------
    SizeError
        If they do not fit together.
    """
    table, computed = _layout(shapes, values.dtype)
    if values.dim() != 1:
        raise ShapeError(f"values must have one dimension, got shape {tuple(values.shape)}.")
    if not values.is_contiguous() or values.is_conj() or values.is_neg():
        raise ValueError("values must be contiguous. Pass a copy: values.contiguous().")
    if offsets is None:
        if len(values) != computed[-1]:
            raise SizeError(
                f"values must be {computed[-1]} numbers for these shapes, got {len(values)}."
            )
        return Parts(values, computed, table)
    given = np.ascontiguousarray(offsets)
    if given.dtype.kind not in "iu":
        raise TypeError(f"offsets must be integers, got {given.dtype}.")
    if given.shape != computed.shape:
        raise SizeError(
            f"offsets must be {len(computed)} numbers, one more than there are shapes, got shape "
            f"{given.shape}."
        )
    given = given.astype(np.int64, copy=False)
    check_rows(given[:-1], given[1:], table, len(values))
    return Parts(values, given, table)


def _layout(shapes: Any, dtype: torch.dtype) -> tuple[Integers, Integers]:
    table = as_shapes(shapes)
    return table, offsets_of(counts_of(table), dtype.itemsize)
