"""For tests of code that builds on mmtensor: hypothesis strategies and contract tests.

It needs ``pytest`` and ``hypothesis``, which the extra ``test`` installs.

The strategies draw shapes, dtypes, arrays, tensors, chains of views and row indices. A
contract is a class of tests that says what every tensor on a mapping, or every way to write
a file, promises. Inherit from it under a name that begins with ``Test`` and say how to make
the thing and how to look at its bytes without the code under test.
"""

import copy
import os
import pickle
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from mmtensor import mapping, rawfile
from mmtensor.arrays import locate
from mmtensor.bridge import to_numpy
from mmtensor.dtypes import DTYPES, numpy_dtype
from mmtensor.errors import ExistingFileError, ReadOnlyError, SymbolicLinkError
from mmtensor.tensor import MemoryMappedTensor

__all__ = [
    "Chain",
    "TensorContract",
    "WriterContract",
    "arrays",
    "chains",
    "dtypes",
    "row_indices",
    "shapes",
    "tensors",
]


def dtypes(*, exclude: Iterable[str] = ()) -> st.SearchStrategy[str]:
    """Draw the canonical name of a dtype that NumPy and torch share.

    Parameters
    ----------
    exclude
        Names that are not drawn.

    Examples
    --------
    >>> dtypes(exclude=["bool"]).filter(lambda name: name == "bool").is_empty
    False
    """
    left_out = set(exclude)
    return st.sampled_from([name for name in DTYPES if name not in left_out])


def shapes(
    *, min_dims: int = 0, max_dims: int = 4, min_side: int = 0, max_side: int = 5
) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw a shape: a tuple of sizes, zero among them.

    Parameters
    ----------
    min_dims, max_dims
        How many sizes.
    min_side, max_side
        How large each is.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(shapes(min_dims=2, min_side=1), lambda shape: True)
    (1, 1)
    """
    sides = st.integers(min_side, max_side)
    return st.lists(sides, min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def arrays(
    draw: st.DrawFn,
    *,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> np.ndarray[Any, Any]:
    """Draw a C-contiguous array of arbitrary bytes, NaNs and infinities among them.

    Parameters
    ----------
    draw
        Passed by hypothesis.
    dtype
        A canonical name; None draws one.
    shape
        None draws one.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(arrays(dtype="int8", shape=(2,)), lambda array: True)
    array([0, 0], dtype=int8)
    """
    found = numpy_dtype(draw(dtypes()) if dtype is None else dtype)
    sizes = draw(shapes()) if shape is None else shape
    count = int(np.prod(sizes, dtype=int)) * found.itemsize
    # A seed instead of the bytes themselves: 16 KB of drawn bytes take a second.
    seed = draw(st.integers(0, 2**16))
    data = np.random.default_rng(seed).integers(0, 256 if seed else 1, count, np.uint8)
    if found == np.bool_:
        data &= 1
    return data.view(found).reshape(sizes)


@st.composite
def tensors(
    draw: st.DrawFn,
    *,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Draw a regular tensor: contiguous, transposed, with gaps, or expanded.

    Parameters
    ----------
    draw
        Passed by hypothesis.
    dtype
        A canonical name; None draws one.
    shape
        None draws one.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(tensors(dtype="int8", shape=(2,)), lambda tensor: not tensor.is_contiguous()).stride()
    (2,)
    """
    name = draw(dtypes()) if dtype is None else dtype
    sizes = draw(shapes()) if shape is None else shape
    layout = draw(st.sampled_from(["contiguous", "transposed", "gaps", "expanded"]))
    if layout == "transposed":
        return _regular(draw(arrays(dtype=name, shape=sizes[::-1]))).permute(
            tuple(range(len(sizes)))[::-1]
        )
    if layout == "gaps" and sizes:
        wide = (*sizes[:-1], 2 * sizes[-1])
        return _regular(draw(arrays(dtype=name, shape=wide)))[..., ::2]
    if layout == "expanded" and sizes:
        return _regular(draw(arrays(dtype=name, shape=(1, *sizes[1:])))).expand(sizes)
    return _regular(draw(arrays(dtype=name, shape=sizes)))


def _regular(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a regular tensor with the bytes of an array, without the code under test."""
    dtype = getattr(torch, array.dtype.name)
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    words = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    return words.view(dtype).reshape(array.shape)


class Chain:
    """A chain of views that can be applied to any tensor of the shape it was drawn for.

    Parameters
    ----------
    steps
        Text of each step, as it would be typed after the tensor, and what it does.

    Examples
    --------
    >>> Chain([(".t()", torch.Tensor.t)])(torch.zeros(2, 3)).shape
    torch.Size([3, 2])
    """

    def __init__(self, steps: list[tuple[str, Callable[[Any], Any]]]) -> None:
        self.steps = steps

    def __call__(self, tensor: Any) -> Any:
        """Apply the chain to a tensor."""
        for _, step in self.steps:
            tensor = step(tensor)
        return tensor

    def __repr__(self) -> str:
        return "x" + "".join(text for text, _ in self.steps)


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...], *, max_steps: int = 4) -> Chain:
    """Draw a chain of views of tensors of a shape; it works for any layout.

    Parameters
    ----------
    draw
        Passed by hypothesis.
    shape
        Of the tensors that it will be applied to.
    max_steps
        How many views of views there may be.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(chains((2, 3)), lambda chain: True)
    x
    """
    tensor = torch.empty(shape)
    steps = []
    for _ in range(draw(st.integers(0, max_steps))):
        text, step = draw(_step(tuple(tensor.shape)))
        tensor = step(tensor)
        steps.append((text, step))
    return Chain(steps)


@st.composite
def _step(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, Callable[[Any], Any]]:
    names = ["unsqueeze", "detach", "none", "ellipsis", "expand"]
    names += ["transpose", "slice", "narrow", "squeeze", "permute", "unfold"] if shape else []
    names += ["int", "select", "unbind"] if shape and shape[0] else []
    name = draw(st.sampled_from(names))
    dim = draw(st.integers(0, max(len(shape) - 1, 0)))
    size = shape[dim] if shape else 0
    start = draw(st.integers(0, size))
    length = draw(st.integers(0, size - start))
    row = draw(st.integers(-shape[0], shape[0] - 1)) if shape and shape[0] else 0
    pace = draw(st.integers(1, 3))
    order = tuple(draw(st.permutations(range(len(shape)))))
    wider = (2, *shape)
    options: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "unsqueeze": (f".unsqueeze({dim})", lambda x: x.unsqueeze(dim)),
        "detach": (".detach()", lambda x: x.detach()),
        "none": ("[None]", lambda x: x[None]),
        "ellipsis": ("[...]", lambda x: x[...]),
        "expand": (f".expand({wider})", lambda x: x.expand(wider)),
        "transpose": (f".transpose(0, {dim})", lambda x: x.transpose(0, dim)),
        "slice": (f"[{row}::{pace}]", lambda x: x[row::pace]),
        "narrow": (
            f".narrow({dim}, {start}, {length})",
            lambda x: x.narrow(dim, start, length),
        ),
        "squeeze": (f".squeeze({dim})", lambda x: x.squeeze(dim)),
        "permute": (f".permute({order})", lambda x: x.permute(order)),
        "unfold": (f".unfold({dim}, {length}, {pace})", lambda x: x.unfold(dim, length, pace)),
        "int": (f"[{row}]", lambda x: x[row]),
        "select": (f".select(0, {row})", lambda x: x.select(0, row)),
        "unbind": (f".unbind()[{row}]", lambda x: x.unbind()[row]),
    }
    return options[name]


@st.composite
def row_indices(draw: st.DrawFn, length: int, *, valid: bool = False) -> Any:
    """Draw what stands in ``x[...]`` to gather rows: ids, a mask, in any form torch takes.

    Parameters
    ----------
    draw
        Passed by hypothesis.
    length
        Number of rows.
    valid
        Whether row numbers out of range and masks of another length are left out.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(row_indices(3), lambda index: isinstance(index, list) and len(index) == 1)
    [0]
    """
    kind = draw(st.sampled_from(["list", "array", "tensor", "int32", "matrix", "mask"]))
    slack = 0 if valid else draw(st.sampled_from([0, 0, 0, 1]))
    if kind == "mask":
        mask = draw(st.lists(st.booleans(), min_size=length, max_size=length + slack))
        form = draw(st.sampled_from(["list", "array", "tensor"])) if mask else "tensor"
        forms: dict[str, Any] = {
            "list": mask,
            "array": np.array(mask, np.bool_),
            "tensor": torch.tensor(mask, dtype=torch.bool),
        }
        return forms[form]
    low, high = -length - slack, length - 1 + slack
    ids = draw(st.lists(st.integers(low, high), max_size=7)) if low <= high else []
    if kind == "list":
        return ids
    if kind == "array":
        return np.array(ids, np.int64)
    tensor = torch.tensor(ids, dtype=torch.int32 if kind == "int32" else torch.int64)
    return torch.stack([tensor, tensor.flip(0)]) if kind == "matrix" else tensor


class TensorContract:
    """What every memory-mapped tensor promises, whatever it stands on.

    Attributes
    ----------
    mode : str
        The mode of the tensors that `make` returns.
    reaches : bool
        Whether writes through the tensor show in `raw`.

    Examples
    --------
    >>> class TestFile(TensorContract):
    ...     def make(self, directory, values):
    ...         values.tofile(directory / "x")
    ...         return MemoryMappedTensor.from_filename(
    ...             directory / "x", values.dtype, values.shape, mode="r+"
    ...         )
    ...
    ...     def raw(self, directory):
    ...         return (directory / "x").read_bytes()
    """

    mode: ClassVar[str] = "r+"
    reaches: ClassVar[bool] = True

    def make(self, directory: Path, values: np.ndarray[Any, Any]) -> MemoryMappedTensor:
        """Return a memory-mapped tensor with these values."""
        raise NotImplementedError

    def raw(self, directory: Path) -> bytes:
        """Return the bytes that lie under the tensor, read without the code under test."""
        raise NotImplementedError

    @pytest.fixture
    def values(self) -> np.ndarray[Any, Any]:
        """Return the values that the tensors of the tests have."""
        return np.arange(24, dtype=np.float32).reshape(4, 6)

    @pytest.fixture
    def x(self, tmp_path: Path, values: np.ndarray[Any, Any]) -> MemoryMappedTensor:
        """Return a tensor with `values`."""
        return self.make(tmp_path, values.copy())

    def test_values(self, x: Any, tmp_path: Path, values: Any) -> None:
        """The tensor has the values, and they are the raw bytes."""
        assert type(x) is MemoryMappedTensor
        assert x.tolist() == values.tolist()
        assert self.raw(tmp_path) == values.tobytes()

    def test_mode(self, x: Any) -> None:
        """The tensor and every view of it know their mode."""
        assert (x.mode, x[1].t().mode) == (self.mode, self.mode)

    def test_write(self, x: Any, tmp_path: Path, values: Any) -> None:
        """A write shows in the tensor and its views, and in the raw bytes as the mode says."""
        column = x[:, 1]
        if self.mode == "r":
            with pytest.raises(ReadOnlyError, match=r'read-only tensor: .*(mode "r"|writeable)'):
                x[2, 1] = -1.0
            assert self.raw(tmp_path) == values.tobytes()
            return
        x[2, 1] = -1.0
        assert column[2] == -1.0
        before = values.tobytes()
        values[2, 1] = -1.0
        assert self.raw(tmp_path) == (values.tobytes() if self.reaches else before)

    def test_kernels_do_not_write_read_only_memory(self, x: Any, tmp_path: Path) -> None:
        """In mode ``r`` every road to the memory is closed, on plain views as well."""
        if self.mode != "r":
            return
        before = self.raw(tmp_path)
        one = torch.ones(())
        plain = torch.t(x)
        roads: list[Callable[[], Any]] = [
            lambda: x.add_(1),
            lambda: x.data.add_(1),
            lambda: x.detach().zero_(),
            lambda: x.view(-1).fill_(0),
            lambda: plain.mul_(2),
            lambda: torch.add(x, one, out=x),
            lambda: torch.relu_(x),
            lambda: torch._foreach_add_([x], 1),
            lambda: x.__iadd__(1),
            lambda: x.__setitem__(torch.tensor([0]), 1.0),
            lambda: np.add(x.numpy(), 1, out=x.numpy()),
            lambda: np.asarray(x).__setitem__(0, 1),
        ]
        for road in roads:
            with pytest.raises((RuntimeError, ValueError), match="read-only|data pointer"):
                road()
        assert self.raw(tmp_path) == before

    def test_array(self, x: Any, values: Any) -> None:
        """`to_numpy` and ``x.numpy()`` are the same memory, as writeable as the mode."""
        for array in (to_numpy(x), x.numpy(), np.asarray(x)):
            assert array.ctypes.data == x.data_ptr()
            assert array.flags.writeable == (self.mode != "r")
            np.testing.assert_array_equal(array, values)

    def test_views(self, x: Any) -> None:
        """Views are memory-mapped tensors on the same storage; results are regular."""
        for view in (x[1], x[1:3], x.t(), x.view(-1), x[..., None], *x.unbind(), *x.chunk(2)):
            assert type(view) is MemoryMappedTensor
            assert view.untyped_storage() is x.untyped_storage()
        for result in (x + 1, x[[0, 1]], x.clone(), x.t().contiguous(), x.sum()):
            assert type(result) is Tensor

    def test_locate(self, x: Any) -> None:
        """`locate` finds the bytes of any view by arithmetic."""
        base, where = locate(x), locate(x[1:, ::2])
        assert base is not None
        assert where is not None
        assert where.offset == base.offset + 24
        assert (where.shape, where.strides) == ((3, 3), (24, 8))
        assert (where.mode, where.path) == (self.mode, base.path)

    def test_pickle(self, x: Any, values: Any) -> None:
        """A pickled view comes back with its values."""
        view = pickle.loads(pickle.dumps(x.t()[2:, 1]))  # noqa: S301  # its own pickle
        assert view.tolist() == values.T[2:, 1].tolist()

    def test_deepcopy(self, x: Any, tmp_path: Path, values: Any) -> None:
        """A deep copy is an independent regular tensor."""
        twin = copy.deepcopy(x)
        assert type(twin) is Tensor
        twin.zero_()
        assert x.tolist() == values.tolist()
        assert self.raw(tmp_path) == values.tobytes()

    def test_no_gradients(self, x: Any) -> None:
        """The tensor cannot require gradients, and takes part in computing others'."""
        with pytest.raises(RuntimeError, match="cannot require gradients"):
            x.requires_grad_()
        weight = torch.ones(6, requires_grad=True)
        (x @ weight).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == x.sum(0).tolist()


class WriterContract:
    """What every function that writes a file promises: all of it or nothing.

    Examples
    --------
    >>> import mmtensor
    >>> class TestSave(WriterContract):
    ...     def write(self, path, *, existsok=False):
    ...         return mmtensor.save_array(path, np.arange(1000.0), existsok=existsok)
    """

    def write(self, path: Path, *, existsok: bool = False) -> Any:
        """Write a file, of at least a page."""
        raise NotImplementedError

    def test_creates_one_file(self, tmp_path: Path) -> None:
        """One file appears, under its name, and nothing beside it."""
        self.write(tmp_path / "x")
        assert os.listdir(tmp_path) == ["x"]

    def test_permissions_of_a_new_file(self, tmp_path: Path) -> None:
        """A new file has the permission bits that open(2) gives, less the umask."""
        old = os.umask(0o027)
        try:
            self.write(tmp_path / "x")
        finally:
            os.umask(old)
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640

    def test_existing_file(self, tmp_path: Path) -> None:
        """An existing file is an error, both FileExistsError and RuntimeError, and stays."""
        (tmp_path / "x").write_bytes(b"old")
        with pytest.raises(ExistingFileError, match="existsok=True to replace it") as caught:
            self.write(tmp_path / "x")
        assert isinstance(caught.value, FileExistsError)
        assert isinstance(caught.value, RuntimeError)
        assert (tmp_path / "x").read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["x"]

    def test_replaces(self, tmp_path: Path) -> None:
        """With existsok a file is replaced: bits kept, old readers and hard links untouched."""
        old = np.full(3000, 7, np.uint8)
        old.tofile(tmp_path / "x")
        (tmp_path / "x").chmod(0o604)
        (tmp_path / "link").hardlink_to(tmp_path / "x")
        reader = np.memmap(tmp_path / "x", np.uint8, "r")
        self.write(tmp_path / "x", existsok=True)
        new = (tmp_path / "x").read_bytes()
        self.write(tmp_path / "fresh")
        assert new == (tmp_path / "fresh").read_bytes() != old.tobytes()
        assert reader.tobytes() == (tmp_path / "link").read_bytes() == old.tobytes()
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o604
        assert sorted(os.listdir(tmp_path)) == ["fresh", "link", "x"]

    @pytest.mark.parametrize("existsok", [False, True])
    def test_symbolic_link(self, tmp_path: Path, existsok: bool) -> None:
        """A symbolic link as a target is a RuntimeError; link and file stay as they are."""
        (tmp_path / "file").write_bytes(b"old")
        for name, target in (("x", "file"), ("dangling", "nothing")):
            (tmp_path / name).symlink_to(target)
            with pytest.raises(SymbolicLinkError, match="must not be a symbolic link"):
                self.write(tmp_path / name, existsok=existsok)
            assert os.readlink(tmp_path / name) == target
        assert (tmp_path / "file").read_bytes() == b"old"
        assert sorted(os.listdir(tmp_path)) == ["dangling", "file", "x"]

    @pytest.mark.parametrize("existsok", [False, True])
    def test_failure_in_the_middle(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existsok: bool
    ) -> None:
        """A step that fails leaves what was there before, and nothing else."""

        def fail(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(mapping, "create_map", lambda *_: None)  # one step at a time
        for name in ("pwrite", "posix_fallocate", "ftruncate"):
            monkeypatch.setattr(os, name, fail)
        monkeypatch.setattr(rawfile, "pwrite", fail)
        self._fails(tmp_path, existsok, "Input/output error")

    @pytest.mark.parametrize("existsok", [False, True])
    def test_no_room_in_the_middle(self, tmp_path: Path, existsok: bool) -> None:
        """A write that the system ends after a few bytes leaves nothing, whatever the road."""
        resource = pytest.importorskip("resource")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
        try:
            self._fails(tmp_path, existsok, "File too large")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def _fails(self, tmp_path: Path, existsok: bool, message: str) -> None:
        if existsok:
            (tmp_path / "x").write_bytes(b"old")
        before = sorted(os.listdir(tmp_path))
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match=message):
            self.write(tmp_path / "x", existsok=existsok)
        assert sorted(os.listdir(tmp_path)) == before
        assert not existsok or (tmp_path / "x").read_bytes() == b"old"
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_failure_at_the_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A replacement that cannot be put in place leaves the old file, and nothing else."""

        def fail(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        (tmp_path / "x").write_bytes(b"old")
        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="Input/output error"):
            self.write(tmp_path / "x", existsok=True)
        assert os.listdir(tmp_path) == ["x"]
        assert (tmp_path / "x").read_bytes() == b"old"

    def test_missing_directory(self, tmp_path: Path) -> None:
        """A directory that does not exist is named, and is not created."""
        with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
            self.write(tmp_path / "nowhere" / "x")
        assert os.listdir(tmp_path) == []

    def test_directory_as_target(self, tmp_path: Path) -> None:
        """A directory is not replaced by a file."""
        (tmp_path / "x").mkdir()
        with pytest.raises(IsADirectoryError, match="cannot replace a directory"):
            self.write(tmp_path / "x", existsok=True)
        assert os.listdir(tmp_path) == ["x"]
