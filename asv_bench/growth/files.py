"""Over the size of a file, 1 KB to 64 GiB, sparse: opening, indexing, pickling, reading."""

import functools
import itertools
import json
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

import mmap_ninja.numpy
import numpy as np
import torch
from safetensors import safe_open

from asv_bench.benchmarks.common import MMT, TDT, new_directory
from asv_bench.growth.curves import FLAT, Figure, Operation, Panel, Settings, measure

__all__ = ["measure_files"]

_SIZES = tuple(1 << power for power in (10, 13, 16, 19, 22, 25, 28, 31, 34, 36))
_PLACES = 64  # elements that are visited in turn, each on a page of its own if there are so many
_OVER = "size of the file"


class _Files:
    """Marks the directory."""


@functools.cache
def _sparse(nbytes: int) -> str:
    path = f"{new_directory(_Files)}/{nbytes}.bin"
    with open(path, "xb") as file:
        file.truncate(nbytes)
    return path


@functools.cache
def _safetensors(nbytes: int) -> str:
    """Make a file of one tensor `x` in the format of safetensors, its bytes a hole."""
    entry = {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}
    header = json.dumps({"x": entry}).encode()
    path = f"{new_directory(_Files)}/{nbytes}.safetensors"
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)
    return path


@functools.cache
def _ninja(nbytes: int) -> str:
    path = f"{new_directory(_Files)}/{nbytes}.ninja"
    mmap_ninja.numpy._empty(path, np.float32, (nbytes // 4,), "C")
    return path


def _opener(library: str, nbytes: int) -> Callable[[], Any]:
    count = nbytes // 4
    if library == "safetensors":
        path = _safetensors(nbytes)
        return lambda: safe_open(path, "pt")
    if library == "mmap_ninja":
        path = _ninja(nbytes)
        return lambda: mmap_ninja.numpy.open_existing(path)
    path = _sparse(nbytes)
    return {
        "mmtensor": lambda: MMT.from_filename(path, torch.float32, (count,), mode="r+"),
        "tensordict": lambda: TDT.from_filename(path, torch.float32, (count,)),
        "numpy": lambda: np.memmap(path, np.float32, "r+", shape=(count,)),
        "torch": lambda: torch.from_file(path, shared=True, size=count, dtype=torch.float32),
    }[library]


def _opened(library: str, nbytes: int) -> Any:
    opened = _opener(library, nbytes)()
    return opened.get_slice("x") if library == "safetensors" else opened


def _index(library: str, nbytes: int) -> Callable[[], Any]:
    x, at = _opened(library, nbytes), nbytes // 8
    x[at]  # NumPy reads the element: its page is there from now on
    return lambda: x[at]


def _read(library: str, nbytes: int) -> Callable[[], Any]:
    """Read elements that lie far apart, one at a time, from pages in memory."""
    x = _opened(library, nbytes)
    every = range(0, nbytes // 4, max(1, nbytes // 4 // _PLACES))
    for place in every:  # what is measured is no reading from the disk
        x[place].item()
    places = itertools.cycle(every)
    return lambda: x[next(places)].item()  # noqa: PLW0108  # another element each time


def _pickle(library: str, nbytes: int) -> Callable[[], Any]:
    """Pickle all of it: by reference, or by value where the library knows nothing else."""
    x = _opener(library, nbytes)()
    return lambda: pickle.dumps(x, 5)


_ALL = ("mmtensor", "tensordict", "numpy", "torch", "safetensors", "mmap_ninja")
_OPERATIONS = (
    Operation("open a file", _OVER, _opener, _ALL),
    Operation("index one element, `x[i]`", _OVER, _index, _ALL),
    Operation("read one element, `x[i].item()`", _OVER, _read, _ALL),
    # A file opened by safetensors cannot be pickled.
    Operation("`pickle.dumps(x)`", _OVER, _pickle, ("mmtensor", "tensordict", "numpy", "torch")),
)


def measure_files(settings: Settings) -> Figure:
    """Measure all operations."""
    sizes = settings.sizes(*_SIZES)
    panels = [
        Panel(one.title, one.over, measure(one, sizes, settings), FLAT, x_unit="B")
        for one in _OPERATIONS
    ]
    for nbytes in sizes:  # holes for the most part; what was read is in the page cache
        os.truncate(_sparse(nbytes), 0)
    return Figure("files", "One file, 1 KB to 64 GiB (sparse)", panels)
