"""A tree of leaves under string keys: what holds it, its lock, and how leaves are looked up."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from mmtensor.compiling import make_before
from mmtensor.errors import LockedError
from mmtensor.storage import tensor_on
from mmtensor.tensor import MemoryMappedTensor

__all__ = [
    "DEEPEST",
    "MEMORY_MAPPED",
    "SHARED",
    "LateLeaves",
    "LazyLeaves",
    "Leaves",
    "Lock",
    "MappedLeaves",
    "Tree",
    "index_leaf",
    "locked_error",
    "path_of",
]

MEMORY_MAPPED, SHARED = "memory-mapped", "shared"

# How many containers may be in each other: going into one takes up to four calls, of which
# Python allows a thousand.
DEEPEST = 100

_getitem = Tensor.__getitem__
_new = object.__new__


class Lock:
    """Why the keys of a tree cannot change.

    Every container of a locked tree has the same one. The container that was locked owns it,
    and it alone can be unlocked.

    Parameters
    ----------
    kind
        ``"memory-mapped"``, ``"shared"``, or empty for a lock that the user asked for.
    owner
        The container that was locked.
    directory
        Where the tree was saved or loaded from; empty for views of it.
    """

    __slots__ = ("directory", "kind", "owner")

    def __init__(self, kind: str, owner: "Tree", directory: str = "") -> None:
        self.kind = kind
        self.owner = weakref.ref(owner)
        self.directory = directory


class LateLeaves(dict[str, Any]):
    """Leaves that are made when they are first asked for.

    Nested containers are there from the beginning.

    Parameters
    ----------
    source
        What the leaves are made from, by key, in their order.
    """

    __slots__ = ("source",)

    def __init__(self, source: dict[str, Any]) -> None:
        self.source = source

    def make(self, key: str) -> Any:
        """Make a leaf. `KeyError` if there is no such key."""
        raise NotImplementedError

    def __missing__(self, key: str) -> Any:
        # Of threads that ask at the same time all get the first one's.
        return self.setdefault(key, self.make(key))

    def names(self) -> Any:
        """Return all keys, in order."""
        source = self.source
        return source.names() if isinstance(source, LateLeaves) else source.keys()

    def complete(self) -> dict[str, Any]:
        """Return all leaves, in order, as a plain dict."""
        return {key: self[key] for key in self.names()}


class LazyLeaves(LateLeaves):
    """The leaves of a view.

    A locked container does not change its leaves, so they can be indexed at any later time.
    That makes a view as cheap as one leaf, however many there are. Of nested containers it
    has views from the beginning: what they hold by now need not be what they held then.

    Parameters
    ----------
    source
        The leaves that the view is one of. A container that is unlocked takes a copy for
        itself and leaves this dict as it is.
    index
        An integer or a slice, for the first dimension.
    """

    __slots__ = ("index",)

    def __init__(self, source: dict[str, Any], index: int | slice) -> None:
        self.source = source
        self.index = index

    def make(self, key: str) -> Any:
        """Index a leaf of the source."""
        return index_leaf(self.source[key], self.index)

    def complete(self) -> dict[str, Any]:
        """Return all leaves, in order, as a plain dict."""
        if is_compiling():
            return super().complete()
        source, index = self.source, self.index
        leaves = {}
        for key in self.names():
            leaf = self.get(key)
            if leaf is None:
                leaf = source[key]
                if type(leaf) is MemoryMappedTensor:  # at half the price of `make`
                    leaf = _getitem(leaf, index)
                    leaf.__class__ = MemoryMappedTensor
                else:
                    leaf = index_leaf(leaf, index)
            leaves[key] = leaf
        return leaves


class MappedLeaves(LateLeaves):
    """Leaves on mappings that are there: a tensor is an object that can be made late.

    Parameters
    ----------
    source
        By key: a leaf, or mapping, dtype and shape of a tensor.
    """

    __slots__ = ()

    def make(self, key: str) -> Any:
        """Make a tensor on its mapping."""
        found = self.source[key]
        if type(found) is not tuple:
            return found
        if is_compiling():
            torch._dynamo.comptime.comptime(make_before)
        tensor = tensor_on(*found)
        tensor.__class__ = MemoryMappedTensor
        return tensor

    def make_all(self) -> None:
        """Make all leaves now."""
        for key in self.source:
            self[key]  # it makes it

    def add(self, key: str, leaf: Any) -> None:
        """Add a leaf, or what one is made from."""
        self.source[key] = leaf
        if isinstance(leaf, Tree):
            self[key] = leaf


Leaves = dict[str, Any]


def index_leaf(leaf: Any, index: Any) -> Any:
    """Return an element or a slice of a leaf along the first dimension."""
    kind = type(leaf)
    if kind is MemoryMappedTensor:
        result = _getitem(leaf, index)
        if not is_compiling():  # compiled code sees regular tensors
            result.__class__ = MemoryMappedTensor
        return result
    return leaf if kind is str else leaf[index]


def path_of(key: Any) -> tuple[str, ...]:
    """Return a key as a tuple of strings.

    Raises
    ------
    TypeError
        If it is no string or (nested) tuple of strings.
    """
    if type(key) is str:
        return (key,)
    if isinstance(key, str):
        return (str(key),)
    if isinstance(key, tuple) and key:
        return tuple([part for item in key for part in path_of(item)])
    raise TypeError(f"a key must be a string or a tuple of strings, got {key!r}.")


class Tree:
    """The bare container: leaves, batch size and locks, without a public method.

    Parameters of `_make` are trusted; whoever has not checked them uses `TensorDict`.
    """

    __slots__ = ("__weakref__", "_batch_size", "_inner", "_leaves", "_locks")

    _batch_size: torch.Size
    # Leaves by key: tensors, JaggedTensors, strings, lists of strings, and Trees. The dict
    # of a locked tree is never changed, only exchanged for another.
    _leaves: Leaves
    # None of them: the keys can change. More than one: it is part of several locked trees.
    _locks: tuple[Lock, ...]
    # Keys of the nested containers, while it is locked.
    _inner: tuple[str, ...]

    @classmethod
    def _make(cls, leaves: Leaves, batch_size: torch.Size) -> Self:
        tree = _new(cls)
        tree._leaves = leaves
        tree._batch_size = batch_size
        tree._locks = ()
        return tree

    def _all(self) -> Leaves:
        """Return the leaves as a plain dict, all of them made."""
        leaves = self._leaves
        if type(leaves) is not dict:
            leaves = self._leaves = leaves.complete()  # type: ignore[attr-defined]  # LateLeaves
        return leaves

    def _names(self) -> Any:
        leaves = self._leaves
        return leaves.names() if isinstance(leaves, LateLeaves) else leaves.keys()

    def _nested(self) -> Iterator["Tree"]:
        # Late leaves that are not made yet are no containers.
        for leaf in list(self._leaves.values()):
            if isinstance(leaf, Tree):
                yield leaf

    def _trees(self) -> Iterator["Tree"]:
        """Yield this container and all nested ones."""
        yield self
        for tree in self._nested():
            yield from tree._trees()

    def _flat(self, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield the path and the value of every leaf that is no container."""
        for key, leaf in self._all().items():
            path = (*prefix, key)
            if isinstance(leaf, Tree):
                yield from leaf._flat(path)
            else:
                yield path, leaf

    def _shallow(self) -> Self:
        """Return new containers, unlocked, with the same leaves."""
        leaves = self._all().copy()
        for key, leaf in leaves.items():
            if isinstance(leaf, Tree):
                leaves[key] = leaf._shallow()
        return self._make(leaves, self._batch_size)

    def _map(self, change: Callable[[Any], Any], batch_size: torch.Size | None = None) -> Self:
        """Return new containers with what a function makes of each leaf.

        Parameters
        ----------
        change
            Called with every leaf that is no container.
        batch_size
            None: as it is. Otherwise it takes the place of this container's own, at the
            start of those of nested ones.
        """
        return self._mapped(change, batch_size, len(self._batch_size))

    def _mapped(
        self, change: Callable[[Any], Any], batch_size: torch.Size | None, dims: int
    ) -> Self:
        # No function within a function that calls itself: such a cycle would keep what it
        # has seen, mapped files and descriptors too, until the garbage collector comes by.
        size = self._batch_size
        if batch_size is not None:
            size = torch.Size((*batch_size, *size[dims:])) if len(size) > dims else batch_size
        leaves = {}
        for key, leaf in self._all().items():
            if isinstance(leaf, Tree):
                leaves[key] = leaf._mapped(change, batch_size, dims)
            else:
                leaves[key] = change(leaf)
        return self._make(leaves, size)

    # --- the lock ------------------------------------------------------------------------

    def _kind(self) -> str:
        """Return ``"memory-mapped"``, ``"shared"`` or nothing."""
        for lock in self._locks:
            if lock.kind:
                return lock.kind
        return ""

    def _lock(self, kind: str = "", directory: str = "") -> Self:
        """Lock a tree, which becomes one of the given kind."""
        lock = Lock(kind, self, directory)
        for tree in self._trees():
            made = tree._leaves.items()
            tree._inner = tuple([key for key, leaf in made if isinstance(leaf, Tree)])
            if kind:
                tree._locks = (lock,)
            elif lock not in tree._locks:
                tree._locks = (*tree._locks, lock)
        return self

    def _lock_as(self, other: "Tree") -> Self:
        """Lock a view as the container is that it is a view of, or as those in it are."""
        if other._locks:
            return self._lock(other._kind())
        for key, leaf in self._leaves.items():
            if isinstance(leaf, Tree):
                leaf._lock_as(other._leaves[key])
        return self

    def _same(self) -> Self:
        """Return a view of all of it, locked as it is."""
        if self._locks and self._batch_size:
            return self._lazy(slice(None), self._batch_size)
        return self._shallow()._lock_as(self)

    def _lazy(self, index: int | slice, batch_size: torch.Size) -> Self:
        """Return a view of a locked container whose leaves are made when asked for."""
        view = _new(type(self))
        self._look(view, index, batch_size, Lock(self._kind(), view))
        return view

    def _look(self, view: "Tree", index: int | slice, size: torch.Size, lock: Lock) -> None:
        leaves = self._leaves
        view._leaves = lazy = LazyLeaves(leaves, index)
        view._batch_size = size
        view._locks = (lock,)
        view._inner = inner = self._inner
        if inner:
            dims = len(self._batch_size)
            for key in inner:
                nested = leaves[key]
                lazy[key] = child = _new(type(nested))
                more = nested._batch_size[dims:]
                nested._look(child, index, torch.Size((*size, *more)) if more else size, lock)

    def _unlock(self) -> None:
        for lock in self._locks:
            owner = lock.owner()
            if owner is not None and owner is not self:
                raise LockedError(
                    "this TensorDict is part of a locked one, which would lose what its lock "
                    "promises. Unlock the outermost one: td.unlock_()."
                )
        held = self._locks
        for tree in self._trees():
            # Views that were made before keep the dict that they know.
            tree._leaves = dict(tree._all())
            tree._locks = tuple([lock for lock in tree._locks if lock not in held])

    def _check_unlocked(self, what: str) -> None:
        if self._locks:
            raise locked_error(self, what)


def locked_error(tree: Tree, what: str) -> LockedError:
    """Say what was tried, why it is refused, and what to do."""
    kind = tree._kind()
    state = f"{kind} and so locked" if kind else "locked"
    lost = {
        MEMORY_MAPPED: " (it is memory-mapped no more then, and files stay as they are)",
        SHARED: " (it is shared no more then)",
    }.get(kind, "")
    return LockedError(
        f"cannot {what}: this TensorDict is {state}. Write values in place with td.set_(key, "
        f"value), or call td.unlock_() first{lost}, or take td.clone(recurse=False)."
    )
