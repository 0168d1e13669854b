"""How new memory becomes a tensor: files and shared memory that are written here."""

import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmtensor.adoption import check_device, from_numpy, from_storage, is_array, open_tensor
from mmtensor.arrays import byte_chunks
from mmtensor.dtypes import canonical_name
from mmtensor.errors import GradientError
from mmtensor.geometry import as_shape, byte_count
from mmtensor.mapping import FileMapping, Mapping, create_quickly, map_new
from mmtensor.rawfile import (
    CHUNK,
    Chunk,
    NewFile,
    Path,
    Piece,
    absolute,
    reserve,
    write_chunks,
)
from mmtensor.shared_memory import SharedMapping
from mmtensor.storage import (
    NATIVE,
    as_kind,
    mapping_of,
    native_dtype,
    on_same_memory,
    tensor_on,
    words,
)
from mmtensor.syscalls import HAVE_MMAP
from mmtensor.tables import is_table, jagged

__all__ = [
    "at_once",
    "check_regular",
    "chunks_of",
    "file_chunks",
    "filled",
    "from_source",
    "from_tensor",
    "repeated",
    "shape_and_dtype",
    "sizes_of",
]

_T = TypeVar("_T")


def check_regular(tensor: Any) -> None:
    """Raise unless `tensor` is a dense torch tensor that requires no gradients."""
    if not isinstance(tensor, Tensor):
        hint = ""
        if is_array(tensor):
            hint = (
                " Use MemoryMappedTensor.from_numpy for a tensor on an array's memory, or "
                "mmtensor.save_array to write the array to a file."
            )
        raise TypeError(f"expected a torch tensor, got {type(tensor)!r}.{hint}")
    if tensor.requires_grad:
        raise GradientError(
            "a memory-mapped tensor cannot require gradients, but the input does. Pass x.detach()."
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"expected a dense tensor, got layout {tensor.layout}"
            f"{' (nested)' if tensor.is_nested else ''}. Convert it first, for example with "
            "x.to_dense(), or store its parts."
        )
    if tensor.is_meta:
        raise TypeError("expected a tensor with data, got one on the device 'meta'.")


def sizes_of(size: tuple[Any, ...], shape: Any) -> Any:
    """Read ``*size``, one sequence, or ``shape=`` as a tuple of ints; a table stays as it is.

    Raises
    ------
    TypeError
        If both or neither are given, or something in them is no integer.
    """
    if shape is not None:
        if size:
            raise TypeError(f"pass sizes or shape=, not both: got {size} and shape={shape!r}.")
        return shape if is_table(shape) else as_shape(shape)
    if not size:
        raise TypeError("a shape is required: sizes, one sequence of sizes, or shape=.")
    if len(size) == 1:
        return size[0] if is_table(size[0]) else as_shape(size[0])
    return as_shape(size)


def from_tensor(
    kind: type[_T],
    input: Any,
    filename: Path | None,
    existsok: bool,
    copy_existing: bool,
    copy_data: bool,
    shape: Any,
) -> _T:
    """Write a tensor to a file or to shared memory; see `MemoryMappedTensor.from_tensor`."""
    if type(input) is not Tensor and hasattr(input, "full_tensor"):
        input = input.full_tensor()  # a DTensor, whose parts are elsewhere
    if isinstance(input, Tensor) and input.is_nested:
        return jagged().from_nested(input, filename, existsok, copy_data, shape)  # type: ignore[no-any-return]  # of jagged
    check_regular(input)
    canonical_name(input.dtype)
    path = None if filename is None else absolute(filename)
    mapping = mapping_of(input) if input.is_cpu else None
    if shape is None and mapping is not None and _is_there(input, mapping, path):
        return on_same_memory(kind, input)
    if (
        path is not None
        and mapping is not None
        and mapping.path not in (None, path)
        and not copy_existing
    ):
        raise RuntimeError(
            f"the input has a file already ({mapping.path}), and {path} is another one. Pass "
            "copy_existing=True to copy it there."
        )
    if shape is not None:
        input = input.broadcast_to(as_shape(shape))
    nbytes = byte_count(input.shape, input.itemsize)
    chunks = file_chunks(input) if copy_data else None
    mapping = _write(path, chunks, nbytes, existsok)
    return as_kind(kind, tensor_on(mapping, input.dtype, tuple(input.shape)))


def _is_there(tensor: Tensor, mapping: Mapping, path: str | None) -> bool:
    """Whether a tensor is where `from_tensor` should put it."""
    if path is None:
        return isinstance(mapping, SharedMapping)
    return (
        isinstance(mapping, FileMapping)
        and mapping.path == path
        and mapping.mode.shared
        and mapping.offset == 0
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and mapping.is_at_path()
        and mapping.size == tensor.nbytes
    )


def _write(
    path: str | None,
    chunks: Iterable[Chunk] | None,
    nbytes: int,
    existsok: bool = False,
    preallocate: bool = True,
) -> Mapping:
    """Make a file or a block of shared memory, of zeros or of the given bytes."""
    if path is None:
        return SharedMapping.create(nbytes, chunks)
    if preallocate and not existsok:
        quick = at_once(path, chunks, nbytes)
        if quick is not None:
            return quick
    with NewFile(path, existsok=existsok, nbytes=nbytes) as file:
        if chunks is None:
            reserve(file.fd, nbytes, preallocate=preallocate)
        else:
            write_chunks(file.fd, chunks, nbytes)
        mapping = map_new(file.fd, path, nbytes)
        file.publish()
    return mapping


def at_once(
    path: str, chunks: Iterable[Chunk] | None, nbytes: int, name: str | None = None, root: int = -1
) -> FileMapping | None:
    """Make a file of zeros, or of what `file_chunks` gave, in one step; None: with care, then.

    A large one looks at the target before it is written, and listens to Ctrl-C meanwhile.
    """
    if not 0 < nbytes <= CHUNK:
        return None
    address = 0
    if chunks is not None:
        if type(chunks) is not tuple or type(chunks[0]) is not Piece or chunks[0].nbytes != nbytes:
            return None
        address = chunks[0].address
    if name is None:
        return create_quickly(path, address, nbytes)
    return create_quickly(path, address, nbytes, name=name, dir_fd=root)


def chunks_of(tensor: Tensor) -> Iterable[Chunk]:
    """Return the bytes of a tensor in C order, in pieces that need little extra memory."""
    if tensor.is_contiguous() and tensor.is_cpu and tensor.numel():
        if type(tensor) is Tensor and tensor.dtype in NATIVE:
            try:
                return (Tensor.numpy(tensor),)  # at a third of what follows
            except RuntimeError:
                pass  # read-only, or its bytes are not yet what its values are
        if not (tensor.is_conj() or tensor.is_neg()):
            return (words(tensor),)
    return _pieces(tensor)


def file_chunks(tensor: Tensor) -> Iterable[Chunk]:
    """Return the bytes of a tensor for `write_chunks`: as `chunks_of`, or by their address.

    NumPy's array of a tensor takes 1 us to make, and 6 where the caches of the processor are
    cold, as they are after each write of another tensor.
    """
    if HAVE_MMAP and type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous():
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            address = 0  # read-only, or being traced
        if address and not (tensor.is_conj() or tensor.is_neg()):
            return (Piece(tensor, address, tensor.nbytes),)
    return chunks_of(tensor)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    if tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg()):
        yield from byte_chunks(words(tensor))
        return
    if tensor.dim() == 0 or tensor.nbytes <= CHUNK:
        yield from byte_chunks(words(tensor.cpu().resolve_conj().resolve_neg()))
        return
    parts: Any = Tensor.split  # untyped in torch
    for part in parts(tensor, max(1, CHUNK * len(tensor) // tensor.nbytes)):
        # A row may still be large: take it apart as well.
        yield from _pieces(part[0] if len(part) == 1 else part)


def shape_and_dtype(model: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return what the ``*_like`` constructors take from a tensor.

    Raises
    ------
    TypeError
        If `model` is none.
    """
    if not isinstance(model, Tensor):
        raise TypeError(f"expected a torch tensor, got {type(model)!r}.")
    return tuple(model.shape), model.dtype


def filled(
    kind: type[_T],
    shape: tuple[int, ...],
    dtype: Any,
    fill_value: Any,
    filename: Path | None,
    existsok: bool = False,
    preallocate: bool = True,
) -> _T:
    """Make a tensor of one value; see `MemoryMappedTensor.full`."""
    if type(shape) is not tuple:  # a table: everything else is a tuple by now
        return jagged().filled(shape, dtype, fill_value, filename, existsok, preallocate)  # type: ignore[no-any-return]  # of jagged
    found = torch.get_default_dtype() if dtype is None else native_dtype(dtype)
    nbytes = byte_count(shape, found.itemsize)
    path = None if filename is None else absolute(filename)
    chunks = None
    if type(fill_value) is not int or fill_value != 0:
        chunks = repeated(fill_value, found, nbytes)
    mapping = _write(path, chunks, nbytes, existsok, preallocate)
    return as_kind(kind, tensor_on(mapping, found, shape))


def repeated(fill_value: Any, dtype: torch.dtype, nbytes: int) -> Iterator[memoryview]:
    """Return the bytes of one value, again and again, as chunks to write.

    Raises
    ------
    RuntimeError
        If the dtype has no such value, as `torch.full` does.
    """
    # Of fewer elements torch makes infinity, or the largest number, of what overflows.
    value = torch.full((4,), fill_value, dtype=dtype, device="cpu")[0]
    return _copies(words(value).tobytes(), nbytes)


def _copies(element: bytes, nbytes: int) -> Iterator[memoryview]:
    pattern = memoryview(element * min(CHUNK // len(element), nbytes // len(element)))
    left = nbytes
    while left:
        chunk = pattern[: min(left, len(pattern))]
        yield chunk
        left -= len(chunk)


def from_source(
    kind: type[_T],
    source: Any,
    dtype: Any,
    shape: Any,
    index: Any,
    device: Any,
    filename: Path | None,
) -> _T:
    """Do what `MemoryMappedTensor` itself does with its arguments."""
    check_device(device)
    result: Any
    if isinstance(source, (str, bytes, os.PathLike)):
        if filename is not None:
            raise TypeError(f"got two filenames: {source!r} and filename={filename!r}.")
        if dtype is None or shape is None:
            raise TypeError("opening a file needs dtype and shape.")
        result = open_tensor(source, dtype, shape, None, 0, False)
        result = as_kind(kind, result) if isinstance(result, Tensor) else result
    elif isinstance(source, (torch.UntypedStorage, torch.TypedStorage)):
        result = from_storage(kind, source, shape, dtype, filename)
    elif dtype is not None:
        raise TypeError(
            f"dtype={dtype!r} cannot be given with data that has one. Convert the data first."
        )
    elif (
        shape is not None
        and filename is None
        and as_shape(shape) != tuple(getattr(source, "shape", ()))
    ):
        raise TypeError(
            f"shape={shape!r} goes with a file or a storage, or with data and the filename= to "
            "write it to. Pass x.view(shape) or x.expand(shape)."
        )
    elif filename is not None:
        array = is_array(source)
        tensor: Any = from_numpy(kind, source) if array else source
        result = from_tensor(kind, tensor, filename, False, array, True, shape)
    elif is_array(source):
        result = from_numpy(kind, source)
    else:
        check_regular(source)
        check_device(source.device)
        result = on_same_memory(kind, source)
    return result if index is None else result[index]  # type: ignore[no-any-return]  # any index
