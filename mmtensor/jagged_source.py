"""Reading the elements of a jagged tensor: what they have in common, and their bytes."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtensor.creation import check_regular
from mmtensor.dtypes import canonical_name
from mmtensor.errors import DtypeError, GradientError, ShapeError
from mmtensor.jagged_layout import Integers, counts_of
from mmtensor.rawfile import CHUNK, Chunk, Pieces
from mmtensor.storage import NATIVE, as_array, native_dtype
from mmtensor.syscalls import HAVE_MMAP

__all__ = ["Elements", "bytes_of", "dtype_of", "rejection"]

# One pwritev(2) takes at most this many pieces of memory (IOV_MAX of Linux).
_PIECES = 1024
# Smaller pieces are joined first: a copy costs less than the kernel's work for one more.
_SMALL = 2048
_DENSE = frozenset((torch.strided,))


def dtype_of(element: Any) -> torch.dtype:
    """Return the torch dtype of a tensor or array.

    Raises
    ------
    TypeError
        If it is neither, or of a dtype that torch has not.
    """
    if isinstance(element, Tensor):
        return element.dtype
    if isinstance(element, np.ndarray):
        return native_dtype(canonical_name(element.dtype))
    raise TypeError(f"an element must be a torch tensor or a NumPy array, got {type(element)!r}.")


def rejection(
    element: Any, dtype: torch.dtype, ndim: int, which: str, instead: str
) -> Exception | None:
    """Say what keeps a tensor or array from being an element; None if nothing does.

    Parameters
    ----------
    element
        What came.
    dtype, ndim
        What is asked for.
    which
        How the message calls the element, for example ``"element 3"``.
    instead
        Where `dtype` and `ndim` come from, for example ``"element 0 has"``.
    """
    try:
        found = dtype_of(element)
        if isinstance(element, Tensor):
            check_regular(element)
    except (TypeError, GradientError) as error:
        return type(error)(f"{which}: {error}")
    if found != dtype:
        return DtypeError(
            f"{which} has dtype {found}, but {instead} {dtype}. Nothing is converted silently: "
            "convert it first."
        )
    if element.ndim != ndim:
        return ShapeError(
            f"{which} has {element.ndim} dimensions (shape {tuple(element.shape)}), but "
            f"{instead} {ndim}."
        )
    return None


class Elements:
    """Tensors and arrays of one dtype and one number of dimensions.

    Parameters
    ----------
    elements
        The tensors and arrays.
    dtype, ndim
        What they must have; None: what the first one has.

    Attributes
    ----------
    shapes : numpy.ndarray
        One row of sizes per element.

    Raises
    ------
    TypeError, ShapeError, GradientError
        It names the first element that does not fit.
    """

    def __init__(
        self, elements: Iterable[Any], dtype: torch.dtype | None = None, ndim: int | None = None
    ) -> None:
        self._elements = items = list(elements)
        if items and dtype is None:
            if (error := _unusable(items[0])) is not None:
                raise error
            dtype = dtype_of(items[0])
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.ndim = (items[0].ndim if items else 1) if ndim is None else ndim
        self.shapes: Integers = self._table()

    def _table(self) -> Integers:
        items, dtype, ndim = self._elements, self.dtype, self.ndim
        self._addresses: list[int] | None = None
        # One question to all elements at a time is twice as fast as all questions to each.
        plain = set(map(type, items)) <= {Tensor} and {x.is_cpu for x in items} <= {True}
        if (
            not plain
            or {x.dtype for x in items} - {dtype}
            or {x.layout for x in items} - _DENSE
            or True in {x.requires_grad for x in items}
        ):
            self._check_each()
            plain = False
        shapes = [x.shape for x in items]
        if set(map(len, shapes)) - {ndim}:
            self._check_each()
        contiguous = plain and {x.is_contiguous() for x in items} <= {True}
        if contiguous and HAVE_MMAP and not _marked(items, dtype):
            try:
                # NumPy arrays, which Python's pwritev takes, would cost 0.7 us each.
                self._addresses = [x.data_ptr() for x in items]
            except RuntimeError:
                pass  # read-only
        return np.fromiter(chain.from_iterable(shapes), np.int64).reshape(len(items), ndim)

    def _check_each(self) -> None:
        for number, element in enumerate(self._elements):
            origin = "element 0 has" if number else "expected"
            error = rejection(element, self.dtype, self.ndim, f"element {number}", origin)
            if error is not None:
                raise error

    def chunks(self) -> Iterator[Chunk]:
        """Yield the bytes of all elements, in pieces for `rawfile.write_chunks`."""
        if self._addresses is not None:
            yield Pieces(self._addresses, counts_of(self.shapes) * self.dtype.itemsize)
            return
        batch: list[Any] = []
        nbytes = 0
        for element in self._elements:
            piece = bytes_of(element)
            batch.append(piece)
            nbytes += piece.nbytes
            if len(batch) == _PIECES or nbytes >= CHUNK:
                yield _joined(batch, nbytes)
                batch, nbytes = [], 0
        if batch:
            yield _joined(batch, nbytes)


def _marked(items: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether some are conjugated or negated views, whose memory holds other values."""
    if dtype.is_complex:
        return True in {x.is_neg() or x.is_conj() for x in items}
    return dtype.is_floating_point and True in {x.is_neg() for x in items}


def _joined(batch: list[Any], nbytes: int) -> Chunk:
    return b"".join(batch) if nbytes < _SMALL * len(batch) else batch


def _unusable(element: Any) -> Exception | None:
    try:
        return rejection(element, dtype_of(element), element.ndim, "element 0", "expected")
    except TypeError as error:
        return type(error)(f"element 0: {error}")


def bytes_of(element: Any) -> np.ndarray[Any, Any]:
    """Return a tensor or array as a C-contiguous array that hands out its memory.

    Parameters
    ----------
    element
        Of any memory layout; one that is not contiguous, or elsewhere, is copied.
    """
    if type(element) is Tensor and element.dtype in NATIVE and element.is_contiguous():
        try:
            return element.numpy()
        except (RuntimeError, TypeError):
            pass  # read-only, on another device, conjugated: below
    if isinstance(element, Tensor):
        element = as_array(element.detach().cpu(), force=True)
    array = np.asarray(element)
    if not array.flags.c_contiguous:
        array = np.array(array, order="C", subok=False)
    # Arrays of ml_dtypes hand out no memory; their bytes do.
    return array if array.dtype.isbuiltin == 1 else array.reshape(-1).view(np.uint8)
