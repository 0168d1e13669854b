"""Random rows of a file that is not in the page cache.

The file is larger than what any read-ahead would bring in by chance. Before each call its
pages are dropped and it is opened again: pages that a map holds would stay.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensordict
import torch

import mmtensor

from .common import MMT, TDT, FreshFile, new_directory
from .system import drop_pages

_COUNT, _ROW, _BATCH = 100_000, 12_288, 256


def _file() -> str:
    """Return the path of a file of 1.2 GB on the disk, the same for all of these benchmarks."""
    path = os.path.join(new_directory(_Cold), "rows.bin")
    if os.path.exists(path):
        return path
    block = np.random.default_rng(0).bytes(_COUNT * _ROW // 100)
    with open(path, "wb") as file:
        file.writelines(block for _ in range(100))
        file.flush()
        os.fsync(file.fileno())  # pages that are not on the disk cannot be dropped
    return path


class _Cold(FreshFile):
    """256 random rows of 12 KB, others each time."""

    limit_is = "`posix_fadvise(WILLNEED)` for every row, then `pread` of each"

    def setup(self, library: str) -> None:
        """Start with the same rows for all libraries."""
        self.generator = torch.Generator().manual_seed(0)
        super().setup(library)

    def before(self, library: str) -> Any:
        """Drop the pages of the file and open it."""
        path = _file()
        drop_pages(path)
        shape = (_COUNT, _ROW)
        x: Any
        if library == "mmtensor":
            x = MMT.from_filename(path, torch.uint8, shape, mode="r")
        elif library == "tensordict":
            x = TDT.from_filename(path, torch.uint8, shape)
        elif library == "numpy":
            x = np.memmap(path, np.uint8, "r", shape=shape)
        elif library == "torch":
            x = torch.from_file(path, shared=True, size=_COUNT * _ROW, dtype=torch.uint8)
            x = x.view(shape)
        else:
            x = os.open(path, os.O_RDONLY)
        ids = torch.randint(_COUNT, (_BATCH,), generator=self.generator)
        return x, ids.numpy() if library == "numpy" else ids

    def after(self, argument: Any) -> None:
        """Close the file."""
        if isinstance(argument[0], int):
            os.close(argument[0])

    def limit(self) -> Callable[[Any], Any]:
        """Ask for all rows first, as who has no map would."""

        def read(argument: Any) -> Any:
            fd, ids = argument
            starts = [_ROW * number for number in ids.tolist()]
            for start in starts:
                os.posix_fadvise(fd, start, _ROW, os.POSIX_FADV_WILLNEED)
            return [os.pread(fd, _ROW, start) for start in starts]

        return read


class Gather(_Cold):
    """All at once: mmtensor asks for all rows first, others touch one after the other."""

    title = "`x[ids]`, 256 rows of 12 KB, cold"

    def use(self) -> Callable[[Any], Any]:
        """Return what is timed."""
        return lambda argument: argument[0][argument[1]]

    mmtensor = tensordict = numpy = torch = use


class GatherContainer(_Cold):
    """The same through a container."""

    title = "`td[ids]`, 256 rows of 12 KB, cold"

    def before(self, library: str) -> Any:
        """Put the file into a container."""
        x, ids = super().before(library)
        kinds = {"mmtensor": mmtensor.TensorDict, "tensordict": tensordict.TensorDict}
        return (kinds[library]({"x": x}, [_COUNT]) if library in kinds else x), ids

    def use(self) -> Callable[[Any], Any]:
        """Return what is timed."""
        return lambda argument: argument[0][argument[1]]

    mmtensor = tensordict = use


def _touch(x: Any, ids: Any) -> list[Any]:
    return [x[number].sum() for number in ids]


class OneByOne(_Cold):
    """Plain indexing: a page fault waits for the device once for each row, or more."""

    title = "`x[i]` for 256 rows of 12 KB, cold"

    def use(self) -> Callable[[Any], Any]:
        """Return what is timed."""
        return lambda argument: _touch(*argument)

    mmtensor = torch = use


class Random(_Cold):
    """Without read-ahead: less is read, but still one page fault after the other."""

    title = '`x[i]` for 256 rows of 12 KB, cold, `advise("random")`'

    def mmtensor(self) -> Callable[[Any], Any]:
        """Tell the kernel first."""

        def read(argument: Any) -> Any:
            argument[0].advise("random")
            return _touch(*argument)

        return read


class Prefetch(_Cold):
    """The same rows, asked for first: the device has all requests at once."""

    title = "`x[i]` for 256 rows of 12 KB, cold, `prefetch(ids)`"

    def mmtensor(self) -> Callable[[Any], Any]:
        """Ask first."""

        def read(argument: Any) -> Any:
            argument[0].prefetch(argument[1])
            return _touch(*argument)

        return read


class WillNeed(_Cold):
    """The same, asked for row by row."""

    title = '`x[i]` for 256 rows of 12 KB, cold, `x[i].advise("willneed")` on each first'

    def mmtensor(self) -> Callable[[Any], Any]:
        """Ask first, a call for each row."""

        def read(argument: Any) -> Any:
            x, ids = argument
            for number in ids:
                x[number].advise("willneed")
            return _touch(x, ids)

        return read
