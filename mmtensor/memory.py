"""Bytes at an address, and what the system gets back for them: compiled where that can be.

`mmtensor._calls` makes several system calls in a row, without going back to Python in between.
Its functions do all of their work or none of it, and return None then: what is unusual is for
the code that takes one step at a time. Here is what stands in for it where it was not compiled,
or where the environment says ``MMTENSOR_COMPILED=0``.
"""

import os
import weakref
from typing import TYPE_CHECKING, Any

from mmtensor.syscalls import HAVE_MMAP, file_handle, munmap

__all__ = [
    "COMPILED",
    "Memory",
    "create_map",
    "find_live",
    "handle_at",
    "live_mappings",
    "open_map",
    "size_at",
]

# The live mappings of files in `r` and `r+`, so that openings of one file share one map.
# Weak references in a plain dict: what gives the pages back takes the entries out as well,
# at a fifth of what a WeakValueDictionary costs.
live_mappings: dict[tuple[Any, ...], weakref.ref[Any]] = {}


class _Pages:
    """What the system gave to a mapping, given back when the mapping is gone.

    Apart from the mapping, which so has no finalizer of its own: a weak reference still
    leads to an object whose finalizer runs, and a thread that opened the file just then
    would get pages that are about to go.
    """

    # Usually as here, which costs nothing.
    descriptor = -1
    keys: list[Any] | None = None
    entry: weakref.ref[Any] | None = None

    def __init__(self, base: int, length: int) -> None:
        self.base = base
        self.length = length

    # The default arguments keep what is needed reachable while the interpreter ends.
    def __del__(
        self,
        munmap: Any = munmap if HAVE_MMAP else None,
        live: Any = live_mappings,
        close: Any = os.close,
    ) -> None:
        try:
            for key in self.keys or ():
                if live.get(key) is self.entry:
                    live.pop(key, None)
            if self.descriptor >= 0:
                close(self.descriptor)
            if self.length:
                munmap(self.base, self.length)
        except AttributeError:
            pass  # Ctrl-C came while it was made


class _Memory:
    """Bytes at an address, and what to unmap when they are gone.

    The base of `Mapping` where `mmtensor._calls` has not been compiled.

    Parameters
    ----------
    address, nbytes
        Where the bytes are, and how many.
    base, length
        What to unmap.

    Attributes
    ----------
    hold
        What gives all back to the system: ``descriptor`` is closed (-1: nothing), and
        ``entry`` is taken out of `live_mappings`, where it is found under ``keys``.
    readonly
        Means something where it is compiled: whether no array may be made that can be written
        to, nor one be made so that it can.
    """

    __slots__ = ("__array_interface__", "address", "hold", "nbytes", "readonly")

    def __init__(self, address: int, nbytes: int, base: int, length: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.hold = _Pages(base, length)
        # The pointer counts as writable even in `r` (see `Mapping.array`); the arrays that
        # users get take their flag from the mode.
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _careful(*_: Any) -> None:
    """Leave the work to the code that takes one step at a time."""


# The last reference that led to a mapping, and what it is found under. Views of one file in
# one message have the very same tuple: for them the path is looked at once.
_last: tuple[Any, Any] = (None, None)


def _find_live(reference: tuple[Any, ...]) -> Any:
    """Return the live mapping that a reference leads to, or None.

    None as well if the path names another file by now, or one of another size.
    """
    global _last
    last, entry = _last
    found = entry() if last is reference else None
    if found is not None:
        return found
    entry = live_mappings.get(reference)
    found = None if entry is None else entry()
    if found is None:
        return None
    try:
        status = os.stat(reference[0])
    except OSError:
        return None
    if not os.path.samestat(status, found) or status.st_size != reference[4]:
        return None
    # A file on overlayfs that was copied up is another one under the same number: who has not
    # mapped it for writing sees that its status has changed.
    if reference[1] != "r+" and status.st_ctime_ns != found.st_ctime_ns:
        return None
    _last = (reference, entry)
    return found


def _size_at(path: str, memory: Any) -> int:
    """Return the size of the file at a path; -1 if it is not the one that was mapped."""
    try:
        status = os.stat(path)
    except OSError:
        return -1
    return status.st_size if os.path.samestat(status, memory) else -1


if TYPE_CHECKING:
    from mmtensor._calls import Memory, create_map, find_live, handle_at, open_map, size_at

    COMPILED = True
else:
    try:
        if os.environ.get("MMTENSOR_COMPILED") == "0":
            raise ImportError  # noqa: TRY301  # as if it were not there
        from mmtensor._calls import (
            Memory,
            create_map,
            find_live,
            forget_in,
            handle_at,
            open_map,
            size_at,
        )

        forget_in(live_mappings)
        COMPILED = True
    except ImportError:
        Memory, open_map, create_map, COMPILED = _Memory, _careful, _careful, False
        size_at, find_live, handle_at = _size_at, _find_live, file_handle
