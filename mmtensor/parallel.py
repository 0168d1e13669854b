"""Mapping a function over a container in parallel, on any `concurrent.futures.Executor`."""

import bisect
import multiprocessing
import os
import pickle
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

from mmtensor.chunks import Cut, cut
from mmtensor.crew import Crew, Inline
from mmtensor.errors import MapError, ShapeError
from mmtensor.geometry import as_count
from mmtensor.jagged import JaggedTensor
from mmtensor.jobs import (
    FAILED,
    MISFIT,
    NOTHING,
    Job,
    Outcome,
    Task,
    WorkerLost,
    in_words,
    unpacked,
)
from mmtensor.leaves import mapping_under, name_path
from mmtensor.mapping import FileMapping
from mmtensor.pool import Pool
from mmtensor.results import apart, joined, misfit, naming, store
from mmtensor.shared import share
from mmtensor.shared_memory import SharedMapping
from mmtensor.storage import refuse_write
from mmtensor.tree import SHARED, Tree

__all__ = ["map_chunks", "map_iter_chunks"]

# A task is so many chunks that the function takes about this long over them: sending one and
# its results takes 0.1 to 1 ms, and results come in steps of this. Towards the end tasks get
# smaller, for all workers to be busy, but not smaller than what pays. How long the function
# takes is not known before the first results: the first tasks end after a while, wherever
# they are then.
_TASK_SECONDS = 0.02
_LEAST_SECONDS = 0.002
_FIRST_SECONDS = 0.005
# Tasks for each worker that `map_iter` holds at most, finished ones included.
_BACKLOG = 4

_OWN, _THREADS, _FAMILY, _FOREIGN = range(4)


# --- who does the work -------------------------------------------------------------------


def _cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _workers(executor: Executor | None, num_workers: int | None) -> int:
    """Decide for how many workers there should be work."""
    if num_workers is not None:
        return as_count("num_workers", num_workers)
    for name in ("_max_workers", "num_workers"):  # concurrent.futures and loky; mpi4py
        number = getattr(executor, name, None)
        if isinstance(number, int) and number > 0:
            return number
    client = getattr(executor, "_client", None)  # dask's
    if client is not None and hasattr(client, "nthreads"):
        return max(1, int(sum(client.nthreads().values())))
    return _cores()


def _kind(executor: Executor | None, workers: int) -> int:
    """Tell how a job gets to the workers of an executor."""
    if executor is None:
        return _OWN if workers else _THREADS
    if not isinstance(executor, Executor):
        raise TypeError(
            f"executor must be a concurrent.futures.Executor, got {type(executor)!r}. Of a dask "
            "client, pass client.get_executor()."
        )
    if isinstance(executor, ThreadPoolExecutor):
        return _THREADS
    return _FAMILY if isinstance(executor, ProcessPoolExecutor) else _FOREIGN


class _Probe(pickle.Pickler):
    """Looks whether something can be pickled, but for data, of which there may be a lot."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor | Tree | JaggedTensor | np.ndarray):
            return int, ()
        return NotImplemented


class _Sink:
    def write(self, data: Any) -> int:
        return len(data)


def _check_function(fn: Any) -> None:
    """Raise unless a function can go to worker processes.

    Raises
    ------
    TypeError
        It says what else there is.
    """
    try:
        _Probe(_Sink()).dump(fn)
    except Exception as error:
        raise TypeError(
            f"fn must be picklable to go to worker processes, got {fn!r} ({error}). Define it at "
            "the top of a module (functools.partial gives it more arguments), or run it in "
            "threads, executor=ThreadPoolExecutor(), which suits functions that spend their time "
            "in NumPy, torch or on files, or on an executor that pickles with cloudpickle, such "
            "as loky.get_reusable_executor() or dask's client.get_executor()."
        ) from error


# --- what goes to the workers ------------------------------------------------------------


def _shared_once(tree: Any) -> Any:
    """Return a container that crosses to many processes for the price of one copy.

    Leaves in regular memory are copied to one block of shared memory; all others stay.
    """
    regular = [
        leaf
        for _, leaf in tree._flat()
        if isinstance(leaf, JaggedTensor | Tensor)
        and mapping_under(leaf) is None
        and (isinstance(leaf, JaggedTensor) or (leaf.is_cpu and leaf.layout is torch.strided))
    ]
    if not regular:
        return tree
    block = tree._make({str(n): leaf for n, leaf in enumerate(regular)}, torch.Size())
    share(block)
    copies = {id(leaf): block._leaves[str(n)] for n, leaf in enumerate(regular)}
    copy = tree._map(lambda leaf: copies.get(id(leaf), leaf))
    return copy._lock() if tree._locks else copy


def _check_out(out: Any, place: Cut) -> None:
    """Raise unless results can be written somewhere.

    Raises
    ------
    TypeError
        If it is neither a tensor nor a container.
    ShapeError
        If it does not have an element for each of the source.
    ReadOnlyError
        If it was opened with mode ``"r"``.
    """
    if not isinstance(out, Tensor | Tree):
        raise TypeError(f"out must be a TensorDict or a tensor, got {type(out)!r}.")
    shape = out._batch_size if isinstance(out, Tree) else out.shape
    if len(shape) <= place.dim or shape[place.dim] != place.length:
        raise ShapeError(
            f"dimension {place.dim} of out must have size {place.length}, as that of the "
            f"TensorDict that is mapped over, got shape {list(shape)}."
        )
    pairs = out._flat() if isinstance(out, Tree) else [((), out)]
    for path, leaf in pairs:
        target = leaf._parts.values if isinstance(leaf, JaggedTensor) else leaf
        if isinstance(target, Tensor):
            refuse_write(target, f"writing to leaf {name_path(path)} of out" if path else "out")


def _is_reached(out: Any, kind: int) -> bool:
    """Whether what workers write to `out` is seen here."""
    if kind == _THREADS:
        return True
    leaves = [leaf for _, leaf in out._flat()] if isinstance(out, Tree) else [out]
    for leaf in leaves:
        mapping = mapping_under(leaf)
        if isinstance(mapping, FileMapping):
            if mapping.mode.name != "r+" or not mapping.is_at_path():
                return False
        elif not isinstance(mapping, SharedMapping) or kind == _FOREIGN:
            return False
    return True


def _check_source(tree: Tree, kind: int) -> None:
    if kind == _FOREIGN and tree._kind() == SHARED:
        raise ValueError(
            "a TensorDict in shared memory cannot go to the workers of this executor, which gets "
            "values only, so that what a worker writes would be lost. Memory-map it, "
            "td.clone().memmap(directory), or pass td.clone() to send its values."
        )


# --- the work ----------------------------------------------------------------------------


def _lost(error: WorkerLost, place: Cut) -> MapError:
    task = error.task
    what = str(error).rstrip(".")
    if task is None:
        return MapError(f"a worker of map was lost: {what}.")
    first, last = task.first, task.last - 1
    if error.chunk is not None or first == last:
        chunk = first if error.chunk is None else error.chunk
        return MapError(f"{what}, at work on {place.describe(chunk)}.", chunk)
    return MapError(f"{what}, at work on chunks {first} to {last} of {place.count}.")


def _check_outcome(outcome: Outcome, place: Cut) -> None:
    error = outcome.value
    if outcome.kind == MISFIT:
        raise misfit(place, outcome.chunk, error) from error
    if outcome.kind == FAILED:
        raise MapError(
            f"fn failed for {place.describe(outcome.chunk)}: {in_words(error)}",
            outcome.chunk,
        ) from error


def _work(
    job: Job, crew: Crew | Pool, workers: int, backlog: int, progress: Any
) -> Generator[tuple[int, int, Outcome]]:
    """Do all chunks; yield the outcomes in order.

    Parameters
    ----------
    job
        What is done.
    crew
        Who does it.
    workers
        How many they are.
    backlog
        How many tasks may be under way, or done and not yielded.
    progress
        Is told of chunks when they are done; None: nobody is.
    """
    place = job.cut
    count = place.count
    fair = 2 * workers
    # What nobody has been given, in order; what is done, by its first chunk.
    left = [(0, count)] if count else []
    done: dict[int, Task] = {}
    group, seconds = max(1, count // fair), _FIRST_SECONDS
    position = running = 0
    while position < count:
        while (
            left
            and running < crew.capacity
            # What is waited for is never held back.
            and (running + len(done) < backlog or left[0][0] == position)
        ):
            first, last = left.pop(0)
            task = Task(first, min(first + group, last), seconds)
            if task.last < last:
                left.insert(0, (task.last, last))
            crew.submit(task)
            running += 1
        task, outcome = crew.next()
        running -= 1
        _check_outcome(outcome, place)
        if outcome.last < task.last:
            bisect.insort(left, (outcome.last, task.last))
            task.last = outcome.last
        task.outcome = outcome._replace(value=unpacked(outcome.value))
        done[task.first] = task
        number = task.last - task.first
        if progress is not None:
            progress.update(number)
        rate = number / max(outcome.seconds, 1e-9)
        rest = sum(last - first for first, last in left)
        group = max(1, int(min(_TASK_SECONDS * rate, max(rest / fair, _LEAST_SECONDS * rate))))
        seconds = _TASK_SECONDS
        while position in done:
            task = done.pop(position)
            position = task.last
            yield task.first, task.last, task.outcome  # type: ignore[misc]  # it is done
    crew.dismiss()


@contextmanager
def _working(
    tree: Tree,
    fn: Callable[[Any], Any],
    dim: int,
    num_workers: int | None,
    out: Any,
    chunksize: int | None,
    num_chunks: int | None,
    executor: Executor | None,
    method: str | None,
    *,
    joins: bool,
    pbar: bool,
    ordered: bool,
) -> Iterator[tuple[Job, Generator[tuple[int, int, Outcome]]]]:
    """Prepare a job and those who do it; end what was started for it.

    Parameters are those of `TensorDict.map`, and:

    Parameters
    ----------
    joins
        Whether results are joined by the worker.
    ordered
        Whether outcomes wait to be taken, so that only so many may be ahead.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}.")
    if executor is not None and method is not None:
        raise ValueError(
            "mp_start_method is for the processes that map starts itself: leave it out with "
            "executor=."
        )
    workers = _workers(executor, num_workers)
    kind = _kind(executor, workers)
    place = cut(tree, dim, chunksize, num_chunks, max(1, workers))
    if out is not None:
        _check_out(out, place)
    if kind in (_OWN, _FAMILY):
        _check_function(fn)
    _check_source(tree, kind)
    workers = max(1, min(workers, place.count))
    context = multiprocessing.get_context(method)
    forked = kind == _OWN and context.get_start_method() == "fork"
    source = _shared_once(tree) if kind in (_OWN, _FAMILY) and not forked else tree
    seed = None if kind == _THREADS else int(torch.empty((), dtype=torch.int64).random_().item())
    there = out if out is not None and _is_reached(out, kind) else None
    job = Job(fn, source, place, out=there, joins=joins, seed=seed)
    crew: Crew | Pool
    if kind == _OWN:
        crew = Pool(job, workers, context)
    else:
        threads = kind == _THREADS
        doer = Inline() if executor is None else executor
        crew = Crew(job, doer, workers, threads=threads, waits=kind != _FOREIGN)
    kill = True
    try:
        with _bar(place.count, shown=pbar) as progress:
            backlog = _BACKLOG * workers if ordered else place.count
            yield job, _work(job, crew, workers, backlog, progress)
            kill = False
    except WorkerLost as error:
        raise _lost(error, place) from error.__cause__
    finally:
        crew.stop(kill=kill)


def map_chunks(
    tree: Tree,
    fn: Callable[[Any], Any],
    dim: int,
    num_workers: int | None,
    out: Any,
    chunksize: int | None,
    num_chunks: int | None,
    executor: Executor | None,
    pbar: bool,
    mp_start_method: str | None,
) -> Any:
    """Do `TensorDict.map`."""
    how = (tree, fn, dim, num_workers, out, chunksize, num_chunks, executor, mp_start_method)
    parts: list[Any] = []
    # The first chunks of those, and of results that were None.
    starts: list[int] = []
    nothing: list[int] = []
    # Concatenated chunks could not be told apart again, to write them.
    joins = out is None or chunksize == 0
    with _working(*how, joins=joins, pbar=pbar, ordered=False) as (job, outcomes):
        place = job.cut
        for first, last, outcome in outcomes:
            if job.out is not None:
                continue  # workers have written everything
            if out is not None:
                store(place, out, first, apart(place, outcome, last - first))
            elif outcome.kind == NOTHING:
                nothing.append(first)
            else:
                found = joined(place, outcome, first)
                starts += range(first, first + len(found))
                parts += found
            if nothing and parts:
                raise TypeError(
                    f"the results of fn must fit together, but for {place.describe(nothing[0])} "
                    f"it returned None, and for {place.describe(starts[0])} something else."
                )
        # Workers are ending meanwhile.
        if not parts:
            return out
        with naming(place, starts, parts, place.concatenate, place.sample):
            return place.concatenate(parts)


@contextmanager
def _bar(count: int, *, shown: bool) -> Iterator[Any]:
    if not shown:
        yield None
        return
    with tqdm(total=count) as progress:
        yield progress


def map_iter_chunks(
    tree: Tree,
    fn: Callable[[Any], Any],
    dim: int,
    num_workers: int | None,
    chunksize: int | None,
    num_chunks: int | None,
    executor: Executor | None,
    pbar: bool,
    mp_start_method: str | None,
) -> Generator[Any]:
    """Do `TensorDict.map_iter`."""
    how = (tree, fn, dim, num_workers, None, chunksize, num_chunks, executor, mp_start_method)
    joins = chunksize == 0
    with _working(*how, joins=joins, pbar=pbar, ordered=True) as (job, outcomes):
        for first, last, outcome in outcomes:
            yield from apart(job.cut, outcome, last - first)
