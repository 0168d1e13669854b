"""`MemmapTensor`, deprecated from birth: for code that still names it."""

import os
import tempfile
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mmtensor.adoption import check_device
from mmtensor.creation import sizes_of
from mmtensor.modes import resolve_mode
from mmtensor.rawfile import Path, absolute
from mmtensor.reference import for_checkpoint
from mmtensor.tensor import MemoryMappedTensor

__all__ = ["MemmapTensor"]

_ALIASES = {"readonly": "r", "readwrite": "r+", "write": "w+", "copyonwrite": "c"}
# Indices that make views; bool is an int, but makes none.
_BASIC = (int, np.integer, slice, types.EllipsisType, types.NoneType)
# Methods that Python looks up on the class, never on the instance.
_BINARY = "add and floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_SPECIAL = (
    "abs array bool complex contains dlpack dlpack_device eq float format ge gt index int "
    "invert le lt ne neg pos reversed setitem"
)


class MemmapTensor:
    """The forerunner of `MemoryMappedTensor`: deprecated, for code that still names it.

    It is no `torch.Tensor` but holds a `MemoryMappedTensor` and an index. Indexing gives
    another one and reads nothing; methods of `torch.Tensor` and ``torch`` functions give
    regular tensors, and those that write reach the file. It pickles as a reference;
    `torch.save` and `copy.deepcopy` make regular tensors of it.

    Parameters
    ----------
    *size
        Integers, or one sequence of integers.
    device
        None or the CPU.
    dtype
        None: `torch.get_default_dtype`.
    transfer_ownership
        Whether the one who unpickles it is to delete the temporary file.
    prefix
        Of the name of the temporary file; not together with `filename`.
    filename
        A file to open, or to create with zeros. None: a temporary file, which is deleted
        with the last tensor on it.
    mode
        ``"r+"`` (``"readwrite"``), ``"c"`` (``"copyonwrite"``), ``"r"`` (``"readonly"``),
        or ``"w+"`` (``"write"``), which replaces the file by zeros.

    Warns
    -----
    DeprecationWarning
        Always.

    Raises
    ------
    TypeError
        If a tensor or an array is passed for the size.
    FileNotFoundError, SizeError, ModeError, DeviceError
        As `MemoryMappedTensor.from_filename` does; ``"r+"`` and ``"w+"`` create a file.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):
    ...     x = mmtensor.MemmapTensor.from_tensor(torch.arange(6).view(2, 3))
    >>> x[1]
    MemmapTensor(shape=torch.Size([3]), device=cpu, dtype=torch.int64)
    >>> x[1] + 1
    tensor([4, 5, 6])
    """

    __array_priority__ = 1000  # "array + x" is left to x, as for any tensor

    def __init__(
        self,
        *size: Any,
        device: Any = None,
        dtype: Any = None,
        transfer_ownership: bool = False,
        prefix: str | None = None,
        filename: Path | None = None,
        mode: str = "r+",
    ) -> None:
        _warn()
        check_device(device)
        if size and isinstance(size[0], (Tensor, np.ndarray, MemmapTensor)):
            raise TypeError("expected sizes. Write data with MemmapTensor.from_tensor(tensor).")
        outline = torch.empty((), dtype=dtype, device="cpu").expand(sizes_of(size, None))
        self._place(outline, False, transfer_ownership, prefix, filename, mode)

    def _place(
        self, source: Tensor, values: bool, transfer: bool, prefix: Any, filename: Any, mode: str
    ) -> Self:
        """Open a file, after writing the values of `source`, or zeros of its shape, to it."""
        given = _ALIASES.get(mode, mode)
        found = resolve_mode("r+" if given == "w+" else given).name
        if filename is None:
            descriptor, path = tempfile.mkstemp(prefix=prefix)
            os.close(descriptor)
        elif prefix is None:
            path = absolute(filename)
        else:
            raise ValueError(f"pass filename or prefix, got both: {filename!r} and {prefix!r}.")
        replace = values or filename is None or given == "w+"
        try:
            if replace or (found == "r+" and not os.path.lexists(path)):
                MemoryMappedTensor.from_tensor(
                    source, filename=path, existsok=replace, copy_existing=True, copy_data=values
                )
            x = MemoryMappedTensor.from_filename(path, source.dtype, source.shape, mode=found)
        except BaseException:
            if filename is None:
                os.unlink(path)
            raise
        return self._on(x, (), transfer, filename is None)

    def _on(self, base: Any, index: tuple[Any, ...], transfer: bool, owned: bool) -> Self:
        self._base = base
        self._index = index  # the indices that make no views, in order
        self.transfer_ownership = transfer
        # A temporary file goes with the storage, that is, with the last tensor on it.
        storage = base.untyped_storage()
        self._deletion = owned and weakref.finalize(storage, _delete, base.filename, os.getpid())
        return self

    @classmethod
    def from_tensor(
        cls,
        tensor: Any,
        transfer_ownership: bool = False,
        prefix: str | None = None,
        filename: Path | None = None,
        mode: str = "r+",
    ) -> Self:
        """Write a tensor to a file, which is replaced if it exists; parameters as above.

        A `MemmapTensor` that is where it should go already is returned as it is.
        """
        _warn()
        if isinstance(tensor, MemmapTensor):
            if prefix is None and (filename is None or absolute(filename) == tensor.filename):
                return tensor  # type: ignore[return-value]  # the caller's own object
            tensor = tensor.as_tensor()
        return cls.__new__(cls)._place(tensor, True, transfer_ownership, prefix, filename, mode)

    @classmethod
    def empty_like(
        cls,
        tensor: Any,
        transfer_ownership: bool = False,
        prefix: str | None = None,
        filename: Path | None = None,
        mode: str = "r+",
    ) -> Self:
        """Make one of zeros with the shape and dtype of a tensor; parameters as above."""
        _warn()
        outline = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
        return cls.__new__(cls)._place(outline, False, transfer_ownership, prefix, filename, mode)

    def set_transfer_ownership(self, value: bool = True) -> Self:
        """Say whether the one who unpickles it is to delete the temporary file."""
        self.transfer_ownership = value
        return self

    def as_tensor(self) -> Tensor:
        """Return the `MemoryMappedTensor`, or a copy where the index needs one."""
        return self._load()[-1]

    @torch.inference_mode(mode=False)  # tensors that are made inside have no version
    def _load(self) -> list[Tensor]:
        """Return the mapped tensor, and what each remaining index makes of the last."""
        chain: list[Tensor] = [self._base]
        for index in self._index:
            chain.append(chain[-1][index])
        return chain

    def _outline(self) -> Tensor:
        """Return a tensor of the same shape that reads nothing of the file."""
        outline = torch.empty((), dtype=torch.bool).expand(self._base.shape)
        for index in self._index:
            outline = outline[index]
        return outline

    @property
    def shape(self) -> torch.Size:
        """The shape, without reading the file."""
        return self._outline().shape

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        loaded: dict[int, tuple[MemmapTensor, list[Tensor], int]] = {}

        def load(x: MemmapTensor) -> Tensor:
            if id(x) not in loaded:
                chain = x._load()
                loaded[id(x)] = x, chain, _version(chain[-1])
            return loaded[id(x)][1][-1]

        args, kwargs = tree_map_only(MemmapTensor, load, (args, kwargs or {}))
        result = function(*args, **kwargs)
        written: dict[int, Any] = {}
        for x, chain, version in loaded.values():
            if _version(chain[-1]) != version:
                written[id(chain[-1])] = x
                # Where an index made a copy, the file has to get what was written to that.
                for i in reversed(range(len(x._index))):
                    chain[i][x._index[i]] = chain[i + 1]

        return tree_map_only(Tensor, lambda x: written.get(id(x), x.as_subclass(Tensor)), result)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in ("device", "dtype", "filename", "mode"):
            return getattr(self._base, name)
        if callable(getattr(MemoryMappedTensor, name, None)):
            return types.MethodType(_method(name), self)
        return self.__torch_function__(getattr, (), (self, name))

    def __getitem__(self, index: Any) -> Self:
        x = self.__copy__()
        index = tree_map_only(MemmapTensor, MemmapTensor.as_tensor, index)
        parts = index if isinstance(index, tuple) else (index,)
        if self._index or not all(
            isinstance(i, _BASIC) and not isinstance(i, bool) for i in parts
        ):
            x._index = (*self._index, index)
            x._outline()  # an index that does not fit raises here
        else:
            x._base = self._base[index]
        return x

    def __len__(self) -> int:
        return len(self._outline())

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return the slices along a dimension, each a `MemmapTensor`."""
        before = (slice(None),) * (dim % max(len(self.shape), 1))
        return tuple(self[(*before, i)] for i in range(self.shape[dim]))

    def __repr__(self) -> str:
        facts = f"shape={self.shape}, device={self.device}, dtype={self.dtype}"
        return f"{type(self).__name__}({facts})"

    def __copy__(self) -> Self:
        x = type(self).__new__(type(self))
        x.__dict__.update(self.__dict__)
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if for_checkpoint(protocol):
            return self.clone().__reduce_ex__(protocol)
        owned = self.transfer_ownership and self._deletion and self._deletion.detach()
        return _rebuild, (type(self), self._base, self._index, bool(owned))


def _rebuild(kind: type[MemmapTensor], base: Any, index: tuple[Any, ...], owned: bool) -> Any:
    x = kind.__new__(kind)._on(base, index, owned, owned)
    # A base that has no file any more has come by value: so does this.
    return x if isinstance(base, MemoryMappedTensor) else x.as_tensor()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _delete(path: str, owner: int) -> None:
    if os.getpid() == owner and os.path.exists(path):  # a forked child owns nothing
        os.unlink(path)


def _method(name: str) -> Callable[..., Any]:
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, name)(*args, **kwargs)

    return lambda x, *args, **kwargs: x.__torch_function__(call, (), (x, *args), kwargs)


_binary = [prefix + name for name in _BINARY.split() for prefix in ("", "r", "i")]
for _name in (*_SPECIAL.split(), *_binary):
    setattr(MemmapTensor, f"__{_name}__", _method(f"__{_name}__"))


def _warn() -> None:
    warnings.warn(
        "MemmapTensor is deprecated. Use mmtensor.MemoryMappedTensor, which is a torch.Tensor: "
        "from_tensor(x, filename=...), zeros(*size, filename=...), or from_filename(...) for a "
        "file that exists.",
        DeprecationWarning,
        stacklevel=3,
    )
