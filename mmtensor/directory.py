"""Directories that appear whole: written beside, then exchanged with what is there."""

import contextlib
import errno
import itertools
import operator
import os
import stat
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from mmtensor.errors import ExistingFileError, SymbolicLinkError
from mmtensor.modes import MODES, Mode
from mmtensor.syscalls import LINUX, rename_exchange, rename_noreplace

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # there saving a directory is refused

__all__ = [
    "NOFOLLOW",
    "NewDirectory",
    "Owned",
    "create_beneath",
    "open_beneath",
    "open_directory",
    "read_beneath",
    "sync_beneath",
]

# Tells by the bytes of a meta.json, none without one, which files and which directories
# beside it are ours.
Owned = Callable[[bytes], tuple[set[str], set[str]]]

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR | _CLOEXEC | NOFOLLOW
_META = "meta.json"
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS)
# What opening says of a file, a symbolic link or somebody else's directory.
_IN_THE_WAY = (errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM)
# Another save that has just replaced the same directory is done within this time.
_PATIENCE = 1.0
# Numbers of directories that are looked for; one more than saves that were killed at once.
_LEFTOVERS = 8


def open_directory(name: str, dir_fd: int | None = None) -> int:
    """Open a directory; with `dir_fd` one that is really beneath it, no symbolic link."""
    if dir_fd is None:
        return os.open(name, _DIRECTORY)
    return os.open(name, _DIRECTORY | NOFOLLOW, dir_fd=dir_fd)


def create_beneath(name: str, dir_fd: int) -> int:
    """Create a file in an open directory, and open it for reading and writing."""
    return os.open(name, _NEW, 0o666, dir_fd=dir_fd)


def open_beneath(name: str, dir_fd: int, mode: Mode) -> tuple[int, os.stat_result]:
    """Open a regular file in an open directory; return what fstat(2) says of it as well.

    Raises
    ------
    FileNotFoundError
        If there is none.
    OSError
        ``ELOOP`` if it is a symbolic link, ``EINVAL`` if it is no regular file.
    """
    fd = os.open(name, mode.open_flags | NOFOLLOW, dir_fd=dir_fd)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd, status


def read_beneath(name: str, dir_fd: int) -> bytes:
    """Read a regular file in an open directory; errors as for `open_beneath`."""
    fd, status = open_beneath(name, dir_fd, MODES["r"])
    try:
        size = status.st_size
        data = os.read(fd, size + 1)
        while len(data) < size and (more := os.read(fd, size - len(data))):
            data += more
        return data
    finally:
        os.close(fd)


def sync_beneath(name: str, dir_fd: int) -> None:
    """Write the data of a regular file in an open directory to stable storage."""
    fd, _ = open_beneath(name, dir_fd, MODES["r"])
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _meta(fd: int) -> bytes:
    try:
        return read_beneath(_META, fd)
    except OSError:
        return b""


def first_foreign(fd: int, owned: Owned) -> str | None:
    """Return the first entry of a directory that its ``meta.json`` does not name, or None."""
    with os.scandir(fd) as scan:
        entries = sorted(scan, key=operator.attrgetter("name"))
    if not entries:
        return None
    files, directories = owned(_meta(fd))
    for entry in entries:
        name = entry.name
        if name in directories and entry.is_dir(follow_symlinks=False):
            child = open_directory(name, fd)
            try:
                found = first_foreign(child, owned)
            finally:
                os.close(child)
            if found is not None:
                return f"{name}/{found}"
        elif name not in files or not entry.is_file(follow_symlinks=False):
            return name
    return None


def _remove_owned(fd: int, owned: Owned) -> None:
    """Remove what the ``meta.json`` of a directory names, the file itself last.

    Interrupted anywhere, it can be gone through again.
    """
    try:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | 0o700)  # it may be write-protected
    except OSError:
        pass  # somebody else's: what cannot be removed stays
    files, directories = owned(_meta(fd))
    for name in directories:
        try:
            child = open_directory(name, fd)
        except OSError:
            continue  # gone, or nothing of ours
        try:
            _remove_owned(child, owned)
        finally:
            os.close(child)
        _quietly(os.rmdir, name, fd)
    files.discard(_META)
    for name in files:
        _quietly(os.unlink, name, fd)
    _quietly(os.unlink, _META, fd)


def _quietly(remove: Callable[..., None], name: str, fd: int) -> None:
    try:
        remove(name, dir_fd=fd)
    except OSError:
        pass  # another process was quicker, or someone put something into it


def _not_replaced(path: str, foreign: str | None) -> ExistingFileError:
    if foreign is None:
        return ExistingFileError(
            errno.EEXIST,
            "the directory holds what an earlier save has written; existsok=True replaces it",
            path,
        )
    return ExistingFileError(
        errno.EEXIST,
        f"the directory holds {foreign!r}, which its {_META} does not name. Only what a save has "
        "written is replaced: move it away, or choose another directory",
        os.path.join(path, foreign),
    )


class NewDirectory:
    """A directory that is filled out of sight and appears whole, or not at all.

    Use it as a context manager, put files into `fd`, beginning with the ``meta.json`` of each
    directory, and call `publish` at the end. Leaving without it removes everything again.

    While it is being filled it is called ``.<name>.<n>.new``, beside the target, and locked
    (flock(2)). What a killed process leaves there is not locked: the next save of the same
    target removes it.

    Parameters
    ----------
    path
        The target, from `rawfile.absolute`. Missing parents are made.
    owned
        Tells what in a directory is ours and may be removed.
    existsok
        Whether what an earlier save has left at the target is replaced.

    Attributes
    ----------
    fd : int
        The open directory.

    Raises
    ------
    SymbolicLinkError
        If the target is a symbolic link.
    ExistingFileError
        If the target is a file, or a directory with an entry that is not ours; without
        `existsok` if it is a directory that is not empty.
    OSError
        ``EBUSY`` if it is a mount point or the current directory, or contains it.
    """

    __slots__ = ("_existsok", "_mode", "_name", "_owned", "_parent", "_temporary", "fd", "path")

    def __init__(self, path: str, owned: Owned, *, existsok: bool = True) -> None:
        if os.open not in os.supports_dir_fd:
            raise OSError(errno.ENOSYS, "saving a directory needs a POSIX system", path)
        self.path = path
        self._owned = owned
        self._existsok = existsok
        self._temporary: str | None = None
        parent, self._name = os.path.split(path)
        self._mode = self._check()
        try:
            self._parent = open_directory(parent)
        except FileNotFoundError:
            os.makedirs(parent, exist_ok=True)
            self._parent = open_directory(parent)
        try:
            self._temporary, self.fd = self._claim()
        except BaseException:
            os.close(self._parent)
            raise

    def _check(self) -> int | None:
        """Raise if what is at the target must not be replaced; return its permission bits."""
        path = self.path
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(status.st_mode):
            raise SymbolicLinkError(
                f"the directory to save to must not be a symbolic link, got {path!r}. Save to "
                "what it points to (os.path.realpath), or choose another name."
            )
        if not stat.S_ISDIR(status.st_mode):
            raise ExistingFileError(errno.EEXIST, "a file is where the directory is to be", path)
        if os.path.ismount(path):
            raise _busy(path, "it is a mount point")
        here = _current_directory()
        real = os.path.realpath(path)
        if here == real:
            raise _busy(path, "it is the current directory")
        if here.startswith(real + os.sep):
            raise _busy(path, "the current directory is in it")
        fd = open_directory(path)
        try:
            foreign = first_foreign(fd, self._owned)
            saved = not self._existsok and bool(os.listdir(fd))
        except FileNotFoundError:
            foreign, saved = "", False
        finally:
            replaced = not _leads_to(path, fd)
            os.close(fd)
        if replaced or foreign == "":
            return self._check()  # another save was quicker: what has it put there?
        if foreign is not None or saved:
            raise _not_replaced(path, foreign)
        return stat.S_IMODE(status.st_mode)

    # --- the place beside ----------------------------------------------------------------

    def _claim(self) -> tuple[str, int]:
        """Make a directory beside the target that no other process uses, or take one over."""
        for number in itertools.count():
            name = self._beside(number)
            fd = self._occupy(name, make=True)
            if fd is not None:
                return name, fd
        raise AssertionError  # counting never ends

    def _beside(self, number: int) -> str:
        stem = self._name if len(os.fsencode(self._name)) < 230 else self._name[:50]
        return f".{stem}.{number}.new"

    def _occupy(self, name: str, *, make: bool) -> int | None:
        """Lock a directory beside the target and empty it; None if it is not to be had."""
        while True:
            made = make and self._make(name)
            try:
                fd = open_directory(name, self._parent)
                empty = self._empty(name, fd)
            except FileNotFoundError:
                if make:
                    continue  # its owner has just published it
                return None
            except OSError as error:
                if made:  # with descriptors left, and rights for what is new, it could be
                    _quietly(os.rmdir, name, self._parent)
                elif error.errno in _IN_THE_WAY:
                    return None
                raise self._not_made(error) from None
            if empty:
                return fd
            os.close(fd)
            if empty is False:
                return None

    def _empty(self, name: str, fd: int) -> bool | None:
        """Lock a directory and empty it, or unlock it; None if it was published just now."""
        locked = _lock(fd)
        empty: bool | None = None
        try:
            # Where nothing can be locked, only an empty one is certainly not in use.
            if locked is False or (locked is None and os.listdir(fd)):
                empty = False  # another save is at work
            elif _leads_to(name, fd, self._parent):
                _remove_owned(fd, self._owned)
                empty = not os.listdir(fd)  # there may be something that is not ours
        except BaseException:
            _release(fd)
            raise
        if not empty:
            _unlock(fd)
        return empty

    def _make(self, name: str) -> bool:
        """Make a directory beside the target; return whether it is new."""
        try:
            os.mkdir(name, dir_fd=self._parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._not_made(error) from None
        return True

    def _not_made(self, error: OSError) -> OSError:
        what = f"{error.strerror}, for a directory beside the one to save to"
        return type(error)(error.errno, what, self.path)

    def _remove_leftovers(self) -> None:
        """Remove what saves that were killed have left, as many as may have run at once."""
        for number in range(_LEFTOVERS):
            name = self._beside(number)
            fd = self._occupy(name, make=False)
            if fd is not None:
                _quietly(os.rmdir, name, self._parent)
                _release(fd)

    def _bring_back(self, old: int) -> None:
        """Move what someone put into a directory as it was replaced to where they put it."""
        names = os.listdir(old)
        if not names or not LINUX:
            return
        try:
            target = open_directory(self._name, self._parent)
        except OSError:
            return
        try:
            for name in names:
                try:
                    rename_noreplace(
                        f"/proc/self/fd/{old}/{name}", f"/proc/self/fd/{target}/{name}"
                    )
                except OSError:  # each for itself
                    pass  # a new file has its name; it stays where it is
        finally:
            os.close(target)

    # --- the exchange --------------------------------------------------------------------

    def publish(self) -> None:
        """Let the directory take the place of the target, in one step.

        Raises
        ------
        ExistingFileError, SymbolicLinkError, OSError
            If something else has appeared at the target meanwhile.
        """
        temporary = self._temporary or ""
        if self._mode is not None:
            os.fchmod(self.fd, self._mode)
        while True:
            try:
                _rename_new(temporary, self._name, self._parent)
            except FileExistsError:
                pass
            else:
                self._temporary = None
                break
            self._check()
            try:
                self._exchange(temporary)
            except FileNotFoundError:
                continue  # it has gone meanwhile
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise _busy(self.path, "it is a mount point") from None
                raise
            self._temporary = None
            with contextlib.suppress(OSError):
                self._dispose(temporary)
            break
        # The new one is there. What cannot be removed now goes with the next save.
        with contextlib.suppress(OSError):
            self._remove_leftovers()

    def _exchange(self, source: str) -> None:
        """Let a name and the target change places; in steps where the system has no such call."""
        parent, target = self._parent, self._name
        if LINUX:
            try:
                rename_exchange(source, target, dir_fd=parent)
                return
            except OSError as error:
                if error.errno not in _NO_EXCHANGE:
                    raise
        # A crash between the renames leaves the target without a directory, or what it was
        # under this name, which is ours as long as `source` is.
        between = f"{source}.old"
        self._remove(between)
        os.rename(target, between, src_dir_fd=parent, dst_dir_fd=parent)
        os.rename(source, target, src_dir_fd=parent, dst_dir_fd=parent)
        os.rename(between, source, src_dir_fd=parent, dst_dir_fd=parent)

    def _remove(self, name: str) -> None:
        """Remove what is ours under a name beside the target, if there is such a directory."""
        try:
            fd = open_directory(name, self._parent)
        except OSError:
            return
        try:
            _remove_owned(fd, self._owned)
            _quietly(os.rmdir, name, self._parent)
        finally:
            os.close(fd)

    def _dispose(self, name: str) -> None:
        """Remove the old directory, unless another save is at it already."""
        try:
            fd = open_directory(name, self._parent)
        except OSError:
            return
        try:
            deadline = time.monotonic() + _PATIENCE
            # Where nothing can be locked, it was ours before the exchange, and is again.
            while _lock(fd) is False:
                if time.monotonic() > deadline:
                    return  # the next save removes it
                time.sleep(0.001)
            if _leads_to(name, fd, self._parent):
                _remove_owned(fd, self._owned)
                self._bring_back(fd)
                _quietly(os.rmdir, name, self._parent)
        finally:
            _release(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._temporary is not None:
                _remove_owned(self.fd, self._owned)
                _quietly(os.rmdir, self._temporary, self._parent)
        finally:
            _release(self.fd)
            os.close(self._parent)


def _leads_to(name: str, fd: int, dir_fd: int | None = None) -> bool:
    """Whether a path, or a name in a directory, is that of an open directory."""
    try:
        now = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(now, os.fstat(fd))


def _lock(fd: int) -> bool | None:
    """Lock a directory against other saves; None: the file system cannot."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(fd: int) -> None:
    # Closing is not enough: a child that was forked meanwhile has the descriptor too.
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        pass


def _release(fd: int) -> None:
    _unlock(fd)
    os.close(fd)


def _current_directory() -> str:
    try:
        return os.path.realpath(os.getcwd())
    except OSError:  # it has been removed
        return ""


def _busy(path: str, what: str) -> OSError:
    return OSError(
        errno.EBUSY,
        f"a save replaces the whole directory, which this one does not allow: {what}. Save to a "
        "directory in it",
        path,
    )


def _rename_new(source: str, target: str, dir_fd: int) -> None:
    """Rename to a name that must not exist."""
    if LINUX:
        try:
            rename_noreplace(source, target, dir_fd=dir_fd)
            return
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
    try:
        os.stat(target, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
