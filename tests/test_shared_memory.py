"""Anonymous memory: nothing is left behind, nothing is destroyed, nothing is said on stderr."""

import errno
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from conftest import ROOT, descriptors
from processes import METHODS, PATIENCE, Child, echo, facts, open_descriptors, values
from processes import receive_and_forget as receive

import mmtensor
from mmtensor import MemoryMappedTensor, SizeError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm and /proc are Linux's"),
]

# What the programs below begin with: `held` prints the inodes of the blocks of a program.
HEAD = """
import os, sys, torch, mmtensor
from mmtensor import MemoryMappedTensor as M
def held():
    with open("/proc/self/maps") as lines:
        print(*{line.split()[4] for line in lines if "/dev/shm/" in line}, flush=True)
"""


def blocks():
    """List the names in /dev/shm, by the inode numbers of their blocks.

    Other tests may use /dev/shm at the same time: blocks are told apart by their inodes,
    which tmpfs numbers one after the other.
    """
    found = {}
    for entry in os.scandir("/dev/shm"):
        try:
            found[entry.inode()] = entry.name
        except FileNotFoundError:  # another test's, gone meanwhile
            pass
    return found


def held():
    """List the inode numbers of the blocks in /dev/shm that this process maps."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        return {int(line.split()[4]) for line in lines if "/dev/shm/" in line}


def start(program, *arguments):
    """Start a program and return the process, with pipes to it."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", HEAD + program, *map(str, arguments)],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def settled():
    """Count the descriptors of this process after what waits for the collector is gone.

    Threads and processes of earlier tests may close some more at any time: tests repeat what
    they do, so that what leaks one time in ten shows, and ask for no more than before.
    """
    gc.collect()
    return descriptors()


class TestNothingIsLeft:
    """However a process ends, /dev/shm is as it was before."""

    @pytest.mark.parametrize(
        ("end", "code"),
        [
            ("", 0),
            ("raise ValueError('on purpose')", 1),
            ("sys.exit(3)", 3),
            ("os._exit(4)", 4),
            ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
            ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ],
        ids=["end", "exception", "exit", "_exit", "SIGKILL", "SIGTERM"],
    )
    def test_no_name(self, end, code):
        """A process with anonymous tensors has no name in /dev/shm, at work or afterwards."""
        process = start(f"x = [M.ones(1000) for _ in range(5)]\nheld()\ninput()\n{end}")
        inodes = {int(inode) for inode in process.stdout.readline().split()}
        assert len(inodes) == 5
        assert inodes.isdisjoint(blocks())
        _, error = process.communicate("go on\n", timeout=PATIENCE)
        assert process.returncode == code
        assert error == "" or "on purpose" in error
        assert inodes.isdisjoint(blocks())

    def test_killed_with_children(self):
        """Killing parent and child while both hold tensors leaves no name either."""
        program = (
            "import signal\n"
            "x = M.ones(1000)\n"
            "held()\n"
            "if not os.fork():\n"
            "    print(os.getpid(), float(x.sum()), flush=True)\n"
            "    signal.pause()\n"
            "signal.pause()\n"
        )
        process = start(program)
        [inode] = process.stdout.readline().split()
        pid, total = process.stdout.readline().split()
        assert float(total) == 1000
        os.kill(process.pid, signal.SIGKILL)
        os.kill(int(pid), signal.SIGKILL)
        process.communicate(timeout=PATIENCE)
        assert int(inode) not in blocks()

    def test_memory_goes_with_the_tensor(self):
        """Letting go of the last view of a tensor gives up its memory."""
        before = held()
        x = MemoryMappedTensor.ones(1000)
        row = x[3:4]
        mine = held() - before
        assert len(mine) == 1
        del x
        assert mine <= held()
        del row
        assert mine.isdisjoint(held())

    def test_no_resource_tracker(self, run):
        """Neither making, sending nor attaching starts a resource tracker."""
        program = """
            import multiprocessing, os, sys, torch
            from multiprocessing import resource_tracker
            from mmtensor import MemoryMappedTensor as M
            x = M.ones(10)
            context = multiprocessing.get_context("fork")
            near, far = context.Pipe()
            process = context.Process(target=lambda: far.send((far.recv() + 1).tolist()))
            process.start()
            near.send(x)
            print(near.recv() == [2] * 10, end=" ")
            process.join()
            y = M.from_shared_memory(sys.argv[1], "uint8", 8)
            print(int(y[0]), resource_tracker._resource_tracker._pid)
        """
        block = SharedMemory(create=True, size=8)
        try:
            block.buf[0] = 7
            assert run(program, block.name) == "True 7 None"
        finally:
            block.close()
            block.unlink()


class TestFull:
    """A full /dev/shm is an error at creation."""

    @pytest.mark.usefixtures("mounting")
    def test_no_space(self, run):
        """No room for a block is an OSError(ENOSPC), and leaves all room as it was."""
        program = """
            import os, subprocess, torch
            from mmtensor import MemoryMappedTensor as M
            subprocess.run("mount -t tmpfs -o size=4m none /dev/shm", shell=True, check=True)
            small = M.ones(1000)
            count = 4 << 20
            for make in (
                lambda: M.empty(count),
                lambda: M.zeros(count),
                lambda: M.ones(count),
                lambda: M.full((count,), 2.0),
                lambda: M.from_tensor(torch.ones(count)),
                lambda: M.from_tensor(torch.ones(1).expand(count)),
                lambda: M.from_tensor(torch.ones(2, count // 2).t()),
                lambda: M.zeros_like(torch.empty(count)),
            ):
                descriptors = len(os.listdir("/proc/self/fd"))
                free = os.statvfs("/dev/shm").f_bavail
                try:
                    make()
                except OSError as error:
                    print(error.errno, error)
                assert os.statvfs("/dev/shm").f_bavail == free
                assert len(os.listdir("/proc/self/fd")) == descriptors
            assert os.listdir("/dev/shm") == []
            assert float(small.sum()) == 1000
            assert float(M.ones(500_000).sum()) == 500_000
        """
        lines = run(program, private_mounts=True).splitlines()
        assert len(lines) == 8
        for line in lines:
            assert line.startswith(f"{errno.ENOSPC} ")
            assert "cannot reserve 16777216 bytes of shared memory in /dev/shm" in line

    @pytest.mark.usefixtures("mounting")
    def test_many_small_ones(self, run):
        """Small tensors run out of room with an error as well, and never with a signal."""
        program = """
            import subprocess
            from mmtensor import MemoryMappedTensor as M
            subprocess.run("mount -t tmpfs -o size=1m none /dev/shm", shell=True, check=True)
            tensors = []
            try:
                while True:
                    tensors.append(M.ones(10_000))
            except OSError as error:
                print(error.errno, len(tensors), all(float(x.sum()) == 10_000 for x in tensors))
        """
        assert run(program, private_mounts=True) == f"{errno.ENOSPC} 25 True"


class TestDescriptors:
    """A block costs one descriptor, and receiving one leaves none behind."""

    def test_one_per_tensor(self):
        """A tensor in anonymous memory holds one descriptor, and its views hold none."""
        before = settled()
        tensors = [MemoryMappedTensor.ones(3) for _ in range(10)]
        assert descriptors() <= before + 10
        views = [(x[0], x[1:], x.view(3, 1), torch.t(x)) for x in tensors]
        assert descriptors() <= before + 10
        del tensors, views
        assert settled() <= before

    @pytest.mark.slow
    def test_many_tensors(self, run):
        """200 tensors in anonymous memory and 2,000 of files open under ``ulimit -n 256``."""
        program = """
            import tempfile
            from mmtensor import MemoryMappedTensor as M
            anonymous = [M.full((2,), i) for i in range(200)]
            with tempfile.TemporaryDirectory() as directory:
                files = [M.full((2,), i, filename=f"{directory}/{i}") for i in range(2000)]
            print(sum(float(x[1]) for x in anonymous), sum(float(x[1]) for x in files))
        """
        assert run(program, limits="-n 256") == "19900.0 1999000.0"

    def test_no_descriptor_left(self, run):
        """Running out of descriptors is an OSError(EMFILE), and what there is stays usable."""
        program = """
            import errno
            from mmtensor import MemoryMappedTensor as M
            tensors = [M.ones(2)]
            tensors[0].sum()  # torch reads /proc/cpuinfo when it first computes
            try:
                while True:
                    tensors.append(M.ones(2))
            except OSError as error:
                print(error.errno == errno.EMFILE, len(tensors) > 30, float(tensors[-1].sum()))
        """
        assert run(program, limits="-n 64") == "True True 2.0"

    @pytest.mark.parametrize("channel", ["queue", "pipe"])
    @pytest.mark.parametrize("method", METHODS)
    def test_received_and_dropped(self, method, channel):
        """After 100 tensors both sides hold no more descriptors than after the first."""
        child = Child(method, channel=channel)
        try:
            child.ask(echo, MemoryMappedTensor.ones(4))  # starts what serves descriptors
            there, here = child.ask(open_descriptors), settled()
            for number in range(100):
                assert child.ask(receive, MemoryMappedTensor.full((4,), number)) == 4 * number
            assert child.ask(open_descriptors) <= there
            assert settled() <= here
            for number in range(100):
                assert child.ask(echo, MemoryMappedTensor.full((4,), number))[0] == number
            assert child.ask(open_descriptors) <= there
            assert settled() <= here
        finally:
            assert child.close() == 0

    def test_read_twice(self):
        """A message gives its memory once: reading it again says so, and does not hang."""
        message = bytes(ForkingPickler.dumps(MemoryMappedTensor.ones(3)))
        assert values(pickle.loads(message)) == [1, 1, 1]
        with pytest.raises(ConnectionError, match="cannot receive 12 bytes.*asked for this mess"):
            pickle.loads(message)

    def test_same_tensor_many_times(self):
        """A tensor that is sent 100 times costs the receiver one descriptor while it is held."""
        x = MemoryMappedTensor.ones(4)
        near, far = multiprocessing.Pipe()
        near.send(x)
        received = [far.recv()]
        before = settled()
        for _ in range(100):
            near.send(x[1:])
            received.append(far.recv())
        assert settled() <= before
        assert {id(y.untyped_storage()) for y in received} == {id(x.untyped_storage())}
        near.close()
        far.close()


class TestOthersBlocks:
    """Blocks that somebody else owns are used, and never destroyed."""

    @pytest.fixture
    def block(self):
        """Return a block of 64 bytes that this process owns."""
        block = SharedMemory(create=True, size=64)
        block.buf[:64] = bytes(range(64))
        yield block
        try:
            block.close()
        finally:
            block.unlink()

    @pytest.mark.parametrize("end", ["", "os._exit(0)", "del x; M.ones(3)"])
    def test_attached_by_name_elsewhere(self, block, run, end):
        """An unrelated process attaches by name, writes and exits: the owner still has it."""
        program = f"""
            import os, sys
            from mmtensor import MemoryMappedTensor as M
            x = M.from_shared_memory(sys.argv[1], "uint8", -1)
            print(int(x[5]), flush=True)
            x[5] = 99
            {end}
        """
        assert run(program, block.name) == "5"
        assert block.buf[5] == 99
        assert block.name in blocks().values()
        again = SharedMemory(name=block.name)
        assert again.buf[5] == 99
        again.close()

    def test_attached_by_object_elsewhere(self, block):
        """A child that got the block as an object attaches and ends: the owner still has it."""
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_attach_object, args=(block,))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert block.buf[5] == 98
        assert block.name in blocks().values()

    @pytest.mark.parametrize("how", ["object", "name", "name with a slash"])
    def test_same_memory(self, block, how):
        """The tensor and the block are the same bytes; letting the tensor go changes nothing."""
        source = {"object": block, "name": block.name, "name with a slash": "/" + block.name}[how]
        x = MemoryMappedTensor.from_shared_memory(source, torch.uint8, (2, 4), offset=8)
        assert values(x) == [list(range(8, 12)), list(range(12, 16))]
        assert x.mode == "r+"
        x[0, 0] = 77
        assert block.buf[8] == 77
        block.buf[9] = 78
        assert x[0, 1] == 78
        del x
        assert block.name in blocks().values()

    def test_owner_unlinks(self):
        """The tensor stays readable and writable after the owner has closed and unlinked."""
        other = SharedMemory(create=True, size=16)
        x = MemoryMappedTensor.from_shared_memory(other, "int64", 2)
        x[1] = 5
        other.close()
        other.unlink()
        assert values(x) == [0, 5]
        x[0] = 4
        assert values(x) == [4, 5]
        assert other.name not in blocks().values()

    def test_travels(self, block):
        """An attached tensor goes to other processes like any anonymous one."""
        x = MemoryMappedTensor.from_shared_memory(block, "uint8", 16, offset=16)
        child = Child("spawn")
        try:
            back = child.ask(echo, x[4:])
            assert facts(back) == facts(x[4:])
            back[0] = 200
            assert block.buf[20] == 200
        finally:
            assert child.close() == 0
        assert block.name in blocks().values()

    def test_two_windows(self, block):
        """Two attachments at different offsets are different tensors on one block."""
        x = MemoryMappedTensor.from_shared_memory(block, "uint8", 16)
        y = MemoryMappedTensor.from_shared_memory(block, "uint8", 16, offset=8)
        x[8] = 123
        assert y[0] == 123
        assert x.untyped_storage() is not y.untyped_storage()

    def test_descriptors(self, block):
        """Attaching a hundred times and letting go leaves no descriptor."""
        before = settled()
        for _ in range(100):
            MemoryMappedTensor.from_shared_memory(block, "uint8", 16)
        assert settled() <= before

    def test_no_such_block(self):
        """A name that no block has is a FileNotFoundError that names it; none is made."""
        with pytest.raises(FileNotFoundError, match="no shared-memory block of this name.*nobody"):
            MemoryMappedTensor.from_shared_memory("nobody", "uint8", 4)
        assert "nobody" not in blocks().values()

    def test_too_small(self, block):
        """A block that is too small for the shape is a SizeError with both sizes."""
        before = settled()
        size = os.stat(f"/dev/shm/{block.name}").st_size
        for _ in range(10):
            with pytest.raises(SizeError, match=f"must have 8000 bytes.*its size is {size} bytes"):
                MemoryMappedTensor.from_shared_memory(block, "int64", 1000)
        assert settled() <= before

    @pytest.mark.parametrize("source", [3, None, b"name", object()])
    def test_wrong_type(self, source):
        """What is neither a block nor a name is a TypeError."""
        with pytest.raises(TypeError, match="expected a multiprocessing.shared_memory"):
            MemoryMappedTensor.from_shared_memory(source, "uint8", 4)

    @pytest.mark.parametrize(
        ("offset", "error", "pattern"),
        [
            (3, ValueError, "offset must be a multiple of the 4 bytes of torch.float32"),
            (-4, ValueError, "offset must be non-negative"),
            (1.5, TypeError, "offset must be an integer"),
            (1 << 20, SizeError, "block"),
        ],
    )
    def test_wrong_offset(self, block, offset, error, pattern):
        """An offset that cannot be is an error."""
        with pytest.raises(error, match=pattern):
            MemoryMappedTensor.from_shared_memory(block, "float32", 2, offset=offset)


def _attach_object(block):
    x = MemoryMappedTensor.from_shared_memory(block, "uint8", 16)
    x[5] = 98
    del x
    block.close()


class TestFork:
    """A forked child shares what its parent holds."""

    def test_inherited(self):
        """Parent and child see each other's writes; the child's end takes nothing away."""
        x = MemoryMappedTensor.zeros(4)
        context = multiprocessing.get_context("fork")
        near, far = context.Pipe()

        def child():
            x[0] = 1
            far.send("written")
            far.recv()
            far.send(values(x))

        process = context.Process(target=child)
        process.start()
        assert near.recv() == "written"
        assert x[0] == 1
        x[1] = 2
        near.send("go on")
        assert near.recv() == [1, 2, 0, 0]
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert values(x) == [1, 2, 0, 0]
        near.close()
        far.close()

    def test_plain_fork(self, run):
        """After os.fork, parent and child each let go without a word."""
        program = """
            import os
            from mmtensor import MemoryMappedTensor as M
            x = M.zeros(4)
            if not (pid := os.fork()):
                x[2] = 7
            else:
                assert os.waitpid(pid, 0)[1] == 0
                print(x.tolist())
        """
        assert run(program) == "[0.0, 0.0, 7.0, 0.0]"


class TestSharedTensors:
    """Anonymous tensors are what torch calls shared."""

    def test_flags(self, tmp_path):
        """``is_shared`` is true, ``share_memory_`` returns the tensor, but for ``c``."""
        x = MemoryMappedTensor.ones(3)
        assert x.is_shared()
        assert x[1:].untyped_storage().is_shared()
        assert x.share_memory_() is x
        path = mmtensor.save_array(tmp_path / "x", x.numpy())
        private = MemoryMappedTensor.from_filename(path, "float32", 3, mode="c")
        assert not private.is_shared()
        with pytest.raises(RuntimeError, match='mode "c".*private to its process'):
            private.share_memory_()

    def test_module(self):
        """A module with shared buffers is shared: a child's write is seen."""
        module = torch.nn.Module()
        module.register_buffer("x", MemoryMappedTensor.zeros(3))
        module.share_memory()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=lambda: module.x.fill_(2))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert values(module.x) == [2, 2, 2]

    def test_no_file_name(self):
        """Anonymous memory has no file name, and says how to get one."""
        with pytest.raises(RuntimeError, match="anonymous memory.*from_tensor"):
            MemoryMappedTensor.ones(3).filename  # noqa: B018  # reading it is the point

    @pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
    def test_small_shapes(self, shape):
        """Tensors without elements and without dimensions are made and travel."""
        x = MemoryMappedTensor.ones(shape)
        near, far = multiprocessing.Pipe()
        near.send(x)
        back = far.recv()
        assert (back.shape, values(back)) == (x.shape, values(x))
        near.close()
        far.close()


def test_killed_while_making():
    """A process that is killed while it makes tensors leaves no name, whenever that is."""
    program = "while True:\n    x = M.ones(100_000)\n    held()"
    for count in (1, 7, 30):
        process = start(program)
        inodes = {int(process.stdout.readline()) for _ in range(count)}
        process.kill()
        out, _ = process.communicate(timeout=PATIENCE)
        inodes.update(int(line) for line in out.splitlines(keepends=True) if line.endswith("\n"))
        assert len(inodes) >= count
        assert inodes.isdisjoint(blocks())


def test_where_in_a_block():
    """The position counts from the start of the block."""
    block = SharedMemory(create=True, size=64)
    try:
        x = MemoryMappedTensor.from_shared_memory(block, torch.float32, 4, offset=16)
        assert mmtensor.locate(x).offset == 16
        assert mmtensor.locate(x[1:]).offset == 20
        del x
    finally:
        block.close()
        block.unlink()
