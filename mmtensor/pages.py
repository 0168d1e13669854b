"""The only code that keeps memory mapped, and gives it back to the system."""

import errno
import mmap as _mmap_module
import weakref
from typing import Any, TypeVar

import numpy as np

from mmtensor.memory import COMPILED, Memory
from mmtensor.modes import Mode
from mmtensor.syscalls import HAVE_MMAP, LINUX, PAGE, madvise

__all__ = ["DONTNEED", "PAGEOUT", "Mapping", "live_mappings", "share"]

# Of madvise(2), on Linux: where bytes are lost by the first, the second keeps them.
DONTNEED, PAGEOUT = 4, 21
# What `advise` may be told, as madvise(2) numbers of Linux.
_ADVICE = {"normal": 0, "random": 1, "sequential": 2, "willneed": 3, "dontneed": DONTNEED}

# An address for maps of no bytes, which mmap(2) refuses.
_NOWHERE = np.zeros(1, np.uint8)
_UINT8 = np.dtype(np.uint8)

_M = TypeVar("_M", bound="Mapping")


# The live mappings of files in `r` and `r+`, so that openings of one file share one map.
# Weak references in a plain dict: what gives the pages back takes the entries out as well,
# at a fifth of what a WeakValueDictionary costs.
live_mappings: dict[tuple[Any, ...], weakref.ref[Any]] = {}


class Mapping(Memory):
    """Bytes at an address, and what keeps them there.

    A mapping is described by its mode and its length; views on it add byte offset, dtype,
    shape and strides. NumPy reads it as bytes, through the buffer protocol if that is
    compiled, else through ``__array_interface__``.

    Parameters
    ----------
    mode
        The mode that it is opened in. The bytes come next, by `place` or `map_descriptor`.

    Attributes
    ----------
    address, nbytes : int
        Where the bytes are, and how many.
    path : str or None
        The absolute path of the file; None for memory.
    offset : int
        Position of the first mapped byte in the file.
    storage : weakref.ref or None
        Set by the torch side: the one storage that stands on this mapping.
    """

    __slots__ = ("__weakref__", "mode", "storage")

    path: str | None
    offset: int

    # The map, where the module `mmap` made it.
    owner: Any = None

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.readonly = not mode.writeable
        self.storage: Any = None

    def map_descriptor(self, fd: int, offset: int, nbytes: int) -> None:
        """Map bytes of an open file."""
        mode = self.mode
        if nbytes == 0:
            self.place(_NOWHERE.ctypes.data, 0)
        elif HAVE_MMAP:
            try:
                self.map_bytes(fd, offset, nbytes, mode.protection, mode.map_flags)
            except OSError as error:
                self._map_otherwise(error, fd, offset, nbytes)
        else:
            delta = offset % _mmap_module.ALLOCATIONGRANULARITY
            access = _mmap_module.ACCESS_WRITE if mode.shared else _mmap_module.ACCESS_COPY
            self.owner = _mmap_module.mmap(
                fd, nbytes + delta, access=access, offset=offset - delta
            )
            self.place(np.frombuffer(self.owner, np.uint8).ctypes.data + delta, nbytes)

    def _map_otherwise(self, error: OSError, fd: int, offset: int, nbytes: int) -> None:
        """Map where the system refused, or explain why it did."""
        mode = self.mode
        if mode.name == "r" and error.errno in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
            # RLIMIT_DATA or strict overcommit count private writable pages even with
            # MAP_NORESERVE. A map without write permission is never counted; a write that
            # slips past the guards then ends the process, as with every other library.
            try:
                return self.map_bytes(
                    fd, offset, nbytes, _mmap_module.PROT_READ, _mmap_module.MAP_SHARED
                )
            except OSError as again:
                error = again
        if error.errno == errno.ENOMEM:
            what = f"{nbytes} bytes"
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

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return the first bytes as a C-contiguous array that may be written to, for torch.

        In any mode: what users get of it has flags and guards of its own.
        """
        buffer: Any = self if COMPILED and self.mode.writeable else self.writeable
        return np.ndarray(shape, dtype, buffer)

    def bytes_array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the mapped bytes as a 1-D array that keeps the mapping alive."""
        if COMPILED:
            buffer: Any = self
            return np.ndarray((self.nbytes,), _UINT8, buffer)
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


def share(mapping: _M, key: tuple[Any, ...]) -> _M:
    """Let later openings find a mapping; return the one of a thread that was faster."""
    hold = mapping.hold
    entry = hold.entry
    if entry is None:
        entry = weakref.ref(mapping)
    while True:
        other = live_mappings.setdefault(key, entry)  # in one step, whatever other threads do
        if other is entry:
            hold.found_under(live_mappings, key, entry)
            return mapping
        found: _M | None = other()
        if found is not None:
            return found
        if live_mappings.get(key) is other:  # of a mapping that is going
            live_mappings.pop(key, None)
