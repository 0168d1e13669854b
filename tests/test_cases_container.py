"""Things that went wrong for people who keep containers of tensors in directories."""

import os
import subprocess
import sys

import pytest
import saving_children
import torch
from conftest import ROOT, snapshot

from mmtensor import JaggedTensor, MemoryMappedTensor, TensorDict

pytestmark = pytest.mark.timeout(120)


def saved(path, number=1.0):
    """Save two leaves of six float32 each; return the container."""
    data = {"a": torch.full((2, 3), number), "b": torch.full((2, 3), number)}
    return TensorDict(data, [2]).memmap(path)


def _start(*arguments):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, saving_children.__file__, *map(str, arguments)],
        stdout=subprocess.PIPE,
        env=environment,
    )


def test_case_21(tmp_path):
    """A directory that was being saved over when the process was killed is all old or all new."""
    path = tmp_path / "td"
    saving_children.version(0).memmap(path)
    child = _start("save", path, 1)
    lines = [int(child.stdout.readline()) for _ in range(5)]
    child.kill()
    rest, _ = child.communicate()
    last = max([*lines, *map(int, rest.split())])
    found = saving_children.numbers(TensorDict.load_memmap(path))
    assert found in ({last}, {last + 1})


def test_case_22(tmp_path, unchanged):
    """A leaf whose file is deleted is an error that names the leaf."""
    saved(tmp_path / "td")
    (tmp_path / "td" / "a.memmap").unlink()
    with unchanged(), pytest.raises(ValueError, match="leaf 'a' .*its file 'a.memmap' is missing"):
        TensorDict.load_memmap(tmp_path / "td")


@pytest.mark.parametrize("mode", ["r", "r+", "c", None])
@pytest.mark.parametrize("size", [12, 36])
def test_case_23(tmp_path, unchanged, size, mode):
    """A leaf whose file is cut or too long is an error with both sizes; the file stays so."""
    saved(tmp_path / "td")
    os.truncate(tmp_path / "td" / "a.memmap", size)
    message = f"leaf 'a' .*must have 24 bytes .*its size is {size} bytes"
    with unchanged(), pytest.raises(ValueError, match=message):
        TensorDict.load_memmap(tmp_path / "td", mode=mode)


def test_case_24(tmp_path):
    """A loaded container is locked and memory-mapped, and refuses a new key."""
    saved(tmp_path / "td")
    td = TensorDict.load_memmap(tmp_path / "td")
    assert td.is_locked
    assert td.is_memmap()
    with pytest.raises(RuntimeError, match="cannot set key 'c': this TensorDict is memory-mapped"):
        td["c"] = torch.ones(2)
    assert list(td.keys()) == ["a", "b"]


def test_case_25(tmp_path):
    """Views are locked and memory-mapped with leaves that are; choosing keys ends both."""
    td = saved(tmp_path / "td")
    for view in (td.view(-1), td.unsqueeze(0), td[0:2]):
        assert (view.is_locked, view.is_memmap()) == (True, True)
        assert type(view["a"]) is MemoryMappedTensor
    chosen = td.select("a")
    assert (chosen.is_locked, chosen.is_memmap()) == (False, False)
    assert chosen["a"] is td["a"]


def test_case_27(tmp_path):
    """Leaves of every name come back: reserved ones, paths, an empty and a very long one."""
    names = ["shape", "device", "_type", "a/b", "..", "meta", "", "k" * 300, ".", "meta.json"]
    data = {name: torch.full((2,), i) for i, name in enumerate(names)}
    data["n"] = {name: torch.full((2,), i) for i, name in enumerate(names)}
    TensorDict({**data, "d": {name: {"x": data[name]} for name in names}}, [2]).memmap(
        tmp_path / "td"
    )
    td = TensorDict.load_memmap(tmp_path / "td")
    assert list(td.keys()) == [*names, "n", "d"]
    for i, name in enumerate(names):
        for key in (name, ("n", name), ("d", name, "x")):
            assert td[key].tolist() == [i, i]
    assert os.listdir(tmp_path) == ["td"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_case_28(tmp_path, layout):
    """A leaf in the jagged layout of torch, or the other one, is saved and loaded."""
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=layout)
    TensorDict({"j": nested}, [2]).memmap(tmp_path / "td")
    loaded = TensorDict.load_memmap(tmp_path / "td")["j"]
    assert type(loaded) is JaggedTensor
    assert [e.tolist() for e in loaded] == [[[1] * 3] * 2, [[0] * 3] * 4]


def test_case_29(tmp_path):
    """A save that fails half-way leaves the old directory as it was."""
    saved(tmp_path / "td")
    before = snapshot(tmp_path)
    bad = TensorDict({"a": torch.zeros(2), "b": torch.eye(2).to_sparse()}, [2])
    with pytest.raises(TypeError, match="leaf 'b' cannot be saved"):
        bad.memmap(tmp_path / "td")
    assert snapshot(tmp_path) == before
    assert TensorDict.load_memmap(tmp_path / "td")["b"].unique().tolist() == [1]


def test_case_30(tmp_path):
    """Saved with several threads, thirty times, a container keeps the order of its keys."""
    keys = [f"k{i * 7 % 20}" for i in range(20)]
    td = TensorDict({key: torch.ones(3, 1000) for key in keys}, [3])
    for _ in range(30):
        assert list(td.memmap(tmp_path / "td", num_threads=4).keys()) == keys
        assert list(TensorDict.load_memmap(tmp_path / "td").keys()) == keys


def test_case_31(tmp_path, unchanged, monkeypatch):
    """Someone's file beside an older save, the current directory and a link are not replaced."""
    td = saved(tmp_path / "td")
    (tmp_path / "td" / "notes.csv").write_text("mine")
    with unchanged(), pytest.raises(FileExistsError, match="notes.csv"):
        td.memmap(tmp_path / "td")
    saved(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for path in (".", tmp_path / "here", "../here"):
        with unchanged(), pytest.raises(OSError, match="it is the current directory"):
            td.memmap(path)
    assert os.listdir(".")
    (tmp_path / "link").symlink_to("here")
    with unchanged(), pytest.raises(RuntimeError, match="must not be a symbolic link"):
        td.memmap(tmp_path / "link")


def test_case_32(tmp_path):
    """Each load sees one version while another process saves over the directory in a loop."""
    path = tmp_path / "td"
    saving_children.version(0).memmap(path)
    child = _start("save", path, 1)
    try:
        assert child.stdout.readline()
        seen = set()
        while len(seen) < 20:
            found = saving_children.numbers(TensorDict.load_memmap(path))
            assert len(found) == 1
            seen |= found
    finally:
        child.kill()
        child.communicate()
