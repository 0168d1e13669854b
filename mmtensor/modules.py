"""Modules and state dicts as trees of tensors, and back."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmtensor.leaves import name_path, to_plain
from mmtensor.tree import Tree

__all__ = ["from_module", "from_state_dict", "to_module", "to_state_dict"]

_NO_BATCH = torch.Size()


def from_module(kind: type[Tree], module: nn.Module) -> Any:
    """Return the parameters and buffers of a module, nested as its submodules are."""
    _check_module(module)
    leaves: dict[str, Any] = {}
    for name, child in module.named_children():
        if (nested := from_module(kind, child))._leaves:
            leaves[name] = nested
    leaves.update(_own(module))
    return kind._make(leaves, _NO_BATCH)


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(module)!r}.")


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the module's own parameters and buffers; those that are None are left out."""
    for table in (module._parameters, module._buffers):
        for name, value in table.items():
            if value is not None:
                yield name, value


def to_module(tree: Tree, module: nn.Module) -> None:
    """Put leaves into a module as its parameters and buffers; see `TensorDict.to_module`.

    Nothing is changed unless everything fits.
    """
    _check_module(module)
    plan: list[tuple[Any, str, Tensor, Tensor]] = []
    _match(tree, module, (), plan)
    new: dict[int, Tensor] = {}
    for table, name, old, leaf in plan:
        plain = to_plain(leaf).detach()
        if not isinstance(old, nn.Parameter):
            table[name] = plain
            continue
        # Parameters that a module has in several places stay one, if their values are.
        tied = new.get(id(old))
        if tied is None or not torch.equal(tied.detach(), plain):
            tied = new[id(old)] = nn.Parameter(plain, requires_grad=old.requires_grad)
        table[name] = tied


def _match(
    tree: Tree,
    module: nn.Module,
    prefix: tuple[str, ...],
    plan: list[tuple[Any, str, Tensor, Tensor]],
) -> None:
    leaves = tree._all()
    children = dict(module.named_children())
    own = dict(_own(module))
    for key, leaf in leaves.items():
        path = (*prefix, key)
        if isinstance(leaf, Tree):
            if key not in children:
                raise KeyError(f"the module has no submodule {name_path(path)}.")
            _match(leaf, children[key], path, plan)
            continue
        if key not in own or not isinstance(leaf, Tensor):
            raise KeyError(f"the module has no parameter or buffer {name_path(path)}.")
        old = own[key]
        if leaf.shape != old.shape:
            raise RuntimeError(
                f"leaf {name_path(path)} has shape {list(leaf.shape)}, but the module's is "
                f"{list(old.shape)}."
            )
        if old.requires_grad and not (leaf.is_floating_point() or leaf.is_complex()):
            raise RuntimeError(
                f"leaf {name_path(path)} has dtype {leaf.dtype}, which cannot require gradients "
                "as the module's parameter does."
            )
        table = module._parameters if key in module._parameters else module._buffers
        plan.append((table, key, old, leaf))
    missing = [name for name in own if name not in leaves]
    missing += [
        name
        for name, child in children.items()
        if name not in leaves and next(_anything(child), None) is not None
    ]
    if missing:
        raise KeyError(
            f"the TensorDict has no {name_path((*prefix, missing[0]))}, which the module needs."
        )


def _anything(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        yield from _own(part)


def from_state_dict(kind: type[Tree], state: Mapping[str, Any]) -> Any:
    """Return a state dict as a tree: names are nested at their dots."""
    root = kind._make({}, _NO_BATCH)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name!r} of the state dict is no tensor but a {type(value)!r}.")
        *parents, last = name.split(".")
        node: Tree = root
        for part in parents:
            child = node._leaves.get(part)
            if child is None:
                child = node._leaves[part] = kind._make({}, _NO_BATCH)
            if not isinstance(child, Tree):
                raise KeyError(f"{name!r} of the state dict is beneath a tensor.")
            node = child
        if last in node._leaves:
            raise KeyError(f"{name!r} of the state dict is a tensor and a module at once.")
        node._leaves[last] = value
    return root


def to_state_dict(tree: Tree) -> dict[str, Tensor]:
    """Return a tree as a state dict of plain tensors on the same memory."""
    state: dict[str, Tensor] = {}
    for path, leaf in tree._flat():
        if not isinstance(leaf, Tensor):
            raise TypeError(f"leaf {name_path(path)} is no tensor, as a state dict needs.")
        for part in path:
            if "." in part:
                raise KeyError(f"key {name_path(path)} has a dot, which a state dict nests at.")
        state[".".join(path)] = to_plain(leaf)
    return state
