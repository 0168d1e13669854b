"""Writing a tensor to a new file, and mapping the file."""

import os
from collections.abc import Callable
from typing import Any, ClassVar

import mmap_ninja
import numpy as np
import torch

from .common import MMT, TDT, FreshFile, values
from .peers import open_whole, write_safetensors
from .system import CREATE


class _FromTensor(FreshFile):
    count: ClassVar[int]
    limit_is = "open, fallocate, pwrite, close"

    def mmtensor(self) -> Callable[[str], Any]:
        """`from_tensor`."""
        source = values(self.count)
        return lambda path: MMT.from_tensor(source, filename=path)

    def tensordict(self) -> Callable[[str], Any]:
        """`from_tensor`."""
        source = values(self.count)
        return lambda path: TDT.from_tensor(source, filename=path)

    def numpy(self) -> Callable[[str], Any]:
        """`tofile`, then `numpy.memmap`."""
        source = values(self.count).numpy()

        def write(path: str) -> np.ndarray[Any, Any]:
            source.tofile(path)
            return np.memmap(path, np.float32, "r+")

        return write

    def mmap_ninja(self) -> Callable[[str], Any]:
        """`from_ndarray`, which makes a directory of four files, and maps one."""
        source = values(self.count).numpy()
        return lambda path: mmap_ninja.np_from_ndarray(path, source)

    def safetensors(self) -> Callable[[str], Any]:
        """`save_file`, then `safe_open` and `get_tensor`."""
        source = values(self.count)
        return lambda path: open_whole(write_safetensors(path, source))

    def torch(self) -> Callable[[str], Any]:
        """`torch.from_file`, which creates the file, then `copy_`."""
        source = values(self.count)
        count = self.count
        return lambda path: torch.from_file(path, shared=True, size=count).copy_(source)

    def limit(self) -> Callable[[str], Any]:
        """The system calls."""
        data = memoryview(values(self.count).numpy()).cast("B")

        def calls(path: str) -> None:
            fd = os.open(path, CREATE, 0o666)
            os.posix_fallocate(fd, 0, len(data))
            os.pwrite(fd, data, 0)
            os.close(fd)

        return calls


class FromTensor1KB(_FromTensor):
    """Where the system calls are all that counts."""

    title = "`from_tensor` to a file, 1 KB"
    count = 256
    limit_is = "open, pwrite, close"

    def limit(self) -> Callable[[str], Any]:
        """The system calls, without fallocate, which small files do not need."""
        data = memoryview(values(self.count).numpy()).cast("B")

        def calls(path: str) -> None:
            fd = os.open(path, CREATE, 0o666)
            os.pwrite(fd, data, 0)
            os.close(fd)

        return calls


class FromTensor1MB(_FromTensor):
    """In the cache of the processor."""

    title = "`from_tensor` to a file, 1 MB"
    count = 1 << 18
    memory = 1 << 21


class FromTensor256MB(_FromTensor):
    """Out of any cache."""

    title = "`from_tensor` to a file, 256 MB"
    count = 1 << 26
    memory = 1 << 29
