"""Bytes at an address: compiled where that can be, and the same where it cannot."""

import os
import shutil
import subprocess
import sys
import sysconfig
import weakref

import numpy as np
import pytest
from conftest import ROOT, descriptors, mapped

from mmtensor import copying, memory
from mmtensor.modes import MODES

COMPILER = shutil.which("cc")
HEADERS = sysconfig.get_path("include")
COMPILABLE = COMPILER is not None and os.path.exists(f"{HEADERS}/Python.h")
needs_compiler = pytest.mark.skipif(not COMPILABLE, reason="needs a C compiler and headers")


class Plain(memory._Memory):
    """What there is where nothing was compiled."""

    __slots__ = ("__weakref__",)


@needs_compiler
@pytest.mark.skipif(os.environ.get("MMTENSOR_COMPILED") == "0", reason="switched off")
def test_it_is_compiled():
    """Where there is a compiler, the installation used it; a mistake in C would go unseen."""
    assert memory.COMPILED
    assert copying.COMPILED


@needs_compiler
def test_no_warnings(tmp_path):
    """The compiler has nothing to say, of C11 and of all that it usually looks at."""
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fPIC"]
    flags += [
        "-Wno-missing-field-initializers",
        f"-I{HEADERS}",
        "-shared",
        "-o",
        tmp_path / "x.so",
    ]
    sources = sorted((ROOT / "mmtensor").glob("*.c"))
    assert len(sources) == 2
    for source in sources:
        subprocess.run([COMPILER, *flags, source], check=True)


def test_without_it(tmp_path, monkeypatch, run):
    """The environment switches it off."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MMTENSOR_COMPILED", "0")
    code = """
        import numpy as np
        import mmtensor
        from mmtensor import copying, memory

        print(memory.COMPILED, mmtensor.save_array("x", np.arange(3)).name)
        print(mmtensor.open_array("x", int).tolist())
    """
    assert run(code).split("\n") == ["False x", "[0, 1, 2]"]


def test_another_interface(run):
    """What was compiled from other sources is not used."""
    code = """
        import sys, types

        sys.modules["mmtensor._calls"] = fake = types.ModuleType("mmtensor._calls")
        for name in (
            "Memory", "create_map", "find_live", "handle_at", "open_map", "size_at"
        ):
            setattr(fake, name, None)
        fake.INTERFACE = 0
        from mmtensor import copying, memory

        print(memory.COMPILED, memory.Memory.__name__)
    """
    assert run(code) == "False _Memory"


def test_plain_memory(path):
    """Map, descriptor and entries go with it; those of others stay."""
    np.arange(10_000, dtype="u1").tofile(path)
    before = descriptors()
    found, table, mode = Plain(), {"other": 1}, MODES["r+"]
    with open(path, "r+b") as file:
        found.map_bytes(file.fileno(), 4097, 9, mode.protection, mode.map_flags)
    found.hold.descriptor = os.open(path, os.O_RDONLY)
    entry = table["x"] = weakref.ref(found)
    for key in ("x", "other", "nothing"):
        found.hold.found_under(table, key, entry)
    array = np.asarray(found)
    array[0] = 99
    assert np.fromfile(path, "u1")[4097] == 99
    np.testing.assert_array_equal(array[1:], np.arange(4098, 4106).astype("u1"))
    np.testing.assert_array_equal(found.writeable, array)
    assert memory._size_at(path, os.stat(path)) == 10_000
    assert memory._size_at(path + "?", os.stat(path)) == -1
    assert mapped(path) == 1
    del found
    assert (mapped(path), descriptors()) == (1, before + 1)
    del array
    assert (mapped(path), descriptors()) == (0, before)
    assert table == {"other": 1}


@pytest.mark.slow
@pytest.mark.skipif(not memory.COMPILED, reason="nothing else was tested")
def test_the_same_without_it():
    """What opens, makes and sends files passes its tests without it as well."""
    names = ("mapping", "arrays", "rawfile", "creation", "reference", "storage", "wrong_input")
    names += ("indexing", "jagged")
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
