"""The weights of modules and state dicts as containers, and back."""

import copy
import hashlib
import pathlib

import pytest
import torch
from torch import nn

from mmtensor import MemoryMappedTensor, TensorDict


def digest(directory):
    """Return one checksum of all files of a directory."""
    found = hashlib.sha256()
    for path in sorted(pathlib.Path(directory).rglob("*")):
        if path.is_file():
            found.update(str(path).encode() + path.read_bytes())
    return found.hexdigest()


@pytest.fixture
def transformer():
    """Return a real module, small enough for a test."""
    torch.manual_seed(0)
    return nn.Transformer(32, 4, 2, 2, 64, batch_first=True, dropout=0.0)


def test_keys_are_nested_as_modules_are(transformer):
    """Parameters are found by the names of the modules that they are in, and are the same."""
    td = TensorDict.from_module(transformer)
    for name, parameter in transformer.named_parameters():
        assert td[tuple(name.split("."))] is parameter
    assert len(td.keys(True, True)) == len(list(transformer.parameters()))
    assert td.batch_size == torch.Size([])


def test_buffers_and_missing_parts():
    """Buffers are leaves; what is None, and modules of nothing, are left out."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.BatchNorm1d(2))
    td = TensorDict.from_module(module)
    assert list(td.keys(True, True)) == [
        ("0", "weight"),
        *[("2", name) for name in ("weight", "bias")],
        *[("2", name) for name in ("running_mean", "running_var", "num_batches_tracked")],
    ]


def test_weights_are_mapped_and_trained(tmp_path, transformer):
    """Weights are saved, mapped copy-on-write without a copy, run and trained; files stay."""
    x = torch.rand(2, 5, 32)
    expected = transformer(x, x)
    TensorDict.from_module(transformer).memmap(tmp_path / "weights")
    before = digest(tmp_path / "weights")
    td = TensorDict.load_memmap(tmp_path / "weights", mode="c")
    module = nn.Transformer(32, 4, 2, 2, 64, batch_first=True, dropout=0.0)
    for parameter in module.encoder.parameters():
        parameter.requires_grad_(requires_grad=False)
    assert td.to_module(module) is module
    torch.testing.assert_close(module(x, x), expected)
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad != name.startswith("encoder")
        leaf = td[tuple(name.split("."))]
        assert parameter.data_ptr() == leaf.data_ptr()
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.1)
    module(x, x).square().mean().backward()
    optimizer.step()
    assert not torch.allclose(module(x, x), expected)
    assert td.is_memmap()
    name = ("decoder", "layers", "0", "linear1", "weight")
    assert torch.equal(td[name], module.decoder.layers[0].linear1.weight.detach())
    assert digest(tmp_path / "weights") == before
    again = TensorDict.load_memmap(tmp_path / "weights", mode="r").to_module(module)
    torch.testing.assert_close(again(x, x), expected)


def test_saving_leaves_the_module(tmp_path, transformer):
    """Saving the weights of a module changes neither it nor its parameters."""
    before = dict(transformer.named_parameters())
    td = TensorDict.from_module(transformer).memmap(tmp_path / "weights")
    assert type(td["encoder", "norm", "weight"]) is MemoryMappedTensor
    assert all(p is before[name] for name, p in transformer.named_parameters())
    assert all(p.requires_grad for p in transformer.parameters())


def test_buffers_are_installed():
    """Buffers become the leaves, and are written where the leaves are."""
    module = nn.BatchNorm1d(3)
    td = TensorDict.from_module(module).clone().apply(torch.Tensor.detach)
    other = td.to_module(nn.BatchNorm1d(3))
    other(torch.rand(4, 3))
    assert td["num_batches_tracked"] == 1
    assert other.running_mean is td["running_mean"] or torch.equal(
        other.running_mean, td["running_mean"]
    )


def test_tied_parameters_stay_tied(tmp_path):
    """A parameter that a module has twice is one afterwards, if both leaves agree."""
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    td = TensorDict.from_module(module).memmap(tmp_path / "weights")
    td.to_module(module)
    assert module["a"].weight is module["b"].weight
    td["b", "weight"][0] = 5
    td.to_module(module)
    assert module["a"].weight is not module["b"].weight
    assert module["b"].weight[0].tolist() == [5, 5]


WRONG = {
    "unknown parameter": (
        lambda td: td.set(("encoder", "norm", "scale"), torch.ones(32)),
        KeyError,
        r"no parameter or buffer \('encoder', 'norm', 'scale'\)",
    ),
    "unknown module": (
        lambda td: td.set(("coder", "x"), torch.ones(1)),
        KeyError,
        "no submodule 'coder'",
    ),
    "missing parameter": (
        lambda td: td.del_(("encoder", "norm", "weight")),
        KeyError,
        r"has no \('encoder', 'norm', 'weight'\), which the module needs",
    ),
    "missing module": (
        lambda td: td.del_(("encoder", "norm")),
        KeyError,
        r"has no \('encoder', 'norm'\), which the module needs",
    ),
    "shape": (
        lambda td: td.set(("encoder", "norm", "weight"), torch.ones(31)),
        RuntimeError,
        r"\('encoder', 'norm', 'weight'\) has shape \[31\], but the module's is \[32\]",
    ),
    "dtype": (
        lambda td: td.set(("encoder", "norm", "weight"), torch.ones(32, dtype=torch.int64)),
        RuntimeError,
        "dtype torch.int64, which cannot require gradients",
    ),
    "text": (
        lambda td: td.set(("encoder", "norm", "weight"), "text"),
        KeyError,
        r"no parameter or buffer \('encoder', 'norm', 'weight'\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit(transformer, name):
    """What does not fit the module is an error that names it; the module is as it was."""
    change, error, message = WRONG[name]
    td = TensorDict.from_module(copy.deepcopy(transformer))
    change(td)
    before = dict(transformer.named_parameters())
    with pytest.raises(error, match=message):
        td.to_module(transformer)
    assert all(p is before[key] for key, p in transformer.named_parameters())


def test_state_dict(tmp_path, transformer):
    """A state dict is nested at its dots, saved, loaded, and taken back."""
    state = transformer.state_dict()
    td = TensorDict.from_state_dict(state)
    assert (
        td["encoder", "layers", "0", "linear1", "weight"]
        is state["encoder.layers.0.linear1.weight"]
    )
    td.memmap(tmp_path / "w")
    loaded = TensorDict.load(tmp_path / "w", mode="r")
    back = loaded.to_state_dict()
    assert list(back) == list(state)
    assert all(type(value) is torch.Tensor for value in back.values())
    other = nn.Transformer(32, 4, 2, 2, 64, batch_first=True, dropout=0.0)
    other.load_state_dict(back)
    assert torch.equal(other.encoder.norm.weight, transformer.encoder.norm.weight)
    assert torch.equal(
        other.decoder.layers[1].linear2.weight, transformer.decoder.layers[1].linear2.weight
    )


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"a": 1}, TypeError, "'a' of the state dict is no tensor"),
        ({"a": torch.ones(1), "a.b": torch.ones(1)}, KeyError, "'a.b' .* is beneath a tensor"),
        ({"a.b": torch.ones(1), "a": torch.ones(1)}, KeyError, "'a' .* a tensor and a module"),
    ],
    ids=["number", "beneath", "both"],
)
def test_state_dicts_that_cannot_be_nested(state, error, message):
    """A state dict that is no tree of tensors is an error."""
    with pytest.raises(error, match=message):
        TensorDict.from_state_dict(state)


def test_containers_that_are_no_state_dict():
    """A container with text, or with dots in its keys, is no state dict."""
    with pytest.raises(TypeError, match=r"leaf \('n', 's'\) is no tensor"):
        TensorDict({"n": {"s": "text"}}).to_state_dict()
    with pytest.raises(KeyError, match="key 'a.b' has a dot"):
        TensorDict({"a.b": torch.ones(1)}).to_state_dict()


def test_what_is_no_module():
    """What takes a module says so."""
    for attempt in (TensorDict.from_module, TensorDict({}).to_module):
        with pytest.raises(TypeError, match="expected a torch.nn.Module, got <class 'bytes'>"):
            attempt(b"x")
