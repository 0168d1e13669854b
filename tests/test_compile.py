"""Memory-mapped tensors under torch.compile and torch's other program transformations."""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from mmtensor import MemoryMappedTensor

pytestmark = [
    pytest.mark.slow,
    # torch.compile warns about its own deprecated parts and about missing compilers' flags.
    pytest.mark.filterwarnings("ignore"),
]

MODES = ("r", "r+", "c")
BACKENDS = ("eager", "aot_eager", "inductor")
IDS = torch.tensor([0, 2, 2])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def make(tmp_path):
    """Return a function that writes random numbers to a file of its own and opens them."""
    generator = torch.Generator().manual_seed(0)

    def opened(mode, *shape, dtype=torch.float32):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
        values = torch.randn(shape or (8, 8), generator=generator, dtype=dtype)
        MemoryMappedTensor.from_tensor(values, filename=path)
        return MemoryMappedTensor.from_filename(path, dtype, tuple(values.shape), mode=mode)

    return opened


def _file(x):
    return torch.from_numpy(np.fromfile(x.filename, "float32")).view(x.shape)


def _views(x):
    return (
        x[1:3] * 2,
        x[0] + x[:, 1],
        x.t() + 1,
        x.T @ x.mT,
        x.view(-1) * 2,
        x.permute(1, 0) + 1,
        x.unbind(0)[1] + x.chunk(2)[0],
        x.reshape(4, 16) + 1,
        x.real + x.H + x.mH + x.adjoint(),
        x.detach() + x.data,
        x.narrow(0, 1, 2).unsqueeze(0) + 1,
        x[0].expand(3, 8) + x.flatten()[:8],
        sum(row.sum() for row in x),
    )


def _reads(x):
    return (
        x[IDS],
        x[[0, 2]],
        x + 1,
        torch.cat([x, x]),
        torch.nn.functional.linear(x, x),
        x.sort().values,
        x.cumsum(0),
        torch.where(x > 0, x, 0.0),
        x.max() - x.min(),
        x.to(torch.float64),
        x.clone(),
        x * len(x) + x.shape[1],
        x + (2 if x.requires_grad else 1),
    )


def _writes(x):
    x.add_(1)
    x += 1
    x[0] = 5
    x[IDS] = torch.ones(3, 8)
    x.t().mul_(2)
    x[1:3].fill_(0.5)
    torch.sub(x, 1, out=x)
    return x.sum()


@pytest.mark.parametrize("function", [_views, _reads])
@pytest.mark.parametrize("mode", ["r+", "c"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reading(backend, mode, function, make):
    """A compiled function, in one graph, gives the regular results of the uncompiled one."""
    x = make(mode)
    before = _file(x)
    found = torch.compile(function, backend=backend, fullgraph=True)(x)
    for one, other in zip(found, function(x.clone()), strict=True):
        torch.testing.assert_close(one, other)
        assert type(one) is torch.Tensor
    assert torch.equal(_file(x), before)


@pytest.mark.parametrize("mode", ["r+", "c"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_writing(backend, mode, make):
    """What a compiled function writes reaches the file in mode r+ and stays private in c."""
    x = make(mode)
    before = _file(x)
    expected = x.clone()
    result = torch.compile(_writes, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(result, _writes(expected))
    assert torch.equal(x, expected)
    assert torch.equal(_file(x), expected if mode == "r+" else before)


@pytest.mark.parametrize("function", [_views, _reads])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reading_read_only(backend, function, make):
    """A compiled function of a tensor in mode r gives the right results."""
    x = make("r")
    found = torch.compile(function, backend=backend)(x)
    for one, other in zip(found, function(x.clone()), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_read_only(backend, make):
    """A compiled function that writes to a tensor in mode r raises, and no byte changes."""
    x = make("r")
    before = x.clone()
    with pytest.raises(RuntimeError, match="read-only|Cannot access data pointer"):
        torch.compile(_writes, backend=backend)(x)
    assert torch.equal(x, before)
    assert torch.equal(_file(x), before)


@pytest.mark.parametrize("plain", [False, True])
def test_one_graph_read_only(plain, make):
    """With fullgraph, code generation for mode r is an error that says how to go on."""
    x = torch.t(make("r")) if plain else make("r")
    function = torch.compile(lambda x: x + 1, fullgraph=True)
    with pytest.raises(Exception, match=r'opened with mode "r".*mode="c".*x\.clone\(\)'):
        function(x)


def test_compiled_for_another_mode(make):
    """Code that was generated for mode r+ refuses a tensor in mode r, whose file stays."""
    function = torch.compile(lambda x: x.mul_(2))
    function(make("r+"))
    x = make("r")
    before = _file(x)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        function(x)
    assert torch.equal(_file(x), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_modules(backend, mode, make):
    """A compiled module with buffers and parameters in files gives results and gradients."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", make(mode))
            self.weight = nn.Parameter(make(mode), requires_grad=False)
            self.trained = nn.Linear(8, 8)

        def forward(self, x):
            return self.trained(x @ self.weight.T) + self.shift[0]

    net = Net()
    x = torch.ones(4, 8)
    expected = net(x)
    expected.sum().backward()
    gradient, net.trained.weight.grad = net.trained.weight.grad, None
    found = torch.compile(net, backend=backend)(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(net.trained.weight.grad, gradient)


@pytest.mark.parametrize("mode", MODES)
def test_training_on_a_constant(mode, make):
    """Gradients of a compiled model on a tensor of a file are those on a regular tensor."""
    x = make(mode)
    layer = nn.Linear(8, 8)

    def loss(x):
        return layer(x).square().sum()

    (expected,) = torch.autograd.grad(loss(x.clone()), [layer.weight])
    (found,) = torch.autograd.grad(torch.compile(loss)(x), [layer.weight])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_own_attributes(backend, mode, make):
    """What only memory-mapped tensors have works in compiled functions, outside the graph."""

    def function(x):
        x.prefetch([0])
        x.advise("normal")
        y = x.take(IDS) * (2 if x.mode == mode else 3)
        return y + len(x.filename) + x.is_shared()

    x = make(mode)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_taking_rows_in_one_graph(mode, make):
    """x.take compiles, into a new tensor and into a buffer."""
    x = make(mode)
    out = torch.zeros(3, 8)
    found = torch.compile(lambda x: (x.take(IDS), x.take(IDS, out=out)), fullgraph=True)(x)
    assert torch.equal(found[0], x[IDS])
    assert torch.equal(out, x[IDS])


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_dynamic_shapes(mode, make):
    """One graph with dynamic shapes serves tensors of all lengths."""
    torch._dynamo.utils.counters.clear()
    function = torch.compile(lambda x: x.sum(0) + x.shape[0], fullgraph=True, dynamic=True)
    for length in (3, 5, 9, 17):
        x = make(mode, length, 8)
        torch.testing.assert_close(function(x), x.sum(0) + length)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiles_once(make):
    """Another tensor of another file with the same geometry compiles nothing again."""
    torch._dynamo.utils.counters.clear()
    function = torch.compile(lambda x: (x[1:3].t() * 2).sum(), fullgraph=True)
    for _ in range(20):
        function(make("r+"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_functional_transforms(mode, make):
    """vmap, grad and jacrev over and around a tensor of a file give the regular results."""
    x = make(mode)
    regular = x.clone()
    weight = torch.arange(8.0)

    def row(r):
        return r[1:3].flip(0) + r.view(2, 4).t().reshape(-1)[:2]

    def outer(r, table):
        return (r * table[0] + table.t()[1]).sum()

    def loss(weight, r):
        return (weight * r).sum() ** 2

    assert torch.equal(vmap(row)(x), vmap(row)(regular))
    ones = torch.ones(3, 8)
    torch.testing.assert_close(
        vmap(lambda r: outer(r, x))(ones), vmap(lambda r: outer(r, regular))(ones)
    )
    torch.testing.assert_close(
        vmap(grad(loss), (None, 0))(weight, x), vmap(grad(loss), (None, 0))(weight, regular)
    )
    torch.testing.assert_close(grad(lambda x: x[0].square().sum())(x)[0], 2 * regular[0])
    torch.testing.assert_close(jacrev(lambda weight: x @ weight)(weight), regular)


@pytest.mark.parametrize("mode", MODES)
def test_checkpointing(mode, make):
    """Activation checkpointing recomputes from a tensor of a file."""
    x = make(mode)
    layer = nn.Linear(8, 8)

    def forward(x):
        return layer(x[1:].view(7, 8)).relu().sum()

    (found,) = torch.autograd.grad(checkpoint(forward, x, use_reentrant=False), [layer.weight])
    (expected,) = torch.autograd.grad(forward(x.clone()), [layer.weight])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_export_and_trace(mode, make):
    """torch.export, torch.fx and torch.jit.trace take a tensor of a file as an example."""

    class Module(nn.Module):
        def forward(self, x):
            return x[1:3] * 2 + x.t()[0]

    x = make(mode)
    expected = Module()(x.clone())
    for strict in (False, True):
        exported = torch.export.export(Module(), (x,), strict=strict).module()
        torch.testing.assert_close(exported(x), expected)
    torch.testing.assert_close(torch.fx.symbolic_trace(Module())(x), expected)
    traced = torch.jit.trace(Module(), x, check_trace=False)
    torch.testing.assert_close(traced(x), expected)
    torch.testing.assert_close(traced(x.clone()), expected)


@pytest.mark.parametrize("mode", MODES)
def test_threads(mode, make):
    """Threads that read one tensor at the same time all get the same values."""
    x = make(mode)
    expected = (x[1:3] @ x.t()).sum().item()
    found = []

    def read():
        found.extend((x[1:3] @ x.t()).sum().item() for _ in range(100))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 400


def _comparisons(x):
    mask = x > 3
    torch._dynamo.graph_break()
    return mask, x[x > 3], x[x > 2].sum(), torch.masked_select(x, x == 3), (x != 0).nonzero()


@pytest.mark.parametrize("mode", ["r", "r+", "c", "anonymous"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_comparisons_across_graph_breaks(backend, mode, make):
    """What a comparison gives outlives the graph that it was made in."""
    x = make("r+").clone() if mode == "anonymous" else make(mode)
    if mode == "anonymous":
        x = MemoryMappedTensor.from_tensor(x)
    function = torch.compile(_comparisons, backend=backend)
    for _ in range(2):
        for one, other in zip(function(x), _comparisons(x.clone()), strict=True):
            torch.testing.assert_close(one, other)
            assert type(one) is torch.Tensor


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_in_compiled_functions(backend, mode, make):
    """The array of a tensor is made outside of the graph, and what follows runs on."""
    x = make(mode)
    expected = float(x.sum()) + 1
    function = torch.compile(lambda x: float(x.numpy().sum()) + 1, backend=backend)
    # In which order the elements are added is the compiler's affair.
    assert function(x) == pytest.approx(expected, rel=1e-6)
