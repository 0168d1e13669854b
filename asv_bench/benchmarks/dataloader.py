"""One epoch of shuffled batches out of a memory-mapped container, page cache warm."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import tensordict
import torch
from torch.utils.data import DataLoader

import mmtensor

from .common import Comparison

_COUNT, _BYTES, _BATCH = 20_000, 12_288, 256


@functools.cache
def _images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (_COUNT, _BYTES), dtype=torch.uint8, generator=generator)


def _as_it_is(batch: Any) -> Any:
    return batch


def _epoch(batches: Any) -> Callable[[], Any]:
    """Return a function that takes every batch of a loader, which is run once."""

    def run() -> int:
        count = 0
        for batch in batches:
            count += batch.batch_size[0]
        return count

    if run() != _COUNT:
        raise AssertionError("an epoch has every sample")
    return run


class _Epoch(Comparison):
    """20,000 samples of 12 KB, in batches of 256."""

    workers: ClassVar[int] = 0

    def container(self, kind: Any) -> Any:
        """Return a memory-mapped container of samples."""
        return kind({"image": _images()}, [_COUNT]).memmap(self.new_path())

    def loader(self, source: Any, **how: Any) -> Callable[[], Any]:
        """Return an epoch of a `DataLoader`, whose workers, if any, are running."""
        how |= {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        return _epoch(DataLoader(source, batch_size=_BATCH, shuffle=True, **how))

    def mmtensor(self) -> Callable[[], Any]:
        """`__getitems__` in a `DataLoader`."""
        return self.loader(self.container(mmtensor.TensorDict))

    def tensordict(self) -> Callable[[], Any]:
        """`__getitems__` in a `DataLoader`."""
        return self.loader(self.container(tensordict.TensorDict), collate_fn=_as_it_is)


class Loader(_Epoch):
    """In this process."""

    title = "epoch of 20,000 × 12 KB, `DataLoader(td)`"


class LoaderTwoWorkers(_Epoch):
    """Two workers, which keep running from one epoch to the next."""

    title = "epoch of 20,000 × 12 KB, `DataLoader(td, num_workers=2)`"
    workers = 2


class Batches(_Epoch):
    """`batches`, against tensordict in a `DataLoader` in this process."""

    title = "epoch of 20,000 × 12 KB, `td.batches` (tensordict: `DataLoader`)"
    limit_is = "the same `index_select` in memory, into one buffer"

    def mmtensor(self) -> Callable[[], Any]:
        """Into buffers that are used again."""
        source = self.container(mmtensor.TensorDict)

        class Epochs:
            def __iter__(self) -> Any:
                return source.batches(_BATCH, shuffle=True)

        return _epoch(Epochs())

    def limit(self) -> Callable[[], Any]:
        """Without a container, and without a file."""
        source = _images()
        buffer = torch.empty(_BATCH, _BYTES, dtype=torch.uint8)

        def run() -> None:
            order = torch.randperm(_COUNT)
            for start in range(0, _COUNT, _BATCH):
                ids = order[start : start + _BATCH]
                torch.index_select(source, 0, ids, out=buffer[: len(ids)])

        return run


class BatchesTwoWorkers(Batches):
    """`batches`, against tensordict in a `DataLoader` with two workers."""

    title = "epoch of 20,000 × 12 KB, `td.batches` (tensordict: two workers)"
    workers = 2
