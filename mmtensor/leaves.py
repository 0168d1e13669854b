"""What a leaf may be, and what is done to one, whichever kind it is of."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from mmtensor.bridge import to_torch
from mmtensor.indexing import gather
from mmtensor.jagged import JaggedTensor
from mmtensor.mapping import FileMapping
from mmtensor.mapping import Mapping as MemoryMap
from mmtensor.storage import HAVE_GUARD, refuse_write
from mmtensor.tensor import MemoryMappedTensor
from mmtensor.texts import is_texts
from mmtensor.tree import DEEPEST, Tree

__all__ = [
    "DENSE_TYPES",
    "accept",
    "advanced",
    "as_row",
    "check_batch",
    "clone",
    "is_on_file",
    "mapping_under",
    "name_path",
    "present",
    "rows_of",
    "standalone",
    "to_plain",
    "too_deep",
    "write",
]

# The classes that need no further look when they are set.
DENSE_TYPES = frozenset((Tensor, MemoryMappedTensor, torch.nn.Parameter))
_REGULAR_TYPES = DENSE_TYPES - {MemoryMappedTensor}
_copy = Tensor.copy_


def name_path(path: Any) -> str:
    """Return a key as messages write it: ``'a'``, or ``('a', 'b')`` for a nested one."""
    return repr(path[0]) if isinstance(path, tuple) and len(path) == 1 else repr(path)


def check_batch(key: Any, shape: Any, batch_size: torch.Size) -> None:
    """Raise unless a shape starts with the batch size.

    Raises
    ------
    RuntimeError
        It names the key, the shape and the batch size.
    """
    if shape[: len(batch_size)] != batch_size:
        raise RuntimeError(
            f"the shape of leaf {name_path(key)} must start with the batch size "
            f"{list(batch_size)}, got {list(shape)}."
        )


def accept(key: Any, value: Any, batch_size: torch.Size, kind: type[Tree]) -> Any:
    """Return a value as a leaf of a container.

    Parameters
    ----------
    key
        For messages.
    value
        A tensor, nested tensor, JaggedTensor, array, number, string, list of strings,
        mapping or container.
    batch_size
        That of the container.
    kind
        Class of the container, for mappings.

    Raises
    ------
    RuntimeError
        If it does not have the batch size.
    TypeError
        If it can be no leaf.
    """
    if isinstance(value, Tensor):
        if value.is_nested:
            value = JaggedTensor.from_nested(value.detach())
        else:
            check_batch(key, value.shape, batch_size)
            return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, JaggedTensor):
        _check_rows(key, "a JaggedTensor", len(value), batch_size)
        return value
    if is_texts(value):
        _check_rows(key, "a list of strings", len(value), batch_size)
        return list(value)
    if isinstance(value, Tree):
        return _fit(key, value, batch_size)
    if isinstance(value, Mapping):
        made: Any = kind.__new__(kind)
        made._fill(value, batch_size, key if isinstance(key, tuple) else (key,))
        return made
    tensor = _as_tensor(key, value)
    check_batch(key, tensor.shape, batch_size)
    return tensor


def too_deep(path: tuple[str, ...]) -> ValueError:
    """Say that containers are in each other for ever, or nearly so."""
    return ValueError(
        f"a TensorDict can be {DEEPEST} levels deep, and cannot contain itself, as key "
        f"{name_path(path[:3])} and so on."
    )


def _as_tensor(key: Any, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "US":
            raise TypeError(
                f"leaf {name_path(key)} must be of a dtype that torch has, got an array of "
                "strings. Pass a list of strings: array.astype(str).tolist()."
            )
        return to_torch(value)
    if not isinstance(value, bool | int | float | complex | np.generic | list | tuple):
        raise TypeError(
            f"leaf {name_path(key)} must be a tensor, JaggedTensor, array, number, string, list "
            f"of strings, dict or TensorDict, got {type(value)!r}."
        )
    try:
        if isinstance(value, list | tuple) and value and isinstance(value[0], np.ndarray):
            return to_torch(np.stack(value))  # torch takes each number out, and warns of it
        return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        way = ""
        parts = value if isinstance(value, list | tuple) else ()
        if any(isinstance(part, Tensor | np.ndarray) for part in parts):
            way = " Pass torch.stack(tensors), or JaggedTensor.from_tensors(tensors)."
        raise TypeError(
            f"leaf {name_path(key)} cannot be made a tensor: {str(error).rstrip('.')}.{way}"
        ) from None


def _check_rows(key: Any, what: str, length: int, batch_size: torch.Size) -> None:
    if len(batch_size) != 1:
        raise RuntimeError(
            f"leaf {name_path(key)} is {what}, which has one dimension of elements, so the batch "
            f"size must have one as well, got {list(batch_size)}."
        )
    if length != batch_size[0]:
        raise RuntimeError(
            f"the shape of leaf {name_path(key)} must start with the batch size "
            f"{list(batch_size)}, got {what} of {length}."
        )


def _fit(key: Any, tree: Tree, batch_size: torch.Size) -> Tree:
    """Return a container to nest: as it is, or a shallow copy with a longer batch size."""
    size = tree._batch_size
    if size[: len(batch_size)] == batch_size:
        return tree
    if len(size) >= len(batch_size):
        check_batch(key, size, batch_size)
    copy = tree._make({}, batch_size)
    for name, leaf in tree._all().items():
        path = (*key, name) if isinstance(key, tuple) else (key, name)
        copy._leaves[name] = accept(path, leaf, batch_size, type(tree))
    return copy


def mapping_under(leaf: Any) -> MemoryMap | None:
    """Return the mapping that holds the values of a tensor or JaggedTensor, or None."""
    if isinstance(leaf, JaggedTensor):
        leaf = leaf._parts.values
    if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
        return None
    try:
        return getattr(leaf.untyped_storage(), "mapping", None)
    except (RuntimeError, NotImplementedError):  # no storage: sparse, wrapped
        return None


def clone(leaf: Any) -> Any:
    """Return a copy of a leaf in regular memory."""
    if isinstance(leaf, Tensor):
        return leaf.clone()
    if isinstance(leaf, JaggedTensor):
        return leaf._compact()
    return list(leaf) if isinstance(leaf, list) else leaf


def standalone(leaf: Any) -> Any:
    """Return a leaf for a checkpoint, which saves whole storages: a copy, or all of a storage."""
    if type(leaf) in _REGULAR_TYPES and leaf.layout is torch.strided and not leaf.__dict__:
        storage = leaf.untyped_storage()
        if storage.nbytes() == leaf.nbytes and getattr(storage, "mapping", None) is None:
            return leaf
    return clone(leaf)


def to_plain(leaf: Any) -> Any:
    """Return a leaf on the same memory without the class `MemoryMappedTensor`."""
    return leaf.as_subclass(Tensor) if type(leaf) is MemoryMappedTensor else leaf


def advanced(leaf: Any, index: Any, ids: Tensor | None) -> Any:
    """Gather from a leaf along its first dimension, into regular memory.

    Parameters
    ----------
    leaf
        Of any kind but containers.
    index
        As it came in brackets.
    ids
        What `indexing.rows` made of it; None: only torch knows what it means.
    """
    if isinstance(leaf, Tensor):
        if ids is None or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            # MemoryMappedTensor keeps its class only on its own memory.
            return leaf[index]
        return leaf[index] if leaf.requires_grad else gather(leaf, index, ids)
    if isinstance(leaf, str):
        return leaf
    numbers = ids if ids is not None else torch.as_tensor(index, device="cpu")
    # uint8 is a mask to torch, and so to the tensors beside this leaf.
    if numbers.dtype in (torch.bool, torch.uint8) and numbers.dim() == 1:
        if len(numbers) != len(leaf):
            raise IndexError(f"a mask of {len(numbers)} does not fit {len(leaf)} elements.")
        numbers = numbers.nonzero().view(-1)
    if numbers.dim() != 1:
        raise IndexError(
            f"jagged leaves and lists of strings take an index of one dimension, got {index!r}."
        )
    if isinstance(leaf, JaggedTensor):
        return leaf[numbers]
    return [leaf[number] for number in numbers.tolist()]


def rows_of(leaf: Any, count: int) -> Any:
    """Return all `count` elements of a leaf along its first dimension, as views."""
    kind = type(leaf)
    if kind is MemoryMappedTensor or isinstance(leaf, Tensor | JaggedTensor):
        return leaf.unbind()
    return [leaf] * count if kind is str else leaf


def present(
    tree: Tree, change: Callable[[Tensor], Tensor], batch_size: torch.Size, what: str
) -> Any:
    """Return a view of a container: each tensor presented otherwise, on the same memory.

    Parameters
    ----------
    tree
        Of which container.
    change
        Called with every tensor, nested ones too.
    batch_size
        That of the result.
    what
        Name of the operation, for messages.

    Raises
    ------
    RuntimeError
        If a leaf has one dimension of elements that cannot be anything else.
    """
    marked = not is_compiling()  # compiled code sees regular tensors

    def leaf(value: Any) -> Any:
        if type(value) is MemoryMappedTensor:
            result = change(value)
            if marked:
                result.__class__ = MemoryMappedTensor
            return result
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, str):
            return value
        raise RuntimeError(
            f"{what} does not go with jagged leaves and lists of strings, whose elements lie in "
            f"one dimension, and leaf {_key_of(tree, value)} is one. Leave it out: "
            "td.exclude(key)."
        )

    return tree._map(leaf, batch_size)


def _key_of(tree: Tree, value: Any) -> str:
    for path, leaf in tree._flat():
        if leaf is value:
            return name_path(path)
    return "?"


def write(key: Any, leaf: Any, value: Any, where: str = "") -> None:
    """Write a value into the memory of a leaf.

    Parameters
    ----------
    key
        For messages.
    leaf
        Of any kind but containers.
    value
        Of the same shape.
    where
        Kind of the container; text cannot be written in place where that is a promise.

    Raises
    ------
    RuntimeError
        If the shape is another one.
    ReadOnlyError
        If the leaf was opened with mode ``"r"``.
    """
    if isinstance(leaf, Tensor):
        if not isinstance(value, Tensor):
            value = _as_tensor(key, value)
        if value.shape != leaf.shape:
            raise RuntimeError(
                f"the shape of leaf {name_path(key)} is {list(leaf.shape)} and cannot change in "
                f"place, got {list(value.shape)}."
            )
        _write_dense(key, leaf, value)
    elif isinstance(leaf, JaggedTensor):
        _write_jagged(key, leaf, value)
    elif leaf != value:
        _write_text(key, leaf, value, where)


def _write_dense(key: Any, leaf: Tensor, value: Tensor) -> None:
    if type(leaf) is not MemoryMappedTensor:
        leaf.copy_(value)
        return
    if not HAVE_GUARD:
        refuse_write(leaf, f"writing to leaf {name_path(key)}")
    try:
        _copy(leaf, value.detach() if value.requires_grad else value)
    except RuntimeError:
        refuse_write(leaf, f"writing to leaf {name_path(key)}")  # says it better
        raise


def _write_text(key: Any, leaf: Any, value: Any, where: str) -> None:
    if where:
        raise RuntimeError(
            f"leaf {name_path(key)} is text, which cannot be written in place: this TensorDict is "
            f"{where}. Save another one, or take td.clone(recurse=False)."
        )
    if not isinstance(leaf, list) or not is_texts(value) or len(value) != len(leaf):
        raise RuntimeError(
            f"leaf {name_path(key)} is text and takes text of the same kind and length in place, "
            f"got {type(value)!r}. Use td.set(key, value) to replace it."
        )
    list.__setitem__(leaf, slice(None), value)  # from files, and unlocked by now, as well


def _write_jagged(key: Any, leaf: JaggedTensor, value: Any) -> None:
    if not isinstance(value, JaggedTensor):
        value = JaggedTensor.from_tensors(value)
    if value._table().tolist() != leaf._table().tolist():
        raise RuntimeError(
            f"the shapes of the elements of leaf {name_path(key)} cannot change in place."
        )
    refuse_write(leaf._parts.values, f"writing to leaf {name_path(key)}")
    if leaf._contiguous() is not None and leaf.dtype == value.dtype:
        leaf.values.copy_(value.values)
        return
    for number in range(len(leaf)):
        leaf[number] = value[number]


def is_on_file(leaf: Any) -> bool:
    """Whether a leaf is memory-mapped; text is where the directory is read."""
    if isinstance(leaf, str | list):
        return True
    return isinstance(leaf, MemoryMappedTensor | JaggedTensor) and isinstance(
        mapping_under(leaf), FileMapping
    )


def as_row(index: Any) -> int | None:
    """Return an index as an integer if it is one, however it is written."""
    if isinstance(index, bool | np.bool_) or (
        isinstance(index, Tensor) and (index.dim() or index.dtype is torch.bool)
    ):
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None
