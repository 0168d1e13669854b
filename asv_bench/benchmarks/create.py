"""Making new tensors: zeros on a file, and small ones, where overhead shows."""

import os
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any, ClassVar

import numpy as np
import torch

from .common import MMT, TDT, Comparison, FreshFile, values
from .system import CREATE, map_and_unmap, rename_noreplace

_SMALL = (3, 4, 5)
_SMALL_NBYTES = 240


class _Zeros(FreshFile):
    count: ClassVar[int]
    limit_is = "open, fallocate, close"

    def mmtensor(self) -> Callable[[str], Any]:
        """`zeros`, with its blocks reserved."""
        count = self.count
        return lambda path: MMT.zeros(count, filename=path)

    def tensordict(self) -> Callable[[str], Any]:
        """`zeros`."""
        count = self.count
        return lambda path: TDT.zeros(count, filename=path)

    def numpy(self) -> Callable[[str], Any]:
        """`numpy.memmap`, sparse: a full disk is a SIGBUS later."""
        count = self.count
        return lambda path: np.memmap(path, np.float32, "w+", shape=(count,))

    def torch(self) -> Callable[[str], Any]:
        """`torch.from_file`, sparse: a full disk is a SIGBUS later."""
        count = self.count
        return lambda path: torch.from_file(path, shared=True, size=count)

    def limit(self) -> Callable[[str], Any]:
        """The system calls."""
        nbytes = 4 * self.count

        def calls(path: str) -> None:
            fd = os.open(path, CREATE, 0o666)
            os.posix_fallocate(fd, 0, nbytes)
            os.close(fd)

        return calls


class Zeros1MB(_Zeros):
    """A small file."""

    title = "`zeros` on a file, 1 MB"
    count = 1 << 18


class Zeros256MB(_Zeros):
    """A large file."""

    title = "`zeros` on a file, 256 MB"
    count = 1 << 26
    memory = 1 << 28


class EmptyFile(FreshFile):
    """A tiny file."""

    title = "`empty` of 60 floats on a file"
    limit_is = "open, pwrite, rename, mmap, close, munmap"

    def mmtensor(self) -> Callable[[str], Any]:
        """`empty`, which is zeros: no stale bytes."""
        return lambda path: MMT.empty(_SMALL, filename=path)

    def tensordict(self) -> Callable[[str], Any]:
        """`empty`."""
        return lambda path: TDT.empty(_SMALL, filename=path)

    def numpy(self) -> Callable[[str], Any]:
        """`numpy.memmap`."""
        return lambda path: np.memmap(path, np.float32, "w+", shape=_SMALL)

    def torch(self) -> Callable[[str], Any]:
        """`torch.from_file`."""
        return lambda path: torch.from_file(path, shared=True, size=60).view(_SMALL)

    def limit(self) -> Callable[[str], Any]:
        """The system calls."""
        zeros = bytes(_SMALL_NBYTES)

        def calls(path: str) -> None:
            temporary = path + ".tmp"
            fd = os.open(temporary, CREATE, 0o666)
            os.pwrite(fd, zeros, 0)
            rename_noreplace(temporary.encode(), path.encode())
            map_and_unmap(fd, _SMALL_NBYTES)

        return calls


class Creation(Comparison):
    """Tiny shared memory."""

    title = "`empty` of 60 floats, anonymous"
    source: ClassVar[np.ndarray | None] = None
    limit_is = "open without a name, pwrite, mmap, close, munmap"

    def mmtensor(self) -> Callable[[], Any]:
        """`empty`."""
        return lambda: MMT.empty(_SMALL)

    def tensordict(self) -> Callable[[], Any]:
        """`empty`."""
        return lambda: TDT.empty(_SMALL)

    def numpy(self) -> Callable[[], Any]:
        """An array in `multiprocessing.shared_memory`, which must be removed by hand."""
        source = self.source

        def create() -> None:
            block = SharedMemory(create=True, size=_SMALL_NBYTES)
            array = np.ndarray(_SMALL, np.float32, block.buf)
            if source is not None:
                array[:] = source
            del array
            block.close()
            block.unlink()

        return create

    def torch(self) -> Callable[[], Any]:
        """`share_memory_`."""
        return lambda: torch.empty(_SMALL).share_memory_()

    def limit(self) -> Callable[[], Any]:
        """The system calls."""
        data = memoryview(values(*_SMALL).numpy()).cast("B")

        def calls() -> None:
            fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)  # noqa: S108
            os.pwrite(fd, data, 0)
            map_and_unmap(fd, _SMALL_NBYTES)

        return calls


class CreationFromTensor(Creation):
    """Tiny shared memory, filled."""

    title = "`from_tensor` of 60 floats, anonymous"
    source = values(*_SMALL).numpy()

    def mmtensor(self) -> Callable[[], Any]:
        """`from_tensor`."""
        source = values(*_SMALL)
        return lambda: MMT.from_tensor(source)

    def tensordict(self) -> Callable[[], Any]:
        """`from_tensor`."""
        source = values(*_SMALL)
        return lambda: TDT.from_tensor(source)

    def torch(self) -> Callable[[], Any]:
        """`share_memory_` of a copy."""
        source = values(*_SMALL)
        return lambda: source.clone().share_memory_()
