"""NumPy arrays over mappings: open, create, save, locate. Usable without torch."""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mmtensor.dtypes import numpy_dtype
from mmtensor.geometry import as_offset, as_shape, byte_count
from mmtensor.mapping import FileMapping, Mapping, map_file, map_new
from mmtensor.modes import ModeName, resolve_mode
from mmtensor.rawfile import CHUNK, NewFile, Path, absolute, reserve, write_chunks

__all__ = [
    "Location",
    "MemoryMappedArray",
    "byte_chunks",
    "create_array",
    "locate",
    "mapping_of_array",
    "open_array",
    "refuse_mask",
    "save_array",
]


class MemoryMappedArray(np.memmap):
    """The `numpy.memmap` that `open_array` and `create_array` return.

    It has the attributes of `numpy.memmap`, and holds no file descriptor. Slices and other
    views are of this class, results of arithmetic are regular arrays. Pickling and
    `copy.deepcopy` give regular arrays with the values.

    Attributes
    ----------
    filename : str
        The absolute path of the file.
    offset : int
        Position of the array's first byte when it was opened.
    mode : str
        ``"r"``, ``"r+"`` or ``"c"``.

    Examples
    --------
    >>> array = mmtensor.create_array("zeros.bin", "float32", (2, 3))
    >>> isinstance(array, np.memmap), array.mode
    (True, 'r+')
    """

    _mmap: Mapping

    def flush(self) -> None:
        """Write changes to stable storage (``r+``); in other modes there are none to write."""
        mapping = mapping_of_array(self)
        if mapping is not None:
            mapping.flush()

    # numpy.memmap does the same for itself, and not for subclasses.
    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array is self:  # the target of out=, or of an operator such as +=
            return array
        plain = array.view(np.ndarray)
        return plain[()] if return_scalar else plain

    def __getitem__(self, index: Any) -> Any:
        item: Any = super().__getitem__(index)
        if type(item) is MemoryMappedArray and getattr(item, "_mmap", None) is None:
            return item.view(np.ndarray)  # a copy
        return item

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return np.asarray(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return np.array(self, subok=False)


class Location(NamedTuple):
    """Where the elements of an array or tensor are.

    Parameters
    ----------
    path : str or None
        The absolute path of the file; None for memory without a file.
    mode : str
        ``"r"``, ``"r+"`` or ``"c"``.
    offset : int
        Position of the first element in the file or block, in bytes.
    dtype : numpy.dtype
        The dtype (of ml_dtypes for bfloat16 and float8).
    shape : tuple of int
        The shape.
    strides : tuple of int
        Distances between elements, in bytes.

    Examples
    --------
    >>> array = mmtensor.create_array("located.bin", "float32", (4, 3))
    >>> where = mmtensor.locate(array[1:, 0])
    >>> where.offset, where.shape, where.strides, where.mode
    (12, (3,), (12,), 'r+')
    """

    path: str | None
    mode: ModeName
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def open_array(
    path: Path,
    dtype: npt.DTypeLike | str,
    shape: object = -1,
    *,
    mode: ModeName | None = "r",
    offset: int = 0,
    order: Literal["C", "F"] = "C",
    partial: bool = False,
) -> np.memmap:
    """Open a raw file as an array, without reading it.

    The file is never created, grown or truncated.

    Parameters
    ----------
    path
        A str, bytes or path-like object.
    dtype
        Anything that NumPy, ml_dtypes or torch calls a dtype, or its name.
    shape
        An integer or a sequence of integers; one ``-1`` is inferred from the size of the
        file.
    mode
        ``"r"``: the array cannot be written to. ``"r+"``: writes reach the file.
        ``"c"``: writes stay private to this array. None: ``"r+"`` if the file may be
        written, else ``"c"``.
    offset
        Bytes before the data, such as a header.
    order
        ``"C"`` (last index varies fastest) or ``"F"`` (first index does).
    partial
        Whether the file may have more bytes after the data.

    Returns
    -------
    numpy.memmap
        Of the given shape.

    Raises
    ------
    FileNotFoundError, IsADirectoryError, PermissionError
        As `open` raises them.
    SizeError
        A `ValueError`: the size of the file is not `offset` and the bytes of the shape. The
        message names both sizes and what would fit.
    ModeError, ShapeError, DtypeError
        If an argument is wrong in itself.

    Examples
    --------
    >>> np.arange(6, dtype="f4").tofile("six.bin")
    >>> mmtensor.open_array("six.bin", "float32", (2, -1))
    MemoryMappedArray([[0., 1., 2.],
                       [3., 4., 5.]], dtype=float32)
    """
    if order not in ("C", "F"):
        raise ValueError(f'order must be "C" or "F", got {order!r}.')
    mapping, sizes = map_file(
        absolute(path),
        mode,
        found := numpy_dtype(dtype),
        as_shape(shape, infer=True),
        offset=as_offset(offset),
        partial=partial,
    )
    return _array_on(mapping, found, sizes, order)


def create_array(
    path: Path,
    dtype: npt.DTypeLike | str,
    shape: object,
    *,
    existsok: bool = False,
    preallocate: bool = True,
) -> np.memmap:
    """Create a raw file of zeros and open it with mode ``"r+"``.

    Parameters
    ----------
    path
        A str, bytes or path-like object.
    dtype, shape
        As for `open_array`, without ``-1``.
    existsok
        Whether an existing file is replaced. Whoever has it mapped keeps the old one.
    preallocate
        False leaves the file sparse: it takes disk space as it is written, and a full disk
        then ends the process (SIGBUS) instead of raising here.

    Returns
    -------
    numpy.memmap
        Of the given shape, all zeros.

    Raises
    ------
    ExistingFileError
        A `FileExistsError`: the file exists and `existsok` is false.
    SymbolicLinkError
        If `path` is a symbolic link.
    OSError
        ``ENOSPC`` if the disk has no room; no file is left.

    Examples
    --------
    >>> array = mmtensor.create_array("counts.bin", "int64", (10,))
    >>> array[3] = 7
    >>> int(np.fromfile("counts.bin", "int64")[3])
    7
    """
    found = numpy_dtype(dtype)
    sizes = as_shape(shape)
    nbytes = byte_count(sizes, found.itemsize)
    name = absolute(path)
    with NewFile(name, existsok=existsok, nbytes=nbytes) as file:
        reserve(file.fd, nbytes, preallocate=preallocate)
        mapping = map_new(file.fd, name, nbytes)
        file.publish()
    return _array_on(mapping, found, sizes)


def save_array(
    path: Path, array: npt.ArrayLike, *, existsok: bool = False, durable: bool = False
) -> pathlib.Path:
    """Write an array as a raw file: native byte order, C-contiguous, no header.

    The file appears whole or not at all; a crash leaves the old file or the new one.

    Parameters
    ----------
    path
        A str, bytes or path-like object.
    array
        The values. Another memory layout is converted on the way, and so is another byte
        order: such a file is opened with ``dtype.newbyteorder("=")``.
    existsok
        Whether an existing file is replaced. Whoever has it mapped keeps the old one.
    durable
        Whether to wait until the data is on stable storage (fsync).

    Returns
    -------
    pathlib.Path
        The absolute path.

    Raises
    ------
    ExistingFileError, SymbolicLinkError, OSError
        As for `create_array`.
    DtypeError
        If the elements are Python objects.
    TypeError
        If it is a masked array.

    Examples
    --------
    >>> path = mmtensor.save_array("squares.bin", np.arange(4, dtype="int32") ** 2)
    >>> np.fromfile(path, "int32")
    array([0, 1, 4, 9], dtype=int32)
    """
    refuse_mask(array)
    try:
        source = np.asarray(array)
    except TypeError as error:  # a bfloat16 tensor, for example
        raise TypeError(
            f"array must be an array or what NumPy makes one of, got {type(array)!r}: {error}."
            " Pass mmtensor.to_numpy(tensor) for a torch tensor."
        ) from error
    numpy_dtype(source.dtype)
    name = absolute(path)
    with NewFile(name, existsok=existsok, nbytes=source.nbytes) as file:
        write_chunks(file.fd, byte_chunks(source), source.nbytes)
        file.publish(durable=durable)
    return pathlib.Path(name)


def refuse_mask(array: object) -> None:
    """Raise if something is a masked array, whose mask would be dropped without a word.

    Raises
    ------
    TypeError
        It says how to go on.
    """
    masked = sys.modules.get("numpy.ma")  # whoever has one has imported it; it takes 10 ms
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError(
            "expected an array without a mask, got a numpy.ma.MaskedArray: raw bytes have no "
            "room for its mask. Pass array.filled(value), or array.data and array.mask."
        )


def locate(array: Any) -> Location | None:
    """Tell which file, which mode and which bytes an array or tensor stands on.

    Parameters
    ----------
    array
        A NumPy array or torch tensor: one that this package opened, or any view of one.

    Returns
    -------
    Location or None
        None for memory that no mapping of this package holds.

    Examples
    --------
    >>> array = mmtensor.create_array("here.bin", "int16", (8,))
    >>> mmtensor.locate(array[2:]).offset
    4
    >>> mmtensor.locate(np.zeros(8)) is None
    True
    """
    if isinstance(array, np.ndarray):
        mapping = mapping_of_array(array)
        if mapping is None:
            return None
        start = array.__array_interface__["data"][0] - mapping.address if array.size else 0
        return _location(mapping, start, array.dtype, array.shape, array.strides)
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported torch
    if torch is None or not isinstance(array, torch.Tensor):
        raise TypeError(f"locate takes a NumPy array or a torch tensor, got {type(array)!r}.")
    if array.layout is not torch.strided or array.device.type != "cpu":
        return None
    mapping = getattr(array.untyped_storage(), "mapping", None)
    if mapping is None:
        return None
    itemsize = array.itemsize
    return _location(
        mapping,
        array.storage_offset() * itemsize,
        numpy_dtype(array.dtype),
        tuple(array.shape),
        tuple([stride * itemsize for stride in array.stride()]),
    )


def _location(
    mapping: Mapping,
    start: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Location:
    return Location(mapping.path, mapping.mode.name, mapping.offset + start, dtype, shape, strides)


def mapping_of_array(array: np.ndarray[Any, Any]) -> Mapping | None:
    """Follow the bases of an array to the mapping that holds its memory."""
    base: Any = array
    while base is not None:
        if isinstance(base, Mapping):
            return base
        if isinstance(base, memoryview):
            base = base.obj
            continue
        storage = getattr(base, "untyped_storage", None)  # a tensor, under its own .numpy()
        if storage is not None:
            return getattr(storage(), "mapping", None)
        base = getattr(base, "base", None)
    return None


def byte_chunks(array: np.ndarray[Any, Any]) -> Iterator[memoryview]:
    """Yield the bytes of an array, native and in C order, a few MiB at a time.

    A contiguous native array is handed out as it is, in one piece; others are converted
    piece by piece, so that no second copy of all of it exists.
    """
    if array.size == 0:
        return
    dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    if array.flags.c_contiguous and array.dtype.isnative:
        yield array.reshape(-1).view(np.uint8).data
        return
    if array.ndim == 0 or array.nbytes <= CHUNK:
        plain = np.array(array, dtype, order="C", subok=False)
        yield plain.reshape(-1).view(np.uint8).data
        return
    rows = max(1, CHUNK * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        yield from byte_chunks(array[start] if rows == 1 else array[start : start + rows])


def _array_on(
    mapping: FileMapping,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    order: Literal["C", "F"] = "C",
) -> np.memmap:
    plain = np.ndarray(shape, dtype, mapping.bytes_array(), order=order)
    array = plain.view(MemoryMappedArray)
    array._mmap = mapping
    array.filename = mapping.path
    array.offset = mapping.offset
    array.mode = cast("Any", resolve_mode(mapping.mode.name).name)
    return cast("np.memmap[Any, Any]", array)
