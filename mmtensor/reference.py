"""How tensors on mappings cross processes: by reference, by descriptor, or by value."""

import sys
from multiprocessing import AuthenticationError, reduction
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from torch.multiprocessing import reductions as _reductions

from mmtensor.errors import SizeError
from mmtensor.geometry import span
from mmtensor.mapping import FileMapping, Mapping, Reference, find_file
from mmtensor.shared_memory import SharedMapping
from mmtensor.storage import (
    TORCH_DTYPES,
    WORDS,
    MappedStorage,
    storage_on,
    tensor_on,
    unexpanded,
)

__all__ = [
    "UNREADABLE",
    "for_checkpoint",
    "keep_until_started",
    "reduce_tensor",
    "register",
    "regular_copy",
]

_V = TypeVar("_V")

_torch: Any = _reductions  # untyped in torch

# torch.save pickles with protocol 2, `pickle` and `multiprocessing` with 4 or 5: a
# checkpoint holds the bytes, a message holds a reference.
_SAVE_PROTOCOL = 2
_CONJ, _NEG = 1, 2
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# Regular tensors of these dtypes torch pickles in a format that it cannot read.
UNREADABLE = {
    dtype
    for name, dtype in TORCH_DTYPES.items()
    if name.startswith("float8") or name in ("uint16", "uint32", "uint64")
}
# The class of tensors that a reference names by leaving it out; see `register`.
_kind: type[torch.Tensor] = torch.Tensor


def for_checkpoint(protocol: Any) -> bool:
    """Whether what a ``__reduce_ex__`` is asked for goes into a checkpoint; call it from there.

    A checkpoint stands alone: it holds values. torch.save uses protocol 2 by default; with
    another one, the frame that called the pickler tells (pickle's own frames are C).
    """
    return (
        int(protocol) <= _SAVE_PROTOCOL
        or sys._getframe(2).f_globals.get("__name__") == "torch.serialization"
    )


def keep_until_started(value: _V) -> _V:
    """Keep what is sent to a process that is being started, and return it.

    `spawn` and `forkserver` hand descriptors on only after all arguments are pickled: what
    was made for the message, and is nobody else's, would be gone by then.
    """
    start: Any = get_spawning_popen()
    if start is not None:
        start.__dict__.setdefault("_mmtensor_sent", []).append(value)
    return value


def reduce_tensor(tensor: torch.Tensor, protocol: int, *, by_value: bool = False) -> Any:
    """Reduce a tensor on a mapping for `pickle`: what `__reduce_ex__` returns.

    A tensor of a file becomes a reference with its exact geometry. Anonymous memory, a
    private copy that was written to, and a file that its name no longer leads to become a
    regular tensor with the values.
    """
    if not by_value:
        mapping = _mapping_to_send(tensor)
        if isinstance(mapping, FileMapping):
            return _reference(tensor, mapping)
    copy: Any = _with_state(regular_copy(tensor), tensor)
    if not by_value and tensor.dtype in UNREADABLE:
        return _of_words, (copy.view(WORDS[tensor.itemsize]), _NAMES[tensor.dtype])
    return copy.__reduce_ex__(protocol)


def _of_words(words: torch.Tensor, dtype: str) -> torch.Tensor:
    return words.view(TORCH_DTYPES[dtype])


def _reduce_across(tensor: torch.Tensor) -> Any:
    """Reduce a tensor for another process: `ForkingPickler` can send descriptors."""
    mapping = _mapping_to_send(tensor)
    if mapping is not None:
        return _reference(tensor, mapping)
    return _torch.reduce_tensor(keep_until_started(_with_state(regular_copy(tensor), tensor)))


def _reference(tensor: torch.Tensor, mapping: Mapping) -> tuple[Any, ...]:
    size, start = tuple(tensor.size()), tensor.storage_offset()
    stride: tuple[int, ...] | None = None
    if start or not tensor.is_contiguous() or 1 in size or 0 in size:
        stride = tensor.stride()
    # else it follows from the size, and of a whole file the tensor is quicker to make
    geometry: tuple[Any, ...] = (_NAMES[tensor.dtype], size, stride, start)
    bits = _CONJ * tensor.is_conj() + _NEG * tensor.is_neg()
    kind = type(tensor)
    state = tensor.__dict__
    if kind is _kind and not bits and not state:
        if type(mapping) is FileMapping and mapping.mode.name != "c":
            # By far the most common case, flat and so half as expensive.
            return _open_view, (mapping.reference(), *geometry)
        return _rebuild, (mapping, *geometry)
    return _rebuild, (mapping, *geometry, bits, kind, state or None)


def _open_view(
    reference: Reference,
    dtype: str,
    size: tuple[int, ...],
    stride: tuple[int, ...] | None,
    start: int,
) -> torch.Tensor:
    mapping = find_file(reference)
    tensor = tensor_on(mapping, TORCH_DTYPES[dtype], size, stride, start)
    tensor.__class__ = _kind
    return tensor


def _rebuild(
    mapping: Mapping,
    dtype: str,
    size: tuple[int, ...],
    stride: tuple[int, ...] | None,
    start: int,
    bits: int = 0,
    kind: type[torch.Tensor] | None = None,
    state: dict[str, Any] | None = None,
) -> torch.Tensor:
    tensor = tensor_on(mapping, TORCH_DTYPES[dtype], size, stride, start)
    if bits & _CONJ:
        tensor = torch.conj(tensor)
    if bits & _NEG:
        tensor = torch._neg_view(tensor)
    tensor.__class__ = kind or _kind
    if state:
        tensor.__dict__.update(state)
    return tensor


def _mapping_to_send(tensor: torch.Tensor) -> Mapping | None:
    """Return the mapping if another process that maps the same has the same values."""
    mapping = getattr(tensor.untyped_storage(), "mapping", None)
    if isinstance(mapping, SharedMapping):
        return mapping
    if not isinstance(mapping, FileMapping) or not mapping.is_at_path():
        return None
    if mapping.size < mapping.offset + mapping.nbytes:
        raise SizeError(
            f"file {mapping.path!r} must have {mapping.offset + mapping.nbytes} bytes, as when "
            f"it was opened, but its size is {mapping.size} bytes: it was truncated meanwhile, "
            "and what was cut off is lost. Replace files (write beside, then rename), never "
            "truncate them."
        )
    if mapping.mode.name == "c":
        itemsize = tensor.itemsize
        start = int(tensor.storage_offset()) * itemsize
        if mapping.written(start, span(tensor.size(), tensor.stride(), itemsize)):
            return None  # its changes exist in this process only
    return mapping


def regular_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a regular tensor with the values and the layout of a view, and no more bytes.

    Dimensions that `expand` made are stored once and expanded again.
    """
    plain, expanded = unexpanded(tensor.as_subclass(torch.Tensor))
    copy = plain.clone()
    return copy.expand(tensor.size()) if expanded else copy


def _with_state(copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Carry over the attributes of a tensor, that of being a parameter among them."""
    if getattr(tensor, "_is_param", False):
        copy = torch.nn.Parameter(copy, requires_grad=False)
    for name, value in tensor.__dict__.items():
        if name != "_is_param":
            setattr(copy, name, value)
    return copy


def _reduce_plain(tensor: torch.Tensor) -> Any:
    """Reduce a regular tensor for another process.

    torch's own reducer loses the conjugate and negative bits, so that views such as
    `torch.conj(x)` arrived with other values; those on a mapping go the same way as their
    memory-mapped siblings. Everything else is left to torch.
    """
    if tensor.layout is torch.strided and tensor.device.type == "cpu":
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a wrapper subclass has none
            return _torch.reduce_tensor(tensor)
        if type(storage) is MappedStorage:
            return _reduce_across(tensor)
    return _torch.reduce_tensor(tensor)


def _storage_mapping_to_send(storage: MappedStorage) -> Mapping | None:
    return _mapping_to_send(tensor_on(storage.mapping, torch.uint8, (storage.nbytes(),)))


def _reduce_storage(storage: MappedStorage, protocol: int = 4) -> Any:
    if not for_checkpoint(protocol):
        mapping = _storage_mapping_to_send(storage)
        if isinstance(mapping, FileMapping):
            return storage_on, (mapping,)
    return storage.clone().__reduce_ex__(protocol)


def _reduce_storage_across(storage: MappedStorage) -> Any:
    mapping = _storage_mapping_to_send(storage)
    if mapping is not None:
        return storage_on, (mapping,)
    return _torch.reduce_storage(keep_until_started(storage.clone()))


def _send_block(mapping: SharedMapping) -> Any:
    keep_until_started(mapping)
    return _receive_block, (
        reduction.DupFd(mapping.fd),
        mapping.nbytes,
        mapping.offset,
    )


def _receive_block(descriptor: Any, nbytes: int, offset: int) -> SharedMapping:
    try:
        fd = descriptor.detach()
    except (OSError, EOFError, AuthenticationError) as error:
        raise ConnectionError(
            f"cannot receive {nbytes} bytes of anonymous shared memory: the process that sent it "
            "has ended, is of another family of processes, or has been asked for this message "
            "before. Keep the sender until everything has arrived, or send a tensor of a file."
        ) from error
    return SharedMapping.adopt(fd, nbytes, offset)


def register(kind: type[torch.Tensor], *, usual: bool = False) -> None:
    """Let `multiprocessing` send tensors of a class by reference.

    The usual class is left out of references, so it has to be the same in every process.
    """
    global _kind
    if usual:
        _kind = kind
    ForkingPickler.register(kind, _reduce_across)


MappedStorage.__reduce_ex__ = _reduce_storage  # type: ignore[method-assign,assignment]
ForkingPickler.register(MappedStorage, _reduce_storage_across)
ForkingPickler.register(SharedMapping, _send_block)
ForkingPickler.register(torch.Tensor, _reduce_plain)
