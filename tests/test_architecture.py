"""The rules of docs/architecture.md, as tests."""

import ast
import importlib
import inspect
import io
import re
import subprocess
import sys
import tokenize
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmtensor

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mmtensor"
TREES = {
    path.stem: ast.parse(path.read_text(encoding="utf-8"), str(path))
    for path in sorted(PACKAGE.glob("*.py"))
}
MODULES = [name for name in TREES if name != "__init__"]
# What is compiled, and what its stub says that there is.
COMPILED = {
    path.stem: [
        node.target.id if isinstance(node, ast.AnnAssign) else node.name
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AnnAssign)
    ]
    for path in PACKAGE.glob("*.pyi")
}

# Module -> level, in order: a module imports from lower levels, and from modules of its own
# level that come earlier here.
LEVELS = {
    "errors": 0,
    "_calls": 0,
    "_copying": 0,
    "modes": 1,
    "dtypes": 1,
    "geometry": 1,
    "syscalls": 1,
    "rawfile": 2,
    "directory": 2,
    "blocks": 2,
    "memory": 3,
    "pages": 3,
    "shared_memory": 3,
    "mapping": 3,
    "arrays": 4,
    "compiling": 5,
    "storage": 5,
    "tables": 5,
    "adoption": 5,
    "creation": 5,
    "constructors": 5,
    "reference": 5,
    "views": 5,
    "prefetch": 5,
    "allocation": 5,
    "copying": 5,
    "indexing": 5,
    "tensor": 5,
    "bridge": 5,
    "jagged_layout": 6,
    "jagged_files": 6,
    "jagged_saving": 6,
    "jagged_reference": 6,
    "jagged_source": 6,
    "jagged_parts": 6,
    "jagged_strings": 6,
    "jagged_bridges": 6,
    "jagged_constructors": 6,
    "jagged_searching": 6,
    "jagged_gathering": 6,
    "jagged": 6,
    "jagged_writer": 6,
    "jagged_batches": 6,
    "manifest": 6,
    "texts": 7,
    "tree": 7,
    "leaves": 7,
    "indexed": 7,
    "shaping": 7,
    "joining": 7,
    "keyed": 7,
    "saving": 7,
    "loading": 7,
    "shared": 7,
    "modules": 7,
    "rendering": 7,
    "structure": 7,
    "upward": 7,
    "tensordict": 7,
    "chunks": 8,
    "jobs": 8,
    "crew": 8,
    "channel": 8,
    "pool": 8,
    "results": 8,
    "parallel": 8,
    "batches": 8,
    "testing": 9,
    "legacy": 10,
}
ORDER = list(LEVELS)
FIRST_WITH_TORCH = 5
# What the package stands on beside the standard library, and who may import it.
THIRD_PARTY = {
    "numpy": set(MODULES),
    "ml_dtypes": {"dtypes"},
    "torch": {name for name, level in LEVELS.items() if level >= FIRST_WITH_TORCH},
    "hypothesis": {"testing"},
    "pytest": {"testing"},
    "ctypes": {"syscalls"},
}

# (module, imported name) -> why the import stands inside a function.
INSIDE_FUNCTIONS: dict[tuple[str, str], str] = {}

EXPORTS = list(mmtensor.__all__)


class Import(types.SimpleNamespace):
    """One imported module: who imports it, its dotted name, where, and inside what."""


def _imports(module: str) -> Iterator[Import]:
    """Yield every import of a module, wherever it stands but for TYPE_CHECKING blocks."""

    def walk(node: ast.AST, *, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}:{child.lineno}: imports are absolute"
                source = str(child.module)
                # "from package import module" imports the module.
                parts = source in {"mmtensor", "multiprocessing", "torch", "torch.utils"}
                names = [f"{source}.{a.name}" if parts else source for a in child.names]
            for name in dict.fromkeys(names):
                yield Import(module=module, name=name, line=child.lineno, inside=inside)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, inside=inside or function)

    return walk(TREES[module], inside=False)


def _code_lines(path: Path) -> int:
    """Count lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*skip, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def _in_a_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_has_a_level():
    """The table of levels names the modules that exist, and no others."""
    assert sorted(LEVELS) == sorted([*MODULES, *COMPILED])


def test_levels_are_documented():
    """The table in docs/architecture.md has the same modules in the same order."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (?:\d|\u2013) \| `(\w+)` \|", text, re.MULTILINE) == ORDER


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    """A module imports from lower levels, or from earlier modules of its own level."""
    own = [i for i in _imports(module) if i.name.partition(".")[0] == "mmtensor"]
    wrong = [
        f"{module}:{i.line} imports {i.name}"
        for i in own
        if i.name.removeprefix("mmtensor.") not in ORDER[: ORDER.index(module)]
    ]
    assert wrong == []


@pytest.mark.parametrize("module", MODULES)
def test_dependencies_stay_where_they_belong(module):
    """Torch starts at its level; ctypes, hypothesis and pytest are each one module's business."""
    wrong = [
        f"{module}:{i.line} imports {i.name}"
        for i in _imports(module)
        if module not in THIRD_PARTY.get(i.name.partition(".")[0], MODULES)
    ]
    assert wrong == []


def test_imports_are_exports():
    """What a module takes from another one is in the list of what that one has to offer."""

    def exports(module: str) -> list[str]:
        name = module.removeprefix("mmtensor.")
        return COMPILED.get(name) or importlib.import_module(module).__all__

    wrong = [
        f"{module}:{node.lineno} imports {node.module}.{alias.name}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mmtensor.")
        for alias in node.names
        if alias.name not in exports(str(node.module))
    ]
    assert wrong == []


def test_imports_are_at_the_top():
    """An import inside a function is one of those listed here with a reason."""
    inside = {(i.module, i.name) for module in TREES for i in _imports(module) if i.inside}
    assert inside == set(INSIDE_FUNCTIONS)


@pytest.mark.parametrize("module", TREES)
def test_all_is_declared(module):
    """A module declares in ``__all__`` what it offers, and offers what it declares."""
    name = "mmtensor" if module == "__init__" else f"mmtensor.{module}"
    loaded = __import__(name, fromlist=["__all__"])
    declared = loaded.__all__
    assert sorted(set(declared)) == sorted(declared)
    assert [missing for missing in declared if not hasattr(loaded, missing)] == []


@pytest.mark.parametrize("module", TREES)
def test_files_stay_small(module):
    """A file has at most 400 lines of code."""
    assert _code_lines(PACKAGE / f"{module}.py") <= 400


def test_import_loads_no_torch():
    """``import mmtensor``, and its array side at work, load no torch."""
    code = (
        "import sys, tempfile, numpy, mmtensor\n"
        "with tempfile.TemporaryDirectory() as directory:\n"
        "    path = mmtensor.save_array(directory + '/x', numpy.arange(3))\n"
        "    array = mmtensor.open_array(path, 'int64')\n"
        "    assert mmtensor.locate(array[1:]).offset == 8\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'torch'])"
    )
    assert _in_a_new_process(code) == "[]"


def test_lazy_names_are_listed_before_they_are_loaded():
    """``dir(mmtensor)`` has every export, also those that have not been loaded yet."""
    code = (
        "import sys, mmtensor\n"
        "missing = set(mmtensor.__all__) - set(dir(mmtensor))\n"
        "print(sorted(missing), 'torch' in sys.modules)"
    )
    assert _in_a_new_process(code) == "[] False"


def test_lazy_names_resolve_in_a_fresh_process():
    """``from mmtensor import *`` resolves every export, whatever has been loaded before."""
    code = "from mmtensor import *; print(MemoryMappedTensor.__name__, to_torch.__name__)"
    assert _in_a_new_process(code) == "MemoryMappedTensor to_torch"


def test_an_unknown_name_is_an_attribute_error():
    """Asking the package for a name that it does not have names the name."""
    with pytest.raises(AttributeError, match="no attribute 'memory_mapped_tensor'"):
        mmtensor.memory_mapped_tensor  # noqa: B018  # reading it is the point


@pytest.mark.parametrize("name", EXPORTS)
def test_export_is_documented(name):
    """Every export is on an API page."""
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.md"))
    directive = rf"^\.\. auto(?:function|class|exception):: mmtensor\.{name}$"
    assert len(re.findall(directive, pages, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", EXPORTS)
def test_export_has_an_example(name):
    """The docstring of every export is in numpydoc's form, with an example in it."""
    text = inspect.cleandoc(getattr(mmtensor, name).__doc__)
    summary, blank, *_ = [*text.splitlines(), ""]
    assert summary.endswith(".")
    assert blank == ""
    example = re.search(r"^Examples\n-{8}\n(.*)", text, re.MULTILINE | re.DOTALL)
    assert example
    assert ">>> " in example[1]


@pytest.mark.parametrize("name", EXPORTS)
def test_parameters_are_documented(name):
    """Every parameter of an exported function or class is in its Parameters section."""
    export = getattr(mmtensor, name)
    if isinstance(export, type) and issubclass(export, BaseException):
        return  # callers catch them; the package makes them
    if isinstance(export, type) and not {"__new__", "__init__"} & set(vars(export)):
        return  # made by the package's functions, with a constructor that it inherits
    text = inspect.cleandoc(export.__doc__)
    section = re.search(
        r"^Parameters\n-{10}\n(.*?)(?=\n\w+\n-{4,}\n|\Z)", text, re.MULTILINE | re.DOTALL
    )
    documented = re.findall(
        r"^\*{0,2}(\w[\w, *]*?)(?: :.*)?$", section[1] if section else "", re.MULTILINE
    )
    names = {part.strip(" *") for line in documented for part in line.split(",")}
    assert [p for p in inspect.signature(export).parameters if p not in names] == []
