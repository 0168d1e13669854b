"""The bare system calls, through the same means that Python has: the limits."""

import ctypes
import mmap
import os

__all__ = ["CREATE", "drop_pages", "map_and_unmap", "rename_noreplace"]

CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC

_libc = ctypes.PyDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE


def map_and_unmap(fd: int, length: int) -> None:
    """Map a file shared, close its descriptor, and unmap it."""
    address = _mmap(None, length, _PROTECTION, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    _munmap(address, length)


def rename_noreplace(source: bytes, target: bytes) -> None:
    """Call renameat2(2) with ``RENAME_NOREPLACE``."""
    if _libc.renameat2(-100, source, -100, target, 1):
        raise OSError(ctypes.get_errno(), "renameat2")


def drop_pages(path: str) -> None:
    """Take a file out of the page cache; pages that are not on the disk or are mapped stay."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
