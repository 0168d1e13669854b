"""What the first use in a fresh process costs, in a process that has imported torch.

That contains the import of what is used, for all libraries. Where Python may not write bytecode
(``PYTHONDONTWRITEBYTECODE``), an import compiles what it imports, which takes three times as long.
"""

import os
from typing import Any, ClassVar

import mmtensor

from .common import Files, new_directory, remove_files, values

_BEFORE = """
import numpy, torch
torch.set_num_threads(1)
def nothing(td):
    pass
import __main__
# asv puts all this into a function; workers find what is here by its name.
nothing.__module__, nothing.__qualname__ = "__main__", "nothing"
__main__.nothing = nothing
directory = {!r}
"""


def _directory() -> str:
    """Return a directory with files to open."""
    directory = new_directory(_First)
    if not os.path.exists(f"{directory}/td"):
        values(100, 100).numpy().tofile(f"{directory}/x.bin")
        mmtensor.TensorDict({"x": values(100, 100)}, [100]).memmap(f"{directory}/td")
    return directory


class _First:
    """A statement, in a fresh process; ``limit`` is the second time in one."""

    limit_is = "the second time in the same process"
    limit_column = "limit"
    params: ClassVar[list[Any]] = [["mmtensor", "tensordict", "limit"]]
    param_names: ClassVar[list[str]] = ["library"]
    code: ClassVar[dict[str, str]]

    def teardown(self, library: str) -> None:  # noqa: ARG002  # asv passes the parameters
        """Remove the files."""
        if not Files.keep:
            remove_files()

    def timeraw_first(self, library: str) -> tuple[str, str]:
        """Return the code that is timed, and what comes before it."""
        setup = _BEFORE.format(_directory())
        if library == "limit":
            code = self.code["mmtensor"]
            return code, setup + code
        return self.code[library], setup


class FirstTensor(_First):
    """Nearly all of it are imports: 4 ms for the package, 7 ms for the tensors in it.

    Opening the file itself takes 0.2 ms the first time. What only containers need is imported
    with the first container (10 ms), and what only `map` needs with the first `map`.
    """

    title = "first `from_filename` in a process with torch"
    code: ClassVar[dict[str, str]] = {
        library: f"import {library}; x = {library}.MemoryMappedTensor.from_filename("
        "directory + '/x.bin', torch.float32, (100, 100))"
        for library in ("mmtensor", "tensordict")
    }


class FirstAnonymous(_First):
    """The imports, and 0.1 ms. No resource tracker is started, as no block ever has a name."""

    title = "first anonymous `empty` in a process with torch"
    code: ClassVar[dict[str, str]] = {
        library: f"import {library}; x = {library}.MemoryMappedTensor.empty("
        "(100, 100), dtype=torch.float32)"
        for library in ("mmtensor", "tensordict")
    }


class FirstMap(_First):
    """The imports (25 ms), two processes (20 ms), and 60 ms of garbage collection.

    It was due: torch has left half a million objects behind, and importing adds what Python
    waits for before it looks at all of them. NumPy's random numbers are not imported, which took
    each worker 10 ms.
    """

    title = "first `load_memmap` and `map` in a process with torch"
    code: ClassVar[dict[str, str]] = {
        library: f"import {library}; td = {library}.TensorDict.load_memmap(directory + '/td'); "
        "td.map(nothing, num_workers=2, chunksize=50, mp_start_method='fork')"
        for library in ("mmtensor", "tensordict")
    }
