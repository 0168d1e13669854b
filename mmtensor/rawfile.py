"""The only code that creates, sizes, reserves, writes, publishes and checks files."""

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from mmtensor.errors import ExistingFileError, SymbolicLinkError
from mmtensor.modes import MODES, Mode, resolve_mode
from mmtensor.syscalls import LINUX, link_descriptor, pwrite, pwritev, rename_noreplace

__all__ = [
    "CHUNK",
    "DENIED",
    "SMALL",
    "Chunk",
    "NewFile",
    "Path",
    "Piece",
    "Pieces",
    "absolute",
    "naming",
    "open_existing",
    "reserve",
    "write_all",
    "write_chunks",
    "write_vectors",
]

_MOST_PIECES = 1024  # IOV_MAX of Linux
# What open(2) says of a file that may be read, but not written to.
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY)


class Pieces:
    """Many pieces of memory, by their addresses; whoever makes it keeps them alive.

    Parameters
    ----------
    addresses, sizes
        One entry each per piece, in bytes.
    """

    __slots__ = ("table",)

    def __init__(self, addresses: Any, sizes: Any) -> None:
        sizes = np.asarray(sizes, np.uint64)
        kept = np.flatnonzero(sizes)
        self.table = np.empty((len(kept), 2), np.uint64)
        self.table[:, 0] = np.asarray(addresses, np.uint64)[kept]
        self.table[:, 1] = sizes[kept]

    def write(self, fd: int, position: int) -> int:
        """Write them one after the other; return the position after the last byte."""
        table = self.table
        start = table.ctypes.data
        row = 0
        while row < len(table):
            count = min(_MOST_PIECES, len(table) - row)
            done = pwritev(fd, start + 16 * row, count, position)
            position += done
            ends = table[row : row + count, 1].cumsum()
            whole = int(np.searchsorted(ends, done, "right"))
            if whole < count:  # one call writes at most 2 GiB, and less on a full disk
                rest = done - (int(ends[whole - 1]) if whole else 0)
                table[row + whole] += np.array([rest, -rest]).astype(np.uint64)
            row += whole
        return position


class Piece(NamedTuple):
    """A piece of memory, by its address.

    Parameters
    ----------
    owner
        What keeps it alive.
    address, nbytes
        Which memory.
    """

    owner: object
    address: int
    nbytes: int

    def write(self, fd: int, position: int) -> int:
        """Write it; return the position after the last byte."""
        _, address, left = self
        while left:  # one call writes at most 2 GiB, and less on a full disk
            done = pwrite(fd, address, min(left, _ONCE), position)
            address += done
            position += done
            left -= done
        return position


# What `write_chunks` takes: a piece of memory, or several of them.
Chunk = memoryview | bytes | np.ndarray[Any, Any] | list[Any] | Piece | Pieces
Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# Below this, writing zeros is faster than fallocate(2) and reserves the blocks as well
# (ext4 and tmpfs, measured).
SMALL = 1 << 16
# Bytes that are copied, converted or filled at a time: large enough to run at memory
# speed, small enough to stay in the cache and out of the way.
CHUNK = 1 << 22
_ONCE = 1 << 30
_ZEROS = bytes(SMALL)
# Characters that take at most 255 bytes, which file systems allow in a name.
_SURELY_SHORT = 64
_QUICK_LOOK = os.access in os.supports_follow_symlinks
_TMPFILE = getattr(os, "O_TMPFILE", 0) if LINUX else 0
# What open(2) says of a file system that cannot make unnamed files.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_PLAIN = os.sep == "/" and os.altsep is None
_CLOEXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def absolute(path: Path, *, directory: bool = False) -> str:
    """Return a path as an absolute string, so that it survives a change of directory.

    Parameters
    ----------
    path
        A str, bytes or path-like object.
    directory
        Whether it is to name a directory, and so may end with a slash.

    Raises
    ------
    TypeError
        If it is none of those.
    ValueError
        If it is empty or has a null byte in it.
    IsADirectoryError
        If it ends as the name of a directory does, and `directory` is false.

    Examples
    --------
    >>> absolute("/data/../data/x.bin")
    '/data/x.bin'
    """
    if (
        type(path) is str
        and _PLAIN
        and path[:1] == "/"
        and path[-1] != "/"
        and "//" not in path
        and "/." not in path
        and "\0" not in path
    ):
        return path  # the usual case, at a third of the cost
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"filename must be a str, bytes or a path, got {path!r}.") from None
    if not name:
        raise ValueError("filename must name a file, got an empty string.")
    if "\0" in name:  # where C would end the name, and mean another file
        raise ValueError(f"filename must have no null byte, got {name!r}.")
    if not directory and os.path.basename(name) in ("", ".", ".."):
        what = "filename must name a file, but ends as the name of a directory does"
        raise IsADirectoryError(errno.EISDIR, what, name)
    if ".." in name:
        # abspath takes "link/.." away as text; the system follows the link first.
        head, last = os.path.split(name)
        if last in ("", ".", ".."):
            return os.path.realpath(name)
        return os.path.join(os.path.realpath(head), last)
    return os.path.abspath(name)


def open_existing(path: str, mode: str | None) -> tuple[int, os.stat_result, Mode]:
    """Open a regular file that exists; never create, grow or truncate one.

    Parameters
    ----------
    path
        From `absolute`.
    mode
        A name in `modes.MODES`, or None: ``"r+"`` if the file may be written, else ``"c"``.

    Returns
    -------
    tuple
        A descriptor that the caller closes, what fstat(2) says of it, and the mode.

    Raises
    ------
    FileNotFoundError, IsADirectoryError, PermissionError
        As `open` raises them.
    ValueError
        If the file is a FIFO, socket or device.
    """
    if mode is None:
        try:
            found = MODES["r+"]
            fd = os.open(path, found.open_flags)
        except OSError as error:
            if error.errno not in DENIED:
                raise _explained(error, path) from None
            found = MODES["c"]
            fd = os.open(path, found.open_flags)
    else:
        found = resolve_mode(mode)
        try:
            fd = os.open(path, found.open_flags)
        except OSError as error:
            raise _explained(error, path) from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "expected a regular file, got a directory", path)
        raise _not_regular(path)
    return fd, status, found


def _explained(error: OSError, path: str) -> Exception:
    """Say how to go on where the plain error does not."""
    if error.errno == errno.EISDIR:
        return IsADirectoryError(errno.EISDIR, "expected a regular file, got a directory", path)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return type(error)(
            error.errno,
            f'{error.strerror}: mode "r+" needs a file that may be written; '
            'mode "c" or "r" opens one that may only be read',
            path,
        )
    if error.errno == errno.ENXIO:  # open(2) of a FIFO for writing, or of a socket
        return _not_regular(path)
    return error


def _not_regular(path: str) -> ValueError:
    return ValueError(f"filename must be a regular file, got a FIFO, socket or device: {path!r}.")


def write_all(fd: int, data: memoryview | bytes | np.ndarray[Any, Any], position: int = 0) -> int:
    """Write all bytes at a position; return the position after them.

    One pwrite(2) takes at most 2 GiB and may write less than it was given.
    """
    view = memoryview(data)  # type: ignore[arg-type]  # an array is a buffer
    if not view.nbytes:
        return position
    done = os.pwrite(fd, view, position) if view.nbytes <= _ONCE else 0
    if done == view.nbytes:  # the usual case, at half the cost
        return position + done
    view = _flat(data)
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _ONCE], position + done)
    return position + done


def _flat(data: memoryview | bytes | np.ndarray[Any, Any]) -> memoryview:
    """Return contiguous memory as bytes; memoryview itself casts no complex numbers."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def write_vectors(fd: int, buffers: list[Any], position: int = 0) -> int:
    """Write buffers one after the other, in one system call where that suffices.

    Parameters
    ----------
    fd
        A descriptor.
    buffers
        At most 1024 (``IOV_MAX`` of Linux) contiguous arrays or memoryviews.
    position
        Of the first byte.

    Returns
    -------
    int
        The position after the last byte.
    """
    if not hasattr(os, "pwritev"):
        return write_all(fd, b"".join(buffers), position)
    done: int = os.pwritev(fd, buffers, position)
    total: int = sum([buffer.nbytes for buffer in buffers])
    if done == total:
        return position + total
    for buffer in buffers:  # one call writes at most 2 GiB, and less on a full disk
        view = _flat(buffer)
        if done < view.nbytes:
            write_all(fd, view[done:], position + done)
        done = max(done - view.nbytes, 0)
        position += view.nbytes
    return position


def reserve(fd: int, nbytes: int, *, preallocate: bool = True) -> None:
    """Make an empty file `nbytes` long, all zeros, with its blocks reserved.

    Parameters
    ----------
    fd
        A descriptor of a new, empty file.
    nbytes
        The size.
    preallocate
        False leaves the file sparse: a full disk then shows at the first write through a
        map, as SIGBUS.

    Raises
    ------
    OSError
        ``ENOSPC`` if there is no room.
    """
    if nbytes == 0:
        return
    if not preallocate:
        os.ftruncate(fd, nbytes)
    elif nbytes <= SMALL:
        write_all(fd, _ZEROS[:nbytes])
    elif hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        position = 0
        while position < nbytes:
            position = write_all(fd, _ZEROS[: nbytes - position], position)


def _name_file(error: BaseException, path: str) -> None:
    """Say which file an error was for: what is told of a descriptor has no name."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = path


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Let errors of descriptors name a file, where several are written side by side."""
    try:
        yield
    except OSError as error:
        _name_file(error, path)
        raise


class NewFile:
    """A file that is written out of sight and appears whole, or not at all.

    Use it as a context manager and call `publish` at the end of the block; leaving the
    block without it leaves no trace. Where the system has unnamed files (``O_TMPFILE``)
    nothing is left even after SIGKILL, but for the moment in which a file that replaces another
    one has a name of its own.

    Parameters
    ----------
    path
        The target, from `absolute`.
    existsok
        Whether an existing file may be replaced. Whoever has the old one mapped keeps its
        bytes, and the new one takes over its permission bits.
    nbytes
        How much will be written. Before a large write the target is looked at first; a small
        one finds out at the end, when the name is given.

    Raises
    ------
    ExistingFileError
        If the target exists and `existsok` is false.
    SymbolicLinkError
        If the target is a symbolic link.
    FileNotFoundError, NotADirectoryError, PermissionError
        If the directory cannot be written to.
    """

    # At first, whatever interrupt comes.
    fd = -1
    _permissions: int | None = None
    _temporary: str | None = None

    def __init__(self, path: str, *, existsok: bool = False, nbytes: int = 0) -> None:
        self.path = path
        self._existsok = existsok
        if existsok or nbytes > CHUNK:
            self._check_target()
        directory = path.rpartition(os.sep)[0] or os.sep
        if _TMPFILE:
            try:
                self.fd = os.open(directory, _TMPFILE | os.O_RDWR | _CLOEXEC, 0o666)
                return
            except OSError as error:
                if error.errno not in _NO_TMPFILE or not os.path.isdir(directory):
                    raise _no_directory(error, path) from None
        # Named before it exists: an interrupt in between must not leave it behind.
        self._temporary = self._beside()
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _CLOEXEC
            self.fd = os.open(self._temporary, flags, 0o666)
        except OSError as error:
            self._temporary = None
            raise _no_directory(error, path) from None

    def _check_target(self) -> None:
        # Usually nothing is there, which lstat would say with an exception, at ten times the cost.
        # It also says that a name is too long.
        length = len(self.path) - self.path.rfind(os.sep)
        quick = _QUICK_LOOK and length < _SURELY_SHORT
        if quick and not os.access(self.path, os.F_OK, follow_symlinks=False):
            return
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _no_directory(error, self.path) from None
        if stat.S_ISLNK(status.st_mode):
            raise SymbolicLinkError(
                f"filename must not be a symbolic link when writing, got {self.path!r}. "
                "Write to the file that it points to (os.path.realpath) or choose another name."
            )
        if not self._existsok:
            raise _exists(self.path)
        if not stat.S_ISREG(status.st_mode):
            raise _irreplaceable(status, self.path)
        self._permissions = stat.S_IMODE(status.st_mode)

    def _beside(self) -> str:
        directory, name = os.path.split(self.path)
        # Names are at most 255 bytes long; the target's own may already be.
        return os.path.join(directory, f".{name[:40]}.{secrets.token_hex(8)}.tmp")

    def name_beside(self) -> None:
        """Give the file a name beside the target, so that only a rename is left to do."""
        if self._temporary is None:
            # Known before it exists: an interrupt in between must not leave it behind.
            self._temporary = self._beside()
            link_descriptor(self.fd, self._temporary)

    def publish(self, *, durable: bool = False) -> None:
        """Give the file its name, atomically.

        Parameters
        ----------
        durable
            Whether to wait until data and name are on stable storage (fsync).

        Raises
        ------
        ExistingFileError
            If the target has appeared meanwhile and `existsok` is false.
        """
        if self._permissions is not None:
            os.fchmod(self.fd, self._permissions)
        if durable:
            os.fsync(self.fd)
        if self._existsok:
            self.name_beside()
            os.replace(self._temporary or "", self.path)
        else:
            self._publish_new()
        self._temporary = None
        if durable and os.name == "posix":
            directory = os.open(os.path.dirname(self.path), os.O_RDONLY | _CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _publish_new(self) -> None:
        try:
            if self._temporary is None:
                link_descriptor(self.fd, self.path)
            elif LINUX:
                try:
                    rename_noreplace(self._temporary, self.path)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOSYS):
                        raise
                    # The file system has no RENAME_NOREPLACE; link(2) refuses as well.
                    os.link(self._temporary, self.path)
                    os.unlink(self._temporary)
            elif sys.platform == "win32":
                os.rename(self._temporary, self.path)  # refuses an existing target there
            else:
                os.link(self._temporary, self.path)
                os.unlink(self._temporary)
        except FileExistsError:
            self._check_target()  # it says what is in the way
            raise _exists(self.path) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if value is not None:
            _name_file(value, self.path)
        self._release()

    def __del__(self) -> None:
        # Ctrl-C can come before the `with` statement has the file, or after it has it no more.
        if self.fd >= 0 or self._temporary is not None:
            self._release()

    def _release(self) -> None:
        if self._temporary is not None:
            try:
                os.unlink(self._temporary)
            except FileNotFoundError:
                pass  # renamed just before an interrupt came
            self._temporary = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def write_chunks(fd: int, chunks: Iterable[Chunk], nbytes: int) -> None:
    """Reserve `nbytes` in a new file and write the chunks one after the other; zeros follow.

    A chunk is a piece of memory, a list of them for one call of `write_vectors`, a `Piece` or
    `Pieces`.

    Reserving first keeps a large file in few extents and in large folios of the page
    cache, which makes writing and reading it twice as fast (measured, 256 MB).

    Raises
    ------
    OSError
        ``ENOSPC`` if there is no room.
    """
    if nbytes > SMALL and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    position = 0
    for chunk in chunks:
        if type(chunk) is list:
            position = write_vectors(fd, chunk, position)
        elif type(chunk) is Piece or type(chunk) is Pieces:
            position = chunk.write(fd, position)
        else:
            position = write_all(fd, chunk, position)  # type: ignore[arg-type]  # lists are above
    while position < nbytes and os.fstat(fd).st_size < nbytes:
        # Not reserved above, and the chunks were fewer: what they leave out is zeros.
        position = write_all(fd, _ZEROS[: nbytes - position], position)


def _exists(path: str) -> ExistingFileError:
    return ExistingFileError(
        errno.EEXIST, "the file exists; pass existsok=True to replace it", path
    )


def _irreplaceable(status: os.stat_result, path: str) -> OSError:
    if stat.S_ISDIR(status.st_mode):
        return IsADirectoryError(errno.EISDIR, "cannot replace a directory by a file", path)
    return FileExistsError(errno.EEXIST, "cannot replace a FIFO, socket or device", path)


def _no_directory(error: OSError, path: str) -> OSError:
    """Name the file that was to be written, and what is wrong with its directory."""
    directory = os.path.dirname(path)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        what = "is not a directory" if os.path.lexists(directory) else "does not exist"
        return type(error)(error.errno, f"the directory {directory!r} {what}", path)
    return type(error)(error.errno, f"{error.strerror}, in the directory {directory!r}", path)
