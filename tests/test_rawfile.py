"""Creating, reserving, writing, replacing and checking files."""

import ctypes
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, descriptors, settled_descriptors, snapshot

import mmtensor
from mmtensor import MemoryMappedTensor, TensorDict, rawfile, syscalls
from mmtensor.testing import WriterContract


class TestSaveArray(WriterContract):
    """`save_array`."""

    def write(self, path, *, existsok=False):
        return mmtensor.save_array(path, np.arange(3000.0), existsok=existsok)


class TestSaveSmallArray(WriterContract):
    """`save_array` of an array that is written without reserving first."""

    def write(self, path, *, existsok=False):
        return mmtensor.save_array(path, np.ones(4), existsok=existsok)


class TestSaveDurably(WriterContract):
    """`save_array` with fsync."""

    def write(self, path, *, existsok=False):
        return mmtensor.save_array(path, np.arange(3000.0), existsok=existsok, durable=True)


class TestCreateArray(WriterContract):
    """`create_array`."""

    def write(self, path, *, existsok=False):
        return mmtensor.create_array(path, "f8", 30_000, existsok=existsok)


class TestCreateSparseArray(WriterContract):
    """`create_array` without reserving."""

    def write(self, path, *, existsok=False):
        return mmtensor.create_array(path, "f8", 30_000, existsok=existsok, preallocate=False)


class TestFromTensor(WriterContract):
    """`MemoryMappedTensor.from_tensor`."""

    def write(self, path, *, existsok=False):
        return MemoryMappedTensor.from_tensor(
            torch.arange(3000.0), filename=path, existsok=existsok
        )


class TestFromStridedTensor(WriterContract):
    """`MemoryMappedTensor.from_tensor` of a tensor whose memory has gaps."""

    def write(self, path, *, existsok=False):
        source = torch.arange(6000.0).view(50, 120)[:, ::2].t()
        return MemoryMappedTensor.from_tensor(source, filename=path, existsok=existsok)


class TestZeros(WriterContract):
    """`MemoryMappedTensor.zeros`."""

    def write(self, path, *, existsok=False):
        return MemoryMappedTensor.zeros(30_000, filename=path, existsok=existsok)


class TestEmpty(WriterContract):
    """`MemoryMappedTensor.empty`."""

    def write(self, path, *, existsok=False):
        return MemoryMappedTensor.empty((60,), filename=path, existsok=existsok)


class TestFull(WriterContract):
    """`MemoryMappedTensor.full`."""

    def write(self, path, *, existsok=False):
        return MemoryMappedTensor.full((30_000,), fill_value=3, filename=path, existsok=existsok)


class TestWithoutUnnamedFiles(WriterContract):
    """`save_array` on a file system that has no O_TMPFILE."""

    @pytest.fixture(autouse=True)
    def _no_tmpfile(self, monkeypatch):
        monkeypatch.setattr(rawfile, "_TMPFILE", 0)

    def write(self, path, *, existsok=False):
        return mmtensor.save_array(path, np.arange(3000.0), existsok=existsok)

    def test_refused_rename(self, tmp_path, monkeypatch):
        """A file system without RENAME_NOREPLACE gets a link, which refuses as well."""

        def refuse(source, target):
            del source, target
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(rawfile, "rename_noreplace", refuse)
        self.write(tmp_path / "x")
        assert os.listdir(tmp_path) == ["x"]

    def test_target_that_appears_meanwhile(self, tmp_path, monkeypatch):
        """A file that appears under the name during the write is not overwritten."""
        check = rawfile.write_chunks

        def write(*arguments):
            check(*arguments)
            (tmp_path / "x").write_bytes(b"theirs")

        monkeypatch.setattr("mmtensor.arrays.write_chunks", write)
        with pytest.raises(FileExistsError, match="existsok=True to replace it"):
            self.write(tmp_path / "x")
        assert os.listdir(tmp_path) == ["x"]
        assert (tmp_path / "x").read_bytes() == b"theirs"


def test_target_that_appears_meanwhile(tmp_path, monkeypatch):
    """A file that appears under the name during the write is not overwritten."""
    check = rawfile.write_chunks

    def write(*arguments):
        check(*arguments)
        (tmp_path / "x").write_bytes(b"theirs")

    monkeypatch.setattr("mmtensor.arrays.write_chunks", write)
    with pytest.raises(FileExistsError, match="existsok=True to replace it"):
        mmtensor.save_array(tmp_path / "x", np.ones(3))
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"theirs"


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize("length", [1, 200, 255])
def test_long_names(tmp_path, monkeypatch, length, unnamed):
    """A name of the greatest length that the file system allows can be written and replaced."""
    if not unnamed:
        monkeypatch.setattr(rawfile, "_TMPFILE", 0)
    for value in (1, 2):
        mmtensor.save_array(tmp_path / ("x" * length), np.full(3, value), existsok=value == 2)
    assert np.fromfile(tmp_path / ("x" * length), int).tolist() == [2, 2, 2]
    assert os.listdir(tmp_path) == ["x" * length]


def test_too_long_name(tmp_path):
    """A name that is too long is the system's error, and leaves nothing."""
    with pytest.raises(OSError, match="File name too long"):
        mmtensor.save_array(tmp_path / ("x" * 256), np.ones(3))
    assert os.listdir(tmp_path) == []


def test_fifo_as_target(tmp_path):
    """A FIFO is not replaced by a file."""
    os.mkfifo(tmp_path / "x")
    with pytest.raises(FileExistsError, match="cannot replace a FIFO, socket or device"):
        mmtensor.save_array(tmp_path / "x", np.ones(3), existsok=True)
    assert stat.S_ISFIFO((tmp_path / "x").lstat().st_mode)


@pytest.mark.parametrize("mode", ["r", "r+", "c", None])
def test_socket_as_source(tmp_path, unchanged, mode):
    """A socket is a ValueError in every mode."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with unchanged(), pytest.raises(ValueError, match="regular file, got a FIFO, socket"):
            mmtensor.open_array(tmp_path / "s", "u1", mode=mode)


@pytest.mark.parametrize("mode", ["r", "r+", "c", None])
def test_device_as_source(mode):
    """A device is a ValueError in every mode."""
    with pytest.raises(ValueError, match="regular file, got a FIFO, socket or device"):
        mmtensor.open_array("/dev/null", "u1", mode=mode)


@pytest.mark.parametrize("mode", ["r", "r+", "c", None])
def test_symbolic_link_as_source(numbers, mode):
    """Reading through a symbolic link works: it is the file that is opened."""
    path, values = numbers
    os.symlink(path, path + ".link")
    array = mmtensor.open_array(path + ".link", "f4", (3, 4), mode=mode)
    np.testing.assert_array_equal(array, values)
    assert array.filename == path + ".link"


def test_symbolic_link_to_a_directory(tmp_path):
    """A symbolic link above the file is followed when writing."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    mmtensor.save_array(tmp_path / "link" / "x", np.ones(3))
    assert os.listdir(tmp_path / "real") == ["x"]


def test_kill_leaves_old_or_new(tmp_path):
    """A process that is killed while it replaces a file leaves the old bytes or the new."""
    program = textwrap.dedent("""
        import sys, numpy as np, mmtensor
        values = [np.full(1 << 20, fill, np.uint8) for fill in (1, 2)]
        print("ready", flush=True)
        while True:
            for value in values:
                mmtensor.save_array(sys.argv[1], value, existsok=True)
    """)
    target = tmp_path / "x"
    np.full(1 << 20, 1, np.uint8).tofile(target)
    pause = np.random.default_rng(0)
    seen = set()
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(target)],
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
        ) as process:
            process.stdout.readline()
            time.sleep(pause.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
        content = target.read_bytes()
        assert len(content) == 1 << 20
        assert len(set(content)) == 1
        seen.add(content[0])
        # Between the two system calls that put a replacement in place it has a name of its
        # own; whatever is killed then leaves that, whole, and never more than one.
        for leftover in set(os.listdir(tmp_path)) - {"x"}:
            assert leftover.startswith(".x.")
            (tmp_path / leftover).unlink()
    assert seen <= {1, 2}


MAKERS = [
    "mmtensor.save_array(path, np.ones(4_000_000, 'f4'))",
    "mmtensor.save_array(path, np.ones((2_000, 4_000), 'f4')[:, ::2])",
    "mmtensor.create_array(path, 'f4', 4_000_000)",
    "M.from_tensor(torch.ones(4_000_000), filename=path)",
    "M.from_tensor(torch.ones(2_000, 2_000).t(), filename=path)",
    "M.from_tensor(torch.ones(4_000_000), filename=path, copy_data=False)",
    "M.from_tensor(torch.ones(1), filename=path, shape=(4_000_000,))",
    "M.zeros(4_000_000, filename=path)",
    "M.empty(4_000_000, filename=path)",
    "M.ones(4_000_000, filename=path)",
    "M.full((4_000_000,), fill_value=3, filename=path)",
    "M.zeros_like(torch.ones(4_000_000), filename=path)",
    "M(torch.ones(4_000_000), filename=path)",
]


class TestNoRoom:
    """Sixteen megabytes where four are, with every function that makes memory or a file."""

    HEAD = """
        import errno, os, subprocess, sys
        import numpy as np, torch
        import mmtensor
        from mmtensor import MemoryMappedTensor as M
        directory, *makers = sys.argv[1:]
        path = os.path.join(directory, "x")

        def mount(directory):
            command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", directory]
            subprocess.run(command, check=True)

        def attempt(make, directory):
            before = len(os.listdir("/proc/self/fd"))
            try:
                eval(make)
            except OSError as error:
                assert len(os.listdir("/proc/self/fd")) == before
                assert os.listdir(directory) == []
                return errno.errorcode[error.errno]
            return "made"
    """

    def test_full_disk(self, run, tmp_path, mounting):
        """A full disk is OSError(ENOSPC) at creation, and nothing of the file is left."""
        del mounting
        program = f"""{self.HEAD}
        mount(directory)
        print({{attempt(make, directory) for make in makers}})
        open(path, "wb").close()
        free = os.statvfs(directory)
        print(free.f_bavail == free.f_blocks)
        """
        printed = run(program, tmp_path, *MAKERS, private_mounts=True)
        assert printed.splitlines() == ["{'ENOSPC'}", "True"]
        assert os.listdir(tmp_path) == []

    def test_full_shared_memory(self, run, tmp_path, mounting):
        """A full /dev/shm is OSError(ENOSPC) at creation; what fits is usable to the end."""
        del mounting
        program = f"""{self.HEAD}
        mount("/dev/shm")
        print({{attempt(make, "/dev/shm") for make in makers}})
        x = M.zeros(500_000)
        x.fill_(1)
        print(int(x.sum()), attempt("M.zeros(700_000)", "/dev/shm"))
        """
        makers = [m.replace("filename=path", "filename=None") for m in MAKERS if m[:2] == "M."]
        printed = run(program, tmp_path, *makers, private_mounts=True)
        assert printed.splitlines() == ["{'ENOSPC'}", "500000 ENOSPC"]

    def test_limit_on_file_size(self, run, tmp_path):
        """A limit on the size of files (ulimit -f) is OSError(EFBIG), and no file is left."""
        program = f"""{self.HEAD}
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        print({{attempt(make, directory) for make in makers}})
        """
        assert run(program, tmp_path, *MAKERS) == "{'EFBIG'}"


def test_full_disk_keeps_the_old_file(run, tmp_path, mounting):
    """A replacement for which there is no room leaves the old file as it was."""
    del mounting
    program = """
        import os, subprocess, sys, numpy as np, mmtensor
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "none", sys.argv[1]], check=True
        )
        path = os.path.join(sys.argv[1], "x")
        np.arange(700_000, dtype="f4").tofile(path)
        try:
            mmtensor.save_array(path, np.ones(700_000, "f4"), existsok=True)
        except OSError as error:
            print(error.strerror, os.listdir(sys.argv[1]))
        print((np.fromfile(path, "f4") == np.arange(700_000)).all())
    """
    printed = run(program, tmp_path, private_mounts=True)
    assert printed.splitlines() == ["No space left on device ['x']", "True"]


@pytest.mark.parametrize("unnamed", [True, False])
def test_interrupts_leave_no_files(run, tmp_path, unnamed):
    """Ctrl-C at any moment of a write arrives as such, and leaves the old file or the new one."""
    done = run(
        f"""
        import os, random, signal, sys
        from mmtensor import rawfile
        if not {unnamed}:
            rawfile._TMPFILE = 0
        os.chdir({str(tmp_path)!r})
        sys.unraisablehook = lambda _: None  # an interrupt within a finalizer is only printed

        def interrupt(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        random.seed(1)
        open("x", "wb").write(b"x")
        interrupts = 0
        for _ in range(1500):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(3e-6, 4e-4))
                for _ in range(4):
                    with rawfile.NewFile(os.path.abspath("x"), existsok=True) as file:
                        os.write(file.fd, b"x")
                        file.publish()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        print(interrupts > 100, os.listdir(), os.stat("x").st_size)
        """
    )
    assert done.strip() == "True ['x'] 1"


def test_sparse_on_purpose(tmp_path):
    """``preallocate=False`` takes no disk space, and reserving takes all of it at once."""
    size = 8 << 20
    mmtensor.create_array(tmp_path / "sparse", "u1", size, preallocate=False)
    mmtensor.create_array(tmp_path / "full", "u1", size)
    MemoryMappedTensor.zeros(
        size, dtype=torch.uint8, filename=tmp_path / "sparse2", preallocate=False
    )
    MemoryMappedTensor.empty(size, dtype=torch.uint8, filename=tmp_path / "full2")
    blocks = {entry.name: entry.stat().st_blocks * 512 for entry in tmp_path.iterdir()}
    sizes = {entry.stat().st_size for entry in tmp_path.iterdir()}
    assert sizes == {size}
    assert blocks["sparse"] == blocks["sparse2"] == 0
    assert min(blocks["full"], blocks["full2"]) >= size


@pytest.mark.parametrize("size", [1, 4096, 65_536, 65_537, 200_000])
def test_small_files_are_reserved(tmp_path, size):
    """Files of every size have their blocks when they are created, and are all zeros."""
    mmtensor.create_array(tmp_path / "x", "u1", size)
    os.sync()  # ext4 decides on blocks late, and small files live in the inode elsewhere
    assert (tmp_path / "x").read_bytes() == bytes(size)
    assert (tmp_path / "x").stat().st_blocks * 512 >= size


def test_large_write(tmp_path, monkeypatch):
    """A write that the system cuts short is continued."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
    values = np.random.default_rng(0).integers(0, 255, 12_345, np.uint8)
    mmtensor.save_array(tmp_path / "x", values)
    assert (tmp_path / "x").read_bytes() == values.tobytes()


def test_relative_paths(tmp_path, monkeypatch):
    """A relative path means the directory at the time of the call, for ever."""
    monkeypatch.chdir(tmp_path)
    saved = mmtensor.save_array("x", np.arange(3))
    array = mmtensor.open_array("x", int)
    tensor = MemoryMappedTensor.from_filename("x", int, 3)
    monkeypatch.chdir("/")
    assert str(saved) == array.filename == tensor.filename == str(tmp_path / "x")
    assert tensor.tolist() == [0, 1, 2]


def test_links_on_the_way_up(tmp_path, monkeypatch):
    """A path that goes through a link and up again means what it means to the system."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "deep").mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there" / "deep")
    monkeypatch.chdir(tmp_path / "here")
    mmtensor.save_array("link/../x", np.arange(3))
    assert sorted(os.listdir(tmp_path / "there")) == ["deep", "x"]
    assert np.fromfile("link/../x", int).tolist() == [0, 1, 2]
    x = MemoryMappedTensor.from_filename("link/../x", int, 3)
    assert x.filename == str(tmp_path / "there" / "x")
    assert mmtensor.save_array("../here/y..z", np.arange(3)).name == "y..z"


@pytest.mark.parametrize("name", ["données.bin", "数 据", "a\nb", b"\xff\xfe.bin", "~", "%s{0}"])
@pytest.mark.parametrize("kind", [str, bytes, "path"])
def test_names(tmp_path, name, kind):
    """Names may be str, bytes and paths, of any characters or bytes."""
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    if kind is not bytes:
        path = os.fsdecode(path)
    if kind == "path":
        path = type(tmp_path)(path)
    mmtensor.save_array(path, np.arange(3))
    x = MemoryMappedTensor.from_filename(path, int, 3, mode="r")
    assert x.tolist() == [0, 1, 2]
    assert os.fsencode(x.filename) == os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    with pytest.raises(ValueError, match="must have 32 bytes"):
        mmtensor.open_array(path, int, 4)
    with pytest.raises(FileExistsError, match="existsok=True"):
        mmtensor.save_array(path, np.arange(3))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", ValueError, "filename must name a file, got an empty string"),
        (b"", ValueError, "filename must name a file, got an empty string"),
        (3, TypeError, "filename must be a str, bytes or a path, got 3"),
        (None, TypeError, "filename must be a str, bytes or a path, got None"),
        (["x"], TypeError, r"filename must be a str, bytes or a path, got \['x'\]"),
        ("a\0b", ValueError, "null byte"),
        ("new/", IsADirectoryError, "ends as the name of a directory does: 'new/'"),
        ("new/.", IsADirectoryError, "ends as the name of a directory does"),
        ("sub/new//", IsADirectoryError, "ends as the name of a directory does"),
    ],
)
def test_wrong_names(tmp_path, monkeypatch, name, error, message):
    """What is no name of a file is an error, and no file appears."""
    monkeypatch.chdir(tmp_path)
    before = settled_descriptors()
    for attempt in (
        lambda: mmtensor.open_array(name, int),
        lambda: mmtensor.save_array(name, np.ones(3)),
        lambda: mmtensor.create_array(name, int, 3),
        lambda: MemoryMappedTensor.from_filename(name, int, 3),
    ):
        with pytest.raises(error, match=message):
            attempt()
    assert snapshot(tmp_path) == {}
    assert descriptors() == before


@pytest.mark.parametrize("existsok", [False, True])
@pytest.mark.parametrize("character", ["n", "\N{SNOWMAN}"])
def test_a_name_that_is_too_long_is_refused_first(tmp_path, monkeypatch, character, existsok):
    """What will take long to write is not written when its name cannot be given."""
    written = []
    monkeypatch.setattr(rawfile, "write_chunks", lambda *_: written.append(1))
    name = tmp_path / (character * (256 // len(character.encode()) + 1))
    with pytest.raises(OSError, match="File name too long") as error:
        mmtensor.save_array(name, np.zeros(1 << 20), existsok=existsok)
    assert error.value.errno == errno.ENAMETOOLONG
    assert error.value.filename == str(name)
    assert written == []
    assert snapshot(tmp_path) == {}


def test_durable_write(tmp_path, monkeypatch):
    """A durable write waits for the file, before it gets its name, and for the directory."""
    synced = []
    fsync = os.fsync

    def watch(fd):
        synced.append((stat.S_IFMT(os.fstat(fd).st_mode), (tmp_path / "x").exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watch)
    mmtensor.save_array(tmp_path / "x", np.arange(3), durable=True)
    assert synced == [(stat.S_IFREG, False), (stat.S_IFDIR, True)]


@pytest.mark.parametrize("name", [None, "other"])
def test_errors_while_writing_name_the_file(tmp_path, name):
    """A descriptor has no name, and so has what the system says of one."""
    path = str(tmp_path / "x")
    error = OSError(errno.ENOSPC, "No space left on device", name)
    with (
        pytest.raises(OSError, match="No space left on dev") as caught,
        rawfile.NewFile(path),
    ):
        raise error
    assert caught.value.filename == (name or path)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("careful")
def test_tensors_that_are_written_bit_by_bit(tmp_path, monkeypatch):
    """A call that writes less than it was given is followed by one for the rest."""
    sizes = []

    def little(fd, address, length, position):
        sizes.append(length)
        return pwrite(fd, address, min(length, 7), position)

    pwrite = rawfile.pwrite
    monkeypatch.setattr(rawfile, "pwrite", little)
    x = torch.arange(5, dtype=torch.int32)
    MemoryMappedTensor.from_tensor(x, filename=tmp_path / "x")
    TensorDict({"y": x}).memmap(tmp_path / "td")
    assert sizes == [20, 13, 6] * 2
    for path in (tmp_path / "x", tmp_path / "td" / "y.memmap"):
        assert path.read_bytes() == x.numpy().tobytes()


@pytest.mark.usefixtures("careful")
def test_calls_that_are_interrupted(tmp_path, monkeypatch):
    """A signal during a call is no error, and any other number is."""
    codes = [errno.EINTR, errno.EINTR, errno.ENOSPC]

    def refuse(*_):
        ctypes.set_errno(codes.pop(0))
        return -1

    monkeypatch.setattr(syscalls, "_pwrite", refuse)
    with pytest.raises(OSError, match="No space left") as error:
        MemoryMappedTensor.from_tensor(torch.ones(2), filename=tmp_path / "x")
    assert error.value.filename == str(tmp_path / "x")
    assert codes == []
    assert snapshot(tmp_path) == {}
