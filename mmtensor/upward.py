"""The methods of a container that the level above serves: parallel map, batches."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from mmtensor import joining
from mmtensor.keyed import Keyed
from mmtensor.tree import Tree

if TYPE_CHECKING:
    from mmtensor.batches import Batches

__all__ = ["Upward", "collate"]


def _above(module: str) -> Any:
    """Return a module of the level above, imported when it is first asked for.

    That is how names of the package are found, too. A class that another process has
    unpickled has all of its methods then, whatever was imported there.
    """
    return importlib.import_module(f"mmtensor.{module}")


class Upward(Keyed):
    """What `TensorDict` has of a data set, and the doors to parallel work on it."""

    __slots__ = ()

    def map(
        self,
        fn: Callable[[Any], Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        out: Any = None,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        executor: Executor | None = None,
        pbar: bool = False,
        mp_start_method: str | None = None,
    ) -> Any:
        """Call a function with each chunk, in parallel, and join the results in order.

        Workers get the TensorDict once, and then numbers of chunks. Of one that is
        memory-mapped they get a reference, and what the function writes to its chunk in place
        reaches the files; so it is in shared memory. Of one in regular memory every worker
        process has a copy, and what the function writes there is lost.

        Parameters
        ----------
        fn
            Called with a TensorDict, a view of the chunk. It returns a tensor, a TensorDict,
            or None, and the same for every chunk. Worker processes need one that can be
            pickled: a function defined at the top of a module.
        dim
            The batch dimension that is cut.
        num_workers
            How many processes to start; None: one for each processor; 0: none, the work is
            done by the caller. With an executor: for how many workers there should be work;
            None: for all that it has.
        out
            A TensorDict or tensor that gets the results, with the size of this one along
            `dim` and dtypes that hold them. Memory-mapped, workers write to it and nothing
            comes back.
        chunksize
            Elements in a chunk. 0: the function gets each element, without the dimension.
        num_chunks
            In place of `chunksize`: how many chunks. Without either, as many as workers.
        executor
            Who does the work: any `concurrent.futures.Executor`, of threads, processes, or
            those of a cluster (``client.get_executor()`` of dask).
        pbar
            Whether a progress bar is shown.
        mp_start_method
            ``"fork"``, ``"spawn"`` or ``"forkserver"``; None: as `multiprocessing` does.

        Returns
        -------
        TensorDict, torch.Tensor or None
            `out` if given. Otherwise the results along `dim`, stacked for ``chunksize=0`` and
            concatenated for others, in regular memory; None if they were.

        Raises
        ------
        MapError
            The function raised, which is the cause, or a worker died. The rest is cancelled.
        TypeError
            If the function cannot go to worker processes.

        Examples
        --------
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> td = TensorDict({"x": torch.arange(6).view(3, 2)}, [3])
        >>> with ThreadPoolExecutor(2) as threads:
        ...     td.map(lambda one: one["x"].sum(), chunksize=0, executor=threads)
        tensor([1, 5, 9])
        """
        return _above("parallel").map_chunks(
            self,
            fn,
            dim,
            num_workers,
            out,
            chunksize,
            num_chunks,
            executor,
            pbar,
            mp_start_method,
        )

    def map_iter(
        self,
        fn: Callable[[Any], Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        executor: Executor | None = None,
        pbar: bool = False,
        mp_start_method: str | None = None,
    ) -> Iterator[Any]:
        """Call a function with each chunk, in parallel; yield each result in order.

        Workers are a few tasks ahead, and no more: results need not fit into memory together.
        Work begins with the first ``next``, and ends when the iterator is closed.

        Parameters
        ----------
        fn, dim, num_workers, chunksize, num_chunks, executor, pbar, mp_start_method
            As for `map`. The function may return anything, where processes do the work
            anything that can be pickled.

        Returns
        -------
        Iterator
            Of what the function returned for each chunk.

        Raises
        ------
        MapError
            As `map`, from ``next``.

        Examples
        --------
        >>> td = TensorDict({"x": torch.arange(4)}, [4])
        >>> for chunk in td.map_iter(lambda two: two["x"] * 10, chunksize=2, num_workers=0):
        ...     print(chunk)
        tensor([ 0, 10])
        tensor([20, 30])
        """
        iterator: Iterator[Any] = _above("parallel").map_iter_chunks(
            self, fn, dim, num_workers, chunksize, num_chunks, executor, pbar, mp_start_method
        )
        return iterator

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
        num_threads: int = 1,
        out: Any = None,
    ) -> "Batches":
        """Iterate over the elements once, in batches, in this process.

        Dense leaves are gathered into buffers that are used again: a batch is valid until
        ``prefetch + 1`` further ones were taken. Clone what is to be kept longer. Jagged
        leaves and lists of strings are gathered into memory of their own.

        Rows that are in memory are gathered when the batch is asked for. When some are not,
        threads take over, which ask the kernel for the rows of batches ahead and gather.

        Parameters
        ----------
        batch_size
            Elements in a batch; the last one may have fewer.
        shuffle
            Whether the order is random. It is drawn at once, and each call draws another.
        generator
            For the order; None: torch's own.
        drop_last
            Whether a last batch with fewer elements is left out.
        prefetch
            How many batches threads are ahead.
        num_threads
            How many threads there are; 0: rows are always gathered when asked for.
        out
            A TensorDict of at least `batch_size` elements with the same dense leaves, which
            become the only buffers: each batch is valid until the next one.

        Returns
        -------
        Batches
            An iterator of TensorDicts with a length. ``close()`` ends it early; so does
            dropping it.

        Examples
        --------
        >>> td = TensorDict({"x": torch.arange(5)}, [5])
        >>> [batch["x"].tolist() for batch in td.batches(2)]
        [[0, 1], [2, 3], [4]]
        >>> generator = torch.Generator().manual_seed(0)
        >>> len(td.batches(2, shuffle=True, generator=generator, drop_last=True))
        2
        """
        batches: Batches = _above("batches").Batches(
            self,
            batch_size,
            shuffle=shuffle,
            generator=generator,
            drop_last=drop_last,
            prefetch=prefetch,
            num_threads=num_threads,
            out=out,
        )
        return batches

    def __getitems__(self, indices: Iterable[int]) -> Self:
        """Gather a batch for `torch.utils.data.DataLoader`."""
        numbers = indices if isinstance(indices, list) else list(indices)
        # NumPy reads a list of 256 integers in 5 us, torch in 29.
        array = np.array(numbers, np.int64) if not numbers else np.array(numbers)
        rows = array if array.dtype == np.int64 else torch.tensor(numbers, device="cpu")
        return self[rows]  # type: ignore[no-any-return]


def collate(batch: Any, **_: Any) -> Any:
    """Make a batch of what a `DataLoader` has fetched: one container, or one per element."""
    return batch if isinstance(batch, Tree) else joining.stack(batch)
