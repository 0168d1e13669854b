"""Functions for the tests of map: worker processes import this module by its name."""

import os
import signal
import sys
import time

import torch

from mmtensor import TensorDict


class OddlyMade(Exception):  # noqa: N818  # what it is called does not matter
    """An exception that pickles, and cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(one)
        self.two = two


class Unspeakable(Exception):  # noqa: N818
    """An exception that neither pickles nor has words."""

    def __str__(self):
        raise ValueError("no words")

    def __reduce__(self):
        raise TypeError("no state")


def fail_unspeakably(_):
    """Raise what cannot be told of."""
    error = Unspeakable()
    error.hold = lambda: None
    raise error


def double(td):
    """Return a TensorDict."""
    return TensorDict({"y": td["x"] * 2}, td.batch_size)


def total(td):
    """Return a tensor: the sum of each row."""
    return td["x"].sum(-1)


def nothing(_):
    """Return None."""


def negate(td):
    """Change the chunk in place."""
    td.set_("x", -td["x"])


def negate_and_total(td):
    """Change the chunk in place, and return a tensor."""
    negate(td)
    return total(td)


def slow_if_even(td):
    """Take longer for every other element."""
    if int(td["x"][0]) % 2 == 0:
        time.sleep(0.02)
    return td["x"][0]


def fail_at_five(td):
    """Raise for the row that starts with 5."""
    if int(td["x"].reshape(-1)[0]) == 5:
        raise ValueError("no fives")
    return td["x"]


def exit_at_five(td):
    """End the process at the row that starts with 5."""
    if int(td["x"].reshape(-1)[0]) == 5:
        os._exit(3)
    return td["x"]


def sometimes_slow(td):
    """Take longer than a first task may, for every tenth element."""
    if int(td["x"][0]) % 10 == 0:
        time.sleep(0.006)
    return td["x"] * 2


def fail_oddly(_):
    """Raise what does not travel."""
    raise OddlyMade("first", "second")


def leave(_):
    """Try to end the process politely."""
    sys.exit(7)


def exit_hard(td):
    """End the process."""
    if int(td["x"].reshape(-1)[0]) == 5:
        os._exit(3)


def kill_itself(td):
    """End the process as the kernel does when memory runs out."""
    if int(td["x"].reshape(-1)[0]) == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_long(_):
    """Take longer than any test has patience for."""
    time.sleep(600)


def mixed(td):
    """Return something for some chunks only."""
    return td["x"] if int(td["x"][0]) < 3 else None


def first_numbers(td):
    """Return a tensor with another shape for each element."""
    return torch.arange(int(td["x"][0]) + 1)


def words(td):
    """Return what is no tensor."""
    return f"row {int(td['x'][0])}"


def unpicklable(td):
    """Return what no other process can have."""
    return lambda: td


def draw(_):
    """Return a random number."""
    return torch.rand(())


def process(_):
    """Return the number of the process."""
    return torch.tensor(os.getpid())


def facts(td):
    """Return a few facts about what the function got, as numbers."""
    return torch.tensor([td.is_locked, td.is_memmap(), td.is_shared(), td.ndim, len(td["x"])])


def length_of_image(td):
    """Return the number of elements of a jagged leaf, and the length of a text."""
    return torch.tensor([td["image"].numel(), len(td["name"])])


def fill_image(td):
    """Fill an element of a jagged leaf in place."""
    td.set_("image", torch.full_like(td["image"], int(td["x"][0])))


def image_of_ones(td):
    """Return a TensorDict for a jagged leaf of out."""
    return TensorDict({"image": torch.ones_like(td["image"])})


def nested(td):
    """Return a nested TensorDict with text in it."""
    return TensorDict(
        {"n": {"x": td["x"] + 1}, "t": f"row {int(td['x'][0])}"},
        td.batch_size,
    )


def threads(_):
    """Return how many threads torch uses."""
    return torch.tensor(torch.get_num_threads())


def view(td):
    """Return a part of the source itself."""
    return td["x"]


def map_again(td):
    """Start processes from a worker."""
    return td.map(total, chunksize=0, num_workers=2, mp_start_method="fork")


def constant(value, _):
    """Return the same for every chunk."""
    return value


def uneven(td):
    """Return one row, or three, where two are due."""
    first = int(td["i"][0])
    return torch.full((1 if first % 4 == 0 else 3,), float(first))


def uneven_tree(td):
    """Return them in a container."""
    rows = uneven(td)
    return TensorDict({"y": rows}, [len(rows)])


def of_three_dtypes(td):
    """Return numbers that a dtype with room for all of them cannot all hold."""
    first = int(td["i"].reshape(-1)[0])
    value = [16777217, 0.5, 1 + 2.0**-40][first % 3]
    dtype = [torch.int64, torch.float32, torch.float64][first % 3]
    return torch.full(td["i"].shape, value, dtype=dtype)


def odd_shape(td):
    """Return a tensor, of another shape for the row that starts with 5."""
    return torch.zeros(5) if int(td["x"][0]) == 5 else td["x"]


def odd_none(td):
    """Return a tensor, and None for the row that starts with 5."""
    return None if int(td["x"][0]) == 5 else td["x"]


def odd_keys(td):
    """Return a TensorDict, with another key for the row that starts with 5."""
    return TensorDict({"z" if int(td["x"][0]) == 5 else "y": td["x"]})


class _Gone:
    """Pickles as a call that fails."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path,)


def removed_file(directory, _):
    """Return what refers to a file that is not there."""
    return _Gone(str(directory / "gone"))
