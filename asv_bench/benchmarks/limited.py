"""A program: one pass over a file in a process that has limited its memory first.

Usage: ``limited.py data BYTES MODE PATH`` sets ``RLIMIT_DATA``, and
``limited.py group FILE MODE PATH`` joins the control group whose members are listed in that file.
It prints by how many bytes the process's own memory grew at most.
"""

import resource
import sys

__all__ = ["ONES", "one_pass"]

# Values that are read at a time: 16 MB.
ONES = 4 << 20


def _limit(kind: str, value: str) -> None:
    if kind == "data":
        resource.setrlimit(resource.RLIMIT_DATA, (int(value), int(value)))
        return
    with open(value, "w", encoding="ascii") as members:
        members.write("0")  # this process


def _anonymous() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def one_pass(mode: str, path: str) -> int:
    """Read a file of float32 ones to its end; return by how much memory of one's own grew.

    Raises
    ------
    RuntimeError
        If something else is in the file.
    """
    import torch  # noqa: PLC0415  # within the limit

    from mmtensor import MemoryMappedTensor  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.ones(ONES).sum()
    before = _anonymous()
    most, total = 0, 0.0
    x = MemoryMappedTensor.from_filename(path, torch.float32, (-1,), mode=mode)  # type: ignore[arg-type]
    for chunk in x.split(ONES):
        total += chunk.sum().item()
        most = max(most, _anonymous() - before)
    if total != len(x):
        raise RuntimeError(f"the sum must be {len(x)}, got {total}.")
    return most


if __name__ == "__main__":
    _limit(*sys.argv[1:3])
    print(one_pass(*sys.argv[3:]))
