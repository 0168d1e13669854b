"""The one table of modes: what ``r``, ``r+`` and ``c`` mean to every layer."""

import mmap
import os
import sys
from typing import Literal, NamedTuple

from mmtensor.errors import ModeError

__all__ = ["MODES", "Mode", "ModeName", "resolve_mode"]

ModeName = Literal["r", "r+", "c"]

# mmap(2) of Linux; the module of Python 3.11 does not export it.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class Mode(NamedTuple):
    """What one mode means to open(2), mmap(2), NumPy and torch.

    Parameters
    ----------
    name
        The mode as users write it, and as `numpy.memmap` calls it.
    open_flags
        Flags for `os.open`. None of them creates or truncates. ``O_NONBLOCK`` keeps
        the call from waiting for ever on a FIFO; regular files ignore it.
    protection, map_flags
        Arguments for mmap(2). ``r`` maps private pages that can be written: a write
        that slips past every guard then changes a private copy, neither the file nor
        the life of the process. ``MAP_NORESERVE`` lets private maps exceed memory.
    writeable
        The ``writeable`` flag of NumPy arrays.
    shared
        Whether writes reach the file and the other processes that map it.
    """

    name: ModeName
    open_flags: int
    protection: int
    map_flags: int
    writeable: bool
    shared: bool


_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_PROT_READ_WRITE = getattr(mmap, "PROT_READ", 1) | getattr(mmap, "PROT_WRITE", 2)
_MAP_SHARED = getattr(mmap, "MAP_SHARED", 1)
_MAP_PRIVATE = getattr(mmap, "MAP_PRIVATE", 2) | _MAP_NORESERVE

MODES: dict[str, Mode] = {
    "r": Mode("r", os.O_RDONLY | _COMMON, _PROT_READ_WRITE, _MAP_PRIVATE, False, False),
    "r+": Mode("r+", os.O_RDWR | _COMMON, _PROT_READ_WRITE, _MAP_SHARED, True, True),
    "c": Mode("c", os.O_RDONLY | _COMMON, _PROT_READ_WRITE, _MAP_PRIVATE, True, False),
}


def resolve_mode(mode: object) -> Mode:
    """Look up a mode by its name.

    Raises
    ------
    ModeError
        If `mode` is not a name in the table.

    Examples
    --------
    >>> resolve_mode("r").writeable
    False
    """
    found = MODES.get(mode) if isinstance(mode, str) else None
    if found is None:
        raise ModeError(
            f'mode must be "r" (read-only), "r+" (read and write) or "c" (copy-on-write), '
            f"got {mode!r}."
        )
    return found
