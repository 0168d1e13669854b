"""How memory that is there becomes a tensor: files, arrays, storages and named blocks."""

import os
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmtensor.arrays import mapping_of_array, refuse_mask
from mmtensor.blocks import open_block
from mmtensor.dtypes import canonical_name, numpy_dtype
from mmtensor.errors import DeviceError
from mmtensor.geometry import as_offset, as_shape, c_strides, fit
from mmtensor.mapping import FileMapping, Mapping, MemoryMapping, map_descriptor, map_file
from mmtensor.modes import MODES, ModeName
from mmtensor.rawfile import Path, absolute, open_existing
from mmtensor.shared_memory import SharedMapping
from mmtensor.storage import as_kind, native_dtype, tensor_on
from mmtensor.syscalls import maps_line
from mmtensor.tables import is_table, jagged

__all__ = [
    "attach",
    "check_device",
    "from_numpy",
    "from_storage",
    "is_array",
    "open_tensor",
]

_T = TypeVar("_T")


def check_device(device: Any) -> None:
    """Raise a `DeviceError` unless `device` is None or the CPU."""
    if device is not None and torch.device(device).type != "cpu":
        raise DeviceError(
            f"a memory-mapped tensor lives on the CPU, got device={str(device)!r}. Leave the "
            "device out and copy batches there: x[ids].to(device)."
        )


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array."""
    return isinstance(value, np.ndarray)


def _check_alignment(offset: int, dtype: torch.dtype) -> None:
    if offset % dtype.itemsize:
        raise ValueError(
            f"offset must be a multiple of the {dtype.itemsize} bytes of {dtype} for a tensor, "
            f"got {offset}. Open the file with mmtensor.open_array, which takes any offset, and "
            "copy what you need."
        )


def open_tensor(
    filename: Path,
    dtype: Any,
    shape: Any,
    mode: ModeName | None,
    offset: int,
    partial: bool,
) -> Tensor:
    """Open a raw file as a plain tensor; see `MemoryMappedTensor.from_filename`."""
    if type(shape) is not tuple and is_table(shape):
        door = jagged()
        return door.open_tensor(filename, dtype, shape, mode, offset, partial)  # type: ignore[no-any-return]  # of jagged
    found = native_dtype(dtype)
    if type(offset) is not int or offset:
        offset = as_offset(offset)
        _check_alignment(offset, found)
    mapping, sizes = map_file(
        absolute(filename), mode, numpy_dtype(found), as_shape(shape, infer=True), offset, partial
    )
    return tensor_on(mapping, found, sizes)


def attach(shm_or_name: Any, dtype: Any, shape: Any, offset: int) -> Tensor:
    """Attach to a block that someone else owns; see `MemoryMappedTensor.from_shared_memory`."""
    name = shm_or_name if isinstance(shm_or_name, str) else getattr(shm_or_name, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            "expected a multiprocessing.shared_memory.SharedMemory or its name, "
            f"got {shm_or_name!r}."
        )
    found = native_dtype(dtype)
    offset = as_offset(offset)
    _check_alignment(offset, found)
    sizes = as_shape(shape, infer=True)
    fd, status = open_block(name)
    try:
        sizes, nbytes = fit(
            sizes,
            numpy_dtype(found),
            status.st_size,
            offset=offset,
            partial=True,
            what="shared-memory block",
            name=name,
        )
    except BaseException:
        os.close(fd)
        raise
    return tensor_on(SharedMapping.adopt(fd, nbytes, offset), found, sizes)


def from_numpy(kind: type[_T], array: np.ndarray[Any, Any]) -> _T:
    """Return a tensor on an array's memory; see `MemoryMappedTensor.from_numpy`."""
    if not is_array(array):
        raise TypeError(f"expected a NumPy array, got {type(array)!r}.")
    refuse_mask(array)
    dtype = native_dtype(canonical_name(array.dtype))
    steps = array.strides
    itemsize = array.itemsize
    if array.size and (min(steps, default=0) < 0 or any(step % itemsize for step in steps)):
        raise ValueError(
            "strides must be non-negative multiples of the element size for a tensor, got "
            f"{steps} for {itemsize} bytes. Pass a copy: array.copy()."
        )
    strides = tuple([step // itemsize for step in steps]) if array.size else c_strides(array.shape)
    if not array.flags.aligned:
        raise ValueError(
            f"the array must be aligned for a tensor, but its elements of {itemsize} bytes are "
            "not at a multiple of what their dtype needs. Pass a copy: array.copy()."
        )
    mapping, start = _mapping_under(array)
    if start % itemsize:
        raise ValueError(
            f"the array must start at a multiple of its {itemsize} bytes per element for a "
            f"tensor, but it starts {start} bytes into its memory. Pass a copy: array.copy()."
        )
    return as_kind(kind, tensor_on(mapping, dtype, array.shape, strides, start // itemsize))


def _mapping_under(array: np.ndarray[Any, Any]) -> tuple[Mapping, int]:
    """Find or make the mapping that holds an array, and the array's first byte in it."""
    address = array.__array_interface__["data"][0]
    mapping = mapping_of_array(array)
    if mapping is not None and (mapping.mode.writeable == array.flags.writeable or not array.size):
        return mapping, address - mapping.address if array.size else 0
    extent = (
        sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
        + array.itemsize
        if array.size
        else 0
    )
    mode = MODES["r+" if array.flags.writeable else "r"]
    path, opened, offset = _foreign_memmap(array) or (None, None, 0)
    if path is not None and extent:
        remapped = _map_again(path, address, extent, mode.name)
        if remapped is not None:
            return remapped, 0
        if mode.writeable and opened == "c":
            mode = MODES["c"]
    return MemoryMapping(array, address, extent, mode, path, offset), 0


def _foreign_memmap(array: np.ndarray[Any, Any]) -> tuple[str, str, int] | None:
    """Return file, mode and position in the file of memory that `numpy.memmap` has opened."""
    opened: Any = None
    base: Any = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and base.filename is not None:
            opened = base  # views have its attributes as well: the last one is what was opened
        base = base.base
    if opened is None:
        return None
    first, here = (a.__array_interface__["data"][0] for a in (opened, array))
    path = str(os.path.abspath(os.fspath(opened.filename)))
    return path, str(opened.mode), int(opened.offset) + here - first


def _map_again(path: str, address: int, nbytes: int, mode: ModeName) -> FileMapping | None:
    """Map the same bytes of the same file as a foreign shared map does; None if it cannot be."""
    line = maps_line(address)
    if line is None or not line.shared:
        return None
    try:
        fd, status, found = open_existing(path, mode)
    except (OSError, ValueError):
        return None
    try:
        if status.st_ino != line.inode or status.st_size < line.position + nbytes:
            return None
        return map_descriptor(fd, status, path, found, line.position, nbytes)
    finally:
        os.close(fd)


def from_storage(
    kind: type[_T], storage: Any, shape: Any, dtype: Any, filename: Path | None
) -> _T:
    """Return a tensor on a storage; see `MemoryMappedTensor.from_storage`."""
    if is_table(shape):
        door = jagged()
        return door.from_storage(storage, shape, dtype, filename)  # type: ignore[no-any-return]  # of jagged
    if isinstance(storage, torch.TypedStorage):
        dtype = storage.dtype if dtype is None else dtype
        storage = storage._untyped_storage
    if not isinstance(storage, torch.UntypedStorage):
        raise TypeError(f"expected a torch storage, got {type(storage)!r}.")
    check_device(storage.device)
    found = torch.uint8 if dtype is None else native_dtype(dtype)
    sizes, _ = fit(
        as_shape(-1 if shape is None else shape, infer=True),
        numpy_dtype(found),
        storage.nbytes(),
        what="storage",
    )
    mapping = _mapping_of_storage(storage, None if filename is None else absolute(filename))
    if mapping is not None:
        return as_kind(kind, tensor_on(mapping, found, sizes))
    tensor = torch.empty(0, dtype=found, device="cpu")
    return as_kind(kind, tensor.set_(storage, 0, sizes, c_strides(sizes)))


def _mapping_of_storage(storage: Any, path: str | None) -> Mapping | None:
    mapping: Mapping | None = getattr(storage, "mapping", None)
    own = storage.filename if mapping is None else mapping.path
    own = None if own is None else os.path.abspath(own)
    if path is not None and own is not None and own != path:
        raise RuntimeError(f"the storage is of the file {own!r}, not of filename={path!r}.")
    if mapping is not None or (path is None and own is None) or not storage.nbytes():
        return mapping
    name: Any = path or own
    again = _map_again(name, storage.data_ptr(), storage.nbytes(), "r+")
    if again is None and own is None:
        raise RuntimeError(
            f"the storage is not a shared map of the file {path!r}. Leave filename out to wrap "
            "it as it is, or open the file with MemoryMappedTensor.from_filename."
        )
    return again
