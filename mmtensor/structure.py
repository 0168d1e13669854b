"""Containers as nodes of torch's pytrees."""

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mmtensor.jagged import JaggedTensor
from mmtensor.tree import Tree

__all__ = ["register_node"]

# Tensors and nested TensorDicts are children; text is part of the structure, so that a
# function of tensors can be mapped over all leaves.
_Context = tuple[tuple[str, ...], tuple[int, ...], tuple[tuple[str, Any], ...]]


def _flatten(tree: Tree) -> tuple[list[Any], _Context]:
    keys: list[str] = []
    values: list[Any] = []
    texts: list[tuple[str, Any]] = []
    for key, leaf in tree._all().items():
        keys.append(key)
        if isinstance(leaf, str):
            texts.append((key, leaf))
        elif isinstance(leaf, list):
            texts.append((key, tuple(leaf)))
        else:
            values.append(leaf)
    return values, (tuple(keys), tuple(tree._batch_size), tuple(texts))


def _flatten_with_keys(tree: Tree) -> tuple[list[Any], _Context]:
    values, context = _flatten(tree)
    text = {key for key, _ in context[2]}
    names = [key for key in context[0] if key not in text]
    return [
        (pytree.MappingKey(key), value) for key, value in zip(names, values, strict=True)
    ], context


def _unflatten(kind: type[Tree], values: Any, context: _Context) -> Tree:
    keys, size, texts = context
    text = dict(texts)
    children = iter(values)
    leaves = {}
    for key in keys:
        if key in text:
            found = text[key]
            leaves[key] = list(found) if isinstance(found, tuple) else found
        else:
            leaves[key] = next(children)
    # A function may have changed shapes, or put anything in the place of tensors.
    shapes = [getattr(leaf, "shape", None) for leaf in leaves.values() if not _is_rows(leaf)]
    kept = all(
        isinstance(shape, tuple) and tuple(shape[: len(size)]) == tuple(size) for shape in shapes
    )
    return kind._make(leaves, torch.Size(size if kept else ()))


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, str | list | JaggedTensor)


def register_node(kind: type[Tree], name: str) -> None:
    """Let `torch.utils._pytree`, and with it `torch.compile`, see through a class.

    Parameters
    ----------
    kind
        Of containers.
    name
        Under which `torch.export` writes it.
    """
    pytree.register_pytree_node(
        kind,
        _flatten,
        functools.partial(_unflatten, kind),
        serialized_type_name=name,
        flatten_with_keys_fn=_flatten_with_keys,
    )
