"""What the benchmarks share: one declaration serves asv and `asv_bench.compare`."""

import fcntl
import functools
import itertools
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensordict
import torch

import mmtensor

from .timing import calibrate, seconds_of_call

__all__ = [
    "LIBRARIES",
    "MMT",
    "TDT",
    "Comparison",
    "Expression",
    "Files",
    "FreshFile",
    "give_memory",
    "new_directory",
    "remove_files",
    "root",
    "use_root",
    "values",
]

LIBRARIES = ("mmtensor", "tensordict", "mmap_ninja", "safetensors", "numpy", "torch", "limit")

MMT = mmtensor.MemoryMappedTensor
TDT = tensordict.MemoryMappedTensor

_ROUND = 0.01  # seconds that a sample of asv should take

_numbers = itertools.count()
_SMALL = 1 << 16  # bytes
_ONES = memoryview(b"\1" * (1 << 26))


# linux/fs.h
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_TOPDIR_FL = 0x80086601, 0x40086602, 0x00020000


class Files:
    """Whether files outlive their benchmark, emptied, until `remove_files` is called."""

    keep = False
    root = ""


def use_root(path: str) -> None:
    """Keep all files, in a directory that another process has made and will remove."""
    Files.keep, Files.root = True, path


@functools.cache
def root() -> str:
    """Make the directory of this run.

    ext4 does not use an inode again within a minute of its deletion and searches on, from
    one such inode to the next: where files were deleted a moment ago, making one takes
    up to 1 ms instead of 14 us (measured), whoever makes it, and hides what is compared.
    So `asv_bench.compare` deletes nothing while it measures, and where other programs, or
    the last run, have deleted files, the flag "top of directory hierarchies" (chattr(1),
    +T) makes ext4 put each directory in here somewhere else.
    """
    if Files.root:
        return Files.root
    path = tempfile.mkdtemp(prefix="mmtensor-bench-")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flags = bytearray(8)
        fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, flags)
        value = int.from_bytes(flags, sys.byteorder) | _FS_TOPDIR_FL
        fcntl.ioctl(descriptor, _FS_IOC_SETFLAGS, value.to_bytes(8, sys.byteorder))
    except OSError:  # not ext4
        pass
    finally:
        os.close(descriptor)
    return path


@functools.cache
def new_directory(_kind: type) -> str:
    """Make the directory of one benchmark, the same for all libraries."""
    return tempfile.mkdtemp(dir=root())


def remove_files() -> None:
    """Remove all files of this process."""
    if root.cache_info().currsize:
        shutil.rmtree(root())
    root.cache_clear()
    new_directory.cache_clear()


def _empty(path: str) -> None:
    """Free the space of a file, or of the files below a directory, if it is there at all.

    Small files stay: cutting one takes ext4 60 us, after which everything runs cold, and
    what makes the next one would be timed along with that.
    """
    if os.path.isfile(path):
        if os.path.getsize(path) > _SMALL:
            os.truncate(path, 0)
        return
    for place, _, names in os.walk(path):
        for name in names:
            _empty(os.path.join(place, name))


@functools.cache
def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a regular tensor that benchmarks only read; made once in a process."""
    return torch.arange(int(np.prod(shape))).to(dtype).reshape(shape)


class Comparison(ABC):
    """One operation, done by each library that can do it.

    A subclass has a method for each library of `LIBRARIES` that can do the work: it builds
    the inputs and returns what is timed, a function without parameters. ``limit`` is the
    least that the machine must do: bare system calls through what Python has, or memcpy.
    asv runs `time_operation`; `asv_bench.compare` runs the same objects interleaved.

    Attributes
    ----------
    limit_is
        What the limit consists of, in words.
    limit_column
        The library whose time is the limit: ``"limit"``, or ``"torch"`` where plain torch is.
    code
        The operation as an expression, where a function call around it would distort it.
    """

    limit_is: ClassVar[str] = ""
    limit_column: ClassVar[str] = "limit"
    code: ClassVar[str | None] = None

    params: ClassVar[list[Any]] = [list(LIBRARIES)]
    param_names: ClassVar[list[str]] = ["library"]

    # asv calls `setup` before each sample, and then the operation once: what takes 1 us in a
    # loop took 20 us so, with cold caches. So a sample is a round of calls, and asv reads
    # from `timer` what one of them took.
    number = 1
    warmup_time = 0
    calls = 0
    elapsed = 0.0

    call: Callable[..., Any]

    @property
    @abstractmethod
    def title(self) -> str:
        """How the table calls the operation; asv leaves out classes that lack it."""

    def setup(self, library: str) -> None:
        """Build the inputs of one library."""
        make = getattr(self, library, None)
        if make is None:
            raise NotImplementedError(f"not measured with {library}")
        torch.set_num_threads(1)
        self._paths: list[str] = []
        self.call = make()

    def teardown(self, library: str) -> None:  # noqa: ARG002  # asv passes the parameters
        """Free what `setup` made: memory, and disk space as `root` says."""
        self.__dict__.pop("call", None)
        if not Files.keep:
            remove_files()
            return
        for path in self.__dict__.pop("_paths", ()):
            _empty(path)

    def timer(self) -> float:
        """Return the seconds that all samples took, a call each: the clock for asv."""
        return self.elapsed

    def time_operation(self, library: str) -> None:
        """Do the operation, the release of its result included, as often as fits a round."""
        self.calls = self.calls or calibrate(self, library, _ROUND)
        self.elapsed += seconds_of_call(self, library, self.calls)

    def new_path(self) -> str:
        """Return the path of a file that does not exist."""
        path = os.path.join(new_directory(type(self)), f"{next(_numbers)}.bin")
        self._paths.append(path)
        return path


def give_memory(nbytes: int) -> None:
    """Fill so much of the page cache, and free it again, for those who are timed next.

    A virtual machine whose host takes free pages away after two seconds (free page
    reporting) gets each back when it is touched: 406 MB in 133 files took 80 ms to write, or
    400 after a pause (measured), whoever wrote them. Pages that were anonymous memory before
    do not help: the page cache takes others.
    """
    fd = os.open(os.path.join(root(), "memory"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        for position in range(0, nbytes, len(_ONES)):
            os.pwrite(fd, _ONES[: nbytes - position], position)
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


class FreshFile(Comparison):
    """An operation that needs an argument of its own each time, for example a new path.

    What the library's method returns takes that argument. Making it (`before`) and removing
    it (`after`) is not timed.

    Attributes
    ----------
    memory
        Bytes of memory that a call takes, where they are many; see `give_memory`.
    """

    memory: ClassVar[int] = 0

    def before(self, library: str) -> Any:  # noqa: ARG002
        """Make the argument of one call."""
        if self.memory:
            give_memory(self.memory)
        return self.new_path()

    def after(self, argument: Any) -> None:
        """Free what the call left behind; its inode stays, see `root`."""
        _empty(argument)


class Expression(Comparison):
    """An expression in `x`, a tensor of a file, against the same on a regular tensor."""

    shape: ClassVar[tuple[int, ...]] = (3, 4, 5)
    limit_is = "plain torch"
    limit_column = "torch"
    numpy_code: ClassVar[str | None] = None

    names: dict[str, Any]

    def bind(self, x: Any, code: str | None = None) -> Callable[[], Any]:
        """Return a function that evaluates the expression."""
        self.names = {"x": x, "torch": torch, "np": np}
        self.statement = code or self.code
        function: Callable[[], Any] = eval(f"lambda: {self.statement}", self.names)  # noqa: S307
        return function

    def mmtensor(self) -> Callable[[], Any]:
        """On a tensor of mmtensor."""
        return self.bind(MMT.from_tensor(values(*self.shape), filename=self.new_path()))

    def tensordict(self) -> Callable[[], Any]:
        """On a tensor of tensordict."""
        return self.bind(TDT.from_tensor(values(*self.shape), filename=self.new_path()))

    def numpy(self) -> Callable[[], Any]:
        """On a map of NumPy."""
        if self.numpy_code is None:
            raise NotImplementedError("NumPy has no such method")
        path = self.new_path()
        values(*self.shape).numpy().tofile(path)
        return self.bind(np.memmap(path, np.float32, "r+", shape=self.shape), self.numpy_code)

    def torch(self) -> Callable[[], Any]:
        """On a regular tensor."""
        return self.bind(values(*self.shape).clone())
