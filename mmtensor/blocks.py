"""The only code that opens blocks of POSIX shared memory, as descriptors."""

import errno
import os
import sys

from mmtensor.syscalls import HAVE_MMAP, LINUX

if HAVE_MMAP:
    from _posixshmem import shm_open  # type: ignore[import-not-found]  # CPython's own
if HAVE_MMAP and not LINUX:
    from multiprocessing import shared_memory

__all__ = ["open_block", "unnamed_block"]


def unnamed_block() -> int:
    """Open a new, empty piece of /dev/shm that has no name, not even for a moment."""
    if LINUX:
        # shm_open(3) and unlink leave a name behind if the process is killed in between,
        # and multiprocessing's resource tracker is a process more; O_TMPFILE needs neither.
        return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return _unlinked_block()


def _unlinked_block() -> int:
    """Do the same where there is no O_TMPFILE: the name of the block goes at once."""
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "anonymous shared memory needs a POSIX system; pass filename=")
    block = shared_memory.SharedMemory(create=True, size=1)
    fd = os.dup(block._fd)  # type: ignore[attr-defined]  # there is no public way to it
    block.close()
    block.unlink()
    os.ftruncate(fd, 0)
    return fd


def open_block(name: str) -> tuple[int, os.stat_result]:
    """Open a block of `multiprocessing.shared_memory` without telling a resource tracker.

    Attaching through `SharedMemory` registers the block with the tracker of this process,
    which destroys it when the process ends (before Python 3.13).

    Raises
    ------
    FileNotFoundError
        If there is no such block.
    """
    if not HAVE_MMAP:
        raise OSError(errno.ENOSYS, "attaching to a block by name needs a POSIX system")
    try:
        fd = shm_open("/" + name.removeprefix("/"), os.O_RDWR, mode=0o600)
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, "there is no shared-memory block of this name", name
        ) from None
    return fd, os.fstat(fd)
