"""Presenting the batch dimensions of containers otherwise, on the same memory."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmtensor.errors import ShapeError
from mmtensor.indexed import dummy, first_dimension, row
from mmtensor.leaves import present, rows_of
from mmtensor.tree import Tree

__all__ = [
    "dimension",
    "expand",
    "permute",
    "reshape",
    "split",
    "squeeze",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
]


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    if len(shape) == 1 and not isinstance(shape[0], int):
        try:
            return (operator.index(shape[0]),)
        except TypeError:
            shape = tuple(shape[0])
    return tuple(map(operator.index, shape))


def view(tree: Tree, shape: tuple[Any, ...]) -> Any:
    """Present the batch dimensions in another shape."""
    sizes = _sizes(shape)
    size = tree._batch_size
    if sizes == size or (sizes == (-1,) and len(size) == 1):
        return tree._same()
    new = dummy(size).view(sizes).shape
    if new == size:
        return tree._same()
    dims = len(size)
    plain = tuple(new)  # torch takes a torch.Size apart at twice the price
    view_, dim_ = Tensor.view, Tensor.dim

    def change(x: Tensor) -> Tensor:
        return view_(x, plain if dim_(x) == dims else (*plain, *x.shape[dims:]))

    return _shown(tree, change, "view", new)


def reshape(tree: Tree, shape: tuple[Any, ...]) -> Any:
    """Give the batch dimensions another shape, with a copy where a view will not do."""
    size = tree._batch_size
    new = dummy(size).reshape(_sizes(shape)).shape
    if new == size:
        return tree._shallow()
    dims = len(size)

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.reshape((*new, *leaf.shape[dims:]))
        if isinstance(leaf, str):
            return leaf
        return present(tree, lambda x: x, new, "reshape")  # it raises

    return tree._map(change, new)


def _shown(
    tree: Tree, change: Callable[[Tensor], Tensor], what: str, size: torch.Size | None = None
) -> Any:
    """Present the leaves as a function does; `size` is what it makes of the batch size."""
    if size is None:
        size = change(dummy(tree._batch_size)).shape
    return present(tree, change, size, what)._lock_as(tree)


def transpose(tree: Tree, dim0: int, dim1: int) -> Any:
    """Swap two batch dimensions."""
    dims = len(tree._batch_size)
    first, second = dimension(dim0, dims), dimension(dim1, dims)
    if first == second:
        return tree._same()
    transpose_ = Tensor.transpose
    return _shown(tree, lambda x: transpose_(x, first, second), "transpose")


def permute(tree: Tree, order: tuple[Any, ...]) -> Any:
    """Reorder the batch dimensions."""
    dims = len(tree._batch_size)
    wanted = tuple([dimension(dim, dims) for dim in _sizes(order)])
    if sorted(wanted) != list(range(dims)):
        raise ShapeError(f"permute needs each of {dims} batch dimensions once, got {wanted}.")
    if wanted == tuple(range(dims)):
        return tree._same()
    permute_ = Tensor.permute
    return _shown(tree, lambda x: permute_(x, (*wanted, *range(dims, x.dim()))), "permute")


def dimension(dim: int, dims: int, more: int = 0) -> int:
    """Return a batch dimension as a non-negative number.

    Parameters
    ----------
    dim, dims
        Which one, of how many.
    more
        1 where a new one may come behind the last.

    Raises
    ------
    IndexError
        If there is no such dimension.
    """
    if not -dims - more <= dim < dims + more:
        raise IndexError(f"dimension {dim} is out of range for {dims} batch dimensions.")
    return dim + dims + more if dim < 0 else dim


def unsqueeze(tree: Tree, dim: int) -> Any:
    """Add a batch dimension of size 1."""
    at = dimension(dim, len(tree._batch_size), 1)
    unsqueeze_ = Tensor.unsqueeze
    return _shown(tree, lambda x: unsqueeze_(x, at), "unsqueeze")


def squeeze(tree: Tree, dim: int | None) -> Any:
    """Remove a batch dimension of size 1, or all."""
    size = tree._batch_size
    if dim is None:
        gone = tuple([n for n, count in enumerate(size) if count == 1])
    else:
        at = dimension(dim, len(size))
        gone = (at,) if size[at] == 1 else ()
    if not gone:
        return tree._same()
    if size == (1,):
        return row(tree, 0)
    squeeze_: Any = Tensor.squeeze
    return _shown(tree, lambda x: squeeze_(x, gone), "squeeze")


def expand(tree: Tree, shape: tuple[Any, ...]) -> Any:
    """Repeat batch dimensions of size 1 without a copy, and add new ones in front."""
    size = tree._batch_size
    new = dummy(size).expand(_sizes(shape)).shape
    if new == size:
        return tree._same()
    dims = len(size)
    expand_ = Tensor.expand
    return _shown(tree, lambda x: expand_(x, (*new, *x.shape[dims:])), "expand", new)


def unbind(tree: Tree, dim: int) -> tuple[Any, ...]:
    """Return all elements along a batch dimension, as views."""
    size = tree._batch_size
    at = dimension(dim, len(size))
    count = size[at]
    if at:
        rest = torch.Size((*size[:at], *size[at + 1 :]))
        select_: Any = Tensor.select
        return tuple(
            [
                present(tree, lambda x, n=n: select_(x, at, n), rest, "unbind")._lock_as(tree)  # type: ignore[misc]
                for n in range(count)
            ]
        )
    rest = size[1:]
    if tree._locks:
        return tuple([tree._lazy(number, rest) for number in range(count)])
    leaves = tree._all()
    columns = [
        unbind(leaf, 0) if isinstance(leaf, Tree) else rows_of(leaf, count)
        for leaf in leaves.values()
    ]
    if not columns:
        return tuple([tree._make({}, rest) for _ in range(count)])
    keys = list(leaves)
    return tuple(
        [
            tree._make(dict(zip(keys, values, strict=True)), rest)
            for values in zip(*columns, strict=True)
        ]
    )


def split(tree: Tree, sizes: Any, dim: int, *, chunks: bool = False) -> tuple[Any, ...]:
    """Return consecutive parts along a batch dimension, as views."""
    at = dimension(dim, len(tree._batch_size))
    whole: Any = dummy(tree._batch_size)
    parts = whole.chunk(sizes, at) if chunks else whole.split(sizes, at)
    results = []
    start = 0
    narrow_ = Tensor.narrow
    for part in parts:
        stop = start + part.shape[at]
        if at:
            results.append(
                present(
                    tree,
                    lambda x, start=start, n=stop - start: narrow_(x, at, start, n),  # type: ignore[misc]
                    part.shape,
                    "split",
                )._lock_as(tree)
            )
        else:
            results.append(first_dimension(tree, slice(start, stop), part.shape))
        start = stop
    return tuple(results)
