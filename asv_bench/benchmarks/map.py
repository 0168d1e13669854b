"""A function over every element of a container, with two worker processes."""

import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar

import tensordict

import mmtensor

from .common import Comparison, values

_COUNT, _FLOATS, _WORKERS = 1000, 1024, 2
_fork = multiprocessing.get_context("fork")


def _add_one(td: Any) -> Any:
    return td.apply(_plus)


def _plus(x: Any) -> Any:
    return x + 1


def _nothing(td: Any) -> None:
    pass


class _Map(Comparison):
    """1,000 elements of 4 KB in a memory-mapped container, one call for each."""

    function: ClassVar[Callable[[Any], Any]]
    out: ClassVar[str] = ""
    their_out: ClassVar[str] = ""
    running: ClassVar[bool] = False

    def containers(self, kind: Any, where: str) -> tuple[Any, Any]:
        """Return what is mapped over, and what results are written to."""
        leaves = {"x": values(_COUNT, _FLOATS)}
        source = kind(leaves, [_COUNT]).memmap(self.new_path())
        out = None
        if where:
            out = kind({"x": values(_COUNT, _FLOATS).clone()}, [_COUNT])
        return source, out.memmap(self.new_path()) if where == "mapped" else out

    def mmtensor(self) -> Callable[[], Any]:
        """With processes of its own, or an executor."""
        source, out = self.containers(mmtensor.TensorDict, self.out)
        function = type(self).function
        how: dict[str, Any] = {"mp_start_method": "fork"}
        if self.running:
            self.executor = ProcessPoolExecutor(_WORKERS, mp_context=_fork)
            how = {"executor": self.executor}

        def do() -> Any:
            return source.map(function, num_workers=_WORKERS, chunksize=0, out=out, **how)

        do()  # an executor starts its processes now
        return do

    def tensordict(self) -> Callable[[], Any]:
        """With processes of its own, or a pool."""
        source, out = self.containers(tensordict.TensorDict, self.their_out or self.out)
        function = type(self).function
        how: dict[str, Any] = {"num_workers": _WORKERS, "mp_start_method": "fork"}
        if self.running:
            self.pool = _fork.Pool(_WORKERS)
            how = {"pool": self.pool}

        def do() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of how workers are seeded
                return source.map(function, chunksize=0, out=out, **how)

        return do

    def teardown(self, library: str) -> None:
        """End the processes."""
        if hasattr(self, "executor"):
            self.executor.shutdown()
            del self.executor
        if hasattr(self, "pool"):
            self.pool.close()
            self.pool.join()
            del self.pool
        super().teardown(library)


class Returning(_Map):
    """Results come back, and are stacked."""

    title = "`map`, 1,000 elements of 4 KB, results"
    function = _add_one


class Filling(_Map):
    """Results come back, and are written to a container in regular memory."""

    title = "`map`, 1,000 elements of 4 KB, into `out` in memory"
    function = _add_one
    out = "regular"


class Writing(_Map):
    """Workers write results to a memory-mapped container; those of tensordict send them.

    That is what tensordict's `out` of 1.6 s does, which the target speaks of.
    """

    title = "`map`, 1,000 elements of 4 KB, into memory-mapped `out` (tensordict: in memory)"
    function = _add_one
    out = "mapped"
    their_out = "regular"


class WritingAlike(_Map):
    """Both write to memory-mapped containers, which is less work for tensordict as well.

    There is no target for it: 20 times as fast would be less than it takes to start two workers.
    """

    title = "`map`, 1,000 elements of 4 KB, into memory-mapped `out`, both"
    function = _add_one
    out = "mapped"


class Nothing(_Map):
    """There are no results."""

    title = "`map`, 1,000 elements of 4 KB, no results"
    function = _nothing


class ReturningRunning(Returning):
    """The same, with processes that are there."""

    title = "`map` with a running executor, results"
    running = True


class FillingRunning(Filling):
    """The same, with processes that are there."""

    title = "`map` with a running executor, into `out` in memory"
    running = True


class WritingRunning(Writing):
    """The same, with processes that are there."""

    title = "`map` with a running executor, into memory-mapped `out` (tensordict: in memory)"
    running = True


class WritingAlikeRunning(WritingAlike):
    """The same, with processes that are there."""

    title = "`map` with a running executor, into memory-mapped `out`, both"
    running = True


class NothingRunning(Nothing):
    """The same, with processes that are there."""

    title = "`map` with a running executor, no results"
    running = True
