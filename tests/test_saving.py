"""Saving to a directory and loading it: whole or not at all, and nobody else's files."""

import concurrent.futures
import contextlib
import copy
import errno
import json
import operator
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import saving_children
import torch
from conftest import ROOT, descriptors, few_descriptors, settled_descriptors, snapshot

import mmtensor
from mmtensor import (
    ExistingFileError,
    JaggedTensor,
    JaggedWriter,
    LockedError,
    ManifestError,
    MemoryMappedTensor,
    SymbolicLinkError,
    TensorDict,
    directory,
    mapping,
    saving,
)
from mmtensor.directory import create_beneath

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def td():
    """Return a container with leaves of every kind."""
    return TensorDict(
        {
            "x": torch.arange(6.0).view(3, 2),
            "n": {"y": torch.arange(3), "m": {"z": torch.zeros(3, 1, dtype=torch.bool)}},
            "j": JaggedTensor(torch.arange(6), [[2, 1], [0, 3], [1, 4]]),
            "title": "a title",
            "names": ["a", "b", "c"],
        },
        batch_size=[3],
    )


def tree(td):
    """Return the values of a container as nested lists."""
    result = {}
    for path, leaf in td.items(True, True):
        result[path] = leaf if isinstance(leaf, str | list) else leaf.tolist()
    return result


def entries(path):
    """Return the names in a directory, hidden ones too."""
    return sorted(os.listdir(path))


# --- round trips -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+", "c", None])
@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_round_trip(tmp_path, td, mode, num_threads):
    """What is saved is loaded, in its order, memory-mapped, with the mode that was asked for."""
    saved = td.memmap(tmp_path / "td", num_threads=num_threads)
    loaded = TensorDict.load_memmap(tmp_path / "td", mode=mode)
    for result in (saved, loaded):
        assert tree(result) == tree(td)
        assert list(result.keys(True)) == list(td.keys(True))
        assert result.batch_size == result["n", "m"].batch_size == td.batch_size
        assert result.is_memmap()
        assert type(result["x"]) is type(result["n", "m", "z"]) is MemoryMappedTensor
        assert type(result["j"]) is JaggedTensor
    assert saved["x"].mode == saved["j"].mode == "r+"
    assert loaded["x"].mode == loaded["j"].mode == (mode or "r+")
    assert saved["n", "m", "z"].filename == str(tmp_path / "td" / "n" / "m" / "z.memmap")
    assert mmtensor.locate(saved["x"]).path == loaded["x"].filename


@pytest.mark.parametrize("load", [TensorDict.load, TensorDict.load_memmap])
@pytest.mark.parametrize("save", [TensorDict.save, TensorDict.memmap, TensorDict.memmap_])
def test_names_of_the_methods(tmp_path, td, save, load):
    """Each way to save goes with each way to load, and with every kind of path."""
    before = tree(td)
    for number, make in enumerate((str, Path, os.fsencode)):
        path = make(str(tmp_path / f"a/b/{number}"))
        assert tree(save(td, path)) == before
        assert tree(load(path)) == before


DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(tmp_path, dtype):
    """Every dtype is saved byte for byte, dense and jagged."""
    dtype = getattr(torch, dtype)
    x = torch.arange(1, 33, dtype=torch.uint8).clamp(max=1 if dtype == torch.bool else 255)
    x = x.view(dtype).view(2, -1)
    j = JaggedTensor(x.reshape(-1), [[1], [x.numel() - 1]])
    TensorDict({"x": x, "j": j}, [2]).memmap(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td", mode="r")
    assert loaded["x"].dtype == loaded["j"].dtype == dtype
    assert (tmp_path / "td" / "x.memmap").read_bytes() == x.view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "td" / "j.memmap").read_bytes() == x.view(torch.uint8).numpy().tobytes()
    assert torch.equal(loaded["x"].clone().view(torch.uint8), x.view(torch.uint8))


SHAPES = {
    "no elements": lambda: torch.empty(0, 3),
    "empty rows": lambda: torch.empty(3, 0),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 4),
    "steps": lambda: torch.arange(9.0)[::2],
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "negative element": lambda: torch.tensor([1 + 2j]).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "with gradient": lambda: torch.ones(2, requires_grad=True) * 2,
    "memory-mapped": lambda: MemoryMappedTensor.from_tensor(torch.arange(4.0))[1:],
    "large": lambda: torch.arange(100_000.0),
    "large and transposed": lambda: torch.arange(100_000.0).view(2, -1).t(),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(tmp_path, name):
    """Tensors of every layout are saved with the values as seen; gradients are left behind."""
    x = SHAPES[name]()
    td = TensorDict({"x": x, "scalar": torch.tensor(5)})
    saved = td.memmap(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    for result in (saved, loaded):
        assert torch.equal(result["x"], x.detach())
        assert result["scalar"].shape == ()
        assert not result["x"].requires_grad
    if isinstance(x, torch.nn.Parameter):
        assert td["x"] is x


@pytest.mark.parametrize("ndim", [1, 3])
def test_jagged_without_elements(tmp_path, ndim):
    """A jagged leaf of no elements keeps its number of dimensions."""
    j = JaggedTensor(torch.empty(0), torch.empty(0, ndim, dtype=torch.int64))
    TensorDict({"j": j}, [0]).memmap(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")["j"]
    assert (len(loaded), loaded.ndim) == (0, ndim)


def test_jagged_views_are_saved_alone(tmp_path):
    """A slice of a jagged leaf, with a step or without, is saved without what it leaves out."""
    j = JaggedTensor(torch.arange(10), [[n] for n in range(5)])
    for part in (j[1:4], j[::-2], j[1::2]):
        TensorDict({"j": part}, [len(part)]).memmap(tmp_path / "td")
        loaded = TensorDict.load(tmp_path / "td")["j"]
        assert [e.tolist() for e in loaded] == [e.tolist() for e in part]
        assert os.stat(tmp_path / "td" / "j.memmap").st_size == part.nbytes


def test_strings(tmp_path):
    """Text of every kind comes back."""
    texts = ["", "é", "\0", "\ud800", "a\nb", '"', "x" * 10_000]
    TensorDict({"s": texts, "n": {"t": texts[3]}}, [len(texts)]).memmap(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    assert loaded["s"] == texts
    assert loaded["n", "t"] == texts[3]
    assert TensorDict({"s": []}, [0]).memmap(tmp_path / "no")["s"] == []
    assert TensorDict.load(tmp_path / "no")["s"] == []


def test_strings_that_have_changed_since(tmp_path):
    """A list that no longer fits is refused, and what is there stays."""
    TensorDict({"n": {"s": ["a", "b"]}}, [2]).memmap(tmp_path / "td")
    before = snapshot(tmp_path)
    for change in (lambda s: s.append("c"), lambda s: s.clear(), lambda s: s.__setitem__(0, 3)):
        td = TensorDict({"n": {"s": ["x", "y"]}}, [2])
        change(td["n", "s"])
        with pytest.raises(TypeError, match=r"leaf \('n', 's'\) cannot be saved: .* list of 2"):
            td.memmap(tmp_path / "td")
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_strings_of_files_do_not_change(tmp_path, mode):
    """No file would change with them; copies and what is unlocked may."""
    texts = ["a", "b"]
    saved = TensorDict({"s": texts}, [2]).memmap(tmp_path / "td")
    loaded = TensorDict.load_memmap(tmp_path / "td", mode=mode)
    for td in (saved, loaded):
        found = td["s"]
        assert found == texts
        changes = [
            (found.append, "c"),
            (found.sort,),
            (found.clear,),
            (operator.setitem, found, 0, "c"),
            (operator.delitem, found, 0),
            (operator.iadd, found, ["c"]),
            (operator.imul, found, 2),
        ]
        for change, *arguments in changes:
            with pytest.raises(
                LockedError, match=r"TensorDict that is memory-mapped or.*Take list"
            ):
                change(*arguments)
        assert found == texts
        for copied in (copy.copy(found), copy.deepcopy(found), list(found)):
            assert type(copied) is list
            assert copied == texts
        assert type(td.clone()["s"]) is list
        td.unlock_().set_("s", ["c", "d"])
        td[0] = {"s": "e"}
        assert td["s"] == ["e", "d"]
    assert TensorDict.load_memmap(tmp_path / "td")["s"] == texts


def test_a_writer_at_work_on_a_leaf(tmp_path, td):
    """What it marks its files with is no element; what it has appended is of no batch."""
    td.memmap(tmp_path / "td")
    with JaggedWriter(tmp_path / "td" / "j.memmap", torch.int64, 2, append=True) as writer:
        loaded = TensorDict.load_memmap(tmp_path / "td", mode="r")
        assert tree(loaded) == tree(td)
        writer.append(torch.ones(1, 1, dtype=torch.int64))
        writer.flush()
        message = (
            r"leaf 'j' .*bytes.* If elements were appended.*from_filename\('.*j.memmap', ...\)"
        )
        with pytest.raises(ManifestError, match=message):
            TensorDict.load_memmap(tmp_path / "td")
    assert len(JaggedTensor.from_filename(tmp_path / "td" / "j.memmap", torch.int64)) == 4
    assert tree(loaded) == tree(td)


def test_nothing(tmp_path):
    """A container without leaves is saved and loaded, with its batch size."""
    TensorDict({"n": {}}, [4, 5]).memmap(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    assert list(loaded.keys()) == ["n"]
    assert loaded["n"].batch_size == (4, 5)
    assert loaded.is_memmap()


def test_memmap_in_place(tmp_path, td):
    """Moving in place moves the leaves of this container, and of those nested in it."""
    inner, before = td["n"], tree(td)
    assert td.memmap_(tmp_path / "td") is td
    assert td["n"] is inner
    assert tree(td) == before
    assert td.is_memmap()
    assert inner.is_memmap()
    td["x"][0] = 9
    assert TensorDict.load(tmp_path / "td")["x"][0].tolist() == [9, 9]


def test_memmap_leaves_the_source(tmp_path, td):
    """Saving leaves this container as it is."""
    x = td["x"]
    td.memmap(tmp_path / "td")
    assert not td.is_locked
    assert td["x"] is x


def test_memmap_like(tmp_path, td):
    """Making alike makes zeros of the same shapes and dtypes, with their disk space."""
    made = td.memmap_like(tmp_path / "td")
    assert made["x"].tolist() == [[0, 0]] * 3
    assert made["x"].dtype == td["x"].dtype
    assert made["j"].shapes.tolist() == td["j"].shapes.tolist()
    assert made["j"].values.unique().tolist() == [0]
    assert made["names"] == ["a", "b", "c"]
    made["x"][1] = 5
    assert TensorDict.load(tmp_path / "td")["x"].tolist() == [[0, 0], [5, 5], [0, 0]]
    status = os.stat(tmp_path / "td" / "x.memmap")
    assert status.st_blocks * 512 >= status.st_size == 24


@pytest.mark.parametrize("method", ["memmap", "memmap_"])
def test_return_early(tmp_path, td, method):
    """With return_early the result comes as a future, of what was there at the call."""
    before = tree(td)
    future = getattr(td, method)(tmp_path / "td", num_threads=2, return_early=True)
    assert isinstance(future, concurrent.futures.Future)
    if method == "memmap":
        td["new"] = torch.ones(3)
    else:
        with pytest.raises(RuntimeError, match="locked"):
            td["new"] = torch.ones(3)
    result = future.result(timeout=60)
    assert tree(result) == before
    assert result.is_memmap()
    assert (result is td) == (method == "memmap_")


@pytest.mark.parametrize("method", ["memmap", "memmap_"])
def test_return_early_of_a_failure(tmp_path, td, method):
    """A save that fails later raises from the future, and leaves the container unlocked."""
    (tmp_path / "td").write_text("a file")
    future = getattr(td, method)(tmp_path / "td", return_early=True)
    with pytest.raises(ExistingFileError, match="a file is where the directory is to be"):
        future.result(timeout=60)
    td["new"] = torch.ones(3)


def test_flush(tmp_path, td):
    """Flushing goes through every leaf and directory, of views and regular memory as well."""
    saved = td.memmap(tmp_path / "td")
    saved["x"][0] = 1
    for each in (saved, saved["n"], saved[0], td, TensorDict.load(tmp_path / "td", mode="r")):
        assert each.flush() is None


def test_flush_reaches_every_file(tmp_path, td, monkeypatch):
    """Flushing syncs the maps of all leaves, all names, and what every meta.json says."""
    saved = td.memmap(tmp_path / "td")
    synced, maps = [], []
    fsync = os.fsync

    def watch(fd):
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path / "td"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watch)
    monkeypatch.setattr(mapping, "msync", lambda address, _: maps.append(address))
    saved.flush()
    files = [path for path in (tmp_path / "td").rglob("*") if path.suffix == ".memmap"]
    assert len(set(maps)) == len(maps) == len(files) == 6
    directories = [path for path in (tmp_path / "td").rglob("*") if path.is_dir()]
    expected = {"..", ".", "meta.json"}
    for path in directories:
        expected |= {str(path.relative_to(tmp_path / "td") / name) for name in ("", "meta.json")}
    assert len(directories) == 4
    assert set(synced) == expected


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_flush_of_a_directory_that_is_elsewhere(tmp_path, td, how):
    """The leaves are written, whatever is at the path by now."""
    saved = td.memmap(tmp_path / "td")
    saved["x"].zero_()
    if how == "moved":
        (tmp_path / "td").rename(tmp_path / "other")
    else:
        TensorDict({"z": torch.ones(1)}).memmap(tmp_path / "td")
    saved.flush()


def test_no_descriptors_are_left(tmp_path, td):
    """Saving and loading, also when they fail, leave no descriptor open."""
    td.memmap(tmp_path / "td", num_threads=2)
    before = settled_descriptors()
    saved = td.memmap(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    (tmp_path / "td" / "x.memmap").unlink()
    with pytest.raises(ManifestError, match="missing"):
        TensorDict.load(tmp_path / "td")
    (tmp_path / "td" / "notes").write_text("mine")
    with pytest.raises(ExistingFileError, match="notes"):
        td.memmap(tmp_path / "td")
    assert descriptors() == before
    assert tree(saved) == tree(loaded)


def test_few_descriptors(tmp_path, run):
    """A thousand leaves in a hundred directories are saved and open under ``ulimit -n 64``."""
    program = """
        import os, sys, torch
        from mmtensor import TensorDict
        data = {f"n{i}": {f"k{j}": torch.full((2,), i) for j in range(10)} for i in range(100)}
        saved = TensorDict(data, [2]).memmap(sys.argv[1], num_threads=4)
        loaded = TensorDict.load(sys.argv[1])
        total = sum(int(leaf.sum()) for leaf in loaded.values(True, True))
        print(total, saved.is_memmap(), len(os.listdir("/proc/self/fd")) < 20)
    """
    assert run(program, tmp_path / "td", limits="-n 64") == "99000 True True"


def test_mode_of_files_that_cannot_be_written(public_directory, td):
    """Without a mode, files that may only be read open copy-on-write, all of them."""
    td.memmap(public_directory / "td")
    os.chmod(public_directory / "td" / "n" / "y.memmap", 0o444)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            loaded = TensorDict.load(public_directory / "td")
            modes = {loaded["x"].mode, loaded["n", "y"].mode, loaded["j"].mode}
            loaded["n", "y"][0] = 5
            try:
                TensorDict.load(public_directory / "td", mode="r+")
            except PermissionError as error:
                status = 0 if modes == {"c"} and "leaf " in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_wrong_mode(tmp_path, td):
    """An unknown mode is an error that lists the known ones."""
    td.memmap(tmp_path / "td")
    with pytest.raises(mmtensor.ModeError, match='"r".*"r\\+".*"c".*got \'w\''):
        TensorDict.load(tmp_path / "td", mode="w")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda _: None, FileNotFoundError, "td"),
        (lambda path: path.mkdir(), FileNotFoundError, "no TensorDict was saved here.*meta.json"),
        (lambda path: path.write_text(""), NotADirectoryError, "saved as a directory, got a file"),
    ],
    ids=["nothing", "empty", "file"],
)
def test_loading_what_is_none(tmp_path, make, error, message):
    """Loading from where nothing was saved says so, and creates nothing."""
    make(tmp_path / "td")
    before = snapshot(tmp_path)
    with pytest.raises(error, match=message):
        TensorDict.load(tmp_path / "td")
    assert snapshot(tmp_path) == before


def test_loading_through_a_link(tmp_path, td):
    """The directory itself may be reached through a symbolic link."""
    td.memmap(tmp_path / "td")
    (tmp_path / "link").symlink_to(tmp_path / "td")
    assert tree(TensorDict.load(tmp_path / "link")) == tree(td)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda: torch.eye(2).to_sparse(), "leaf 'bad' cannot be saved: expected a dense tensor"),
        (lambda: torch.empty(2, device="meta"), "leaf 'bad' cannot be saved: .*device 'meta'"),
        (lambda: torch.ones(2, dtype=torch.complex32), "leaf 'bad' cannot be saved: .*complex32"),
    ],
    ids=["sparse", "meta", "complex32"],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_leaves_that_cannot_be_saved(tmp_path, leaf, message):
    """A leaf that cannot be saved is an error that names it, before anything is written."""
    td = TensorDict({"x": torch.ones(2), "bad": leaf()}, [2])
    with pytest.raises(TypeError, match=message):
        td.memmap(tmp_path / "td")
    assert entries(tmp_path) == []


# --- replacing ---------------------------------------------------------------------------


def test_readers_keep_what_they_opened(tmp_path, td):
    """Whoever has the old directory open keeps its values; files are replaced, not written."""
    old = td.memmap(tmp_path / "td")
    reader = TensorDict.load(tmp_path / "td")
    before = tree(td)
    td["x"].zero_()
    td["j"].fill_(7)
    new = td.memmap(tmp_path / "td")
    assert tree(old) == tree(reader) == before
    assert new["x"].sum() == 0
    assert tree(TensorDict.load(tmp_path / "td")) == tree(td)
    assert entries(tmp_path) == ["td"]


@pytest.mark.parametrize("save", ["memmap", "memmap_", "save", "memmap_like"])
def test_existsok(tmp_path, save):
    """Without it a directory that is not empty stays as it is."""
    path = tmp_path / "td"
    path.mkdir()
    first = TensorDict({"x": torch.arange(3)}, [3])
    first.memmap(path, existsok=False)  # an empty directory is nothing
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    other = TensorDict({"x": torch.ones(3), "y": torch.ones(3)}, [3])
    with pytest.raises(mmtensor.ExistingFileError, match="existsok=True replaces it"):
        getattr(other, save)(path, existsok=False)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert os.listdir(tmp_path) == ["td"]
    getattr(other, save)(path, existsok=True)
    assert set(TensorDict.load_memmap(path).keys()) == {"x", "y"}


def test_saving_over_itself(tmp_path, td):
    """A container is saved over the directory that it is mapped from, in any mode."""
    td.memmap(tmp_path / "td")
    for mode in ("r", "r+", "c"):
        loaded = TensorDict.load(tmp_path / "td", mode=mode)
        assert tree(loaded.memmap(tmp_path / "td")) == tree(td)
        assert tree(loaded[1:].memmap(tmp_path / "td")) == tree(td[1:])
        td.memmap(tmp_path / "td")
    held = TensorDict.load(tmp_path / "td")
    held.memmap_(tmp_path / "td")
    held["x"][0] = 9
    assert TensorDict.load(tmp_path / "td")["x"][0, 0] == 9
    assert entries(tmp_path) == ["td"]


def test_other_keys(tmp_path, td):
    """Files of leaves that are there no more are gone after the next save."""
    td.memmap(tmp_path / "td")
    TensorDict({"q": torch.ones(1)}).memmap(tmp_path / "td")
    assert entries(tmp_path / "td") == ["meta.json", "q.memmap"]


def test_an_empty_directory_is_replaced(tmp_path, td):
    """An empty directory may be saved to; it keeps its permissions."""
    (tmp_path / "td").mkdir(mode=0o750)
    td.memmap(tmp_path / "td")
    td.memmap(tmp_path / "td")
    assert stat.S_IMODE(os.stat(tmp_path / "td").st_mode) == 0o750
    assert tree(TensorDict.load(tmp_path / "td")) == tree(td)


def test_a_protected_directory(public_directory, td):
    """A write-protected directory of one's own is replaced, and is so again afterwards."""
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            for _ in range(3):
                td.memmap(public_directory / "td")
                for path in ("td/n/m", "td/n", "td"):
                    os.chmod(public_directory / path, 0o500)
            mode = stat.S_IMODE(os.stat(public_directory / "td").st_mode)
            whole = tree(TensorDict.load(public_directory / "td")) == tree(td)
            status = 0 if whole and (mode, entries(public_directory)) == (0o500, ["td"]) else 2
            td.memmap(public_directory / "td")
            os.chmod(public_directory / "td", 0o700)
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


FOREIGN = {
    "file": lambda path: (path / "notes.csv").write_text("mine"),
    "hidden file": lambda path: (path / ".notes").write_text("mine"),
    "directory": lambda path: (path / "folder").mkdir(),
    "file in a nested one": lambda path: (path / "n" / "m" / "notes.csv").write_text("mine"),
    "file with our suffix": lambda path: (path / "other.memmap").write_text("mine"),
    "link": lambda path: (path / "link").symlink_to("/"),
    "link for a leaf": lambda path: _replace(path / "x.memmap", lambda p: p.symlink_to("/etc")),
    "directory for a leaf": lambda path: _replace(path / "x.memmap", os.mkdir),
    "link for a directory": lambda path: _move(path / "n"),
}


def _replace(path, make):
    path.unlink()
    make(path)


def _move(path):
    os.rename(path, path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_entries(tmp_path, td, unchanged, name):
    """A directory with anything that no save has written stays as it is; the error names it."""
    td.memmap(tmp_path / "td")
    FOREIGN[name](tmp_path / "td")
    td["x"].zero_()
    message = {
        "file in a nested one": "'n/m/notes.csv'",
        "link for a leaf": "'x.memmap'",
        "directory for a leaf": "'x.memmap'",
        "link for a directory": "'n'",
    }.get(name, "'(notes.csv|.notes|folder|other.memmap|link)'")
    for method in (td.memmap, td.memmap_like, td.clone().memmap_):
        with unchanged(), pytest.raises(ExistingFileError, match=f"the directory holds {message}"):
            method(tmp_path / "td")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", None])
def test_a_directory_without_a_readable_meta_json(tmp_path, td, unchanged, data):
    """Files beside a meta.json that cannot be read, or beside none, are not ours."""
    td.memmap(tmp_path / "td")
    if data is None:
        (tmp_path / "td" / "meta.json").unlink()
    else:
        (tmp_path / "td" / "meta.json").write_bytes(data)
    with unchanged(), pytest.raises(FileExistsError, match="the directory holds 'j.memmap'"):
        td.memmap(tmp_path / "td")


@pytest.mark.parametrize("kind", ["directory", "file", "nothing"])
def test_a_symbolic_link_as_target(tmp_path, td, unchanged, kind):
    """A symbolic link is not written through, whatever it points to."""
    if kind == "directory":
        td.memmap(tmp_path / "other")
    elif kind == "file":
        (tmp_path / "other").write_text("mine")
    (tmp_path / "td").symlink_to(tmp_path / "other")
    with unchanged(), pytest.raises(SymbolicLinkError, match="must not be a symbolic link, got"):
        td.memmap(tmp_path / "td")
    assert issubclass(SymbolicLinkError, RuntimeError)


def test_a_file_as_target(tmp_path, td, unchanged):
    """A file where the directory is to be is not replaced."""
    (tmp_path / "td").write_text("mine")
    with unchanged(), pytest.raises(ExistingFileError, match="a file is where the directory"):
        td.memmap(tmp_path / "td")
    with unchanged(), pytest.raises((NotADirectoryError, FileExistsError), match="td"):
        td.memmap(tmp_path / "td" / "below")


@pytest.mark.parametrize("inside", ["", "n", "n/m"])
def test_the_current_directory(tmp_path, td, unchanged, monkeypatch, inside):
    """The current directory, and one that it is in, are not replaced."""
    td.memmap(tmp_path / "td")
    monkeypatch.chdir(tmp_path / "td" / inside)
    what = "the current directory is in it" if inside else "it is the current directory"
    for path in (tmp_path / "td", os.path.relpath(tmp_path / "td")):
        with unchanged(), pytest.raises(OSError, match=what) as caught:
            td.memmap(path)
        assert caught.value.errno == errno.EBUSY
    td.memmap("below")  # of the current directory
    assert tree(TensorDict.load("below")) == tree(td)


def test_the_root_directory(td):
    """The root directory is a mount point."""
    with pytest.raises(OSError, match="it is a mount point") as caught:
        td.memmap("/")
    assert caught.value.errno == errno.EBUSY


@pytest.mark.usefixtures("mounting")
def test_a_mount_point(tmp_path, run):
    """A mount point, also one of the same file system, is a clear error."""
    program = """
        import os, subprocess, sys, torch
        from mmtensor import TensorDict
        base = sys.argv[1]
        for name, command in (("tmpfs", ["-t", "tmpfs", "none"]), ("bind", ["--bind", base])):
            path = f"{base}/{name}"
            os.mkdir(path)
            subprocess.run(["mount", *command, path], check=True)
            if name == "bind":
                path = f"{base}/bound"
                os.mkdir(path)
                os.mkdir(f"{base}/empty")
                subprocess.run(["mount", "--bind", f"{base}/empty", path], check=True)
            try:
                TensorDict({"x": torch.ones(1)}).memmap(path)
            except OSError as error:
                print(error.errno, "it is a mount point" in str(error), os.listdir(path))
    """
    lines = run(program, tmp_path, private_mounts=True).splitlines()
    assert lines == [f"{errno.EBUSY} True []"] * 2
    assert [name for name in entries(tmp_path) if name.endswith(".new")] == []


@pytest.mark.usefixtures("mounting")
def test_a_full_disk(tmp_path, run):
    """A full disk is an OSError that names the leaf, and leaves the old directory and no other."""
    program = """
        import os, subprocess, sys, torch
        from mmtensor import TensorDict
        path = sys.argv[1] + "/small"
        os.mkdir(path)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", path], check=True)
        TensorDict({"x": torch.ones(100), "n": {"y": torch.ones(100)}}).memmap(path + "/td")
        for threads in (0, 2):
            big = {name: torch.zeros(100) for name in "xn"} | {"big": torch.ones(1 << 20)}
            try:
                TensorDict(big).memmap(path + "/td", num_threads=threads)
            except OSError as error:
                print(error.errno, "leaf 'big' could not be saved" in str(error), os.listdir(path))
        print(int(TensorDict.load(path + "/td")["x"].sum()), os.listdir(path))
    """
    lines = run(program, tmp_path, private_mounts=True).splitlines()
    assert lines == [f"{errno.ENOSPC} True ['td']"] * 2 + ["100 ['td']"]


@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("over", [False, True], ids=["new", "over"])
def test_a_failure_in_the_middle(tmp_path, td, monkeypatch, over, num_threads):
    """A save that fails half-way leaves what was there, and nothing else."""
    if over:
        td.memmap(tmp_path / "td")
    before = snapshot(tmp_path)
    expected = tree(td)
    written = []
    real = saving._write_dense

    def fail(leaf, *arguments):
        if leaf.path == ("n", "m", "z"):
            raise MemoryError("no more")
        written.append(leaf.path)
        return real(leaf, *arguments)

    monkeypatch.setattr(saving, "_write_dense", fail)
    changed = td.clone()
    changed["x"].zero_()
    for method in (changed.memmap, changed.clone().memmap_):
        with pytest.raises(MemoryError, match="no more"):
            method(tmp_path / "td", num_threads=num_threads)
    assert written
    assert snapshot(tmp_path) == before
    if over:
        assert tree(TensorDict.load(tmp_path / "td")) == expected


def test_without_exchange(tmp_path, td, monkeypatch):
    """Where the system cannot exchange directories, they are renamed one after the other."""

    def refuse(*_, **__):
        raise OSError(errno.EINVAL, "no such call")

    monkeypatch.setattr(directory, "rename_exchange", refuse)
    monkeypatch.setattr(directory, "rename_noreplace", refuse)
    td.memmap(tmp_path / "td")
    td["x"].zero_()
    td.memmap(tmp_path / "td")
    assert tree(TensorDict.load(tmp_path / "td")) == tree(td)
    assert entries(tmp_path) == ["td"]
    # What a process has left that was killed before its last rename.
    td.memmap(tmp_path / ".td.0.new.old")
    td["x"].fill_(3)
    td.memmap(tmp_path / "td")
    assert tree(TensorDict.load(tmp_path / "td")) == tree(td)
    assert entries(tmp_path) == ["td"]


def test_without_locks(tmp_path, td, monkeypatch):
    """Where directories cannot be locked, old ones are removed all the same."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(directory.fcntl, "flock", refuse)
    for number in range(3):
        td["x"].fill_(number)
        td.memmap(tmp_path / "td")
        assert tree(TensorDict.load(tmp_path / "td")) == tree(td)
        assert entries(tmp_path) == ["td"]


def test_a_target_that_appears_meanwhile(tmp_path, td, monkeypatch):
    """A file that appears while a save is at work is not lost, and the save fails."""
    real = directory._rename_new

    def appear(source, target, parent):
        (tmp_path / "td").mkdir()
        (tmp_path / "td" / "notes.csv").write_text("mine")
        monkeypatch.setattr(directory, "_rename_new", real)
        real(source, target, parent)

    monkeypatch.setattr(directory, "_rename_new", appear)
    with pytest.raises(ExistingFileError, match="the directory holds 'notes.csv'"):
        td.memmap(tmp_path / "td")
    assert entries(tmp_path) == ["td"]
    assert entries(tmp_path / "td") == ["notes.csv"]


def test_a_file_that_appears_at_the_last_moment(tmp_path, td, monkeypatch):
    """What someone puts into the old directory as it is exchanged is in the new one after."""
    td.memmap(tmp_path / "td")
    real = directory.rename_exchange

    def appear(source, target, *, dir_fd):
        (tmp_path / "td" / "notes.csv").write_text("mine")
        (tmp_path / "td" / "x.memmap.bak").write_text("mine too")
        (tmp_path / "td" / "a.csv").write_text("an older one")
        os.close(create_beneath(f"{source}/a.csv", dir_fd))  # of this name there is a new one
        real(source, target, dir_fd=dir_fd)

    monkeypatch.setattr(directory, "rename_exchange", appear)
    td["x"].zero_()
    td.memmap(tmp_path / "td")
    assert (tmp_path / "td" / "notes.csv").read_text() == "mine"
    assert (tmp_path / "td" / "x.memmap.bak").read_text() == "mine too"
    assert entries(tmp_path / ".td.0.new") == ["a.csv"]
    assert tree(TensorDict.load(tmp_path / "td")) == tree(td)


def test_a_long_name(tmp_path, td):
    """A directory may have a name as long as the file system allows."""
    for name in ("d" * 255, "é" * 127):
        for _ in range(2):
            td.memmap(tmp_path / name)
        assert tree(TensorDict.load(tmp_path / name)) == tree(td)
    assert len(entries(tmp_path)) == 2


# --- leftovers ---------------------------------------------------------------------------


def test_leftovers_are_removed(tmp_path, td):
    """What a killed save has left beside the target is gone after the next one."""
    td.memmap(tmp_path / ".td.0.new")  # as complete as it can be
    td.memmap(tmp_path / "td")
    assert entries(tmp_path) == ["td"]
    for keep in range(4):
        td.memmap(tmp_path / ".td.0.new")
        for name in [*entries(tmp_path / ".td.0.new")][keep:]:
            if name != "meta.json" and not os.path.isdir(tmp_path / ".td.0.new" / name):
                (tmp_path / ".td.0.new" / name).unlink()
        td.memmap(tmp_path / "td")
        assert entries(tmp_path) == ["td"]
    (tmp_path / ".td.0.new").mkdir()
    (tmp_path / ".td.0.new" / "meta.json").write_bytes(b'{"x": {"dev')
    td.memmap(tmp_path / "td")
    assert entries(tmp_path) == ["td"]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("mine"),
        lambda path: path.symlink_to("/tmp"),
        lambda path: (path.mkdir(), (path / "notes").write_text("mine")),
    ],
    ids=["file", "link", "directory"],
)
def test_what_is_no_leftover_stays(tmp_path, td, make):
    """What is not ours is not touched, also where our own directory would be."""
    make(tmp_path / ".td.0.new")
    for _ in range(2):
        td.memmap(tmp_path / "td")
    assert entries(tmp_path) == [".td.0.new", "td"]
    assert tree(TensorDict.load(tmp_path / "td")) == tree(td)


def _start(*arguments):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, "-W", "error", saving_children.__file__, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def test_kills(tmp_path):
    """Killed a hundred times while it overwrites, a save leaves all old or all new, and loads."""
    path = str(tmp_path / "td")
    number = 0
    saving_children.version(0).memmap(path)
    generator = torch.Generator().manual_seed(1)
    delays = (torch.rand(100, generator=generator) * 0.02).tolist()
    for delay in delays:
        # A child that has torch loaded already; each kill would otherwise cost seconds.
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.dup2(writer, 1)
                saving_children.save(path, number + 1)
            finally:
                os._exit(1)
        os.close(writer)
        with open(reader, "rb") as lines:
            assert lines.readline()  # it is at work
            threading.Event().wait(delay)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            done = [int(line) for line in lines.read().split()]
        least = max([number + 1, *done])
        found = saving_children.numbers(TensorDict.load_memmap(path))
        assert len(found) == 1
        (number,) = found
        assert number in (least, least + 1)
        # One save may be half done and one old directory half gone, never more.
        assert len(entries(tmp_path)) <= 3
    saving_children.version(number).memmap(path)
    assert entries(tmp_path) == ["td"]


def test_loads_beside_saves(tmp_path):
    """A process that loads in a loop while another saves in a loop sees one version each time."""
    path = tmp_path / "td"
    saving_children.version(0).memmap(path)
    writer = _start("save", path, 1)
    try:
        readers = [_start("load", path, 300) for _ in range(2)]
        for reader in readers:
            out, err = reader.communicate(timeout=100)
            assert (reader.returncode, err) == (0, b"")
            assert int(out) >= 10  # it was replaced many times meanwhile
    finally:
        writer.kill()
        writer.communicate()


def test_saves_beside_saves(tmp_path):
    """Several processes that save to one directory take turns; the last one is whole."""
    path = tmp_path / "td"
    saving_children.version(0).memmap(path)
    writers = [_start("save", path, 1000 * n) for n in range(1, 4)]
    try:
        for writer in writers:
            for _ in range(10):
                if not writer.stdout.readline():
                    pytest.fail(writer.stderr.read().decode())
        for _ in range(30):
            assert len(saving_children.numbers(TensorDict.load(path, mode="r"))) == 1
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert len(saving_children.numbers(TensorDict.load(path, mode="r"))) == 1
    saving_children.version(5).memmap(path)
    assert entries(tmp_path) == ["td"]


def test_a_fork_during_a_save(tmp_path, td):
    """A child that was forked while its parent saved does not hinder the saves after."""
    reader, writer = os.pipe()
    with directory.NewDirectory(str(tmp_path / "td"), lambda _: ({"meta.json"}, set())) as new:
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent is done
            os._exit(0)
        os.close(directory.create_beneath("meta.json", new.fd))
        new.publish()
    for _ in range(2):
        td.memmap(tmp_path / "td")
    assert entries(tmp_path) == ["td"]
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)


# --- golden bytes ------------------------------------------------------------------------


def test_golden_bytes(tmp_path):
    """The layout of a directory is the documented one, byte for byte."""
    td = TensorDict(
        {
            "x": torch.tensor([[1, 2], [3, 4]], dtype=torch.int16),
            "n": {"a/b": torch.tensor([1.0, -2.0])},
            "j": JaggedTensor(torch.tensor([7, 8, 9], dtype=torch.uint8), [[1], [2]]),
            "s": "text",
            "l": ["p", "q"],
            "shape": torch.tensor([True, False]),
        },
        [2],
    )
    td.memmap(tmp_path / "td")
    files = {
        str(path.relative_to(tmp_path / "td")): path.read_bytes()
        for path in (tmp_path / "td").rglob("*")
        if path.is_file()
    }
    meta = json.loads(files.pop("meta.json"))
    nested = json.loads(files.pop("n/meta.json"))
    assert json.loads(files.pop("s/meta.json"))["data"] == "text"
    assert json.loads(files.pop("l/meta.json"))["data"] == ["p", "q"]
    assert {name: data.hex(" ", 2) for name, data in files.items()} == {
        "x.memmap": "0100 0200 0300 0400",
        "n/a%2Fb.memmap": "0000 803f 0000 00c0",
        "j.memmap": "07 0809",
        "j.offsets.memmap": "0000 0000 0000 0000 0100 0000 0000 0000 0300 0000 0000 0000",
        "j.shape.memmap": "0100 0000 0000 0000 0200 0000 0000 0000",
        "shape.memmap": "0100",
    }
    assert meta["_mmtensor"] == [
        {"version": 1, "batch_size": [2]},
        {"key": "x", "kind": "dense", "dtype": "int16", "shape": [2, 2], "file": "x.memmap"},
        {"key": "n", "kind": "nested", "file": "n"},
        {"key": "j", "kind": "jagged", "dtype": "uint8", "shape": [2, 1], "file": "j.memmap"},
        {"key": "s", "kind": "string", "file": "s"},
        {"key": "l", "kind": "strings", "file": "l"},
        {"key": "shape", "kind": "dense", "dtype": "bool", "shape": [2], "file": "shape.memmap"},
    ]
    del meta["_mmtensor"]
    assert meta == {
        "x": {"device": "cpu", "shape": [2, 2], "dtype": "torch.int16", "is_nested": False},
        "n": {"type": "TensorDict"},
        "j": {"device": "cpu", "shape": [2, 1], "dtype": "torch.uint8", "is_nested": True},
        "s": {"type": "NonTensorData"},
        "l": {"type": "NonTensorStack"},
        "shape": [2],
        "device": "cpu",
        "_type": "<class 'tensordict._td.TensorDict'>",
        "_format_version": 1,
        "_class": "tensordict:TensorDict",
    }
    assert nested["_mmtensor"][1]["file"] == "a%2Fb.memmap"


@pytest.mark.parametrize("over", [False, True])
def test_saving_without_descriptors(tmp_path, td, over):
    """A save for which there are too few descriptors ends, and leaves nothing."""
    if over:
        td.memmap(tmp_path / "td")
    before, open_before = snapshot(tmp_path), settled_descriptors()
    for free in range(3):
        with few_descriptors(free), pytest.raises(OSError, match="Too many open files"):
            td.memmap(tmp_path / "td")
        assert settled_descriptors() == open_before
        assert snapshot(tmp_path) == before


def test_what_cannot_be_made_beside(tmp_path, td, monkeypatch):
    """A directory beside the target that cannot be made is an error that names the target."""

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", ".td.0.new")

    monkeypatch.setattr(os, "mkdir", denied)
    with pytest.raises(
        PermissionError, match="for a directory beside the one to save to"
    ) as caught:
        td.memmap(tmp_path / "td")
    assert caught.value.filename == str(tmp_path / "td")


def test_number_of_threads(tmp_path, td):
    """What is no number is refused before anything is written."""
    with pytest.raises(ValueError, match="num_threads must be an integer of 0 or more"):
        td.memmap(tmp_path / "td", num_threads=[2])
    assert entries(tmp_path) == []
