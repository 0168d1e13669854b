"""The bridge between NumPy and torch, for every dtype that both sides have."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtensor.arrays import mapping_of_array, refuse_mask
from mmtensor.dtypes import canonical_name
from mmtensor.storage import NATIVE, as_array, native_dtype
from mmtensor.tensor import MemoryMappedTensor

__all__ = ["to_numpy", "to_torch"]


def to_torch(array: np.ndarray[Any, Any], *, copy: bool | None = None) -> Tensor:
    """Return an array as a tensor, without a copy where that is possible.

    Parameters
    ----------
    array
        Of any shape, and a dtype that torch has; ml_dtypes for bfloat16 and float8.
    copy
        As in NumPy 2: None copies only where it must (negative strides, an unaligned start),
        True always, False never.

    Returns
    -------
    Tensor
        A `MemoryMappedTensor` where the array is on a mapping or read-only, which no other
        tensor can be; a regular one on the same memory otherwise.

    Raises
    ------
    DtypeError
        A `TypeError`: torch has no such dtype; the message says how to convert.
    ValueError
        If a copy is needed and `copy` is False.

    Examples
    --------
    >>> import ml_dtypes
    >>> array = np.ones(3, ml_dtypes.bfloat16)
    >>> tensor = mmtensor.to_torch(array)
    >>> tensor[0] = 2
    >>> float(array[0])
    2.0
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"to_torch takes a NumPy array, got {type(array)!r}.")
    refuse_mask(array)
    dtype = native_dtype(canonical_name(array.dtype))
    if copy:
        return _wrap(np.array(array, order="C", subok=False), dtype)
    try:
        # from_numpy refuses what is not aligned, and says so.
        if (
            mapping_of_array(array) is None
            and array.flags.writeable
            and array.flags.aligned
            and not _is_memmap(array)
        ):
            return _wrap(array, dtype)
        return MemoryMappedTensor.from_numpy(array)
    except ValueError as error:
        if copy is False:
            raise ValueError(f"copy=False, but a copy is needed: {error}") from None
        return _wrap(np.array(array, order="C", subok=False), dtype)


def _is_memmap(array: np.ndarray[Any, Any]) -> bool:
    return isinstance(array, np.memmap) and getattr(array, "_mmap", None) is not None


def _wrap(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """Put a regular tensor on the memory of a writeable array."""
    if dtype in NATIVE:
        return torch.from_numpy(array.view(np.ndarray))
    words = array.view(np.ndarray).view(f"i{array.itemsize}" if array.itemsize > 1 else "u1")
    return torch.from_numpy(words).view(dtype)


def to_numpy(tensor: Tensor, *, copy: bool | None = None) -> np.ndarray[Any, Any]:
    """Return a tensor as an array, without a copy where that is possible.

    Parameters
    ----------
    tensor
        Dense, of any shape. Plain views of memory-mapped tensors (``torch.t(x)``) are taken
        as well.
    copy
        As in NumPy 2: None copies only where it must (another device, a conjugated or
        negated view), True always, False never.

    Returns
    -------
    numpy.ndarray
        Of the same shape; of an ml_dtypes dtype for bfloat16 and float8. Not writeable where
        the tensor was opened with mode ``"r"``.

    Raises
    ------
    DtypeError
        A `TypeError`: NumPy has no such dtype.
    RuntimeError
        If the tensor requires gradients.
    ValueError
        If a copy is needed and `copy` is False.

    Examples
    --------
    >>> mmtensor.to_numpy(torch.ones(2, dtype=torch.float8_e5m2))
    array([1, 1], dtype='float8_e5m2')
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"to_numpy takes a torch tensor, got {type(tensor)!r}.")
    if tensor.requires_grad:
        raise RuntimeError(
            "an array cannot require gradients, but the tensor does. Pass x.detach()."
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"expected a dense tensor, got {what}. Use x.to_dense().")
    canonical_name(tensor.dtype)
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        if copy is False:
            raise ValueError(
                "copy=False, but a copy is needed: the tensor is "
                + (
                    "a conjugated or negated view."
                    if tensor.device.type == "cpu"
                    else f"on device {tensor.device}."
                )
            )
        return as_array(tensor.detach().cpu(), force=True)
    array = as_array(tensor)
    return array.copy() if copy else array
