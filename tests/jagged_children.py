"""Child processes for the tests of jagged tensors: spawn imports this module by its name."""

import itertools
import random

import torch

import mmtensor
from mmtensor import JaggedTensor


def facts(x):
    """Return what a jagged tensor, or one of its elements, is: class, place, shapes, values."""
    if isinstance(x, JaggedTensor):
        return "jagged", x.mode, x.dtype, x.shapes.tolist(), x.offsets.tolist(), x.tolist()
    return type(x).__name__, mmtensor.locate(x), x.dtype, tuple(x.shape), x.tolist()


def answer(inward, outward):
    """Send back the facts of whatever comes, until None comes."""
    while (x := inward.get()) is not None:
        outward.put(facts(x))
        del x


def fill(j, first, step):
    """Write every `step`-th element: its number, everywhere."""
    for number in range(first, len(j), step):
        j[number] = torch.full(j[number].shape, number, dtype=j.dtype)


def double(inward, outward):
    """Double what comes, in place, and say when it is done."""
    j = inward.get()
    for element in j:
        element.mul_(2)
    outward.put("done")


def of_equal_total(number):
    """Return five elements with 100 numbers in all, in a split that the number decides."""
    cuts = [0, *sorted(random.Random(number).sample(range(1, 100), 4)), 100]  # noqa: S311
    return [
        torch.full((stop - start,), number % 250, dtype=torch.uint8)
        for start, stop in itertools.pairwise(cuts)
    ]


def replace_again_and_again(path, first, stop):
    """Replace a jagged tensor until told to stop."""
    number = first
    while not stop.is_set():
        number = (number + 1) % 250
        JaggedTensor.from_tensors(of_equal_total(number), filename=path, existsok=True)
