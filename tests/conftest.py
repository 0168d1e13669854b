"""What the tests share: scratch files, snapshots of directories, and other processes."""

import contextlib
import gc
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

# Before torch is imported: the threads of OpenMP do not survive a fork, and tests fork.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import numpy as np
import pytest

from mmtensor import mapping

ROOT = Path(__file__).parent.parent

# Files are slow now and then, which is no property of the code under test. Examples come
# from a fixed seed: a change is judged by what it does, not by luck. The fixtures that
# property tests use (tmp_path) may hold the files of earlier examples; each makes its own.
hypothesis.settings.register_profile(
    "mmtensor",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,  # so is a machine that does something else beside
    ],
)
hypothesis.settings.load_profile("mmtensor")


@pytest.fixture
def path(tmp_path):
    """Return a name of a file that does not exist, in a directory of its own."""
    return str(tmp_path / "x.bin")


@pytest.fixture
def numbers(path):
    """Write a file of 3 x 4 float32 numbers with NumPy; return its path and the array."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    array.tofile(path)
    return path, array


@pytest.fixture
def careful(monkeypatch):
    """Let every step of opening and of making a file be taken in Python, one at a time."""
    monkeypatch.setattr(mapping, "open_map", lambda *_: None)
    monkeypatch.setattr(mapping, "create_map", lambda *_: None)


def snapshot(directory):
    """Return what can be seen of a directory from outside: names, kinds, sizes, bytes."""
    seen = {}
    for entry in sorted(Path(directory).rglob("*")):
        status = entry.lstat()
        content = None
        if entry.is_symlink():
            content = os.readlink(entry)
        elif entry.is_file():
            content = entry.read_bytes()
        name = str(entry.relative_to(directory))
        seen[name] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return seen


@pytest.fixture
def unchanged(tmp_path):
    """Return a context in which nothing in the test's directory is created, changed or removed."""

    @contextlib.contextmanager
    def watch(directory=tmp_path):
        before = snapshot(directory)
        yield
        assert snapshot(directory) == before

    return watch


@pytest.fixture
def run():
    """Return a function that runs a program in a new interpreter and returns what it prints."""

    def run_program(
        program,
        *arguments,
        private_mounts=False,
        limits="",
        timeout=120,
        flags=("-W", "error"),
    ):
        command = [sys.executable, *flags, "-c", textwrap.dedent(program), *map(str, arguments)]
        if limits:
            command = ["bash", "-c", f'ulimit {limits} && exec "$@"', "bash", *command]
        if private_mounts:
            command = ["unshare", "--mount", "--propagation", "private", *command]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.stderr == ""
        return done.stdout.strip()

    return run_program


def _may_mount():
    if os.name != "posix" or os.geteuid() != 0:
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="session")
def _mounting():
    return _may_mount()


@pytest.fixture
def mounting(_mounting):
    """Skip a test that needs to mount a small file system where that is not allowed."""
    if not _mounting:
        pytest.skip("mounting a small file system needs root and unshare(1)")


@pytest.fixture
def public_directory():
    """Return a directory that every user may enter and write to; skip who cannot be another.

    pytest's own directories are for their owner only.
    """
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory(prefix="mmtensor-") as directory:
        os.chmod(directory, 0o777)  # noqa: S103  # for the user nobody
        yield Path(directory)


def mapped(path):
    """Count the maps of a file in this process, as the kernel lists them."""
    name = os.path.realpath(path)
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        return sum(line.rstrip("\n").endswith(name) for line in lines)


def settled_descriptors():
    """Count them when nothing is left to be collected of tests that ran before."""
    gc.collect()
    time.sleep(0.2)  # multiprocessing closes what it has handed on in a thread of its own
    return descriptors()


def descriptors():
    """Count the open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def few_descriptors(free):
    """Leave this process so many descriptors, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 100, limits[1]))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(free):
            os.close(held.pop())
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
