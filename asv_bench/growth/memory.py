"""Over the progress of one pass: memory of a process that may have half of what it reads."""

import os
import subprocess
import sys

from tqdm import tqdm

from asv_bench.benchmarks.common import new_directory
from asv_bench.growth.curves import KEPT, Curve, Figure, Panel, Settings

__all__ = ["measure_memory"]

_MB = 1 << 20
_LIMIT, _LIMIT_QUICK = 512 * _MB, 128 * _MB
# In order of appearance; the file of one_pass has the readers.
_READERS = (
    "mmtensor, r",
    "mmtensor, r+",
    "mmtensor, r, advise('dontneed')",
    "tensordict",
    "numpy.memmap, r",
    "numpy.fromfile",
)


class _Memory:
    """Marks the directory."""


def _write(nbytes: int) -> str:
    path = f"{new_directory(_Memory)}/pass.bin"
    block = os.urandom(_MB // 4 * 3) + bytes(_MB // 4)
    with open(path, "wb") as file:
        file.writelines(block for _ in range(nbytes // _MB))
    return path


def _run(how: str, path: str, limit: int) -> tuple[list[list[float]], str]:
    """Return progress and the growth of RSS and anonymous memory, in MB, as a child reads.

    Also what ended it before the end of the file.
    """
    command = [sys.executable, "-m", "asv_bench.growth.one_pass", how, path, str(limit)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    end = lines.pop() if lines[-1].startswith("MemoryError") else ""
    numbers = [[int(field) / _MB for field in line.split()] for line in lines]
    done, rss, anonymous = numbers[0]
    return [[row[0] - done, row[1] - rss, row[2] - anonymous] for row in numbers], end


def measure_memory(settings: Settings) -> Figure:
    """Measure all readers, each in a process of its own."""
    limit = _LIMIT_QUICK if settings.quick else _LIMIT
    path = _write(2 * limit)
    resident, anonymous = [], []
    for how in tqdm(_READERS, desc="one pass", leave=False):
        rows, end = _run(how, path, limit)
        resident.append(Curve(how, {done: rss for done, rss, _ in rows}, end))
        anonymous.append(Curve(how, {done: own for done, _, own in rows}, end))
    os.truncate(path, 0)
    over = "read so far"
    panels = [
        Panel("anonymous memory", over, anonymous, KEPT, "MB", "MB", "growth", limit // _MB),
        Panel("resident memory (RSS)", over, resident, None, "MB", "MB", "growth", limit // _MB),
    ]
    title = (
        f"One pass over {2 * limit // _MB:,} MB by a process that may have {limit // _MB} MB more "
        "(`RLIMIT_DATA`)"
    )
    return Figure("memory", title, panels)
