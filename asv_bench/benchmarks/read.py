"""Reading a file that was just written: how it was written decides how fast it reads."""

from collections.abc import Callable
from typing import Any

import mmap_ninja
import numpy as np
import torch

from .common import MMT, TDT, FreshFile, values
from .peers import open_whole, write_ninja, write_safetensors

_COUNT = 1 << 26


class SumNewFile(FreshFile):
    """A pass over a new map of the file, as another process would do it."""

    title = "sum of a 256 MB file just written"
    limit_is = "sum of a regular tensor"

    def before(self, library: str) -> Any:
        """Let the library write a file and open it again."""
        source = values(_COUNT)
        path = self.new_path()
        x: Any
        if library == "mmtensor":
            MMT.from_tensor(source, filename=path)
            x = MMT.from_filename(path, torch.float32, (_COUNT,), mode="r+")
        elif library == "tensordict":
            TDT.from_tensor(source, filename=path)
            x = TDT.from_filename(path, torch.float32, (_COUNT,))
        elif library == "numpy":
            source.numpy().tofile(path)
            x = torch.from_numpy(np.memmap(path, np.float32, "r+"))
        elif library == "mmap_ninja":
            write_ninja(path, source)
            x = torch.from_numpy(mmap_ninja.np_open_existing(path, "r+"))
        elif library == "safetensors":
            x = open_whole(write_safetensors(path, source))
        elif library == "torch":
            torch.from_file(path, shared=True, size=_COUNT).copy_(source)
            x = torch.from_file(path, shared=True, size=_COUNT)
        else:
            x = source
        return [x, path]

    def after(self, argument: Any) -> None:
        """Free the file."""
        argument[0] = None
        super().after(argument[1])

    def use(self) -> Callable[[Any], Any]:
        """Return what is timed."""
        return lambda argument: argument[0].sum()

    mmtensor = tensordict = mmap_ninja = safetensors = numpy = torch = limit = use
