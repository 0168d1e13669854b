"""torch.save, torch.load and copy.deepcopy: what they make stands alone."""

import copy
import io
import pickle

import pytest
import torch
from processes import COMPLEX_VIEWS, REAL_VIEWS, Tagged, complex_values, real_values, values

import mmtensor
from mmtensor import MemoryMappedTensor

KINDS = ("r", "r+", "c", "anonymous")


def make(directory, kind, data):
    """Put data on a file opened in a mode, or into anonymous memory."""
    if kind == "anonymous":
        return MemoryMappedTensor.from_tensor(data)
    path = mmtensor.save_array(directory / f"{data.dtype}.bin", data.numpy())
    return MemoryMappedTensor.from_filename(path, data.dtype, data.shape, mode=kind)


def remove_files(directory):
    """Move every data file away."""
    for path in directory.glob("*.bin"):
        path.rename(path.with_suffix(".moved"))


def saved(x, **options):
    """Return the checkpoint of something."""
    buffer = io.BytesIO()
    torch.save(x, buffer, **options)
    return buffer.getvalue()


def load(data, **options):
    """Read a checkpoint."""
    return torch.load(io.BytesIO(data), **options)


# torch hands out no pointer to plain views of read-only storages: issue in torch's own code,
# where tensors that are no MemoryMappedTensor are saved.
METHOD_VIEWS = [view for view in (*REAL_VIEWS, *COMPLEX_VIEWS) if not view.startswith("torch.")]
PLAIN_VIEWS = [view for view in (*REAL_VIEWS, *COMPLEX_VIEWS) if view.startswith("torch.")]


def view_of(directory, kind, view):
    """Make a view of a tensor of the kind."""
    if view in REAL_VIEWS:
        return REAL_VIEWS[view](make(directory, kind, real_values()))
    return COMPLEX_VIEWS[view](make(directory, kind, complex_values()))


class TestSave:
    """A checkpoint holds the bytes of a view, and needs no file."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("view", METHOD_VIEWS)
    def test_stands_alone(self, tmp_path, view, kind):
        """A saved view loads with torch's defaults after its file is gone: a regular tensor."""
        x = view_of(tmp_path, kind, view)
        expected = values(x)
        data = saved(x)
        del x
        remove_files(tmp_path)
        back = load(data, weights_only=True)
        assert type(back) is torch.Tensor
        assert mmtensor.locate(back) is None
        assert values(back) == expected

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("view", PLAIN_VIEWS)
    def test_plain_views(self, tmp_path, view, kind):
        """A plain view on the same storage is saved and loaded as well."""
        x = view_of(tmp_path, kind, view)
        expected = values(x)
        data = saved(x)
        del x
        remove_files(tmp_path)
        back = load(data, weights_only=True)
        assert mmtensor.locate(back) is None
        assert values(back) == expected

    @pytest.mark.parametrize("kind", KINDS)
    def test_compact(self, tmp_path, kind):
        """Ten elements of a large tensor make a small checkpoint."""
        x = make(tmp_path, kind, torch.zeros(1_000_000))
        assert len(saved(x[10:20])) < 2500
        assert len(saved(x[10].expand(1000, 1000))) < 2500
        assert load(saved(x[10:20])).untyped_storage().nbytes() == 40

    def test_written_to_disk(self, tmp_path):
        """A checkpoint in a file loads, mapped by torch as well."""
        x = make(tmp_path, "r", real_values())
        torch.save({"x": x, "rows": [x[0], x[1]]}, tmp_path / "checkpoint.pt")
        remove_files(tmp_path)
        for mmap in (False, True):
            back = torch.load(tmp_path / "checkpoint.pt", mmap=mmap)
            assert values(back["x"]) == values(real_values())
            assert values(back["rows"][1]) == values(real_values()[1])

    @pytest.mark.parametrize("kind", KINDS)
    def test_old_format(self, tmp_path, kind):
        """The format of torch before 1.6 holds the values, too."""
        x = make(tmp_path, kind, real_values())
        data = saved(x[1:], _use_new_zipfile_serialization=False)
        remove_files(tmp_path)
        assert values(load(data, weights_only=True)) == values(real_values()[1:])

    @pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e4m3fn", "uint16", "int64"])
    def test_dtypes(self, tmp_path, dtype):
        """Every dtype that torch can save comes back."""
        x = MemoryMappedTensor.from_tensor(
            torch.tensor([0, 1, 1]).to(getattr(torch, dtype)), filename=tmp_path / "x.bin"
        )
        data = saved(x)
        remove_files(tmp_path)
        back = load(data, weights_only=True)
        assert back.dtype is x.dtype
        assert back.float().tolist() == [0, 1, 1]

    @pytest.mark.parametrize("kind", KINDS)
    def test_subclass(self, tmp_path, kind):
        """A subclass is saved as a regular tensor, so that it loads without its class."""
        x = make(tmp_path, kind, real_values()).as_subclass(Tagged)
        assert type(load(saved(x), weights_only=True)) is torch.Tensor

    @pytest.mark.parametrize("kind", KINDS)
    def test_parameter(self, tmp_path, kind):
        """A parameter is saved as a parameter that requires no gradients."""
        x = torch.nn.Parameter(make(tmp_path, kind, real_values()), requires_grad=False)
        data = saved(x)
        remove_files(tmp_path)
        back = load(data, weights_only=True)
        assert type(back) is torch.nn.Parameter
        assert not back.requires_grad
        assert values(back) == values(real_values())

    def test_private_changes(self, tmp_path):
        """What was written in ``c`` is what is saved."""
        x = make(tmp_path, "c", real_values())
        x.numpy()[0] = 9
        assert values(load(saved(x))) == values(x)

    @pytest.mark.parametrize("protocol", [0, 1, 2])
    def test_old_pickle_protocols(self, tmp_path, protocol):
        """Pickles of protocol 2 and below hold the values."""
        x = make(tmp_path, "r", real_values())
        data = pickle.dumps(x[1:], protocol)
        remove_files(tmp_path)
        assert values(pickle.loads(data)) == values(real_values()[1:])


class Module(torch.nn.Module):
    """A module with a buffer, a parameter that is frozen, and one that is trained."""

    def __init__(self, buffer, frozen):
        super().__init__()
        self.register_buffer("buffer", buffer)
        self.frozen = torch.nn.Parameter(frozen, requires_grad=False)
        self.trained = torch.nn.Parameter(torch.ones(2))


@pytest.fixture(params=KINDS)
def module(request, tmp_path):
    """Return a module on files, or in anonymous memory."""
    x = make(tmp_path, request.param, real_values())
    return Module(x[:2], x[2:4])


class TestModules:
    """Modules with tensors on files are saved, loaded and copied."""

    def test_state_dict(self, module, tmp_path):
        """A saved state dict loads after the files are gone, into a module of regular tensors."""
        data = saved(module.state_dict())
        remove_files(tmp_path)
        other = Module(torch.zeros(2, 4), torch.zeros(2, 4))
        assert str(other.load_state_dict(load(data, weights_only=True))).startswith("<All keys")
        assert values(other.buffer) == values(real_values()[:2])
        assert values(other.frozen) == values(real_values()[2:4])
        assert other.trained.requires_grad

    def test_load_state_dict(self, module, request):
        """Loading writes into the mapped tensors in place, but for ``r``, which refuses."""
        kind = request.node.callspec.params["module"]
        state = {name: torch.full_like(x, 5) for name, x in module.state_dict().items()}
        if kind == "r":
            with pytest.raises(RuntimeError, match="read-only tensor"):
                module.load_state_dict(state)
            assert values(module.buffer) == values(real_values()[:2])
        else:
            module.load_state_dict(state)
            assert values(module.buffer) == [[5.0] * 4] * 2
            assert type(module.buffer) is MemoryMappedTensor

    def test_whole_module(self, module):
        """A module that was saved whole comes back with regular tensors."""
        back = load(saved(module), weights_only=False)
        assert values(back.buffer) == values(real_values()[:2])
        assert mmtensor.locate(back.buffer) is None
        assert isinstance(back.frozen, torch.nn.Parameter)

    def test_deepcopy(self, module):
        """A copied module has regular, independent tensors and parameters."""
        other = copy.deepcopy(module)
        assert type(other.buffer) is torch.Tensor
        assert type(other.frozen) is torch.nn.Parameter
        assert not other.frozen.requires_grad
        other.buffer.fill_(3)
        other.frozen.data.fill_(3)
        assert values(module.buffer) == values(real_values()[:2])
        assert values(module.frozen) == values(real_values()[2:4])


class TestDeepcopy:
    """copy.deepcopy gives independent regular tensors."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("view", [*REAL_VIEWS, *COMPLEX_VIEWS])
    def test_independent(self, tmp_path, view, kind):
        """A copy of a view has its values and memory of its own that can be written to."""
        x = view_of(tmp_path, kind, view)
        expected = values(x)
        other = copy.deepcopy(x)
        assert type(other) is torch.Tensor
        assert mmtensor.locate(other) is None
        assert values(other) == expected
        if other.numel():
            other.clone().fill_(1)
            other.zero_()
        assert values(x) == expected

    @pytest.mark.parametrize("kind", KINDS)
    def test_compact(self, tmp_path, kind):
        """A copy of ten elements of a large tensor holds ten elements."""
        x = make(tmp_path, kind, torch.zeros(1_000_000))
        assert copy.deepcopy(x[10:20]).untyped_storage().nbytes() == 40

    def test_twice_in_one_object(self, tmp_path):
        """A tensor that an object holds twice is copied once."""
        x = make(tmp_path, "r", real_values())
        a, b = copy.deepcopy([x, x])
        assert a is b

    def test_shallow(self, tmp_path):
        """A shallow copy is another tensor on the same storage, attributes included."""
        x = make(tmp_path, "r+", real_values())
        x.tag = "a"
        other = copy.copy(x)
        assert other is not x
        assert type(other) is MemoryMappedTensor
        assert other.untyped_storage() is x.untyped_storage()
        assert other.tag == "a"

    @pytest.mark.parametrize("kind", KINDS)
    def test_storage(self, tmp_path, kind):
        """A copy of the storage is a regular storage."""
        x = make(tmp_path, kind, real_values())
        other = copy.deepcopy(x.untyped_storage())
        assert type(other) is torch.UntypedStorage
        assert other.tolist() == x.untyped_storage().tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"pickle_protocol": 4},
        {"pickle_protocol": 5},
        {"pickle_protocol": 5, "_use_new_zipfile_serialization": False},
    ],
)
def test_other_protocols(tmp_path, kind, options):
    """A checkpoint stands alone whatever the protocol of its pickles is."""
    x = make(tmp_path, kind, real_values())
    jagged = mmtensor.JaggedTensor.from_tensors([x[0], x[1]], filename=tmp_path / "j.bin")
    module = torch.nn.Module()
    module.register_buffer("x", x)
    data = saved({"x": x[1:], "jagged": jagged, "state": module.state_dict()}, **options)
    assert b".bin" not in data
    remove_files(tmp_path)
    loaded = load(data, weights_only=False)  # torch reads no other protocol otherwise
    assert type(loaded["x"]) is torch.Tensor
    assert torch.equal(loaded["x"], real_values()[1:])
    assert torch.equal(loaded["jagged"][1], real_values()[1])
    assert torch.equal(loaded["state"]["x"], real_values())
