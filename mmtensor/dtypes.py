"""The one table of dtypes: canonical name, NumPy or ml_dtypes dtype, torch dtype by name."""

import importlib
from typing import Any

import numpy as np

from mmtensor.errors import DtypeError

__all__ = ["DTYPES", "canonical_name", "numpy_dtype"]

# Canonical name -> (the module that has the NumPy scalar type, its name there). The
# canonical name is the one that torch uses: `getattr(torch, name)` is the torch dtype.
# ml_dtypes is imported when one of its dtypes is asked for, not before.
DTYPES: dict[str, tuple[str, str]] = {
    "bool": ("numpy", "bool_"),
    **{
        name: ("numpy", name)
        for name in (
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "int8",
            "int16",
            "int32",
            "int64",
            "float16",
            "float32",
            "float64",
            "complex64",
            "complex128",
        )
    },
    **{
        name: ("ml_dtypes", name)
        for name in (
            "bfloat16",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
    },
}

# torch's second names, for strings such as "torch.float". Without the prefix a string is
# read as NumPy reads it ("float" is float64 there).
_TORCH_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "cfloat": "complex64",
    "cdouble": "complex128",
}

_numpy_cache: dict[Any, np.dtype[Any]] = {}
_name_cache: dict[Any, str] = {}


def numpy_dtype(dtype: object) -> np.dtype[Any]:
    """Return the NumPy dtype for anything that NumPy, ml_dtypes or torch calls a dtype.

    Parameters
    ----------
    dtype
        A NumPy or ml_dtypes dtype or scalar type, a torch dtype, or the name of one:
        ``np.float32``, ``"<f4"``, ``"bfloat16"``, ``torch.bfloat16``, ``"torch.int64"``.

    Raises
    ------
    DtypeError
        If `dtype` names no dtype, or one whose elements are not plain bytes (``object``).

    Examples
    --------
    >>> numpy_dtype("<f4")
    dtype('float32')
    >>> numpy_dtype("bfloat16")
    dtype(bfloat16)
    """
    try:
        return _numpy_cache[dtype]
    except (KeyError, TypeError):  # TypeError: a list of fields is a dtype, but no dict key
        pass
    result = _find(dtype)
    if result.hasobject:
        raise DtypeError(
            f"dtype must have elements of plain bytes, got {result!r}, whose elements are "
            "Python objects. Convert the array to a number or a fixed-size string dtype first."
        )
    if result.itemsize == 0:
        raise DtypeError(
            f"dtype must have a size, got {result!r}. "
            f"Give one, for example {result.kind + '16'!r}."
        )
    try:
        _numpy_cache[dtype] = result
    except TypeError:
        pass
    return result


def canonical_name(dtype: object) -> str:
    """Return the name under which NumPy and torch share a dtype.

    Parameters
    ----------
    dtype
        As for `numpy_dtype`.

    Returns
    -------
    str
        A key of `DTYPES`, which is also the name of the dtype in the module ``torch``.

    Raises
    ------
    DtypeError
        If torch has no such dtype (structured, datetime, string, foreign byte order); the
        message says how to convert.

    Examples
    --------
    >>> canonical_name(np.dtype("complex64"))
    'complex64'
    """
    try:
        return _name_cache[dtype]
    except (KeyError, TypeError):
        pass
    found = numpy_dtype(dtype)
    name = found.name
    if name not in DTYPES:
        raise DtypeError(f"dtype must be one that torch has, got {found!r}. {_way_out(found)}")
    if not found.isnative:
        raise DtypeError(
            f"dtype must have the byte order of this machine for a tensor, got {found.str!r}. "
            "Open the file with mmtensor.open_array and convert a copy: "
            "array.astype(array.dtype.newbyteorder('='))."
        )
    try:
        _name_cache[dtype] = name
    except TypeError:
        pass
    return name


def _find(dtype: object) -> np.dtype[Any]:
    name = None
    if type(dtype).__module__ == "torch":  # torch.dtype, without importing torch
        name = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, str):
        name = dtype
        if dtype.startswith("torch."):
            name = name.removeprefix("torch.")
            name = _TORCH_ALIASES.get(name, name)
            if name not in DTYPES:
                raise DtypeError(_unknown(dtype))
    if name in DTYPES:
        module, attribute = DTYPES[name]
        scalar: type[Any] = getattr(importlib.import_module(module), attribute)
        return np.dtype(scalar)
    if dtype is None or (name is not None and not isinstance(dtype, str)):
        # np.dtype(None) is float64: a default nobody asked for.
        raise DtypeError(_unknown(dtype))
    try:
        return np.dtype(dtype)  # type: ignore[call-overload, no-any-return]  # any object may come
    except (TypeError, ValueError, SyntaxError) as error:
        raise DtypeError(_unknown(dtype)) from error


def _unknown(dtype: object) -> str:
    return (
        "dtype must be a NumPy, ml_dtypes or torch dtype or the name of one, "
        f"got {dtype!r}. Names that both sides know: {', '.join(DTYPES)}."
    )


def _way_out(dtype: np.dtype[Any]) -> str:
    if dtype.names is not None:
        first = dtype.names[0]
        return (
            "Open the file with mmtensor.open_array and convert one field at a time, for "
            f"example np.ascontiguousarray(array[{first!r}])."
        )
    if dtype.kind in "mM":
        return 'Open it as "int64": a datetime64 or timedelta64 is a count in its unit.'
    if dtype.kind in "SU" or dtype.type is np.void:  # those of ml_dtypes are of kind V too
        return 'Open it as "uint8": the bytes of the elements, with one more dimension.'
    return "Open the file with mmtensor.open_array and convert a copy with array.astype."
