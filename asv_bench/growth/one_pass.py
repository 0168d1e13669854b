"""A child of `memory`: reads a file once under a limit, and prints its memory as it goes.

``python -m asv_bench.growth.one_pass HOW FILE MORE`` may have MORE bytes of its own, on top
of what importing torch took. It prints a line for each part: bytes read so far, RSS and
anonymous memory, in bytes. HOW is a key of `READERS`.
"""

import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensordict
import torch

from mmtensor import MemoryMappedTensor

__all__ = ["PARTS", "READERS", "main"]

PARTS = 32

Reader = Callable[[str, int], Callable[[int, int], Any]]


def _mapped(mode: Any) -> Reader:
    def open_(path: str, count: int) -> Callable[[int, int], Any]:
        x = MemoryMappedTensor.from_filename(path, torch.float32, (count,), mode=mode)
        return lambda start, stop: x[start:stop].sum()

    return open_


def _given_back(path: str, count: int) -> Callable[[int, int], Any]:
    x = MemoryMappedTensor.from_filename(path, torch.float32, (count,), mode="r")

    def read(start: int, stop: int) -> None:
        part = x[start:stop]
        part.sum()
        part.advise("dontneed")

    return read


def _tensordict(path: str, count: int) -> Callable[[int, int], Any]:
    x = tensordict.MemoryMappedTensor.from_filename(path, torch.float32, (count,))
    return lambda start, stop: x[start:stop].sum()


def _numpy(path: str, count: int) -> Callable[[int, int], Any]:
    x = np.memmap(path, np.float32, "r", shape=(count,))
    return lambda start, stop: x[start:stop].sum()


def _loaded(path: str, count: int) -> Callable[[int, int], Any]:  # noqa: ARG001  # a reader
    """Keep what was read, as a data set in memory does."""
    parts = []

    def read(start: int, stop: int) -> None:
        parts.append(np.fromfile(path, np.float32, stop - start, offset=4 * start))
        parts[-1].sum()

    return read


READERS: dict[str, Reader] = {
    "mmtensor, r": _mapped("r"),
    "mmtensor, r+": _mapped("r+"),
    "mmtensor, r, advise('dontneed')": _given_back,
    "tensordict": _tensordict,
    "numpy.memmap, r": _numpy,
    "numpy.fromfile": _loaded,
}


def _memory() -> tuple[int, int]:
    """Return RSS and anonymous memory of this process in bytes."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        fields = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
    return 1024 * int(fields["Rss"]), 1024 * int(fields["Anonymous"])


def _data() -> int:
    """Return what counts against ``RLIMIT_DATA``: private writable memory, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData"))


def main(how: str, path: str, more: str) -> None:
    """Read the file once; it ends early where memory does."""
    torch.set_num_threads(1)
    with open(path, "rb") as file:
        count = file.seek(0, 2) // 4
    torch.ones(8).sum()  # what torch sets up at the first call
    limit = _data() + int(more)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(0, *_memory())
    try:
        read = READERS[how](path, count)
        for part in range(PARTS):
            stop = count * (part + 1) // PARTS
            read(count * part // PARTS, stop)
            print(4 * stop, *_memory())
    except MemoryError as error:
        print(f"MemoryError: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
