"""The mapping side of a container: keys, leaves, getting, setting."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch

from mmtensor import indexed
from mmtensor.geometry import as_shape
from mmtensor.leaves import DENSE_TYPES, accept, name_path, too_deep, write
from mmtensor.tree import DEEPEST, Leaves, Tree, path_of

__all__ = ["Keyed"]

_MISSING: Any = object()
_new = object.__new__


class Keyed(Tree):
    """What `TensorDict` has of a mapping; its parameters are described there."""

    __slots__ = ()

    def __init__(self, source: Any = None, batch_size: Any = ()) -> None:
        if type(batch_size) is list:
            batch_size = tuple(batch_size)  # which is looked at in half the time
        self._fill(source, torch.Size(as_shape(batch_size)))

    def _fill(self, source: Any, size: torch.Size, at: tuple[Any, ...] = ()) -> None:
        """Do the work of `__init__`; `at` is where this will be, for messages."""
        self._batch_size = size
        self._locks = ()
        self._leaves = leaves = {}
        if source is None:
            return
        if len(at) > DEEPEST:
            raise too_deep(at)
        items = _items_of(source)
        dims = len(size)
        for key, value in items:
            if type(key) is str:
                kind = type(value)
                if kind in DENSE_TYPES:
                    try:
                        if value.shape[:dims] == size:
                            leaves[key] = value
                            continue
                    except RuntimeError:
                        pass  # a nested tensor has no shape
                elif kind is dict:
                    nested = leaves[key] = _new(type(self))
                    nested._fill(value, size, (*at, key))
                    continue
            try:
                path = path_of(key)
            except TypeError as error:
                raise TypeError(f"{error} It is in {name_path(at)}.") if at else error from None
            self._place(path, value, at)

    def _place(self, path: tuple[str, ...], value: Any, at: tuple[Any, ...] = ()) -> None:
        """Put a value where a path leads to, or leave everything as it is."""
        node = self
        if len(path) > 1:
            for key in path[:-1]:
                child = node._all().get(key)
                if child is None:  # what it cannot take must not leave empty ones behind
                    value = accept((*at, *path), value, node._batch_size, type(self))
                    break
                if not isinstance(child, Keyed):
                    break
                node = child
            node = self._nest(path[:-1])
        node._put(path[-1], value, (*at, *path))

    def __getitem__(self, index: Any) -> Any:
        kind = type(index)
        if kind is str:
            try:
                return self._leaves[index]
            except KeyError:
                raise self._no_key((index,)) from None
        if kind is int:
            return indexed.row(self, index)
        if kind is tuple and index and isinstance(index[0], str | tuple):
            leaf: Any = self
            try:
                for key in index:
                    leaf = leaf._leaves[key]
            except (KeyError, AttributeError):
                return self._find(path_of(index))  # nested tuples, or there is no such key
            return leaf
        if isinstance(index, str):
            return self._leaves[str(index)]
        return indexed.getitem(self, index)

    def _seek(self, path: tuple[str, ...]) -> Any:
        """Return a leaf or nested container, or `_MISSING`."""
        leaf: Any = self
        for key in path:
            if not isinstance(leaf, Tree):
                return _MISSING
            try:
                leaf = leaf._leaves[key]
            except KeyError:
                return _MISSING
        return leaf

    def _find(self, path: tuple[str, ...]) -> Any:
        leaf = self._seek(path)
        if leaf is _MISSING:
            raise self._no_key(path)
        return leaf

    def _no_key(self, path: tuple[str, ...]) -> KeyError:
        keys = [name_path(found) for found, _ in self._flat()]
        more = f" and {len(keys) - 20} more" if len(keys) > 20 else ""
        return KeyError(
            f"there is no key {name_path(path)}. The leaves are: {', '.join(keys[:20])}{more}."
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        kind = type(index)
        if kind is str or (kind is tuple and index and isinstance(index[0], str | tuple)):
            self.set(index, value)
        else:
            indexed.assign(self, index, value, type(self))

    def __delitem__(self, key: Any) -> None:
        self.del_(key)

    def __contains__(self, key: Any) -> bool:
        return self.get(key, _MISSING) is not _MISSING

    def __len__(self) -> int:
        """Return the size of the first batch dimension."""
        if not self._batch_size:
            raise TypeError("a TensorDict without batch dimensions has no length.")
        return self._batch_size[0]

    def __bool__(self) -> bool:
        raise TypeError("whether a TensorDict is true is ambiguous: use td.is_empty() or len(td).")

    def __iter__(self) -> Iterator[Self]:
        for index in range(len(self)):
            yield indexed.row(self, index)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a leaf or nested TensorDict, or a default.

        Parameters
        ----------
        key
            A string, or a tuple of strings for a nested one.
        default
            Returned where there is no such key.

        Examples
        --------
        >>> TensorDict({"n": {"x": torch.ones(1)}}).get(("n", "x"))
        tensor([1.])
        """
        if type(key) is not str:
            leaf = self._seek(path_of(key))
            return default if leaf is _MISSING else leaf
        try:
            return self._leaves[key]
        except KeyError:
            return default

    def set(self, key: Any, value: Any) -> Self:
        """Add or replace a leaf; returns the TensorDict.

        Parameters
        ----------
        key
            A string, or a tuple of strings; missing nested TensorDicts are made.
        value
            A tensor, JaggedTensor, array, number, string, list of strings, mapping or
            TensorDict. A nested tensor of torch is copied to a JaggedTensor.

        Raises
        ------
        LockedError
            A `RuntimeError`: the TensorDict is locked.
        RuntimeError
            If the value does not have the batch size.

        Examples
        --------
        >>> td = TensorDict(batch_size=[2]).set(("n", "x"), torch.ones(2, 5))
        >>> td["n"].batch_size
        torch.Size([2])
        """
        if self._locks:
            if self.get(key, _MISSING) is value:
                return self  # td["x"] += 1 has changed it, and sets it
            self._check_unlocked(f"set key {name_path(path_of(key))}")
        if type(key) is not str:
            path = path_of(key)
            if len(path) > 1:
                self._place(path, value)
                return self
            key = path[0]
        if type(value) in DENSE_TYPES:
            size = self._batch_size
            try:
                if value.shape[: len(size)] == size:
                    self._leaves[key] = value
                    return self
            except RuntimeError:
                pass  # a nested tensor has no shape
        self._put(key, value, (key,))
        return self

    def _put(self, key: str, value: Any, path: tuple[str, ...]) -> None:
        if self._locks:
            self._check_unlocked(f"set key {name_path(path)}")
        leaf = accept(path, value, self._batch_size, type(self))
        if isinstance(leaf, Tree) and any(tree is self for tree in leaf._trees()):
            raise ValueError(f"a TensorDict cannot contain itself, as key {name_path(path)}.")
        self._all()[key] = leaf

    def _nest(self, path: tuple[str, ...]) -> "Keyed":
        """Return a nested TensorDict, made where it is missing."""
        if len(path) > DEEPEST:
            raise too_deep(path)
        node: Any = self
        for number, key in enumerate(path):
            child = node._leaves.get(key) if type(node._leaves) is dict else node._all().get(key)
            if child is None:
                if node._locks:
                    node._check_unlocked(f"set key {name_path(path[: number + 1])}")
                child = node._all()[key] = self._make({}, node._batch_size)
            if not isinstance(child, Tree):
                raise KeyError(f"key {name_path(path[: number + 1])} is a leaf, not nested.")
            node = child
        return node  # type: ignore[no-any-return]  # of this class

    def set_(self, key: Any, value: Any) -> Self:
        """Write a value into the memory of a leaf; returns the TensorDict.

        Works on a locked one: in shared memory and on files, every process sees it.

        Parameters
        ----------
        key
            Of a leaf that is there.
        value
            Of the same shape. It is converted to the dtype of the leaf.

        Raises
        ------
        KeyError
            If there is no such leaf.
        RuntimeError
            If the shape is another one.
        ReadOnlyError
            If the leaf was opened with mode ``"r"``.

        Examples
        --------
        >>> td = TensorDict({"x": torch.zeros(2)}).lock_()
        >>> td.set_("x", torch.ones(2))["x"]
        tensor([1., 1.])
        """
        path = path_of(key)
        leaf = self._find(path)
        if isinstance(leaf, Keyed):
            leaf.update_(value)
        else:
            write(path, leaf, value, self._kind())
        return self

    def update(self, other: Any) -> Self:
        """Add or replace the leaves of another TensorDict or mapping, nested ones too.

        Parameters
        ----------
        other
            Its nested mappings are merged with nested TensorDicts of the same key.
        """
        for key, value in _items_of(other):
            mine = self.get(key)
            if isinstance(mine, Keyed) and isinstance(value, Mapping | Tree):
                mine.update(value)
            else:
                self.set(key, value)
        return self

    def update_(self, other: Any) -> Self:
        """Write the values of another TensorDict or mapping into the leaves that are here.

        Parameters
        ----------
        other
            With keys of this TensorDict, some or all.
        """
        for key, value in _items_of(other):
            self.set_(key, value)
        return self

    def del_(self, key: Any) -> Self:
        """Remove a key; returns the TensorDict.

        Parameters
        ----------
        key
            A string or tuple of strings. `KeyError` if it is not there.
        """
        self.pop(key)
        return self

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Remove a key and return what it held.

        Parameters
        ----------
        key
            A string or tuple of strings.
        default
            Returned where there is no such key; without it that is a `KeyError`.
        """
        path = path_of(key)
        self._check_unlocked(f"remove key {name_path(path)}")
        parent = self._seek(path[:-1])
        if not isinstance(parent, Tree) or path[-1] not in parent._names():
            if default is _MISSING:
                raise self._no_key(path)
            return default
        parent._check_unlocked(f"remove key {name_path(path)}")
        return parent._all().pop(path[-1])

    def rename_key_(self, old_key: Any, new_key: Any) -> Self:
        """Give a leaf another key, at the end; returns the TensorDict.

        Parameters
        ----------
        old_key, new_key
            Strings or tuples of strings. `KeyError` if the new one is taken.
        """
        self._check_unlocked(f"rename key {name_path(path_of(old_key))}")
        if path_of(old_key) == path_of(new_key):
            return self
        if new_key in self:
            raise KeyError(f"key {new_key!r} is taken.")
        value = self[old_key]
        parent = self._seek(path_of(old_key)[:-1])
        parent._check_unlocked(f"rename key {name_path(path_of(old_key))}")
        self.set(new_key, value)
        self.pop(old_key)
        return self

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> Any:
        """Return the keys, in order.

        Parameters
        ----------
        include_nested
            Whether keys of nested TensorDicts follow theirs, as tuples.
        leaves_only
            Whether keys of nested TensorDicts themselves are left out.

        Examples
        --------
        >>> td = TensorDict({"a": torch.ones(1), "n": {"x": torch.ones(1)}})
        >>> list(td.keys(True, True))
        ['a', ('n', 'x')]
        """
        if not include_nested and not leaves_only:
            return self._names()
        return [key for key, _ in self._items(include_nested, leaves_only)]

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> Any:
        """Return the values; parameters as for `keys`."""
        if not include_nested and not leaves_only:
            return self._all().values()
        return [value for _, value in self._items(include_nested, leaves_only)]

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> Any:
        """Return pairs of key and value; parameters as for `keys`."""
        if not include_nested and not leaves_only:
            return self._all().items()
        return list(self._items(include_nested, leaves_only))

    def _items(
        self, nested: bool, leaves_only: bool, prefix: tuple[str, ...] = ()
    ) -> Iterator[tuple[Any, Any]]:
        for key, value in self._all().items():
            path = (*prefix, key)
            if not isinstance(value, Keyed):
                yield path if prefix else key, value
                continue
            if not leaves_only:
                yield path if prefix else key, value
            if nested:
                yield from value._items(nested, leaves_only, path)

    def is_empty(self) -> bool:
        """Whether there are no leaves."""
        return next(self._flat(), None) is None

    def select(self, *keys: Any) -> Self:
        """Return an unlocked TensorDict with some of the leaves.

        Parameters
        ----------
        *keys
            Strings or tuples of strings. `KeyError` if one is not there.

        Examples
        --------
        >>> td = TensorDict({"a": torch.ones(1), "n": {"x": torch.ones(1), "y": torch.ones(1)}})
        >>> list(td.select(("n", "x")).keys(True, True))
        [('n', 'x')]
        """
        result = self._make({}, self._batch_size)
        for key in keys:
            value = self[key] if type(key) is str else self._find(path_of(key))
            if isinstance(value, Tree):
                value = value._shallow()
            if type(key) is str:
                result._leaves[key] = value
                continue
            *parents, last = path_of(key)
            node, mine = result, self
            for part in parents:
                mine = mine._leaves[part]
                child = node._leaves.get(part)
                if child is None:
                    child = node._leaves[part] = self._make({}, mine._batch_size)
                node = child
            node._leaves[last] = value
        return result

    def exclude(self, *keys: Any) -> Self:
        """Return an unlocked TensorDict without some of the leaves.

        Parameters
        ----------
        *keys
            Strings or tuples of strings; those that are not there do not matter.
        """
        result = self._shallow()
        for key in keys:
            if type(key) is str:
                result._leaves.pop(key, None)
                continue
            *parents, last = path_of(key)
            node: Any = result
            for part in parents:
                node = node._leaves.get(part) if isinstance(node, Tree) else None
            if isinstance(node, Tree):
                node._leaves.pop(last, None)
        return result

    def flatten_keys(self, separator: str = ".") -> Self:
        """Return an unlocked TensorDict without nested ones: keys are joined.

        Parameters
        ----------
        separator
            Stands between the parts. `KeyError` if two leaves get the same key.

        Examples
        --------
        >>> list(TensorDict({"n": {"x": torch.ones(1)}}).flatten_keys().keys())
        ['n.x']
        """
        leaves: Leaves = {}
        for path, leaf in self._flat():
            key = separator.join(path)
            if key in leaves:
                raise KeyError(f"two leaves would have the key {key!r}: use another separator.")
            leaves[key] = leaf
        return self._make(leaves, self._batch_size)

    def unflatten_keys(self, separator: str = ".") -> Self:
        """Return an unlocked TensorDict with keys nested at a separator.

        Parameters
        ----------
        separator
            Where keys are taken apart.

        Examples
        --------
        >>> list(TensorDict({"n.x": torch.ones(1)}).unflatten_keys()["n"].keys())
        ['x']
        """
        result = self._make({}, self._batch_size)
        for key, leaf in self._all().items():
            value = leaf.unflatten_keys(separator) if isinstance(leaf, Keyed) else leaf
            path = tuple(key.split(separator))
            node = result._nest(path[:-1]) if len(path) > 1 else result
            _merge(node, path[-1], value, path)
        return result


def _items_of(source: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a container or mapping."""
    if isinstance(source, Tree):
        return source._all().items()
    try:
        return source.items()  # type: ignore[no-any-return]  # of whatever mapping
    except AttributeError:
        raise TypeError(f"expected a mapping or a TensorDict, got {type(source)!r}.") from None


def _merge(tree: Keyed, key: str, value: Any, path: tuple[str, ...]) -> None:
    """Put a leaf or nested container into a new one, beside what is there already."""
    if key not in tree._leaves:
        tree._leaves[key] = value
        return
    found = tree._leaves[key]
    if not (isinstance(found, Keyed) and isinstance(value, Keyed)):
        raise KeyError(f"two leaves would have the key {name_path(path)}.")
    for inner, leaf in value._all().items():
        _merge(found, inner, leaf, (*path, inner))
