"""How containers look when they are printed, and in notebooks."""

import html
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mmtensor.jagged import JaggedTensor
from mmtensor.leaves import mapping_under
from mmtensor.mapping import FileMapping
from mmtensor.shared_memory import SharedMapping
from mmtensor.tree import Tree

__all__ = ["as_html", "as_text"]

_LONGEST = 40


def _state(tree: Tree) -> str:
    parts = [f"batch_size={list(tree._batch_size)}"]
    if kind := tree._kind():
        parts.append(kind)
    elif tree._locks:
        parts.append("locked")
    directory = next((lock.directory for lock in tree._locks if lock.directory), "")
    owner = next((lock.owner() for lock in tree._locks if lock.directory), None)
    if directory and owner is tree:
        parts.append(f"directory={directory!r}")
    return ", ".join(parts)


def _where(leaf: Any) -> str:
    mapping = mapping_under(leaf)
    if isinstance(mapping, FileMapping):
        return f"file, mode {mapping.mode.name!r}"
    if isinstance(mapping, SharedMapping):
        return "shared memory"
    if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
        return str(leaf.device)
    return "memory"


def _what(leaf: Any) -> tuple[str, str, str]:
    """Return shape, dtype and place of a leaf, in words."""
    if isinstance(leaf, Tensor):
        return str(list(leaf.shape)), str(leaf.dtype).removeprefix("torch."), _where(leaf)
    if isinstance(leaf, JaggedTensor):
        dims = ", ".join(["*"] * leaf.ndim)
        return f"[{len(leaf)}, {dims}]", str(leaf.dtype).removeprefix("torch."), _where(leaf)
    if isinstance(leaf, list):
        return f"[{len(leaf)}]", "str", "memory"
    if isinstance(leaf, str):
        text = leaf if len(leaf) <= _LONGEST else leaf[: _LONGEST - 3] + "..."
        return repr(text), "str", "memory"
    return "", type(leaf).__name__, "memory"


def _rows(tree: Tree, depth: int) -> Iterator[tuple[int, str, Any]]:
    for key, leaf in tree._all().items():
        if isinstance(leaf, Tree):
            yield depth, key, _state_of_nested(leaf, tree)
            yield from _rows(leaf, depth + 1)
        else:
            yield depth, key, _what(leaf)


def _state_of_nested(leaf: Tree, parent: Tree) -> str:
    return "" if leaf._batch_size == parent._batch_size else str(list(leaf._batch_size))


def as_text(tree: Tree) -> str:
    """Return one line for each leaf: key, shape, dtype and where the data is."""
    lines = [f"{type(tree).__name__}({_state(tree)})"]
    for depth, key, what in _rows(tree, 1):
        name = "    " * depth + (key if key.isidentifier() else repr(key))
        if isinstance(what, str):
            lines.append(f"{name}: {what}".rstrip() if what else f"{name}:")
        else:
            shape, dtype, where = what
            lines.append(f"{name}: {shape} {dtype}, {where}")
    return "\n".join(lines)


def as_html(tree: Tree) -> str:
    """Return the same as a table."""
    rows = []
    for depth, key, what in _rows(tree, 0):
        cells = (what, "", "") if isinstance(what, str) else what
        indent = f' style="padding-left:{1 + 1.5 * depth}em;text-align:left"'
        rows.append(
            f"<tr><td{indent}>{html.escape(key)}</td>"
            + "".join([f"<td>{html.escape(cell)}</td>" for cell in cells])
            + "</tr>"
        )
    head = "".join([f"<th>{name}</th>" for name in ("key", "shape", "dtype", "data")])
    title = html.escape(f"{type(tree).__name__}({_state(tree)})")
    return (
        f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
