"""The system calls that Python does not offer, through ctypes."""

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import Any, NamedTuple

__all__ = [
    "AT_FDCWD",
    "HAVE_MMAP",
    "LINUX",
    "PAGE",
    "file_handle",
    "is_resident",
    "link_descriptor",
    "machine",
    "madvise",
    "maps_line",
    "mmap",
    "msync",
    "munmap",
    "on_overlay",
    "pwrite",
    "pwritev",
    "rename_exchange",
    "rename_noreplace",
    "touch",
    "written_pages",
]

LINUX = sys.platform == "linux"
# Windows has no libc to ask; `mapping` uses the mmap module there.
HAVE_MMAP = os.name == "posix"

AT_FDCWD = -100
_AT_SYMLINK_FOLLOW = 0x400
_AT_EMPTY_PATH = 0x1000
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_MS_SYNC = 4 if LINUX else 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
PAGE = os.sysconf("SC_PAGE_SIZE") if HAVE_MMAP else 4096

if HAVE_MMAP:
    # PyDLL keeps the GIL: mmap(2) itself does no input or output, and giving the GIL up
    # and taking it back costs as much as the call (measured: 0.2 us of 4.7).
    _quick = ctypes.PyDLL(None, use_errno=True)
    _libc = ctypes.CDLL(None, use_errno=True)
    _mmap = _quick.mmap
    _mmap.restype = ctypes.c_void_p
    _mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    # Unmapping frees pages, which takes milliseconds for a large map: without the GIL.
    munmap = _libc.munmap
    munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _madvise = _libc.madvise
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _pwrite = _libc.pwrite
    _pwrite.restype = ctypes.c_ssize_t
    _pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
    _pwritev = _libc.pwritev
    _pwritev.restype = ctypes.c_ssize_t
    _pwritev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _mincore = _quick.mincore
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    # Reads the byte at an address, and keeps the GIL, the waiting for which would look like
    # waiting for a disk.
    touch: Any = _quick.strnlen
    touch.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _answer = ctypes.c_ubyte()
    _answer_address = ctypes.addressof(_answer)
    # struct file_handle { unsigned int handle_bytes; int handle_type; unsigned char f_handle[]; }
    _EMPTY_HANDLE = struct.pack("Ii128x", 128, 0)
    _Handle = ctypes.c_char * len(_EMPTY_HANDLE)
    _mount = ctypes.byref(ctypes.c_int())  # which nobody reads
    if LINUX:
        _name_to_handle_at = _libc.name_to_handle_at
    _msync = _libc.msync
    _msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
else:
    touch = ctypes.string_at


def _error(filename: str | None = None) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), filename)


def mmap(length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    """Map `length` bytes of a file; return the address. See mmap(2).

    Raises
    ------
    OSError
        With the error number of the call.
    """
    address: int = _mmap(None, length, protection, flags, fd, offset)
    if address == _MAP_FAILED:
        raise _error()
    return address


def madvise(address: int, length: int, advice: int) -> None:
    """Advise the kernel about the use of whole pages. See madvise(2)."""
    if _madvise(address, length, advice):
        raise _error()


def is_resident(address: int) -> bool:
    """Whether the page at an address of a map is in memory. See mincore(2).

    Of files that this process may not write to, Linux says yes.
    """
    # One answer for all threads: whoever gets another one's reads a little more or less ahead.
    if _mincore(address // PAGE * PAGE, 1, _answer_address):
        return True
    return bool(_answer.value & 1)


def msync(address: int, length: int) -> None:
    """Write mapped pages to stable storage and wait. See msync(2)."""
    if _msync(address, length, _MS_SYNC):
        raise _error()


# Whether linkat(2) takes a descriptor itself. It may need a privilege (before Linux 6.10:
# CAP_DAC_READ_SEARCH); then the way through /proc, 2.5 us longer, is taken from the start.
_links_descriptors = True


def pwrite(fd: int, address: int, length: int, position: int) -> int:
    """Write memory at an address; return how many bytes. See pwrite(2).

    Python's own takes an object, which takes longer to make of a tensor than the kernel needs
    to write a small one.

    Parameters
    ----------
    fd
        A descriptor.
    address, length
        Which memory.
    position
        Of the first byte in the file.
    """
    while True:
        written: int = _pwrite(fd, address, length, position)
        if written >= 0:
            return written
        if ctypes.get_errno() != errno.EINTR:
            raise _error()


def pwritev(fd: int, vectors: int, count: int, position: int) -> int:
    """Write pieces of memory one after the other; return how many bytes. See pwritev(2).

    Python's own takes objects, which takes longer to make than the kernel needs to write
    a small piece.

    Parameters
    ----------
    fd
        A descriptor.
    vectors
        The address of a table of `count` addresses and lengths.
    count
        At most 1024 (``IOV_MAX`` of Linux).
    position
        Of the first byte in the file.
    """
    while True:
        written: int = _pwritev(fd, vectors, count, position)
        if written >= 0:
            return written
        if ctypes.get_errno() != errno.EINTR:
            raise _error()


def link_descriptor(fd: int, path: str) -> None:
    """Give the unnamed file behind a descriptor a name that must not exist yet.

    See linkat(2), on ``O_TMPFILE``.
    """
    global _links_descriptors
    target = path.encode(_ENCODING, _ERRORS)  # as os.fsencode does
    if _links_descriptors:
        if not _libc.linkat(fd, b"", AT_FDCWD, target, _AT_EMPTY_PATH):
            return
        if ctypes.get_errno() != errno.ENOENT:
            raise _error(path)
    source = b"/proc/self/fd/%d" % fd
    if _libc.linkat(AT_FDCWD, source, AT_FDCWD, target, _AT_SYMLINK_FOLLOW):
        raise _error(path)
    _links_descriptors = False  # it worked, and the other way did not


def rename_noreplace(source: str, target: str, *, dir_fd: int = AT_FDCWD) -> None:
    """Rename a file or directory to a name that must not exist yet. See renameat2(2)."""
    if _libc.renameat2(
        dir_fd, os.fsencode(source), dir_fd, os.fsencode(target), _RENAME_NOREPLACE
    ):
        raise _error(target)


def rename_exchange(source: str, target: str, *, dir_fd: int = AT_FDCWD) -> None:
    """Let two names that exist change places, in one step. See renameat2(2)."""
    if _libc.renameat2(dir_fd, os.fsencode(source), dir_fd, os.fsencode(target), _RENAME_EXCHANGE):
        raise _error(target)


def file_handle(path: str | int) -> bytes:
    """Return the kernel's handle of a file, or nothing where the file system has none.

    The handle holds the inode's generation beside its number: file systems give the
    number of a deleted file to the next one that is created (ext4 at once, measured), so
    device, number and size can agree for two different files. See name_to_handle_at(2).

    Parameters
    ----------
    path
        A path or a descriptor.
    """
    if not LINUX:
        return b""
    buffer = _Handle.from_buffer_copy(_EMPTY_HANDLE)
    if isinstance(path, int):
        failed = _name_to_handle_at(path, b"", buffer, _mount, _AT_EMPTY_PATH)
    else:
        failed = _name_to_handle_at(
            AT_FDCWD, os.fsencode(path), buffer, _mount, _AT_SYMLINK_FOLLOW
        )
    if failed:
        return b""
    raw = buffer.raw
    return raw[8 : 8 + int.from_bytes(raw[:4], sys.byteorder)]


def on_overlay(path: str) -> bool:
    """Whether a file is on overlayfs, as in a container's image. See statfs(2)."""
    if not LINUX:
        return False
    buffer = ctypes.create_string_buffer(256)  # struct statfs, whose first field is the type
    if _libc.statfs(os.fsencode(path), buffer):
        return False
    return bool(struct.unpack_from("l", buffer)[0] == 0x794C7630)


def written_pages(address: int, length: int) -> bool:
    """Whether a private file map has pages that this process wrote to.

    Read from ``/proc/self/pagemap``: a page that is present (bit 63) or swapped out
    (bit 62) and is not a page of a file (bit 61) is a private copy. See
    Documentation/admin-guide/mm/pagemap.rst of the kernel. Where that cannot be read the
    answer is yes, which is safe: the bytes are then sent instead of a reference.

    Parameters
    ----------
    address, length
        Bytes; the pages they touch are looked at.
    """
    first, last = address // PAGE, -(-(address + length) // PAGE)
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        step = 1 << 17  # entries of 8 bytes: 1 MiB, 512 MiB of mapped memory
        for start in range(first, last, step):
            count = min(step, last - start)
            data = os.pread(fd, 8 * count, 8 * start)
            if len(data) != 8 * count or _has_private(data):
                return True
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _has_private(entries: bytes) -> bool:
    if not entries.strip(b"\0"):  # nothing was touched: the common case, at memory speed
        return False
    # Only the highest byte of each little-endian entry matters: bits 63, 62 and 61.
    tops = entries[7::8] if sys.byteorder == "little" else entries[::8]
    return any(top & 0xC0 and not top & 0x20 for top in set(tops))


class MapsLine(NamedTuple):
    """What ``/proc/self/maps`` says of an address: inode, position in the file, sharing."""

    inode: int
    position: int
    shared: bool


def maps_line(address: int) -> MapsLine | None:
    """Find the file behind an address in ``/proc/self/maps``; see proc(5)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields = line.split(maxsplit=5)
                low, high = (int(part, 16) for part in fields[0].split("-"))
                if low <= address < high:
                    position = int(fields[2], 16) + address - low
                    return MapsLine(int(fields[4]), position, fields[1].endswith("s"))
    except OSError:
        pass
    return None


_machine: bytes | None = None


def machine() -> bytes:
    """Return eight bytes that tell this boot of this machine from others."""
    global _machine
    if _machine is None:
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                _machine = bytes.fromhex(file.read().strip().replace("-", ""))[:8]
        except (OSError, ValueError):
            _machine = platform.node().encode()[:8].ljust(8)
    return _machine
