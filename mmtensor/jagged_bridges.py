"""Jagged tensors as torch nested tensors, padded tensors and awkward arrays, and back."""

import importlib
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mmtensor.arrays import byte_chunks
from mmtensor.dtypes import canonical_name
from mmtensor.errors import DeviceError, DtypeError, GradientError, ShapeError
from mmtensor.jagged_layout import Integers, uniform_rest
from mmtensor.jagged_source import Elements
from mmtensor.jagged_strings import Strings
from mmtensor.rawfile import Chunk
from mmtensor.storage import as_array, native_dtype

__all__ = ["JaggedConversions", "read_awkward", "read_nested"]

# Up to this many numbers per element, one mask over everything is faster than a loop.
_FEW = 256
# Of these torch cannot index by a mask; as numbers with a sign the same bits are moved.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_Source = tuple[torch.dtype, Integers, Iterable[Chunk]]


def read_nested(nested: Tensor) -> _Source:
    """Return dtype, shapes and bytes of a torch nested tensor.

    Raises
    ------
    TypeError
        If it is no nested tensor.
    GradientError
        If it requires gradients.
    """
    if not getattr(nested, "is_nested", False):
        raise TypeError(f"expected a torch nested tensor, got {type(nested)!r}.")
    if nested.requires_grad:
        raise GradientError(
            "a jagged tensor cannot require gradients, but the input does. Pass x.detach()."
        )
    if (whole := _read_jagged(nested)) is not None:
        return whole
    # What unbind gives are the elements as they are seen, whatever the strides.
    elements = Elements(nested.unbind(), nested.dtype, nested.dim() - 1)
    return elements.dtype, elements.shapes, elements.chunks()


def _read_jagged(nested: Any) -> _Source | None:
    """Read the buffer of a nested tensor if it is laid out as ours: unbind takes 10 us a row."""
    if nested.layout is not torch.jagged or getattr(nested, "_ragged_idx", 0) != 1:
        return None
    values, offsets = nested.values(), nested.offsets()
    if nested.lengths() is not None or not values.is_contiguous() or values.device.type != "cpu":
        return None
    positions = as_array(offsets).astype(np.int64)
    if positions[0] != 0 or positions[-1] != len(values):
        return None
    rest = values.shape[1:]
    shapes = np.empty((len(positions) - 1, 1 + len(rest)), np.int64)
    shapes[:, 0] = np.diff(positions)
    shapes[:, 1:] = rest
    return values.dtype, shapes, byte_chunks(as_array(values.detach(), force=True))


def _to_nested(j: Any, layout: torch.layout) -> Tensor:
    """Return a jagged tensor as a torch nested tensor; see `JaggedTensor.to_nested`."""
    j._check()
    if layout is torch.strided:
        try:
            return torch.nested.nested_tensor(
                [_plain(element) for element in j], dtype=j.dtype, layout=torch.strided
            )
        except NotImplementedError:
            raise DtypeError(
                f"torch has no nested tensors of {j.dtype} with torch.strided layout. Convert the "
                "elements first, for example j.to(torch.int64).to_nested(torch.strided), or use "
                "to_padded() or to_nested(torch.jagged)."
            ) from None
    if layout is not torch.jagged:
        raise ValueError(f"layout must be torch.jagged or torch.strided, got {layout!r}.")
    if j.ndim == 0:
        raise ShapeError("torch.jagged needs elements of at least one dimension.")
    table = as_array(j.shapes)
    rest = uniform_rest(table)
    if rest is not None:
        values = _plain(j.values)
        lengths = table[:, 0]
        if rest:
            values = values.view(int(lengths.sum()), *rest)
        if all(size == 1 for size in rest):
            offsets = _plain(j.offsets)
        else:
            offsets = torch.zeros(len(j) + 1, dtype=torch.int64, device="cpu")
            torch.cumsum(torch.from_numpy(np.array(lengths)), 0, out=offsets[1:])
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    try:
        return torch.nested.nested_tensor(
            [_plain(element) for element in j], dtype=j.dtype, layout=torch.jagged
        )
    except RuntimeError:
        raise ShapeError(
            "torch.jagged needs elements that differ in one dimension only. Use "
            "to_nested(torch.strided), to_padded(), or the jagged tensor as it is."
        ) from None


def _plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


def _to_padded(j: Any, padding_value: Any, *, mask: bool) -> tuple[Tensor, Tensor | None]:
    """Return a padded tensor, and where it has numbers; see `JaggedTensor.to_padded`."""
    j._check()
    shapes = as_array(j.shapes)
    count, ndim = shapes.shape
    largest = tuple(shapes.max(0).tolist()) if count else (0,) * ndim
    padded = torch.full((count, *largest), padding_value, dtype=j.dtype, device="cpu")
    numel = j.numel()
    few = numel < _FEW * count
    inside = _inside(shapes, largest) if mask or few else None
    if few and inside is not None:
        carrier = _SIGNED.get(j.dtype, j.dtype)
        padded.view(carrier)[inside] = _plain(j.values).view(carrier)
    elif numel:
        for number, element in enumerate(j):
            place: Any = (number, *map(slice, element.shape))
            padded[place] = element
    return padded, inside if mask else None


def _inside(shapes: Integers, largest: tuple[int, ...]) -> Tensor:
    """Return where a padded tensor has numbers."""
    sizes = torch.from_numpy(np.array(shapes))
    inside = torch.ones((len(shapes), *largest), dtype=torch.bool, device="cpu")
    for dim, size in enumerate(largest):
        steps = torch.arange(size, device="cpu").view(-1, *[1] * (len(largest) - dim - 1))
        inside &= steps < sizes[:, dim].view(-1, *[1] * len(largest))
    return inside


def _awkward() -> Any:
    try:
        return importlib.import_module("awkward")
    except ImportError:
        raise ImportError(
            "awkward arrays need the package awkward, which is not installed: pip install awkward."
        ) from None


def _to_awkward(j: Any) -> Any:
    """Return a jagged tensor as an awkward array; see `JaggedTensor.to_awkward`."""
    j._check()
    ak = _awkward()
    contents, index = ak.contents, ak.index
    shapes = as_array(j.shapes)
    count, ndim = shapes.shape
    layout = contents.NumpyArray(as_array(j.values))
    if ndim == 0:
        return ak.Array(layout)
    rest = uniform_rest(shapes)
    if rest == ():
        return ak.Array(contents.ListOffsetArray(index.Index64(as_array(j.offsets)), layout))
    # From the inside out: each row of dimension d is a list as long as dimension d + 1.
    for dim in range(ndim - 1, -1, -1):
        rows = np.multiply.reduce(shapes[:, :dim], 1) if dim else np.ones(count, np.int64)
        offsets = np.zeros(int(rows.sum()) + 1, np.int64)
        np.repeat(shapes[:, dim], rows).cumsum(out=offsets[1:])
        layout = contents.ListOffsetArray(index.Index64(offsets), layout)
    return ak.Array(layout)


def read_awkward(array: Any) -> _Source:
    """Return dtype, shapes and bytes of an awkward array of lists of numbers.

    Raises
    ------
    ShapeError
        If one of its elements is not rectangular.
    """
    ak = _awkward()
    array = ak.Array(array)
    ndim = array.ndim - 1
    if ndim < 1:
        raise ShapeError(f"expected an awkward array of lists, got one of type {array.type}.")
    if any(ak.any(ak.is_none(array, axis=axis), axis=None) for axis in range(array.ndim)):
        raise ValueError(
            "the awkward array has missing values (None), which a tensor cannot hold. Fill them "
            "first: ak.fill_none(array, value)."
        )
    shapes = np.empty((len(array), ndim), np.int64)
    for dim in range(ndim):
        lengths = ak.num(array, axis=dim + 1)
        shapes[:, dim] = ak.to_numpy(_common(ak, lengths, dim) if dim else lengths)
    values = ak.to_numpy(ak.flatten(array, axis=None))
    dtype = native_dtype(canonical_name(values.dtype))
    return dtype, shapes, [np.ascontiguousarray(values).view(np.uint8).data]


def _common(ak: Any, lengths: Any, dim: int) -> Any:
    """Return the one length that all lists of an element have at some depth."""
    for _ in range(dim - 1):
        lengths = ak.flatten(lengths, axis=2)
    low = ak.fill_none(ak.min(lengths, axis=1), 0)
    high = ak.fill_none(ak.max(lengths, axis=1), 0)
    if not bool(ak.all(low == high)):
        row = int(np.flatnonzero(ak.to_numpy(low != high))[0])
        raise ShapeError(
            f"element {row} is not rectangular: its lists have {int(low[row])} to "
            f"{int(high[row])} entries at depth {dim + 1}."
        )
    return low


def _strings(j: Any) -> Strings:
    """Return the elements of a jagged tensor of bytes as strings."""
    if j.dtype is not torch.uint8 or j.ndim != 1:
        raise TypeError(
            "strings are elements of torch.uint8 with one dimension, these are of "
            f"{j.dtype} with {j.ndim}."
        )
    return Strings(j)


class JaggedConversions:
    """The methods of `JaggedTensor` that make something else of it."""

    __slots__ = ()

    def to_nested(self, layout: torch.layout = torch.jagged) -> Tensor:
        """Return a torch nested tensor.

        Parameters
        ----------
        layout
            `torch.jagged`: on the same values, without a copy, where only the first dimension
            varies. Where another one does, and no more than one, the values are copied.
            `torch.strided`: a copy, of any shapes; torch has it for some dtypes only.

        Raises
        ------
        ShapeError
            A `ValueError`: torch has no such tensor in this layout.
        DtypeError
            A `TypeError`: torch has none of this dtype (uint16 to uint64, float8) in this layout.

        Examples
        --------
        >>> j = JaggedTensor.from_tensors([torch.ones(2, 3), torch.zeros(1, 3)])
        >>> j.to_nested().values().shape
        torch.Size([3, 3])
        """
        return _to_nested(self, layout)

    def to_padded(self, padding_value: float = 0, *, return_mask: bool = False) -> Any:
        r"""Return a regular tensor with all elements padded to the largest sizes.

        Parameters
        ----------
        padding_value
            What stands where an element has nothing.
        return_mask
            Whether to return, as well, a tensor of bools that is true where an element has a
            number. The lengths are in ``j.shapes``.

        Returns
        -------
        torch.Tensor or tuple
            Of shape (n, \*largest sizes); with `return_mask` also the mask, of that shape.

        Examples
        --------
        >>> j = JaggedTensor.from_tensors([torch.tensor([1, 2]), torch.tensor([3])])
        >>> j.to_padded(-1)
        tensor([[ 1,  2],
                [ 3, -1]])
        """
        padded, mask = _to_padded(self, padding_value, mask=return_mask)
        return (padded, mask) if return_mask else padded

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return a jagged tensor of another dtype, in regular memory; itself if it is of this one.

        Parameters
        ----------
        *args, **kwargs
            As for `torch.Tensor.to`: a dtype, ``copy=True``. The device stays the CPU.

        Raises
        ------
        DeviceError
            A `ValueError` (and `RuntimeError`): another device.

        Examples
        --------
        >>> j = JaggedTensor.from_tensors([torch.tensor([1, 2]), torch.tensor([3])])
        >>> j.to(torch.float32)[0]
        tensor([1., 2.])
        """
        me: Any = self
        copy = kwargs.pop("copy", False)
        parse: Any = torch._C._nn._parse_to  # what torch's own `to` of modules asks
        device, dtype, *_ = parse(*args, **kwargs)
        if device is not None and device.type != "cpu":
            raise DeviceError(
                f"a jagged tensor lives on the CPU, got device={str(device)!r}. Move what torch "
                "can hold there: j.to_nested().to(device), or j.to_padded().to(device)."
            )
        if not copy and dtype in (None, me.dtype):
            return self
        moved = _plain(me.values).to(me.dtype if dtype is None else dtype, copy=True)
        return type(me)(moved, me.shapes.clone(), me.offsets.clone())  # type: ignore[no-any-return]  # of this class

    def to_awkward(self) -> Any:
        """Return an `awkward.Array` on the same values, without copying them.

        Raises
        ------
        ImportError
            If the package awkward is not installed.
        """
        return _to_awkward(self)

    @property
    def strings(self) -> Strings:
        """The elements as a sequence of str, each decoded when it is read.

        Raises
        ------
        TypeError
            If the elements are not of uint8 and one dimension.

        Examples
        --------
        >>> JaggedTensor.from_strings(["a", "b", "c"]).strings[-1]
        'c'
        """
        return _strings(self)

    def to_strings(self) -> list[str]:
        """Return all elements as a list of str; see `strings`.

        Examples
        --------
        >>> JaggedTensor.from_strings(["one", "two"]).to_strings()
        ['one', 'two']
        """
        return self.strings.decode_all()

    def to_bytes(self) -> list[bytes]:
        """Return all elements as a list of bytes; see `strings`.

        Examples
        --------
        >>> JaggedTensor.from_strings([b"one", b""]).to_bytes()
        [b'one', b'']
        """
        return self.strings.encoded_all()
