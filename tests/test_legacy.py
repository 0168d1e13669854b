"""`MemmapTensor`, the deprecated forerunner, for code that still names it."""

import copy
import gc
import io
import os
import pickle
import warnings

import cloudpickle
import numpy as np
import pytest
import torch
from processes import Child, values

import mmtensor
from mmtensor import MemmapTensor, MemoryMappedTensor

pytestmark = pytest.mark.timeout(120)

DATA = torch.arange(24.0).view(6, 4)


def quietly(make, *args, **kwargs):
    """Make one without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make(*args, **kwargs)


@pytest.fixture
def x():
    """Return one with the values 0 to 23, on a temporary file."""
    return quietly(MemmapTensor.from_tensor, DATA)


def child_sum(x):
    """Add up, in a child."""
    return type(x).__name__, x.filename, float(x.sum())


def child_fill(x, value):
    """Overwrite, in a child."""
    x.fill_(value)


def child_make(transfer):
    """Make one in a child and send it, with or without its file."""
    return quietly(MemmapTensor.from_tensor, DATA, transfer_ownership=transfer)


class TestWarning:
    """Making one warns, and says what to use."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: MemmapTensor(3),
            lambda: MemmapTensor.from_tensor(torch.ones(3)),
            lambda: MemmapTensor.empty_like(torch.ones(3)),
        ],
    )
    def test_names_the_way_out_and_the_caller(self, make):
        """The warning names the replacement and points at the line that made the object."""
        with pytest.warns(DeprecationWarning, match="Use mmtensor.MemoryMappedTensor") as caught:
            make()
        assert [warning.filename for warning in caught] == [__file__]
        assert caught[0].lineno == make.__code__.co_firstlineno

    def test_only_making(self, x):
        """Indexing, computing, copying and pickling do not warn."""
        x[0], x[1:] + 1, x[[0, 2]].clone(), copy.copy(x), pickle.loads(pickle.dumps(x))


class TestMaking:
    """The constructors as their users know them."""

    @pytest.mark.parametrize("size", [(3, 4), ((3, 4),), ([3, 4],), (torch.Size([3, 4]),)])
    def test_sizes(self, size):
        """Sizes come one by one or in a sequence; the values are zeros."""
        x = quietly(MemmapTensor, *size)
        assert x.shape == (3, 4)
        assert x.dtype is torch.get_default_dtype()
        assert values(x.as_tensor()) == [[0] * 4] * 3

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16]
    )
    def test_dtypes(self, dtype):
        """The dtype of the data is that of the file and of what is read."""
        data = torch.tensor([1, 0]).to(dtype)
        x = quietly(MemmapTensor.from_tensor, data)
        assert x.dtype is x.contiguous().dtype is x[0].clone().dtype is dtype
        assert os.path.getsize(x.filename) == 2 * data.itemsize
        assert (x == data).all()
        assert quietly(MemmapTensor, 2, dtype=dtype).dtype is dtype
        assert quietly(MemmapTensor.empty_like, data).dtype is dtype

    def test_file_name(self, tmp_path):
        """A named file is created, opened again with its values, and never deleted."""
        path = tmp_path / "x.memmap"
        x = quietly(MemmapTensor, 3, filename=path)
        assert x.filename == str(path)
        x.fill_(2)
        del x
        y = quietly(MemmapTensor, 3, filename=str(path))
        assert values(y.as_tensor()) == [2, 2, 2]
        del y
        gc.collect()
        assert np.fromfile(path, "f4").tolist() == [2, 2, 2]

    def test_wrong_size(self, tmp_path):
        """A file of another size is an error, and stays as it is."""
        path = mmtensor.save_array(tmp_path / "x", np.ones(5, "f4"))
        with pytest.raises(mmtensor.SizeError, match="must have 12 bytes.*20 bytes"):
            quietly(MemmapTensor, 3, filename=path)
        assert np.fromfile(path, "f4").tolist() == [1] * 5

    def test_from_tensor_again(self, x, tmp_path):
        """What is where it should be is returned as it is, and copied elsewhere on request."""
        assert quietly(MemmapTensor.from_tensor, x) is x
        assert quietly(MemmapTensor.from_tensor, x, filename=x.filename) is x
        y = quietly(MemmapTensor.from_tensor, x[1:], filename=tmp_path / "y")
        assert y.filename == str(tmp_path / "y")
        assert (y == DATA[1:]).all()
        y.zero_()
        assert (x == DATA).all()

    def test_from_tensor_replaces(self, tmp_path):
        """An existing file is replaced."""
        path = mmtensor.save_array(tmp_path / "x", np.ones(5, "f4"))
        x = quietly(MemmapTensor.from_tensor, DATA, filename=path)
        assert (x == DATA).all()

    @pytest.mark.parametrize(
        ("mode", "kept", "written"),
        [
            ("r+", True, True),
            ("readwrite", True, True),
            ("c", True, False),
            ("copyonwrite", True, False),
            ("w+", False, True),
            ("write", False, True),
        ],
    )
    def test_modes(self, tmp_path, mode, kept, written):
        """The modes keep or replace the values of a file, and write to it or do not."""
        path = mmtensor.save_array(tmp_path / "x", np.ones(3, "f4"))
        x = quietly(MemmapTensor, 3, filename=path, mode=mode)
        assert values(x.as_tensor()) == ([1, 1, 1] if kept else [0, 0, 0])
        x[:] = 5
        assert values(x.as_tensor()) == [5, 5, 5]
        assert (np.fromfile(path, "f4").tolist() == [5, 5, 5]) == written

    @pytest.mark.parametrize("mode", ["r", "readonly"])
    def test_read_only(self, tmp_path, mode):
        """A read-only one reads, and refuses every write."""
        path = mmtensor.save_array(tmp_path / "x", DATA.numpy())
        x = quietly(MemmapTensor, 6, 4, filename=path, mode=mode)
        assert x.mode == "r"
        assert (x + 0 == DATA).all()
        for write in (
            lambda: x.fill_(1),
            lambda: x.__setitem__(0, 1),
            x[1:].zero_,
            x[[0, 2]].zero_,
            lambda: x.__iadd__(1),
        ):
            with pytest.raises(mmtensor.ReadOnlyError, match='opened with mode "r"'):
                write()
        assert np.fromfile(path, "f4").tolist() == DATA.flatten().tolist()

    @pytest.mark.parametrize("mode", ["c", "r"])
    def test_missing_file(self, tmp_path, mode):
        """A mode that writes to no file makes none."""
        with pytest.raises(FileNotFoundError, match="No such file.*x.memmap"):
            quietly(MemmapTensor, 3, filename=tmp_path / "x.memmap", mode=mode)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("mode", ["c", "r"])
    def test_other_modes_of_new_files(self, mode):
        """Values can be written and then opened in another mode."""
        x = quietly(MemmapTensor.from_tensor, DATA, mode=mode)
        assert x.mode == mode
        assert (x == DATA).all()

    @pytest.mark.parametrize(
        ("make", "error", "pattern"),
        [
            (lambda: MemmapTensor(DATA), TypeError, "MemmapTensor.from_tensor"),
            (lambda: MemmapTensor(np.ones(3)), TypeError, "MemmapTensor.from_tensor"),
            (MemmapTensor, TypeError, "a shape is required"),
            (lambda: MemmapTensor("3"), TypeError, "shape must be an integer or a sequence"),
            (lambda: MemmapTensor(-3), ValueError, "non-negative sizes"),
            (lambda: MemmapTensor(3, device="meta"), mmtensor.DeviceError, "lives on the CPU"),
            (lambda: MemmapTensor(3, mode="x"), mmtensor.ModeError, "mode must be.*'x'"),
            (lambda: MemmapTensor(3, mode=None), mmtensor.ModeError, "mode must be.*None"),
            (lambda: MemmapTensor(3, size=4), TypeError, "unexpected keyword argument 'size'"),
            (lambda: MemmapTensor(3, filename="x", prefix="y"), ValueError, "got both"),
            (lambda: MemmapTensor.from_tensor(np.ones(3)), TypeError, "expected a torch tensor"),
            (
                lambda: MemmapTensor.from_tensor(torch.ones(3, requires_grad=True)),
                RuntimeError,
                "cannot require gradients",
            ),
        ],
    )
    def test_wrong_input(self, make, error, pattern, tmp_path, monkeypatch):
        """Wrong input is an error that says why, and leaves no file."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with pytest.raises(error, match=pattern):
            quietly(make)
        assert list(tmp_path.iterdir()) == []


class TestTemporaryFile:
    """Without a name the data is on a temporary file that goes with the last tensor on it."""

    @pytest.fixture(autouse=True)
    def _here(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def test_deleted(self, tmp_path):
        """The file is there as long as the tensor."""
        x = quietly(MemmapTensor.from_tensor, DATA, prefix="mine-")
        assert [p.name.startswith("mine-") for p in tmp_path.iterdir()] == [True]
        assert os.path.isfile(x.filename)
        del x
        gc.collect()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "keep", [lambda x: x[:2][-1:], lambda x: x[[0, 1]], lambda x: x.as_tensor().t(), copy.copy]
    )
    def test_kept_by_views(self, tmp_path, keep):
        """An index, a copy or a tensor of it keeps the file."""
        x = quietly(MemmapTensor.from_tensor, DATA)
        y = keep(x)
        del x
        gc.collect()
        assert len(list(tmp_path.iterdir())) == 1
        assert (y * 0 + 1 == 1).all()
        del y
        gc.collect()
        assert list(tmp_path.iterdir()) == []

    def test_end_of_the_process(self, run, tmp_path):
        """A process that ends with one alive deletes the file; its forked child does not."""
        program = """
            import os, tempfile, warnings, sys
            from mmtensor import MemmapTensor
            warnings.simplefilter("ignore")
            tempfile.tempdir = sys.argv[1]
            x = MemmapTensor(3)
            if not os.fork():
                sys.exit()
            os.wait()
            print(os.path.isfile(x.filename))
        """
        assert run(program, tmp_path) == "True"
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("transfer", [False, True])
    def test_ownership(self, tmp_path, transfer):
        """The file goes with its owner: with the sender, or on request with the receiver."""
        x = quietly(MemmapTensor.from_tensor, DATA, transfer_ownership=transfer)
        assert x.transfer_ownership is transfer
        data = pickle.dumps(x)
        del x
        gc.collect()
        if transfer:
            y = pickle.loads(data)
            assert (y == DATA).all()
            del y
            gc.collect()
        else:
            with pytest.raises(FileNotFoundError, match="No such file"):
                pickle.loads(data)
        assert list(tmp_path.iterdir()) == []

    def test_set_transfer_ownership(self, tmp_path):
        """Ownership can be given away later, too."""
        x = quietly(MemmapTensor.from_tensor, DATA)
        assert x.set_transfer_ownership() is x
        data = pickle.dumps(x)
        del x
        gc.collect()
        assert len(list(tmp_path.iterdir())) == 1
        assert (pickle.loads(data) == DATA).all()
        gc.collect()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_processes(self, x, method, tmp_path):
        """It goes to a child and back by reference; the child's writes are seen."""
        child = Child(method, "torch.multiprocessing")
        assert child.ask(child_sum, x[1:]) == ("MemmapTensor", x.filename, float(DATA[1:].sum()))
        child.ask(child_fill, x[[0, 2]], 7.0)
        assert values(x[:3, 0].clone()) == [7, 4, 7]
        y = child.ask(child_make, True)
        assert (y == DATA).all()
        assert child.close() == 0
        assert os.path.isfile(y.filename)
        del y
        gc.collect()
        assert os.path.isfile(x.filename)
        assert x.filename in {str(p) for p in tmp_path.iterdir()}


INDICES = [
    0,
    -1,
    np.int64(2),
    slice(1, 4),
    slice(None, None, 2),
    None,
    ...,
    (2, 3),
    (slice(None), 1),
    (..., None, slice(1, 3)),
    [0, 2],
    torch.tensor([3, 3, 0]),
    torch.tensor(2),
    DATA[:, 0] > 6,
    DATA > 6,
    True,
    (slice(None), [0, 2]),
    (torch.tensor([0, 1]), torch.tensor([2, 3])),
    np.array([0, 5]),
    torch.tensor([], dtype=torch.int64),
]


class TestIndexing:
    """Indexing gives another MemmapTensor, with a lazy index."""

    @pytest.mark.parametrize("index", INDICES, ids=str)
    def test_read(self, x, index):
        """What is read through an index is what torch reads."""
        y = x[index]
        assert type(y) is MemmapTensor
        assert y.filename == x.filename
        assert y.shape == DATA[index].shape
        assert torch.equal(y.clone(), DATA[index])
        assert type(y.clone()) is torch.Tensor

    @pytest.mark.parametrize("index", INDICES, ids=str)
    def test_write(self, x, index):
        """What is assigned through an index, or written to what it gives, is in the file."""
        expected = DATA.clone()
        expected[index] = -1
        x[index] = -1
        assert torch.equal(x.clone(), expected)
        assert np.fromfile(x.filename, "f4").tolist() == expected.flatten().tolist()
        x[index].fill_(-2)
        expected[index] = -2
        assert torch.equal(x.clone(), expected)

    @pytest.mark.parametrize("first", INDICES[:6] + INDICES[10:15], ids=str)
    @pytest.mark.parametrize("second", [0, slice(0, 1), [0], torch.tensor([0, 0]), ...], ids=str)
    def test_twice(self, x, first, second):
        """An index of an index reads and writes what torch's assignment to both does."""
        y = x[first][second]
        assert torch.equal(y.clone(), DATA[first][second])
        y.fill_(-1)
        part, expected = DATA[first].clone(), DATA.clone()
        part[second] = -1
        expected[first] = part
        assert torch.equal(x.clone(), expected)

    @pytest.mark.parametrize("index", [[0, 2], torch.tensor([1]), DATA[:, 0] > 6], ids=str)
    def test_lazy(self, x, index):
        """An index that needs a copy reads nothing before values are asked for."""
        y = x[index]
        x.fill_(9)
        assert (y == 9).all()

    @pytest.mark.parametrize("index", [6, -7, (0, 4), [7], torch.tensor([6])], ids=str)
    def test_out_of_range(self, x, index):
        """An index that is out of range is an IndexError at once."""
        with pytest.raises(IndexError, match="out of (bounds|range)"):
            x[index]

    def test_iteration(self, x):
        """Iterating and unbinding give the slices."""
        assert [type(row) for row in x] == [MemmapTensor] * 6
        assert all(torch.equal(row.clone(), data) for row, data in zip(x, DATA, strict=True))
        for dim in (0, 1, -1):
            parts = x.unbind(dim)
            assert [type(part) for part in parts] == [MemmapTensor] * DATA.shape[dim]
            for part, data in zip(parts, DATA.unbind(dim), strict=True):
                assert torch.equal(part.clone(), data)

    def test_length(self, x):
        """The length is that of the first dimension; without one it is an error."""
        assert (len(x), len(x[1:3]), len(x[[0, 1, 2]])) == (6, 2, 3)
        with pytest.raises(TypeError, match=r"len\(\) of a 0-d tensor"):
            len(x[0, 0])
        with pytest.raises(TypeError, match="0-d tensor"):
            list(x[0, 0])


class TestOperations:
    """Operations give regular tensors, and what writes, writes to the file."""

    @pytest.mark.parametrize(
        "operation",
        [
            lambda x: x + 1,
            lambda x: 1 - x,
            lambda x: x @ x.T,
            lambda x: -x,
            lambda x: x**2,
            lambda x: x // 5,
            lambda x: x == 3,
            lambda x: x != x[0],
            lambda x: x > 3,
            lambda x: ~(x > 3),
            lambda x: (x > 3) | (x < 1),
            lambda x: x + x,
            lambda x: x.sum(0),
            lambda x: x.view(-1),
            lambda x: x.t(),
            lambda x: x.T,
            lambda x: x.reshape(2, -1),
            lambda x: x.clone(),
            lambda x: x.contiguous(),
            lambda x: x.to(torch.int64),
            lambda x: x.to("cpu"),
            lambda x: x.double(),
            lambda x: torch.stack([x, x]),
            lambda x: torch.cat([x, x[:2]]),
            lambda x: torch.add(x, x, alpha=2),
            lambda x: torch.where(x > 3, x, -x),
            lambda x: torch.max(x, 1).values,
            lambda x: torch.nn.functional.relu(x - 3),
            lambda x: torch.unbind(x)[1],
            lambda x: np.float32(2) * x,
            lambda x: torch.ones(4) * x,
        ],
    )
    @pytest.mark.parametrize("index", [..., slice(1, 3), [0, 2]], ids=str)
    def test_regular(self, x, operation, index):
        """The result has torch's values and class."""
        result = operation(x[index])
        assert type(result) is torch.Tensor
        assert torch.equal(result, operation(DATA[index]))

    @pytest.mark.parametrize(
        "write",
        [
            lambda x: x.fill_(2),
            lambda x: x.add_(1),
            lambda x: x.copy_(torch.full((4,), 3.0)),
            lambda x: x.masked_fill_(torch.tensor([True, False, True, False]), 4),
            lambda x: x.__iadd__(5),
            lambda x: torch.add(torch.ones(x.shape), 1, out=x),
            torch.neg_,
            lambda x: torch._foreach_mul_([x], 3),
            lambda x: torch.nn.functional.relu(x, inplace=True),
        ],
    )
    @pytest.mark.parametrize("index", [..., 2, slice(1, 3), [0, 2]], ids=str)
    def test_in_place(self, x, write, index):
        """What is written in place is in the file, whatever the index."""
        part, expected = DATA[index].clone(), DATA.clone()
        write(part)
        expected[index] = part
        write(x[index])
        assert np.fromfile(x.filename, "f4").tolist() == expected.flatten().tolist()

    def test_in_place_returns_itself(self, x):
        """A method that writes returns the object; an operator keeps its name on it."""
        assert x.fill_(1) is x
        assert x.copy_(DATA) is x
        y = x
        y += 1
        assert y is x
        assert (x == DATA + 1).all()

    @pytest.mark.parametrize("index", [..., [0, 2]], ids=str)
    def test_inference_mode(self, index):
        """Writes reach the file in inference mode as well."""
        with torch.inference_mode():
            x = quietly(MemmapTensor.from_tensor, DATA)
            x[index].fill_(3)
            assert (x[index] == 3).all()
            x[index][0] = 4
            assert (x[index][0] == 4).all()

    def test_numbers(self, x):
        """One element is a number where Python asks for one."""
        assert (float(x[1, 1]), int(x[1, 1]), bool(x[0, 0]), f"{x[1, 1]:.2f}") == (
            5.0,
            5,
            False,
            "5.00",
        )
        assert [1, 2, 3][quietly(MemmapTensor.from_tensor, torch.tensor(2))] == 3
        assert 5.0 in x
        assert x.tolist() == DATA.tolist()

    def test_arrays(self, x):
        """NumPy sees the file itself; other libraries get it through DLPack."""
        array = x.numpy()
        array[0, 0] = 9
        assert x[0, 0] == 9
        assert np.asarray(x).dtype == np.float32
        assert torch.equal(torch.from_dlpack(x), x.clone())

    def test_facts(self, x):
        """Geometry and dtype are those of the data, without reading it."""
        for y, data in ((x, DATA), (x[1:, 2], DATA[1:, 2]), (x[[0, 1]], DATA[[0, 1]])):
            assert (y.shape, y.dtype, y.device) == (data.shape, data.dtype, data.device)
            assert (y.size(), y.size(0), y.dim(), y.ndim, y.ndimension(), y.numel()) == (
                data.size(),
                data.size(0),
                data.dim(),
                data.ndim,
                data.dim(),
                data.numel(),
            )
            assert not y.requires_grad
        assert repr(x[1:]) == (
            "MemmapTensor(shape=torch.Size([5, 4]), device=cpu, dtype=torch.float32)"
        )

    def test_autograd(self, x):
        """Gradients flow through results to regular tensors."""
        weight = torch.ones(4, requires_grad=True)
        (x * weight).sum().backward()
        assert torch.equal(weight.grad, DATA.sum(0))

    def test_unknown_attribute(self, x):
        """An attribute that no tensor has is an AttributeError."""
        with pytest.raises(AttributeError, match="no attribute 'colour'"):
            _ = x.colour
        with pytest.raises(AttributeError, match="no attribute '_colour'"):
            _ = x._colour


class TestTravel:
    """It pickles by reference, and is saved and copied as a regular tensor."""

    @pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
    @pytest.mark.parametrize("index", [..., 2, slice(1, 3), [0, 2]], ids=str)
    def test_reference(self, x, index, dumps):
        """An indexed one comes back on the same file, with its index."""
        y = pickle.loads(dumps(x[index]))
        assert type(y) is MemmapTensor
        assert y.filename == x.filename
        assert torch.equal(y.clone(), DATA[index])
        y.fill_(3)
        assert (x[index] == 3).all()

    def test_size(self):
        """A reference to a large one is small."""
        x = quietly(MemmapTensor, 1_000_000)
        assert len(pickle.dumps(x[10:20])) < 500

    def test_file_that_was_replaced(self, tmp_path):
        """One whose file has another name on it by now comes as a regular tensor."""
        path = tmp_path / "x"
        x = quietly(MemmapTensor.from_tensor, DATA, filename=path)
        path.unlink()
        y = pickle.loads(pickle.dumps(x[1:]))
        assert type(y) is torch.Tensor
        assert torch.equal(y, DATA[1:])

    def test_torch_save(self, x):
        """A checkpoint stands alone and holds a regular tensor."""
        buffer = io.BytesIO()
        torch.save({"x": x[1:], "rows": x[[0, 2]]}, buffer)
        x.zero_()
        buffer.seek(0)
        back = torch.load(buffer, weights_only=True)
        assert torch.equal(back["x"], DATA[1:])
        assert torch.equal(back["rows"], DATA[[0, 2]])

    def test_deepcopy(self, x):
        """A deep copy is an independent regular tensor."""
        y, again = copy.deepcopy([x, x])
        assert type(y) is torch.Tensor
        assert y is again
        y.zero_()
        assert (x == DATA).all()

    def test_way_out(self, x):
        """``as_tensor`` gives the MemoryMappedTensor that it stands on."""
        y = x[1:].as_tensor()
        assert type(y) is MemoryMappedTensor
        assert y.filename == x.filename
        assert type(x[[0, 1]].as_tensor()) is torch.Tensor


def test_subclass():
    """A subclass stays itself through indexing, copying and pickling."""
    x = quietly(Mine.from_tensor, DATA)
    assert [type(y) for y in (x, x[1:], copy.copy(x), pickle.loads(pickle.dumps(x)))] == [Mine] * 4


class Mine(MemmapTensor):
    """A subclass, as users make them."""
