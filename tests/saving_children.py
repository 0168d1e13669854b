"""Programs that save and load in a loop, for the tests; started as scripts."""

import os
import sys

import torch

from mmtensor import JaggedTensor, TensorDict

LEAVES = 12


def version(number):
    """Return a container in which every leaf says the same number."""
    data = {f"k{i}": torch.full((4, 100), number) for i in range(LEAVES)}
    data["n"] = {"y": torch.full((4,), number), "s": str(number)}
    data["j"] = JaggedTensor(torch.full((6,), number), [[1], [2], [0], [3]])
    data["l"] = [str(number)] * 4
    return TensorDict(data, [4])


def numbers(td):
    """Return every number that the leaves of a container say."""
    found = set()
    for _, leaf in td.items(True, True):
        if isinstance(leaf, str | list):
            found.update(map(int, [leaf] if isinstance(leaf, str) else leaf))
        elif isinstance(leaf, JaggedTensor):
            found.update(leaf.values.unique().tolist())
        else:
            found.update(leaf.unique().tolist())
    return found


def save(path, start):
    """Save one version after the other, for ever; say which one is complete."""
    number = start
    while True:
        version(number).memmap(path)
        os.write(1, b"%d\n" % number)
        number += 1


def load(path, count):
    """Load again and again, through several versions, and say how many there were."""
    seen = set()
    loads = 0
    while loads < count or len(seen) < 10:
        loads += 1
        td = TensorDict.load_memmap(path, mode="r")
        found = numbers(td)
        if len(found) != 1:
            sys.exit(f"a load holds versions {sorted(found)}")
        seen |= found
    sys.stdout.write(f"{len(seen)}\n")


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
