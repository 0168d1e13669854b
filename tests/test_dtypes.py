"""The table of dtypes."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from mmtensor import DtypeError
from mmtensor.dtypes import DTYPES, canonical_name, numpy_dtype
from mmtensor.storage import native_dtype

NAMES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def test_the_table_is_complete():
    """The table has the dtypes that the documentation promises."""
    assert list(DTYPES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_spelling(name):
    """A dtype is found by name, as torch's, as NumPy's, and as a scalar type."""
    ours = np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
    theirs = getattr(torch, name)
    for spelling in (name, f"torch.{name}", theirs, ours, ours.type):
        assert numpy_dtype(spelling) == ours
        assert canonical_name(spelling) == name
        assert native_dtype(spelling) is theirs
    assert ours.itemsize == theirs.itemsize


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("f4", "float32"),
        ("<f4" if sys.byteorder == "little" else ">f4", "float32"),
        ("=i2", "int16"),
        ("float", "float64"),
        (float, "float64"),
        (int, "int64"),
        (bool, "bool"),
        (complex, "complex128"),
        ("?", "bool"),
        (np.longlong, "int64"),
        ("torch.float", "float32"),
        ("torch.double", "float64"),
        ("torch.half", "float16"),
        ("torch.long", "int64"),
        ("torch.int", "int32"),
        ("torch.short", "int16"),
        ("torch.cfloat", "complex64"),
        (torch.float, "float32"),
    ],
)
def test_other_spellings(spelling, name):
    """Strings mean what NumPy means by them, and with a prefix what torch does."""
    assert canonical_name(spelling) == name


@pytest.mark.parametrize(
    "dtype",
    [
        None,
        "float33",
        "torch.float33",
        "torch.qint8",
        "torch.nn",
        torch.quint8,
        torch.complex32,
        torch.bits8,
        3,
        3.5,
        "",
        [("a", "nonsense")],
        object(),
        np.zeros,
        "float8",
    ],
)
def test_unknown_dtypes(dtype):
    """What is no dtype is a DtypeError that lists the names both sides know."""
    with pytest.raises(DtypeError, match="Names that both sides know: bool, uint8, "):
        numpy_dtype(dtype)


@pytest.mark.parametrize("dtype", [object, "O", [("a", "O"), ("b", "i4")]])
def test_objects(dtype):
    """Elements that are Python objects have no raw bytes: a DtypeError says so."""
    with pytest.raises(DtypeError, match="whose elements are Python objects"):
        numpy_dtype(dtype)


@pytest.mark.parametrize("dtype", ["S", "U", "V", str, bytes])
def test_dtypes_without_a_size(dtype):
    """A string dtype without a size is a DtypeError that asks for one."""
    with pytest.raises(DtypeError, match="dtype must have a size"):
        numpy_dtype(dtype)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (">f4" if sys.byteorder == "little" else "<f4", r"newbyteorder\('='\)"),
        ([("a", "i4"), ("b", "f8")], r"one field at a time.*array\['a'\]"),
        ("M8[ns]", 'Open it as "int64"'),
        ("m8[s]", 'Open it as "int64"'),
        ("S4", 'Open it as "uint8"'),
        ("U4", 'Open it as "uint8"'),
        ("V4", 'Open it as "uint8"'),
        (np.longdouble, "array.astype"),
        (ml_dtypes.int4, "array.astype"),
        (ml_dtypes.float8_e4m3, "array.astype"),
    ],
)
def test_dtypes_that_torch_lacks(dtype, message):
    """A dtype that NumPy has and torch has not is a DtypeError that names the way out."""
    with pytest.raises(DtypeError, match=message):
        canonical_name(dtype)


def test_arrays_open_with_any_plain_dtype():
    """The NumPy side takes structures, dates, strings and foreign byte order."""
    for dtype in (">f4", "M8[ns]", "S3", [("a", "<i2"), ("b", ">f8")]):
        found = numpy_dtype(dtype)
        assert found == np.dtype(dtype)
        assert numpy_dtype(dtype) == found  # lists are no dictionary keys: asked twice


def test_names_do_not_load_torch():
    """Asking for a dtype by torch's name loads no torch."""
    program = (
        "import sys, mmtensor.dtypes as d;"
        "d.numpy_dtype('torch.bfloat16'), d.canonical_name('float8_e5m2');"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
