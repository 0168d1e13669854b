"""The way up to jagged tensors, which stand on memory-mapped ones: a table of shapes means one."""

from typing import Any

from torch import Tensor

__all__ = ["is_table", "jagged", "register_jagged"]

# What makes jagged tensors; `mmtensor.jagged` puts it here when it is imported, which the
# package does together with `mmtensor.tensor`.
_door: Any = None


def is_table(shape: object) -> bool:
    """Whether a shape is a 2-D integer tensor: one row of sizes for each element."""
    if type(shape) is tuple:
        return False
    return isinstance(shape, Tensor) and shape.dim() == 2 and not shape.is_floating_point()


def register_jagged(door: Any) -> None:
    """Let the constructors of memory-mapped tensors make jagged ones."""
    global _door
    _door = door


def jagged() -> Any:
    """Return what makes jagged tensors.

    Raises
    ------
    TypeError
        If `mmtensor.jagged` was not imported.
    """
    if _door is None:
        raise TypeError("jagged tensors need an import of mmtensor.jagged first.")
    return _door
