"""Opening a file that exists, and dropping what was opened."""

import os
from collections.abc import Callable
from typing import Any

import mmap_ninja
import numpy as np
import torch
from safetensors import safe_open

import mmtensor

from .common import MMT, TDT, Comparison, values
from .peers import write_ninja, write_safetensors
from .system import map_and_unmap

_SHAPE = (1000, 100)
_NBYTES = 400_000


class _Open(Comparison):
    limit_is = "open, fstat, mmap, close, munmap"

    def path(self) -> str:
        """Make the file."""
        path = self.new_path()
        values(*_SHAPE).numpy().tofile(path)
        return path

    def ninja(self, mode: str) -> Callable[[], Any]:
        """Return `open_existing` of mmap_ninja, which reads dtype and shape from files as well."""
        path = write_ninja(self.new_path(), values(*_SHAPE))
        return lambda: mmap_ninja.np_open_existing(path, mode)


class Open(_Open):
    """With changes that reach the file."""

    title = "open a file, `r+`"

    def mmtensor(self) -> Callable[[], Any]:
        """`from_filename` with a mode."""
        path = self.path()
        return lambda: MMT.from_filename(path, torch.float32, _SHAPE, mode="r+")

    def tensordict(self) -> Callable[[], Any]:
        """`from_filename`, which opens writable files so."""
        path = self.path()
        return lambda: TDT.from_filename(path, torch.float32, _SHAPE)

    def numpy(self) -> Callable[[], Any]:
        """`numpy.memmap`."""
        path = self.path()
        return lambda: np.memmap(path, np.float32, "r+", shape=_SHAPE)

    def mmap_ninja(self) -> Callable[[], Any]:
        """`open_existing`."""
        return self.ninja("r+")

    def torch(self) -> Callable[[], Any]:
        """`torch.from_file`."""
        path = self.path()
        return lambda: torch.from_file(
            path, shared=True, size=_NBYTES // 4, dtype=torch.float32
        ).view(_SHAPE)

    def limit(self) -> Callable[[], Any]:
        """The system calls."""
        path = self.path()

        def calls() -> None:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.fstat(fd)
            map_and_unmap(fd, _NBYTES)

        return calls


class OpenReadOnly(_Open):
    """With the guard against writing, which torch has not."""

    title = "open a file, `r`"
    numpy_mode = mode = "r"

    def mmtensor(self) -> Callable[[], Any]:
        """`from_filename` with a mode."""
        path, mode = self.path(), self.mode
        return lambda: MMT.from_filename(path, torch.float32, _SHAPE, mode=mode)

    def numpy(self) -> Callable[[], Any]:
        """`numpy.memmap`."""
        path, mode = self.path(), self.mode
        return lambda: np.memmap(path, np.float32, mode, shape=_SHAPE)

    def mmap_ninja(self) -> Callable[[], Any]:
        """`open_existing`."""
        return self.ninja(self.mode)

    def safetensors(self) -> Callable[[], Any]:
        """`safe_open`, which reads dtype and shape from the file as well."""
        path = write_safetensors(self.new_path(), values(*_SHAPE))
        return lambda: safe_open(path, "pt")

    limit = Open.limit


class OpenCopyOnWrite(OpenReadOnly):
    """With changes that stay private."""

    title = "open a file, `c`"
    mode = "c"
    safetensors = None  # type: ignore[assignment]  # it has no modes

    def torch(self) -> Callable[[], Any]:
        """`torch.from_file` with ``shared=False``."""
        path = self.path()
        return lambda: torch.from_file(
            path, shared=False, size=_NBYTES // 4, dtype=torch.float32
        ).view(_SHAPE)


class OpenArray(_Open):
    """As a NumPy array."""

    title = "open a file as an array, `r+`"

    def mmtensor(self) -> Callable[[], Any]:
        """`open_array`."""
        path = self.path()
        return lambda: mmtensor.open_array(path, np.float32, _SHAPE, mode="r+")

    numpy = Open.numpy
    mmap_ninja = Open.mmap_ninja
    limit = Open.limit
