"""One tensor as the peers keep it that have a format of their own."""

from typing import Any

import mmap_ninja
import safetensors.torch
import torch
from safetensors import safe_open

__all__ = ["open_slice", "open_whole", "write_ninja", "write_safetensors"]


def write_safetensors(path: str, tensor: torch.Tensor) -> str:
    """Write a file with one tensor named `x`; return its path."""
    safetensors.torch.save_file({"x": tensor}, path)
    return path


def open_slice(path: str) -> Any:
    """Return what can be indexed: it reads what is asked for, and copies it."""
    return safe_open(path, "pt").get_slice("x")


def open_whole(path: str) -> Any:
    """Return the tensor `x` of a file."""
    with safe_open(path, "pt") as file:
        return file.get_tensor("x")


def write_ninja(path: str, tensor: torch.Tensor) -> str:
    """Write a directory with one array; return its path."""
    mmap_ninja.np_from_ndarray(path, tensor.numpy())
    return path
