"""Raw files and shared memory as NumPy arrays and torch tensors."""

import importlib
from typing import TYPE_CHECKING, Any

from mmtensor.arrays import (
    Location,
    MemoryMappedArray,
    create_array,
    locate,
    open_array,
    save_array,
)
from mmtensor.errors import (
    DeviceError,
    DtypeError,
    ExistingFileError,
    GradientError,
    LockedError,
    ManifestError,
    MapError,
    MmtensorError,
    ModeError,
    ReadOnlyError,
    ShapeError,
    SizeError,
    StaleFileError,
    SymbolicLinkError,
)

if TYPE_CHECKING:
    from mmtensor.bridge import to_numpy as to_numpy
    from mmtensor.bridge import to_torch as to_torch
    from mmtensor.jagged import JaggedTensor as JaggedTensor
    from mmtensor.jagged_batches import JaggedCollate as JaggedCollate
    from mmtensor.jagged_batches import cat as cat
    from mmtensor.jagged_writer import JaggedWriter as JaggedWriter
    from mmtensor.legacy import MemmapTensor as MemmapTensor
    from mmtensor.tensor import MemoryMappedTensor as MemoryMappedTensor
    from mmtensor.tensordict import TensorDict as TensorDict

__all__ = [
    "DeviceError",
    "DtypeError",
    "ExistingFileError",
    "GradientError",
    "JaggedCollate",
    "JaggedTensor",
    "JaggedWriter",
    "Location",
    "LockedError",
    "ManifestError",
    "MapError",
    "MemmapTensor",
    "MemoryMappedArray",
    "MemoryMappedTensor",
    "MmtensorError",
    "ModeError",
    "ReadOnlyError",
    "ShapeError",
    "SizeError",
    "StaleFileError",
    "SymbolicLinkError",
    "TensorDict",
    "cat",
    "create_array",
    "locate",
    "open_array",
    "save_array",
    "to_numpy",
    "to_torch",
]

__version__ = "0.1.0"

# Names that need torch, which takes ten times as long to import as all the rest: they are
# found when they are first asked for.
_LAZY = {
    "JaggedCollate": "mmtensor.jagged_batches",
    "JaggedTensor": "mmtensor.jagged",
    "JaggedWriter": "mmtensor.jagged_writer",
    "MemmapTensor": "mmtensor.legacy",
    "MemoryMappedTensor": "mmtensor.tensor",
    "TensorDict": "mmtensor.tensordict",
    "cat": "mmtensor.jagged_batches",
    "to_numpy": "mmtensor.bridge",
    "to_torch": "mmtensor.bridge",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    # Whoever has the one class finds the other behind it: a 2-D shape gives a jagged tensor.
    importlib.import_module("mmtensor.jagged")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
