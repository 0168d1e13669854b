"""Opening a saved directory: relative to one descriptor, checked, all of one version."""

import errno
import os
import struct
from typing import Any

import numpy as np
import torch

from mmtensor.directory import NOFOLLOW, open_beneath, open_directory, read_beneath
from mmtensor.errors import ManifestError, ShapeError
from mmtensor.jagged import JaggedTensor
from mmtensor.jagged_files import Files, int64_on, marked
from mmtensor.jagged_layout import counts_of, offsets_of
from mmtensor.jagged_parts import Parts, on_files
from mmtensor.manifest import (
    DENSE,
    ITEMSIZES,
    JAGGED,
    META,
    NESTED,
    STRING,
    Entry,
    Manifest,
    files_of,
    parse,
    parse_text,
)
from mmtensor.mapping import FileMapping, map_descriptor, map_quickly
from mmtensor.modes import Mode, resolve_mode
from mmtensor.rawfile import DENIED
from mmtensor.storage import TORCH_DTYPES, tensor_on
from mmtensor.tensor import MemoryMappedTensor
from mmtensor.texts import LockedTexts
from mmtensor.tree import DEEPEST, MEMORY_MAPPED, MappedLeaves, Tree

__all__ = ["load"]


def load(kind: type[Tree], path: str, mode: str | None) -> Any:
    """Open a saved directory as a locked, memory-mapped tree.

    Parameters
    ----------
    kind
        Class of the result.
    path
        From `rawfile.absolute`.
    mode
        A name in `modes.MODES`, or None: ``"r+"`` if all files may be written, else ``"c"``.

    Raises
    ------
    FileNotFoundError
        If nothing was saved there.
    ManifestError
        It names the leaf and what is wrong with it.
    """
    if mode is None:
        try:
            return load(kind, path, "r+")
        except OSError as error:
            if error.errno not in DENIED:
                raise
            return load(kind, path, "c")
    found = resolve_mode(mode)
    while True:
        try:
            fd = open_directory(path)
        except NotADirectoryError:
            raise NotADirectoryError(
                errno.ENOTDIR, "a TensorDict is saved as a directory, got a file", path
            ) from None
        try:
            tree = _read(fd, path, kind, found, 0)
        except (OSError, ValueError):
            if _is_at(path, fd):
                raise
            continue  # another version has taken its place: that one, then
        finally:
            os.close(fd)
        return tree._lock(MEMORY_MAPPED, path)


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _read(fd: int, path: str, kind: type[Tree], mode: Mode, level: int) -> Any:
    try:
        data = read_beneath(META, fd)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise FileNotFoundError(
                errno.ENOENT, f"no TensorDict was saved here: there is no {META}", path
            ) from None
        if error.errno in (errno.ELOOP, errno.EINVAL):
            raise ManifestError(f"{path}/{META} must be a regular file.") from None
        raise
    manifest = parse(data, path)
    leaves = MappedLeaves({})
    for entry in manifest.entries:
        if entry.kind == DENSE:
            leaves.source[entry.key] = _dense(entry, fd, path, mode, manifest)
        elif entry.kind == JAGGED:
            leaves.source[entry.key] = _jagged(entry, fd, path, mode, manifest)
        else:
            leaves.add(entry.key, _directory(entry, fd, path, kind, mode, manifest, level))
    return kind._make(leaves, torch.Size(manifest.batch_size))


def _wrong(entry: Entry, path: str, what: str) -> ManifestError:
    return ManifestError(f"leaf {entry.key!r} of {path} cannot be loaded: {what}.")


def _open(name: str, entry: Entry, fd: int, path: str, mode: Mode) -> tuple[int, os.stat_result]:
    try:
        return open_beneath(name, fd, mode)
    except OSError as error:
        what = _why_not(error, name)
        if what is None:
            raise type(error)(
                error.errno,
                f"{error.strerror}; leaf {entry.key!r} cannot be opened with mode {mode.name!r}",
                os.path.join(path, name),
            ) from None
        raise _wrong(entry, path, what) from None


def _why_not(error: OSError, name: str) -> str | None:
    if error.errno == errno.ENOENT:
        return f"its file {name!r} is missing"
    if error.errno == errno.ELOOP:
        return f"its file {name!r} is a symbolic link, and nothing outside the directory is opened"
    if error.errno in (errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.ENOTDIR):
        return f"its file {name!r} is no regular file"
    return None


def _named(entry: Entry, fd: int) -> Entry:
    """Return an entry under the name that is there, for directories of older programs."""
    if entry.legacy and not _exists(entry.file, fd) and _exists(entry.legacy, fd):
        return entry._replace(file=entry.legacy)
    return entry


def _exists(name: str, fd: int) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _check_size(entry: Entry, path: str, name: str, size: int, nbytes: int, what: str) -> None:
    if size != nbytes:
        way = ""
        if size > nbytes and entry.kind == JAGGED:
            way = (
                ". If elements were appended to it, JaggedTensor.from_filename("
                f"{os.path.join(path, entry.file)!r}, ...) opens all of them"
            )
        raise _wrong(
            entry,
            path,
            f"its file {name!r} must have {nbytes} bytes for {what}, but its size is {size} "
            f"bytes{way}",
        )


def _dense(entry: Entry, fd: int, path: str, mode: Mode, manifest: Manifest) -> Any:
    if entry.legacy:
        entry = _named(entry, fd)
    name, shape = entry.file, entry.shape
    dtype = _dtype(entry, path)
    nbytes = entry.nbytes
    if nbytes == 0 and not manifest.ours and not _exists(name, fd):
        return MemoryMappedTensor.empty(shape, dtype=dtype)  # tensordict writes no empty files
    if nbytes:
        quick = map_quickly(
            f"{path}/{name}", mode, 0, nbytes, nbytes, name=name, dir_fd=fd, flags=NOFOLLOW
        )
        if quick is not None:
            return quick, dtype, shape
    file, status = _open(name, entry, fd, path, mode)
    try:
        if status.st_size != nbytes:
            what = f"shape {shape} of {entry.dtype}"
            _check_size(entry, path, name, status.st_size, nbytes, what)
        mapping = map_descriptor(file, status, f"{path}/{name}", mode, 0, nbytes)
    finally:
        os.close(file)
    return mapping, dtype, shape


def _dtype(entry: Entry, path: str) -> torch.dtype:
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None:
        raise _wrong(entry, path, f"this torch has no dtype {entry.dtype}")
    return dtype


def _jagged(entry: Entry, fd: int, path: str, mode: Mode, manifest: Manifest) -> Any:
    entry = _named(entry, fd)
    dtype = _dtype(entry, path)
    length, ndim = entry.shape
    values, offsets, shapes = files_of(entry)
    opened: list[int] = []

    def open_part(name: str) -> os.stat_result:
        file, status = _open(name, entry, fd, path, mode)
        opened.append(file)
        return status

    def map_part(number: int, name: str, status: os.stat_result, nbytes: int) -> FileMapping:
        return map_descriptor(opened[number], status, f"{path}/{name}", mode, 0, nbytes)

    try:
        status = open_part(shapes)
        nbytes = 8 * length * ndim
        if not _has_marker(opened[0], status.st_size, nbytes, ndim):
            _check_size(entry, path, shapes, status.st_size, nbytes, f"{length} rows of sizes")
        table = map_part(0, shapes, status, nbytes)
        first = open_part(values)
        if manifest.ours:
            second = open_part(offsets)
            what = f"{length} elements and their end"
            _check_size(entry, path, offsets, second.st_size, 8 * (length + 1), what)
            total = _total(entry, path, opened[2], length)
        else:
            starts, total = _computed(entry, path, table, length, ndim)
        what = f"{total} values of {entry.dtype}"
        _check_size(entry, path, values, first.st_size, total * dtype.itemsize, what)
        buffer = map_part(1, values, first, total * dtype.itemsize)
        if manifest.ours:
            index = map_part(2, offsets, second, 8 * (length + 1))
            parts = on_files(Files(buffer, index, table, length, ndim, total), dtype)
        else:
            flat = tensor_on(buffer, dtype, (total,))
            flat.__class__ = MemoryMappedTensor
            rows = int64_on(table).reshape(length, ndim)
            parts = Parts(flat, starts, rows)
    finally:
        for file in opened:
            os.close(file)
    return JaggedTensor._of(parts)


def _has_marker(file: int, size: int, nbytes: int, ndim: int) -> bool:
    """Whether a file of shapes ends as one of no rows does, or one with a writer at work."""
    if nbytes == 0:
        return size == 8
    return size == nbytes + 8 and (marked(os.pread(file, 8, nbytes)) or ())[:1] == (ndim,)


def _total(entry: Entry, path: str, file: int, length: int) -> int:
    (first,) = struct.unpack("=q", os.pread(file, 8, 0))
    (last,) = struct.unpack("=q", os.pread(file, 8, 8 * length))
    if first != 0 or not 0 <= last <= 2**63 // ITEMSIZES[entry.dtype]:
        raise _wrong(entry, path, f"its offsets must go from 0 upwards, got {first} to {last}")
    return int(last)


def _computed(
    entry: Entry, path: str, table: FileMapping, length: int, ndim: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """Compute the offsets of a nested tensor that tensordict saved."""
    try:
        shapes = int64_on(table).reshape(length, ndim)
        starts = offsets_of(counts_of(shapes), ITEMSIZES[entry.dtype])
    except ShapeError as error:
        raise _wrong(entry, path, str(error).rstrip(".")) from None
    return starts, int(starts[-1])


def _directory(
    entry: Entry,
    fd: int,
    path: str,
    kind: type[Tree],
    mode: Mode,
    manifest: Manifest,
    level: int,
) -> Any:
    """Read a nested container, a string or a list of strings."""
    entry = _named(entry, fd)
    name = entry.file
    batch_size = torch.Size(manifest.batch_size)
    if level > DEEPEST:
        raise _wrong(entry, path, f"it is nested more than {DEEPEST} levels deep")
    try:
        child = open_directory(name, fd)
    except OSError as error:
        if error.errno == errno.ENOENT:
            what = f"its directory {name!r} is missing"
        elif error.errno in (errno.ELOOP, errno.ENOTDIR):
            what = f"{name!r} is a symbolic link or a file, not a directory"
        else:
            raise
        raise _wrong(entry, path, what) from None
    there = f"{path}/{name}"
    try:
        if entry.kind == NESTED:
            try:
                tree = _read(child, there, kind, mode, level + 1)
            except FileNotFoundError:
                raise _wrong(entry, path, f"its {META} is missing") from None
            if tree._batch_size[: len(batch_size)] != batch_size:
                raise _wrong(
                    entry,
                    path,
                    f"its batch size {list(tree._batch_size)} does not start with "
                    f"that of the TensorDict, {list(batch_size)}",
                )
            return tree
        return _text(entry, child, there, batch_size, manifest)
    finally:
        os.close(child)


def _text(
    entry: Entry, child: int, there: str, batch_size: torch.Size, manifest: Manifest
) -> str | list[str]:
    try:
        data = read_beneath(META, child)
    except OSError as error:
        what = _why_not(error, META)
        if what is None:
            raise
        raise _wrong(entry, os.path.dirname(there), what) from None
    value: str | list[str] = parse_text(data, there, entry.key)
    if isinstance(value, list) and (len(batch_size) != 1 or len(value) != batch_size[0]):
        raise _wrong(
            entry,
            os.path.dirname(there),
            f"it has {len(value)} strings for the batch size {list(batch_size)}, and a list must "
            "have one for each element. Leave it out with tensordict first: "
            f"TensorDict.load_memmap(path).exclude({entry.key!r}).memmap(other)",
        )
    if manifest.ours and isinstance(value, str) != (entry.kind == STRING):
        wanted = "a string" if entry.kind == STRING else "a list of strings"
        raise _wrong(entry, os.path.dirname(there), f"it must be {wanted}, got {value!r}")
    return LockedTexts(value) if isinstance(value, list) else value
