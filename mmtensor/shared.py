"""All leaves of a tree in one block of shared memory, and trees on their way to a process."""

from collections.abc import Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmtensor.creation import chunks_of
from mmtensor.geometry import c_strides
from mmtensor.jagged import JaggedTensor
from mmtensor.jagged_layout import counts_of, offsets_of
from mmtensor.jagged_parts import Parts
from mmtensor.leaves import is_on_file, mapping_under, name_path
from mmtensor.rawfile import Chunk
from mmtensor.shared_memory import SharedMapping
from mmtensor.storage import tensor_on, unexpanded
from mmtensor.tensor import MemoryMappedTensor
from mmtensor.texts import LockedTexts
from mmtensor.tree import MEMORY_MAPPED, SHARED, Tree

__all__ = ["reduce_across", "reduce_tree", "register", "share"]

# Where leaves start in a block: no dtype and no vector instruction needs more.
_ALIGNMENT = 64
_PADDING = memoryview(bytes(_ALIGNMENT))
# Pieces of one pwritev(2) (IOV_MAX of Linux), and bytes up to which they are gathered.
_PIECES = 1000
_GATHERED = 1 << 20
# A regular tree of no more bytes travels in the message itself: passing a descriptor takes
# half a millisecond.
_INLINE = 1 << 16

_TREE, _DENSE, _JAGGED, _OBJECT = range(4)


class _Packer:
    """Pieces of memory, one after the other."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._pieces: list[tuple[int, Iterable[Any]]] = []

    def add(self, nbytes: int, chunks: Iterable[Any]) -> int:
        """Plan a piece; return where it will start."""
        start = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._pieces.append((start, chunks))
        self.nbytes = start + nbytes
        return start

    def buffers(self) -> Iterator[Any]:
        """Yield all bytes, padding included."""
        position = 0
        for start, chunks in self._pieces:
            if start != position:
                yield _PADDING[: start - position]
                position = start
            for chunk in chunks:
                for piece in chunk if isinstance(chunk, list) else (chunk,):
                    view = memoryview(piece)
                    position += view.nbytes
                    if view.nbytes:
                        yield view

    def _vectors(self) -> Iterator[Chunk]:
        batch: list[Any] = []
        nbytes = 0
        for buffer in self.buffers():
            batch.append(buffer)
            nbytes += buffer.nbytes
            if len(batch) >= _PIECES or nbytes >= _GATHERED:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch

    def block(self) -> SharedMapping:
        """Write all pieces into a new block."""
        return SharedMapping.create(self.nbytes, self._vectors())


class _Dense(NamedTuple):
    """Geometry of a tensor in a block; `start` counts elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    mapped: bool

    def on(self, memory: Any) -> Tensor:
        """Return the tensor on a block, or on a storage."""
        if isinstance(memory, SharedMapping):
            tensor = tensor_on(memory, self.dtype, self.size, self.stride, self.start)
            if self.mapped:
                tensor.__class__ = MemoryMappedTensor
            return tensor
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        return tensor.set_(memory, self.start, self.size, self.stride)


class _Jagged(NamedTuple):
    """Parts of a jagged tensor in a block, in bytes from its start, and its window."""

    values: _Dense
    offsets: int
    shapes: int
    rows: int
    ndim: int
    window: tuple[int, int, int]

    def on(self, memory: Any) -> JaggedTensor:
        """Return the jagged tensor on a block, or on a storage."""
        source = memory if isinstance(memory, SharedMapping) else _bytes_of(memory)
        raw = source if isinstance(source, np.ndarray) else source.bytes_array()
        count = self.rows + 1
        offsets = raw[self.offsets : self.offsets + 8 * count].view(np.int64)
        shapes = raw[self.shapes : self.shapes + 8 * self.rows * self.ndim].view(np.int64)
        parts = Parts(self.values.on(memory), offsets, shapes.reshape(self.rows, self.ndim))
        return JaggedTensor._of(parts, *self.window)


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray[Any, Any]:
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
    return Tensor.numpy(tensor.set_(storage, 0, (storage.nbytes(),), (1,)))


def _plan_dense(value: Tensor, packer: _Packer, mapped: bool) -> _Dense:
    """Plan a tensor; dimensions that `expand` made are stored once."""
    size = tuple(value.size())
    value, expanded = unexpanded(value.detach())
    start = packer.add(value.nbytes, chunks_of(value))
    stride = list(c_strides(value.size()))
    for dim in expanded:
        stride[dim] = 0
    return _Dense(value.dtype, size, tuple(stride), start // value.itemsize, mapped)


def _plan_jagged(value: JaggedTensor, packer: _Packer, mapped: bool) -> _Jagged:
    table = np.ascontiguousarray(value._table())
    offsets = offsets_of(counts_of(table), value.dtype.itemsize)
    at = packer.add(offsets.nbytes, (offsets.data,))
    rows = packer.add(table.nbytes, (table.reshape(-1).data,))
    total = int(offsets[-1])
    start = packer.add(total * value.dtype.itemsize, value._chunks())
    values = _Dense(value.dtype, (total,), (1,), start // value.dtype.itemsize, mapped)
    length, ndim = table.shape
    return _Jagged(values, at, rows, length, ndim, (0, 1, length))


def share(tree: Tree) -> None:
    """Move all leaves of a tree into one block of shared memory, and lock it.

    Raises
    ------
    RuntimeError
        It names a leaf that cannot be there.
    OSError
        ``ENOSPC`` if /dev/shm has no room; the tree is as it was.
    """
    packer = _Packer()
    plans: list[tuple[Tree, str, _Dense | _Jagged]] = []
    for part in tree._trees():
        for key, leaf in part._all().items():
            if isinstance(leaf, Tensor):
                if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
                    raise RuntimeError(
                        f"leaf {name_path((key,))} is {leaf.layout} on device {leaf.device}: only "
                        "dense tensors on the CPU can be in shared memory."
                    )
                plans.append((part, key, _plan_dense(leaf, packer, True)))
            elif isinstance(leaf, JaggedTensor):
                plans.append((part, key, _plan_jagged(leaf, packer, True)))
    block = packer.block()
    changed = {id(part): dict(part._leaves) for part in tree._trees()}
    for part, key, plan in plans:
        changed[id(part)][key] = plan.on(block)
    for part in list(tree._trees()):
        part._leaves = {
            key: LockedTexts(leaf) if isinstance(leaf, list) else leaf
            for key, leaf in changed[id(part)].items()
        }
    tree._lock(SHARED)


# --- to another process ------------------------------------------------------------------


class _Message:
    """What a tree becomes on its way: geometries in memory that is sent once."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.packer = _Packer()
        self.packed = 0

    def number(self, block: SharedMapping) -> int:
        """Return the place of a block in the message."""
        found = self._numbers.get(id(block))
        if found is None:
            found = self._numbers[id(block)] = len(self.blocks)
            self.blocks.append(block)
        return found

    def describe(self, tree: Tree) -> Any:
        """Return batch size and leaves; a packed leaf has the number -1 in place of a block."""
        items = []
        for key, leaf in tree._all().items():
            if isinstance(leaf, Tree):
                items.append((key, _TREE, self.describe(leaf), 0))
                continue
            kind = type(leaf)
            if kind is MemoryMappedTensor or kind is Tensor:
                items.append((key, *self._dense(leaf, kind is MemoryMappedTensor)))
            elif kind is JaggedTensor:
                items.append((key, *self._jagged(leaf)))
            else:
                items.append((key, _OBJECT, leaf, 0))
        return tuple(tree._batch_size), items

    def _dense(self, leaf: Tensor, mapped: bool) -> tuple[int, Any, int]:
        if leaf.requires_grad or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            return _OBJECT, leaf, 0
        mapping = mapping_under(leaf)
        if type(mapping) is SharedMapping and not (leaf.is_conj() or leaf.is_neg()):
            geometry = (tuple(leaf.size()), leaf.stride(), int(leaf.storage_offset()))
            return _DENSE, tuple(_Dense(leaf.dtype, *geometry, mapped)), self.number(mapping)
        if mapping is None and not mapped and not leaf.__dict__:
            self.packed += 1
            return _DENSE, tuple(_plan_dense(leaf, self.packer, False)), -1
        return _OBJECT, leaf, 0

    def _jagged(self, leaf: JaggedTensor) -> tuple[int, Any, int]:
        parts = leaf._parts
        mapping = mapping_under(leaf)
        if mapping is None:
            self.packed += 1
            return _JAGGED, tuple(_plan_jagged(leaf, self.packer, False)), -1
        if type(mapping) is SharedMapping and parts.source is None:
            places = [_place(array, mapping) for array in (parts.offsets, parts.shapes)]
            if None not in places:
                values = parts.values
                geometry = (tuple(values.size()), values.stride(), int(values.storage_offset()))
                mapped = type(values) is MemoryMappedTensor
                rows, ndim = parts.shapes.shape
                window = (leaf._first, leaf._step, len(leaf))
                dense = _Dense(values.dtype, *geometry, mapped)
                found = _Jagged(dense, places[0] or 0, places[1] or 0, rows, ndim, window)
                return _JAGGED, tuple(found), self.number(mapping)
        return _OBJECT, leaf, 0

    def memory(self) -> Any:
        """Return what the packed leaves are in: a block, bytes, or nothing."""
        if not self.packed:
            return None
        if self.packer.nbytes <= _INLINE:
            return bytearray().join(self.packer.buffers())
        return self.packer.block()


def _place(array: np.ndarray[Any, Any], mapping: SharedMapping) -> int | None:
    """Return where in a block an array starts, if it is in it."""
    if not array.size:
        return 0
    start = int(array.__array_interface__["data"][0]) - mapping.address
    return start if 0 <= start <= mapping.nbytes - array.nbytes else None


def reduce_across(tree: Tree) -> Any:
    """Reduce a tree for another process: one block and one message for all of its memory."""
    message = _Message()
    described = message.describe(tree)
    state = tree._kind() if tree._locks else None
    return _rebuild_across, (type(tree), described, message.blocks, message.memory(), state)


def _rebuild_across(
    kind: type[Tree], described: Any, blocks: list[Any], memory: Any, state: str | None
) -> Tree:
    if isinstance(memory, bytearray):
        # frombuffer refuses nothing at all.
        memory = torch.frombuffer(memory or bytearray(1), dtype=torch.uint8).untyped_storage()
    # A packed leaf has the number -1, which is the last.
    return _settled(_build_across(kind, described, [*blocks, memory]), state)


def _build_across(kind: type[Tree], described: Any, memories: list[Any]) -> Tree:
    size, items = described
    leaves: dict[str, Any] = {}
    for key, what, data, number in items:
        if what == _DENSE:
            leaves[key] = _Dense(*data).on(memories[number])
        elif what == _TREE:
            leaves[key] = _build_across(kind, data, memories)
        elif what == _JAGGED:
            values, *rest = data
            leaves[key] = _Jagged(_Dense(*values), *rest).on(memories[number])
        else:
            leaves[key] = data
    return kind._make(leaves, torch.Size(size))


def reduce_tree(tree: Tree) -> Any:
    """Reduce a tree for `pickle`: leaves of files as references, all others by value."""
    state = tree._kind() if tree._locks else None
    return _rebuild, (type(tree), _described(tree), state)


def _described(tree: Tree) -> Any:
    items = []
    for key, leaf in tree._all().items():
        nested = isinstance(leaf, Tree)
        items.append((key, _described(leaf) if nested else leaf, nested))
    return tuple(tree._batch_size), items


def _rebuild(kind: type[Tree], described: Any, state: str | None) -> Tree:
    return _settled(_build(kind, described), state)


def _build(kind: type[Tree], described: Any) -> Tree:
    size, items = described
    leaves = {key: _build(kind, value) if nested else value for key, value, nested in items}
    return kind._make(leaves, torch.Size(size))


def _settled(tree: Tree, state: str | None) -> Tree:
    """Lock a tree as it was, unless leaves have arrived that are not what the lock says."""
    if state == MEMORY_MAPPED:
        kept = all(is_on_file(leaf) for _, leaf in tree._flat())
    elif state == SHARED:
        kept = all(
            isinstance(leaf, str | list) or type(mapping_under(leaf)) is SharedMapping
            for _, leaf in tree._flat()
        )
    else:
        kept = state is not None
    return tree._lock(state or "") if kept else tree


def register(kind: type[Tree]) -> None:
    """Let `multiprocessing` send a class of containers so."""
    ForkingPickler.register(kind, reduce_across)
