"""Every example runs: in docstrings, on the documentation's pages, and as a program.

On a page, a ``pycon`` block is a doctest; the blocks of one page share their names. A
``python`` block is a program: its first line is a comment with its file name, it is saved
under that name and run, and what it prints is the ``text`` block after it. There are no
other Python blocks, so nothing on a page goes unchecked.
"""

import doctest
import importlib
import itertools
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import mmtensor

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = ["mmtensor", *(f"mmtensor.{m.name}" for m in pkgutil.iter_modules(mmtensor.__path__))]
# What the examples in docstrings take for granted: NumPy, torch, and what mmtensor exports.
NAMES = {name: getattr(mmtensor, name) for name in mmtensor.__all__}
NAMES |= {"mmtensor": mmtensor, "np": np, "torch": torch}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

_BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def _docstring_examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in MODULES:
        found = finder.find(importlib.import_module(name), extraglobs=NAMES)
        yield from (test for test in found if test.examples)


def _blocks(page: Path) -> list[tuple[str, str, int]]:
    """Return kind, code and line number of the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        (found["kind"], found["code"], text.count("\n", 0, found.start()) + 2)
        for found in _BLOCK.finditer(text)
    ]


def _check(test: doctest.DocTest) -> None:
    report: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, program, *arguments],
        cwd=program.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("example", list(_docstring_examples()), ids=lambda example: example.name)
def test_docstring(example, tmp_path, monkeypatch):
    """The example in a docstring gives what it says."""
    monkeypatch.chdir(tmp_path)
    _check(example)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(kind in {"pycon", "python"} for kind, *_ in _blocks(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page(page, tmp_path, monkeypatch):
    """The examples of a page, run from top to bottom, give what they say."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = [*_blocks(page), ("end", "", 0)]
    for (kind, code, line), following in itertools.pairwise(blocks):
        where = f"{page.name}:{line}"
        if kind == "pycon":
            test = doctest.DocTestParser().get_doctest(code, names, where, str(page), line - 1)
            _check(test)
            names = test.globs
        elif kind == "python":
            name = re.match(r"# (\w+\.py)\n", code)
            assert name, f"{where}: a python block starts with a comment, its file name"
            program = tmp_path / name[1]
            program.write_text(code, encoding="utf-8")
            done = _run(program)
            assert done.returncode == 0, f"{where}: {done.stderr}"
            assert following[0] == "text", f"{where}: a text block must say what is printed"
            assert done.stdout == following[1], where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """A relative link on a page leads to a file that exists."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_digits_keeps_its_promises(tmp_path):
    """The example program trains on digits, and exits with zero only if all promises hold."""
    done = _run(ROOT / "docs" / "examples" / "digits.py", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
    accuracy = re.search(r"test accuracy +(\d\.\d+)", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 0.9
    assert (tmp_path / "digits.images.f32").stat().st_size == 1797 * 64 * 4


def test_pack_images_keeps_its_promises(tmp_path):
    """The example packs images and source files, and exits with zero only if all come back."""
    done = _run(ROOT / "docs" / "examples" / "pack_images.py", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
    elements = [
        int(n.replace(",", ""))
        for n in re.findall(r"^  ([\d,]+) elements", done.stdout, re.MULTILINE)
    ]
    assert len(elements) == 2
    assert elements[0] >= 10
    assert elements[1] >= 500
    assert (tmp_path / "both.offsets.memmap").stat().st_size == 8 * (2 * elements[1] + 1)
