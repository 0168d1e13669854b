"""10,000 images of 3 x 32..96 x 32..96 bytes, about 123 MB, in memory and in a raw file."""

import functools
import pathlib
import sys
import warnings
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["COUNT", "Images", "Source", "images", "let_children_import", "nested"]

COUNT = 10_000


class Images(NamedTuple):
    """The elements, and what the peers want to know of them."""

    elements: list[torch.Tensor]
    arrays: list[np.ndarray]
    shapes: list[list[int]]
    offsets: list[int]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all."""
        return self.offsets[-1]

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Return them as safetensors wants them: a tensor for each name."""
        return {str(number): element for number, element in enumerate(self.elements)}

    @property
    def values(self) -> torch.Tensor:
        """Return all of them one after the other."""
        return torch.cat([element.view(-1) for element in self.elements])


@functools.cache
def images() -> Images:
    """Return the images, which benchmarks only read; made once in a process."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(32, 97, (COUNT, 2))
    shapes = np.column_stack((np.full(COUNT, 3), sizes))
    arrays = [rng.integers(0, 256, tuple(shape), np.uint8) for shape in shapes]
    offsets = np.concatenate(([0], shapes.prod(1).cumsum()))
    elements = [torch.from_numpy(array) for array in arrays]
    return Images(elements, arrays, shapes.tolist(), offsets.tolist())


def nested(elements: list[torch.Tensor]) -> torch.Tensor:
    """Return torch's nested tensor, without its warning about the prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(elements, layout=torch.strided)


class Source:
    """The images one by one, from a raw file: small to send, as joblib sends it with each task."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> np.ndarray:
        values, shapes, offsets = _source(self.path)
        return values[offsets[number] : offsets[number + 1]].reshape(shapes[number])


@functools.cache
def _source(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = np.fromfile(path + ".shapes", np.int64).reshape(-1, 3)
    offsets = np.concatenate(([0], shapes.prod(1).cumsum()))
    return np.memmap(path, np.uint8, "r"), shapes, offsets


def let_children_import() -> None:
    """Let processes that joblib starts from now on import this file.

    They get the path of this process and unpickle `Source`, whose module asv imports from a
    place that is not on the path.
    """
    place = str(pathlib.Path(__file__).resolve().parents[__name__.count(".")])
    if place not in sys.path:
        sys.path.append(place)
