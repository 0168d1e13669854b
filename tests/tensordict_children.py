"""What child processes of the tests do with containers; spawn imports it by its name."""

import os

import torch

import mmtensor
from mmtensor import JaggedTensor


def describe(td):
    """Return everything that can be seen of a container: flags, classes, places, values."""
    leaves = {}
    for path, leaf in td.items(True, True):
        if isinstance(leaf, str | list):
            leaves[path] = leaf
        elif isinstance(leaf, JaggedTensor):
            leaves[path] = (leaf.shapes.tolist(), leaf.values.tolist(), leaf.dtype)
        else:
            where = mmtensor.locate(leaf)
            leaves[path] = (
                type(leaf).__name__,
                leaf.dtype,
                tuple(leaf.shape),
                leaf.tolist(),
                leaf.requires_grad,
                where and (where.path, where.mode),
            )
    state = (tuple(td.batch_size), td.is_locked, td.is_shared(), td.is_memmap())
    return type(td).__name__, state, leaves


def answer(source, results):
    """Describe every container that comes, write to it, and count descriptors, until None."""
    while (td := source.get()) is not None:
        described = describe(td)
        if "x" in td and not (td.is_memmap() and td["x"].mode == "r"):
            td.set_("x", torch.full_like(td["x"], 7))
        del td
        results.put((described, len(os.listdir("/proc/self/fd"))))
