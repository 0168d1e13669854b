"""What is compiled: all of the work or none of it, and the same without it."""

import os
import pickle
import resource
import shutil
import signal
import stat
import subprocess
import threading
import time
import weakref

import numpy as np
import pytest
from conftest import descriptors, mapped, snapshot

import mmtensor
from mmtensor import MemoryMappedTensor, pages, syscalls
from mmtensor.mapping import find_file
from mmtensor.modes import MODES
from mmtensor.rawfile import SMALL
from mmtensor.syscalls import AT_FDCWD

_calls = pytest.importorskip("mmtensor._calls", reason="nothing was compiled")

COMPILER = shutil.which("cc")

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


def maps():
    """Count the maps of files of this process; those without a name as well."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        return sum(line.split()[4] != "0" for line in lines)


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
        assert (found.nbytes, found.st_ctime_ns) == (len(data), status.st_ctime_ns)

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

    @pytest.mark.usefixtures("data")
    def test_a_damaged_reference(self, path):
        """It never leads outside of the map, nor to another file."""
        x = MemoryMappedTensor.from_filename(path, "u1", 10_000, mode="r+")
        good = x.untyped_storage().mapping.reference()
        del x
        for place, values in (
            (0, (path + "\0.other", path[:-1])),
            (2, (-1, -4095, 1 << 62, 1 << 64)),
            (3, (-1, 10_001, 1 << 64)),
            (4, (-1, 9_999, 1 << 63, 1 << 64)),
            (5, (good[5][:-1] + b"?", good[5][:8] + bytes(16))),
        ):
            for value in values:
                bad = (*good[:place], value, *good[place + 1 :])
                with pytest.raises((OSError, ValueError, OverflowError), match=r"\w"):
                    find_file(bad)
        assert find_file(good).nbytes == 10_000

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
        with pytest.raises(TypeError, match="PathLike"):
            _calls.open_map(Bytes, 3, *flags, 0, -1, -1, AT_FDCWD, b"")
        with pytest.raises(ValueError, match="null byte"):
            _calls.open_map(Bytes, path + "\0?", *flags, 0, -1, -1, AT_FDCWD, b"")
        with pytest.raises(OverflowError, match="too large|too big"):
            _calls.open_map(Bytes, path, *flags, 1 << 70, -1, -1, AT_FDCWD, b"")
        for offset, nbytes, dir_fd in (
            (-1, 5, AT_FDCWD),
            (0, -2, AT_FDCWD),
            (0, 5, (1 << 32) - 100),
        ):
            with pytest.raises(OverflowError, match="is out of range"):
                _calls.open_map(Bytes, path, *flags, offset, nbytes, -1, dir_fd, b"")


class TestCreateMap:
    """`create_map`."""

    @staticmethod
    def create(path, data=None, nbytes=None, dir_fd=AT_FDCWD, *, reserve=None):
        array = None if data is None else np.frombuffer(data, np.uint8)
        address = 0 if array is None else array.ctypes.data
        nbytes = len(data) if nbytes is None else nbytes
        reserve = nbytes > SMALL if reserve is None else reserve
        return _calls.create_map(Bytes, str(path), address, nbytes, reserve, dir_fd)

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
        memoryview(found)[-1] = 77  # which reaches the file
        with open(path, "rb") as file:
            assert file.read() == data[:-1] + bytes([77])
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
    def test_what_is_there_stays(self, tmp_path, unchanged, beneath):
        (tmp_path / "x.bin").write_bytes(b"old")
        (tmp_path / "dangling").symlink_to("nothing")
        (tmp_path / "directory").mkdir()
        fd = os.open(tmp_path, os.O_RDONLY) if beneath else AT_FDCWD
        before = descriptors(), maps()
        with unchanged():
            for name in ("x.bin", "dangling", "directory", "missing/x", "x" * 300, "x.bin/y"):
                assert self.create(name if beneath else tmp_path / name, b"new", 3, fd) is None
        assert (descriptors(), maps()) == before
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
        with pytest.raises(TypeError, match="takes 6 arguments"):
            _calls.create_map(Bytes, path)
        with pytest.raises(OverflowError, match="0 is out of range"):
            self.create(path, b"")
        with pytest.raises(ValueError, match="null byte"):
            self.create(path + "\0", b"x")
        with pytest.raises(TypeError, match="expected a subclass of Memory"):
            _calls.create_map(_calls, path, 0, 1, True, AT_FDCWD)
        assert not os.path.exists(path)


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
        found = Bytes()
        found.place(4096, 0)
        assert np.ndarray((0,), np.uint8, found).size == 0

    def test_memory_once(self, path, data):
        """What has memory takes no other one, whose users would have the ground taken away."""
        found = open_map(path)
        with open(path, "rb") as file:
            arguments = file.fileno(), 0, 5, READ.protection, READ.map_flags
            for again in (lambda: found.place(0, 0), lambda: found.map_bytes(*arguments)):
                with pytest.raises(ValueError, match="has its memory already"):
                    again()
            other = Bytes()
            other.map_bytes(*arguments)
        assert bytes(other) == data[:5]
        for name in ("address", "nbytes", "keys", "entry"):
            with pytest.raises(AttributeError, match="readonly"):
                setattr(other, name, None)

    def test_a_map_that_is_refused(self, path, data):
        other = Bytes()
        with pytest.raises(OSError, match="Bad file descriptor"):
            other.map_bytes(1000, 0, len(data), READ.protection, READ.map_flags)
        with pytest.raises(OverflowError, match="is out of range"):
            other.map_bytes(0, -1, 1, READ.protection, READ.map_flags)
        with open(path, "rb") as file:
            other.map_bytes(file.fileno(), 0, 9, READ.protection, READ.map_flags)
        assert bytes(other) == data[:9]

    def test_a_descriptor(self, path, data):
        before = descriptors()
        found = open_map(path)
        found.hold.descriptor = os.open(path, os.O_RDONLY)
        assert (found.hold, descriptors()) == (found, before + 1)
        del found
        assert descriptors() == before
        assert data

    def test_writeable_all_the_same(self, path, data):
        """For torch, whose tensors have a guard of their own."""
        found = open_map(path)
        found.readonly = True
        array = np.ndarray((9,), np.uint8, found.writeable)
        array[0] ^= 255
        del found
        assert array[0] == data[0] ^ 255

    def test_wrong_arguments(self):
        with pytest.raises(TypeError, match="place takes 2 arguments, got 1"):
            Bytes().place(1)
        with pytest.raises(OverflowError, match="-5 is out of range"):
            Bytes().place(0, -5)
        with pytest.raises(TypeError, match="a path and a Memory"):
            _calls.size_at("x", "x")
        with pytest.raises(TypeError, match="must be a dict"):
            Bytes().found_under([], 1, 2)
        with pytest.raises(TypeError, match="cannot create"):
            type(Bytes().writeable)()

    def test_where_it_is_found(self, path):
        """Its entries leave the table with it; those of others stay."""
        found = open_map(__file__)
        entry, other = weakref.ref(found), weakref.ref(Bytes)
        table = {1: entry, "two": entry, (3,): other, 5: entry}
        for key in (1, "two", (3,), 4):
            found.found_under(table, key, entry)
        found.found_under(table, [], entry)  # which no dict takes
        assert (found.entry, found.keys) == (entry, [1, "two", (3,), 4, []])
        del found
        assert table == {(3,): other, 5: entry}
        assert entry() is None
        assert path

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
        assert _calls.find_live({reference: weakref.ref(Bytes), 1: 2}, reference) is None
        assert _calls.find_live({reference: 1}, reference) is None
        assert _calls.find_live([], reference) is None


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


def test_threads(tmp_path):
    """Threads that open a file while others replace it have the one or the other, all of it."""
    path, wrong, ended = str(tmp_path / "x"), [], threading.Event()
    mmtensor.save_array(path, np.zeros(9000, np.uint8))

    def read(mode):
        while not ended.is_set():
            array = mmtensor.open_array(path, "u1", mode=mode)
            if array[0] != array[-1] or array[0] != array[4500]:
                wrong.append(array.tolist())
            if array.flags.writeable != (mode != "r"):
                wrong.append(mode)
            MemoryMappedTensor.from_filename(path, "u1", 9000, mode=mode)

    threads = [threading.Thread(target=read, args=(m,)) for m in ("r", "r+", "c") * 2]
    for thread in threads:
        thread.start()
    try:
        for number in range(250):
            mmtensor.save_array(path, np.full(9000, number, np.uint8), existsok=True)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert not [key for key in pages.live_mappings if path in key]


def test_a_signal_finds_no_door(path, data):
    """While a read-only tensor is made, nobody gets an array that can be written to."""
    arrays = []

    def handler(*_):
        arrays.append(mmtensor.open_array(path, "u1", mode="r"))

    kept = mmtensor.open_array(path, "u1", mode="r")
    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            MemoryMappedTensor.from_filename(path, "u1", len(data), mode="r")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert len(arrays) > 100
    assert not any(array.flags.writeable for array in arrays)
    assert kept[0] == data[0]


_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* As before Linux 6.10 for who is not root, and as a disk that takes little at a time. */
int linkat(int from, const char *old, int to, const char *new, int flags)
{
    int (*real)(int, const char *, int, const char *, int) = dlsym(RTLD_NEXT, "linkat");
    if (flags & AT_EMPTY_PATH) {
        errno = ENOENT;
        return -1;
    }
    return real(from, old, to, new, flags);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t position)
{
    ssize_t (*real)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite");
    return real(fd, data, length < 7 ? length : 7, position);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off_t position)
{
    return pwrite(fd, data, length, position);
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_another_system(tmp_path, monkeypatch, run):
    """Where linkat(2) takes no descriptor, and pwrite(2) little at a time, it works as well."""
    (tmp_path / "shim.c").write_text(_SHIM)
    shim = str(tmp_path / "shim.so")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c"], check=True)
    monkeypatch.setenv("LD_PRELOAD", shim)
    code = f"""
        import numpy as np
        from mmtensor import _calls

        data = np.arange(5000, dtype="u2")
        for number in range(3):
            path = {str(tmp_path)!r} + "/" + str(number)
            found = _calls.create_map(
                _calls.Memory, path, data.ctypes.data, 10_000, False, -100
            )
            assert bytes(found) == data.tobytes() == np.fromfile(path, "u1").tobytes()
        print(found.nbytes)
    """
    assert run(code) == "10000"


def test_on_overlay(run, tmp_path, mounting):
    """A read-only map of a file that was copied up since is not what a reference leads to."""
    code = """
        import os, pickle, subprocess, sys
        import torch
        from mmtensor import MemoryMappedTensor

        os.chdir(sys.argv[1])
        for name in ("low", "up", "work", "all"):
            os.mkdir(name)
        torch.zeros(9).numpy().tofile("low/x")
        options = "lowerdir=low,upperdir=up,workdir=work"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "none", "all"], check=True)
        x = MemoryMappedTensor.from_filename("all/x", torch.float32, 9, mode="r")
        message = pickle.dumps(x)
        print(pickle.loads(message).untyped_storage() is x.untyped_storage())
        with open("all/x", "r+b") as file:
            file.write(torch.ones(9).numpy().tobytes())
        y = pickle.loads(message)
        print(x.sum().item(), y.sum().item())
    """
    assert mounting is None
    assert run(code, tmp_path, private_mounts=True).split("\n") == ["True", "0.0 9.0"]


def test_a_file_whose_status_changed(path, data):
    """Elsewhere a change of status is no other file: its map is found as before."""
    x = MemoryMappedTensor.from_filename(path, "u1", len(data), mode="r")
    message = pickle.dumps(x)
    os.chmod(path, 0o600)
    assert pickle.loads(message).untyped_storage() is x.untyped_storage()
