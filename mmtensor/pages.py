"""The only code that keeps memory mapped, and gives it back to the system."""

import errno
import mmap as _mmap_module
import os
import weakref
from typing import Any, TypeVar

import numpy as np

from mmtensor.modes import Mode
from mmtensor.syscalls import HAVE_MMAP, LINUX, PAGE, madvise, mmap, munmap

__all__ = ["DONTNEED", "PAGEOUT", "Mapping", "Pages", "live_mappings", "map_pages", "share"]

# Of madvise(2), on Linux: where bytes are lost by the first, the second keeps them.
DONTNEED, PAGEOUT = 4, 21
# What `advise` may be told, as madvise(2) numbers of Linux.
_ADVICE = {"normal": 0, "random": 1, "sequential": 2, "willneed": 3, "dontneed": DONTNEED}

# An address for maps of no bytes, which mmap(2) refuses.
_NOWHERE = np.zeros(1, np.uint8)

_M = TypeVar("_M")

# The live mappings of files in `r` and `r+`, so that openings of one file share one map.
# Weak references in a plain dict: `Pages.__del__` runs anyway and takes the entries out,
# at a fifth of what a WeakValueDictionary costs.
live_mappings: dict[tuple[Any, ...], weakref.ref[Any]] = {}


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
            number = PAGEOUT
        if low < high:
            self._advise_pages(low, high, number)

    def _advise_pages(self, low: int, high: int, number: int) -> None:
        madvise(low, high - low, number)


class Pages:
    """What the system gave to a mapping, given back when the mapping is gone.

    Apart from the mapping, which so has no finalizer of its own: a weak reference still
    leads to an object whose finalizer runs, and a thread that opened the file just then
    would get pages that are about to go.

    Parameters
    ----------
    base, length
        What to unmap.

    Attributes
    ----------
    fd : int
        What to close; -1: nothing.
    owner : mmap.mmap or None
        The map, where the module `mmap` made it.
    keys : list
        Under which the mapping is found in `live_mappings`.
    reference : weakref.ref or None
        What is found there.
    """

    # Usually as here, which costs nothing.
    fd = -1
    owner: Any = None
    reference: weakref.ref[Any] | None = None

    def __init__(self, base: int, length: int) -> None:
        self.base = base
        self.length = length
        self.keys: list[Any] = []

    # The default arguments keep what is needed reachable while the interpreter ends.
    def __del__(
        self,
        munmap: Any = munmap if HAVE_MMAP else None,
        live: Any = live_mappings,
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


def share(mapping: _M, pages: Pages, key: tuple[Any, ...]) -> _M:
    """Let later openings find a mapping; return the one of a thread that was faster."""
    reference = pages.reference
    if reference is None:
        reference = pages.reference = weakref.ref(mapping)
    while True:
        entry = live_mappings.setdefault(key, reference)  # in one step, whatever other threads do
        if entry is reference:
            pages.keys.append(key)
            return mapping
        found: _M | None = entry()
        if found is not None:
            return found
        if live_mappings.get(key) is entry:  # of a mapping that is going
            live_mappings.pop(key, None)


def map_pages(fd: int, offset: int, nbytes: int, mode: Mode) -> tuple[int, Pages]:
    """Map bytes of a descriptor: their address, and what to give back."""
    if nbytes == 0:
        return _NOWHERE.ctypes.data, Pages(0, 0)
    if HAVE_MMAP:
        delta = offset % PAGE
        length = nbytes + delta
        try:
            base = mmap(length, mode.protection, mode.map_flags, fd, offset - delta)
        except OSError as error:
            base = _map_otherwise(error, fd, offset - delta, length, mode)
        return base + delta, Pages(base, length)
    delta = offset % _mmap_module.ALLOCATIONGRANULARITY
    access = _mmap_module.ACCESS_WRITE if mode.shared else _mmap_module.ACCESS_COPY
    pages = Pages(0, 0)
    pages.owner = _mmap_module.mmap(fd, nbytes + delta, access=access, offset=offset - delta)
    return np.frombuffer(pages.owner, np.uint8).ctypes.data + delta, pages


def _map_otherwise(error: OSError, fd: int, offset: int, length: int, mode: Mode) -> int:
    """Map where the system refused, or explain why it did."""
    if mode.name == "r" and error.errno in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        # RLIMIT_DATA or strict overcommit count private writable pages even with
        # MAP_NORESERVE. A map without write permission is never counted; a write that
        # slips past the guards then ends the process, as with every other library.
        try:
            return mmap(length, _mmap_module.PROT_READ, _mmap_module.MAP_SHARED, fd, offset)
        except OSError as again:
            error = again
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
