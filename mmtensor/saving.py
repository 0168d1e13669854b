"""Writing a tree of leaves to a directory, which appears whole or not at all."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmtensor.creation import at_once, check_regular, file_chunks
from mmtensor.directory import NewDirectory, create_beneath, open_directory, sync_beneath
from mmtensor.dtypes import canonical_name
from mmtensor.geometry import as_count, byte_count
from mmtensor.jagged import JaggedTensor
from mmtensor.jagged_files import Files, marker
from mmtensor.jagged_layout import counts_of, offsets_of
from mmtensor.jagged_parts import on_files
from mmtensor.leaves import name_path, too_deep
from mmtensor.manifest import (
    DENSE,
    JAGGED,
    META,
    NESTED,
    STRING,
    STRINGS,
    Entry,
    dump,
    dump_string,
    dump_strings,
    files_of,
    name_of,
    owned,
)
from mmtensor.mapping import FileMapping, map_new
from mmtensor.rawfile import reserve, write_all, write_chunks
from mmtensor.texts import LockedTexts, is_texts
from mmtensor.tree import DEEPEST, MEMORY_MAPPED, MappedLeaves, Tree

__all__ = ["save", "sync_directories"]


class _Leaf(NamedTuple):
    """A leaf and where it goes: `place` beneath the new directory, in a tree of results."""

    path: tuple[str, ...]
    value: Any
    entry: Entry
    place: str
    into: MappedLeaves


class _Text(NamedTuple):
    """A meta.json, in a directory beneath the new one."""

    place: str
    data: bytes


def save(
    tree: Tree,
    path: str,
    *,
    num_threads: int = 0,
    like: bool = False,
    existsok: bool = True,
) -> Any:
    """Write a tree to a directory, in the place of what an earlier save left there.

    Parameters
    ----------
    tree
        What to write.
    path
        From `rawfile.absolute`.
    num_threads
        How many threads write leaves; 0 or 1: this one does.
    like
        Whether only to make room: zeros of the same shapes and dtypes.
    existsok
        Whether what an earlier save left there is replaced.

    Returns
    -------
    Tree
        A locked, memory-mapped one, with mode ``"r+"``.

    Raises
    ------
    TypeError
        It names a leaf that cannot be written.
    ExistingFileError, SymbolicLinkError, OSError
        As `directory.NewDirectory` does. What was there is there still.
    """
    num_threads = as_count("num_threads", num_threads)
    texts: list[_Text] = []
    leaves: list[_Leaf] = []
    result = _plan(tree, "", (), texts, leaves)
    with NewDirectory(path, owned, existsok=existsok) as new:
        # A meta.json comes before what it names: what a killed save leaves can be told.
        for text in texts:
            if text.place:
                os.mkdir(text.place, dir_fd=new.fd)
            _write_text(os.path.join(text.place, META), text.data, new.fd)

        def write(leaf: _Leaf) -> Any:
            return _write_leaf(leaf, new.fd, path, like)

        for leaf, mapped in zip(leaves, _each(write, leaves, num_threads), strict=True):
            leaf.into.source[leaf.entry.key] = mapped
        new.publish()
    return result._lock(MEMORY_MAPPED, path)


def _each(write: Callable[[_Leaf], Any], leaves: list[_Leaf], num_threads: int) -> Iterable[Any]:
    if num_threads <= 1 or len(leaves) <= 1:
        return map(write, leaves)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="mmtensor-save")
    try:
        return list(pool.map(write, leaves))
    finally:
        pool.shutdown(cancel_futures=True)


def _plan(
    tree: Tree,
    place: str,
    prefix: tuple[str, ...],
    texts: list[_Text],
    leaves: list[_Leaf],
) -> Any:
    """List what is to be written; return a tree of the same keys for the results."""
    if len(prefix) > DEEPEST:
        raise too_deep(prefix)
    entries: list[Entry] = []
    own = len(texts)
    texts.append(_Text("", b""))  # parents come before children
    into = MappedLeaves({})
    for key, value in tree._all().items():
        path = (*prefix, key)
        into.source[key] = None  # keeps the order
        if isinstance(value, Tensor):
            entry = _dense(path, value)
        elif isinstance(value, JaggedTensor):
            shape = (len(value), value.ndim)
            entry = Entry(key, JAGGED, canonical_name(value.dtype), shape, name_of(key, JAGGED))
        else:
            kind = NESTED if isinstance(value, Tree) else STRING
            kept: Any = value
            if isinstance(value, list):
                kind, kept = STRINGS, _texts(path, value, tree._batch_size)
            entry = Entry(key, kind, file=name_of(key, kind))
            there = os.path.join(place, entry.file)
            if isinstance(value, Tree):
                into.add(key, _plan(value, there, path, texts, leaves))
            else:
                into.add(key, kept)
                data = dump_string(kept) if kind == STRING else dump_strings(kept)
                texts.append(_Text(there, data))
            entries.append(entry)
            continue
        entries.append(entry)
        leaves.append(_Leaf(path, value, entry, place, into))
    texts[own] = _Text(place, dump(tuple(tree._batch_size), entries))
    return tree._make(into, tree._batch_size)


def _texts(path: tuple[str, ...], texts: list[Any], batch_size: torch.Size) -> LockedTexts:
    """Return strings as they will be loaded; a list may have changed since it was set."""
    if not is_texts(texts) or len(texts) != batch_size[0]:
        odd = next((text for text in texts if not isinstance(text, str)), None)
        got = f"{len(texts)} of them" if odd is None else repr(odd)
        raise TypeError(
            f"leaf {name_path(path)} cannot be saved: it must be a list of {batch_size[0]} "
            f"strings, as the batch size is {list(batch_size)}, got {got}."
        )
    return LockedTexts(texts)


def _dense(path: tuple[str, ...], value: Tensor) -> Entry:
    try:
        if value.layout is not torch.strided or value.is_nested or value.is_meta:
            check_regular(value.detach())
        dtype = canonical_name(value.dtype)
    except TypeError as error:
        raise type(error)(f"leaf {name_path(path)} cannot be saved: {error}") from None
    return Entry(path[-1], DENSE, dtype, tuple(value.shape), name_of(path[-1], DENSE))


def _write_text(place: str, data: bytes, root: int) -> None:
    fd = create_beneath(place, root)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def _write_leaf(leaf: _Leaf, root: int, path: str, like: bool) -> Any:
    try:
        if leaf.entry.kind == DENSE:
            return _write_dense(leaf, root, path, like)
        return _write_jagged(leaf, root, path, like)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{error.strerror}; leaf {name_path(leaf.path)} could not be saved",
            os.path.join(path, leaf.place, leaf.entry.file),
        ) from error


def _write_dense(leaf: _Leaf, root: int, path: str, like: bool) -> Any:
    _, value, entry, place, _ = leaf
    shape = entry.shape
    dtype: torch.dtype = value.dtype
    if value.requires_grad:
        value = value.detach()
    nbytes = byte_count(shape, dtype.itemsize)
    chunks = None if like else file_chunks(value)
    mapping = _new_file(entry.file, place, root, path, chunks, nbytes)
    return mapping, dtype, shape


def _new_file(
    name: str, place: str, root: int, path: str, chunks: Iterable[Any] | None, nbytes: int
) -> FileMapping:
    """Write a file beneath the new directory and map it under the name it will have."""
    if place:
        name = f"{place}/{name}"
    quick = at_once(f"{path}/{name}", chunks, nbytes, name, root)
    if quick is not None:
        return quick
    fd = create_beneath(name, root)
    try:
        if chunks is None:
            reserve(fd, nbytes)
        else:
            write_chunks(fd, chunks, nbytes)
        return map_new(fd, f"{path}/{name}", nbytes)
    finally:
        os.close(fd)


def _write_jagged(leaf: _Leaf, root: int, path: str, like: bool) -> JaggedTensor:
    value: JaggedTensor = leaf.value
    dtype = value.dtype
    table = np.ascontiguousarray(value._table())
    offsets = offsets_of(counts_of(table), dtype.itemsize)
    length, ndim = table.shape
    total = int(offsets[-1])
    shapes = table.reshape(-1).data if length or ndim == 1 else marker(ndim)
    parts: tuple[tuple[Iterable[Any] | None, int], ...] = (
        (None if like else value._chunks(), total * dtype.itemsize),
        ((offsets.data,), offsets.nbytes),
        ((shapes,) if len(shapes) else (), table.nbytes),
    )
    buffer, index, rows = [
        _new_file(name, leaf.place, root, path, chunks, nbytes)
        for name, (chunks, nbytes) in zip(files_of(leaf.entry), parts, strict=True)
    ]
    return JaggedTensor._of(on_files(Files(buffer, index, rows, length, ndim, total), dtype))


def sync_directories(tree: Tree, path: str) -> None:
    """Write the names of a saved tree and what its ``meta.json`` files say to stable storage.

    Of a directory that has been moved or replaced meanwhile, what is there is left alone.
    """
    for place in _directories(tree, path):
        try:
            fd = open_directory(place)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            os.fsync(fd)
            # Names are not enough: data of a file is its own affair.
            sync_beneath(META, fd)
        finally:
            os.close(fd)
    fd = open_directory(os.path.dirname(path))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _directories(tree: Tree, path: str) -> Iterator[str]:
    yield path
    for key, leaf in tree._all().items():
        if isinstance(leaf, Tree):
            yield from _directories(leaf, os.path.join(path, name_of(key, NESTED)))
        elif isinstance(leaf, str | list):
            yield os.path.join(path, name_of(key, STRING if isinstance(leaf, str) else STRINGS))
