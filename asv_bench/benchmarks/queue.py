"""A tensor to another process and back, through `multiprocessing.SimpleQueue`."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import tensordict
import torch

import mmtensor

from .common import MMT, TDT, Comparison, FreshFile, values

_SHAPE = (100, 100)
_fork = multiprocessing.get_context("fork")


def _echo(inbox: Any, outbox: Any) -> None:
    while (item := inbox.get()) is not None:
        outbox.put(item)
        del item


class _Echo:
    """A child process that sends back what it gets."""

    def __init__(self) -> None:
        self.inbox, self.outbox = _fork.SimpleQueue(), _fork.SimpleQueue()
        self.process = _fork.Process(target=_echo, args=(self.inbox, self.outbox), daemon=True)
        self.process.start()

    def __call__(self, item: Any) -> Any:
        self.inbox.put(item)
        return self.outbox.get()

    def close(self) -> None:
        """End the child."""
        self.inbox.put(None)
        self.process.join()
        self.inbox.close()
        self.outbox.close()


class QueueFile(Comparison):
    """The same tensor of a file, again and again."""

    title = "round trip through `SimpleQueue`, file"

    def use(self, x: Any) -> Callable[[], Any]:
        """Return what is timed, for one tensor."""
        self.echo = echo = _Echo()
        return lambda: echo(x)

    def teardown(self, library: str) -> None:
        """End the child."""
        if hasattr(self, "echo"):
            self.echo.close()
            del self.echo
        super().teardown(library)

    def mmtensor(self) -> Callable[[], Any]:
        """With mmtensor."""
        return self.use(MMT.from_tensor(values(*_SHAPE), filename=self.new_path()))

    def tensordict(self) -> Callable[[], Any]:
        """With tensordict."""
        return self.use(TDT.from_tensor(values(*_SHAPE), filename=self.new_path()))

    def numpy(self) -> Callable[[], Any]:
        """With a map of NumPy, whose 40 KB are copied."""
        path = self.new_path()
        values(*_SHAPE).numpy().tofile(path)
        return self.use(np.memmap(path, np.float32, "r+", shape=_SHAPE))

    def torch(self) -> Callable[[], Any]:
        """With a tensor in shared memory, which torch sends as a descriptor."""
        return self.use(values(*_SHAPE).clone().share_memory_())

    def limit(self) -> Callable[[], Any]:
        """The reference as plain bytes."""
        return self.use(bytes(200))

    limit_is = "200 bytes to the child and back"


class QueueAnonymous(QueueFile):
    """The same tensor in anonymous memory, again and again."""

    title = "round trip through `SimpleQueue`, anonymous"
    numpy = None  # type: ignore[assignment]  # it has no such memory

    def mmtensor(self) -> Callable[[], Any]:
        """With mmtensor."""
        return self.use(MMT.from_tensor(values(*_SHAPE)))

    def tensordict(self) -> Callable[[], Any]:
        """With tensordict."""
        return self.use(TDT.from_tensor(values(*_SHAPE)))


class QueueNewFile(FreshFile):
    """A tensor that `from_tensor` has just made: nothing about it is known yet."""

    title = "round trip through `SimpleQueue`, file just made"

    def before(self, library: str) -> Any:
        """Write a file."""
        kind: Any = {"mmtensor": MMT, "tensordict": TDT}[library]
        path = self.new_path()
        return [kind.from_tensor(values(*_SHAPE), filename=path), path]

    def after(self, argument: Any) -> None:
        """Free the file."""
        argument[0] = None
        super().after(argument[1])

    def use(self) -> Callable[[Any], Any]:
        """Return what is timed."""
        self.echo = echo = _Echo()
        return lambda argument: echo(argument[0])

    mmtensor = tensordict = use

    def teardown(self, library: str) -> None:
        """End the child."""
        if hasattr(self, "echo"):
            self.echo.close()
            del self.echo
        super().teardown(library)


class QueueTensorDict(QueueFile):
    """A container in shared memory, again and again."""

    numpy = None  # type: ignore[assignment]  # it has no containers
    title = "round trip through `SimpleQueue`, shared TensorDict of 100 leaves"

    def shared(self, kind: Any) -> Callable[[], Any]:
        """Return what is timed, for one library."""
        leaves = {f"leaf{number}": values(*_SHAPE) + number for number in range(100)}
        return self.use(kind(leaves, [100]).share_memory_())

    def mmtensor(self) -> Callable[[], Any]:
        """One block: one descriptor."""
        return self.shared(mmtensor.TensorDict)

    def tensordict(self) -> Callable[[], Any]:
        """A descriptor for each leaf."""
        return self.shared(tensordict.TensorDict)

    def torch(self) -> Callable[[], Any]:
        """A dict of shared tensors."""
        leaves = {f"leaf{number}": values(*_SHAPE) + number for number in range(100)}
        return self.use({key: leaf.share_memory_() for key, leaf in leaves.items()})


_ = torch  # loaded before the children are forked
