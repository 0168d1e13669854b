"""Over the number of elements of a jagged tensor, 10 to 10⁷: opening, indexing, pickling."""

import functools
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mmap_ninja.ragged import RaggedMmap

from asv_bench.benchmarks.common import TDT, new_directory
from asv_bench.growth.curves import FLAT, Figure, Operation, Panel, Settings, measure
from mmtensor import JaggedTensor

__all__ = ["measure_elements"]

_COUNTS = (10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000)
_LARGEST_NINJA = 100_000
_LENGTHS = (3, 1, 2)
_PLACES = 64
_OVER = "number of elements"


class _Elements:
    """Marks the directory."""


def _lengths(count: int) -> np.ndarray[Any, Any]:
    return np.resize(_LENGTHS, count)


@functools.cache
def _jagged(count: int) -> str:
    path = f"{new_directory(_Elements)}/{count}.bin"
    JaggedTensor.zeros(_lengths(count)[:, None], dtype=torch.uint8, filename=path)
    return path


@functools.cache
def _ninja(count: int) -> str:
    if count > _LARGEST_NINJA:
        raise NotImplementedError("a million elements take mmap_ninja too long to write")
    path = f"{new_directory(_Elements)}/{count}.ninja"
    RaggedMmap.from_lists(path, [np.zeros(length, np.uint8) for length in _lengths(count)])
    return path


def _opener(library: str, count: int) -> Callable[[], Any]:
    if library == "mmap_ninja":
        path = _ninja(count)
        return lambda: RaggedMmap(path)
    path = _jagged(count)
    if library == "mmtensor":
        return lambda: JaggedTensor.from_filename(path, torch.uint8, mode="r+")
    shapes = torch.from_numpy(_lengths(count)[:, None].copy())
    return lambda: TDT.from_filename(path, torch.uint8, shapes)


def _index(library: str, count: int) -> Callable[[], Any]:
    j = _opener(library, count)()
    places = itertools.cycle(range(0, count, max(1, count // _PLACES)))
    return lambda: j[next(places)]


def _pickle(library: str, count: int) -> Callable[[], Any]:
    j = _opener(library, count)()
    return lambda: pickle.dumps(j, 5)


_ALL = ("mmtensor", "tensordict", "mmap_ninja")
_OPERATIONS = (
    Operation("open", _OVER, _opener, _ALL),
    Operation("`j[i]`", _OVER, _index, _ALL),
    Operation("`pickle.dumps(j)`", _OVER, _pickle, _ALL),
)


def measure_elements(settings: Settings) -> Figure:
    """Measure all operations."""
    counts = settings.sizes(*_COUNTS)
    panels = [
        Panel(one.title, one.over, measure(one, counts, settings), FLAT) for one in _OPERATIONS
    ]
    for count in counts:
        os.truncate(_jagged(count), 0)
    return Figure("elements", "A jagged tensor of 10 to 10⁷ elements", panels)
