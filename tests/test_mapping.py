"""What every kind of mapping promises, and how mappings live and die."""

import gc
import os
import sys
import threading
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import torch
from conftest import descriptors, mapped, settled_descriptors

import mmtensor.mapping
from mmtensor import MemoryMappedTensor
from mmtensor.mapping import MemoryMapping
from mmtensor.shared_memory import SharedMapping
from mmtensor.testing import TensorContract


class FileContract(TensorContract):
    """A file that NumPy wrote, opened in the mode of the class."""

    def make(self, directory, values):
        values.tofile(directory / "x.bin")
        return MemoryMappedTensor.from_filename(
            directory / "x.bin", values.dtype, values.shape, mode=self.mode
        )

    def raw(self, directory):
        return (directory / "x.bin").read_bytes()

    def test_outside_change_shows(self, x, tmp_path):
        """What another program writes to the file shows in the tensor."""
        with open(tmp_path / "x.bin", "r+b") as file:
            file.write(np.float32(99).tobytes())
        assert x[0, 0] == 99

    def test_no_descriptor(self, tmp_path, values):
        """An open tensor holds one map and no descriptor; dropped, it leaves neither."""
        before = settled_descriptors()
        x = self.make(tmp_path, values)
        view = x[1].unsqueeze(0)
        del x
        assert (descriptors(), mapped(tmp_path / "x.bin")) == (before, 1)
        del view
        assert (descriptors(), mapped(tmp_path / "x.bin")) == (before, 0)


class TestReadOnlyFile(FileContract):
    """Mode ``r``."""

    mode = "r"
    reaches = False


class TestWritableFile(FileContract):
    """Mode ``r+``."""


class TestCopyOnWriteFile(FileContract):
    """Mode ``c``."""

    mode = "c"
    reaches = False


class TestFileWithOffset(FileContract):
    """A part of a file that starts on no page boundary, with bytes before and after it."""

    def make(self, directory, values):
        with open(directory / "x.bin", "wb") as file:
            file.write(b"h" * 4100 + values.tobytes() + b"t" * 7)
        return MemoryMappedTensor.from_filename(
            directory / "x.bin", values.dtype, values.shape, mode="r+", offset=4100, partial=True
        )

    def raw(self, directory):
        content = (directory / "x.bin").read_bytes()
        assert content[:4100] == b"h" * 4100
        assert content[-7:] == b"t" * 7
        return content[4100:-7]

    def test_outside_change_shows(self, x, tmp_path):
        """What another program writes to the file shows in the tensor."""
        with open(tmp_path / "x.bin", "r+b") as file:
            file.seek(4100)
            file.write(np.float32(99).tobytes())
        assert x[0, 0] == 99


class TestNumpyMemmap(FileContract):
    """An array that `numpy.memmap` opened."""

    def make(self, directory, values):
        values.tofile(directory / "x.bin")
        return MemoryMappedTensor.from_numpy(
            np.memmap(directory / "x.bin", values.dtype, "r+", shape=values.shape)
        )

    def test_no_descriptor(self, tmp_path, values):
        """The tensor keeps its own map when NumPy's is gone."""
        before = settled_descriptors()
        x = self.make(tmp_path, values)
        gc.collect()
        assert (descriptors(), mapped(tmp_path / "x.bin")) == (before, 1)
        assert x.tolist() == values.tolist()


class TestTorchStorage(FileContract):
    """A storage that torch mapped from a file."""

    def make(self, directory, values):
        values.tofile(directory / "x.bin")
        storage = torch.UntypedStorage.from_file(
            str(directory / "x.bin"), shared=True, nbytes=values.nbytes
        )
        return MemoryMappedTensor.from_storage(storage, dtype=values.dtype, shape=values.shape)


class TestAnonymousMemory(TensorContract):
    """Anonymous shared memory; the raw bytes are read through the descriptor."""

    def make(self, directory, values):
        del directory
        self.x = MemoryMappedTensor.from_tensor(torch.from_numpy(values))
        return self.x

    def raw(self, directory):
        del directory
        mapping = self.x.untyped_storage().mapping
        return os.pread(mapping.fd, 1 << 20, 0)

    def test_one_descriptor_and_no_name(self, tmp_path, values):
        """A block costs one descriptor, has no name, and leaves nothing behind."""
        before = settled_descriptors()
        x = self.make(tmp_path, values)
        fd = x.untyped_storage().mapping.fd
        assert descriptors() == before + 1
        assert os.fstat(fd).st_nlink == 0
        del x
        del self.x
        assert descriptors() == before
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


class TestNamedBlock(TensorContract):
    """A block of `multiprocessing.shared_memory` that someone else owns."""

    @pytest.fixture(autouse=True)
    def _block(self):
        self.block = SharedMemory(create=True, size=96)
        yield
        self.block.close()
        self.block.unlink()

    def make(self, directory, values):
        del directory
        self.block.buf[: values.nbytes] = values.tobytes()
        return MemoryMappedTensor.from_shared_memory(self.block.name, values.dtype, values.shape)

    def raw(self, directory):
        del directory
        return bytes(self.block.buf[:96])

    def test_owner_keeps_the_block(self, x):
        """The block is there, under its name, when an attached tensor is gone."""
        del x
        gc.collect()
        SharedMemory(self.block.name).close()


class TestBorrowedMemory(TensorContract):
    """The memory of a NumPy array."""

    def make(self, directory, values):
        del directory
        self.array = values
        return MemoryMappedTensor.from_numpy(values)

    def raw(self, directory):
        del directory
        return self.array.tobytes()

    def test_is_not_shared(self, x):
        """Memory of an array is not shared with other processes, and does not say it is."""
        assert not x.is_shared()
        with pytest.raises(RuntimeError, match="memory of an array is private to its process"):
            x.share_memory_()

    def test_has_no_file(self, x):
        """Asking for its file name is a RuntimeError that says what to do."""
        with pytest.raises(RuntimeError, match="this tensor has no file"):
            _ = x.filename


class TestBorrowedReadOnlyMemory(TestBorrowedMemory):
    """The memory of a NumPy array that cannot be written to."""

    mode = "r"

    def make(self, directory, values):
        values.flags.writeable = False
        return super().make(directory, values)


def open_(path, mode, shape=(3, 4)):
    """Open a file of float32."""
    return MemoryMappedTensor.from_filename(path, torch.float32, shape, mode=mode)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_openings_share_a_mapping(numbers, mode):
    """Two openings of a file in the same mode share one map, and one storage."""
    x, y = open_(numbers[0], mode), open_(numbers[0], mode)
    assert x.untyped_storage() is y.untyped_storage()
    assert mapped(numbers[0]) == 1


def test_modes_do_not_share_a_mapping(numbers):
    """An opening in ``r`` has another map than one in ``r+``, and stays read-only."""
    x, y = open_(numbers[0], "r"), open_(numbers[0], "r+")
    assert x.untyped_storage() is not y.untyped_storage()
    y[0, 0] = 5
    assert x[0, 0] == 5
    with pytest.raises(RuntimeError, match="mutable|data pointer"):
        torch._foreach_add_([x], 1)


def test_copies_do_not_share_a_mapping(numbers):
    """Two openings in ``c`` have their own private pages."""
    x, y = open_(numbers[0], "c"), open_(numbers[0], "c")
    x[0, 0] = 5
    assert y[0, 0] == 0
    assert mapped(numbers[0]) == 2


def test_arrays_and_tensors_share_a_mapping(numbers):
    """An array and a tensor of one file and mode stand on one map."""
    array = mmtensor.open_array(numbers[0], "f4", (3, 4), mode="r+")
    x = open_(numbers[0], "r+")
    assert array.ctypes.data == x.data_ptr()
    assert mapped(numbers[0]) == 1


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_replaced_file(numbers, mode):
    """After a replacement the name opens as the new file; the old tensor keeps its bytes."""
    path, values = numbers
    old = open_(path, mode)
    (values + 100).tofile(path + ".new")
    os.replace(path + ".new", path)
    new = open_(path, mode)
    assert old.tolist() == values.tolist()
    assert new.tolist() == (values + 100).tolist()
    again = open_(path, mode)
    assert again.tolist() == new.tolist()


def test_deleted_file(numbers):
    """A tensor keeps the bytes of a file that has been deleted."""
    path, values = numbers
    x = open_(path, "r+")
    os.unlink(path)
    x[0, 0] = 5
    assert x[1].tolist() == values[1].tolist()
    with pytest.raises(FileNotFoundError, match=r"x\.bin"):
        open_(path, "r+")


def test_threads_open_one_file(numbers):
    """Threads that open one file at once share one map, and nothing is left afterwards."""
    path, values = numbers
    before = settled_descriptors()
    opened = []
    start = threading.Barrier(8)

    def work():
        start.wait()
        opened.extend([(open_(path, "r"), open_(path, "r+")[1]) for _ in range(100)])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(opened) == 800
    assert all(torch.equal(r, torch.from_numpy(values)) for r, _ in opened)
    assert len({r.data_ptr() for r, _ in opened}) == 1
    assert len({w.data_ptr() for _, w in opened}) == 1
    assert mapped(path) == 2
    opened.clear()
    assert (mapped(path), descriptors()) == (0, before)


def test_threads_open_and_drop(numbers):
    """Threads that open and drop one file at once never see a map that is gone."""
    path, values = numbers
    expected = torch.from_numpy(values)
    wrong = []

    def work():
        for _ in range(300):
            x = open_(path, "r")
            if not torch.equal(x, expected):
                wrong.append(x.clone())
            del x

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert mapped(path) == 0


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_thread_opens_what_is_dropped(numbers, mode):
    """A thread that opens a file while the last tensor of it goes gets pages that stay."""
    path, values = numbers
    dropped, opened, found = threading.Event(), threading.Event(), []

    def work():
        dropped.wait(10)
        found.append(open_(path, mode))
        opened.set()

    def trace(frame, event, argument):
        del argument
        if event == "call" and frame.f_code.co_filename == mmtensor.mapping.__file__:
            dropped.set()
            opened.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    x = [open_(path, mode)]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        x.clear()
    finally:
        sys.settrace(before)
        dropped.set()
    thread.join()
    assert found[0].tolist() == values.tolist()
    assert mapped(path) == 1


def test_failed_opening_leaves_nothing(numbers):
    """A file that does not fit leaves no descriptor and no map."""
    before = settled_descriptors()
    for mode in ("r", "r+", "c", None):
        with pytest.raises(ValueError, match="its size is 48 bytes"):
            open_(numbers[0], mode, (5, 5))
    assert (descriptors(), mapped(numbers[0])) == (before, 0)


def test_failed_map_leaves_nothing():
    """A block that cannot be mapped closes its descriptor."""
    before = settled_descriptors()
    with pytest.raises(OSError, match=f"cannot reserve {2**62} bytes of shared memory"):
        SharedMapping.create(2**62)
    fd = os.open("/", os.O_RDONLY)
    with pytest.raises(OSError, match="does not support mmap|No such device|Permission denied"):
        SharedMapping.adopt(fd, 4096)
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize("advice", ["normal", "random", "sequential", "willneed", "dontneed"])
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_advice_keeps_values(path, mode, advice):
    """No advice changes a value, in no mode, for views that begin and end on no page."""
    values = np.arange(20_000, dtype=np.float32)
    values.tofile(path)
    x = open_(path, mode, -1)
    if mode != "r":
        x[3] = x[10_000] = x[-1] = values[3] = values[10_000] = values[-1] = -1
    for view in (x, x[3:-3], x[1234:9876:5], x[:0], x[5]):
        view.advise(advice)
        assert torch.equal(x, torch.from_numpy(values))


def test_advice_on_borrowed_memory(run):
    """Advice about the memory of an array harms neither its values nor its neighbours'."""
    # In a process of its own, which a fault would end: these are pages of the heap.
    program = """
        import numpy as np, torch
        from mmtensor import MemoryMappedTensor
        arrays = [np.arange(size, dtype=float) for size in (5, 100, 30_000, 200_000) * 3]
        others = [bytearray(b"x" * size) for size in range(1, 5000, 100)]
        for advice in ("normal", "random", "sequential", "willneed", "dontneed"):
            for array in arrays:
                MemoryMappedTensor.from_numpy(array).advise(advice)
        for array in arrays:
            assert (array == np.arange(len(array))).all()
        print(all(set(other) == {120} for other in others))
    """
    assert run(program) == "True"


def test_advice_in_anonymous_memory():
    """Telling the kernel that anonymous memory is not needed keeps it."""
    x = MemoryMappedTensor.ones(50_000)
    x.advise("dontneed")
    x[100:20_000].advise("dontneed")
    assert x.sum() == 50_000


@pytest.mark.parametrize("advice", ["DONTNEED", "", None, 4])
def test_unknown_advice(numbers, advice):
    """An unknown word is a ValueError that lists the words."""
    with pytest.raises(ValueError, match="advice must be one of 'normal', 'random', "):
        open_(numbers[0], "r").advise(advice)


def test_flush(tmp_path, monkeypatch):
    """A flush waits for the pages of the tensor, and for no others, to be on stable storage."""
    x = MemoryMappedTensor.zeros(5, 1024, filename=tmp_path / "x")  # a page each
    synced = []
    msync = mmtensor.mapping.msync

    def watch(address, length):
        synced.append((address - x.data_ptr(), length))
        msync(address, length)

    monkeypatch.setattr(mmtensor.mapping, "msync", watch)
    x.flush()
    x[2].flush()
    x[3, 10:20].flush()
    x[:0].flush()
    assert synced == [(0, 5 * 4096), (2 * 4096, 4096), (3 * 4096, 80)]


@pytest.mark.parametrize("mode", ["r", "c"])
def test_flush_without_a_shared_file(numbers, mode, unchanged):
    """Flushing in ``r`` and ``c`` is allowed and writes nothing."""
    with unchanged():
        x = open_(numbers[0], mode)
        if mode == "c":
            x[0] = 1
        x.flush()


def test_anonymous_flush():
    """Flushing anonymous memory is allowed."""
    x = MemoryMappedTensor.ones(3)
    x.flush()
    assert x.sum() == 3


def test_limit_on_private_memory(run, path):
    """Where the system refuses private memory, ``r`` falls back and ``c`` says what to do."""
    with open(path, "wb") as file:
        file.truncate(8 << 30)
    program = """
        import sys, resource, torch, pickle
        from mmtensor import MemoryMappedTensor
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
        x = MemoryMappedTensor.from_filename(sys.argv[1], torch.uint8, -1, mode="r")
        assert x[-1] == 0 and x.numpy()[5] == 0 and not x.numpy().flags.writeable
        try:
            x[0] = 1
        except RuntimeError as error:
            print(type(error).__name__)
        assert pickle.loads(pickle.dumps(x[:7])).tolist() == [0] * 7
        y = MemoryMappedTensor.from_filename(sys.argv[1], torch.uint8, -1, mode="r+")
        y[-1] = 3
        assert x[-1] == 3
        try:
            MemoryMappedTensor.from_filename(sys.argv[1], torch.uint8, -1, mode="c")
        except OSError as error:
            print(error.strerror)
    """
    lines = run(program, path).splitlines()
    assert lines[0] == "ReadOnlyError"
    assert 'cannot map 8589934592 bytes in mode "c"' in lines[1]
    assert 'of which mode "r" and "r+" need none' in lines[1]


@pytest.mark.parametrize("size", [48, 64 << 30])
def test_write_that_slips_past_every_guard(run, path, size):
    """A write by address to a map in ``r`` ends no process and reaches no file."""
    with open(path, "wb") as file:
        file.truncate(size)
    program = """
        import ctypes, sys, torch
        from mmtensor import MemoryMappedTensor
        x = MemoryMappedTensor.from_filename(sys.argv[1], torch.uint8, -1, mode="r")
        ctypes.memset(x.data_ptr() + 5, 7, 3)
        print(x[4:9].tolist())
    """
    assert run(program, path) == "[0, 7, 7, 7, 0]"
    with open(path, "rb") as file:
        assert not any(file.read(48))


def test_mapping_of_borrowed_memory_keeps_its_owner():
    """The array lives as long as a tensor on its memory, however small the view."""
    x = MemoryMappedTensor.from_numpy(np.arange(100_000.0))[5:7]
    gc.collect()
    assert isinstance(x.untyped_storage().mapping, MemoryMapping)
    assert x.tolist() == [5, 6]


@pytest.mark.usefixtures("mounting")
def test_overlayfs(run, tmp_path):
    """On overlayfs, a file that was copied up when it was opened for writing is mapped anew."""
    program = """
        import os, pickle, subprocess, sys, torch
        import numpy as np
        from mmtensor import MemoryMappedTensor
        os.chdir(sys.argv[1])
        subprocess.run(["mount", "-t", "tmpfs", "none", "."], check=True)
        os.chdir(sys.argv[1])
        for name in ("lower", "upper", "work", "merged"):
            os.mkdir(name)
        np.zeros(3, "f4").tofile("lower/x")
        options = "lowerdir=lower,upperdir=upper,workdir=work"
        subprocess.run(["mount", "-t", "overlay", "none", "-o", options, "merged"], check=True)
        def opened(mode):
            return MemoryMappedTensor.from_filename("merged/x", torch.float32, 3, mode=mode)
        old = opened("r")
        sent = pickle.dumps(old)
        opened("r+")[0] = 5
        assert np.fromfile("merged/x", "f4")[0] == 5
        new = opened("r")
        assert new[0] == 5
        assert opened("r")[0] == 5
        assert pickle.loads(pickle.dumps(new))[0] == 5
        assert pickle.loads(sent)[0] == 5
        assert pickle.loads(pickle.dumps(new))[0] == 5
        assert old.shape == (3,)
        print("done")
    """
    assert run(program, tmp_path, private_mounts=True) == "done"
