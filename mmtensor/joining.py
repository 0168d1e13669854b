"""Stacking and concatenating containers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtensor.jagged import JaggedTensor
from mmtensor.leaves import to_plain
from mmtensor.shaping import dimension
from mmtensor.tree import Tree

__all__ = ["cat", "stack"]


def _alike(trees: Any, what: str) -> list[Tree]:
    items = list(trees)
    if not items:
        raise RuntimeError(f"{what} needs at least one TensorDict.")
    for number, item in enumerate(items):
        if not isinstance(item, Tree):
            raise TypeError(f"{what} takes TensorDicts only, got {type(item)!r} at {number}.")
    keys = items[0]._names()
    for item in items:
        if item._names() != keys:
            odd = sorted(set(item._names()) ^ set(keys))
            raise KeyError(
                f"{what} needs the same keys everywhere, but {odd} are not in all TensorDicts."
            )
    return items


def stack(trees: Any, dim: int = 0) -> Any:
    """Do `torch.stack` for containers."""
    items = _alike(trees, "torch.stack")
    size = items[0]._batch_size
    for item in items:
        if item._batch_size != size:
            raise RuntimeError(
                f"torch.stack needs one batch size, got {list(size)} and {list(item._batch_size)}."
            )
    at = dimension(dim, len(size), 1)
    new = torch.Size((*size[:at], len(items), *size[at:]))
    return _joined(items, new, lambda leaves: torch.stack(leaves, at), at, stacking=True)


def cat(trees: Any, dim: int = 0) -> Any:
    """Do `torch.cat` for containers."""
    items = _alike(trees, "torch.cat")
    size = items[0]._batch_size
    at = dimension(dim, len(size))
    for item in items:
        other = item._batch_size
        if len(other) != len(size) or any(
            a != b for n, (a, b) in enumerate(zip(size, other, strict=True)) if n != at
        ):
            raise RuntimeError(
                "torch.cat needs batch sizes that differ in one dimension only, got "
                f"{list(size)} and {list(other)}."
            )
    count = sum(item._batch_size[at] for item in items)
    new = torch.Size((*size[:at], count, *size[at + 1 :]))
    return _joined(items, new, lambda leaves: torch.cat(leaves, at), at, stacking=False)


def _joined(
    items: list[Tree], size: torch.Size, join: Callable[[Any], Tensor], at: int, *, stacking: bool
) -> Any:
    leaves: dict[str, Any] = {}
    for key in items[0]._names():
        parts = [item._leaves[key] for item in items]
        first = parts[0]
        if isinstance(first, Tree):
            leaves[key] = (stack if stacking else cat)(parts, at)
        elif isinstance(first, Tensor):
            try:
                leaves[key] = join(parts)
            except (RuntimeError, TypeError) as error:
                raise RuntimeError(f"leaf {key!r}: {error}") from None
        else:
            leaves[key] = _joined_rows(key, parts, size, stacking=stacking)
    return items[0]._make(leaves, size)


def _joined_elements(key: str, parts: list[JaggedTensor]) -> JaggedTensor:
    """Copy jagged tensors into one, in regular memory."""
    kinds = {(part.dtype, part.ndim) for part in parts}
    if len(kinds) > 1:
        shown = " and ".join(sorted(f"{dtype} with {ndim} dimensions" for dtype, ndim in kinds))
        raise RuntimeError(f"leaf {key!r} cannot be joined: its elements are of {shown}.")
    for part in parts:
        part._check()
    values = torch.cat([to_plain(part.values) for part in parts])
    return JaggedTensor(values, np.concatenate([part._table() for part in parts]))


def _joined_rows(key: str, parts: list[Any], size: torch.Size, *, stacking: bool) -> Any:
    """Join strings, lists of strings or jagged leaves."""
    # Strings of containers on files are of classes of their own.
    kinds = {next((k for k in (str, list) if isinstance(part, k)), type(part)) for part in parts}
    if kinds == {str}:
        if stacking and len(size) == 1:
            return parts
        if len(set(parts)) == 1:
            return parts[0]
    elif kinds == {list} and not stacking:
        return [text for part in parts for text in part]
    elif kinds == {JaggedTensor} and not stacking:
        return _joined_elements(key, parts)
    raise RuntimeError(
        f"leaf {key!r} cannot be joined: jagged leaves and lists of strings have one dimension of "
        "elements, and strings that differ need one to become a list."
    )
