"""The doors of `MemoryMappedTensor`: the class methods that make one."""

from typing import Any, Self

import numpy as np
from torch import Tensor

from mmtensor import adoption, creation
from mmtensor.modes import ModeName
from mmtensor.rawfile import Path
from mmtensor.storage import as_kind

__all__ = ["Constructors"]


class Constructors:
    """The constructors that `MemoryMappedTensor` inherits.

    Each of them computes a mapping and a geometry, in `creation`; here is what they promise.
    """

    __slots__ = ()

    @classmethod
    def from_filename(
        cls,
        filename: Path,
        dtype: Any,
        shape: Any = -1,
        index: Any = None,
        mode: ModeName | None = None,
        *,
        offset: int = 0,
        partial: bool = False,
    ) -> Self:
        """Open a raw file as a tensor, without reading it.

        The file is never created, grown or truncated.

        Parameters
        ----------
        filename
            A str, bytes or path-like object.
        dtype
            Anything that torch, NumPy or ml_dtypes calls a dtype, or its name.
        shape
            An integer or a sequence of integers; one ``-1`` is inferred from the size. Left
            out: one dimension.
        index
            Applied to the result: ``from_filename(...)[index]``.
        mode
            ``"r"``: every write raises. ``"r+"``: writes reach the file. ``"c"``: writes stay
            private to this tensor. None: ``"r+"`` if the file may be written, else ``"c"``.
        offset
            Bytes before the data; a multiple of the size of an element.
        partial
            Whether the file may have more bytes after the data.

        Returns
        -------
        MemoryMappedTensor
            Of the given shape, or what `index` makes of it.

        Raises
        ------
        FileNotFoundError, IsADirectoryError, PermissionError
            As `open` raises them.
        SizeError
            A `ValueError`: the file has another size. The message names what would fit.
        ModeError, ShapeError, DtypeError
            If an argument is wrong in itself.

        Examples
        --------
        >>> np.arange(6, dtype="f4").tofile("pipeline.bin")
        >>> x = MemoryMappedTensor.from_filename("pipeline.bin", "float32", (-1, 3), mode="r")
        >>> x.shape, x.mode
        (torch.Size([2, 3]), 'r')
        """
        if isinstance(index, str):
            raise TypeError(
                f"index must be an index, got {index!r}. The fourth argument is the index; pass "
                f"mode={index!r} by name."
            )
        tensor: Any = adoption.open_tensor(filename, dtype, shape, mode, offset, partial)
        if type(tensor) is Tensor:  # a table of shapes gives a jagged one
            tensor = as_kind(cls, tensor)
        return tensor if index is None else tensor[index]  # type: ignore[no-any-return]  # any index

    @classmethod
    def from_tensor(
        cls,
        input: Tensor,
        *,
        filename: Path | None = None,
        existsok: bool = False,
        copy_existing: bool = False,
        copy_data: bool = True,
        shape: Any = None,
    ) -> Self:
        """Write a tensor to a file, or to anonymous shared memory, and open it ``"r+"``.

        The file appears whole or not at all. A memory-mapped `input` that is where it
        should go already is returned as it is.

        Parameters
        ----------
        input
            The values, on any device.
        filename
            A str, bytes or path-like object. None: anonymous shared memory.
        existsok
            Whether an existing file is replaced. Whoever has it mapped keeps the old one.
        copy_existing
            Whether an `input` that has a file may be copied to another one.
        copy_data
            False only makes room: zeros of the shape and dtype of `input`.
        shape
            The shape of the result, to which `input` is broadcast. None: that of `input`.

        Returns
        -------
        MemoryMappedTensor
            With mode ``"r+"``.

        Raises
        ------
        GradientError
            A `RuntimeError`: `input` requires gradients.
        ExistingFileError
            A `FileExistsError` and `RuntimeError`: the file exists.
        SymbolicLinkError
            A `RuntimeError`: `filename` is a symbolic link.
        RuntimeError
            If `input` has another file and `copy_existing` is false.
        TypeError
            If `input` is no tensor; arrays go to `from_numpy`.
        OSError
            ``ENOSPC`` without room; no file is left.

        Examples
        --------
        >>> x = MemoryMappedTensor.from_tensor(torch.ones(3), filename="ones.bin")
        >>> np.fromfile("ones.bin", "float32")
        array([1., 1., 1.], dtype=float32)
        """
        return creation.from_tensor(
            cls, input, filename, existsok, copy_existing, copy_data, shape
        )

    @classmethod
    def from_numpy(cls, array: np.ndarray[Any, Any]) -> Self:
        """Return a tensor on the memory of an array, without a copy.

        An array that this package or `numpy.memmap` opened keeps its file and its mode; any
        other array is wrapped. A read-only array gives a read-only tensor.

        Parameters
        ----------
        array
            Of a dtype that torch has; ml_dtypes for bfloat16 and float8.

        Returns
        -------
        MemoryMappedTensor
            Of the same shape.

        Raises
        ------
        DtypeError
            A `TypeError`: torch has no such dtype; the message says how to convert.
        ValueError
            If torch cannot describe the strides (negative ones).

        Examples
        --------
        >>> array = mmtensor.create_array("n.bin", "bfloat16", (4,))
        >>> x = MemoryMappedTensor.from_numpy(array)
        >>> x[0] = 1.5
        >>> float(array[0])
        1.5
        """
        return adoption.from_numpy(cls, array)

    @classmethod
    def from_storage(
        cls,
        storage: Any,
        *,
        shape: Any = None,
        dtype: Any = None,
        device: Any = None,
        index: Any = None,
        filename: Path | None = None,
    ) -> Self:
        """Return a tensor on a storage, without a copy.

        Parameters
        ----------
        storage
            A ``torch.UntypedStorage`` or ``torch.TypedStorage``. One that torch mapped from
            a file (`torch.UntypedStorage.from_file` with ``shared=True``) keeps that file.
        shape
            None: one dimension.
        dtype
            None: that of a typed storage, uint8 for an untyped one.
        device
            None or the CPU.
        index
            Applied to the result.
        filename
            The file of the storage, where the storage does not tell; it is checked.

        Returns
        -------
        MemoryMappedTensor
            On the same memory.

        Raises
        ------
        RuntimeError
            If the storage is not of the file `filename`.
        SizeError
            A `ValueError`: the storage has another size than the shape asks for.
        DeviceError
            If a device other than the CPU is asked for.

        Examples
        --------
        >>> storage = torch.arange(6.0).untyped_storage()
        >>> MemoryMappedTensor.from_storage(storage, dtype=torch.float32, shape=(2, 3)).shape
        torch.Size([2, 3])
        """
        adoption.check_device(device)
        tensor: Any = adoption.from_storage(cls, storage, shape, dtype, filename)
        return tensor if index is None else tensor[index]  # type: ignore[no-any-return]  # any index

    @classmethod
    def from_shared_memory(
        cls, shm_or_name: Any, dtype: Any, shape: Any, *, offset: int = 0
    ) -> Self:
        """Attach to a block of `multiprocessing.shared_memory` that someone else owns.

        The block is never destroyed by it, and no resource tracker hears of it.

        Parameters
        ----------
        shm_or_name
            A `multiprocessing.shared_memory.SharedMemory`, or its name.
        dtype
            Anything that torch, NumPy or ml_dtypes calls a dtype, or its name.
        shape
            One ``-1`` is inferred. The block may be larger, as the system rounds its size.
        offset
            Bytes before the data; a multiple of the size of an element.

        Returns
        -------
        MemoryMappedTensor
            With mode ``"r+"``.

        Raises
        ------
        FileNotFoundError
            If there is no such block.
        SizeError
            A `ValueError`: the block is too small.

        Examples
        --------
        >>> from multiprocessing.shared_memory import SharedMemory
        >>> block = SharedMemory(create=True, size=64)
        >>> x = MemoryMappedTensor.from_shared_memory(block, "int64", (8,))
        >>> x[0] = 5
        >>> block.buf[0]
        5
        >>> block.close()
        >>> block.unlink()
        """
        tensor: Any = adoption.attach(shm_or_name, dtype, shape, offset)
        tensor.__class__ = cls
        return tensor  # type: ignore[no-any-return]  # its class was set above

    @classmethod
    def empty(
        cls,
        *size: Any,
        shape: Any = None,
        dtype: Any = None,
        device: Any = None,
        filename: Path | None = None,
        existsok: bool = False,
        preallocate: bool = True,
    ) -> Self:
        """Make a tensor of zeros with its memory or disk space reserved.

        Parameters
        ----------
        *size
            Integers, or one sequence of integers.
        shape
            The same, as a keyword.
        dtype
            None: `torch.get_default_dtype`.
        device
            None or the CPU.
        filename
            None: anonymous shared memory.
        existsok
            Whether an existing file is replaced.
        preallocate
            False leaves a file sparse: it takes disk space as it is written, and a full
            disk then ends the process (SIGBUS) instead of raising here.

        Returns
        -------
        MemoryMappedTensor
            With mode ``"r+"``.

        Raises
        ------
        OSError
            ``ENOSPC`` without room; no file is left.
        ExistingFileError, SymbolicLinkError, DeviceError
            As for `from_tensor`.

        Examples
        --------
        >>> MemoryMappedTensor.empty(2, 3, dtype=torch.int32).shape
        torch.Size([2, 3])
        """
        adoption.check_device(device)
        sizes = creation.sizes_of(size, shape)
        return creation.filled(cls, sizes, dtype, 0, filename, existsok, preallocate)

    @classmethod
    def zeros(
        cls,
        *size: Any,
        shape: Any = None,
        dtype: Any = None,
        device: Any = None,
        filename: Path | None = None,
        existsok: bool = False,
        preallocate: bool = True,
    ) -> Self:
        """Make a tensor of zeros; parameters and errors as for `empty`.

        Examples
        --------
        >>> MemoryMappedTensor.zeros(3, filename="zeros.memmap")
        MemoryMappedTensor([0., 0., 0.])
        """
        adoption.check_device(device)
        sizes = creation.sizes_of(size, shape)
        return creation.filled(cls, sizes, dtype, 0, filename, existsok, preallocate)

    @classmethod
    def ones(
        cls,
        *size: Any,
        shape: Any = None,
        dtype: Any = None,
        device: Any = None,
        filename: Path | None = None,
        existsok: bool = False,
    ) -> Self:
        """Make a tensor of ones; parameters and errors as for `empty`.

        Examples
        --------
        >>> MemoryMappedTensor.ones((2,), dtype=torch.bool)
        MemoryMappedTensor([True, True])
        """
        adoption.check_device(device)
        return creation.filled(cls, creation.sizes_of(size, shape), dtype, 1, filename, existsok)

    @classmethod
    def full(
        cls,
        *size: Any,
        fill_value: Any = None,
        shape: Any = None,
        dtype: Any = None,
        device: Any = None,
        filename: Path | None = None,
        existsok: bool = False,
    ) -> Self:
        """Make a tensor with one value everywhere; other parameters as for `empty`.

        Parameters
        ----------
        *size
            Integers, or one sequence of integers, which `fill_value` may follow.
        fill_value
            A number or bool.

        Examples
        --------
        >>> MemoryMappedTensor.full((2,), 7, dtype=torch.int64)
        MemoryMappedTensor([7, 7])
        """
        adoption.check_device(device)
        if fill_value is None:
            if len(size) != 2 or isinstance(size[0], int):
                raise TypeError("full needs a fill_value, for example full((2, 3), fill_value=7).")
            *size, fill_value = size  # type: ignore[assignment]  # as torch.full((2, 3), 7)
        return creation.filled(
            cls, creation.sizes_of(size, shape), dtype, fill_value, filename, existsok
        )

    @classmethod
    def empty_like(cls, input: Tensor, *, filename: Path | None = None) -> Self:
        """Make a tensor of zeros with the shape and dtype of another; see `empty`.

        Examples
        --------
        >>> MemoryMappedTensor.empty_like(torch.ones(2, dtype=torch.int8)).dtype
        torch.int8
        """
        return creation.filled(cls, *creation.shape_and_dtype(input), 0, filename)

    @classmethod
    def zeros_like(cls, input: Tensor, *, filename: Path | None = None) -> Self:
        """Make a tensor of zeros with the shape and dtype of another; see `empty`.

        Examples
        --------
        >>> MemoryMappedTensor.zeros_like(torch.ones(2))
        MemoryMappedTensor([0., 0.])
        """
        return creation.filled(cls, *creation.shape_and_dtype(input), 0, filename)

    @classmethod
    def ones_like(cls, input: Tensor, *, filename: Path | None = None) -> Self:
        """Make a tensor of ones with the shape and dtype of another; see `empty`.

        Examples
        --------
        >>> MemoryMappedTensor.ones_like(torch.zeros(2))
        MemoryMappedTensor([1., 1.])
        """
        return creation.filled(cls, *creation.shape_and_dtype(input), 1, filename)

    @classmethod
    def full_like(cls, input: Tensor, fill_value: Any, *, filename: Path | None = None) -> Self:
        """Make a tensor of one value with the shape and dtype of another; see `empty`.

        Examples
        --------
        >>> MemoryMappedTensor.full_like(torch.zeros(2), 0.5)
        MemoryMappedTensor([0.5000, 0.5000])
        """
        return creation.filled(cls, *creation.shape_and_dtype(input), fill_value, filename)


# What Python says of a missing argument names the class that users know.
for _method in vars(Constructors).values():
    if isinstance(_method, classmethod):
        _method.__func__.__qualname__ = f"MemoryMappedTensor.{_method.__func__.__name__}"
