"""Mappings of files and of the memory of others, references to them, and which is which."""

import errno
import math
import os
import struct
from typing import Any

import numpy as np

from mmtensor.errors import SizeError, StaleFileError
from mmtensor.geometry import MAX_BYTES, MAX_DIMENSIONS, fit
from mmtensor.memory import create_map, find_live, handle_at, open_map, size_at
from mmtensor.modes import MODES, Mode
from mmtensor.pages import DONTNEED, PAGEOUT, Mapping, live_mappings, share
from mmtensor.rawfile import SMALL, open_existing
from mmtensor.syscalls import (
    AT_FDCWD,
    LINUX,
    PAGE,
    file_handle,
    machine,
    msync,
    on_overlay,
    written_pages,
)

__all__ = [
    "FileMapping",
    "Mapping",
    "MemoryMapping",
    "Reference",
    "create_quickly",
    "find_file",
    "map_descriptor",
    "map_file",
    "map_new",
    "map_quickly",
]

# Machine, device and inode of a file; the kernel's handle of it follows.
_IDENTITY = struct.Struct("<8sQQ")

# Path, mode, offset, bytes mapped, size of the file, and which file it is.
Reference = tuple[str, str, int, int, int, bytes]

_READ_WRITE = MODES["r+"]
# What to try in one step: of the modes that None may mean, the first.
_QUICK: dict[Any, Mode] = {**MODES, None: _READ_WRITE}

# By how many keys a mapping is found: its own, and references to it.
_REMEMBERED = 4


class FileMapping(Mapping):
    """A part of a file. It holds no descriptor.

    Attributes
    ----------
    size : int
        Bytes in the file when it was mapped, or looked at since.
    st_dev, st_ino, st_ctime_ns : int
        What fstat(2) said when it was mapped: which file it is, whatever its name is by now.
    warm_until : int
        Before this time (`time.perf_counter_ns`), what is read is taken to be in memory.
    """

    # At first, which costs nothing.
    warm_until = 0
    _handle: bytes | None = None
    _cached: Reference | None = None

    def __init__(self, mode: Mode, path: str, offset: int, size: int) -> None:
        Mapping.__init__(self, mode)
        self.path: str = path
        self.offset: int = offset
        self.size = size

    @classmethod
    def of_descriptor(
        cls, fd: int, status: os.stat_result, path: str, mode: Mode, offset: int, nbytes: int
    ) -> "FileMapping":
        """Map a part of an open file."""
        mapping = cls(mode, path, offset, status.st_size)
        mapping.st_dev = status.st_dev
        mapping.st_ino = status.st_ino
        mapping.st_ctime_ns = status.st_ctime_ns
        mapping.map_descriptor(fd, offset, nbytes)
        return mapping

    def flush(self, start: int = 0, nbytes: int | None = None) -> None:
        """Write a range of bytes to stable storage (``r+``) and wait."""
        if not self.mode.shared or self.nbytes == 0:
            return
        if self.owner is not None:
            self.owner.flush()
            return
        end = self.address + (self.nbytes if nbytes is None else start + nbytes)
        low = (self.address + start) // PAGE * PAGE
        if low < end:
            msync(low, end - low)

    def written(self, start: int, nbytes: int) -> bool:
        """Whether a range holds private changes (``c``)."""
        if self.mode.name != "c" or nbytes == 0:
            return False
        return not LINUX or written_pages(self.address + start, nbytes)

    def is_at_path(self) -> bool:
        """Whether the file is still the one that its path names."""
        size = size_at(self.path, self)
        if size < 0:
            return False
        self.size = size
        return True

    def handle(self) -> bytes:
        """Return the kernel's handle of the file, asked for once, while the path names it."""
        if self._handle is None:
            self._handle = handle_at(self.path)
        return self._handle

    def reference(self) -> Reference:
        """Return what leads to this mapping again, the same tuple while nothing changes.

        Pickle writes a tuple once, however many views of one message refer to it.
        """
        cached = self._cached
        if cached is None or cached[4] != self.size:
            identity = _IDENTITY.pack(machine(), self.st_dev, self.st_ino) + self.handle()
            cached = (self.path, self.mode.name, self.offset, self.nbytes, self.size, identity)
            self._cached = cached
            _remember(self, cached)  # for when it comes back
        return cached

    def __reduce__(self) -> tuple[Any, ...]:
        return find_file, (self.reference(),)


class MemoryMapping(Mapping):
    """Memory that some other object owns, for example a NumPy array.

    Parameters
    ----------
    owner
        Kept alive as long as the mapping.
    path, offset
        The file behind it, if there is one.
    """

    __slots__ = ("offset", "owner", "path")

    def __init__(
        self,
        owner: object,
        address: int,
        nbytes: int,
        mode: Mode,
        path: str | None = None,
        offset: int = 0,
    ) -> None:
        self.owner = owner
        self.path: str | None = path
        self.offset: int = offset
        super().__init__(mode)
        self.place(address, nbytes)

    def _advise_pages(self, low: int, high: int, number: int) -> None:
        # Whose the pages are is not known. On the heap MADV_DONTNEED means zeros, for the
        # owner's neighbours too; MADV_PAGEOUT keeps every byte.
        super()._advise_pages(low, high, PAGEOUT if number == DONTNEED else number)


def _remember(mapping: FileMapping, reference: Reference) -> None:
    """Let a reference lead to a mapping without opening the file.

    Only the last ones: a file that grows makes a new one each time that it is sent. What it
    led to before shows the file no longer, or is this.
    """
    if mapping.mode.name == "c" or mapping.nbytes == 0:
        return
    hold = mapping.hold
    entry = hold.entry
    if entry is None or live_mappings.get(reference) is entry:
        return
    live_mappings[reference] = entry
    keys = hold.keys  # each step of these is one for all threads
    keys.append(reference)
    while len(keys) > _REMEMBERED:
        old = keys.pop(1)
        if live_mappings.get(old) is entry:
            live_mappings.pop(old, None)


def map_file(
    path: str,
    mode: str | None,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    offset: int = 0,
    partial: bool = False,
) -> tuple[FileMapping, tuple[int, ...]]:
    """Map the bytes of an array in a file that exists.

    Parameters
    ----------
    path
        From `rawfile.absolute`.
    mode
        A name in `modes.MODES`, or None: ``"r+"`` if the file may be written, else ``"c"``.
    dtype, shape
        What the bytes are; one ``-1`` in the shape is inferred from the size.
    offset
        Bytes before the data.
    partial
        Whether bytes may be left over after the data.

    Returns
    -------
    tuple
        The mapping, shared with earlier openings in `r` and `r+`, and the full shape.

    Raises
    ------
    FileNotFoundError, IsADirectoryError, PermissionError, ValueError
        As `rawfile.open_existing` does.
    SizeError
        If the size of the file is another one than the shape asks for.
    """
    if not partial and (mapping := _fitting(path, mode, dtype, shape, offset)) is not None:
        if -1 in shape:
            shape, _ = fit(shape, dtype, mapping.size, offset)
        return mapping, shape
    fd, status, found = open_existing(path, mode)
    try:
        try:
            shape, nbytes = fit(shape, dtype, status.st_size, offset, partial, "file", path)
        except SizeError as error:
            with open(fd, "rb", closefd=False) as file:
                if file.read(6) == b"\x93NUMPY":
                    raise SizeError(
                        f"{error} It is an .npy file, with a header: numpy.load(path, "
                        'mmap_mode="r") opens it, and mmtensor.to_torch takes the array.'
                    ) from None
            raise
        return map_descriptor(fd, status, path, found, offset, nbytes), shape
    finally:
        os.close(fd)


def _fitting(
    path: str, mode: str | None, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int
) -> FileMapping | None:
    """Map a file whose size is what the shape asks for, in one step; None: with care, then."""
    found = _QUICK.get(mode) if mode is None or type(mode) is str else None
    nbytes = math.prod(shape) * dtype.itemsize  # negative with a -1 in the shape
    if (
        found is None
        or nbytes == 0
        or offset > MAX_BYTES
        or offset + nbytes > MAX_BYTES
        or len(shape) > MAX_DIMENSIONS
    ):
        return None
    if nbytes > 0:
        return map_quickly(path, found, offset, nbytes, offset + nbytes)
    mapping = map_quickly(path, found, offset, -1, -1)
    return None if mapping is None or mapping.nbytes % nbytes else mapping


def map_quickly(
    path: str,
    mode: Mode,
    offset: int,
    nbytes: int,
    size: int,
    *,
    name: str | None = None,
    dir_fd: int = AT_FDCWD,
    flags: int = 0,
    which: tuple[int, int, bytes] | None = None,
) -> FileMapping | None:
    """Map a regular file in one step, or find the mapping that earlier openings share.

    Parameters
    ----------
    path
        From `rawfile.absolute`.
    mode
        How to open it.
    offset, nbytes
        Which bytes of it; -1: all that follow the offset.
    size
        Of the file; -1: whatever it is.
    name, dir_fd, flags
        What to open instead of the path: a name in an open directory. More flags for open(2).
    which
        Device, inode and handle of the file that is meant.

    Returns
    -------
    FileMapping or None
        None if anything is not as expected: the same must be done step by step, which
        finds out what it is. Without `mmtensor._calls` it always is.
    """
    mapping = open_map(
        FileMapping,
        path if name is None else name,
        mode.open_flags | flags,
        mode.protection,
        mode.map_flags,
        offset,
        nbytes,
        size,
        dir_fd,
        b"" if which is None else which[2],
    )
    if mapping is None or (
        which is not None and (mapping.st_dev != which[0] or mapping.st_ino != which[1])
    ):
        return None
    FileMapping.__init__(
        mapping, mode, path, offset, offset + mapping.nbytes if size < 0 else size
    )
    if mode.name == "c":
        return mapping
    found, key = _find(path, mode, offset, mapping.nbytes, mapping)
    if found is None:
        found = share(mapping, key)
    found.size = mapping.size
    return found


def map_descriptor(
    fd: int, status: os.stat_result, path: str, mode: Mode, offset: int, nbytes: int
) -> FileMapping:
    """Map an open file, or find the mapping that earlier openings share."""
    if mode.name == "c" or nbytes == 0:
        # Each opening has its own private pages. One of no bytes keeps no hold of the file,
        # whose inode number can become that of another one.
        return FileMapping.of_descriptor(fd, status, path, mode, offset, nbytes)
    found, key = _find(path, mode, offset, nbytes, status)
    if found is None:
        found = share(FileMapping.of_descriptor(fd, status, path, mode, offset, nbytes), key)
    found.size = status.st_size
    return found


def create_quickly(
    path: str, address: int, nbytes: int, *, name: str | None = None, dir_fd: int = AT_FDCWD
) -> FileMapping | None:
    """Make a file of bytes, or of zeros, and map it, in one step.

    Parameters
    ----------
    path
        From `rawfile.absolute`, or the name that the file will have.
    address, nbytes
        The bytes, which the caller keeps alive; 0: zeros.
    name, dir_fd
        Where to make it instead: a name in an open directory, which nobody sees yet.

    Returns
    -------
    FileMapping or None
        None if that cannot be done, with nothing left of the file: the same must be done step
        by step, which finds out why.
    """
    mapping = create_map(
        FileMapping, path if name is None else name, address, nbytes, nbytes > SMALL, dir_fd
    )
    if mapping is not None:
        FileMapping.__init__(mapping, _READ_WRITE, path, 0, nbytes)
        share(mapping, (path, mapping.st_dev, mapping.st_ino, "r+", 0, nbytes))
    return mapping


def map_new(fd: int, path: str, nbytes: int) -> FileMapping:
    """Map a file that was just made, all of it, under the name that it will have."""
    status = os.fstat(fd)
    mapping = FileMapping.of_descriptor(fd, status, path, MODES["r+"], 0, nbytes)
    if nbytes:
        share(mapping, (path, status.st_dev, status.st_ino, "r+", 0, nbytes))
    return mapping


def _find(
    path: str, mode: Mode, offset: int, nbytes: int, status: Any
) -> tuple[FileMapping | None, tuple[Any, ...]]:
    """Return the live mapping of these bytes, if there is one, and the key to share one under."""
    key: tuple[Any, ...] = (path, status.st_dev, status.st_ino, mode.name, offset, nbytes)
    found = None
    if key in live_mappings:
        found = _current(key, status)
        if found is None and on_overlay(path):
            key += (status.st_ctime_ns,)
            found = _current(key, status)
    return found, key


def _current(key: tuple[Any, ...], status: Any) -> FileMapping | None:
    """Return the live mapping under a key if it shows the file as it is now."""
    entry = live_mappings.get(key)
    return None if entry is None else _as_it_is(entry(), status)


def _as_it_is(found: FileMapping | None, status: Any) -> FileMapping | None:
    """Return a mapping if it shows the file as it is now.

    On overlayfs, the first opening for writing copies the file up: the number of the inode
    stays, and maps that were there go on to show the old bytes.
    """
    if (
        found is not None
        and status.st_ino == found.st_ino
        and status.st_dev == found.st_dev
        and (
            found.mode.shared
            or status.st_ctime_ns == found.st_ctime_ns
            or not on_overlay(found.path)
        )
    ):
        return found
    return None


def find_file(reference: Reference) -> FileMapping:
    """Map the file that a reference names, if it still is the file it was made from.

    Parameters
    ----------
    reference
        From `FileMapping.reference`.

    Raises
    ------
    FileNotFoundError
        If nothing has this name any more.
    StaleFileError
        If another file has it, or the size has changed. From another machine only the size
        can be compared.
    SizeError
        If the file has become too small.
    """
    path, mode, offset, nbytes, size, identity = reference
    # While a file is mapped here no other one can have its inode number.
    found: FileMapping | None = find_live(live_mappings, reference)
    if found is not None:
        return found
    origin, device, inode = _IDENTITY.unpack_from(identity)
    handle = identity[_IDENTITY.size :]
    here = origin == machine()
    which = (device, inode, handle) if here else None
    mapping = None
    if mode in MODES and nbytes > 0 and 0 <= offset <= size - nbytes and size <= MAX_BYTES:
        mapping = map_quickly(path, MODES[mode], offset, nbytes, size, which=which)
    if mapping is None:
        mapping = _find_with_care(reference, which)
    _remember(mapping, reference)
    if here:
        if mapping._handle is None:
            mapping._handle = handle  # compared above, or absent there as well
        if mapping._cached is None:
            mapping._cached = reference  # what it would be sent as
    return mapping


def _find_with_care(reference: Reference, which: tuple[int, int, bytes] | None) -> FileMapping:
    """Map the file of a reference step by step; say what is wrong with it."""
    path, mode, offset, nbytes, size, _ = reference
    fd, status, opened = open_existing(path, mode)
    try:
        if status.st_size < offset + nbytes:
            raise SizeError(
                f"file {path!r} must have {size} bytes, as when the reference was made, "
                f"but its size is {status.st_size} bytes: it is too small by now."
            )
        if status.st_size != size:
            raise _stale(path, f"its size is {status.st_size} bytes, {size} were expected")
        if which is not None:
            device, inode, handle = which
            if status.st_dev != device or status.st_ino != inode:
                raise _stale(path, "another file has its name")
            if handle and file_handle(fd) != handle:
                raise _stale(path, "another file has its name and its inode number")
        return map_descriptor(fd, status, path, opened, offset, nbytes)
    finally:
        os.close(fd)


def _stale(path: str, what: str) -> StaleFileError:
    return StaleFileError(
        errno.ESTALE,
        f"the file is not the one that the reference was made from: {what}. Open it again "
        "by name, or keep the sender's file in place until the reference has arrived",
        path,
    )
