"""Over the number of worker processes, 1, 2 and 4: `map` with a function that works."""

import functools
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import tensordict
import torch

import mmtensor
from asv_bench.benchmarks.common import new_directory, values
from asv_bench.growth.curves import SHARED, Curve, Figure, Operation, Panel, Settings, measure

__all__ = ["measure_workers"]

_WORKERS = (1, 2, 4)
_ITEMS, _WORK = 200, 0.005
_ROUNDS = 5
_fork = multiprocessing.get_context("fork")


class _Workers:
    """Marks the directory."""


def _work(x: torch.Tensor) -> torch.Tensor:
    """Compute for 5 ms, by the clock of this thread: who shares a core takes longer."""
    end = time.thread_time() + _WORK
    while time.thread_time() < end:
        total = x.sum()
    return total


def _work_on_element(one: Any) -> Any:
    return type(one)({"y": _work(one["x"])}, [])


def _mapper(library: str, workers: int) -> Callable[[], Any]:
    rows = values(_ITEMS, 1000)
    if library == "multiprocessing.Pool":

        def map_rows() -> list[torch.Tensor]:
            with _fork.Pool(workers) as pool:
                return pool.map(_work, rows, chunksize=1)

        return map_rows
    kind: Any = {"mmtensor": mmtensor.TensorDict, "tensordict": tensordict.TensorDict}[library]
    path = f"{new_directory(_Workers)}/{library}{workers}"
    td = kind({"x": rows}, [_ITEMS]).memmap(path)
    keywords = {"chunksize": 0, "num_workers": workers, "mp_start_method": "fork"}
    if library == "tensordict":  # its default warns
        keywords["generator"] = torch.default_generator
    return functools.partial(td.map, _work_on_element, **keywords)


_OPERATION = Operation(
    f"map over {_ITEMS} rows, 5 ms each",
    "number of workers",
    _mapper,
    ("mmtensor", "tensordict", "multiprocessing.Pool"),
    slow=math.inf,
)


def measure_workers(settings: Settings) -> Figure:
    """Measure `map`, workers started and ended by each call."""
    few = settings._replace(rounds=min(settings.rounds, _ROUNDS))
    cores = len(os.sched_getaffinity(0))
    curves = measure(_OPERATION, list(_WORKERS), few)
    ideal = {count: _ITEMS * _WORK / min(count, cores) for count in _WORKERS}
    curves.append(Curve(f"ideal: the work ÷ {cores} cores", dict(ideal)))
    panel = Panel(_OPERATION.title, _OPERATION.over, curves, SHARED)
    return Figure("workers", f"`map` over workers, on a machine with {cores} cores", [panel])
