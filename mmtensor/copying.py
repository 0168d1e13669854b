"""Copying rows and elements that lie far apart, by what is compiled where that can be."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmtensor.memory import may_be_compiled
from mmtensor.storage import mapping_of

__all__ = [
    "COMPILED",
    "copied",
    "copy_ranges",
    "copy_rows",
    "is_listened_to",
    "is_traced",
    "look_up",
]

# What of `mmtensor._copying` is known here: an older one may lie about.
_INTERFACE = 1
# What is copied by rows: so many bytes, in rows of so many.
_LARGE_ROWS, _LONG_ROW = 1 << 16, 512

is_traced: Any = torch._C._is_tracing
_count_modes: Any = torch._C._len_torch_dispatch_stack


def _nothing(*_: Any) -> bool:
    """Leave it to torch and NumPy."""
    return False


if TYPE_CHECKING:
    from mmtensor._copying import copy_ranges, copy_rows, look_up

    COMPILED = True
else:
    copy_rows = copy_ranges = look_up = _nothing
    COMPILED = False
    if may_be_compiled():
        try:
            from mmtensor import _copying

            if _copying.INTERFACE == _INTERFACE:
                from mmtensor._copying import copy_ranges, copy_rows, look_up

                COMPILED = True
        except ImportError:
            pass


def is_listened_to() -> bool:
    """Whether somebody writes down which operators run, and so must hear torch's own."""
    return is_traced() or _count_modes() > 0  # type: ignore[no-any-return]  # bools


def copied(source: Tensor, ids: Tensor, target: Tensor) -> bool:
    """Copy large rows by their numbers, faster than `index_select`; False: that must do it.

    Parameters
    ----------
    source
        Of any dtype.
    ids
        The numbers; False if one of them is negative or out of range, and nothing is copied.
    target
        Of the same dtype, with as many rows of the same shape.
    """
    nbytes = target.nbytes
    count = len(ids)
    if (
        not COMPILED
        or nbytes < _LARGE_ROWS
        or nbytes < _LONG_ROW * count
        or ids.dtype is not torch.int64
        or not (source.is_contiguous() and target.is_contiguous() and ids.is_contiguous())
        or target.is_inference()
        or is_listened_to()
    ):
        return False
    try:
        to, numbers = target.data_ptr(), ids.data_ptr()
        mapping = mapping_of(source)
        start = source.data_ptr() if mapping is None else mapping.address
    except RuntimeError:
        return False  # read-only: torch has something to say about that, or can read them
    if mapping is not None:
        start += int(source.storage_offset()) * source.itemsize
    row, size = nbytes // count, source.nbytes
    for other, length in ((start, size), (numbers, ids.nbytes)):
        if to < other + length and other < to + nbytes:
            return False  # the target lies in what is read: torch refuses that
    if not copy_rows(to, start, numbers, count, row, size // row):
        return False
    torch.autograd.graph.increment_version(target)
    return True
