"""Batches of a container: gathered into buffers that are used again, ahead if need be."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from mmtensor.allocation import LARGE, populate
from mmtensor.copying import copied
from mmtensor.geometry import as_count
from mmtensor.indexing import carried
from mmtensor.jagged import JaggedTensor
from mmtensor.leaves import advanced, mapping_under, name_path, to_plain
from mmtensor.mapping import FileMapping
from mmtensor.prefetch import are_absent, is_warm, will_need_rows
from mmtensor.storage import refuse_write
from mmtensor.tree import Tree

__all__ = ["Batches"]

# Rows of each leaf, and leaves, that are looked at to see whether a batch is in memory: one
# look takes 0.8 us, and a batch of 3 MB 300 us.
_SAMPLES = 4
_LEAVES = 4

_index_select = torch.index_select
_narrow = torch.narrow

# Dense leaves of a batch as they are, and as words to copy.
Slot = list[tuple[Tensor, Tensor]]


class _Entry(NamedTuple):
    """A nested container or a leaf, in the order of the keys.

    Parameters
    ----------
    parent
        Number of the container that it is in.
    key
        Its key there.
    rest
        Batch dimensions of a container after the first; None for a leaf.
    leaf
        A leaf; the class of a container.
    words
        A dense leaf on the CPU as words to copy; None: it is gathered into new memory.
    """

    parent: int
    key: str
    rest: tuple[int, ...] | None
    leaf: Any
    words: Tensor | None


def _words(leaf: Any) -> Tensor | None:
    """Return a dense leaf as words of its size, on the same memory."""
    if (
        not isinstance(leaf, Tensor)
        or not leaf.is_cpu
        or leaf.layout is not torch.strided
        or leaf.requires_grad
        or leaf.is_conj()
        or leaf.is_neg()
    ):
        return None
    return carried(to_plain(leaf))


class _Gatherer:
    """Gathers batches of a container; threads may do so at the same time.

    Parameters
    ----------
    tree
        The container.
    order
        Row numbers; None: as they come.
    batch_size
        Rows in a batch.
    length
        Rows in all batches.
    """

    def __init__(self, tree: Any, order: Tensor | None, batch_size: int, length: int) -> None:
        self.tree = tree
        self.order = order
        # The same, for plain Python: a range or an array.
        self._numbers: Any = range(length) if order is None else order.numpy()
        self.batch_size = min(batch_size, max(length, 1))  # no buffer is larger than all rows
        self.length = length
        self.entries: list[_Entry] = []
        self._add(tree, 0)
        self._files = self._leaves_on_files()

    def _add(self, tree: Any, number: int) -> int:
        """List what is in a container; return how many containers there are by then."""
        count = number + 1
        for key, leaf in tree._all().items():
            if isinstance(leaf, Tree):
                rest = tuple(leaf._batch_size[1:])
                self.entries.append(_Entry(number, key, rest, leaf, None))
                # Its own number, for what is in it.
                count = self._add(leaf, count)
            else:
                self.entries.append(_Entry(number, key, None, leaf, _words(leaf)))
        return count

    def _leaves_on_files(self) -> list[tuple[Any, FileMapping]]:
        """Return the leaves that may have to be read, those with the largest rows first."""
        found = [
            (entry.leaf, mapping)
            for entry in self.entries
            if entry.rest is None
            and (mapping := mapping_under(entry.leaf)) is not None
            and isinstance(mapping, FileMapping)
        ]
        return sorted(found, key=lambda pair: -pair[0].nbytes)

    # --- where the rows are --------------------------------------------------------------

    def _bounds(self, number: int) -> tuple[int, int]:
        start = number * self.batch_size
        return start, min(start + self.batch_size, self.length)

    def _ids(self, number: int) -> Tensor:
        start, stop = self._bounds(number)
        if self.order is None:
            return torch.arange(start, stop, device="cpu")
        return self.order[start:stop]

    def is_absent(self, number: int) -> bool:
        """Whether some rows of a batch are not in memory, as far as a few of them tell."""
        files = [pair for pair in self._files[:_LEAVES] if not is_warm(pair[1])]
        if not files:
            return False
        start, stop = self._bounds(number)
        step = -(-(stop - start) // _SAMPLES)
        some = [int(one) for one in self._numbers[start:stop:step]]
        for leaf, mapping in files:
            if isinstance(leaf, JaggedTensor):
                positions = leaf._positions(some)
            elif leaf.numel():
                width = leaf.stride(0) * leaf.itemsize
                base = leaf.storage_offset() * leaf.itemsize
                positions = [base + one * width for one in some]
            else:
                continue
            if are_absent(mapping, positions):
                return True
        return False

    def ask(self, number: int) -> None:
        """Ask the kernel for the rows of a batch, if there is such a batch."""
        if number * self.batch_size >= self.length:
            return
        ids = self._ids(number)
        for leaf, mapping in self._files:
            if isinstance(leaf, JaggedTensor):
                leaf.prefetch(ids)
            else:
                will_need_rows(mapping, leaf, ids)

    # --- batches -------------------------------------------------------------------------

    def slot(self) -> Slot:
        """Make buffers for one batch."""
        slot: Slot = []
        for entry in self.entries:
            if entry.words is not None:
                shape = (self.batch_size, *entry.leaf.shape[1:])
                buffer = torch.empty(shape, dtype=entry.leaf.dtype, device="cpu")
                if buffer.nbytes >= LARGE:
                    populate(buffer.data_ptr(), buffer.nbytes)
                slot.append((buffer, carried(buffer)))
        return slot

    def slot_in(self, out: Tree) -> Slot:
        """Return the leaves of a container as buffers for one batch.

        Raises
        ------
        ValueError
            If one is missing, does not fit, or requires gradients.
        """
        slot: Slot = []
        paths: list[tuple[str, ...]] = [()]
        for entry in self.entries:
            path = (*paths[entry.parent], entry.key)
            if entry.rest is not None:
                paths.append(path)
            if entry.words is None:
                continue
            buffer: Any = out
            for key in path:
                buffer = (
                    buffer._leaves[key]
                    if isinstance(buffer, Tree) and key in buffer._names()
                    else None
                )
            shape = (self.batch_size, *entry.leaf.shape[1:])
            if (
                not isinstance(buffer, Tensor)
                or buffer.dtype != entry.leaf.dtype
                or buffer.shape[1:] != shape[1:]
                or len(buffer) < self.batch_size
            ):
                got = "none"
                if isinstance(buffer, Tensor):
                    got = f"{list(buffer.shape)} {buffer.dtype}"
                raise ValueError(
                    f"leaf {name_path(path)} of out must have shape {list(shape)}, or more rows, "
                    f"and dtype {entry.leaf.dtype}, got {got}."
                )
            if buffer.requires_grad:
                raise ValueError(
                    f"leaf {name_path(path)} of out requires gradients, which writing would "
                    "go past. Pass out.apply(torch.Tensor.detach)."
                )
            refuse_write(buffer, f"writing to leaf {name_path(path)} of out")
            buffer = buffer[: self.batch_size]
            slot.append((buffer, carried(to_plain(buffer))))
        return slot

    def gather(self, number: int, slot: Slot) -> Any:
        """Gather a batch; its dense leaves are in the buffers of a slot."""
        start, stop = self._bounds(number)
        count = stop - start
        full = count == self.batch_size
        ids = None if self.order is None else self.order[start:stop]
        make = self.tree._make
        trees = [make({}, torch.Size((count, *self.tree._batch_size[1:])))]
        buffers = iter(slot)
        for parent, key, rest, leaf, words in self.entries:
            value: Any
            if words is not None:
                value, target = next(buffers)
                if not full:
                    value, target = value[:count], target[:count]
                if ids is None:
                    target.copy_(_narrow(words, 0, start, count))
                elif not copied(words, ids, target):
                    _index_select(words, 0, ids, out=target)
            elif rest is not None:
                value = leaf._make({}, torch.Size((count, *rest)))
                trees.append(value)
            else:
                numbers = self._ids(number)
                value = advanced(leaf, numbers, numbers)
            trees[parent]._leaves[key] = value
        return trees[0]

    def ask_and_gather(self, number: int, ahead: int, slot: Slot) -> Any:
        """Ask for the rows of a batch further on, and gather this one."""
        self.ask(number + ahead)
        return self.gather(number, slot)


class Batches(Iterator[Any]):
    """One epoch of batches; see `TensorDict.batches`, which makes it.

    Parameters
    ----------
    tree
        The container.
    batch_size, shuffle, generator, drop_last, prefetch, num_threads, out
        As for `TensorDict.batches`.
    """

    def __init__(
        self,
        tree: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
        num_threads: int = 1,
        out: Any = None,
    ) -> None:
        # For __del__, should one of the checks fail.
        self._taken = self._sent = self._count = 0
        self._threads: ThreadPoolExecutor | None = None
        self._futures: deque[Future[Any]] = deque()
        batch_size = as_count("batch_size", batch_size, 1)
        prefetch = as_count("prefetch", prefetch, 0)
        num_threads = as_count("num_threads", num_threads, 0)
        if not tree._batch_size:
            raise RuntimeError("a TensorDict without batch dimensions has no elements to batch.")
        length = int(tree._batch_size[0])
        self._count = length // batch_size if drop_last else -(-length // batch_size)
        length = min(length, self._count * batch_size)
        order = None
        if shuffle:
            order = torch.randperm(tree._batch_size[0], generator=generator, device="cpu")
        self._gatherer = _Gatherer(tree, order, batch_size, length)
        self._ahead = prefetch
        self._num_threads = num_threads if prefetch else 0
        self._ended = False
        self._slots: list[Slot] = []
        # A batch stays as it is while `prefetch` further ones are taken.
        self._ring = prefetch + 1
        self._fixed = out is not None
        if out is not None:
            if not isinstance(out, Tree):
                raise TypeError(f"out must be a TensorDict, got {type(out)!r}.")
            self._slots, self._ring = [self._gatherer.slot_in(out)], 1

    def __len__(self) -> int:
        """Return the number of batches in the epoch."""
        return self._count

    def __iter__(self) -> Self:
        if self._ended:
            raise RuntimeError(
                "this epoch has ended: td.batches(...) iterates over one. Call it again for each: "
                "for epoch in range(epochs): for batch in td.batches(...): ..."
            )
        return self

    def __next__(self) -> Any:
        number = self._taken
        if number >= self._count:
            self.close()
            raise StopIteration
        try:
            batch = self._take(number)
        except BaseException:
            self.close()
            raise
        self._taken = number + 1
        if self._threads is not None and not self._fixed:
            self._send(self._taken + self._ahead, self._threads)
        return batch

    def _take(self, number: int) -> Any:
        if self._threads is None:
            return self._take_here(number)
        return self._take_ahead(number, self._threads)

    def _take_here(self, number: int) -> Any:
        gatherer = self._gatherer
        # The first one is looked at as well, and then the one that is ahead of each.
        look = {min(number + self._ahead, self._count - 1)} | ({0} if number == 0 else set())
        if any(gatherer.is_absent(one) for one in look):
            if self._num_threads:
                self._threads = self._start(number)
                return self._take_ahead(number, self._threads)
            gatherer.ask(number)
        return gatherer.gather(number, self._slot(number))

    def _start(self, number: int) -> ThreadPoolExecutor:
        threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="mmtensor-batches")
        self._sent = number
        for one in range(number, number + self._ahead):
            threads.submit(self._gatherer.ask, one)
        if not self._fixed:
            # New buffers: those in the hands of the caller are not touched any more.
            self._slots, self._ring = [], 2 * self._ahead + 1
        return threads

    def _take_ahead(self, number: int, threads: ThreadPoolExecutor) -> Any:
        if self._fixed:
            threads.submit(self._gatherer.ask, number + self._ahead)
            return self._gatherer.gather(number, self._slots[0])
        self._send(number + 1, threads)
        return self._futures.popleft().result()

    def _send(self, until: int, threads: ThreadPoolExecutor) -> None:
        """Let threads gather the batches before a number."""
        work: Callable[..., Any] = self._gatherer.ask_and_gather
        while self._sent < min(until, self._count):
            number = self._sent
            future = threads.submit(work, number, self._ahead, self._slot(number))
            self._futures.append(future)
            self._sent = number + 1

    def _slot(self, number: int) -> Slot:
        at = number % self._ring
        while len(self._slots) <= at:
            self._slots.append(self._gatherer.slot())
        return self._slots[at]

    def close(self) -> None:
        """End the epoch; no thread is left."""
        self._ended = True
        self._taken = self._count
        self._futures.clear()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The garbage collector may come by in one of the threads, which cannot wait for itself.
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
