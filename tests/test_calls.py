"""What is compiled: all of the work or none of it, and the same without it."""

import gc
import os
import resource
import stat
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from conftest import ROOT, descriptors, mapped, snapshot

import mmtensor
from mmtensor import MemoryMappedTensor, memory, syscalls
from mmtensor.modes import MODES
from mmtensor.syscalls import AT_FDCWD

_calls = pytest.importorskip("mmtensor._calls", reason="nothing was compiled")

READ, BOTH = MODES["r"], MODES["r+"]


class Bytes(_calls.Memory):
    """Memory with what a mapping adds to it."""

    __slots__ = ("__weakref__",)

    def __bytes__(self):
        return bytes(memoryview(self))


def open_map(path, mode=READ, offset=0, nbytes=-1, size=-1, *, dir_fd=AT_FDCWD, handle=b""):
    """Call it with the modes' flags."""
    flags = mode.open_flags, mode.protection, mode.map_flags
    return _calls.open_map(Bytes, str(path), *flags, offset, nbytes, size, dir_fd, handle)


@pytest.fixture
def data(path):
    """Write 10,000 bytes."""
    values = np.random.default_rng(0).bytes(10_000)
    with open(path, "wb") as file:
        file.write(values)
    return values


class TestOpenMap:
    """`open_map`."""

    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(0, -1), (0, 10_000), (1, 5), (4096, -1), (4097, 1), (9_999, 1)]
    )
    def test_which_bytes(self, path, data, offset, nbytes):
        end = len(data) if nbytes < 0 else offset + nbytes
        found = open_map(path, READ, offset, nbytes, 10_000)
        assert bytes(found) == data[offset:end]
        assert found.nbytes == end - offset

    def test_what_fstat_says(self, path, data):
        found, status = open_map(path), os.stat(path)
        assert os.path.samestat(found, status)
        assert (found.st_size, found.st_ctime_ns) == (len(data), status.st_ctime_ns)

    @pytest.mark.usefixtures("data")
    @pytest.mark.parametrize(
        ("offset", "nbytes", "size"),
        [(0, -1, 9_999), (0, 10_001, 10_000), (9_999, 2, -1), (10_000, -1, -1), (1 << 40, -1, -1)],
    )
    def test_another_size(self, path, offset, nbytes, size, unchanged):
        before = descriptors(), mapped(path)
        with unchanged():
            assert open_map(path, READ, offset, nbytes, size) is None
        assert (descriptors(), mapped(path)) == before

    def test_what_is_no_file(self, tmp_path, path, unchanged):
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "empty").touch()
        (tmp_path / "dangling").symlink_to("nothing")
        before = descriptors()
        with unchanged():
            names = (path, tmp_path, tmp_path / "fifo", tmp_path / "empty", tmp_path / "dangling")
            for name in (*names, "/dev/zero", tmp_path / ("x" * 300), "/proc/self/maps"):
                for mode in MODES.values():
                    assert open_map(name, mode) is None
        assert descriptors() == before

    def test_a_handle(self, path, data):
        handle = syscalls.file_handle(path)
        assert handle
        assert handle == _calls.handle_at(path)
        assert bytes(open_map(path, handle=handle)) == data
        assert open_map(path, handle=handle[:-1] + b"?") is None
        assert open_map(path, handle=handle + b"\0") is None
        assert _calls.handle_at(path + "?") == b""

    def test_beneath_a_directory(self, tmp_path, path, data):
        os.symlink(path, tmp_path / "link")
        fd = os.open(tmp_path, os.O_RDONLY)
        flags = READ.open_flags | os.O_NOFOLLOW, READ.protection, READ.map_flags
        try:
            found = _calls.open_map(Bytes, "x.bin", *flags, 0, -1, -1, fd, b"")
            assert bytes(found) == data
            assert _calls.open_map(Bytes, "link", *flags, 0, -1, -1, fd, b"") is None
        finally:
            os.close(fd)

    def test_changes(self, path, data):
        found = open_map(path, BOTH)
        memoryview(found)[3] = data[3] ^ 255
        with open(path, "rb") as file:
            assert file.read()[3] == data[3] ^ 255

    @pytest.mark.usefixtures("data")
    def test_it_goes(self, path):
        found = open_map(path)
        array = np.asarray(found)
        entry = weakref.ref(found)
        del found
        assert mapped(path) == 1
        assert entry() is array.base.obj
        del array
        assert mapped(path) == 0
        assert entry() is None

    def test_wrong_arguments(self, path):
        flags = READ.open_flags, READ.protection, READ.map_flags
        with pytest.raises(TypeError, match="takes 10 arguments"):
            _calls.open_map(Bytes, path)
        with pytest.raises(TypeError, match="expected a subclass of Memory"):
            _calls.open_map(int, path, *flags, 0, -1, -1, AT_FDCWD, b"")
        with pytest.raises(TypeError, match="integer"):
            _calls.open_map(Bytes, path, *flags, "0", -1, -1, AT_FDCWD, b"")
        with pytest.raises(TypeError, match="expected bytes"):
            _calls.open_map(Bytes, path, *flags, 0, -1, -1, AT_FDCWD, "")
        with pytest.raises(TypeError, match="bad argument type"):
            _calls.open_map(Bytes, b"x", *flags, 0, -1, -1, AT_FDCWD, b"")
        with pytest.raises(OverflowError, match="too large|too big"):
            _calls.open_map(Bytes, path, *flags, 1 << 70, -1, -1, AT_FDCWD, b"")


class TestCreateMap:
    """`create_map`."""

    @staticmethod
    def create(path, data=None, nbytes=None, dir_fd=AT_FDCWD):
        array = None if data is None else np.frombuffer(data, np.uint8)
        address = 0 if array is None else array.ctypes.data
        nbytes = len(data) if nbytes is None else nbytes
        return _calls.create_map(Bytes, str(path), address, nbytes, dir_fd)

    @pytest.mark.parametrize("nbytes", [1, 4096, 65_536, 65_537, 300_000])
    @pytest.mark.parametrize("beneath", [False, True])
    @pytest.mark.parametrize("zeros", [False, True])
    def test_bytes_or_zeros(self, tmp_path, path, nbytes, beneath, zeros):
        data = bytes(nbytes) if zeros else np.random.default_rng(0).bytes(nbytes)
        before = descriptors()
        fd = os.open(tmp_path, os.O_RDONLY) if beneath else AT_FDCWD
        where = "x.bin" if beneath else path
        found = self.create(where, None if zeros else data, nbytes, fd)
        if beneath:
            os.close(fd)
        assert bytes(found) == data
        with open(path, "rb") as file:
            assert file.read() == data
        assert os.path.samestat(found, os.stat(path))
        assert os.listdir(tmp_path) == ["x.bin"]
        assert descriptors() == before
        os.sync()
        assert os.stat(path).st_blocks * 512 >= nbytes  # reserved

    def test_permissions(self, path):
        old = os.umask(0o027)
        try:
            self.create(path, b"x")
        finally:
            os.umask(old)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o640

    @pytest.mark.parametrize("beneath", [False, True])
    def test_what_is_there_stays(self, tmp_path, path, unchanged, beneath):
        (tmp_path / "x.bin").write_bytes(b"old")
        (tmp_path / "dangling").symlink_to("nothing")
        (tmp_path / "directory").mkdir()
        fd = os.open(tmp_path, os.O_RDONLY) if beneath else AT_FDCWD
        before = descriptors(), mapped(path)
        with unchanged():
            for name in ("x.bin", "dangling", "directory", "missing/x", "x" * 300, "x.bin/y"):
                assert self.create(name if beneath else tmp_path / name, b"new", 3, fd) is None
        assert (descriptors(), mapped(path)) == before
        if beneath:
            os.close(fd)

    @pytest.mark.parametrize("beneath", [False, True])
    @pytest.mark.parametrize("nbytes", [100, 100_000])
    def test_a_failure_in_the_middle(self, tmp_path, path, beneath, nbytes):
        fd = os.open(tmp_path, os.O_RDONLY) if beneath else AT_FDCWD
        before = descriptors(), mapped(path)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            where = "x.bin" if beneath else path
            assert self.create(where, bytes(nbytes), nbytes, fd) is None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (descriptors(), mapped(path)) == before
        assert snapshot(tmp_path) == {}
        if beneath:
            os.close(fd)

    def test_without_a_descriptor(self, tmp_path, path, data):
        path += "2"
        before = snapshot(tmp_path)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            created, opened = self.create(path, data), open_map(path[:-1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert created is opened is None
        assert snapshot(tmp_path) == before

    def test_wrong_arguments(self, path):
        with pytest.raises(TypeError, match="takes 5 arguments"):
            _calls.create_map(Bytes, path)
        with pytest.raises(ValueError, match="must be positive"):
            self.create(path, b"")
        with pytest.raises(TypeError, match="expected a subclass of Memory"):
            _calls.create_map(_calls, path, 0, 1, AT_FDCWD)


class TestMemory:
    """`Memory`."""

    def test_read_only(self, path, data):
        found = open_map(path)
        found.readonly = True
        array = np.ndarray((4,), np.uint8, found)
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        with pytest.raises(TypeError, match="read-only"):
            memoryview(found)[0] = 1
        assert bytes(found) == data

    def test_no_bytes(self):
        found = Bytes(4096, 0, 0, 0)
        assert np.ndarray((0,), np.uint8, found).size == 0

    def test_wrong_arguments(self):
        with pytest.raises(TypeError, match="4 arguments"):
            Bytes(1)
        with pytest.raises(TypeError, match="a path and a Memory"):
            _calls.size_at("x", "x")
        with pytest.raises(TypeError, match="expected a dict"):
            _calls.forget_in([])

    def test_where_it_is_found(self, path):
        """Its entries leave the table with it; those of others stay."""
        x = MemoryMappedTensor.from_tensor(torch.ones(3), filename=path)
        mapping = x.untyped_storage().mapping
        keys = list(mapping.hold.keys)
        assert [memory.live_mappings[key]() for key in keys] == [mapping] * len(keys)
        other = weakref.ref(MemoryMappedTensor)
        mapping.hold.keys.append(("not", "there"))
        mapping.hold.keys.append(("of", "another"))
        mapping.hold.keys.append([])  # which no dict takes
        memory.live_mappings["of", "another"] = other
        del x, mapping
        gc.collect()
        assert not any(key in memory.live_mappings for key in keys)
        assert memory.live_mappings.pop(("of", "another")) is other

    def test_size_at(self, path, data):
        found = open_map(path)
        assert _calls.size_at(path, found) == len(data)
        os.truncate(path, 5)
        assert _calls.size_at(path, found) == 5
        os.rename(path, path + "2")
        assert _calls.size_at(path, found) == -1
        with open(path, "wb"):
            assert _calls.size_at(path, found) == -1

    @pytest.mark.parametrize("reference", [(), "x", (1, 2), ("x", "r", 0, 1, 2, b""), None])
    def test_find_live_of_something_else(self, reference):
        assert _calls.find_live(reference) is None


def test_audit_events(path, data, run):
    """Opening and creating raise the event that `os.open` raises, and a hook may refuse."""
    code = f"""
        import sys
        import torch
        from mmtensor import MemoryMappedTensor, memory

        seen, refused = [], []

        def hook(event, arguments):
            if event == "open" and str(arguments[0]).startswith({path!r}):
                seen.append(arguments[0])
                if refused:
                    raise PermissionError("not here")

        sys.addaudithook(hook)
        MemoryMappedTensor.from_filename({path!r}, "u1", 10_000)
        MemoryMappedTensor.from_tensor(torch.ones(2), filename={path + "2"!r})
        refused.append(True)
        for name in ({path!r}, {path + "3"!r}):
            try:
                if name == {path!r}:
                    MemoryMappedTensor.from_filename(name, "u1", 10_000)
                else:
                    MemoryMappedTensor.from_tensor(torch.ones(2), filename=name)
            except PermissionError as error:
                print(error)
        print(memory.COMPILED, len(seen))
    """
    assert run(code).split("\n") == ["not here", "not here", "True 4"]
    assert len(data) == os.stat(path).st_size
    assert not os.path.exists(path + "3")


def test_threads(path, data):
    """Threads that open and drop one file see one another's map, or one of their own."""
    expected = np.frombuffer(data, np.uint8)
    wrong = []

    def work():
        for _ in range(500):
            array = mmtensor.open_array(path, "u1", mode="r+")
            if array[7] != expected[7] or array[-1] != expected[-1]:
                wrong.append(array)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not [key for key in memory.live_mappings if path in key]


def test_without_it(tmp_path, monkeypatch, run):
    """The environment switches it off."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MMTENSOR_COMPILED", "0")
    code = """
        import numpy as np
        import mmtensor
        from mmtensor import memory

        print(memory.COMPILED, mmtensor.save_array("x", np.arange(3)).name)
        print(mmtensor.open_array("x", int).tolist())
    """
    assert run(code).split("\n") == ["False x", "[0, 1, 2]"]


@pytest.mark.slow
def test_the_same_without_it():
    """What opens, makes and sends files passes its tests without it as well."""
    names = ("mapping", "arrays", "rawfile", "creation", "reference", "storage", "wrong_input")
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *files],
        env={**os.environ, "MMTENSOR_COMPILED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:]
