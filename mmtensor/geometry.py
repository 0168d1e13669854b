"""What a shape means in bytes: sizes, strides, spans, and whether a file fits."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from mmtensor.errors import ShapeError, SizeError

__all__ = [
    "MAX_BYTES",
    "MAX_DIMENSIONS",
    "as_count",
    "as_offset",
    "as_shape",
    "byte_count",
    "c_strides",
    "fit",
    "span",
]

# off_t and size_t of 64-bit systems; torch counts bytes in int64 as well.
MAX_BYTES = 2**63 - 1
# NumPy 2 and the kernels of torch go no further.
MAX_DIMENSIONS = 64


def as_shape(shape: object, *, infer: bool = False) -> tuple[int, ...]:
    """Return a shape as a tuple of ints.

    Parameters
    ----------
    shape
        An integer or an iterable of integers (a list, a ``torch.Size``, a 1-D array).
    infer
        Whether one entry may be ``-1``.

    Raises
    ------
    ShapeError
        If an entry is negative (other than one ``-1`` where `infer` is true).
    TypeError
        If `shape` holds something that is not an integer.

    Examples
    --------
    >>> as_shape(3), as_shape([2, -1], infer=True)
    ((3,), (2, -1))
    """
    if type(shape) is tuple:
        for size in shape:
            if type(size) is not int or size < 0:
                break
        else:
            return shape  # the usual case, at a third of the cost
    try:
        if isinstance(shape, str | bytes | AbstractSet | Mapping):  # iterables that are no sizes
            raise TypeError  # noqa: TRY301  # one message for all that is no shape
        if isinstance(shape, Iterable) and getattr(shape, "ndim", 1) == 1:
            sizes = tuple([operator.index(size) for size in shape])
        else:
            sizes = (operator.index(shape),)  # type: ignore[arg-type]  # it raises what it should
    except TypeError:
        raise TypeError(
            f"shape must be an integer or a sequence of integers, got {shape!r}."
        ) from None
    if sizes and min(sizes) < 0:
        unknown = sizes.count(-1)
        if min(sizes) < -1 or not infer:
            allowed = "" if not infer else ", or one -1"
            raise ShapeError(f"shape must have non-negative sizes only{allowed}, got {sizes}.")
        if unknown > 1:
            raise ShapeError(f"shape must have at most one -1, got {sizes}.")
    return sizes


def as_count(name: str, value: object, least: int = 0) -> int:
    """Return an argument that counts something as an int.

    Parameters
    ----------
    name
        Of the argument, for the message.
    value
        What came.
    least
        The smallest number allowed.

    Raises
    ------
    ValueError
        If it is no integer, or a smaller one.

    Examples
    --------
    >>> as_count("batch_size", 3, 1)
    3
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # it raises what it should
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be an integer of {least} or more, got {value!r}.")
    return number


def as_offset(offset: object) -> int:
    """Return a byte offset as an int.

    Raises
    ------
    ValueError
        If it is negative.
    TypeError
        If it is not an integer.

    Examples
    --------
    >>> as_offset(16)
    16
    """
    try:
        value = operator.index(offset)  # type: ignore[arg-type]  # it raises what it should
    except TypeError:
        raise TypeError(f"offset must be an integer (bytes), got {offset!r}.") from None
    if value < 0:
        raise ValueError(f"offset must be non-negative (bytes), got {value}.")
    return value


def byte_count(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes that elements of `itemsize` bytes in this shape take.

    Raises
    ------
    ShapeError
        If the count exceeds what a file or an address can hold.

    Examples
    --------
    >>> byte_count((2, 3), 4)
    24
    """
    if len(shape) > MAX_DIMENSIONS:
        raise ShapeError(f"shape must have at most {MAX_DIMENSIONS} dimensions, got {len(shape)}.")
    nbytes = math.prod(shape) * itemsize
    # Strides are counted as if a size of 0 were 1, and NumPy and torch refuse what overflows.
    if nbytes > MAX_BYTES or (
        nbytes == 0 and math.prod([size or 1 for size in shape]) * itemsize > MAX_BYTES
    ):
        raise ShapeError(
            f"shape must take at most 2**63 - 1 bytes, got {tuple(shape)} with {itemsize} "
            f"bytes per element."
        )
    return nbytes


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array, in elements.

    Examples
    --------
    >>> c_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return how many bytes lie from the first byte of a strided array to past its last.

    Parameters
    ----------
    shape, strides
        Sizes and non-negative strides, the latter in elements.
    itemsize
        Bytes per element.

    Examples
    --------
    >>> span((2, 3), (10, 1), 4)
    52
    """
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * itemsize


def fit(
    shape: tuple[int, ...],
    dtype: Any,
    size: int,
    offset: int = 0,
    partial: bool = False,
    what: str = "file",
    name: str | None = None,
) -> tuple[tuple[int, ...], int]:
    """Fit a shape to the bytes that are there.

    Parameters
    ----------
    shape
        From `as_shape`; one ``-1`` is inferred.
    dtype
        A NumPy dtype.
    size
        Bytes in the file or block.
    offset
        Bytes before the data.
    partial
        Whether bytes may be left over at the end.
    what, name
        How an error calls the bytes, for example ``"file"`` and its path.

    Returns
    -------
    tuple
        The shape without ``-1``, and its bytes.

    Raises
    ------
    SizeError
        If `size` is not exactly what the shape takes, or with `partial` less than that.
    ShapeError
        If the byte count of the shape overflows.

    Examples
    --------
    >>> import numpy as np
    >>> fit((-1, 3), np.dtype("f4"), 24)
    ((2, 3), 24)
    """
    available = size - offset
    if 0 < math.prod(shape) * dtype.itemsize == available and len(shape) <= MAX_DIMENSIONS:
        return shape, available  # the usual case, at half the cost
    if -1 not in shape:
        nbytes = byte_count(shape, dtype.itemsize)
        if nbytes == available or (partial and nbytes < available):
            return shape, nbytes
    if name is not None:
        what = f"{what} {name!r}"
    if -1 in shape:
        row = byte_count([n for n in shape if n != -1], dtype.itemsize)
        count, rest = divmod(available, row) if row and available >= 0 else (0, available)
        if available < 0 or (rest and not partial):
            raise SizeError(
                f"{what} must have whole rows of {row} bytes after offset {offset} for shape "
                f"{shape} of {dtype.name}, but its size is {size} bytes: "
                + (f"{rest} too many. " if available >= 0 else "less than the offset. ")
                + "Correct shape, dtype or offset"
                + (", or pass partial=True." if available >= 0 else ".")
            )
        return tuple([count if n == -1 else n for n in shape]), count * row
    raise SizeError(
        f"{what} must have {offset + nbytes} bytes for shape {shape} of {dtype.name}"
        + (f" at offset {offset}" if offset else "")
        + f", but its size is {size} bytes. {_what_would_fit(shape, dtype, available)}"
    )


def _what_would_fit(shape: tuple[int, ...], dtype: Any, available: int) -> str:
    """Name the shape or the itemsize that the bytes at hand would fit."""
    if available < 0:
        return "The offset is beyond its end."
    row = math.prod(shape[1:]) * dtype.itemsize
    hints = []
    if shape and row and available % row == 0:
        hints.append(f"shape {(available // row, *shape[1:])}")
    elements = math.prod(shape)
    if elements and available % elements == 0 and available:
        itemsize = available // elements
        if itemsize in (1, 2, 4, 8, 16) and itemsize != dtype.itemsize:
            hints.append(f"a dtype of {itemsize} byte{'s' if itemsize > 1 else ''} per element")
    enough = math.prod(shape) * dtype.itemsize < available
    if enough:
        hints.append("partial=True, to map a part on purpose")
    return f"What would fit: {'; '.join(hints)}." if hints else "Correct shape, dtype or offset."
