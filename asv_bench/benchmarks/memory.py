"""Memory of one's own that a pass over a file takes.

asv's ``peakmem_`` counts mapped pages, which belong to the page cache; what matters is
``Anonymous`` of ``/proc/self/smaps_rollup``.
"""

from typing import ClassVar

import torch

from .common import MMT, TDT, new_directory, remove_files, values

_COUNT = 1 << 26


class OnePass:
    """Anonymous memory while a 256 MB file that was read once is still open."""

    params: ClassVar[list[str]] = ["r", "r+", "c", "tensordict r+"]
    param_names: ClassVar[list[str]] = ["mode"]
    unit = "bytes"

    def setup(self, mode: str) -> None:
        """Write the file and open it."""
        torch.set_num_threads(1)
        path = f"{new_directory(type(self))}/{mode.replace(' ', '-')}.bin"
        MMT.from_tensor(values(_COUNT), filename=path, existsok=True)
        if mode in ("r", "r+", "c"):
            self.x = MMT.from_filename(path, torch.float32, (_COUNT,), mode=mode)
        else:
            self.x = TDT.from_filename(path, torch.float32, (_COUNT,))

    def teardown(self, mode: str) -> None:  # noqa: ARG002
        """Close the file and remove it."""
        del self.x
        remove_files()

    def track_anonymous(self, mode: str) -> int:  # noqa: ARG002  # asv passes the parameters
        """Return the growth from before the pass to after it."""
        before = _anonymous()
        self.x.sum()
        return _anonymous() - before


def _anonymous() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
