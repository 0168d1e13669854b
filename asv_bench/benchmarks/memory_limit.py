"""One pass over a file of twice the memory that a process may have.

From the root of the repository, ``python -m asv_bench.benchmarks.memory_limit`` prints a table;
its exit status is 1 if a pass did not complete or took 100 MB of memory of its own.

Two limits are set, each on a fresh process before it imports anything: ``RLIMIT_DATA``, which
counts private writable pages whether they are used or not, for the modes ``"r"`` and ``"r+"``
(in ``"c"`` such pages are what was asked for, and the system says no when the file is opened);
and a control group (cgroups(7)) for all modes, which counts the page cache as well, so that the
kernel has to take pages of the file back during the pass. A group needs root, or a delegated
part of the hierarchy; where there is neither, these rows are skipped and say so.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from . import limited
from .system import drop_pages

__all__ = ["CASES", "LimitedPass", "one_pass"]

CASES = [
    ("RLIMIT_DATA", "r"),
    ("RLIMIT_DATA", "r+"),
    ("cgroup", "r"),
    ("cgroup", "r+"),
    ("cgroup", "c"),
]

# Of which torch needs 180 MB.
_LIMIT = 512 << 20
_NBYTES = 2 * _LIMIT
_MOST = 100_000_000
_GROUPS = {"v1": "/sys/fs/cgroup/memory", "v2": "/sys/fs/cgroup"}


def one_pass(limit: str, mode: str, path: str) -> int:
    """Read a file in a process of limited memory.

    Parameters
    ----------
    limit
        ``"RLIMIT_DATA"`` or ``"cgroup"``.
    mode
        In which the file is opened.
    path
        A file of twice the limit.

    Returns
    -------
    int
        By how many bytes the process's own memory grew at most.

    Raises
    ------
    NotImplementedError
        If this machine gives no control group.
    RuntimeError
        If the pass did not complete.
    """
    drop_pages(path)  # which belong to the group that read them first
    with _group(limit) as group:
        how = ["group", group] if group else ["data", str(_LIMIT)]
        # -P: pickle is the standard library's, not the benchmark beside the program.
        command = [sys.executable, "-P", limited.__file__, *how, mode, path]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{limit}, {mode}: exit code {done.returncode}: {done.stderr}")
    return int(done.stdout)


@contextlib.contextmanager
def _group(limit: str) -> Iterator[str]:
    """Make a control group with a limit; yield the file that takes its members."""
    if limit != "cgroup":
        yield ""
        return
    try:
        path, knob = _new_group()
        try:
            with open(os.path.join(path, knob), "w", encoding="ascii") as file:
                file.write(str(_LIMIT))
        except OSError:
            os.rmdir(path)
            raise
    except OSError as error:
        raise NotImplementedError(f"no control group for memory can be made: {error}") from error
    try:
        yield os.path.join(path, "cgroup.procs")
    finally:
        os.rmdir(path)


def _new_group() -> tuple[str, str]:
    name = f"mmtensor-bench-{os.getpid()}"
    if os.path.exists(f"{_GROUPS['v1']}/memory.limit_in_bytes"):
        path, knob = os.path.join(_GROUPS["v1"], name), "memory.limit_in_bytes"
    else:
        path, knob = os.path.join(_GROUPS["v2"], name), "memory.max"
    os.mkdir(path)
    return path, knob


def _new_file(directory: str) -> str:
    """Write a file of ones, of twice the limit."""
    path = os.path.join(directory, "x.bin")
    block = np.ones(limited.ONES, np.float32).tobytes()
    with open(path, "wb") as file:
        file.writelines(block for _ in range(_NBYTES // len(block)))
        os.fsync(file.fileno())  # pages that are not on the disk cannot be dropped
    return path


class LimitedPass:
    """Growth of a process's own memory during one pass over twice its limit."""

    params: ClassVar[list[Any]] = [[" ".join(case) for case in CASES]]
    param_names: ClassVar[list[str]] = ["limit and mode"]
    unit = "bytes"
    timeout = 300

    def setup(self, case: str) -> None:  # noqa: ARG002  # asv passes the parameters
        """Write the file."""
        self.directory = tempfile.TemporaryDirectory(prefix="mmtensor-limit-")
        self.path = _new_file(self.directory.name)

    def teardown(self, case: str) -> None:  # noqa: ARG002
        """Remove the file."""
        self.directory.cleanup()

    def track_anonymous(self, case: str) -> int:
        """Return the growth at its largest, at the end of each chunk of 16 MB."""
        limit, mode = case.split()
        return one_pass(limit, mode, self.path)


def _main() -> int:
    print(f"A pass over {_NBYTES >> 20} MiB with at most {_LIMIT >> 20} MiB of memory.\n")
    print("| limit | mode | own memory, growth | |\n|---|---|---|---|")
    missed = False
    with tempfile.TemporaryDirectory(prefix="mmtensor-limit-") as directory:
        path = _new_file(directory)
        for limit, mode in CASES:
            growth: int | None
            try:
                growth = one_pass(limit, mode, path)
            except NotImplementedError as error:
                print(f"| {limit} | {mode} | – | skipped: {error} |", flush=True)
                continue
            except RuntimeError as error:
                print(error, file=sys.stderr)
                growth = None
            held = growth is not None and growth < _MOST
            missed = missed or not held
            size = "not completed" if growth is None else f"{growth / 1e6:.1f} MB"
            verdict = "holds" if held else "**missed**"
            print(f"| {limit} | {mode} | {size} | {verdict} |", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(_main())
