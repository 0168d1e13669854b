"""References to views of a file: making them and following them."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .common import MMT, TDT, Comparison, values

_SHAPE = (100, 100)


class _Views(Comparison):
    """Views of one file, as references; NumPy and torch pickle the values."""

    def use(self, x: Any) -> Callable[[], Any]:
        """Return what is timed, for what a library opened."""
        raise NotImplementedError

    def mmtensor(self) -> Callable[[], Any]:
        """With mmtensor."""
        return self.use(MMT.from_tensor(values(*_SHAPE), filename=self.new_path()))

    def tensordict(self) -> Callable[[], Any]:
        """With tensordict."""
        return self.use(TDT.from_tensor(values(*_SHAPE), filename=self.new_path()))

    def numpy(self) -> Callable[[], Any]:
        """The values of each view."""
        path = self.new_path()
        values(*_SHAPE).numpy().tofile(path)
        return self.use(np.memmap(path, np.float32, "r+", shape=_SHAPE))

    def torch(self) -> Callable[[], Any]:
        """The values of the whole storage, once for each message."""
        path = self.new_path()
        values(*_SHAPE).numpy().tofile(path)
        x = torch.from_file(path, shared=True, size=values(*_SHAPE).numel())
        return self.use(x.view(_SHAPE))


class PickleView(_Views):
    """There and back in one process."""

    title = "`pickle.dumps` + `loads` of a view of a file"

    def use(self, x: Any) -> Callable[[], Any]:
        """Return what is timed, for what a library opened."""
        self.view = view = x[3]
        return lambda: pickle.loads(pickle.dumps(view))  # noqa: S301

    def track_bytes(self, library: str) -> int:  # noqa: ARG002  # asv passes the parameters
        """Count the bytes of the pickled view."""
        return len(pickle.dumps(self.view))


class LoadViews(_Views):
    """One message with many views, followed where the file is not open yet."""

    title = "`loads` of a list of 64 views of one file"

    def use(self, x: Any) -> Callable[[], Any]:
        """Return what is timed, for what a library opened."""
        data = pickle.dumps([x[i] for i in range(64)])
        return lambda: pickle.loads(data)  # noqa: S301


class LoadViewsOneByOne(_Views):
    """Many messages with a view each."""

    title = "`loads` of 64 views of one file, one by one"

    def use(self, x: Any) -> Callable[[], Any]:
        """Return what is timed, for what a library opened."""
        data = [pickle.dumps(x[i]) for i in range(64)]
        return lambda: [pickle.loads(one) for one in data]  # noqa: S301
