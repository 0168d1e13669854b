"""Wrong input: the error says what is wrong, and no file is created, grown or changed."""

import os
import re
import socket

import numpy as np
import pytest
import torch
from conftest import descriptors, mapped, snapshot

import mmtensor
from mmtensor import MemoryMappedTensor as M

MODES = ["r", "r+", "c", None]


@pytest.fixture
def directory(tmp_path):
    """Return a directory with a file of 40 bytes, and things that are no files."""
    np.arange(10, dtype=np.float32).tofile(tmp_path / "x")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    return tmp_path


def opening(name, dtype="f4", shape=10, **keywords):
    """Return the two ways to open a file with these arguments."""
    return [
        lambda d, mode: mmtensor.open_array(d / name, dtype, shape, mode=mode, **keywords),
        lambda d, mode: M.from_filename(d / name, dtype, shape, mode=mode, **keywords),
    ]


# What is opened, the builtin exception, and what its text says.
READING = {
    "missing file": (opening("y"), FileNotFoundError, r"No such file.*/y'"),
    "missing directory": (opening("z/y"), FileNotFoundError, r"No such file.*z/y'"),
    "file as a directory": (opening("x/y"), NotADirectoryError, r"Not a directory.*x/y'"),
    "directory": (opening("directory"), IsADirectoryError, "expected a regular file, got a direc"),
    "fifo": (opening("fifo"), ValueError, "must be a regular file, got a FIFO, socket or dev"),
    "socket": (opening("socket"), ValueError, "must be a regular file, got a FIFO, socket or"),
    "dangling link": (opening("dangling"), FileNotFoundError, "No such file.*dangling"),
    "loop of links": (opening("loop"), OSError, "Too many levels of symbolic links"),
    "too short": (
        opening("x", shape=100),
        ValueError,
        r"x' must have 400 bytes for shape \(100,\) of float32, but its size is 40 bytes\. What",
    ),
    "too long": (
        opening("x", shape=5),
        ValueError,
        r"its size is 40 bytes\. What would fit: shape \(10,\); a dtype of 8 bytes .*; partial=",
    ),
    "too long for nothing": (opening("x", shape=0), ValueError, "must have 0 bytes .* is 40 byt"),
    "wrong dtype": (opening("x", "f8"), ValueError, "must have 80 bytes .* a dtype of 4 bytes"),
    "no whole rows": (
        opening("x", shape=(-1, 3)),
        ValueError,
        "must have whole rows of 12 bytes .* 40 bytes: 4 too many",
    ),
    "two unknown sizes": (
        opening("x", shape=(-1, -1)),
        ValueError,
        r"shape must have at most one -1, got \(-1, -1\)",
    ),
    "negative size": (opening("x", shape=(2, -5)), ValueError, r"one -1.*got \(2, -5\)"),
    "overflow": (opening("x", shape=(2**40, 2**40)), ValueError, r"at most 2\*\*63 - 1 bytes"),
    "overflow of an unknown size": (opening("x", shape=(-1, 2**62)), ValueError, r"at most 2\*\*"),
    "fractional size": (opening("x", shape=2.5), TypeError, "integer or a sequence .* got 2.5"),
    "size that is none": (opening("x", shape=None), TypeError, "sequence of integers, got None"),
    "text as a shape": (opening("x", shape="10"), TypeError, "sequence of integers, got '10'"),
    "unknown dtype": (opening("x", "float33"), TypeError, "dtype must be .* got 'float33'"),
    "no dtype": (opening("x", None), TypeError, "dtype must be .* got None"),
    "objects": (opening("x", object), TypeError, "elements are Python objects"),
    "negative offset": (opening("x", offset=-4), ValueError, "offset must be non-negative"),
    "fractional offset": (opening("x", offset=4.0), TypeError, "offset must be an integer"),
    "offset beyond the end": (opening("x", offset=44), ValueError, "must have 84 bytes .* at of"),
    "part beyond the end": (
        opening("x", offset=4, partial=True),
        ValueError,
        "must have 44 bytes .* at offset 4, but its size is 40 bytes",
    ),
    "no name": ([lambda _, mode: M.from_filename(None, "f4", 10, mode=mode)], TypeError, "a path"),
    "empty name": (
        [lambda _, mode: M.from_filename("", "f4", 10, mode=mode)],
        ValueError,
        "empty",
    ),
    "null byte": (opening("x\0"), ValueError, "null byte"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", READING)
def test_reading(directory, case, mode):
    """Opening what cannot be opened is an error in every mode, and changes nothing."""
    attempts, error, message = READING[case]
    before = snapshot(directory), descriptors()
    for attempt in attempts:
        with pytest.raises(error, match=message):
            attempt(directory, mode)
    assert (snapshot(directory), descriptors()) == before
    assert mapped(directory / "x") == 0


@pytest.mark.parametrize("mode", ["w", "w+", "a", "rb", "", "R", 1, True, b"r"])
def test_unknown_mode(directory, unchanged, mode):
    """An unknown mode is a ValueError that lists the modes."""
    for attempt in opening("x"):
        with (
            unchanged(),
            pytest.raises(ValueError, match=f'mode must be "r" .*, got {re.escape(repr(mode))}'),
        ):
            attempt(directory, mode)


@pytest.mark.parametrize("dtype", [">f4", "M8[s]", "S4", [("a", "i4")], "V4"])
def test_dtypes_without_tensors(directory, unchanged, dtype):
    """A dtype that torch has not is a TypeError with the way out."""
    with (
        unchanged(),
        pytest.raises(TypeError, match="dtype must (be one that torch|have the byte)"),
    ):
        M.from_filename(directory / "x", dtype, -1)
    with unchanged(), pytest.raises(TypeError, match="dtype must"):
        M.zeros(3, dtype=dtype, filename=directory / "y")


def writing(name, **keywords):
    """Return every way to write a file of this name."""
    return [
        lambda d: mmtensor.save_array(d / name, np.ones(3), **keywords),
        lambda d: mmtensor.create_array(d / name, "f4", 3, **keywords),
        lambda d: M.from_tensor(torch.ones(3), filename=d / name, **keywords),
        lambda d: M.empty(3, filename=d / name, **keywords),
        lambda d: M.zeros(3, filename=d / name, **keywords),
        lambda d: M.ones(3, filename=d / name, **keywords),
        lambda d: M.full((3,), fill_value=2, filename=d / name, **keywords),
    ]


def like(name):
    """Return the ways to write a file that cannot replace one."""
    return [
        lambda d: M.empty_like(torch.ones(3), filename=d / name),
        lambda d: M.zeros_like(torch.ones(3), filename=d / name),
        lambda d: M.ones_like(torch.ones(3), filename=d / name),
        lambda d: M.full_like(torch.ones(3), 2, filename=d / name),
        lambda d: M(torch.ones(3), filename=d / name),
        lambda d: M(np.ones(3), filename=d / name),
    ]


def make(function, *arguments, **keywords):
    """Return a way to write the file y."""
    return [lambda d: function(*arguments, filename=d / "y", **keywords)]


GRADIENTS = torch.ones(3, requires_grad=True)
WRITING = {
    "existing file": ([*writing("x"), *like("x")], FileExistsError, "existsok=True to replace it"),
    "existing file again": (writing("x"), RuntimeError, "existsok=True to replace it"),
    "directory": (writing("directory"), FileExistsError, "the file exists"),
    "directory to replace": (
        writing("directory", existsok=True),
        IsADirectoryError,
        "cannot replace a directory by a file",
    ),
    "fifo to replace": (
        writing("fifo", existsok=True),
        FileExistsError,
        "cannot replace a FIFO, socket or device",
    ),
    "link": ([*writing("link"), *like("link")], RuntimeError, "must not be a symbolic link"),
    "link to replace": (writing("link", existsok=True), RuntimeError, "not be a symbolic link"),
    "dangling link": (writing("dangling"), RuntimeError, "must not be a symbolic link"),
    "loop of links": (writing("loop", existsok=True), RuntimeError, "not be a symbolic link"),
    "missing directory": (writing("z/y"), FileNotFoundError, "directory '.*z' does not exist"),
    "file as a directory": (writing("x/y"), NotADirectoryError, "'.*x' is not a directory"),
    "empty name": ([lambda _: M.zeros(3, filename="")], ValueError, "got an empty string"),
    "number as a name": ([lambda _: M.zeros(3, filename=7)], TypeError, "a path, got 7"),
    "null byte": (writing("y\0z"), ValueError, "null byte"),
    "gradients": (make(M.from_tensor, GRADIENTS), RuntimeError, r"Pass x\.detach\(\)"),
    "gradients of the class": (make(M, GRADIENTS), RuntimeError, r"Pass x\.detach\(\)"),
    "array": (make(M.from_tensor, np.ones(3)), TypeError, "Use MemoryMappedTensor.from_numpy"),
    "list": (make(M.from_tensor, [1.0]), TypeError, "expected a torch tensor, got <class 'list'"),
    "sparse": (make(M.from_tensor, torch.eye(3).to_sparse()), TypeError, r"x\.to_dense\(\)"),
    "meta": (make(M.from_tensor, torch.ones(3, device="meta")), TypeError, "device 'meta'"),
    "dtype that NumPy lacks": (
        make(M.from_tensor, torch.empty(3, dtype=torch.bits8)),
        TypeError,
        "got torch.bits8",
    ),
    "device": (make(M.zeros, 3, device="cuda"), RuntimeError, "lives on the CPU, got .*cuda"),
    "device of empty": (make(M.empty, 3, device="meta"), RuntimeError, "lives on the CPU"),
    "device of ones": (make(M.ones, 3, device="cuda:1"), RuntimeError, "lives on the CPU"),
    "device of full": (make(M.full, (3,), 1, device="cuda"), RuntimeError, "lives on the CPU"),
    "device of the class": (make(M, torch.ones(3), device="cuda"), ValueError, "lives on the CPU"),
    "negative size": (make(M.zeros, 2, -3), ValueError, r"non-negative sizes only, got \(2, -3\)"),
    "unknown size": (make(M.zeros, -1), ValueError, "non-negative sizes only"),
    "overflow": (make(M.zeros, 2**62, 2), ValueError, r"at most 2\*\*63 - 1 bytes"),
    "overflow of empty": (make(M.empty, 2**40, 2**40, 0), ValueError, r"at most 2\*\*63"),
    "dimensions": (make(M.zeros, (1,) * 65), ValueError, "at most 64 dimensions"),
    "dimensions of a tensor": (
        make(M.from_tensor, torch.ones((1,) * 65)),
        ValueError,
        "at most 64 dimensions",
    ),
    "fractional size": (make(M.zeros, 2.5), TypeError, "sequence of integers, got 2.5"),
    "no size": (make(M.zeros), TypeError, "a shape is required"),
    "two shapes": (make(M.zeros, 3, shape=(3,)), TypeError, "not both"),
    "unknown dtype": (make(M.zeros, 3, dtype="f33"), TypeError, "got 'f33'"),
    "no fill value": (make(M.full, (3,)), TypeError, "full needs a fill_value"),
    "fill value that does not fit": (
        make(M.full, (3,), 300, dtype=torch.uint8),
        RuntimeError,
        "without overflow",
    ),
    "fill value that is text": (make(M.full, (3,), "x"), TypeError, "fill_value|must be Number"),
    "shape that does not broadcast": (
        make(M.from_tensor, torch.ones(3), shape=(2, 4)),
        RuntimeError,
        "expanded size|must match",
    ),
    "no room at all": (
        make(M.zeros, 2**60, dtype=torch.uint8),
        OSError,
        "No space left|File too large",
    ),
}


@pytest.mark.parametrize("case", WRITING)
def test_writing(directory, case):
    """Writing what cannot be written is an error, and changes nothing."""
    attempts, error, message = WRITING[case]
    before = snapshot(directory), descriptors()
    for attempt in attempts:
        with pytest.raises(error, match=message):
            attempt(directory)
        assert (snapshot(directory), descriptors()) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda d: M.from_filename(d / "x", "f4", 10, colour="red"),
        lambda d: M.from_tensor(torch.ones(3), filename=d / "y", exists_ok=True),
        lambda d: M.zeros(3, filname=d / "y"),
        lambda d: M.empty(3, filename=d / "y", requires_grad=True),
        lambda d: M.ones(3, filename=d / "y", prealocate=False),
        lambda d: M.full((3,), 1, filename=d / "y", pin_memory=True),
        lambda d: M.zeros_like(torch.ones(3), filename=d / "y", existsok=True),
        lambda _: M.from_storage(torch.ones(3).untyped_storage(), offset=4),
        lambda _: M.from_numpy(np.ones(3), mode="r"),
        lambda _: M.from_shared_memory("x", "f4", 3, mode="r"),
        lambda d: M(torch.ones(3), filename=d / "y", existsok=True),
        lambda d: mmtensor.open_array(d / "x", "f4", 10, writable=True),
        lambda d: mmtensor.create_array(d / "y", "f4", 3, mode="w+"),
        lambda d: mmtensor.save_array(d / "y", np.ones(3), order="F"),
        lambda _: mmtensor.to_torch(np.ones(3), dtype="f4"),
        lambda _: mmtensor.to_numpy(torch.ones(3), dtype="f4"),
    ],
)
def test_unknown_keyword(directory, unchanged, call):
    """An unknown keyword is a TypeError that names it."""
    with unchanged(), pytest.raises(TypeError, match="unexpected keyword argument '"):
        call(directory)


def test_read_only_file_as_another_user(run, public_directory):
    """A file that may not be written: ``r+`` is an error, None opens ``c``, ``r`` works."""
    path = public_directory / "x"
    np.arange(10, dtype=np.float32).tofile(path)
    path.chmod(0o444)
    (public_directory / "secret").write_bytes(bytes(40))
    (public_directory / "secret").chmod(0o000)
    (public_directory / "closed").mkdir(mode=0o555)
    program = """
        import os, sys, torch, mmtensor
        from mmtensor import MemoryMappedTensor as M
        torch.ones(1)
        os.setuid(65534)
        os.chdir(sys.argv[1])
        for attempt in (
            lambda: M.from_filename("x", "f4", 10, mode="r+"),
            lambda: mmtensor.open_array("x", "f4", 10, mode="r+"),
            lambda: M.from_filename("secret", "f4", 10, mode="r"),
            lambda: M.from_filename("secret", "f4", 10),
            lambda: M.zeros(3, filename="closed/y"),
            lambda: M.from_tensor(torch.ones(3), filename="closed/y"),
        ):
            try:
                attempt()
            except PermissionError as error:
                print(error)
        for mode in (None, "c", "r"):
            x = M.from_filename("x", "f4", 10, mode=mode)
            print(x.mode, float(x.sum()))
        y = M.from_filename("x", "f4", 10)
        y[0] = 100
        print(float(y.sum()), float(x.sum()))
    """
    before = snapshot(public_directory)
    lines = run(program, public_directory).splitlines()
    assert snapshot(public_directory) == before
    assert all('mode "r+" needs a file that may be written' in line for line in lines[:2])
    assert all("Permission denied" in line for line in lines[:6])
    assert lines[6:] == ["c 45.0", "c 45.0", "r 45.0", "145.0 45.0"]


@pytest.mark.parametrize("mode", MODES[:3])
def test_mode_in_the_place_of_the_index(directory, mode):
    """The fourth argument is the index, as tensordict has it."""
    with pytest.raises(TypeError, match=rf"pass mode='{re.escape(mode)}' by name"):
        M.from_filename(directory / "x", "f4", 10, mode)
