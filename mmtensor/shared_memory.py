"""Mappings of blocks of shared memory, which have no name and travel as descriptors."""

import os
from collections.abc import Iterable
from typing import Any

from mmtensor.blocks import unnamed_block
from mmtensor.modes import MODES
from mmtensor.pages import Mapping, live_mappings, share
from mmtensor.rawfile import Chunk, reserve, write_chunks

__all__ = ["SharedMapping"]


class SharedMapping(Mapping):
    """Shared memory without a name: one descriptor, which travels, keeps it reachable.

    Attributes
    ----------
    fd : int
        The descriptor, closed with the mapping.
    """

    __slots__ = ("_key", "fd")

    path = None

    def __init__(
        self, fd: int, nbytes: int, offset: int = 0, status: os.stat_result | None = None
    ) -> None:
        super().__init__(MODES["r+"])
        self.fd = self.hold.descriptor = fd  # from here on it is closed with the mapping
        self.map_descriptor(fd, offset, nbytes)
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
        return share(mapping, mapping._key)

    @classmethod
    def adopt(cls, fd: int, nbytes: int, offset: int = 0) -> "SharedMapping":
        """Map a block that came as a descriptor, or find it mapped; the descriptor is ours."""
        status = os.fstat(fd)
        entry = live_mappings.get((status.st_dev, status.st_ino, offset, nbytes))
        found: Any = entry() if entry is not None else None
        if found is not None:
            os.close(fd)
            return found  # type: ignore[no-any-return]  # the key is that of a SharedMapping
        return cls._new(fd, nbytes, offset, status)

    @property
    def offset(self) -> int:  # type: ignore[override]  # nobody sets it
        """Position of the first byte in the block."""
        return self._key[2]
