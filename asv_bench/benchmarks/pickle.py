"""References to views of a file: making them and following them."""

import pickle
from collections.abc import Callable
from typing import Any

from .common import MMT, TDT, Comparison, values

_SHAPE = (100, 100)


class PickleView(Comparison):
    """There and back in one process."""

    title = "`pickle.dumps` + `loads` of a view of a file"

    def use(self, kind: Any) -> Callable[[], Any]:
        """Return what is timed, for one class."""
        self.view = view = kind.from_tensor(values(*_SHAPE), filename=self.new_path())[3]
        return lambda: pickle.loads(pickle.dumps(view))  # noqa: S301

    def mmtensor(self) -> Callable[[], Any]:
        """With mmtensor."""
        return self.use(MMT)

    def tensordict(self) -> Callable[[], Any]:
        """With tensordict."""
        return self.use(TDT)

    def track_bytes(self, library: str) -> int:
        """Count the bytes of the pickled view, its path left out."""
        if library not in ("mmtensor", "tensordict"):
            raise NotImplementedError
        return len(pickle.dumps(self.view))


class LoadViews(Comparison):
    """One message with many views, followed where the file is not open yet."""

    title = "`loads` of a list of 64 views of one file"

    def use(self, kind: Any) -> Callable[[], Any]:
        """Return what is timed, for one class."""
        x = kind.from_tensor(values(*_SHAPE), filename=self.new_path())
        data = pickle.dumps([x[i] for i in range(64)])
        return lambda: pickle.loads(data)  # noqa: S301

    def mmtensor(self) -> Callable[[], Any]:
        """With mmtensor."""
        return self.use(MMT)

    def tensordict(self) -> Callable[[], Any]:
        """With tensordict."""
        return self.use(TDT)


class LoadViewsOneByOne(LoadViews):
    """Many messages with a view each."""

    title = "`loads` of 64 views of one file, one by one"

    def use(self, kind: Any) -> Callable[[], Any]:
        """Return what is timed, for one class."""
        x = kind.from_tensor(values(*_SHAPE), filename=self.new_path())
        data = [pickle.dumps(x[i]) for i in range(64)]
        return lambda: [pickle.loads(one) for one in data]  # noqa: S301
