"""Bytes at an address, and what the system gets back for them: compiled where that can be.

`mmtensor._calls` makes several system calls in a row, without going back to Python in between.
`open_map`, `create_map` and `find_live` do all of their work or none of it, and return None then:
what is unusual is for the code that takes one step at a time. Here is what stands in for all of it
where it was not compiled, or where the environment says ``MMTENSOR_COMPILED=0``.
"""

import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from mmtensor.syscalls import HAVE_MMAP, PAGE, file_handle, mmap, munmap, on_overlay

__all__ = [
    "COMPILED",
    "Memory",
    "create_map",
    "find_live",
    "handle_at",
    "may_be_compiled",
    "open_map",
    "size_at",
]

# What of `mmtensor._calls` is known here: an older one may lie about.
_INTERFACE = 3


class _Pages:
    """What the system gave to a mapping, given back when the mapping is gone.

    Apart from the mapping, which so has no finalizer of its own: a weak reference still
    leads to an object whose finalizer runs, and a thread that opened the file just then
    would get pages that are about to go.
    """

    # Usually as here, which costs nothing.
    base = length = 0
    descriptor = -1
    table: dict[Any, Any] | None = None
    keys: list[Any] | None = None
    entry: weakref.ref[Any] | None = None

    def found_under(self, table: dict[Any, Any], key: Any, entry: weakref.ref[Any]) -> None:
        """Note an entry of a table that goes when this goes."""
        if self.keys is None:
            self.table, self.entry, self.keys = table, entry, []
        self.keys.append(key)

    # The default arguments keep what is needed reachable while the interpreter ends.
    def __del__(self, munmap: Any = munmap if HAVE_MMAP else None, close: Any = os.close) -> None:
        if self.table is not None:
            for key in self.keys or ():
                if self.table.get(key) is self.entry:
                    self.table.pop(key, None)
        if self.descriptor >= 0:
            close(self.descriptor)
        if self.length:
            munmap(self.base, self.length)


class _Memory:
    """Bytes at an address, and what the system gets back for them.

    The base of `pages.Mapping` where `mmtensor._calls` has not been compiled.

    Attributes
    ----------
    address, nbytes
        Where the bytes are, and how many.
    hold
        What gives all back to the system: ``descriptor`` is closed (-1: nothing), and
        ``entry`` is taken out of the table where it is found under ``keys``.
    readonly
        Means something where it is compiled: whether a buffer that can be written to is refused.
    writeable
        The bytes as something that NumPy makes an array of that may be written to.
    """

    __slots__ = ("__array_interface__", "address", "hold", "nbytes", "readonly")

    hold: Any

    def __new__(cls, *_: Any, **__: Any) -> Any:
        self = super().__new__(cls)
        self.hold = _Pages()
        return self

    def place(self, address: int, nbytes: int) -> None:
        """Stand on memory that somebody else keeps."""
        self.address = address
        self.nbytes = nbytes
        # The pointer counts as writable in any mode, for torch asks for such a one; the
        # arrays that users get take their flag from the mode.
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def map_bytes(
        self, fd: int, offset: int, nbytes: int, protection: int, map_flags: int
    ) -> None:
        """Map bytes of a descriptor, or raise the OSError of mmap(2)."""
        delta = offset % PAGE
        length = nbytes + delta
        hold = self.hold
        hold.base = mmap(length, protection, map_flags, fd, offset - delta)
        hold.length = length
        self.place(hold.base + delta, nbytes)

    @property
    def writeable(self) -> Any:
        return np.asarray(self)


def _careful(*_: Any) -> None:
    """Leave the work to the code that takes one step at a time."""


# The last reference that led to a mapping, and what it is found under. Views of one file in
# one message have the very same tuple: for them the path is looked at once.
_last: tuple[Any, Any] = (None, None)


def _find_live(live_mappings: dict[Any, Any], reference: tuple[Any, ...]) -> Any:
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
    path, mode, _, _, size, _ = reference
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if not os.path.samestat(status, found) or status.st_size != size:
        return None
    # On overlayfs, a file that was copied up is another one under the same number: who has
    # not mapped it for writing sees that its status has changed.
    if mode != "r+" and status.st_ctime_ns != found.st_ctime_ns and on_overlay(path):
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


def may_be_compiled() -> bool:
    """Whether what is compiled may be used, if it is there.

    Without the interpreter's lock nothing would keep its threads apart.
    """
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return locked and os.environ.get("MMTENSOR_COMPILED") != "0"


if TYPE_CHECKING:
    from mmtensor._calls import (
        Memory,
        create_map,
        find_live,
        handle_at,
        open_map,
        size_at,
    )

    COMPILED = True
else:
    try:
        if not may_be_compiled():
            raise ImportError  # noqa: TRY301  # as if it were not there
        from mmtensor._calls import (
            INTERFACE,
            Memory,
            create_map,
            find_live,
            handle_at,
            open_map,
            size_at,
        )

        if INTERFACE != _INTERFACE:
            raise ImportError  # noqa: TRY301  # it was compiled from other sources
        COMPILED = True
    except ImportError:
        Memory, open_map, create_map, COMPILED = _Memory, _careful, _careful, False
        size_at, find_live, handle_at = _size_at, _find_live, file_handle
