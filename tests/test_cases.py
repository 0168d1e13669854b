"""Things that went wrong for people with other libraries, and what is right here.

Each test is one report: the same small input, and the outcome that it should have had.
"""

import copy
import io
import os
import pickle

import numpy as np
import pytest
import torch
from conftest import snapshot

import mmtensor
from mmtensor import MemoryMappedTensor

MODES = ["r", "r+", "c", None]


@pytest.mark.parametrize("mode", MODES)
def test_case_1_wrong_shape(path, mode, unchanged):
    """A file of 40 bytes opened as 100 float32 raises with both sizes and stays as it is."""
    np.zeros(10, np.float32).tofile(path)
    with unchanged(), pytest.raises(ValueError, match="must have 400 bytes .* size is 40 bytes"):
        MemoryMappedTensor.from_filename(path, torch.float32, (100,), mode=mode)
    with unchanged(), pytest.raises(ValueError, match="must have 400 bytes .* size is 40 bytes"):
        mmtensor.open_array(path, np.float32, (100,), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_case_2_missing_file(tmp_path, mode):
    """A path that does not exist is FileNotFoundError in every mode; nothing is created."""
    for attempt in (MemoryMappedTensor.from_filename, mmtensor.open_array):
        with pytest.raises(FileNotFoundError, match="missing"):
            attempt(tmp_path / "missing", "float32", (100,), mode=mode)
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("mode", MODES)
def test_case_3_deleted_file(numbers, tmp_path, mode):
    """Unpickling a tensor whose file is gone names the path, and creates nothing."""
    path, _ = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode=mode)
    message = pickle.dumps(x[1])
    os.unlink(path)
    # While the sender still has it mapped, and afterwards.
    with pytest.raises(FileNotFoundError, match=r"x\.bin"):
        pickle.loads(message)
    del x
    with pytest.raises(FileNotFoundError, match=r"x\.bin"):
        pickle.loads(message)
    assert snapshot(tmp_path) == {}


def test_case_5_small_view_of_a_large_map(path):
    """Ten elements of a map of 100 MB are ten elements in a message, checkpoint and copy."""
    x = MemoryMappedTensor.empty(25_000_000, filename=path, preallocate=False)
    x[1_000:1_010] = torch.arange(10.0)
    view = x[1_000:1_010]
    message = pickle.dumps(view)
    assert len(message) < 300 + len(path)
    assert pickle.loads(message).tolist() == list(range(10))
    checkpoint = io.BytesIO()
    torch.save(view, checkpoint)
    assert len(checkpoint.getvalue()) < 3000
    checkpoint.seek(0)
    assert torch.load(checkpoint).tolist() == list(range(10))
    twin = copy.deepcopy(view)
    assert twin.untyped_storage().nbytes() == 40
    assert twin.tolist() == list(range(10))


def test_case_6_read_only(numbers, unchanged):
    """Each write to a tensor in ``r`` raises, the file is unchanged, the process alive."""
    path, values = numbers
    with unchanged():
        x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r")
        writes = (
            lambda: x.__setitem__(0, 1),
            lambda: x.add_(1),
            lambda: torch.add(x, x, out=x),
            lambda: np.asarray(x).__setitem__(0, 1),
        )
        for write in writes:
            with pytest.raises((RuntimeError, ValueError), match="read-only|data pointer"):
                write()
        assert x.tolist() == values.tolist()


@pytest.mark.parametrize("mode", ["r", "c", "r+"])
def test_case_7_larger_than_memory(run, path, mode):
    """A sparse file of 64 GiB opens, its last element is read, and in ``c`` written."""
    with open(path, "wb") as file:
        file.truncate(64 << 30)
        file.seek(-4, 2)
        file.write(np.float32(7).tobytes())
    program = """
        import sys, torch
        from mmtensor import MemoryMappedTensor
        x = MemoryMappedTensor.from_filename(sys.argv[1], torch.float32, -1, mode=sys.argv[2])
        assert x.shape == (1 << 34,)
        before = float(x[-1])
        if sys.argv[2] != "r":
            x[-1] = 8
        print(before, float(x[-1]), float(x[12345]))
    """
    expected = "7.0 7.0 0.0" if mode == "r" else "7.0 8.0 0.0"
    assert run(program, path, mode) == expected
    with open(path, "rb") as file:
        file.seek(-4, 2)
        assert np.frombuffer(file.read(), np.float32)[0] == (8 if mode == "r+" else 7)
    assert os.stat(path).st_blocks * 512 < 1 << 20


def test_case_8_full_disk(run, tmp_path, mounting):
    """A tensor of 16 MB on a tmpfs of 4 MB is ENOSPC at creation, and no file is left."""
    del mounting
    program = """
        import errno, os, subprocess, sys, torch
        from mmtensor import MemoryMappedTensor
        for place in (sys.argv[1], "/dev/shm"):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], check=True)
        for filename in (os.path.join(sys.argv[1], "x"), None):
            for make in (
                lambda: MemoryMappedTensor.empty(4 << 20, filename=filename),
                lambda: MemoryMappedTensor.from_tensor(torch.ones(4 << 20), filename=filename),
            ):
                try:
                    make()
                except OSError as error:
                    print(errno.errorcode[error.errno])
        print(os.listdir(sys.argv[1]), os.listdir("/dev/shm"))
    """
    lines = run(program, tmp_path, private_mounts=True).splitlines()
    assert lines == ["ENOSPC"] * 4 + ["[] []"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
        lambda x: x.unsqueeze_(0),
        lambda x: x.resize_(3),
        lambda x: x.set_(x.untyped_storage(), 3, (2,), (4,)),
        lambda x: setattr(x, "data", x[1:, 1]),
        lambda x: x.set_(torch.ones(2)),
        lambda x: setattr(x, "data", torch.ones(2)),
    ],
)
def test_case_9_metadata_in_place(numbers, change):
    """After a change of metadata in place the same tensor arrives."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r+")
    change(x)
    again = pickle.loads(pickle.dumps(x))
    assert (again.shape, again.stride()) == (x.shape, x.stride())
    assert torch.equal(again, x)


@pytest.mark.parametrize(
    "name",
    [
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ],
)
def test_case_10_ml_dtypes(path, name):
    """bfloat16 and float8 files cross to NumPy and back without a copy."""
    x = MemoryMappedTensor.ones(4, dtype=name, filename=path)
    array = np.asarray(x)
    assert (array.dtype.name, array.ctypes.data) == (name, x.data_ptr())
    array[1] = 2
    assert x.float().tolist() == [1, 2, 1, 1]
    again = MemoryMappedTensor.from_numpy(array)
    assert (again.data_ptr(), again.filename) == (x.data_ptr(), path)
    assert np.fromfile(path, array.dtype).astype(float).tolist() == [1, 2, 1, 1]


def test_case_12_many_tensors(run, path):
    """2,000 tensors of files and 200 anonymous ones open under ``ulimit -n 256``."""
    np.zeros(10, np.float32).tofile(path)
    program = """
        import os, resource, shutil, sys, torch
        from mmtensor import MemoryMappedTensor
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 256)
        tensors = []
        for number in range(2000):
            name = f"{sys.argv[1]}.{number}"
            shutil.copy(sys.argv[1], name)
            mode = ("r", "r+", "c")[number % 3]
            tensors.append(MemoryMappedTensor.from_filename(name, "f4", 10, mode=mode))
        for number in range(200):
            tensors.append(MemoryMappedTensor.zeros(10))
        print(sum(float(x.sum()) for x in tensors), len(tensors))
        tensors.clear()
        print(len(os.listdir("/proc/self/fd")) < 20)
    """
    assert run(program, path, limits="-n 256").splitlines() == ["0.0 2200", "True"]


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_case_13_checkpoint_without_its_file(numbers, tmp_path, mode):
    """A checkpoint of a memory-mapped tensor loads when the data file is elsewhere."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode=mode)
    torch.save(x, tmp_path / "checkpoint")
    del x
    os.rename(path, path + ".moved")
    assert torch.load(tmp_path / "checkpoint").tolist() == values.tolist()


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_case_14_copies_and_parameters(numbers, mode):
    """Deep copies, also of modules, are independent; a parameter without gradients works."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode=mode)
    module = torch.nn.Module()
    module.register_buffer("x", x)
    for twin in (copy.deepcopy(x), copy.deepcopy(module).x):
        assert type(twin) is torch.Tensor
        twin.add_(1)
    assert x.tolist() == values.tolist()
    parameter = torch.nn.Parameter(x, requires_grad=False)
    assert isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(parameter, x)


def test_case_33_advice_keeps_private_writes(path):
    """What was written in ``c`` stands after ``advise("dontneed")``."""
    np.zeros(100_000, np.float32).tofile(path)
    x = MemoryMappedTensor.from_filename(path, "f4", -1, mode="c")
    x.fill_(1)
    x.advise("dontneed")
    x[5_000:90_000].advise("dontneed")
    assert x.sum() == 100_000
    assert not np.fromfile(path, "f4").any()
