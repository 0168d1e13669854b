"""The exceptions: what they are, and that they survive a process boundary."""

import copy
import pickle

import pytest

from mmtensor import errors

BUILTINS = {
    "MmtensorError": (Exception,),
    "ModeError": (ValueError,),
    "DtypeError": (TypeError,),
    "ShapeError": (ValueError,),
    "SizeError": (ValueError,),
    "ReadOnlyError": (RuntimeError,),
    "GradientError": (RuntimeError,),
    "LockedError": (RuntimeError,),
    "ManifestError": (ValueError,),
    "MapError": (RuntimeError,),
    "DeviceError": (RuntimeError, ValueError),
    "ExistingFileError": (FileExistsError, RuntimeError),
    "SymbolicLinkError": (RuntimeError,),
    "StaleFileError": (OSError,),
}


def test_every_exception_is_in_the_table():
    """The table of this file names every exception of the package."""
    assert sorted(BUILTINS) == errors.__all__


@pytest.mark.parametrize("name", BUILTINS)
def test_builtins(name):
    """Each exception is the builtin that callers already catch, and a MmtensorError."""
    kind = getattr(errors, name)
    assert issubclass(kind, errors.MmtensorError)
    assert all(issubclass(kind, builtin) for builtin in BUILTINS[name])


@pytest.mark.parametrize("name", BUILTINS)
@pytest.mark.parametrize("send", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_exceptions_travel(name, send):
    """An exception comes back from a worker with its type, its text and its file name."""
    kind = getattr(errors, name)
    error = kind(17, "no room", "/x") if issubclass(kind, OSError) else kind("no room")
    again = send(error)
    assert type(again) is kind
    assert str(again) == str(error)
    assert "no room" in str(again)
    assert getattr(again, "filename", None) == getattr(error, "filename", None)


def test_stale_file_without_a_message():
    """A StaleFileError without a text has the system's."""
    assert "Stale file handle" in str(errors.StaleFileError(116, ""))
