"""The three files of a jagged tensor: bytes, opening, checking, replacing, size."""

import copy
import ctypes
import errno
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import descriptors, few_descriptors, settled_descriptors, snapshot

import mmtensor
from mmtensor import (
    JaggedTensor,
    JaggedWriter,
    MemoryMappedTensor,
    ShapeError,
    SizeError,
    TensorDict,
    jagged_saving,
    rawfile,
)

NAMES = ("x.memmap", "x.offsets.memmap", "x.shape.memmap")
# torch says so of every nested tensor in the strided layout.
PROTOTYPE = "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
MODES = ["r", "r+", "c"]
# 2-D elements of int32: shapes (2, 1), (0, 3), (1, 3).
VALUES = np.array([1, 2, 3, 4, 5], np.int32)
OFFSETS = np.array([0, 2, 2, 5])
TABLE = np.array([[2, 1], [0, 3], [1, 3]])
EXPECTED = [[[1], [2]], [], [[3, 4, 5]]]


def write(directory, values=VALUES, offsets=OFFSETS, table=TABLE):
    """Write the three files with NumPy alone; None leaves one out."""
    for name, array in zip(NAMES, (values, offsets, table), strict=True):
        if array is not None:
            np.asarray(array).tofile(directory / name)
    return directory / NAMES[0]


def open_it(directory, **keywords):
    """Open what `write` wrote."""
    return JaggedTensor.from_filename(directory / NAMES[0], "int32", **keywords)


def test_golden_bytes(tmp_path):
    """The files hold values, offsets and shapes, and nothing else."""
    elements = [torch.tensor(x, dtype=torch.int32).view(*s) for x, s in
                (([1, 2], (2, 1)), ([], (0, 3)), ([3, 4, 5], (1, 3)))]  # fmt: skip
    JaggedTensor.from_tensors(elements, filename=tmp_path / "x.memmap")
    assert sorted(os.listdir(tmp_path)) == sorted(NAMES)
    values, offsets, table = ((tmp_path / name).read_bytes() for name in NAMES)
    assert values == struct.pack("=5i", 1, 2, 3, 4, 5)
    assert offsets == struct.pack("=4q", 0, 2, 2, 5)
    assert table == struct.pack("=6q", 2, 1, 0, 3, 1, 3)


def test_golden_bytes_without_elements(tmp_path):
    """Without elements there is one offset, and behind no shapes what tells the dimensions."""
    for ndim, expected in ((1, b""), (3, struct.pack("=q", -4)), (0, struct.pack("=q", -1))):
        name = tmp_path / f"{ndim}.memmap"
        JaggedTensor.zeros(np.empty((0, ndim), np.int64), filename=name)
        assert name.read_bytes() == b""
        assert (tmp_path / f"{ndim}.offsets.memmap").read_bytes() == bytes(8)
        assert (tmp_path / f"{ndim}.shape.memmap").read_bytes() == expected
        j = JaggedTensor.from_filename(name, "float32", validate=True)
        assert (len(j), j.ndim, j.shapes.shape) == (0, ndim, (0, ndim))


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("x.memmap", ["x.offsets.memmap", "x.shape.memmap"]),
        ("x.bin", ["x.offsets.bin", "x.shape.bin"]),
        ("x", ["x.offsets", "x.shape"]),
        ("a.b.memmap", ["a.b.offsets.memmap", "a.b.shape.memmap"]),
        ("größe.u8", ["größe.offsets.u8", "größe.shape.u8"]),
    ],
)
@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_names(name, beside, kind, tmp_path, monkeypatch):
    """The side files have the name of the values with a word before its suffix."""
    monkeypatch.chdir(tmp_path)
    JaggedTensor.from_tensors([torch.ones(2)], filename=kind(name))
    assert sorted(os.listdir()) == sorted([name, *beside])
    j = JaggedTensor.from_filename(kind(name), "float32")
    monkeypatch.chdir("/")
    assert j.filename == str(tmp_path / name)
    assert j[0].tolist() == [1, 1]


@pytest.mark.parametrize("mode", [*MODES, None])
def test_modes(mode, tmp_path):
    """The mode holds for all three files; in "r" every write raises, in "c" it stays private."""
    write(tmp_path)
    j = open_it(tmp_path, mode=mode, validate=True)
    assert j.tolist() == EXPECTED
    effective = mode or "r+"
    assert {j.mode, j[0].mode, j.offsets.mode, j.shapes.mode, j[1:].mode} == {effective}
    before = [(tmp_path / name).read_bytes() for name in NAMES]
    new = torch.tensor([[9], [8]], dtype=torch.int32)
    if mode == "r":
        for write_it in (
            lambda: j.__setitem__(0, new),
            lambda: j.fill_(0),
            lambda: j[::2].fill_(0),
            lambda: j[0].fill_(0),
            lambda: j.offsets.add_(1),
            lambda: j.shapes.add_(1),
        ):
            with pytest.raises(RuntimeError, match='was opened with mode "r"'):
                write_it()
        assert j.tolist() == EXPECTED
        assert not np.asarray(j.values).flags.writeable
        assert not np.asarray(j.offsets).flags.writeable
    else:
        j[0] = new
        assert j[0].tolist() == [[9], [8]]
    changed = [(tmp_path / name).read_bytes() for name in NAMES] != before
    assert changed == (effective == "r+")


def test_the_default_mode_of_files_that_may_only_be_read(run, public_directory):
    """Without a mode, files that this user may not write to are opened with "c"."""
    write(public_directory)
    for name in NAMES:
        (public_directory / name).chmod(0o644)
    program = """
        import os, sys
        import mmtensor, torch
        from mmtensor import JaggedTensor
        JaggedTensor.zeros([[1]])[0]  # torch finds its home before the user changes
        os.setuid(65534)
        j = JaggedTensor.from_filename(sys.argv[1] + "/x.memmap", "int32")
        print(j.mode, j.offsets.mode, j.tolist())
        try:
            JaggedTensor.from_filename(sys.argv[1] + "/x.memmap", "int32", mode="r+")
        except PermissionError as error:
            print("refused", error.filename)
    """
    printed = run(program, public_directory)
    assert printed == f"c c {EXPECTED}\nrefused {public_directory}/x.offsets.memmap"


def test_what_lies_behind_the_offsets_does_not_count(tmp_path):
    """Values and shapes may be longer than the offsets say: an append that did not finish."""
    table = np.concatenate([TABLE, [[7, 7]]])
    write(tmp_path, np.concatenate([VALUES, [0] * 20]).astype("i4"), OFFSETS, table)
    j = open_it(tmp_path, validate=True)
    assert j.tolist() == EXPECTED
    assert len(j.values) == 5
    with open(tmp_path / NAMES[1], "ab") as file:
        file.write(b"\x01\x02\x03")  # a piece of an offset
    assert open_it(tmp_path).tolist() == EXPECTED


@pytest.mark.parametrize("mode", MODES)
def test_shapes_can_be_given(mode, tmp_path):
    """With shapes, the file of the values alone is opened, as another program wrote it."""
    path = write(tmp_path, offsets=None, table=None)
    for table in (TABLE, torch.from_numpy(TABLE), TABLE.tolist()):
        j = JaggedTensor.from_filename(path, "int32", table, mode)
        assert j.tolist() == EXPECTED
        assert j.mode == mode
    assert os.listdir(tmp_path) == ["x.memmap"]


WRONG = {
    "shapes do not fit the file": (
        {"offsets": None, "table": None}, {"shapes": [[3], [3]]},
        "must have 24 bytes for shape",
    ),
    "negative sizes given": (
        {"offsets": None, "table": None}, {"shapes": [[7], [-2]]}, "non-negative",
    ),
    "values too short": ({"values": VALUES[:4]}, {}, "at least 20 bytes for the 5 values"),
    "no values": ({"values": VALUES[:0]}, {}, "its size is 0 bytes"),
    "shapes too short": ({"table": TABLE[:2]}, {}, "do not fit the offsets"),
    "no shapes": ({"table": TABLE[:0]}, {}, "do not fit the offsets"),
    "another number of dimensions": (
        {"table": TABLE[:, 0].copy()}, {"validate": True}, "element 2 is damaged",
    ),
    "another number of rows": (
        {"table": [[5, 5], [2, 1], [0, 3], [1, 3]]}, {}, "do not fit the offsets",
    ),
    "no offsets at all": ({"offsets": OFFSETS[:0]}, {}, "its size is 0 bytes"),
    "offsets that start elsewhere": (
        {"offsets": OFFSETS + 1}, {}, "the first is 1 and the last is 6",
    ),
    "offsets that end below zero": (
        {"offsets": [0, 2, 2, -5]}, {}, "the first is 0 and the last is -5",
    ),
    "offsets beyond the data": ({"offsets": [0, 2, 2, 6]}, {}, "at least 24 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("mode", [*MODES, None])
def test_wrong_files(case, mode, tmp_path, unchanged):
    """Files that contradict each other raise a ValueError that says what is wrong."""
    files, keywords, message = WRONG[case]
    write(tmp_path, **files)
    with unchanged(), pytest.raises(ValueError, match=message):
        open_it(tmp_path, mode=mode, **keywords)


DAMAGED = {
    "offsets go backwards": ({"offsets": [0, 3, 2, 5]}, 1, "offsets go backwards, from 3 to 2"),
    "offsets beyond the values": ({"offsets": [0, 2, 9, 5]}, 1, "lie beyond the 5 values"),
    "negative offsets": ({"offsets": [0, -2, 2, 5]}, 1, "lie beyond the 5 values"),
    "negative sizes": (
        {"table": [[2, 1], [0, 3], [-1, -3]]}, 2, r"shape \(-1, -3\) has a negative size",
    ),
    "one negative size": ({"table": [[2, 1], [0, -3], [1, 3]]}, 1, r"shape \(0, -3\) has a neg"),
    "another product": (
        {"table": [[2, 1], [1, 3], [1, 3]]}, 1, r"shape \(1, 3\) does not have the 0 values",
    ),
    "a product that overflows": (
        {"table": [[2, 1], [2**32, 2**32], [1, 3]]}, 1, "does not have the 0 values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_elements(case, tmp_path):
    """An element whose offsets and shape do not fit raises when read, gathered or validated."""
    files, number, message = DAMAGED[case]
    write(tmp_path, **files)
    j = open_it(tmp_path)
    with pytest.raises(ValueError, match=f"element {number} is damaged.*{message}"):
        j[number]
    with pytest.raises(ValueError, match="is damaged"):
        j[[0, number]]
    with pytest.raises(ValueError, match="is damaged"):
        open_it(tmp_path, validate=True)


def test_validation_finds_one_damaged_element_among_many(tmp_path):
    """``validate=True`` reads all offsets and shapes, not only the first and last ones."""
    count = 200_000
    lengths = np.full(count, 2)
    lengths[150_000] = 3
    values = np.zeros(2 * count, np.uint8)
    write(tmp_path, values, np.arange(0, 2 * count + 1, 2), lengths)
    path = tmp_path / NAMES[0]
    assert len(JaggedTensor.from_filename(path, "uint8")) == count
    with pytest.raises(ValueError, match="element 150000 is damaged"):
        JaggedTensor.from_filename(path, "uint8", validate=True)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_files(missing, tmp_path, unchanged):
    """Without one of the three files there is a FileNotFoundError that names it."""
    write(tmp_path)
    (tmp_path / NAMES[missing]).unlink()
    with unchanged(), pytest.raises(FileNotFoundError, match=NAMES[missing]) as raised:
        open_it(tmp_path)
    assert raised.value.filename == str(tmp_path / NAMES[missing])
    if missing:
        assert "pass the shapes" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("int33",), TypeError, "dtype must be"),
        (("int32", None, "w"), ValueError, "mode must be"),
        (("float64",), ValueError, "at least 40 bytes for the 5 values of float64"),
        (("int32", [[5]], "rw"), ValueError, "mode must be"),
    ],
)
def test_wrong_arguments(arguments, error, message, tmp_path, unchanged):
    """An unknown dtype or mode, or a dtype that is too large, raises."""
    path = write(tmp_path)
    with unchanged(), pytest.raises(error, match=message):
        JaggedTensor.from_filename(path, *arguments)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_existing_files_are_kept(number, tmp_path, unchanged):
    """Any of the three files that exists is a FileExistsError naming it; nothing is written."""
    (tmp_path / NAMES[number]).write_bytes(b"precious")
    for make in (
        lambda: JaggedTensor.from_tensors([torch.ones(1)], filename=tmp_path / "x.memmap"),
        lambda: JaggedTensor.zeros([[1]], filename=tmp_path / "x.memmap"),
        lambda: JaggedTensor.from_strings(["a"], filename=tmp_path / "x.memmap"),
        lambda: mmtensor.cat([JaggedTensor.zeros([[1]])], tmp_path / "x.memmap"),
        lambda: JaggedWriter(tmp_path / "x.memmap", "float32"),
    ):
        with unchanged(), pytest.raises(FileExistsError, match="pass existsok=True") as raised:
            make()
        assert raised.value.filename == str(tmp_path / NAMES[number])


def test_a_symbolic_link_is_no_target(tmp_path, unchanged):
    """A symbolic link in the place of one of the files is refused."""
    write(tmp_path)
    (tmp_path / "y.shape.memmap").symlink_to(tmp_path / NAMES[2])
    with unchanged(), pytest.raises(RuntimeError, match="must not be a symbolic link"):
        JaggedTensor.zeros([[1]], filename=tmp_path / "y.memmap", existsok=True)


def test_replacing_keeps_the_old_one_for_its_readers(tmp_path):
    """``existsok=True`` replaces all three files; who has the old ones open keeps them."""
    write(tmp_path)
    old = open_it(tmp_path, mode="r")
    new = JaggedTensor.from_tensors(
        [torch.tensor([7], dtype=torch.int32)], filename=tmp_path / NAMES[0], existsok=True
    )
    assert old.tolist() == EXPECTED
    assert new.tolist() == open_it(tmp_path).tolist() == [[7]]
    assert sorted(os.listdir(tmp_path)) == sorted(NAMES)


@pytest.mark.parametrize("most", [1, 7, 100, 10**9])
def test_short_writes(most, tmp_path, monkeypatch):
    """If the system writes less than it was given, the rest follows, from the right place."""
    calls = []

    def pwritev(fd, vectors, count, position):
        calls.append(count)
        table = (ctypes.c_uint64 * (2 * count)).from_address(vectors)
        data = b"".join(ctypes.string_at(table[2 * i], table[2 * i + 1]) for i in range(count))
        return os.pwrite(fd, data[:most], position)

    monkeypatch.setattr(rawfile, "pwritev", pwritev)
    elements = [torch.full((n % 13,), n % 251, dtype=torch.uint8) for n in range(1500)]
    JaggedTensor.from_tensors(elements, filename=tmp_path / NAMES[0])
    assert (tmp_path / NAMES[0]).read_bytes() == b"".join(bytes(x.tolist()) for x in elements)
    assert max(calls) == 1024


def test_a_failed_replacement_changes_nothing(tmp_path, unchanged):
    """If the elements cannot be written, the old files are what they were."""
    write(tmp_path)
    with unchanged(), pytest.raises(TypeError, match="element 1"):
        JaggedTensor.from_tensors([torch.ones(1), 3], filename=tmp_path / NAMES[0], existsok=True)


@pytest.mark.usefixtures("mounting")
def test_a_full_disk(run, tmp_path):
    """Without room there is an ENOSPC at creation, and no file."""
    program = """
        import errno, os, subprocess, sys
        import torch, mmtensor
        from mmtensor import JaggedTensor, JaggedWriter
        directory = sys.argv[1]
        command = ["mount", "-t", "tmpfs", "-o", "size=1M", "none", directory]
        subprocess.run(command, check=True)
        big = [torch.ones(1000) for _ in range(500)]
        for make in (
            lambda: JaggedTensor.from_tensors(big, filename=directory + "/x"),
            lambda: JaggedTensor.zeros([[1000]] * 500, filename=directory + "/x"),
        ):
            try:
                make()
            except OSError as error:
                print(error.errno == errno.ENOSPC, os.listdir(directory))
        with open(directory + "/filler", "wb") as file:
            file.write(bytes(100_000))
        writer = JaggedWriter(directory + "/w", "float32")
        try:
            while True:
                writer.append(big[0])
                writer.flush()
        except OSError as error:
            print(error.errno == errno.ENOSPC)
        j = JaggedTensor.from_filename(directory + "/w", "float32", validate=True)
        print(len(j) == len(writer) - 1 and len(j) > 200, bool((j.values == 1).all()))
        os.unlink(directory + "/filler")
        writer.append(big[0])
        writer.close()
        again = JaggedTensor.from_filename(directory + "/w", "float32", validate=True)
        print(len(again) == len(j) + 2, bool((again.values == 1).all()))
    """
    printed = run(program, tmp_path, private_mounts=True)
    assert printed.split("\n") == ["True []", "True []", "True", "True True", "True True"]


def test_a_reader_never_mixes_versions(tmp_path):
    """Who opens while another thread replaces gets one version whole, or a clear error."""
    path = tmp_path / NAMES[0]
    versions = [
        [torch.full((length, 2), number, dtype=torch.int32) for length in range(number % 7)]
        for number in range(1, 200)
    ]
    JaggedTensor.from_tensors(versions[0], filename=path)
    done = threading.Event()

    def replace():
        for elements in versions:
            JaggedTensor.from_tensors(elements, filename=path, existsok=True)
        done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    seen = 0
    while not done.is_set():
        j = JaggedTensor.from_filename(path, "int32", mode="r", validate=True)
        numbers = set(j.values.tolist())
        assert len(numbers) <= 1
        for number in numbers:
            assert len(j) == number % 7
        seen += 1
    thread.join()
    assert seen > 0
    assert open_it(tmp_path).tolist() == [x.tolist() for x in versions[-1]]


@pytest.mark.parametrize("step", range(5))
def test_after_a_crash_while_replacing(step, tmp_path, run):
    """Killed before any step of replacing, there is the old tensor, the new one, or none."""
    write(tmp_path)
    program = """
        import os, sys
        import torch
        from mmtensor import JaggedTensor
        step, count = int(sys.argv[2]), 0
        def counted(function):
            def call(*args, **kwargs):
                global count
                if count == step:
                    os._exit(0)
                count += 1
                return function(*args, **kwargs)
            return call
        JaggedTensor.zeros([[1]])
        # Removing the old offsets, and giving three new files their names.
        os.unlink, os.replace = counted(os.unlink), counted(os.replace)
        elements = [torch.tensor([[7, 7]], dtype=torch.int32)]
        JaggedTensor.from_tensors(elements, filename=sys.argv[1], existsok=True)
        print(count)
    """
    printed = run(program, tmp_path / NAMES[0], step)
    assert printed == ("4" if step == 4 else "")
    if step in (0, 4):
        expected = EXPECTED if step == 0 else [[[7, 7]]]
        assert open_it(tmp_path, validate=True).tolist() == expected
    else:
        with pytest.raises(FileNotFoundError, match="offsets"):
            open_it(tmp_path)


def test_opening_holds_no_descriptor(tmp_path):
    """A jagged tensor of files keeps no descriptor open, in any mode."""
    write(tmp_path)
    before = settled_descriptors()
    kept = [open_it(tmp_path, mode=mode) for mode in MODES]
    assert descriptors() == before
    for _ in range(3):
        with pytest.raises(ValueError, match="at least 40 bytes"):
            JaggedTensor.from_filename(tmp_path / NAMES[0], "float64")
    assert descriptors() == before
    assert len(kept) == 3


def test_one_block_holds_it_all():
    """An anonymous jagged tensor holds one descriptor, whatever it consists of."""
    before = settled_descriptors()
    kept = [JaggedTensor.zeros([[1], [2]]) for _ in range(10)]
    assert descriptors() == before + 10
    del kept
    assert descriptors() == before


# --- scale -----------------------------------------------------------------------------


def test_beyond_two_to_the_31(tmp_path):
    """Elements of (2**30, 3) and (4, 5) on a sparse file: the last one is read (case 15)."""
    total = 3 * 2**30 + 20
    path = write(tmp_path, [], [0, 3 * 2**30, total], [[2**30, 3], [4, 5]])
    os.truncate(path, total)
    with open(path, "r+b") as file:
        file.seek(3 * 2**30)
        file.write(bytes(range(20)))
    for j in (
        JaggedTensor.from_filename(path, "uint8", mode="r", validate=True),
        MemoryMappedTensor.from_filename(
            path, torch.uint8, torch.tensor([[2**30, 3], [4, 5]]), mode="r"
        ),
    ):
        assert j[1].tolist() == np.arange(20).reshape(4, 5).tolist()
        assert j[[1]].values.tolist() == list(range(20))
        assert j[0].shape == (2**30, 3)
        assert j[0][-1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_beyond_four_gibibytes(mode, tmp_path):
    """Elements behind 4 GiB of float64 are read, in every mode, and written where that is so."""
    sizes = [[2**30, 1], [5, 2], [2**20, 1]]
    j = JaggedTensor.empty(
        sizes, dtype="float64", filename=tmp_path / "x.memmap", preallocate=False
    )
    j[1] = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    again = JaggedTensor.from_filename(tmp_path / "x.memmap", "float64", mode=mode)
    assert again[1].tolist() == np.arange(10).reshape(5, 2).tolist()
    assert again[1:][[0]].values.tolist() == list(range(10))
    assert (again.nbytes, again.offsets[-1].item()) == (8 * (2**30 + 10 + 2**20), again.numel())
    if mode != "r":
        again[1][0, 0] = -1
        assert again[1][0, 0] == -1
        assert j[1][0, 0] == (-1 if mode == "r+" else 0)


def test_ten_million_elements(tmp_path):
    """Ten million elements open without being read; any element and any slice is at hand."""
    count = 10_000_000
    lengths = np.arange(count) % 4
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    path = write(tmp_path, np.arange(offsets[-1]).astype(np.uint8), offsets, lengths)
    j = JaggedTensor.from_filename(path, "uint8", mode="r")
    assert len(j) == count
    for i in (0, 1, 7, 5_000_003, count - 1):
        expected = np.arange(offsets[i], offsets[i + 1]).astype(np.uint8)
        assert j[i].tolist() == expected.tolist()
    assert j[5_000_000:][3].tolist() == j[5_000_003].tolist()
    ids = np.random.default_rng(0).integers(0, count, 100_000)
    got = j[ids]
    assert np.array_equal(np.asarray(got.shapes)[:, 0], lengths[ids])
    assert torch.equal(got[99_999], j[int(ids[-1])])
    assert np.asarray(got.values).sum(dtype=int) == sum(j[int(i)].sum().item() for i in ids)


# --- the peer --------------------------------------------------------------------------


@pytest.mark.filterwarnings(PROTOTYPE)
def test_files_that_tensordict_wrote(tmp_path):
    """A nested tensor that tensordict saved opens with the shapes that it wrote."""
    tensordict = pytest.importorskip("tensordict")
    elements = [torch.rand(2, 3), torch.rand(4, 1), torch.rand(0, 2)]
    nested = torch.nested.nested_tensor(elements, layout=torch.strided)
    tensordict.TensorDict({"x": nested}, [3]).memmap(tmp_path / "td")
    assert (tmp_path / "td" / "x.shape.memmap").exists()
    table = np.fromfile(tmp_path / "td" / "x.shape.memmap", np.int64).reshape(3, 2)
    j = JaggedTensor.from_filename(tmp_path / "td" / "x.memmap", "float32", table, mode="r")
    torch.testing.assert_close(j, elements, rtol=0, atol=0)


@pytest.mark.filterwarnings(PROTOTYPE)
def test_files_that_tensordict_reads(tmp_path):
    """Our values and shapes are what tensordict expects of a nested tensor."""
    tensordict = pytest.importorskip("tensordict")
    elements = [torch.rand(2, 3), torch.rand(4, 1), torch.rand(1, 2)]
    nested = torch.nested.nested_tensor(
        [torch.zeros_like(x) for x in elements], layout=torch.strided
    )
    tensordict.TensorDict({"x": nested}, [3]).memmap(tmp_path / "td")
    JaggedTensor.from_tensors(elements, filename=tmp_path / "td" / "x.memmap", existsok=True)
    loaded = tensordict.TensorDict.load_memmap(tmp_path / "td")["x"]
    torch.testing.assert_close(list(loaded.unbind(0)), elements, rtol=0, atol=0)
    table = MemoryMappedTensor.from_filename(
        tmp_path / "td" / "x.shape.memmap", torch.int64, (3, 2)
    )
    theirs = tensordict.MemoryMappedTensor.from_filename(
        tmp_path / "td" / "x.memmap", torch.float32, torch.as_tensor(np.asarray(table))
    )
    torch.testing.assert_close(list(theirs.unbind(0)), elements, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("file", "position", "number"),
    [
        ("shape", 1, 5),
        ("shape", 1, -3),
        ("offsets", 2, 10**12),
        ("offsets", 2, -5),
        ("offsets", 2, 4),
        ("offsets", 2, 2**63 - 1),
    ],
)
@pytest.mark.parametrize("part", [slice(None), slice(2), slice(2, 5), slice(1, 4), slice(0, 6, 2)])
def test_damage_is_not_copied(tmp_path, file, position, number, part):
    """What copies all elements names the damaged one; the others stay what they are."""
    path = tmp_path / "x.memmap"
    JaggedTensor.from_tensors([torch.full((3,), float(n)) for n in range(6)], filename=path)
    table = np.fromfile(tmp_path / f"x.{file}.memmap", np.int64)
    table[position] = number
    table.tofile(tmp_path / f"x.{file}.memmap")
    j = JaggedTensor.from_filename(path, torch.float32)[part]
    expected = [float(n) for n in range(6)][part]

    def into_writer():
        with JaggedWriter(tmp_path / "w.memmap", torch.float32, existsok=True) as writer:
            try:
                writer.extend(j)
            finally:
                assert len(writer) in (0, len(j))
        return JaggedTensor.from_filename(tmp_path / "w.memmap", torch.float32)

    copies = {
        "cat": lambda: mmtensor.cat([j]),
        "writer": into_writer,
        "from_tensors": lambda: JaggedTensor.from_tensors(j),
        "memmap": lambda: TensorDict({"j": j}, [len(j)]).memmap(tmp_path / "td")["j"],
        "share_memory_": lambda: TensorDict({"j": j}, [len(j)]).share_memory_()["j"],
        "to_nested": lambda: j.to_nested().unbind(),
        "strided": lambda: j.to_nested(torch.strided).unbind(),
        "to_padded": j.to_padded,
        "clone": lambda: copy.deepcopy(j),
        "ids": lambda: j[list(range(len(j)))],
        "to": lambda: j.to(torch.float64),
        "tolist": j.tolist,
    }
    damaged = False
    try:
        assert [one.tolist() for one in j] == [[value] * 3 for value in expected]
    except SizeError:
        damaged = True
    for name, make in copies.items():
        if damaged:
            message = r"element \d is damaged|must be non-negative, got .* for element \d"
            with pytest.raises((SizeError, ShapeError), match=message):
                pytest.fail(f"{name} gave {make()}")
        else:
            assert [list(map(float, one)) for one in make()] == [[value] * 3 for value in expected]


@pytest.mark.parametrize("append", [False, True])
def test_a_writer_without_descriptors(tmp_path, append):
    """A writer for which there are too few descriptors keeps none of them."""
    path = tmp_path / "x.memmap"
    JaggedWriter(path, "uint8").close()
    before = descriptors()
    failures = 0
    for free in range(12):
        with few_descriptors(free):
            try:
                JaggedWriter(path, "uint8", append=append, existsok=not append).close()
            except OSError as error:
                failures += error.errno == errno.EMFILE
    assert 5 <= failures < 12
    assert descriptors() == before
    assert len(JaggedTensor.from_filename(path, "uint8")) == 0


def test_a_full_disk_is_named_after_the_file(tmp_path, monkeypatch):
    """Of the three files that are written side by side the one without room is named."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, function in (("x.memmap", "write_chunks"), ("x.offsets.memmap", "write_all")):
        with monkeypatch.context() as patch:
            patch.setattr(jagged_saving, function, full)
            with pytest.raises(OSError, match="No space left") as caught:
                JaggedTensor.from_tensors([torch.ones(2)], filename=tmp_path / "x.memmap")
        assert caught.value.filename == str(tmp_path / name)
        assert list(tmp_path.iterdir()) == []


def test_replacing_without_room_for_a_name(tmp_path, monkeypatch):
    """Where the new files cannot get names, the old ones stay."""
    path = tmp_path / "x.memmap"
    JaggedTensor.from_tensors([torch.ones(2)], filename=path)
    before = snapshot(tmp_path)
    calls = []
    link = rawfile.link_descriptor

    def full(fd, name):
        calls.append(name)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        link(fd, name)

    monkeypatch.setattr(rawfile, "link_descriptor", full)
    with pytest.raises(OSError, match="No space left"):
        JaggedTensor.from_tensors([torch.zeros(3)], filename=path, existsok=True)
    assert snapshot(tmp_path) == before
    assert JaggedTensor.from_filename(path, torch.float32).tolist() == [[1, 1]]
