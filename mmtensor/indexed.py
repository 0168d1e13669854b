"""Indexing containers: elements, slices, gathering, assigning."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from mmtensor.allocation import new_rows
from mmtensor.copying import is_traced
from mmtensor.errors import DtypeError, ShapeError
from mmtensor.indexing import rows
from mmtensor.jagged import JaggedTensor
from mmtensor.leaves import accept, advanced, as_row, name_path, present
from mmtensor.prefetch import FEW_ROWS, has_bytes, read_ahead
from mmtensor.storage import refuse_write
from mmtensor.tensor import MemoryMappedTensor
from mmtensor.tree import Tree, index_leaf

__all__ = ["assign", "dummy", "first_dimension", "getitem", "row"]

_index_select = torch.index_select
# A tensor of any batch size that takes no memory: torch itself tells what an index or a
# view makes of the batch dimensions, errors included.
_one = torch.zeros((), dtype=torch.uint8, device="cpu")


def dummy(batch_size: torch.Size) -> Tensor:
    """Return a tensor that has a batch size for its shape, and one byte of memory."""
    return _one.expand(batch_size)


def row(tree: Tree, index: int) -> Any:
    """Return one element, without its batch dimension."""
    size = tree._batch_size
    if not size:
        raise IndexError("a TensorDict without batch dimensions cannot be indexed.")
    length = size[0]
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of range for a batch of {length}.")
    return first_dimension(tree, index, size[1:])


def first_dimension(tree: Tree, index: int | slice, batch_size: torch.Size) -> Any:
    """Return an element or consecutive ones; `batch_size` is that of the result."""
    if tree._locks:
        return tree._lazy(index, batch_size)
    return tree._make(
        {key: index_leaf(leaf, index) for key, leaf in tree._all().items()},
        batch_size,
    )


def getitem(tree: Tree, index: Any) -> Any:
    """Do ``tree[index]`` for what is no key and no plain integer."""
    size = tree._batch_size
    if (number := as_row(index)) is not None:
        return row(tree, number)
    if not size and index is not None and index is not Ellipsis and index != ():
        raise IndexError("a TensorDict without batch dimensions cannot be indexed.")
    if isinstance(index, slice):
        length = len(range(*index.indices(size[0])))
        if index.step is not None and index.step < 1:
            raise ValueError(f"a slice must have a positive step, got {index.step}.")
        return first_dimension(tree, index, torch.Size((length, *size[1:])))
    if isinstance(index, tuple) or index is None or index is Ellipsis:
        parts = index if isinstance(index, tuple) else (index,)
        full = _without_ellipsis(parts, len(size))
        if all(part is None or type(part) in (int, slice) for part in full):
            return _basic(tree, full)
        return _advanced(tree, full, None)
    if is_compiling():  # Dynamo knows torch's own road only
        return _advanced(tree, index, None)
    ids = rows(index, size[0])
    if ids is None and isinstance(index, np.ndarray):
        index = torch.from_numpy(np.array(index))
    return _advanced(tree, index, ids)


def _without_ellipsis(parts: tuple[Any, ...], dims: int) -> tuple[Any, ...]:
    """Write out ``...``, which stands for batch dimensions only."""
    parts = tuple([part if (number := as_row(part)) is None else number for part in parts])
    used = 0
    for part in parts:
        if part is None or part is Ellipsis:
            continue
        is_mask = getattr(part, "dtype", None) in (torch.bool, np.dtype(bool))
        used += part.ndim if is_mask else 1
    if used > dims:
        raise IndexError(f"too many indices for a TensorDict of {dims} batch dimensions: {used}.")
    count = sum(part is Ellipsis for part in parts)
    if count > 1:
        raise IndexError("an index can have one ellipsis (...) only.")
    if not count:
        return parts
    at = next(number for number, part in enumerate(parts) if part is Ellipsis)
    return (*parts[:at], *[slice(None)] * (dims - used), *parts[at + 1 :])


def _basic(tree: Tree, index: tuple[Any, ...]) -> Any:
    while index and isinstance(index[-1], slice) and index[-1] == slice(None):
        index = index[:-1]
    if len(index) == 1 and index[0] is not None:
        return getitem(tree, index[0])
    size = dummy(tree._batch_size)[index].shape
    if not index:
        return tree._same()
    getitem_ = Tensor.__getitem__
    return present(tree, lambda x: getitem_(x, index), size, "this index")._lock_as(tree)


def _advanced(tree: Tree, index: Any, ids: Tensor | None) -> Any:
    if ids is not None:
        size = torch.Size((*ids.shape, *tree._batch_size[1:]))
    else:
        size = dummy(tree._batch_size)[index].shape
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
    return _gathered(tree, index, ids, size, len(tree._batch_size))


def _gathered(tree: Tree, index: Any, ids: Tensor | None, size: torch.Size, dims: int) -> Any:
    leaves: dict[str, Any] = {}
    quick = ids if ids is not None and ids.dim() == 1 and not is_traced() else None
    many = quick is not None and has_bytes(quick) and quick.numel() >= FEW_ROWS
    many = many and not is_compiling()
    for key, leaf in tree._all().items():
        kind = type(leaf)
        if quick is not None and (kind is MemoryMappedTensor or (kind is Tensor and leaf.is_cpu)):
            out = None
            if many and kind is MemoryMappedTensor:
                read_ahead(leaf, quick)
                out = new_rows(leaf, quick.numel())
            try:
                if out is None:
                    leaves[key] = _index_select(leaf, 0, quick)
                else:
                    leaves[key] = _index_select(leaf, 0, quick, out=out)
                continue
            except (IndexError, RuntimeError):
                pass  # negative numbers, or a dtype that it does not know
        if isinstance(leaf, Tree):
            nested = torch.Size((*size, *leaf._batch_size[dims:]))
            leaves[key] = _gathered(leaf, index, ids, nested, dims)
        else:
            leaves[key] = advanced(leaf, index, ids)
    return tree._make(leaves, size)


def assign(tree: Tree, index: Any, value: Any, kind: type[Tree]) -> None:
    """Do ``tree[index] = value``: write into the memory of the leaves.

    Parameters
    ----------
    tree
        Where to write.
    index
        As for `getitem`.
    value
        A container or mapping with keys of `tree`, or a tensor or number for all leaves.
    kind
        Class of containers, for mappings.

    Raises
    ------
    KeyError
        If the value has a key that the container has not.
    """
    index = _without_ellipsis(
        index if isinstance(index, tuple) else (index,), len(tree._batch_size)
    )
    size = dummy(tree._batch_size)[index].shape
    if isinstance(value, Tree):
        pairs = list(_pairs(tree, value, ()))
    elif hasattr(value, "keys"):
        made: Any = kind
        pairs = list(_pairs(tree, made(value, size), ()))
    else:
        pairs = [pair for pair in ((*pair, value) for pair in tree._flat()) if not _is_text(pair)]
    dims = len(tree._batch_size)
    # All is looked at before anything is written.
    for path, leaf, new in pairs:
        if isinstance(leaf, Tensor):
            refuse_write(leaf, f"writing to leaf {name_path(path)}")
            if isinstance(new, Tensor):
                _check_fits(path, new, (*size, *leaf.shape[dims:]))
        elif isinstance(leaf, JaggedTensor):
            refuse_write(leaf._parts.values, f"writing to leaf {name_path(path)}")
            _check_elements(path, leaf, index, new)
        else:
            _check_text(path, leaf, index, new, writeable=not tree._kind())
    for path, leaf, new in pairs:
        _assign_leaf(path, leaf, index, new)


def _is_text(pair: tuple[Any, Any, Any]) -> bool:
    return isinstance(pair[1], str | list)


def _check_fits(path: Any, new: Tensor, shape: tuple[int, ...]) -> None:
    try:
        new.expand(shape)
    except RuntimeError:
        raise RuntimeError(
            f"leaf {name_path(path)} takes shape {list(shape)} at this index, got "
            f"{list(new.shape)}."
        ) from None


def _check_elements(path: Any, leaf: JaggedTensor, index: Any, new: Any) -> None:
    """Raise unless elements, or one for all of them, have the shapes and the dtype of a leaf's."""
    numbers = _numbers(path, leaf, index)
    if not isinstance(new, Tensor | JaggedTensor):
        return  # a number, for all that is in them
    if new.dtype != leaf.dtype:
        raise DtypeError(
            f"the elements of leaf {name_path(path)} have dtype {leaf.dtype}, got {new.dtype}. "
            "Nothing is converted silently: convert the value first."
        )
    there = leaf._table()[np.atleast_1d(numbers)]
    if isinstance(new, Tensor):
        shapes = np.array([new.shape] * len(there), np.int64)
    else:
        shapes = new._table()
    if len(shapes) != len(there):
        raise ShapeError(
            f"leaf {name_path(path)} takes {len(there)} elements at this index, got {len(shapes)}."
        )
    if shapes.shape != there.shape or (shapes != there).any():
        for mine, got in zip(there.tolist(), shapes.tolist(), strict=True):
            if mine != got:
                raise ShapeError(
                    f"an element of leaf {name_path(path)} has shape {mine}, which cannot change, "
                    f"got {got}."
                )


def _check_text(path: Any, leaf: Any, index: Any, new: Any, *, writeable: bool) -> None:
    numbers = None if isinstance(leaf, str) else _numbers(path, leaf, index)
    if numbers is None:
        there: Any = leaf
    else:
        there = leaf[numbers] if isinstance(numbers, int) else [leaf[n] for n in numbers]
    if there == new:
        return
    if not writeable or isinstance(leaf, str):
        raise RuntimeError(
            f"leaf {name_path(path)} is text, which cannot be written in place here. Use "
            "td.set(key, value) to replace it."
        )
    if type(new) is not type(there) or (isinstance(there, list) and len(new) != len(there)):
        raise RuntimeError(f"leaf {name_path(path)} takes text like {there!r}, got {new!r}.")


def _numbers(path: Any, leaf: Any, index: tuple[Any, ...]) -> Any:
    """Return an index of rows as an integer, or as the integers that it means."""
    (only,) = index if len(index) == 1 else (slice(None) if not index else None,)
    if isinstance(only, int) and not isinstance(only, bool):
        return range(len(leaf))[only]
    if isinstance(only, slice):
        return range(len(leaf))[only]
    ids = rows(only, len(leaf))
    if ids is None or ids.dim() != 1:
        raise IndexError(
            f"leaf {name_path(path)} has rows, and takes integers, a slice, ids or a mask for "
            f"index, got {index!r}."
        )
    return ids.tolist()


def _pairs(tree: Tree, value: Tree, prefix: tuple[str, ...]) -> Any:
    for key, new in value._all().items():
        path = (*prefix, key)
        try:
            leaf = tree._leaves[key]
        except KeyError:
            raise KeyError(
                f"{name_path(path)} is no key of the TensorDict that is written to, which has "
                f"{', '.join(map(repr, tree._leaves)) or 'none'}."
            ) from None
        if isinstance(leaf, Tree) != isinstance(new, Tree):
            raise KeyError(f"{name_path(path)} is nested on one side only.")
        if isinstance(leaf, Tree):
            yield from _pairs(leaf, new, path)
        else:
            yield path, leaf, new


def _assign_leaf(path: Any, leaf: Any, index: tuple[Any, ...], new: Any) -> None:
    if isinstance(leaf, Tensor):
        if not isinstance(new, Tensor | int | float | complex):
            new = accept(path, new, torch.Size(), Tree)
        leaf[index[0] if len(index) == 1 else index] = new
        return
    if isinstance(leaf, str):
        return
    numbers = _numbers(path, leaf, index)
    many = not isinstance(numbers, int)
    for at, number in enumerate(numbers if many else [numbers]):
        value = new
        if isinstance(new, JaggedTensor | list) and many:
            value = new[at]
        if isinstance(leaf, JaggedTensor) and isinstance(value, int | float | complex):
            leaf[number].fill_(value)
        else:
            # Of strings that came from files, and are unlocked by now, as well.
            put: Any = list.__setitem__ if isinstance(leaf, list) else type(leaf).__setitem__
            put(leaf, number, value)
