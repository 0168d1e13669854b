"""Directories go both ways between this package and tensordict."""

import json
import os

import pytest
import tensordict
import torch
from tensordict import NonTensorData, NonTensorStack

from mmtensor import JaggedTensor, ManifestError, MemoryMappedTensor, TensorDict

# What tensordict itself warns of, or torch when nested tensors are made.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
]


def test_theirs_loads_here(tmp_path):
    """Nested containers, tensors and text of tensordict load here with their values."""
    theirs = tensordict.TensorDict(
        {
            "x": torch.arange(6).view(2, 3),
            "n": {"y": torch.ones(2, 4), "m": {"z": torch.zeros(2, dtype=torch.bfloat16)}},
            "a b/c": torch.ones(2),
            "..": torch.ones(2, 1),
            "": torch.zeros(2, 1),
            "none": torch.empty(2, 0),
            "s": NonTensorData("text", batch_size=[2]),
            "l": NonTensorStack("u", "v"),
        },
        batch_size=[2],
    )
    theirs.memmap(tmp_path / "td")
    for mode in ("r", "r+", "c", None):
        ours = TensorDict.load_memmap(tmp_path / "td", mode=mode)
        assert ours.is_memmap()
        assert ours.batch_size == (2,)
        for key in ("x", ("n", "y"), ("n", "m", "z"), "a b/c", "..", "", "none"):
            assert torch.equal(ours[key], theirs[key])
            assert ours[key].dtype == theirs[key].dtype
            assert type(ours[key]) is MemoryMappedTensor
        assert ours["s"] == "text"
        assert ours["l"] == ["u", "v"]
        assert set(ours.keys(True)) == set(theirs.keys(True))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_their_nested_tensors_load_here(tmp_path, ndim):
    """A nested tensor of tensordict loads as a jagged leaf; offsets come from the shapes."""
    elements = [torch.arange(float((n + 1) ** ndim)).view(*[n + 1] * ndim) for n in range(3)]
    nested = torch.nested.nested_tensor(elements, layout=torch.strided)
    tensordict.TensorDict({"j": nested}, batch_size=[3]).memmap(tmp_path / "td")
    for mode in ("r", "r+", "c"):
        j = TensorDict.load_memmap(tmp_path / "td", mode=mode)["j"]
        assert type(j) is JaggedTensor
        assert j.mode == mode
        assert all(torch.equal(a, b) for a, b in zip(j, elements, strict=True))
    j[1].zero_()  # in mode c
    assert torch.equal(TensorDict.load(tmp_path / "td")["j"][1], elements[1])


def test_ours_loads_there(tmp_path):
    """Nested containers, tensors and text that are saved here load in tensordict."""
    ours = TensorDict(
        {
            "x": torch.arange(6).view(2, 3),
            "n": {"y": torch.ones(2, 4), "m": {"z": torch.zeros(2)}},
            "a b/c": torch.ones(2),
            "..": torch.ones(2, 1),
            "": torch.zeros(2, 1),
            "none": torch.empty(2, 0),
            "s": "text",
            "l": ["u", "v"],
            "j": JaggedTensor(torch.arange(7.0), [[1, 3], [2, 2]]),
        },
        [2],
    )
    ours.memmap(tmp_path / "td")
    theirs = tensordict.TensorDict.load_memmap(tmp_path / "td")
    assert theirs.batch_size == (2,)
    assert set(theirs.keys(True)) == set(ours.keys(True))
    for key in ("x", ("n", "y"), ("n", "m", "z"), "a b/c", "..", "", "none"):
        assert torch.equal(theirs[key], ours[key])
    assert theirs["s"] == "text"
    assert theirs["l"] == ["u", "v"]
    assert [e.tolist() for e in theirs.get("j").unbind(0)] == [[[0, 1, 2]], [[3, 4], [5, 6]]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_go_both_ways(tmp_path, dtype):
    """A dtype that both have goes both ways."""
    x = torch.arange(4).to(getattr(torch, dtype))
    TensorDict({"x": x}, [4]).memmap(tmp_path / "ours")
    assert torch.equal(tensordict.TensorDict.load_memmap(tmp_path / "ours")["x"], x)
    tensordict.TensorDict({"x": x}, batch_size=[4]).memmap(tmp_path / "theirs")
    assert torch.equal(TensorDict.load_memmap(tmp_path / "theirs")["x"], x)


def test_all_dtypes_of_ours_load_there(tmp_path):
    """A leaf of a dtype that few know does not keep tensordict from loading the others."""
    data = {"x": torch.ones(2)}
    names = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
    for name in names:
        data[name] = torch.zeros(2, dtype=torch.uint8).view(torch.uint8).to(getattr(torch, name))
    TensorDict(data, [2]).memmap(tmp_path / "td")
    assert tensordict.TensorDict.load_memmap(tmp_path / "td")["x"].tolist() == [1, 1]
    assert set(TensorDict.load(tmp_path / "td").keys()) == set(data)


def test_leaves_that_only_we_have(tmp_path):
    """Leaves that tensordict would lose or mistake are not shown to it; all are here."""
    j = JaggedTensor(torch.arange(3.0), [[1], [2]])
    ours = TensorDict(
        {
            "a": j,
            "a.shape": torch.ones(2),
            "a.offsets": torch.ones(2, 2),
            "x": torch.ones(2),
            "x.memmap": {"y": torch.ones(2)},
            "meta.json": {"z": torch.ones(2)},
            "shape": torch.zeros(2),
            "device": torch.zeros(2),
            "_type": torch.zeros(2),
            "k" * 300: torch.zeros(2),
        },
        [2],
    )
    ours.memmap(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    assert list(loaded.keys(True)) == list(ours.keys(True))
    theirs = tensordict.TensorDict.load_memmap(tmp_path / "td")
    assert set(theirs.keys()) == {"a", "x"}


def test_theirs_is_replaced_by_ours(tmp_path):
    """A directory of tensordict is replaced as one of ours is, pickles included."""
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided)
    theirs = tensordict.TensorDict(
        {
            "x": torch.ones(2),
            "n": {"y": torch.ones(2)},
            "j": nested,
            "s": NonTensorData("text", batch_size=[2]),
            "l": NonTensorStack("u", "v"),
            "set": NonTensorData({1, 2}, batch_size=[2]),
            "sets": NonTensorStack({1}, {2}),
            "type": NonTensorData(int, batch_size=[2]),
        },
        batch_size=[2],
    )
    theirs.memmap(tmp_path / "td")
    TensorDict({"z": torch.ones(1)}).memmap(tmp_path / "td")
    assert sorted(os.listdir(tmp_path)) == ["td"]
    assert sorted(os.listdir(tmp_path / "td")) == ["meta.json", "z.memmap"]


def test_theirs_is_saved_over_ours(tmp_path):
    """After tensordict has saved over one of ours, its values are read, not our offsets."""
    ours = TensorDict({"j": JaggedTensor(torch.arange(3.0), [[1], [2]])}, [2])
    ours.memmap(tmp_path / "td")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(1)], layout=torch.strided)
    tensordict.TensorDict({"j": nested}, batch_size=[2]).memmap(tmp_path / "td")
    assert (tmp_path / "td" / "j.offsets.memmap").exists()
    loaded = TensorDict.load(tmp_path / "td")
    assert [e.tolist() for e in loaded["j"]] == [[1, 1], [0]]
    ours.memmap(tmp_path / "td")
    assert [e.tolist() for e in TensorDict.load(tmp_path / "td")["j"]] == [[0], [1, 2]]


OTHERS = {
    "number": (NonTensorData(3, batch_size=[2]), "leaf 'o' .*string or a list of strings"),
    "object": (NonTensorData({"a": 1}, batch_size=[2]), "leaf 'o' .*string or a list of strings"),
    "pickle": (NonTensorData({1}, batch_size=[2]), "leaf 'o' .*string or a list of strings"),
    "numbers": (NonTensorStack(1, 2), "leaf 'o' .*string or a list of strings"),
    "lazy stack": (
        tensordict.LazyStackedTensorDict.lazy_stack(
            [tensordict.TensorDict({key: torch.ones(1)}) for key in "ab"]
        ),
        "leaf 'o' .*it is a LazyStackedTensorDict",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_we_have_no_leaves_for(tmp_path, name):
    """Entries of tensordict that are no leaves here are an error that names them."""
    value, message = OTHERS[name]
    theirs = tensordict.TensorDict({"x": torch.ones(2), "o": value}, batch_size=[2])
    theirs.memmap(tmp_path / "td")
    with pytest.raises(ManifestError, match=message):
        TensorDict.load(tmp_path / "td")


def test_their_parameters_load_here(tmp_path):
    """The parameters of a module that tensordict saved load here, and go into the module."""
    module = torch.nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    tensordict.TensorDict.from_module(module).memmap(tmp_path / "td")
    other = torch.nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    TensorDict.load(tmp_path / "td", mode="c").to_module(other)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))


def test_missing_file_of_theirs(tmp_path):
    """A leaf of tensordict whose file is gone is an error, where it would leave it out."""
    tensordict.TensorDict({"x": torch.ones(2), "y": torch.ones(2)}, batch_size=[2]).memmap(
        tmp_path / "td"
    )
    (tmp_path / "td" / "x.memmap").unlink()
    with pytest.raises(ManifestError, match="leaf 'x' .*'x.memmap' is missing"):
        TensorDict.load(tmp_path / "td")


def test_entries_without_objects_are_skipped(tmp_path):
    """What tensordict writes beside its leaves, such as dimension names, is no leaf."""
    theirs = tensordict.TensorDict({"x": torch.ones(2)}, batch_size=[2], names=["time"])
    theirs.memmap(tmp_path / "td")
    assert "_names" in json.loads((tmp_path / "td" / "meta.json").read_text())
    assert list(TensorDict.load(tmp_path / "td").keys()) == ["x"]


@pytest.mark.parametrize("stacked", [True, False])
def test_pickled_data_is_not_taken_for_text(tmp_path, stacked):
    """What tensordict has pickled is refused; the name of its pickle is no string of ours."""
    data = NonTensorStack(b"a", b"b") if stacked else NonTensorData(b"a")
    tensordict.TensorDict({"l": data, "x": torch.zeros(2)}, [2]).memmap(tmp_path / "td")
    with pytest.raises(ManifestError, match=r"leaf 'l' .*must be a string.*exclude\('l'\)"):
        TensorDict.load_memmap(tmp_path / "td")


def test_a_list_for_all_elements(tmp_path):
    """A list of strings that does not have one for each element is an error with a way out."""
    data = {"classes": NonTensorData(["cat", "dog"]), "x": torch.zeros(3)}
    tensordict.TensorDict(data, [3]).memmap(tmp_path / "td")
    with pytest.raises(ManifestError, match=r"it has 2 strings for .*exclude\('classes'\)"):
        TensorDict.load_memmap(tmp_path / "td")
