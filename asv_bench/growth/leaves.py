"""Over the number of leaves of a container, 10 to 3000: saving it and loading it."""

import itertools
import os
from collections.abc import Callable
from typing import Any

import safetensors.torch
import tensordict
import torch

import mmtensor
from asv_bench.benchmarks.common import new_directory, values
from asv_bench.growth.curves import (
    LINEAR,
    Curve,
    Figure,
    Operation,
    Panel,
    Settings,
    measure,
)

__all__ = ["measure_leaves"]

_COUNTS = (10, 30, 100, 300, 1000, 3000)
_LENGTH = 256  # floats: 1 KB
_ROUNDS = 5  # of them each writes thousands of files
_OVER = "number of leaves"
_numbers = itertools.count()
_KINDS: dict[str, Any] = {
    "mmtensor": mmtensor.TensorDict,
    "tensordict": tensordict.TensorDict,
}


class _Leaves:
    """Marks the directory."""


def _source(count: int) -> dict[str, torch.Tensor]:
    return {f"leaf{number}": values(_LENGTH) + number for number in range(count)}


def _saver(library: str, count: int) -> Callable[[str], Any]:
    source = _source(count)
    if library == "safetensors":
        return lambda path: safetensors.torch.save_file(source, path)
    if library == "torch":
        return lambda path: torch.save(source, path)
    memmap: Callable[[str], Any] = _KINDS[library](source, [_LENGTH]).memmap
    return memmap


def _load_safetensors(path: str) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no dict


def _loader(library: str, count: int) -> Callable[[], Any]:
    path = _new_path()
    _saver(library, count)(path)
    if library == "safetensors":
        return lambda: _load_safetensors(path)
    if library == "torch":
        return lambda: torch.load(path, mmap=True, weights_only=True)
    load = _KINDS[library].load_memmap
    return lambda: load(path)


def _new_path() -> str:
    """Return a new path, in a directory of its own: `common.root` says why."""
    directory = f"{new_directory(_Leaves)}/{next(_numbers)}"
    os.mkdir(directory)
    return f"{directory}/saved"


class _Saving:
    """A new path for each call."""

    def __init__(self, library: str, count: int) -> None:
        self.call = _saver(library, count)

    def before(self, library: str) -> str:  # noqa: ARG002
        """Make a path."""
        return _new_path()

    def after(self, argument: str) -> None:
        """Keep the files: deleting them would slow down who comes next."""


_ALL = ("mmtensor", "tensordict", "safetensors", "torch")
_OPERATIONS = (
    Operation("save", _OVER, _Saving, _ALL, slow=1),
    Operation("load", _OVER, _loader, _ALL, slow=1),
)


def _for_each(curves: list[Curve]) -> list[Curve]:
    return [
        Curve(curve.library, {count: seconds / count for count, seconds in curve.points.items()})
        for curve in curves
    ]


def measure_leaves(settings: Settings) -> Figure:
    """Measure both, and divide by the number of leaves."""
    counts = settings.sizes(*_COUNTS)
    few = settings._replace(rounds=min(settings.rounds, _ROUNDS))
    both = [(one, measure(one, counts, few)) for one in _OPERATIONS]
    panels = [Panel(one.title, _OVER, curves, LINEAR) for one, curves in both]
    panels += [
        Panel(f"{one.title}, per leaf", _OVER, _for_each(curves), None, y_label="time per leaf")
        for one, curves in both
    ]
    return Figure("leaves", "A container of 10 to 3000 leaves of 1 KB", panels)
