"""The figures to reach: one entry for each row of the table, keyed by benchmark."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["GROUPS", "TARGETS", "Group", "Target"]


class Target(NamedTuple):
    """Bounds on the ratios of one operation.

    Parameters
    ----------
    tensordict, mmap_ninja, safetensors, torch
        How many times as long the peer must take, at least.
    limit
        How many times as long as the limit it may take, at most.
    bytes_
        How long the message may be, at most.
    more_than_numpy
        How many seconds longer than NumPy it may take, at most.
    """

    tensordict: float | None = None
    mmap_ninja: float | None = None
    safetensors: float | None = None
    torch: float | None = None
    limit: float | None = None
    bytes_: int | None = None
    more_than_numpy: float | None = None


class Group(NamedTuple):
    """Bounds on the ratios of tensordict to mmtensor of several operations.

    Parameters
    ----------
    name
        What they have in common, in words.
    median, least
        What the median of the ratios must reach, and each of them.
    members
        Names of benchmarks; empty: all that have a counterpart in tensordict.
    exceptions
        What single ones must reach instead, by name.
    """

    name: str
    median: float
    least: float
    members: tuple[str, ...] = ()
    exceptions: Mapping[str, float] = MappingProxyType({})


TARGETS: dict[str, Target] = {
    "index.Row": Target(tensordict=3, limit=2.6),
    "index.Slice": Target(tensordict=3, limit=2.6),
    "index.Column": Target(tensordict=3, limit=2.6),
    "index.Unbind": Target(tensordict=5),
    "index.Gather": Target(tensordict=10, torch=10, limit=1.6),
    "index.GatherUncached": Target(limit=1.6),
    "index.Scatter": Target(tensordict=10, torch=10, limit=1.6),
    "arithmetic.AddOne": Target(tensordict=1, limit=1.2),
    "arithmetic.Contiguous": Target(tensordict=1),
    "arithmetic.Stack": Target(tensordict=1, limit=1.35),
    "arithmetic.Shape": Target(tensordict=1),
    "open.Open": Target(tensordict=1.6, limit=1.6),
    "write.FromTensor1KB": Target(tensordict=1.3),
    "write.FromTensor1MB": Target(tensordict=5, limit=1.7),
    "write.FromTensor256MB": Target(tensordict=2, limit=1.2),
    "create.Zeros1MB": Target(tensordict=10),
    "create.Zeros256MB": Target(tensordict=50),
    "create.Creation": Target(tensordict=1.3),
    "create.EmptyFile": Target(tensordict=1.2),
    "pickle.PickleView": Target(tensordict=1.8, bytes_=300),
    "pickle.LoadViews": Target(tensordict=5),
    "pickle.LoadViewsOneByOne": Target(tensordict=5),
    "queue.QueueFile": Target(tensordict=1.4),
    "queue.QueueNewFile": Target(tensordict=1.4),
    "queue.QueueAnonymous": Target(tensordict=0.9),
    "read.SumNewFile": Target(tensordict=1.5, limit=1.15),
    "queue.QueueTensorDict": Target(tensordict=10),
    "tensordict.MemmapTdIndex": Target(tensordict=2),
    "tensordict.MemmapTdIndexAsTensor": Target(tensordict=2),
    "tensordict.MemmapTdIndexOp": Target(tensordict=1.8),
    "tensordict.MemmapTdUnbind": Target(tensordict=2),
    "tensordict.MemmapTdGather": Target(tensordict=1.3),
    "tensordict.MemmapTdIndexKey": Target(tensordict=10),
    "save_load.SaveMany": Target(tensordict=2),
    "save_load.SaveOver": Target(tensordict=0.35),
    "save_load.LoadMany": Target(tensordict=2),
    "save_load.SerializeLarge": Target(tensordict=3, safetensors=1, limit=1.25),
    "save_load.LoadLarge": Target(tensordict=1.8, limit=1.9),
    "jagged.Element": Target(tensordict=9, mmap_ninja=3.5, limit=2.2),
    "jagged.Batch": Target(mmap_ninja=8, limit=4.5),
    "jagged.Open": Target(tensordict=60, mmap_ninja=7),
    "jagged.OpenMany": Target(limit=1.2),
    "jagged.Build": Target(tensordict=3, mmap_ninja=3, limit=1.5),
    "jagged.BuildWithTwo": Target(mmap_ninja=4),
    "jagged.Append": Target(mmap_ninja=80),
    "jagged.Pickle": Target(bytes_=500),
    "map.Returning": Target(tensordict=20),
    "map.Filling": Target(tensordict=20),
    "map.Writing": Target(tensordict=20),
    "map.Nothing": Target(tensordict=1.5),
    "map.ReturningRunning": Target(tensordict=40),
    "map.FillingRunning": Target(tensordict=40),
    "map.WritingRunning": Target(tensordict=40),
    "map.NothingRunning": Target(tensordict=5),
    "dataloader.Batches": Target(tensordict=6, limit=1.4),
    "dataloader.BatchesTwoWorkers": Target(tensordict=12),
    "dataloader.Loader": Target(tensordict=4),
    "dataloader.LoaderTwoWorkers": Target(tensordict=1.3),
    "cold.Gather": Target(tensordict=5, torch=5),
    "cold.GatherContainer": Target(tensordict=5),
    "import_time.Import": Target(more_than_numpy=0.15),
}

GROUPS = (
    Group(
        "the container's keys, shapes and lock",
        median=1.3,
        least=0.9,
        members=tuple(
            f"tensordict.{name}"
            for name in (
                "GetKey",
                "GetNested",
                "Set",
                "SetInPlace",
                "SetInPlaceShared",
                "SetShared",
                "Select",
                "Exclude",
                "FlattenKeys",
                "UnflattenKeys",
                "Clone",
                "CloneShallow",
                "View",
                "Transpose",
                "Unbind",
                "MemmapTdView",
                "MemmapTdTranspose",
                "Construct",
                "Lock",
                "Unlock",
            )
        ),
    ),
    Group(
        "everything that tensordict does as well",
        median=2,
        least=0.95,
        exceptions=MappingProxyType({"save_load.SaveOver": 0.35}),
    ),
)
