"""`MemoryMappedTensor`: a torch tensor whose storage is a file or shared memory."""

import sys
from copy import deepcopy
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from mmtensor import creation
from mmtensor.constructors import Constructors
from mmtensor.errors import GradientError
from mmtensor.geometry import span
from mmtensor.indexing import gather, rows, scatter, select
from mmtensor.mapping import Mapping
from mmtensor.modes import ModeName
from mmtensor.prefetch import read_ahead, will_need_rows
from mmtensor.rawfile import Path
from mmtensor.reference import for_checkpoint, reduce_tensor, register, regular_copy
from mmtensor.storage import as_array, refuse_write
from mmtensor.views import install, keeping_bounds, refuse_gradients

__all__ = ["MemoryMappedTensor"]

_getitem = Tensor.__getitem__
_setitem = Tensor.__setitem__
_storage = Tensor.untyped_storage


class MemoryMappedTensor(Constructors, torch.Tensor):
    """A CPU tensor whose storage is a file or shared memory.

    Make one with a class method: `from_filename` opens a raw file, `from_tensor` writes
    one, `empty`, `zeros`, `ones` and `full` make new ones, `from_numpy`, `from_storage` and
    `from_shared_memory` take memory that is there. Without a filename the data is in
    anonymous shared memory.

    Views (``x[3]``, ``x[2:5]``, ``x.t()``, ``x.view(...)``, ``x.unbind()``, ...) are
    memory-mapped tensors on the same storage; everything else (``x + 1``, ``x[ids]``,
    ``x.clone()``) is a regular tensor. A tensor of a file goes to other processes as a
    reference of about 200 bytes, with its exact geometry.

    Parameters
    ----------
    source
        A str or path: as `from_filename`, with `dtype` and `shape`. A storage: as
        `from_storage`. A tensor: as `from_tensor` with `filename`; without, a tensor on the
        same memory.
    dtype, shape, index, device, filename
        As in those methods.

    Raises
    ------
    DeviceError
        A `ValueError` (and `RuntimeError`): `device` is not the CPU.

    Examples
    --------
    >>> x = MemoryMappedTensor.from_tensor(torch.arange(6.0).view(2, 3), filename="x.bin")
    >>> x[1]
    MemoryMappedTensor([3., 4., 5.])
    >>> MemoryMappedTensor.from_filename("x.bin", torch.float32, (2, 3), mode="r").sum()
    tensor(15.)
    """

    # Operations give regular tensors. A Python hook would cost 1 us for each of them and for
    # every attribute; this one is C.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __new__(
        cls,
        source: Any,
        *,
        dtype: Any = None,
        shape: Any = None,
        index: Any = None,
        device: Any = None,
        filename: Path | None = None,
    ) -> Self:
        """Make a tensor from what is there; see the class."""
        return creation.from_source(cls, source, dtype, shape, index, device, filename)

    def __init__(self, source: Any, **_: Any) -> None:
        # __new__ has checked the keywords.
        super().__init__()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register(cls)  # multiprocessing finds what sends an object by its exact class

    @property
    def filename(self) -> str:
        """The absolute path of the file.

        Raises
        ------
        RuntimeError
            If the data is in anonymous memory.
        """
        mapping = self._mapping()
        if mapping is None or mapping.path is None:
            raise RuntimeError(
                "this tensor has no file: its data is in anonymous memory. Write it to one with "
                "MemoryMappedTensor.from_tensor(x, filename=...)."
            )
        return mapping.path

    @property
    def mode(self) -> ModeName:  # type: ignore[override]  # the statistic is torch.mode(x)
        """``"r"``, ``"r+"`` or ``"c"``; ``"r+"`` for anonymous memory.

        The statistic that other tensors have under this name is ``torch.mode(x)``.
        """
        mapping = self._mapping()
        return "r+" if mapping is None else mapping.mode.name

    def _mapping(self) -> Mapping | None:
        return getattr(_storage(self), "mapping", None)

    def _range(self) -> tuple[int, int]:
        """First byte and number of bytes, in the mapping, that the tensor spans."""
        itemsize = self.itemsize
        return (
            int(self.storage_offset()) * itemsize,
            span(self.size(), self.stride(), itemsize),
        )

    def flush(self) -> None:
        """Write the changes in this tensor's bytes to stable storage, and wait.

        Without a file, or in mode ``"r"`` or ``"c"``, there is nothing to write.

        Raises
        ------
        OSError
            If the device reports an error.

        Examples
        --------
        >>> x = MemoryMappedTensor.zeros(3, filename="flushed.bin")
        >>> x[0] = 1
        >>> x.flush()
        """
        mapping = self._mapping()
        if mapping is not None:
            mapping.flush(*self._range())

    def advise(
        self, advice: Literal["random", "sequential", "willneed", "dontneed", "normal"]
    ) -> None:
        """Tell the kernel how this tensor's bytes will be used; see madvise(2).

        No value changes by it: in mode ``"c"``, ``"dontneed"`` keeps private changes.

        Parameters
        ----------
        advice
            ``"random"`` and ``"sequential"`` set the read-ahead, ``"normal"`` resets it,
            ``"willneed"`` starts reading, ``"dontneed"`` frees the memory.

        Raises
        ------
        ValueError
            If `advice` is another word.
        OSError
            Where the system has no such call (other than Linux).

        Examples
        --------
        >>> MemoryMappedTensor.zeros(10_000, filename="advised.bin").advise("random")
        """
        mapping = self._mapping()
        if mapping is not None:
            mapping.advise(advice, *self._range())

    def prefetch(self, ids: Any) -> None:
        """Ask the kernel to read these rows from the file, and do not wait for it.

        Parameters
        ----------
        ids
            Row numbers: integers in a tensor, array or sequence, or a slice.

        Raises
        ------
        IndexError
            If a number is out of range.

        Examples
        --------
        >>> x = MemoryMappedTensor.zeros(100, 8, filename="prefetched.bin")
        >>> x.prefetch([5, 70])
        """
        mapping = self._mapping()
        if mapping is not None and self.dim():
            will_need_rows(mapping, self, ids)

    def take(self, ids: Any, *, out: Tensor | None = None) -> Tensor:
        """Gather rows, into a buffer that can be reused.

        Not `torch.take`, which reads from the flattened tensor.

        Parameters
        ----------
        ids
            n row numbers, negative ones counted from the end.
        out
            A contiguous tensor of shape ``(n, *x.shape[1:])`` and the same dtype.

        Returns
        -------
        Tensor
            `out`, or a new tensor: ``x[ids]``.

        Raises
        ------
        IndexError
            If a number is out of range.
        ValueError
            If `out` has another shape or dtype.
        RuntimeError
            If `out` requires gradients or is read-only.

        Examples
        --------
        >>> x = MemoryMappedTensor.from_tensor(torch.arange(6).view(3, 2))
        >>> buffer = torch.empty(2, 2, dtype=torch.int64)
        >>> x.take([2, 0], out=buffer)
        tensor([[4, 5],
                [0, 1]])
        """
        if is_compiling():
            found = _getitem(self, torch.as_tensor(ids, device="cpu"))
            return found if out is None else out.copy_(found)
        numbers = torch.as_tensor(ids, device="cpu")
        if numbers.numel() == 0 and not isinstance(ids, Tensor | np.ndarray):
            numbers = numbers.long()  # an empty list has no dtype of its own
        if numbers.dim() != 1 or numbers.dtype not in (torch.int64, torch.int32):
            raise IndexError(f"ids must be a 1-D sequence of integers, got {ids!r}.")
        if out is None:
            return gather(self, numbers, numbers)
        expected = (len(numbers), *self.shape[1:])
        if not isinstance(out, Tensor):
            raise ValueError(  # noqa: TRY004 - as of tensors that do not fit
                f"out must be a contiguous tensor of shape {expected} and dtype {self.dtype}, "
                f"got {type(out)!r}."
            )
        if tuple(out.shape) != expected or out.dtype != self.dtype or not out.is_contiguous():
            raise ValueError(
                f"out must be a contiguous tensor of shape {expected} and dtype {self.dtype}, "
                f"got shape {tuple(out.shape)} and dtype {out.dtype}."
            )
        if out.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("out must not require gradients. Pass out.detach().")
        refuse_write(out, "x.take(out=...)")
        if self.numel() == 0 or any(t.is_conj() or t.is_neg() for t in (self, out)):
            return out.copy_(gather(self, numbers, numbers))
        if len(numbers) and int(numbers.min()) < 0:
            count = len(self)
            numbers = torch.where(numbers < 0, numbers + count, numbers)
        read_ahead(self, numbers)
        return select(self, numbers, out)

    def __getitem__(self, index: Any) -> Any:
        if is_compiling():
            return _getitem(self, index)
        kind = type(index)
        if kind is int or kind is slice:  # always a view
            result = _getitem(self, index)
            result.__class__ = type(self)
            return result
        if kind is not tuple and (ids := _row_numbers(self, index)) is not None:
            return gather(self, index, ids)
        result = _getitem(self, index)
        try:
            if _storage(result) is _storage(self):
                result.__class__ = type(self)
        except NotImplementedError:
            pass  # under torch.func.vmap the index, and with it the result, has no storage
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        if is_compiling():
            _setitem(self, index, value)
            return
        refuse_write(self, "x[...] = ...")
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            refuse_gradients((value,), "x[...] = ...")
        kind = type(index)
        if (
            kind is not int
            and kind is not slice
            and kind is not tuple
            and (ids := _row_numbers(self, index)) is not None
        ):
            scatter(self, index, ids, value)
        else:
            _setitem(self, index, value)

    @property
    def requires_grad(self) -> bool:
        """False, unless a function such as ``torch._foreach_add_`` went past the methods."""
        if is_compiling():  # Dynamo calls itself without end on Tensor's own properties
            return False
        return Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Return the tensor; asking for gradients raises.

        Raises
        ------
        GradientError
            A `RuntimeError`: if `requires_grad` is true.
        """
        if requires_grad:
            raise GradientError(
                "a memory-mapped tensor cannot require gradients. To train its values where "
                "they are, use a plain tensor on the same memory, "
                "torch.nn.Parameter(x.as_subclass(torch.Tensor)), or TensorDict.to_module; to "
                "train a private copy, torch.nn.Parameter(x.clone())."
            )
        return self

    @property
    def data(self) -> Any:
        """The tensor itself, as a view."""
        if is_compiling():
            return Tensor.detach(self)
        result = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        result.__class__ = type(self)
        return result

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._follow_storage()

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Put the tensor on another storage; see `torch.Tensor.set_`.

        On memory of another kind it is a regular tensor from then on.
        """
        keeping_bounds(Tensor.set_, self, *args, **kwargs)
        self._follow_storage()
        return self

    def _follow_storage(self) -> None:
        if self._mapping() is None:
            self.__class__ = torch.Tensor  # type: ignore[assignment]  # it has left its mapping

    def share_memory_(self) -> Self:
        """Return the tensor, which other processes see already.

        Raises
        ------
        RuntimeError
            In mode ``"c"``, whose changes are private by promise.
        """
        _storage(self).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether other processes that receive this tensor see the same memory."""
        return _storage(self).is_shared()

    def data_ptr(self) -> int:
        """Return the address of the first element, of read-only tensors as well."""
        mapping = self._mapping()
        if mapping is None or mapping.mode.writeable:
            return Tensor.data_ptr(self)
        if self.numel() == 0:
            return 0  # as torch has it
        return mapping.address + int(self.storage_offset()) * self.itemsize

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return the tensor as an array on the same memory, read-only in mode ``"r"``.

        Parameters
        ----------
        force
            Whether a conjugated or negated view may be copied.

        Returns
        -------
        numpy.ndarray
            Of the same shape; of an ml_dtypes dtype for bfloat16 and float8.

        Raises
        ------
        RuntimeError
            If the tensor is a conjugated or negated view and `force` is false.

        Examples
        --------
        >>> x = MemoryMappedTensor.from_tensor(torch.arange(3))
        >>> x.numpy()
        array([0, 1, 2])
        """
        if is_compiling():
            return Tensor.numpy(self, force=force)
        return as_array(self, force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = as_array(self)
        if dtype is None or array.dtype == dtype:
            return np.array(array) if copy else array
        if copy is False:
            raise ValueError(f"cannot convert {array.dtype} to {np.dtype(dtype)} without a copy.")
        return array.astype(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        mapping = self._mapping()
        if mapping is None or mapping.mode.writeable:
            return super().__dlpack__(**kwargs)
        if sys._getframe(1).f_globals.get("__name__") == "torch.utils.dlpack":
            raise BufferError(
                "torch.from_dlpack ignores that memory is read-only, and would write to it. The "
                "tensor is one already; for one to write to, take a copy: x.clone()."
            )
        # NumPy marks the capsule as read-only where the consumer knows of that.
        return as_array(self).__dlpack__(**kwargs)

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers."""
        return Tensor.tolist(self) if is_compiling() else regular_copy(self).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_tensor(self, int(protocol), by_value=for_checkpoint(protocol))

    def __copy__(self) -> Self:
        copy: Any = Tensor.view_as(self, self)
        copy.__class__ = type(self)
        copy.__dict__.update(self.__dict__)
        return copy  # type: ignore[no-any-return]  # its class was set above

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]  # the copy of this tensor
        copy = regular_copy(self)
        if getattr(self, "_is_param", False):
            copy = torch.nn.Parameter(copy, requires_grad=False)
        memo[id(self)] = copy
        for name, value in self.__dict__.items():
            if name != "_is_param":
                setattr(copy, name, deepcopy(value, memo))
        return copy

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)


def _row_numbers(tensor: Tensor, index: Any) -> Tensor | None:
    return rows(index, tensor.size(0)) if tensor.dim() else None


install(MemoryMappedTensor)
register(MemoryMappedTensor, usual=True)
