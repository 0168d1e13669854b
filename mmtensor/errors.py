"""Every exception of the package; each is also the builtin that callers already catch."""

import os

__all__ = [
    "DeviceError",
    "DtypeError",
    "ExistingFileError",
    "GradientError",
    "LockedError",
    "ManifestError",
    "MapError",
    "MmtensorError",
    "ModeError",
    "ReadOnlyError",
    "ShapeError",
    "SizeError",
    "StaleFileError",
    "SymbolicLinkError",
]


class MmtensorError(Exception):
    """Base class of the exceptions that mmtensor raises on its own account.

    Examples
    --------
    >>> import mmtensor
    >>> try:
    ...     mmtensor.open_array("digits.bin", "float33")
    ... except mmtensor.MmtensorError as error:
    ...     print(type(error).__name__)
    DtypeError
    """


class ModeError(MmtensorError, ValueError):
    """A mode is not one of ``"r"``, ``"r+"``, ``"c"`` and ``None``.

    Examples
    --------
    >>> issubclass(ModeError, ValueError)
    True
    """


class DtypeError(MmtensorError, TypeError):
    """A dtype is unknown, or has no counterpart on the side that needs it.

    Examples
    --------
    >>> issubclass(DtypeError, TypeError)
    True
    """


class ShapeError(MmtensorError, ValueError):
    """A shape is impossible in itself: negative, too large, or with two ``-1``.

    Examples
    --------
    >>> issubclass(ShapeError, ValueError)
    True
    """


class SizeError(MmtensorError, ValueError):
    """A file or block has another size than the shape and the dtype ask for.

    Examples
    --------
    >>> issubclass(SizeError, ValueError)
    True
    """


class ReadOnlyError(MmtensorError, RuntimeError):
    """Something was about to write to a tensor that was opened with mode ``"r"``.

    Examples
    --------
    >>> issubclass(ReadOnlyError, RuntimeError)
    True
    """


class GradientError(MmtensorError, RuntimeError):
    """A memory-mapped tensor was asked to require gradients.

    Examples
    --------
    >>> issubclass(GradientError, RuntimeError)
    True
    """


class LockedError(MmtensorError, RuntimeError):
    """A key of a locked TensorDict was about to be added, removed or replaced.

    Examples
    --------
    >>> issubclass(LockedError, RuntimeError)
    True
    """


class ManifestError(MmtensorError, ValueError):
    """The ``meta.json`` of a directory says what cannot be, or not what is there.

    Examples
    --------
    >>> issubclass(ManifestError, ValueError)
    True
    """


class MapError(MmtensorError, RuntimeError):
    """The function of `TensorDict.map` failed, its worker was lost, or a result does not fit.

    What the function raised is the cause (``__cause__``).

    Attributes
    ----------
    chunk : int or None
        The number of the chunk; None where it is not known, because a worker has died.

    Examples
    --------
    >>> td = mmtensor.TensorDict({"x": torch.arange(3)}, [3])
    >>> try:
    ...     td.map(lambda one: 1 // one["x"].item(), chunksize=0, num_workers=0)
    ... except mmtensor.MapError as error:
    ...     print(error.chunk, type(error.__cause__).__name__)
    0 ZeroDivisionError
    """

    def __init__(self, message: str, chunk: int | None = None) -> None:
        super().__init__(message)
        self.chunk = chunk


class DeviceError(MmtensorError, RuntimeError, ValueError):
    """A device other than the CPU was asked for.

    Examples
    --------
    >>> issubclass(DeviceError, RuntimeError) and issubclass(DeviceError, ValueError)
    True
    """


class ExistingFileError(MmtensorError, FileExistsError, RuntimeError):
    """The target of a write exists and ``existsok`` is false.

    Examples
    --------
    >>> issubclass(ExistingFileError, FileExistsError)
    True
    """


class SymbolicLinkError(MmtensorError, RuntimeError):
    """The target of a write is a symbolic link.

    Examples
    --------
    >>> issubclass(SymbolicLinkError, RuntimeError)
    True
    """


class StaleFileError(MmtensorError, OSError):
    """The file that a reference names is not the one it was made from.

    Examples
    --------
    >>> issubclass(StaleFileError, OSError)
    True
    """

    def __init__(self, code: int, message: str, filename: str | None = None) -> None:
        # OSError keeps its text only with two arguments or more; a fixed signature
        # keeps the exception picklable on its way back from a worker process.
        super().__init__(code, message or os.strerror(code), filename)
