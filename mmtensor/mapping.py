"""The only code that holds an operating-system resource: a mapped file or a shared block."""

import errno
import mmap as _mmap_module
import os
import struct
import weakref
from collections.abc import Iterable
from os.path import samestat as same_file
from typing import Any, TypeVar

import numpy as np

from mmtensor.blocks import unnamed_block
from mmtensor.errors import SizeError, StaleFileError
from mmtensor.geometry import fit
from mmtensor.modes import MODES, Mode
from mmtensor.rawfile import Chunk, open_existing, reserve, write_chunks
from mmtensor.syscalls import (
    HAVE_MMAP,
    LINUX,
    PAGE,
    file_handle,
    machine,
    madvise,
    mmap,
    msync,
    munmap,
    on_overlay,
    written_pages,
)

__all__ = [
    "FileMapping",
    "Mapping",
    "MemoryMapping",
    "Reference",
    "SharedMapping",
    "find_file",
    "map_descriptor",
    "map_file",
]

# What `advise` may be told, as madvise(2) numbers of Linux.
_ADVICE = {"normal": 0, "random": 1, "sequential": 2, "willneed": 3, "dontneed": 4}
_PAGEOUT = 21

# An address for maps of no bytes, which mmap(2) refuses.
_NOWHERE = np.zeros(1, np.uint8)

# Machine, device and inode of a file; the kernel's handle of it follows.
_IDENTITY = struct.Struct("<8sQQ")

# Path, mode, offset, bytes mapped, size of the file, and which file it is.
Reference = tuple[str, str, int, int, int, bytes]

_M = TypeVar("_M", "FileMapping", "SharedMapping")

# The live mappings of files in `r` and `r+`, so that openings of one file share one map.
# Weak references in a plain dict: `_Pages.__del__` runs anyway and takes the entries out,
# at a fifth of what a WeakValueDictionary costs.
_live: dict[tuple[Any, ...], weakref.ref[Any]] = {}


class Mapping:
    """Bytes at an address, and what keeps them there.

    A mapping is described by its mode and its length; views on it add byte offset, dtype,
    shape and strides. NumPy reads it through ``__array_interface__`` as uint8.

    Parameters
    ----------
    address, nbytes
        Where the bytes are, and how many.
    mode
        The mode that it was opened in.

    Attributes
    ----------
    path : str or None
        The absolute path of the file; None for memory.
    offset : int
        Position of the first mapped byte in the file.
    storage : weakref.ref or None
        Set by the torch side: the one storage that stands on this mapping.
    """

    __slots__ = ("__array_interface__", "__weakref__", "address", "mode", "nbytes", "storage")

    path: str | None
    offset: int

    def __init__(self, address: int, nbytes: int, mode: Mode) -> None:
        self.address = address
        self.nbytes = nbytes
        self.mode = mode
        self.storage: Any = None
        # The pointer counts as writable even in `r`: torch asks for such a one, and the
        # arrays that users get take their flag from the mode (`bytes_array`).
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def bytes_array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the mapped bytes as a 1-D array that keeps the mapping alive."""
        array = np.asarray(self)
        if not self.mode.writeable:
            array.flags.writeable = False
        return array

    def view(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        byte_strides: tuple[int, ...] | None = None,
        byte_offset: int = 0,
    ) -> np.ndarray[Any, Any]:
        """Return a part of the mapping as an array, without a copy."""
        if 0 in shape:  # where a view without elements begins is nobody's business
            byte_offset, byte_strides = 0, None
        return np.ndarray(shape, dtype, self.bytes_array(), byte_offset, byte_strides)

    def flush(self, start: int = 0, nbytes: int | None = None) -> None:
        """Write a range of bytes to stable storage; nothing to do without a shared file."""

    def written(self, start: int, nbytes: int) -> bool:
        """Whether a range holds changes that exist in this process only."""
        return False

    def advise(self, advice: str, start: int = 0, nbytes: int | None = None) -> None:
        """Tell the kernel how a range will be used; bytes never change by it.

        Parameters
        ----------
        advice
            ``"normal"``, ``"random"``, ``"sequential"``, ``"willneed"`` or ``"dontneed"``.
        start, nbytes
            The range. It is narrowed to whole pages, so that its neighbours keep theirs;
            for ``"willneed"``, which takes nothing away, it is widened.

        Raises
        ------
        ValueError
            If `advice` is another word.
        OSError
            If the system has no such call (other than Linux), or refuses.
        """
        if advice not in _ADVICE:
            raise ValueError(
                f"advice must be one of {', '.join(map(repr, _ADVICE))}, got {advice!r}."
            )
        if not LINUX:
            raise OSError(errno.ENOSYS, f"advise({advice!r}) needs madvise(2) of Linux")
        first = self.address + start
        end = first + (self.nbytes - start if nbytes is None else nbytes)
        if first == end:
            return
        number = _ADVICE[advice]
        if advice == "willneed":
            low, high = first // PAGE * PAGE, -(-end // PAGE) * PAGE
        else:
            # The last page of a map belongs to nobody else.
            if end == self.address + self.nbytes:
                end = -(-end // PAGE) * PAGE
            if start == 0:
                first = first // PAGE * PAGE
            low, high = -(-first // PAGE) * PAGE, end // PAGE * PAGE
        if advice == "dontneed" and self.mode.name == "c":
            # MADV_DONTNEED throws the private pages away, and the changes with them.
            number = _PAGEOUT
        if low < high:
            self._advise_pages(low, high, number)

    def _advise_pages(self, low: int, high: int, number: int) -> None:
        madvise(low, high - low, number)


class _Pages:
    """What the system gave to a mapping, given back when the mapping is gone.

    Apart from the mapping, which so has no finalizer of its own: a weak reference still
    leads to an object whose finalizer runs, and a thread that opened the file just then
    would get pages that are about to go.

    Parameters
    ----------
    base, length
        What to unmap.
    owner
        The map, where the module `mmap` made it.
    """

    __slots__ = ("base", "fd", "keys", "length", "owner", "reference")

    def __init__(self, base: int, length: int, owner: Any = None) -> None:
        self.base = base
        self.length = length
        self.keys: tuple[Any, ...] = ()
        self.fd = -1
        self.owner = owner
        self.reference: weakref.ref[Any] | None = None

    # The default arguments keep what is needed reachable while the interpreter ends.
    def __del__(
        self,
        munmap: Any = munmap if HAVE_MMAP else None,
        live: Any = _live,
        close: Any = os.close,
    ) -> None:
        try:
            for key in self.keys:
                if live.get(key) is self.reference:
                    live.pop(key, None)
            if self.fd >= 0:
                close(self.fd)
            if self.length:
                munmap(self.base, self.length)
        except AttributeError:
            pass  # Ctrl-C came while it was made


def _shared(mapping: "_M", key: tuple[Any, ...]) -> "_M":
    """Let later openings find a mapping; return the one of a thread that was faster."""
    pages = mapping._pages
    reference = pages.reference
    if reference is None:
        reference = pages.reference = weakref.ref(mapping)
    while True:
        entry = _live.setdefault(key, reference)  # in one step, whatever other threads do
        if entry is reference:
            pages.keys += (key,)
            return mapping
        found: _M | None = entry()
        if found is not None:
            return found
        if _live.get(key) is entry:  # of a mapping that is going
            _live.pop(key, None)


def _map(fd: int, offset: int, nbytes: int, mode: Mode) -> tuple[int, _Pages]:
    """Map bytes of a descriptor: their address, and what to give back."""
    if nbytes == 0:
        return _NOWHERE.ctypes.data, _Pages(0, 0)
    if HAVE_MMAP:
        delta = offset % PAGE
        length = nbytes + delta
        try:
            base = mmap(length, mode.protection, mode.map_flags, fd, offset - delta)
        except OSError as error:
            base = _map_otherwise(error, fd, offset - delta, length, mode)
        return base + delta, _Pages(base, length)
    delta = offset % _mmap_module.ALLOCATIONGRANULARITY
    access = _mmap_module.ACCESS_WRITE if mode.shared else _mmap_module.ACCESS_COPY
    owner = _mmap_module.mmap(fd, nbytes + delta, access=access, offset=offset - delta)
    return np.frombuffer(owner, np.uint8).ctypes.data + delta, _Pages(0, 0, owner)


def _map_otherwise(error: OSError, fd: int, offset: int, length: int, mode: Mode) -> int:
    """Map where the system refused, or explain why it did."""
    if mode.name == "r" and error.errno in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        # RLIMIT_DATA or strict overcommit count private writable pages even with
        # MAP_NORESERVE. A map without write permission is never counted; a write that
        # slips past the guards then ends the process, as with every other library.
        return mmap(length, _mmap_module.PROT_READ, _mmap_module.MAP_SHARED, fd, offset)
    if error.errno == errno.ENOMEM:
        what = f"{length} bytes"
        limits = "the address space (ulimit -v) or the number of maps (vm.max_map_count)"
        if not mode.shared:
            what += f' in mode "{mode.name}"'
            limits += (
                ", or private memory (ulimit -d, vm.overcommit_memory), of which mode "
                '"r" and "r+" need none'
            )
        raise OSError(error.errno, f"cannot map {what}: the system limits {limits}") from None
    if error.errno == errno.ENODEV:
        raise OSError(error.errno, "the file system does not support mmap(2)") from None
    raise error


class FileMapping(Mapping):
    """A part of a file. It holds no descriptor.

    Attributes
    ----------
    size : int
        Bytes in the file when it was mapped.
    status : os.stat_result
        What fstat(2) said then: which file it is, whatever its name is by now.
    """

    __slots__ = (
        "_cached",
        "_handle",
        "_pages",
        "offset",
        "path",
        "size",
        "status",
    )

    def __init__(
        self, fd: int, status: os.stat_result, path: str, mode: Mode, offset: int, nbytes: int
    ) -> None:
        address, self._pages = _map(fd, offset, nbytes, mode)
        Mapping.__init__(self, address, nbytes, mode)
        self.path: str = path
        self.offset: int = offset
        self.size = status.st_size
        self.status = status
        self._handle: bytes | None = None
        self._cached: Reference | None = None

    def flush(self, start: int = 0, nbytes: int | None = None) -> None:
        """Write a range of bytes to stable storage (``r+``) and wait."""
        if not self.mode.shared or self.nbytes == 0:
            return
        if self._pages.owner is not None:
            self._pages.owner.flush()
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
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        self.size = status.st_size
        return same_file(status, self.status)

    def handle(self) -> bytes:
        """Return the kernel's handle of the file, asked for once, while the path names it."""
        if self._handle is None:
            self._handle = file_handle(self.path)
        return self._handle

    def reference(self) -> Reference:
        """Return what leads to this mapping again, the same tuple while nothing changes.

        Pickle writes a tuple once, however many views of one message refer to it.
        """
        cached = self._cached
        if cached is None or cached[4] != self.size:
            status = self.status
            identity = _IDENTITY.pack(machine(), status.st_dev, status.st_ino) + self.handle()
            cached = (self.path, self.mode.name, self.offset, self.nbytes, self.size, identity)
            self._cached = cached
        return cached

    def __reduce__(self) -> tuple[Any, ...]:
        return find_file, (self.reference(),)


class SharedMapping(Mapping):
    """Shared memory without a name: one descriptor, which travels, keeps it reachable.

    Attributes
    ----------
    fd : int
        The descriptor, closed with the mapping.
    """

    __slots__ = ("_key", "_pages", "fd")

    path = None
    offset = 0

    def __init__(
        self, fd: int, nbytes: int, offset: int = 0, status: os.stat_result | None = None
    ) -> None:
        try:
            address, self._pages = _map(fd, offset, nbytes, MODES["r+"])
        except BaseException:
            os.close(fd)
            raise
        self.fd = self._pages.fd = fd
        super().__init__(address, nbytes, MODES["r+"])
        status = status or os.fstat(fd)
        self._key = (status.st_dev, status.st_ino, offset, nbytes)

    @classmethod
    def create(cls, nbytes: int, chunks: Iterable[Chunk] | None = None) -> "SharedMapping":
        """Make a block whose memory is reserved, of zeros or of the given bytes.

        Raises
        ------
        OSError
            ``ENOSPC`` if /dev/shm has no room, ``EMFILE`` without a descriptor left.
        """
        fd = unnamed_block()
        try:
            if chunks is None:
                reserve(fd, nbytes)
            else:
                write_chunks(fd, chunks, nbytes)
        except OSError as error:
            os.close(fd)
            raise OSError(
                error.errno,
                f"cannot reserve {nbytes} bytes of shared memory in /dev/shm: {error.strerror}",
            ) from None
        except BaseException:
            os.close(fd)
            raise
        return cls._new(fd, nbytes)

    @classmethod
    def _new(cls, *arguments: Any) -> "SharedMapping":
        mapping = cls(*arguments)
        return _shared(mapping, mapping._key)

    @classmethod
    def adopt(cls, fd: int, nbytes: int, offset: int = 0) -> "SharedMapping":
        """Map a block that came as a descriptor, or find it mapped; the descriptor is ours."""
        status = os.fstat(fd)
        entry = _live.get((status.st_dev, status.st_ino, offset, nbytes))
        found: Any = entry() if entry is not None else None
        if found is not None:
            os.close(fd)
            return found  # type: ignore[no-any-return]  # the key is that of a SharedMapping
        return cls._new(fd, nbytes, offset, status)

    @property
    def block_offset(self) -> int:
        """Position of the first byte in the block."""
        return self._key[2]


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
        super().__init__(address, nbytes, mode)

    def _advise_pages(self, low: int, high: int, number: int) -> None:
        # Whose the pages are is not known. On the heap MADV_DONTNEED means zeros, for the
        # owner's neighbours too; MADV_PAGEOUT keeps every byte.
        super()._advise_pages(low, high, _PAGEOUT if number == _ADVICE["dontneed"] else number)


def map_file(
    path: str,
    mode: str | None,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    *,
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
    fd, status, found = open_existing(path, mode)
    try:
        try:
            shape, nbytes = fit(
                shape,
                dtype,
                status.st_size,
                offset=offset,
                partial=partial,
                what="file",
                name=path,
            )
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


def map_descriptor(
    fd: int, status: os.stat_result, path: str, mode: Mode, offset: int, nbytes: int
) -> FileMapping:
    """Map an open file, or find the mapping that earlier openings share."""
    if mode.name == "c" or nbytes == 0:
        # Each opening has its own private pages. One of no bytes keeps no hold of the file,
        # whose inode number can become that of another one.
        return FileMapping(fd, status, path, mode, offset, nbytes)
    key: tuple[Any, ...] = (path, status.st_dev, status.st_ino, mode.name, offset, nbytes)
    found = None
    if key in _live:
        found = _current(key, status)
        if found is None and on_overlay(path):
            key += (status.st_ctime_ns,)
            found = _current(key, status)
    if found is None:
        mapping = FileMapping(fd, status, path, mode, offset, nbytes)
        found = _shared(mapping, key)
        if found is mapping:
            return found
    found.size = status.st_size
    return found


def _current(key: tuple[Any, ...], status: os.stat_result) -> FileMapping | None:
    """Return the live mapping under a key if it shows the file as it is now."""
    entry = _live.get(key)
    return None if entry is None else _as_it_is(entry(), status)


def _as_it_is(found: FileMapping | None, status: os.stat_result) -> FileMapping | None:
    """Return a mapping if it shows the file as it is now.

    On overlayfs, the first opening for writing copies the file up: the number of the inode
    stays, and maps that were there go on to show the old bytes.
    """
    if (
        found is not None
        and same_file(status, found.status)
        and (
            found.mode.shared
            or status.st_ctime_ns == found.status.st_ctime_ns
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
    entry = _live.get(reference)
    if entry is not None:
        # While it is mapped here no other file can have its inode number.
        status = os.stat(path)
        if status.st_size == size and (found := _as_it_is(entry(), status)) is not None:
            return found
    origin, device, inode = _IDENTITY.unpack_from(identity)
    handle = identity[_IDENTITY.size :]
    here = origin == machine()
    fd, status, opened = open_existing(path, mode)
    try:
        if status.st_size < offset + nbytes:
            raise SizeError(
                f"file {path!r} must have {size} bytes, as when the reference was made, "
                f"but its size is {status.st_size} bytes: it is too small by now."
            )
        if status.st_size != size:
            raise _stale(path, f"its size is {status.st_size} bytes, {size} were expected")
        if here and (status.st_dev != device or status.st_ino != inode):
            raise _stale(path, "another file has its name")
        if here and handle and file_handle(fd) != handle:
            raise _stale(path, "another file has its name and its inode number")
        mapping = map_descriptor(fd, status, path, opened, offset, nbytes)
    finally:
        os.close(fd)
    if mode != "c" and nbytes and reference not in _live:
        mapping = _shared(mapping, reference)
    if here and mapping._handle is None:
        mapping._handle = handle  # compared above, or absent there as well
    return mapping


def _stale(path: str, what: str) -> StaleFileError:
    return StaleFileError(
        errno.ESTALE,
        f"the file is not the one that the reference was made from: {what}. Open it again "
        "by name, or keep the sender's file in place until the reference has arrived",
        path,
    )
