"""Indexing: views, rows gathered and rows written."""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import mmap_ninja
import numpy as np
import torch

from .common import MMT, TDT, Comparison, Expression, values
from .peers import open_slice, write_ninja, write_safetensors

_ROW, _BATCH = 12_288, 256


class _View(Expression):
    """A part of a matrix: a view, a copy from safetensors."""

    shape = (100, 100)

    def mmap_ninja(self) -> Callable[[], Any]:
        """On a map of NumPy, as `open_existing` returns it."""
        path = write_ninja(self.new_path(), values(*self.shape))
        return self.bind(mmap_ninja.np_open_existing(path, "r+"), self.numpy_code)

    def safetensors(self) -> Callable[[], Any]:
        """On what `get_slice` returns."""
        return self.bind(open_slice(write_safetensors(self.new_path(), values(*self.shape))))


class Row(_View):
    """One row: a view."""

    title = "`x[3]`"
    code = numpy_code = "x[3]"


class Slice(_View):
    """Some rows: a view."""

    title = "`x[2:5]`"
    code = numpy_code = "x[2:5]"


class Column(_View):
    """One column: a view."""

    title = "`x[:, 1]`"
    code = numpy_code = "x[:, 1]"


class Unbind(Expression):
    """All rows, as views."""

    title = "`x.unbind(0)`, 1,000 rows"
    code = "x.unbind(0)"
    numpy_code = "list(x)"
    shape = (1000, 8)


class _Rows(Comparison):
    """Rows of an image: 3 × 64 × 64 bytes."""

    limit_is = "memcpy of as many bytes"
    count: ClassVar[int] = 1024  # 12 MB, which the processor can keep in its cache

    def rows(self) -> torch.Tensor:
        """Return the values, which are only read."""
        return values(self.count, _ROW, dtype=torch.uint8)

    def ids(self) -> Iterator[torch.Tensor]:
        """Return batches of row numbers without end; always the same ones."""
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randperm(self.count, generator=generator)
        return itertools.cycle(numbers.split(_BATCH))

    def use(self, x: Any, *, arrays: bool = False) -> Callable[[], Any]:
        raise NotImplementedError

    def mmtensor(self) -> Callable[[], Any]:
        """On a tensor of mmtensor."""
        return self.use(MMT.from_tensor(self.rows(), filename=self.new_path()))

    def tensordict(self) -> Callable[[], Any]:
        """On a tensor of tensordict."""
        return self.use(TDT.from_tensor(self.rows(), filename=self.new_path()))

    def numpy(self) -> Callable[[], Any]:
        """On a map of NumPy."""
        path = self.new_path()
        self.rows().numpy().tofile(path)
        return self.use(np.memmap(path, np.uint8, "r+", shape=(self.count, _ROW)), arrays=True)

    def mmap_ninja(self) -> Callable[[], Any]:
        """On a map of NumPy, as `open_existing` returns it."""
        path = write_ninja(self.new_path(), self.rows())
        return self.use(mmap_ninja.np_open_existing(path, "r+"), arrays=True)

    def torch(self) -> Callable[[], Any]:
        """On a regular tensor."""
        return self.use(self.rows().clone())


class Gather(_Rows):
    """Random rows, copied."""

    title = "`x[ids]`, 256 rows of 12 KB uint8"

    def use(self, x: Any, *, arrays: bool = False) -> Callable[[], Any]:
        """Return what is timed, for one kind of tensor."""
        ids = self.ids()
        if arrays:
            ids = itertools.cycle([batch.numpy() for batch in itertools.islice(ids, 64)])
        return lambda: x[next(ids)]

    def limit(self) -> Callable[[], Any]:
        """Copy as many neighbouring rows, to new memory from the same allocator."""
        x = self.rows().clone()
        starts = itertools.cycle(range(x.data_ptr(), x.data_ptr() + x.nbytes, _BATCH * _ROW))
        memmove, empty = ctypes.memmove, torch.empty

        def copy() -> torch.Tensor:
            result = empty(_BATCH, _ROW, dtype=torch.uint8)
            memmove(result.data_ptr(), next(starts), _BATCH * _ROW)
            return result

        self.keep = x
        return copy


class GatherUncached(Gather):
    """Random rows of a file that is larger than the caches: memory decides."""

    title = "`x[ids]`, 256 rows of 12 KB uint8 out of 200 MB"
    count = 1 << 14


class Scatter(_Rows):
    """Random rows, overwritten."""

    title = "`x[ids] = v`, 256 rows of 12 KB uint8"

    def use(self, x: Any, *, arrays: bool = False) -> Callable[[], Any]:
        """Return what is timed, for one kind of tensor."""
        ids = self.ids()
        value: Any = values(_BATCH, _ROW, dtype=torch.uint8)
        if arrays:
            ids = itertools.cycle([batch.numpy() for batch in itertools.islice(ids, 64)])
            value = value.numpy()

        def write() -> None:
            x[next(ids)] = value

        return write

    def limit(self) -> Callable[[], Any]:
        """Copy as many neighbouring rows into the map of a file."""
        x = MMT.from_tensor(self.rows(), filename=self.new_path())
        starts = itertools.cycle(range(x.data_ptr(), x.data_ptr() + x.nbytes, _BATCH * _ROW))
        value = values(_BATCH, _ROW, dtype=torch.uint8)
        memmove = ctypes.memmove

        def copy() -> None:
            memmove(next(starts), value.data_ptr(), _BATCH * _ROW)

        self.keep = x
        return copy
