"""PyTorch's own operator database, run on memory-mapped tensors in every mode.

`op_db` has samples for about 600 operators. Each runs on regular tensors and on tensors of
a file in the same geometry; results, errors and bytes are compared. Every test takes one
share of the operators. A crash ends the process of the test: pytest-xdist reports it with
the share that was running, and faulthandler prints the stack.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import mmtensor
from mmtensor import MemoryMappedTensor, ReadOnlyError

# torch's testing module has loaded a hypothesis profile of its own, for all that follows.
hypothesis.settings.load_profile("mmtensor")

pytestmark = [
    pytest.mark.slow,
    # The operators warn about themselves: deprecations, beta states, resized outputs.
    pytest.mark.filterwarnings("ignore"),
]

PAGE = Path(__file__).parent.parent / "docs" / "operators.md"
MODES = ("r", "r+", "c")
# Shares of the operators, and samples of each operator, spread evenly over all it has.
SHARES = {torch.float32: 8, torch.bool: 2, torch.int64: 2, torch.complex64: 2}
SAMPLES = {torch.float32: 32, torch.bool: 8, torch.int64: 8, torch.complex64: 8}
FEW = 8

# What torch says when a kernel asks a read-only storage for an address to write to.
REFUSAL = "Cannot access data pointer of Tensor"

# Operators whose result is memory that nobody has written: only its geometry is compared.
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
# In-place methods that change sizes and strides, and no element: allowed in mode r.
METADATA = {
    "as_strided_",
    "resize_",
    "resize_as_",
    "squeeze_",
    "t_",
    "transpose_",
    "unsqueeze_",
}
# Operators that write to their input; some samples give them nothing new to write.
WRITERS = {
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "native_batch_norm",
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
}
# Operators that only read and ask for an address to write to: name in the database, dtypes,
# and how docs/operators.md calls it.
READS_AND_RAISES = {
    "max": ({torch.bool}, "torch.max(x)"),
    "min": ({torch.bool}, "torch.min(x)"),
    "aminmax": ({torch.bool}, "torch.aminmax(x)"),
    "nn.functional.channel_shuffle": (set(SAMPLES), "channel_shuffle"),
    "nn.functional.scaled_dot_product_attention": (
        {torch.float32},
        "scaled_dot_product_attention",
    ),
}

OPERATORS = [op for op in op_db if not op.name.startswith("jiterator")]  # CUDA only


class Csr(NamedTuple):
    """The dense tensors that a sparse one consists of."""

    crow_indices: torch.Tensor
    col_indices: torch.Tensor
    values: torch.Tensor
    size: torch.Size


class Sheet:
    """The storages of some tensors in one raw file."""

    def __init__(self, path: Path, tree: Any) -> None:
        self.path = path
        self.tree = tree_map(_taken_apart, tree)
        self.tensors = [leaf for leaf in tree_leaves(self.tree) if isinstance(leaf, torch.Tensor)]
        self.places: dict[int, tuple[int, int]] = {}
        data = bytearray()
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.places:
                self.places[storage._cdata] = (len(data), storage.nbytes())
                data += torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
                data += bytes(-len(data) % 64)
        self.data = bytes(data) or bytes(64)

    def write(self) -> None:
        """Write the file as a new one."""
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(self.data)

    def opened(self, mode: str) -> "Tensors":
        """Write the file, and open the tensors in a mode."""
        self.write()
        memory = {
            key: MemoryMappedTensor.from_filename(
                self.path, torch.uint8, nbytes, mode=mode, offset=position, partial=True
            )
            for key, (position, nbytes) in self.places.items()
        }
        return Tensors(self, memory)

    def regular(self) -> "Tensors":
        """Return the tensors in regular memory."""
        data = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
        memory = {
            key: data[position : position + nbytes].clone()
            for key, (position, nbytes) in self.places.items()
        }
        return Tensors(self, memory)


class Tensors:
    """The tensors of a sheet, in the tree that they came in."""

    def __init__(self, sheet: Sheet, memory: dict[int, torch.Tensor]) -> None:
        self.sheet = sheet
        self.memory = memory
        found = {id(t): _like(t, memory[t.untyped_storage()._cdata]) for t in sheet.tensors}
        tree = tree_map(lambda leaf: found.get(id(leaf), leaf), sheet.tree)
        self.tree = tree_map(_put_together, tree, is_leaf=lambda leaf: isinstance(leaf, Csr))

    def held(self) -> bytes:
        """Return what is in memory now, laid out as in the file."""
        data = bytearray(self.sheet.data)
        for key, (position, nbytes) in self.sheet.places.items():
            data[position : position + nbytes] = mmtensor.to_numpy(self.memory[key]).tobytes()
        return bytes(data)

    def file(self) -> bytes:
        """Return what the file holds now."""
        return self.sheet.path.read_bytes()


def _taken_apart(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.sparse_csr:
        return Csr(leaf.crow_indices(), leaf.col_indices(), leaf.values(), leaf.size())
    return leaf


def _put_together(leaf: Any) -> Any:
    return torch.sparse_csr_tensor(*leaf) if isinstance(leaf, Csr) else leaf


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return the view of some bytes that has the geometry of a tensor."""
    whole = len(memory) // tensor.itemsize * tensor.itemsize
    elements = memory[:whole].view(tensor.dtype)
    found = elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


class Outcome(NamedTuple):
    """What a call gave: a result or an error."""

    result: Any
    error: Exception | None


def _called(function: Callable[..., Any], tree: Any) -> Outcome:
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats its stack, for CUDA
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # operators of the database draw from it
    first, args, kwargs = tree
    try:
        return Outcome(function(first, *args, **kwargs), None)
    except Exception as error:  # noqa: BLE001  # whatever it is, both sides must agree
        return Outcome(None, error)


def _difference(op: Any, actual: Any, expected: Any) -> str | None:
    """Say how two results of an operator differ, or return None."""
    found, wanted = tree_leaves(actual), tree_leaves(expected)
    if len(found) != len(wanted):
        return f"{len(found)} results instead of {len(wanted)}"
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            difference = _tensor_difference(op, one, other)
        else:
            same = type(one) is type(other) and repr(one) == repr(other)
            difference = None if same else f"{one!r} instead of {other!r}"
        if difference:
            return difference
    return None


def _tensor_difference(op: Any, one: Any, other: torch.Tensor) -> str | None:
    if type(one) is not torch.Tensor:
        if mmtensor.locate(one) is None:
            return f"a {type(one).__name__} that is on no mapping"
        one = one.as_subclass(torch.Tensor)
    if one.layout is torch.strided and one.stride() != other.stride():
        return f"strides {one.stride()} instead of {other.stride()}"
    if op.name in UNINITIALISED:
        one, other = one.to("meta"), other.to("meta")
    # The linear algebra library rounds by where its scratch memory happens to lie.
    tolerance = {} if op.name.startswith("linalg.") else {"rtol": 0, "atol": 0}
    try:
        torch.testing.assert_close(one, other, equal_nan=True, **tolerance)
    except AssertionError as error:
        return str(error)
    return None


def _cases(op: Any, dtype: torch.dtype, most: int) -> Iterator[tuple[str, Any]]:
    """Yield the name of some samples of an operator, and their arguments."""
    if dtype not in op.supported_dtypes("cpu"):
        return
    torch.default_generator.manual_seed(0)
    # Not op.sample_inputs: it searches the stack for a unittest, 50 ms at a time.
    samples = list(op.sample_inputs_func(op, "cpu", dtype, requires_grad=False))
    variant = f".{op.variant_test_name}" if op.variant_test_name else ""
    for number in range(0, len(samples), max(1, len(samples) // most)):
        sample = samples[number]
        tree = (sample.input, tuple(sample.args), dict(sample.kwargs))
        yield f"{op.name}{variant} sample {number}", tree


def _share(dtype: torch.dtype, share: int, most: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, operator and arguments for one share of the operators."""
    for op in OPERATORS[share :: SHARES[dtype]]:
        for name, tree in _cases(op, dtype, most):
            yield name, op, tree


def _report(problems: dict[Any, str]) -> str:
    # Not left to pytest: it takes minutes to compare long dictionaries.
    return "\n".join(f"{name}: {problem}" for name, problem in list(problems.items())[:20])


def _refused(outcome: Outcome) -> bool:
    error = outcome.error
    return isinstance(error, ReadOnlyError) or (
        isinstance(error, RuntimeError) and REFUSAL in str(error)
    )


def _needless(op: Any, dtype: torch.dtype) -> bool:
    return op.name in READS_AND_RAISES and dtype in READS_AND_RAISES[op.name][0]


def _disagreement(op: Any, dtype: torch.dtype, sheet: Sheet, mode: str) -> str | None:
    """Say how an operator on tensors of a file differs from one on regular tensors."""
    regular = sheet.regular()
    expected = _called(op, regular.tree)
    after = regular.held()
    tensors = sheet.opened(mode)
    outcome = _called(op, tensors.tree)
    written = sheet.data if mode == "r" else after
    if tensors.file() != (written if mode == "r+" else sheet.data):
        return "the file is not what it should be"
    if tensors.held() != written:
        return "the memory is not what it should be"
    if expected.error is not None:
        if type(outcome.error) is not type(expected.error):
            return f"{outcome.error!r} instead of {expected.error!r}"
        return None
    if mode == "r" and after != sheet.data:
        return None if _refused(outcome) else f"a write passed: {outcome.error!r}"
    if mode == "r" and _refused(outcome) and (op.name in WRITERS or _needless(op, dtype)):
        return None
    if outcome.error is not None:
        return repr(outcome.error)
    return _difference(op, outcome.result, expected.result)


def _shares(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("dtype", "share"),
        [(dtype, share) for dtype in dtypes for share in range(SHARES[dtype])],
        ids=lambda value: str(value).removeprefix("torch."),
    )


@_shares(*SHARES)
def test_operators(dtype, share, tmp_path):
    """An operator gives what it gives for regular tensors; in mode r, a writing one raises."""
    problems = {}
    for name, op, tree in _share(dtype, share, SAMPLES[dtype]):
        sheet = Sheet(tmp_path / "x", tree)
        for mode in MODES:
            problem = _disagreement(op, dtype, sheet, mode)
            if problem:
                problems[name, mode] = problem
    assert not problems, _report(problems)


def _method(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of the tensor's own class."""
    return lambda first, *args, **kwargs: getattr(first, name)(*args, **kwargs)


def _write_problem(function: Callable[..., Any], method: Any, sheet: Sheet) -> str | None:
    """Say what is wrong with a call that writes to its first argument, in all modes."""
    regular = sheet.regular()
    if _called(function, regular.tree).error is not None:
        return None
    if regular.tree[0].shape != sheet.tree[0].shape:
        # addbmm_ makes its tensor larger; files do not grow.
        error = _called(method, sheet.opened("r+").tree).error
        return None if "not resizable" in str(error) else f"it grew: {error!r}"
    after = regular.held()
    for mode in MODES[1:]:
        tensors = sheet.opened(mode)
        outcome = _called(method, tensors.tree)
        if outcome.error is not None:
            return f"{mode}: {outcome.error!r}"
        if outcome.result is not tensors.tree[0]:
            return f"{mode}: it does not return the tensor itself"
        if tensors.held() != after:
            return f"{mode}: the memory is not what it should be"
        if tensors.file() != (after if mode == "r+" else sheet.data):
            return f"{mode}: the file is not what it should be"
    return _read_only_problem(function, method, sheet, changes=after != sheet.data)


def _read_only_problem(
    function: Callable[..., Any], method: Any, sheet: Sheet, *, changes: bool
) -> str | None:
    """Say what is wrong with a writing call in mode r, as a function and as a method."""
    tensors = sheet.opened("r")
    if changes and not _refused(_called(function, tensors.tree)):
        return "r: the function does not raise"
    error = _called(method, tensors.tree).error
    if method is not function and (
        not isinstance(error, ReadOnlyError) or str(sheet.path) not in str(error)
    ):
        return f"r: {error!r} is no ReadOnlyError that names the file"
    return None if tensors.held() == tensors.file() == sheet.data else "r: bytes changed"


@_shares(torch.float32, torch.bool, torch.int64)
def test_inplace_variants(dtype, share, tmp_path):
    """An in-place method writes to file and memory as it does elsewhere; in mode r it raises."""
    problems = {}
    tried = set()
    for name, op, tree in _share(dtype, share, FEW):
        for variant in (op.inplace_variant, op.inplace_operator_variant):
            if variant is None or not isinstance(tree[0], torch.Tensor):
                continue
            own = getattr(variant, "__name__", "")
            if variant is op.inplace_variant and not hasattr(torch.Tensor, own):
                own = op.name + "_"  # the database calls some of the methods in a lambda
            if own in METADATA:
                continue
            method = _method(own) if hasattr(torch.Tensor, own) else variant
            problem = _write_problem(variant, method, Sheet(tmp_path / "x", tree))
            tried.add(own)
            if problem:
                problems[name, own] = problem
    assert not problems, _report(problems)
    assert tried, "no in-place operator in this share"


def _out_problem(op: Any, tree: Any, sheet: Sheet) -> str | None:
    """Say what is wrong with a call that has ``out=`` in a file, in all modes."""

    def call(tensors: Tensors) -> Outcome:
        return _called(lambda *args, **kwargs: op(*args, out=tensors.tree, **kwargs), tree)

    regular = sheet.regular()
    if call(regular).error is not None:
        return None
    after = regular.held()
    for mode in MODES[1:]:
        tensors = sheet.opened(mode)
        outcome = call(tensors)
        if outcome.error is not None:
            return f"{mode}: {outcome.error!r}"
        held = tensors.held()
        if held != after:
            # The linear algebra library rounds by where memory happens to lie.
            rounds = op.name.startswith("linalg.")
            problem = _difference(op, tensors.tree, regular.tree) if rounds else "its bytes differ"
            if problem:
                return f"{mode}: the memory is not what it should be: {problem}"
        if tensors.file() != (held if mode == "r+" else sheet.data):
            return f"{mode}: the file is not what it should be"
    tensors = sheet.opened("r")
    if after != sheet.data and not _refused(call(tensors)):
        return "r: it does not raise"
    return None if tensors.held() == tensors.file() == sheet.data else "r: bytes changed"


@_shares(torch.float32)
def test_out(dtype, share, tmp_path):
    """``out=`` writes to file and memory as it does elsewhere; in mode r it raises."""
    problems = {}
    tried = set()
    for name, op, tree in _share(dtype, share, FEW):
        if not op.supports_out:
            continue
        expected = _called(op, tree).result
        outs = tree_leaves(expected)
        if not all(isinstance(out, torch.Tensor) and out.layout is torch.strided for out in outs):
            continue
        places = tree_map(lambda out: torch.ones(out.shape, dtype=out.dtype), expected)
        places = places if isinstance(places, torch.Tensor) else tuple(places)
        problem = _out_problem(op, tree, Sheet(tmp_path / "x", places))
        tried.add(op.name)
        if problem:
            problems[name] = problem
    assert not problems, _report(problems)
    assert tried, "no operator with out= in this share"


@_shares(torch.float32, torch.complex64)
def test_class_of_results(dtype, share, tmp_path):
    """A method's result is a MemoryMappedTensor where it is on the mapping, else regular."""
    problems = {}
    for name, op, tree in _share(dtype, share, FEW):
        own = getattr(op.method_variant, "__name__", "")
        if not isinstance(tree[0], torch.Tensor) or not hasattr(torch.Tensor, own):
            continue
        tensors = Sheet(tmp_path / "x", tree).opened("r+")
        for result in tree_leaves(_called(_method(own), tensors.tree).result):
            if isinstance(result, torch.Tensor) and result.layout is torch.strided:
                mapped = mmtensor.locate(result) is not None
                if type(result) is not (MemoryMappedTensor if mapped else torch.Tensor):
                    problems[name] = f"{type(result).__name__}, on a mapping: {mapped}"
    assert not problems, _report(problems)


@pytest.mark.parametrize("name", READS_AND_RAISES)
def test_needless_refusals(name, tmp_path):
    """An operator on the list of needless refusals raises, and the documentation names it."""
    dtypes, written = READS_AND_RAISES[name]
    for dtype in dtypes:
        refusals = [
            _refused(_called(op, Sheet(tmp_path / "x", tree).opened("r").tree))
            for op in OPERATORS
            if op.name == name
            for _, tree in _cases(op, dtype, 10_000)
        ]
        assert any(refusals), dtype
    assert written in PAGE.read_text(encoding="utf-8")


REFUSED_OUTSIDE_THE_DATABASE = {
    "torch.nn.LSTM": torch.nn.LSTM(4, 4),
    "torch.nn.Conv2d(3, 8, 1)": lambda x: torch.nn.functional.conv2d(
        x.view(torch.float64)[None], torch.ones(2, 1, 1, 1, dtype=torch.float64)
    ),
    "to_mkldnn": lambda x: x.to_mkldnn(),
    "sparse CSR": lambda x: x.relu().to_sparse_csr() @ x,
    "sparse COO": lambda x: torch.sparse_coo_tensor(torch.arange(4)[None], x[0]).to_dense(),
}


@pytest.mark.parametrize("name", REFUSED_OUTSIDE_THE_DATABASE)
def test_needless_refusals_outside_the_database(name, tmp_path):
    """A known needless refusal is one in mode r, works in r+ and c, and is documented."""
    function = REFUSED_OUTSIDE_THE_DATABASE[name]
    sheet = Sheet(tmp_path / "x", torch.eye(4) + 1)
    with pytest.raises(RuntimeError, match=REFUSAL):
        function(sheet.opened("r").tree)
    for mode in MODES[1:]:
        function(sheet.opened(mode).tree)
        assert sheet.path.read_bytes() == sheet.data
    assert name in PAGE.read_text(encoding="utf-8")
