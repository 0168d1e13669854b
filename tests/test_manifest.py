"""What a directory's meta.json may say, and the names of its files."""

import copy
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict._utils_key_json import _encode_key_for_filesystem

import mmtensor
from mmtensor import ManifestError, TensorDict
from mmtensor.manifest import (
    DENSE,
    JAGGED,
    META,
    NESTED,
    STRING,
    STRINGS,
    Entry,
    dump,
    files_of,
    name_of,
    owned,
    parse,
)

KINDS = (DENSE, JAGGED, NESTED, STRING, STRINGS)
# Keys that look like names of files, and parts that make them so.
PARTS = st.sampled_from(
    [
        *("a", "b", ".", "..", "/", "%", "%2E", "~", " ", "\\", "\0", "é", "\ud800", "x" * 250),
        *(".memmap", ".shape", ".offsets", "meta.json", "%7E", "A"),
    ]
)
KEYS = st.one_of(st.text(max_size=12), st.lists(PARTS, max_size=4).map("".join))


def entry(key, kind):
    """Return an entry as saving makes it."""
    shape = {DENSE: (2,), JAGGED: (2, 1)}.get(kind, ())
    dtype = "" if kind in (NESTED, STRING, STRINGS) else "float32"
    return Entry(key, kind, dtype, shape, name_of(key, kind), nbytes=8 * (kind == DENSE))


@given(st.lists(st.tuples(KEYS, st.sampled_from(KINDS)), unique_by=lambda pair: pair[0]))
def test_names_never_collide(pairs):
    """No two leaves of a container have a file or directory name in common."""
    names = [name for key, kind in pairs for name in files_of(entry(key, kind))]
    assert len(set(names)) == len(names)
    assert META not in names


@given(KEYS, st.sampled_from(KINDS))
def test_names_are_names(key, kind):
    """Every name of a file is one that a file system takes, and stays in its directory."""
    for name in files_of(entry(key, kind)):
        assert name not in ("", ".", "..")
        assert not set(name) & {"/", "\0", "\\"}
        assert len(os.fsencode(name)) <= 255


@given(st.dictionaries(KEYS, st.sampled_from(KINDS), max_size=6))
def test_round_trip(kinds):
    """What is written is read again, whatever the keys, in their order."""
    entries = [entry(key, kind) for key, kind in kinds.items()]
    manifest = parse(dump((2,), entries), "here")
    assert manifest.batch_size == (2,)
    assert manifest.entries == entries
    assert manifest.ours


@given(st.dictionaries(KEYS, st.sampled_from(KINDS), max_size=6))
def test_owned_names(kinds):
    """What a meta.json names is its files and directories and itself, and nothing else."""
    entries = [entry(key, kind) for key, kind in kinds.items()]
    files, directories = owned(dump((2,), entries))
    nested = (NESTED, STRING, STRINGS)
    assert files == {n for e in entries if e.kind not in nested for n in files_of(e)} | {META}
    assert directories == {e.file for e in entries if e.kind in nested}


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"text"', b"\xff", b"[" * 100_000])
def test_owned_of_nonsense(data):
    """A meta.json that cannot be read names nothing but itself."""
    assert owned(data) == ({META}, set())


@pytest.mark.parametrize(
    "key", ["a", "a b", "a/b", "..", ".", "", "a%b", 'q"', "é", "a.b", "x\ty", "C:x", "\x7f"]
)
def test_names_are_those_of_tensordict(key):
    """A key that needs no care of ours has the file name that tensordict gives it."""
    encoded = _encode_key_for_filesystem(key)
    assert name_of(key, DENSE) == encoded + ".memmap"
    assert name_of(key, NESTED) == encoded


# What is changed in a good list of ours -> the message, which names the leaf.
def _change(**changes):
    def change(top):
        top["_mmtensor"][1].update(changes)

    return change


def _head(**changes):
    def change(top):
        top["_mmtensor"][0].update(changes)

    return change


def _drop(name):
    def change(top):
        del top["_mmtensor"][1][name]

    return change


HOSTILE = {
    "file outside": (_change(file="../x.memmap"), "leaf 'x' .*plain name in the directory"),
    "absolute file": (_change(file="/etc/x.memmap"), "leaf 'x' .*plain name in the directory"),
    "parent": (_change(file=".."), "leaf 'x' .*plain name in the directory"),
    "backslash": (_change(file="..\\x.memmap"), "leaf 'x' .*plain name in the directory"),
    "null byte": (_change(file="x\0.memmap"), "leaf 'x' .*plain name in the directory"),
    "file is a number": (_change(file=3), "leaf 'x' .*plain name in the directory, got 3"),
    "no file": (_drop("file"), "leaf 'x' .*plain name in the directory, got None"),
    "meta.json": (_change(file="meta.json"), "leaf 'x' .*plain name in the directory"),
    "file of another leaf": (_change(file="y.memmap"), "leaf 'y' .*'y.memmap' is that of 'x'"),
    "negative shape": (_change(shape=[-1, 3]), "leaf 'x' .*list of non-negative integers"),
    "shape of floats": (_change(shape=[2.0, 3]), "leaf 'x' .*list of non-negative integers"),
    "shape of bools": (_change(shape=[True, 3]), "leaf 'x' .*list of non-negative integers"),
    "shape is text": (_change(shape="23"), "leaf 'x' .*list of non-negative integers"),
    "no shape": (_drop("shape"), "leaf 'x' .*list of non-negative integers, got None"),
    "overflow": (_change(shape=[2, 2**62]), "leaf 'x' .*at most 2\\*\\*63 - 1 bytes"),
    "overflow with zero": (_change(shape=[2, 2**62, 0]), "leaf 'x' .*at most 2\\*\\*63 - 1"),
    "huge": (_change(shape=[2, 10**30]), "leaf 'x' .*at most 2\\*\\*63 - 1 bytes"),
    "65 dimensions": (_change(shape=[2] + [1] * 64), "leaf 'x' .*at most 64 dimensions"),
    "unknown dtype": (_change(dtype="float33"), "leaf 'x' .*dtype 'float33' is unknown"),
    "code for dtype": (_change(dtype="O"), "leaf 'x' .*dtype 'O' is unknown"),
    "dtype is a list": (_change(dtype=["float32"]), "leaf 'x' .*is unknown"),
    "no dtype": (_drop("dtype"), "leaf 'x' .*dtype None is unknown"),
    "unknown kind": (_change(kind="pickle"), "leaf 'x' .*unknown kind, 'pickle'"),
    "kind is a list": (_change(kind=["dense"]), "leaf 'x' .*unknown kind"),
    "other batch": (_change(shape=[3, 2]), "leaf 'x' .*does not start with the batch size"),
    "too few dimensions": (_change(shape=[]), "leaf 'x' .*does not start with the batch size"),
    "larger than the file": (_change(shape=[2, 4]), "leaf 'x' .*32 bytes .*size is 24 bytes"),
    "smaller than the file": (_change(shape=[2, 2]), "leaf 'x' .*16 bytes .*size is 24 bytes"),
    "wider dtype": (_change(dtype="float64"), "leaf 'x' .*48 bytes .*size is 24 bytes"),
    "missing file": (_change(file="z.memmap"), "leaf 'x' .*'z.memmap' is missing"),
    "key is a number": (_change(key=1), "must give a key for every leaf"),
    "key twice": (_change(key="y"), "leaf 'y' .*its key is there twice"),
    "jagged without rows": (_change(kind="jagged", shape=[2]), "elements and dimensions"),
    "jagged without offsets": (
        _change(kind="jagged", shape=[2, 1]),
        "'x.shape.memmap' is missing",
    ),
    "nested is a file": (_change(kind="nested"), "leaf 'x' .*'x.memmap' is a symbolic link or a"),
    "string is a file": (_change(kind="string"), "leaf 'x' .*'x.memmap' is a symbolic link or a"),
    "a name that no file can have": (_change(file="\ud800.memmap"), "leaf 'x' .*plain name in"),
    "too long a name": (_change(file="x" * 300 + ".memmap"), "leaf 'x' .*plain name in the dir"),
    "huge batch": (_head(batch_size=[2**70]), "at most 2\\*\\*63 - 1 bytes, got"),
    "overflowing batch": (_head(batch_size=[2**62] * 4), "at most 2\\*\\*63 - 1 bytes, got"),
    "negative batch": (_head(batch_size=[-1]), "batch size must be a list of non-negative"),
    "batch of text": (_head(batch_size="2"), "batch size must be a list of non-negative"),
    "no batch": (_head(batch_size=None), "batch size must be a list of non-negative"),
    "other version": (_head(version=2), "version 2 of the format.*Upgrade mmtensor"),
    "no version": (_head(version=None), "must start its list with a version"),
    "empty list": (lambda top: top["_mmtensor"].clear(), "must start its list with a version"),
    "leaf is text": (lambda top: top["_mmtensor"].append("x"), "must give a key for every leaf"),
}


@pytest.fixture
def saved(tmp_path):
    """Save two leaves; return the directory."""
    data = {"x": torch.ones(2, 3), "y": torch.zeros(2)}
    TensorDict(data, [2]).memmap(tmp_path / "td")
    return tmp_path / "td"


def _rewrite(directory, change):
    path = directory / META
    top = json.loads(path.read_bytes())
    change(top)
    path.write_text(json.dumps(top))


@pytest.mark.parametrize("mode", ["r", "r+", "c", None])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_list(saved, unchanged, name, mode):
    """What cannot be is an error that names the leaf, and no file is touched."""
    change, message = HOSTILE[name]
    _rewrite(saved, change)
    with unchanged(), pytest.raises(ManifestError, match=message) as caught:
        TensorDict.load_memmap(saved, mode=mode)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[]", "must be a JSON object, got list"),
        (b"null", "must be a JSON object, got NoneType"),
        (b"{}", "holds a thing of no type"),
        (b'{"_type": "<class \'os.system\'>"}', "holds a system, which cannot be loaded"),
    ],
    ids=["empty", "cut", "bytes", "deep", "list", "null", "nothing", "type"],
)
def test_unreadable(saved, data, message):
    """A meta.json that is none is an error that names the directory."""
    (saved / META).write_bytes(data)
    with pytest.raises(ManifestError, match=message):
        TensorDict.load_memmap(saved)


@pytest.mark.parametrize("target", ["inside", "outside"])
def test_symbolic_link_as_leaf(saved, tmp_path, target):
    """A leaf whose file is a symbolic link is not followed."""
    other = (saved if target == "inside" else tmp_path) / "other"
    os.rename(saved / "x.memmap", other)
    (saved / "x.memmap").symlink_to(other)
    with pytest.raises(ManifestError, match="leaf 'x' .*'x.memmap' is a symbolic link"):
        TensorDict.load_memmap(saved)


def test_symbolic_link_as_nested(tmp_path):
    """A nested container whose directory is a symbolic link is not followed."""
    TensorDict({"n": {"x": torch.ones(1)}}).memmap(tmp_path / "td")
    os.rename(tmp_path / "td" / "n", tmp_path / "n")
    (tmp_path / "td" / "n").symlink_to(tmp_path / "n")
    with pytest.raises(ManifestError, match="leaf 'n' .*'n' is a symbolic link or a file"):
        TensorDict.load_memmap(tmp_path / "td")


def test_symbolic_link_as_meta(saved, tmp_path):
    """A meta.json that is a symbolic link is not followed."""
    os.rename(saved / META, tmp_path / META)
    (saved / META).symlink_to(tmp_path / META)
    with pytest.raises(ManifestError, match="meta.json must be a regular file"):
        TensorDict.load_memmap(saved)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [META, "x.memmap"])
def test_fifo(saved, name):
    """A FIFO in the place of a file is an error at once, not a wait for ever."""
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(ManifestError, match="regular file"):
        TensorDict.load_memmap(saved)


@pytest.mark.parametrize("name", [META, "x.memmap"])
def test_directory_as_file(saved, name):
    """A directory in the place of a file is an error."""
    (saved / name).unlink()
    (saved / name).mkdir()
    with pytest.raises(ManifestError, match="regular file"):
        TensorDict.load_memmap(saved)


def test_nested_deeper_than_any_path(tmp_path):
    """Containers nested without end are an error and no crash."""
    here = tmp_path / "td"
    data = dump((), [Entry("n", NESTED, file="n")])
    here.mkdir()
    at = os.open(here, os.O_RDONLY)
    for _ in range(300):
        fd = os.open(META, os.O_CREAT | os.O_WRONLY, dir_fd=at)
        os.write(fd, data)
        os.close(fd)
        os.mkdir("n", dir_fd=at)
        at, old = os.open("n", os.O_RDONLY, dir_fd=at), at
        os.close(old)
    os.close(at)
    with pytest.raises(ManifestError, match="nested more than 100 levels deep"):
        TensorDict.load_memmap(here)


def test_nested_batch_size(tmp_path):
    """A nested container with another batch size is an error that names it."""
    TensorDict({"n": {"x": torch.ones(2)}}, [2]).memmap(tmp_path / "td")
    _rewrite(tmp_path / "td" / "n", _head(batch_size=[]))
    with pytest.raises(ManifestError, match="leaf 'n' .*batch size .* does not start with"):
        TensorDict.load_memmap(tmp_path / "td")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"data": 3}, "leaf 's' .*must be a string or a list of strings"),
        ({"data": ["a", 3]}, "leaf 's' .*must be a string or a list of strings"),
        ({"data": {"a": 1}}, "leaf 's' .*must be a string or a list of strings"),
        ({"data": "pickle.pkl"}, None),
        ({}, "leaf 's' .*must be a string or a list of strings"),
        ({"data": ["a", "b"]}, "leaf 's' .*must be a string, got"),
    ],
    ids=["number", "mixed list", "object", "name of a pickle", "nothing", "list"],
)
def test_hostile_strings(tmp_path, data, message):
    """A string leaf holds text; whatever it says, nothing is executed or opened."""
    TensorDict({"s": "text"}, [2]).memmap(tmp_path / "td")
    (tmp_path / "td" / "s" / META).write_text(json.dumps(data))
    (tmp_path / "td" / "s" / "pickle.pkl").write_bytes(b"cos\nabort\n(tR.")
    if message is None:
        assert TensorDict.load_memmap(tmp_path / "td")["s"] == "pickle.pkl"
        return
    with pytest.raises(ManifestError, match=message):
        TensorDict.load_memmap(tmp_path / "td")


def test_list_of_other_length(tmp_path):
    """A list of strings must have as many as the batch has elements."""
    TensorDict({"s": ["a", "b"]}, [2]).memmap(tmp_path / "td")
    (tmp_path / "td" / "s" / META).write_text(json.dumps({"data": ["a"]}))
    with pytest.raises(ManifestError, match="leaf 's' .*has 1 strings for the batch size \\[2\\]"):
        TensorDict.load_memmap(tmp_path / "td")


JAGGED_DAMAGE = {
    "offsets too short": ("j.offsets.memmap", [0, 2], "24 bytes .*size is 16 bytes"),
    "offsets too long": ("j.offsets.memmap", [0, 2, 5, 5], "24 bytes .*size is 32 bytes"),
    "offsets not from 0": ("j.offsets.memmap", [1, 2, 5], "from 0 upwards, got 1 to 5"),
    "negative end": ("j.offsets.memmap", [0, 2, -5], "from 0 upwards, got 0 to -5"),
    "huge end": ("j.offsets.memmap", [0, 2, 2**62], "from 0 upwards"),
    "beyond the values": ("j.offsets.memmap", [0, 2, 6], "24 bytes .*size is 20 bytes"),
    "shapes too short": ("j.shape.memmap", [2], "16 bytes .*size is 8 bytes"),
    "shapes too long": ("j.shape.memmap", [2, 3, 4], "16 bytes .*size is 24 bytes"),
    "values too long": ("j.memmap", [0] * 8, "20 bytes .*size is 64 bytes"),
}


@pytest.mark.parametrize("name", JAGGED_DAMAGE)
def test_damaged_jagged_leaf(tmp_path, name):
    """A jagged leaf whose files do not fit together is an error that names it and both sizes."""
    j = mmtensor.JaggedTensor.from_tensors([torch.ones(2), torch.ones(3)])
    TensorDict({"j": j}, [2]).memmap(tmp_path / "td")
    file, numbers, message = JAGGED_DAMAGE[name]
    (tmp_path / "td" / file).write_bytes(torch.tensor(numbers).numpy().tobytes())
    with pytest.raises(ManifestError, match=f"leaf 'j' .*{message}"):
        TensorDict.load_memmap(tmp_path / "td")


@pytest.mark.parametrize("file", ["j.memmap", "j.shape.memmap", "j.offsets.memmap"])
def test_missing_part_of_jagged_leaf(tmp_path, file):
    """A jagged leaf without one of its files is an error that names both."""
    j = mmtensor.JaggedTensor.from_tensors([torch.ones(2), torch.ones(3)])
    TensorDict({"j": j}, [2]).memmap(tmp_path / "td")
    (tmp_path / "td" / file).unlink()
    with pytest.raises(ManifestError, match=f"leaf 'j' .*{file!r} is missing"):
        TensorDict.load_memmap(tmp_path / "td")


# --- what tensordict writes ----------------------------------------------------------------

THEIRS = {
    "_type": "<class 'tensordict._td.TensorDict'>",
    "shape": [2],
    "device": "cpu",
    "x": {"device": "cpu", "shape": [2, 3], "dtype": "torch.float32", "is_nested": False},
}
HOSTILE_THEIRS = {
    "unknown dtype": ({"dtype": "torch.load"}, "leaf 'x' .*dtype 'load' is unknown"),
    "no dtype": ({"dtype": None}, "leaf 'x' .*dtype None is unknown"),
    "negative": ({"shape": [2, -3]}, "leaf 'x' .*list of non-negative integers"),
    "overflow": ({"shape": [2, 2**62]}, "leaf 'x' .*at most 2\\*\\*63 - 1 bytes"),
    "other batch": ({"shape": [3, 2]}, "leaf 'x' .*does not start with the batch size"),
    "other size": ({"shape": [2, 4]}, "leaf 'x' .*32 bytes .*size is 24 bytes"),
    "other class": ({"type": "Popen"}, "leaf 'x' .*it is a Popen"),
    "lazy stack": ({"type": "LazyStackedTensorDict"}, "leaf 'x' .*LazyStackedTensorDict"),
    "nested tensor": ({"is_nested": True, "shape": [2, 1]}, "'x.shape.memmap' is missing"),
}


@pytest.mark.parametrize("name", HOSTILE_THEIRS)
def test_hostile_entry_of_tensordict(tmp_path, name):
    """What a meta.json of tensordict says is checked just so."""
    top = copy.deepcopy(THEIRS)
    changes, message = HOSTILE_THEIRS[name]
    top["x"].update(changes)
    (tmp_path / META).write_text(json.dumps(top))
    (tmp_path / "x.memmap").write_bytes(bytes(24))
    with pytest.raises(ManifestError, match=message):
        TensorDict.load_memmap(tmp_path)


def test_key_of_tensordict_that_no_file_can_have(tmp_path):
    """It is named, before it is looked for."""
    top = {name: value for name, value in THEIRS.items() if name != "x"} | {"\ud800": THEIRS["x"]}
    (tmp_path / META).write_text(json.dumps(top))
    with pytest.raises(ManifestError, match=r"leaf '\\ud800' .*no file can have this name"):
        TensorDict.load_memmap(tmp_path)


@pytest.mark.parametrize("key", ["../x", "/x", "..", "a/../../x"])
def test_key_of_tensordict_that_is_a_path(tmp_path, key):
    """A key of tensordict that would lead out of the directory is looked for inside."""
    top = {name: value for name, value in THEIRS.items() if name != "x"} | {key: THEIRS["x"]}
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    (here / META).write_text(json.dumps(top))
    (tmp_path / "x.memmap").write_bytes(bytes(24))
    (tmp_path / "a" / "x.memmap").write_bytes(bytes(24))
    with pytest.raises(ManifestError, match="is missing"):
        TensorDict.load_memmap(here)


def test_old_names_of_tensordict(tmp_path):
    """Files that older programs named by the key as it is are found."""
    top = {name: value for name, value in THEIRS.items() if name != "x"}
    top |= {"a b": THEIRS["x"], "n 1": {"type": "TensorDict"}}
    (tmp_path / META).write_text(json.dumps(top))
    (tmp_path / "a b.memmap").write_bytes(torch.arange(6.0).numpy().tobytes())
    (tmp_path / "n 1").mkdir()
    (tmp_path / "n 1" / META).write_text(json.dumps(THEIRS))
    (tmp_path / "n 1" / "x.memmap").write_bytes(bytes(24))
    td = TensorDict.load_memmap(tmp_path)
    assert td["a b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert td["n 1", "x"].tolist() == [[0] * 3] * 2
