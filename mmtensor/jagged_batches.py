"""Several jagged tensors as one, and batches for a `DataLoader`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtensor.errors import DtypeError, ShapeError
from mmtensor.jagged import JaggedTensor
from mmtensor.jagged_parts import make_parts
from mmtensor.jagged_source import Elements
from mmtensor.rawfile import Path

__all__ = ["JaggedCollate", "cat"]

_LAYOUTS = ("jagged", "nested", "strided", "padded")


def cat(
    tensors: Sequence[JaggedTensor], filename: Path | None = None, *, existsok: bool = False
) -> JaggedTensor:
    """Copy several jagged tensors into one, one after the other.

    Parameters
    ----------
    tensors
        Of one dtype and one number of dimensions.
    filename
        The file of the values; None: anonymous shared memory.
    existsok
        Whether existing files are replaced.

    Returns
    -------
    JaggedTensor
        With mode ``"r+"``.

    Raises
    ------
    ValueError
        If there is none.
    DtypeError, ShapeError
        If one does not fit the first.

    Examples
    --------
    >>> one = mmtensor.JaggedTensor.from_tensors([torch.ones(2), torch.ones(1)])
    >>> two = mmtensor.JaggedTensor.from_tensors([torch.zeros(3)])
    >>> mmtensor.cat([one, two], "both.memmap").values
    MemoryMappedTensor([1., 1., 1., 0., 0., 0.])
    """
    parts = list(tensors)
    if not parts:
        raise ValueError("cat needs at least one jagged tensor.")
    first = parts[0]
    for number, part in enumerate(parts):
        if not isinstance(part, JaggedTensor):
            raise TypeError(f"cat takes jagged tensors, got {type(part)!r} as number {number}.")
        if part.dtype != first.dtype:
            raise DtypeError(
                f"tensor {number} has dtype {part.dtype}, but tensor 0 has {first.dtype}."
            )
        if part.ndim != first.ndim:
            raise ShapeError(
                f"the elements of tensor {number} have {part.ndim} dimensions, but those of "
                f"tensor 0 have {first.ndim}."
            )
    shapes = np.concatenate([part._table() for part in parts])

    def chunks() -> Iterator[memoryview]:
        for part in parts:
            yield from part._chunks()

    return JaggedTensor._of(make_parts(first.dtype, shapes, chunks(), filename, existsok=existsok))


class JaggedCollate:
    """A ``collate_fn`` that makes one tensor of elements of different shapes.

    Parameters
    ----------
    layout
        ``"jagged"``: a `JaggedTensor`. ``"nested"``: a torch nested tensor with
        `torch.jagged` layout. ``"strided"``: one with `torch.strided` layout. ``"padded"``: a
        regular tensor; see `JaggedTensor.to_padded`.
    padding_value
        What stands in a padded tensor where an element has nothing.
    return_mask
        Whether a padded tensor comes with its mask, as a tuple.

    Examples
    --------
    >>> j = mmtensor.JaggedTensor.from_tensors([torch.ones(2), torch.ones(1), torch.ones(3)])
    >>> collate = mmtensor.JaggedCollate("padded")
    >>> for batch in torch.utils.data.DataLoader(j, batch_size=2, collate_fn=collate):
    ...     print(batch)
    tensor([[1., 1.],
            [1., 0.]])
    tensor([[1., 1., 1.]])
    """

    def __init__(
        self, layout: str = "nested", *, padding_value: float = 0, return_mask: bool = False
    ) -> None:
        if layout not in _LAYOUTS:
            raise ValueError(
                f"layout must be one of {', '.join(map(repr, _LAYOUTS))}, got {layout!r}."
            )
        self.layout = layout
        self.padding_value = padding_value
        self.return_mask = return_mask

    def __call__(self, batch: Any) -> Any:
        """Make one tensor of a batch.

        Parameters
        ----------
        batch
            A `JaggedTensor`, a list of one (which a `JaggedTensor` gives as a data set), or
            a list of tensors.

        Raises
        ------
        TypeError
            If it is something else, such as a batch of a `TensorDict`.
        """
        if isinstance(batch, list) and len(batch) == 1 and isinstance(batch[0], JaggedTensor):
            batch = batch[0]
        one = batch[0] if isinstance(batch, list) and batch else batch
        if hasattr(one, "batch_size"):
            raise TypeError(
                "JaggedCollate makes one tensor of the elements of a JaggedTensor, got a "
                f"{type(one).__name__}. Pass a function that does so with a leaf, for example "
                'collate_fn=lambda batch: batch["tokens"].to_padded().'
            )
        if not isinstance(batch, JaggedTensor):
            batch = _gathered(batch)
        if self.layout == "padded":
            return batch.to_padded(self.padding_value, return_mask=self.return_mask)
        if self.layout == "jagged":
            return batch
        return batch.to_nested(torch.jagged if self.layout == "nested" else torch.strided)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layout!r}, padding_value={self.padding_value!r})"


def _gathered(tensors: Sequence[Tensor]) -> JaggedTensor:
    """Copy tensors into one jagged tensor in regular memory."""
    elements = Elements(tensors)
    flat = [torch.as_tensor(tensor).reshape(-1) for tensor in tensors]
    values = torch.cat(flat) if flat else torch.empty(0, dtype=elements.dtype, device="cpu")
    return JaggedTensor(values, elements.shapes)
