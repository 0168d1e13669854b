"""Which elements of a jagged tensor equal a tensor: ``in``, `index` and `count`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtensor.bridge import to_torch

__all__ = ["JaggedSearch"]


def _equal(one: Tensor, other: Tensor) -> bool:
    try:
        return bool((one == other).all())
    except RuntimeError:  # torch has no common dtype for float8 and float32, or uint16 and int64
        return bool((one.to(torch.float64) == other.to(torch.float64)).all())


class JaggedSearch:
    """What a sequence of tensors says of one: equal is who has the same shape and values.

    The methods of `collections.abc.Sequence` compare with ``==``, which gives a tensor.
    """

    __slots__ = ()

    def _equal_to(self, value: Any) -> Iterator[int]:
        """Yield the positions of the elements that equal a tensor."""
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            value = to_torch(array.astype(array.dtype.newbyteorder("=")))
        if not isinstance(value, Tensor):
            raise TypeError(f"expected a tensor or an array to look for, got {value!r}.")
        me: Any = self
        table = me._table()
        if table.shape[1] != value.dim():
            return
        for row in np.flatnonzero((table == tuple(value.shape)).all(axis=1)):
            if _equal(me[int(row)], value):
                yield int(row)

    def __contains__(self, value: Any) -> bool:
        return next(self._equal_to(value), None) is not None

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the position of the first element that equals a tensor, as `list.index`.

        Parameters
        ----------
        value
            A tensor or an array, of the shape of one element.
        start, stop
            Where to look.

        Raises
        ------
        ValueError
            If there is none.

        Examples
        --------
        >>> j = mmtensor.JaggedTensor.from_tensors([torch.ones(2), torch.ones(3)])
        >>> j.index(torch.ones(3)), torch.zeros(3) in j, j.count(torch.ones(2))
        (1, False, 1)
        """
        window: Any = self
        first, last, _ = slice(start, stop).indices(len(window))
        found = next(window[first:last]._equal_to(value), None) if first < last else None
        if found is None:
            raise ValueError(f"no element equals the tensor of shape {tuple(value.shape)}.")
        return int(first + found)

    def count(self, value: Any) -> int:
        """Return how many elements equal a tensor."""
        return sum(1 for _ in self._equal_to(value))
