"""The torch storage that stands on a mapping: the identity that every view shares."""

import weakref
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmtensor.compiling import about_to_compile
from mmtensor.dtypes import DTYPES, canonical_name, numpy_dtype
from mmtensor.errors import ReadOnlyError
from mmtensor.geometry import c_strides
from mmtensor.mapping import Mapping, MemoryMapping

__all__ = [
    "HAVE_GUARD",
    "NATIVE",
    "TORCH_DTYPES",
    "WORDS",
    "MappedStorage",
    "as_array",
    "as_kind",
    "guard_message",
    "mapping_of",
    "native_dtype",
    "on_same_memory",
    "refuse_write",
    "storage_on",
    "tensor_on",
    "unexpanded",
    "words",
]

_T = TypeVar("_T")

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
# The NumPy dtypes that torch.from_numpy takes as they are.
NATIVE: dict[torch.dtype, np.dtype[Any]] = {
    dtype: np.dtype(DTYPES[name][1])
    for name, dtype in TORCH_DTYPES.items()
    if DTYPES[name][0] == "numpy"
}
# new_empty of one of these is quicker than torch.empty (0.5 us of 0.8), and no default
# device applies.
_prototypes = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in TORCH_DTYPES.values()}
# An integer of each size, to see the bytes of dtypes that NumPy lacks.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_UINT8 = np.dtype(np.uint8)
_torch_cache: dict[Any, torch.dtype] = {dtype: dtype for dtype in TORCH_DTYPES.values()}

# A storage so marked refuses every kernel that asks for a pointer to write through.
_mark_read_only = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
HAVE_GUARD = _mark_read_only is not None


def native_dtype(dtype: object) -> torch.dtype:
    """Return the torch dtype for anything that NumPy, ml_dtypes or torch calls a dtype.

    Raises
    ------
    DtypeError
        If torch has no such dtype; the message says how to convert.
    """
    try:
        return _torch_cache[dtype]
    except (KeyError, TypeError):
        return TORCH_DTYPES[canonical_name(dtype)]


class MappedStorage(torch.UntypedStorage):
    """A storage whose bytes a mapping holds.

    torch keeps this Python object, class and attributes included, for as long as the C++
    storage lives: every view, plain or subclass, of any chain of views, finds the same one.
    Nothing is recorded on views.

    Attributes
    ----------
    mapping : Mapping
        What holds the bytes.
    """

    mapping: Mapping  # set right after the class is

    def data_ptr(self) -> int:
        """Return the address of the first byte, of read-only storages as well."""
        return self.mapping.address

    @property
    def filename(self) -> str | None:
        """The absolute path of the file; None for memory."""
        return self.mapping.path

    def is_shared(self) -> bool:
        """Whether other processes that receive this storage see the same bytes."""
        return self.mapping.mode.name != "c" and not isinstance(self.mapping, MemoryMapping)

    def share_memory_(self, *args: Any, **kwargs: Any) -> "MappedStorage":
        """Return the storage, which is shared already.

        Raises
        ------
        RuntimeError
            In mode ``"c"``, whose changes are private by promise, and on the memory of an
            array, which cannot be moved.
        """
        if isinstance(self.mapping, MemoryMapping):
            raise RuntimeError(  # noqa: TRY004 - as torch does; the type is not what is wrong
                "a tensor on the memory of an array is private to its process. Share a copy: "
                "MemoryMappedTensor.from_tensor(x)."
            )
        if not self.is_shared():
            raise RuntimeError(
                f'a tensor opened with mode "c" ({self.mapping.path}) is private to its process. '
                'Open the file with mode "r+" to share it, or share a copy: x.clone().'
            )
        return self

    def size(self) -> int:
        """Return the number of bytes."""
        about_to_compile(self.mapping)
        return self.nbytes()

    def new(self) -> torch.UntypedStorage:
        """Return an empty storage of regular memory."""
        make: Any = torch.UntypedStorage  # untyped in torch
        return make(device="cpu")  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> Any:
        """Return a byte, or a copy of a range of bytes in regular memory.

        torch's own slice is a storage on the same memory that does not keep it alive.
        """
        if isinstance(index, slice):
            return self.clone()[index]
        item: Any = super().__getitem__  # untyped in torch
        return item(index)

    def clone(self) -> torch.UntypedStorage:
        """Return a copy in regular memory."""
        make: Any = torch.UntypedStorage  # untyped in torch
        return make(self.nbytes(), device="cpu").copy_(self, False)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.UntypedStorage:
        memo = memo.setdefault("torch", {})  # type: ignore[call-overload]  # torch's own key
        key: Any = self._cdata
        if key not in memo:
            memo[key] = self.clone()
        return memo[key]  # type: ignore[no-any-return]  # it was put there above

    def _write_file(
        self, file: Any, is_real_file: bool, save_size: bool, element_size: int
    ) -> None:
        # torch.save's older format, which plain views are pickled with, asks the storage
        # for a mutable pointer here: the count of elements, then the bytes.
        if save_size:
            file.write((self.nbytes() // element_size).to_bytes(8, "little"))
        if is_real_file:
            file.flush()
        file.write(self.mapping.bytes_array().data)

    def __repr__(self) -> str:
        # A storage prints every byte by default.
        where = self.mapping.path or "memory"
        return (
            f"{type(self).__name__}({where!r}, mode={self.mapping.mode.name!r}, "
            f"nbytes={self.nbytes()})"
        )

    __str__ = __repr__


def storage_on(mapping: Mapping) -> MappedStorage:
    """Return the one storage that stands on a mapping."""
    if mapping.storage is not None:
        found = mapping.storage()
        if found is not None:
            return found  # type: ignore[no-any-return]  # a reference to a MappedStorage
    return _new_storage(mapping, torch.from_numpy(mapping.array((mapping.nbytes,), _UINT8)))


def _new_storage(mapping: Mapping, tensor: torch.Tensor) -> MappedStorage:
    """Make the storage of a tensor on all of a mapping the storage of that mapping."""
    if not mapping.mode.writeable and _mark_read_only is not None:
        _mark_read_only(tensor)
    storage: Any = tensor.untyped_storage()
    storage.__class__ = MappedStorage
    storage.mapping = mapping
    mapping.storage = weakref.ref(storage)
    return storage  # type: ignore[no-any-return]  # its class was set above


def tensor_on(
    mapping: Mapping,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    start: int = 0,
) -> torch.Tensor:
    """Return a plain tensor on a mapping, without a copy.

    Parameters
    ----------
    mapping
        Where the bytes are.
    dtype, shape
        What they are.
    strides
        In elements; None for C-contiguous.
    start
        First element, counted from the start of the mapping.
    """
    if strides is None and not start and mapping.storage is None and dtype in NATIVE:
        array = mapping.array(shape, NATIVE[dtype])
        if array.nbytes == mapping.nbytes:
            # A new mapping, all of it: the tensor that makes the storage is the result.
            tensor = torch.from_numpy(array)
            _new_storage(mapping, tensor)
            return tensor
    storage = storage_on(mapping)
    tensor = _prototypes[dtype].new_empty(0)
    return tensor.set_(storage, start, shape, c_strides(shape) if strides is None else strides)


def mapping_of(tensor: torch.Tensor) -> Mapping | None:
    """Return the mapping that a tensor stands on, or None."""
    return getattr(tensor.untyped_storage(), "mapping", None)


def guard_message(mapping: Mapping, what: str) -> str:
    """Say which file is read-only, what was tried, and how to go on."""
    if mapping.path is None:
        return (
            f"{what} would write to a read-only tensor: the array that it stands on is not "
            "writeable. Take a copy: x.clone()."
        )
    return (
        f"{what} would write to a read-only tensor: its file {mapping.path!r} was opened with "
        'mode "r". '
        'Open it with mode="r+" to change the file, with mode="c" to change a private copy '
        "of the pages, or take a copy: x.clone()."
    )


def refuse_write(tensor: torch.Tensor, what: str) -> None:
    """Raise if a tensor was opened with mode ``"r"``.

    Raises
    ------
    ReadOnlyError
        It names the mode and the file.
    """
    mapping = getattr(tensor.untyped_storage(), "mapping", None)
    if mapping is not None and not mapping.mode.writeable:
        raise ReadOnlyError(guard_message(mapping, what))


def words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's memory as an array of words of its element size."""
    mapping = mapping_of(tensor)
    if mapping is not None:
        itemsize = tensor.itemsize
        return mapping.view(
            np.dtype(f"V{itemsize}") if itemsize == 16 else np.dtype(f"u{itemsize}"),
            tuple(tensor.shape),
            tuple([step * itemsize for step in tensor.stride()]),
            int(tensor.storage_offset()) * itemsize,
        )
    plain = tensor.as_subclass(Tensor) if type(tensor) is not Tensor else tensor
    if plain.dtype in NATIVE:
        return Tensor.numpy(plain)
    return Tensor.numpy(plain.view(WORDS[tensor.itemsize]))


def as_array(tensor: Tensor, *, force: bool = False) -> np.ndarray[Any, Any]:
    """Return a CPU tensor as an array on the same memory.

    Raises
    ------
    RuntimeError
        If it is a conjugated or negated view and `force` is false.
    """
    if tensor.is_conj() or tensor.is_neg():
        if not force:
            bit, method = ("conjugate", "conj") if tensor.is_conj() else ("negative", "neg")
            raise RuntimeError(
                f"a tensor with the {bit} bit has no array on the same memory. Copy it with "
                f"x.resolve_{method}().numpy(), or pass force=True."
            )
        return as_array(tensor.as_subclass(Tensor).resolve_conj().resolve_neg())
    mapping = mapping_of(tensor)
    dtype = numpy_dtype(tensor.dtype)
    if mapping is None:
        plain = tensor.as_subclass(Tensor)
        return Tensor.numpy(plain.view(WORDS[tensor.itemsize])).view(dtype)
    itemsize = dtype.itemsize
    return mapping.view(
        dtype,
        tuple(tensor.shape),
        tuple([step * itemsize for step in tensor.stride()]),
        int(tensor.storage_offset()) * itemsize,
    )


def unexpanded(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return what `expand` has repeated once, and in which dimensions it was."""
    size = tensor.size()
    expanded = [dim for dim, step in enumerate(tensor.stride()) if step == 0 and size[dim] > 1]
    for dim in expanded:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor, expanded


def as_kind(kind: type[_T], tensor: Tensor) -> _T:
    """Give a tensor its class: one that was just made, and that nobody else has."""
    result: Any = tensor
    result.__class__ = kind  # 0.05 us, where as_subclass takes 0.8
    return result  # type: ignore[no-any-return]  # its class was set above


def on_same_memory(kind: type[_T], tensor: Tensor) -> _T:
    """Return a tensor of a class on the memory of a tensor that somebody has."""
    result: Any = tensor if type(tensor) is kind else tensor.as_subclass(kind)  # type: ignore[type-var]
    return result  # type: ignore[no-any-return]  # of that class
