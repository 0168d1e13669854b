"""The three files of a jagged tensor: their names, opening, checking and replacing them."""

import contextlib
import errno
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np

from mmtensor.errors import DtypeError, ShapeError, SizeError
from mmtensor.jagged_layout import Integers, check_rows
from mmtensor.mapping import FileMapping, map_descriptor
from mmtensor.rawfile import DENIED, open_existing

if sys.platform != "win32":
    import fcntl

__all__ = [
    "Files",
    "Names",
    "Opened",
    "ReplacedError",
    "check_all",
    "dimensions",
    "int64_on",
    "locked",
    "marked",
    "marker",
    "names_of",
    "open_files",
]

# A reader that meets a replacement waits for its end. On a file system without locks it
# tries again for this long: replacing takes well under a millisecond.
_PATIENCE = 0.1
_PAUSE = 0.001
# Rows that decide how many dimensions a table has, where its size does not.
_SAMPLE = 16
_MOST_DIMENSIONS = 64  # NumPy's and torch's limit


class Names(NamedTuple):
    """The absolute paths of the three files."""

    values: str
    offsets: str
    shapes: str


class Files(NamedTuple):
    """Three mapped files.

    Parameters
    ----------
    values, offsets, shapes
        The mappings, each of exactly what the offsets speak of.
    length, ndim, total
        Number of elements, dimensions of each, and numbers in all of them.
    """

    values: FileMapping
    offsets: FileMapping
    shapes: FileMapping
    length: int
    ndim: int
    total: int


_NOT_OPEN = (-1, os.stat_result((0,) * 10))


class ReplacedError(Exception):
    """The files were replaced, or closed by a writer, while they were being opened."""


def names_of(path: str) -> Names:
    """Return the three paths: ``x.memmap``, ``x.offsets.memmap``, ``x.shape.memmap``."""
    root, suffix = os.path.splitext(path)
    return Names(path, f"{root}.offsets{suffix}", f"{root}.shape{suffix}")


def marker(ndim: int, itemsize: int = 0) -> bytes:
    """Return what may stand behind the last row of shapes and tells their dimensions.

    Sizes are never negative, so ``-1 - ndim`` cannot be one. It is there while a writer is
    at work, when there may be more rows than elements, and where there is no row at all. A
    writer tells the bytes of a number as well (``- 256 * itemsize``): the size of the values
    does not while there may be more of them than the offsets say.
    """
    return struct.pack("=q", -1 - ndim - 256 * itemsize)


def marked(data: bytes) -> tuple[int, int] | None:
    """Return the dimensions and the bytes of a number that a marker tells; 0 if it does not.

    None if it is no marker.
    """
    (last,) = struct.unpack("=q", data) if len(data) == 8 else (0,)
    return ((-1 - last) % 256, (-1 - last) // 256) if last < 0 else None


def _check_itemsize(found: "Opened", dtype: np.dtype[Any]) -> None:
    """Refuse files whose numbers are known to have another size.

    A writer that is at work or was killed has left it in its marker. Without one, the values are
    as many as the offsets say, and no more.

    Raises
    ------
    DtypeError
        It says which size they have.
    """
    fd, status = found.shapes
    size = found.values[1].st_size
    end = status.st_size // 8 * 8
    told = marked(os.pread(fd, 8, end - 8)) if end else None
    known = told[1] if told else 0
    if (
        not known
        and found.total
        and size % found.total == 0
        and status.st_size == 8 * found.length * found.ndim
    ):
        known = size // found.total
    if known != dtype.itemsize and known in (1, 2, 4, 8, 16):
        raise DtypeError(
            f"file {found.names.values!r} has {known} bytes per number, but "
            f"{dtype.name} has {dtype.itemsize}. Pass the dtype that it was written with."
        )


def int64_on(mapping: FileMapping) -> Integers:
    """Return a mapping's bytes as int64."""
    return np.asarray(mapping).view(np.int64)


def open_files(
    path: str, mode: str | None, dtype: np.dtype[Any], ndim: int | None = None
) -> Files:
    """Map the three files, all of one version.

    Parameters
    ----------
    path
        Of the values, from `rawfile.absolute`.
    mode
        A name in `modes.MODES`, or None: ``"r+"`` if all may be written, else ``"c"``.
    dtype
        Of the values.
    ndim
        Dimensions of each element; None: found out.

    Raises
    ------
    FileNotFoundError
        It names the file that is missing.
    SizeError
        If the files do not fit together.
    """
    names = names_of(path)
    try:
        return _open_in(names, mode, dtype, ndim)
    except (ReplacedError, FileNotFoundError):
        pass  # somebody may be replacing it
    with locked(os.path.dirname(path), shared=True) as alone:
        deadline = time.monotonic() + (0 if alone else _PATIENCE)
        while True:
            try:
                return _open_in(names, mode, dtype, ndim)
            except ReplacedError:
                problem: OSError = FileNotFoundError(
                    errno.ENOENT, "the jagged tensor was replaced again and again", path
                )
            except FileNotFoundError as error:
                problem = error
                if not os.path.exists(names.values):
                    deadline = 0  # nothing is there, and nothing is about to be
            if time.monotonic() > deadline:
                raise _explained(problem, names) from None
            time.sleep(_PAUSE)


def _open_in(names: Names, mode: str | None, dtype: np.dtype[Any], ndim: int | None) -> Files:
    if mode is not None:
        return _open_once(names, mode, dtype, ndim)
    try:
        return _open_once(names, "r+", dtype, ndim)
    except OSError as error:
        if error.errno not in DENIED:
            raise
        return _open_once(names, "c", dtype, ndim)


@contextlib.contextmanager
def locked(directory: str, *, shared: bool) -> Iterator[bool]:
    """Keep others from replacing a jagged tensor in a directory meanwhile (flock(2)).

    Parameters
    ----------
    directory
        Where the files are.
    shared
        Whether others may hold such a lock too: readers share it, a writer has it alone.

    Yields
    ------
    bool
        Whether the lock is held; a file system may have none.
    """
    fd = -1
    held = False
    try:
        if sys.platform != "win32":
            try:
                fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
                held = True
            except OSError:
                pass
        yield held
    finally:
        if fd >= 0:
            os.close(fd)


def _explained(error: OSError, names: Names) -> OSError:
    if error.filename != names.values and error.errno == errno.ENOENT and error.filename:
        what = "offsets" if error.filename == names.offsets else "shapes"
        return FileNotFoundError(
            errno.ENOENT,
            f"the file with the {what} of the jagged tensor {names.values!r} is missing. Where "
            "another program wrote values and shapes only, pass the shapes: "
            "JaggedTensor.from_filename(filename, dtype, shapes)",
            error.filename,
        )
    return error


def _open_once(names: Names, mode: str, dtype: np.dtype[Any], ndim: int | None) -> Files:
    with Opened(names, mode, dtype, ndim) as o:
        files = Files(
            map_descriptor(*o.values, names.values, o.mode, 0, o.total * dtype.itemsize),
            map_descriptor(*o.offsets, names.offsets, o.mode, 0, 8 * (o.length + 1)),
            map_descriptor(*o.shapes, names.shapes, o.mode, 0, 8 * o.length * o.ndim),
            o.length,
            o.ndim,
            o.total,
        )
        o.check_still()
    return files


class Opened:
    """Three open files that were found to fit together; a context that closes them."""

    __slots__ = ("length", "mode", "names", "ndim", "offsets", "shapes", "total", "values")

    values: tuple[int, os.stat_result]
    shapes: tuple[int, os.stat_result]

    def __init__(self, names: Names, mode: str, dtype: np.dtype[Any], ndim: int | None) -> None:
        self.names = names
        self.values = self.shapes = _NOT_OPEN
        # The offsets first: they are what is renamed last when all three are replaced.
        fd, status, self.mode = open_existing(names.offsets, mode)
        self.offsets = fd, status
        try:
            self.values = open_existing(names.values, mode)[:2]
            self.shapes = open_existing(names.shapes, mode)[:2]
            self.length = _length(status.st_size, names)
            self.total = _total(fd, self.length, names)
            _check_values(self.values[1].st_size, self.total, dtype, names)
            self.ndim = dimensions(self.shapes[0], fd, self.length, ndim, names)
            _check_itemsize(self, dtype)
        except BaseException as error:
            try:
                if isinstance(error, (FileNotFoundError, SizeError, DtypeError)):
                    self.check_still()
            finally:
                self.close()
            raise

    def check_still(self) -> None:
        """Raise if the offsets have lost their name to other ones meanwhile."""
        try:
            now = os.stat(self.names.offsets)
        except FileNotFoundError:
            raise ReplacedError from None
        status = self.offsets[1]
        if now.st_ino != status.st_ino or now.st_dev != status.st_dev:
            raise ReplacedError

    def close(self) -> None:
        """Close the files."""
        for fd, _ in (self.offsets, self.values, self.shapes):
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _length(size: int, names: Names) -> int:
    if size < 8:
        raise SizeError(
            f"file {names.offsets!r} must have 8 bytes per element and 8 more, but its size is "
            f"{size} bytes."
        )
    # An append that did not finish may leave a piece of a number.
    return size // 8 - 1


def _total(fd: int, length: int, names: Names) -> int:
    (first,) = struct.unpack("=q", os.pread(fd, 8, 0))
    (last,) = struct.unpack("=q", os.pread(fd, 8, 8 * length))
    if first != 0 or last < 0:
        raise SizeError(
            f"file {names.offsets!r} must have offsets that start at 0 and do not decrease, but "
            f"the first is {first} and the last is {last}. It has no offsets, or is damaged."
        )
    return int(last)


def _check_values(size: int, total: int, dtype: np.dtype[Any], names: Names) -> None:
    if size < total * dtype.itemsize:
        raise SizeError(
            f"file {names.values!r} must have at least {total * dtype.itemsize} bytes for the "
            f"{total} values of {dtype.name} that its offsets speak of, but its size is {size} "
            "bytes. Correct the dtype; or the file was cut."
        )


def dimensions(fd: int, offsets_fd: int, length: int, ndim: int | None, names: Names) -> int:
    """Find out how many dimensions a file of shapes is for, and check that its rows are there.

    Parameters
    ----------
    fd, offsets_fd
        Descriptors of the shapes and of the offsets.
    length
        Number of elements.
    ndim
        What the caller expects, or None.
    names
        For messages.

    Raises
    ------
    SizeError
        If there are fewer rows than elements.
    ShapeError
        If `ndim` is given and the file has another number.
    """
    found, size = _marked(fd)
    if found is None:
        if os.fstat(offsets_fd).st_size // 8 - 1 != length:
            raise ReplacedError  # a writer has appended and gone; its marker went with it
        found = _columns(fd, offsets_fd, length, size, ndim)
    if found is None or 8 * length * found > size:
        raise SizeError(
            f"file {names.shapes!r} must have one row of sizes for each of the {length} elements, "
            f"but its {size} bytes do not fit the offsets."
            + ("" if found is None else f" {8 * length * found} bytes were expected.")
        )
    if ndim is not None and found != ndim:
        raise ShapeError(
            f"the elements of {names.values!r} have {found} dimension{'' if found == 1 else 's'} "
            f"each, not {ndim}."
        )
    return found


def _marked(fd: int) -> tuple[int | None, int]:
    """Read the dimensions that a marker tells, and the size of the file.

    A writer moves the marker ahead of its rows and cuts it off at the end: what has moved
    meanwhile is read again.
    """
    size = os.fstat(fd).st_size
    while True:
        told = marked(os.pread(fd, 8, size // 8 * 8 - 8)) if size >= 8 else None
        if told:
            return told[0], size
        now = os.fstat(fd).st_size
        if now == size:
            return None, size
        size = now


def _columns(fd: int, offsets_fd: int, length: int, size: int, ndim: int | None) -> int | None:
    """Tell the dimensions by the size of a table without a marker, checked by some rows."""
    if length == 0:
        return 1 if ndim is None else ndim
    most, rest = divmod(size, 8 * length)
    if rest == 0 and _agree(fd, offsets_fd, length, most, 1):
        return most
    # More rows than elements, from a program that leaves no marker: what fits the offsets?
    candidates = range(min(most, _MOST_DIMENSIONS), 0, -1)
    fitting = [n for n in candidates if _agree(fd, offsets_fd, length, n, min(length, _SAMPLE))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        return ndim if ndim in fitting else None
    # Nothing fits. A table of the right size has damaged rows, which reading them reports.
    return most if rest == 0 and most else None


def _agree(fd: int, offsets_fd: int, length: int, columns: int, rows: int) -> bool:
    """Whether the first and the last rows have the products that the offsets ask for."""
    for first in {0, length - rows}:
        offsets = _int64(offsets_fd, first, rows + 1)
        sizes = _int64(fd, first * columns, rows * columns)
        for row in range(rows):
            count = math.prod(sizes[row * columns : (row + 1) * columns])
            if count != offsets[row + 1] - offsets[row]:
                return False
    return True


def _int64(fd: int, position: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"={count}q", os.pread(fd, 8 * count, 8 * position))


def check_all(files: Files) -> None:
    """Check the offsets and the shapes of every element; see `jagged_layout.check_rows`."""
    offsets = int64_on(files.offsets)
    shapes = int64_on(files.shapes).reshape(files.length, files.ndim)
    check_rows(offsets[:-1], offsets[1:], shapes, files.total)
