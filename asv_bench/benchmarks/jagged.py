"""Jagged tensors: 10,000 images of 3 x 32..96 x 32..96 bytes, about 123 MB."""

import ctypes
import functools
import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import safetensors.torch
import torch
from joblib.externals.loky import get_reusable_executor
from mmap_ninja.ragged import RaggedMmap
from safetensors import safe_open

from mmtensor import JaggedTensor, JaggedWriter

from .common import TDT, Comparison, FreshFile
from .images import COUNT, Source, images, let_children_import, nested

_BATCH, _MANY = 64, 10_000_000
_SIDES = (".bin", ".offsets.bin", ".shape.bin")


@functools.cache
def _ids(count: int) -> list[int]:
    return np.random.default_rng(1).integers(0, count, 1000).tolist()


class _Stored(Comparison):
    """The images, written by each library."""

    def jagged_path(self) -> str:
        """Write the files of mmtensor."""
        path = self.new_path()
        self._paths += [path.removesuffix(".bin") + side for side in _SIDES[1:]]
        JaggedTensor.from_tensors(images().elements, filename=path)
        return path

    def jagged(self) -> JaggedTensor:
        """Open them."""
        return JaggedTensor.from_filename(self.jagged_path(), torch.uint8, mode="r+")

    def ninja_path(self) -> str:
        """Write the directory of mmap_ninja."""
        path = self.new_path().removesuffix(".bin")
        RaggedMmap.from_lists(path, images().arrays)
        self._paths += _files(path)
        return path

    def nested_path(self) -> str:
        """Write the file of tensordict."""
        path = self.new_path()
        TDT.from_tensor(nested(images().elements), filename=path)
        return path

    def named_path(self) -> str:
        """Write the file of safetensors."""
        path = self.new_path()
        safetensors.torch.save_file(images().named, path)
        return path


def _files(directory: str) -> list[str]:
    return [os.path.join(root, name) for root, _, names in os.walk(directory) for name in names]


class Element(_Stored):
    """One image: a view."""

    title = "`j[i]`, random"
    limit_is = "`as_strided` with offsets in a list"

    def use(self, j: Any) -> Callable[[], Any]:
        """Return what is timed."""
        ids = itertools.cycle(_ids(COUNT))
        return lambda: j[next(ids)]

    def mmtensor(self) -> Callable[[], Any]:
        """A `JaggedTensor`."""
        return self.use(self.jagged())

    def mmap_ninja(self) -> Callable[[], Any]:
        """A `RaggedMmap`."""
        return self.use(RaggedMmap(self.ninja_path()))

    def tensordict(self) -> Callable[[], Any]:
        """A nested tensor."""
        shapes = torch.tensor(images().shapes)
        return self.use(TDT.from_filename(self.nested_path(), torch.uint8, shapes))

    def safetensors(self) -> Callable[[], Any]:
        """A tensor by its name, copied."""
        ids, file = itertools.cycle(_ids(COUNT)), safe_open(self.named_path(), "pt")
        return lambda: file.get_tensor(str(next(ids)))

    def limit(self) -> Callable[[], Any]:
        """Nothing checked, nothing kept."""
        ids = itertools.cycle(_ids(COUNT))
        values, shapes, offsets = images().values, images().shapes, images().offsets

        def element() -> torch.Tensor:
            i = next(ids)
            a, b, c = shapes[i]
            return values.as_strided((a, b, c), (b * c, c, 1), offsets[i])

        return element


class Batch(_Stored):
    """Random images, packed into one buffer (mmap_ninja: a list of views)."""

    title = "`j[ids]`, 64 images"
    limit_is = "memcpy of as many bytes, hot in cache"

    def batches(self) -> Iterator[list[int]]:
        """Return lists of numbers without end."""
        ids = _ids(COUNT)
        return itertools.cycle(ids[i : i + _BATCH] for i in range(0, 960, _BATCH))

    def use(self, j: Any) -> Callable[[], Any]:
        """Return what is timed."""
        batches = self.batches()
        return lambda: j[next(batches)]

    mmtensor = Element.mmtensor
    mmap_ninja = Element.mmap_ninja

    def limit(self) -> Callable[[], Any]:
        """Copy one piece of memory to another, again and again."""
        sizes = np.diff(images().offsets)
        nbytes = [int(sizes[ids].sum()) for ids in itertools.islice(self.batches(), 15)]
        source = torch.ones(max(nbytes), dtype=torch.uint8)
        target = torch.ones(max(nbytes), dtype=torch.uint8)
        self.kept = source, target
        counts = itertools.cycle(nbytes)
        memmove, to, of = ctypes.memmove, target.data_ptr(), source.data_ptr()
        return lambda: memmove(to, of, next(counts))


class Open(_Stored):
    """The files, and dropping what was opened."""

    title = "open 10,000 elements"

    def mmtensor(self) -> Callable[[], Any]:
        """`from_filename`."""
        path = self.jagged_path()
        return lambda: JaggedTensor.from_filename(path, torch.uint8, mode="r+")

    def mmap_ninja(self) -> Callable[[], Any]:
        """A `RaggedMmap`."""
        path = self.ninja_path()
        return lambda: RaggedMmap(path)

    def tensordict(self) -> Callable[[], Any]:
        """`from_filename` with the shapes at hand."""
        path, shapes = self.nested_path(), torch.tensor(images().shapes)
        return lambda: TDT.from_filename(path, torch.uint8, shapes)

    def safetensors(self) -> Callable[[], Any]:
        """`safe_open`."""
        path = self.named_path()
        return lambda: safe_open(path, "pt")


class OpenMany(Open):
    """A thousand times as many elements."""

    title = "open 10,000,000 elements"
    limit_is = "opening 10,000"

    def mmtensor(self) -> Callable[[], Any]:
        """`from_filename`."""
        path = self.new_path()
        self._paths += [path.removesuffix(".bin") + side for side in _SIDES[1:]]
        shapes = np.full((_MANY, 1), 3)
        JaggedTensor.zeros(shapes, dtype=torch.uint8, filename=path)
        return lambda: JaggedTensor.from_filename(path, torch.uint8, mode="r+")

    limit = Open.mmtensor
    mmap_ninja = safetensors = tensordict = None  # type: ignore[assignment]  # not measured


class _Building(FreshFile):
    """Writing all images to new files."""

    memory = 1 << 28

    def before(self, library: str) -> Any:
        """Make a path, of a directory for mmap_ninja."""
        path = super().before(library)
        return path.removesuffix(".bin") if library == "mmap_ninja" else path

    def after(self, argument: Any) -> None:
        """Empty the files; their inodes stay, see `common`."""
        root = argument.removesuffix(".bin")
        for path in (argument, *(root + side for side in _SIDES), *_files(root)):
            if os.path.isfile(path):
                os.truncate(path, 0)


class Build(_Building):
    """A list of tensors in memory becomes files."""

    title = "build from a list, 123 MB"
    limit_is = "fallocate + pwritev"

    def mmtensor(self) -> Callable[[str], Any]:
        """`from_tensors`."""
        elements = images().elements
        return lambda path: JaggedTensor.from_tensors(elements, filename=path)

    def mmap_ninja(self) -> Callable[[str], Any]:
        """`from_lists`."""
        arrays = images().arrays
        return lambda path: RaggedMmap.from_lists(path, arrays)

    def tensordict(self) -> Callable[[str], Any]:
        """A nested tensor of the list, which is then written."""
        elements = images().elements
        return lambda path: TDT.from_tensor(nested(elements), filename=path)

    def safetensors(self) -> Callable[[str], Any]:
        """`save_file`."""
        return functools.partial(safetensors.torch.save_file, images().named)

    def limit(self) -> Callable[[str], Any]:
        """The system calls, 1024 arrays (IOV_MAX) at a time."""
        arrays, nbytes = images().arrays, images().nbytes

        def write(path: str) -> None:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC)
            os.posix_fallocate(fd, 0, nbytes)
            position = 0
            for start in range(0, COUNT, 1024):
                position += os.pwritev(fd, arrays[start : start + 1024], position)
            os.close(fd)

        return write


def _fill(j: JaggedTensor, numbers: range, source: Source) -> None:
    for number in numbers:
        j[number] = source[number]


class BuildWithTwo(_Building):
    """Two processes make the elements; the shapes are known."""

    title = "build with two processes"

    def source(self) -> Source:
        """Write the raw file that the elements are made of."""
        path = self.new_path()
        images().values.numpy().tofile(path)
        np.array(images().shapes).tofile(path + ".shapes")
        self._paths.append(path + ".shapes")
        return Source(path)

    def mmtensor(self) -> Callable[[str], Any]:
        """`empty`, and a reference to each process."""
        source, shapes = self.source(), np.array(images().shapes)
        # joblib keeps its processes from one call to the next as well.
        self.executor = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
        submit = self.executor.submit
        halves = range(COUNT // 2), range(COUNT // 2, COUNT)

        def build(path: str) -> JaggedTensor:
            j = JaggedTensor.empty(shapes, dtype=torch.uint8, filename=path)
            for done in [submit(_fill, j, half, source) for half in halves]:
                done.result()
            return j

        list(self.executor.map(abs, range(8)))  # start them
        return build

    def teardown(self, library: str) -> None:
        """Let the processes end."""
        if library == "mmtensor":
            self.executor.shutdown()
        if library == "mmap_ninja":
            # Those of joblib would hold this process up for the five minutes that they wait.
            get_reusable_executor().shutdown()
        super().teardown(library)

    def mmap_ninja(self) -> Callable[[str], Any]:
        """`from_indexable` with ``n_jobs=2``."""
        source = self.source()
        let_children_import()
        return lambda path: RaggedMmap.from_indexable(path, source, batch_size=1024, n_jobs=2)


class Append(Comparison):
    """One element of 192 bytes, handed to the kernel."""

    title = "append one element, flushed"

    def mmtensor(self) -> Callable[[], Any]:
        """`append` and `flush`."""
        path = self.new_path()
        self._paths += [path.removesuffix(".bin") + side for side in _SIDES[1:]]
        writer = JaggedWriter(path, torch.uint8, 3)
        element = torch.ones(3, 8, 8, dtype=torch.uint8)

        def append() -> None:
            writer.append(element)
            writer.flush()

        return append

    def mmap_ninja(self) -> Callable[[], Any]:
        """`append`, which is written at once."""
        path = self.new_path().removesuffix(".bin")
        array = np.ones((3, 8, 8), np.uint8)
        ragged = RaggedMmap.from_lists(path, [array])
        self._paths += _files(path)
        return lambda: ragged.append(array)


class Pickle(_Stored):
    """A reference to all of them."""

    title = "`dumps(j)`"

    def mmtensor(self) -> Callable[[], Any]:
        """A `JaggedTensor`."""
        self.j: Any = self.jagged()
        return lambda: pickle.dumps(self.j)

    def mmap_ninja(self) -> Callable[[], Any]:
        """A `RaggedMmap`, with all its offsets."""
        self.j = RaggedMmap(self.ninja_path())
        return lambda: pickle.dumps(self.j)

    def track_bytes(self, library: str) -> int:  # noqa: ARG002  # asv passes the parameters
        """Count the bytes."""
        return len(pickle.dumps(self.j))
