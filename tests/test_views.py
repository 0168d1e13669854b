"""What stays a memory-mapped tensor, what does not, and the guards of methods that write."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmtensor
from mmtensor import GradientError, MemoryMappedTensor, ReadOnlyError
from mmtensor.testing import arrays, chains, shapes


@pytest.fixture
def x():
    """Return a memory-mapped tensor of 3 x 4 numbers."""
    return MemoryMappedTensor.from_tensor(torch.arange(12.0).view(3, 4))


@pytest.fixture
def z():
    """Return a complex memory-mapped tensor of 3 x 4 numbers."""
    return MemoryMappedTensor.from_tensor(torch.randn(3, 4, dtype=torch.complex64))


VIEWS = [
    "x[1]",
    "x[1:3]",
    "x[:, 1]",
    "x[..., None]",
    "x[1, 2]",
    "x[None]",
    "x[torch.tensor(1)]",
    "x[np.int64(1)]",
    "x.view(4, 3)",
    "x.view(-1)",
    "x.view(torch.int32)",
    "x.view(torch.uint8)",
    "x.view_as(torch.empty(12))",
    "x.transpose(0, 1)",
    "x.swapaxes(0, 1)",
    "x.swapdims(0, 1)",
    "x.movedim(0, 1)",
    "x.moveaxis(0, 1)",
    "x.permute(1, 0)",
    "x.squeeze()",
    "x[None].squeeze(0)",
    "x.unsqueeze(0)",
    "x.unflatten(1, (2, 2))",
    "x.narrow(0, 1, 2)",
    "x.select(1, 2)",
    "x.t()",
    "x.T",
    "x.mT",
    "x.H",
    "x.mH",
    "x.adjoint()",
    "x.expand(2, 3, 4)",
    "x.expand_as(torch.empty(2, 3, 4))",
    "x.broadcast_to((2, 3, 4))",
    "x.unfold(1, 2, 1)",
    "x.as_strided((2, 2), (4, 1), 1)",
    "x.real",
    "x.flatten()",
    "x.ravel()",
    "x.reshape(4, 3)",
    "x.reshape_as(torch.empty(12))",
    "x.contiguous()",
    "x.detach()",
    "x.data",
    "x.diagonal()",
    "x.resolve_conj()",
    "x.resolve_neg()",
    "x.conj()",
    "x.cpu()",
    "x.to('cpu')",
    "x.to(torch.float32)",
    "x.float()",
    "x.type(torch.float32)",
    "x.type_as(torch.empty(1))",
    "+x",
    "x.positive()",
    "x.requires_grad_(False)",
    "x.sum_to_size(3, 4)",
    "copy.copy(x)",
]
TUPLES = [
    "x.unbind()",
    "x.unbind(1)",
    "x.chunk(2)",
    "x.split(2)",
    "x.split([1, 2])",
    "x.split_with_sizes([1, 2])",
    "x.tensor_split(2)",
    "x.tensor_split([1, 2], dim=1)",
    "x.hsplit(2)",
    "x.vsplit(3)",
    "x[None].dsplit(2)",
    "x.unsafe_chunk(2)",
    "x.unsafe_split(2)",
    "list(x)",
    "[*iter(x)]",
]
COPIES = [
    "x + 1",
    "x[[0, 1]]",
    "x[torch.tensor([0])]",
    "x[x > 3]",
    "x[:, [0, 1]]",
    "x.clone()",
    "x.t().contiguous()",
    "x.t().reshape(-1)",
    "x.t().flatten()",
    "x.double()",
    "x.to(torch.float64)",
    "x.sum()",
    "x.new_zeros(3)",
    "x.new_tensor([1.0])",
    "-x",
    "abs(x)",
    "x.repeat(2, 1)",
    "x.tile(2)",
    "x.flip(0)",
    "x.roll(1)",
    "x.index_select(0, torch.tensor([0]))",
    "x.gather(0, torch.zeros(1, 1, dtype=torch.int64))",
    "x.masked_select(x > 2)",
    "x.where(x > 0, x)",
    "x @ x.t()",
    "x.max(0).values",
    "x.view_as(x).clone()",
    "1 - x",
    "x == x",
    "x.narrow_copy(0, 0, 1)",
    "torch.stack([x, x])",
    "torch.cat([x, x])",
    "torch.nn.functional.relu(x)",
    "torch.empty_like(x)",
    "torch.as_tensor(x.tolist())",
    "x.take([0])",
    "copy.deepcopy(x)",
]
FUNCTIONS = [
    "torch.t(x)",
    "torch.transpose(x, 0, 1)",
    "torch.reshape(x, (-1,))",
    "torch.unbind(x)[0]",
    "torch.narrow(x, 0, 0, 1)",
    "torch.squeeze(x)",
    "torch.detach(x)",
    "torch.Tensor.view(x, -1)",
    "x.as_subclass(torch.Tensor)",
]


def evaluate(text, **names):
    """Return what an expression of a table gives."""
    return eval(text, {"torch": torch, "np": np, "copy": copy}, names)  # noqa: S307


@pytest.mark.parametrize("text", VIEWS)
def test_views(x, text):
    """A result on the same mapping is a memory-mapped tensor, with torch's values and shape."""
    view, plain = evaluate(text, x=x), evaluate(text, x=x.clone())
    assert type(view) is MemoryMappedTensor
    assert view.untyped_storage() is x.untyped_storage()
    assert torch.equal(view, plain)
    assert (view.stride(), view.is_conj()) == (plain.stride(), plain.is_conj())


@pytest.mark.parametrize("text", TUPLES)
def test_tuples_of_views(x, text):
    """Parts of a tensor are memory-mapped tensors, in the container that torch makes."""
    views, plain = evaluate(text, x=x), evaluate(text, x=x.clone())
    assert type(views) is type(plain)
    assert len(views) == len(plain) > 1
    for view, part in zip(views, plain, strict=True):
        assert type(view) is MemoryMappedTensor
        assert torch.equal(view, part)


@pytest.mark.parametrize("text", COPIES)
def test_results(x, text):
    """Everything else is a regular tensor in regular memory, with torch's values."""
    result = evaluate(text, x=x)
    assert type(result) is torch.Tensor
    assert result.untyped_storage() is not x.untyped_storage()
    if "empty" not in text:
        expected = evaluate(text, x=x.clone()) if "take" not in text else x.clone()[[0]]
        assert torch.equal(result, expected)


@pytest.mark.parametrize("text", FUNCTIONS)
def test_functions(x, text):
    """Function forms give plain tensors on the same storage, which can still be located."""
    view = evaluate(text, x=x)
    assert type(view) is torch.Tensor
    assert view.untyped_storage() is x.untyped_storage()
    assert mmtensor.locate(view).strides == tuple(4 * step for step in view.stride())
    assert mmtensor.to_numpy(view).ctypes.data == view.data_ptr()


@pytest.mark.parametrize(
    "text",
    [
        "z.real",
        "z.imag",
        "z.conj()",
        "z.H",
        "z.mH",
        "z.conj().imag",
        "z.conj().t()",
        "z.adjoint()",
        "z.conj().real",
    ],
)
def test_complex_views(z, text):
    """Real and imaginary parts and conjugates are views with torch's values."""
    view, plain = evaluate(text, z=z), evaluate(text, z=z.clone())
    assert type(view) is MemoryMappedTensor
    assert view.untyped_storage() is z.untyped_storage()
    assert torch.equal(view, plain)
    assert (view.is_conj(), view.is_neg()) == (plain.is_conj(), plain.is_neg())


@pytest.mark.parametrize(
    "text", ["z.conj().resolve_conj()", "z.conj().imag.resolve_neg()", "z.conj().contiguous() + 0"]
)
def test_resolved_views(z, text):
    """Resolving a conjugate copies, and the copy is a regular tensor."""
    assert type(evaluate(text, z=z)) is torch.Tensor


@pytest.mark.parametrize("text", ["x.T", "x.H", "x.mT", "x.mH", "x.t()"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4)])
def test_transpositions_of_other_shapes(text, shape):
    """Transposing tensors of any number of dimensions gives torch's result or its error."""
    plain = torch.randn(shape)
    x = MemoryMappedTensor.from_tensor(plain)

    def outcome(tensor):
        try:
            return evaluate(text, x=tensor).tolist()
        except RuntimeError as error:
            return str(error)

    if text == "x.T":  # torch warns where there are not two dimensions
        assert torch.equal(x.T, plain.permute(tuple(range(len(shape)))[::-1]))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome(x) == outcome(plain)


# Methods that this class defines, or whose result is asked to be plain.
NO_METHODS = {
    "as_subclass",
    "advise",
    "prefetch",
    "flush",
    "take",
    "numpy",
    "data_ptr",
    "share_memory_",
}


def _attempts(name):
    return [
        lambda t: getattr(t, name)(),
        lambda t: getattr(t, name)(0),
        lambda t: getattr(t, name)(1),
        lambda t: getattr(t, name)(0, 1),
        lambda t: getattr(t, name)(0, 0, 1),
        lambda t: getattr(t, name)((3, 4)),
        lambda t: getattr(t, name)(t.as_subclass(torch.Tensor)),
        lambda t: getattr(t, name)(torch.float32),
    ]


def _flatten(result):
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from _flatten(item)


@pytest.mark.filterwarnings("ignore")  # torch's own, about methods that will go
@pytest.mark.parametrize(
    "name", [n for n in dir(torch.Tensor) if n.strip("_") == n and n not in NO_METHODS]
)
def test_every_method(name):
    """A method's results are memory-mapped tensors where they sit on the mapping, else plain."""
    if not callable(getattr(torch.Tensor, name, None)):
        return
    for attempt in _attempts(name):
        x = MemoryMappedTensor.from_tensor(torch.rand(3, 4))
        try:
            results = list(_flatten(attempt(x)))
        except Exception:  # noqa: BLE001, S112  # wrong arguments for this method
            continue
        for result in results:
            if result.layout is not torch.strided or result.device.type != "cpu":
                continue
            on_mapping = result.untyped_storage() is x.untyped_storage()
            assert (type(result) is MemoryMappedTensor) == on_mapping, attempt


@given(st.data())
def test_chains_of_views(data):
    """Any chain of views has the geometry that it has on a regular tensor."""
    shape = data.draw(shapes())
    plain = torch.arange(float(np.prod(shape, dtype=int))).view(shape)
    x = MemoryMappedTensor.from_tensor(plain)
    chain = data.draw(chains(shape))
    view, expected = chain(x), chain(plain)
    assert type(view) is MemoryMappedTensor
    assert view.untyped_storage() is x.untyped_storage()
    assert (view.shape, view.stride()) == (expected.shape, expected.stride())
    assert view.storage_offset() == expected.storage_offset()
    assert torch.equal(view, expected)


@given(arrays(dtype="int16"), st.sampled_from(["r", "r+", "c"]), st.data())
def test_chains_travel(tmp_path, array, mode, data):
    """Any chain of views is pickled in about 200 bytes with its geometry and its bytes."""
    mmtensor.save_array(tmp_path / "x", array, existsok=True)
    x = MemoryMappedTensor.from_filename(tmp_path / "x", "int16", array.shape, mode=mode)
    view = data.draw(chains(array.shape))(x)
    message = pickle.dumps(view)
    again = pickle.loads(message)
    assert len(message) < 320 + len(str(tmp_path))
    assert (type(again), again.shape, again.stride()) == (type(view), view.shape, view.stride())
    assert again.storage_offset() == view.storage_offset()
    assert (again.mode, again.filename) == (mode, view.filename)
    assert torch.equal(again, view)
    assert (again.data_ptr() == view.data_ptr()) == (mode != "c" or view.numel() == 0)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize(
    "text",
    [
        "x.resize_(100)",
        "x.resize_as_(torch.ones(100))",
        "x.set_(x.untyped_storage(), 0, (100,), (1,))",
        "x.set_(x.untyped_storage(), 10, (5,), (1,))",
        "x.set_(x.untyped_storage(), 0, (5,), (10,))",
        "x.as_strided_((100,), (1,))",
        "x.as_strided((100,), (1,))",
    ],
)
def test_a_tensor_never_exceeds_its_memory(numbers, mode, text):
    """A tensor that is asked to grow refuses, and is whole afterwards."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode=mode)
    with pytest.raises(RuntimeError, match="not resizable|out of bounds"):
        evaluate(text, x=x)
    assert x.tolist() == values.tolist()
    assert x.filename == path
    np.testing.assert_array_equal(np.fromfile(path, "f4").reshape(3, 4), values)


WRITES = [
    "x.add_(1)",
    "x.zero_()",
    "x.fill_(3)",
    "x.copy_(torch.zeros(3, 4))",
    "x.relu_()",
    "x.clamp_(0, 1)",
    "x.normal_()",
    "x.uniform_()",
    "x.random_()",
    "x.bernoulli_()",
    "x.index_fill_(0, torch.tensor([0]), 1)",
    "x.index_copy_(0, torch.tensor([0]), torch.zeros(1, 4))",
    "x.index_put_((torch.tensor([0]),), torch.zeros(4))",
    "x.scatter_(0, torch.zeros(1, 1, dtype=torch.int64), 1)",
    "x.masked_fill_(x > 0, 1)",
    "x.fill_diagonal_(1)",
    "x.mul_(2)",
    "x.sigmoid_()",
    "x.view(-1).add_(1)",
    "x.t().add_(1)",
    "x.data.add_(1)",
    "x.detach().add_(1)",
    "x[0].add_(1)",
    "x.unbind()[0].add_(1)",
    "torch.t(x).add_(1)",
    "torch.relu_(x)",
    "torch.nn.functional.relu(x, inplace=True)",
    "torch.nn.functional.dropout(x, inplace=True)",
    "torch.add(x, 1, out=x)",
    "torch.abs(torch.zeros(3, 4), out=x)",
    "torch._foreach_add_([x], 1)",
    "torch._foreach_zero_([x])",
    "torch.nn.init.normal_(x)",
    "torch.nn.init.zeros_(x)",
    "x.numpy().fill(1)",
    "np.asarray(x).fill(1)",
    "np.from_dlpack(x).fill(1)",
    "x.__setitem__(0, 1.0)",
    "x.__setitem__((0, 1), 1.0)",
    "x.__setitem__([0], 1.0)",
    "x.__setitem__(x > 0, 1.0)",
    "torch.narrow(x, 0, 0, 1).__setitem__(0, 1.0)",
    "x.__iadd__(1)",
    "x.__isub__(1)",
    "x.__imul__(1)",
    "x.__itruediv__(1)",
    "x.__ipow__(2)",
    "x.map_(x, lambda a, b: a)",
    "x.apply_(lambda a: a)",
    "x.put_(torch.tensor([0]), torch.tensor([1.0]))",
    "torch.nn.functional.batch_norm(torch.randn(5, 4), x[0], x[1], training=True)",
    "x.untyped_storage().fill_(0)",
    "x.untyped_storage().copy_(torch.zeros(12).untyped_storage())",
    "x.untyped_storage().__setitem__(0, 1)",
    "x.untyped_storage().resize_(100)",
    "x.untyped_storage().byteswap(torch.int16)",
    "x.resize_(100)",
    "np.add(1, 1, out=x.numpy())",
    "x.set_(x).zero_()",
]


@pytest.mark.parametrize("text", WRITES)
def test_writes_raise_in_read_only_mode(numbers, text):
    """In mode ``r`` every write raises, and neither file nor memory changes."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r")
    with pytest.raises(
        (RuntimeError, ValueError, BufferError, TypeError),
        match="read-only|data pointer|not resizable|Cannot resize|not writ",
    ):
        evaluate(text, x=x)
    assert x.tolist() == values.tolist()
    np.testing.assert_array_equal(np.fromfile(path, "f4").reshape(3, 4), values)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in dir(torch.Tensor)
        if n.endswith("_")
        and not n.endswith("__")
        and n
        not in {
            "as_strided_",
            "detach_",
            "requires_grad_",
            "resize_",
            "resize_as_",
            "set_",
            "share_memory_",
            "squeeze_",
            "swapaxes_",
            "swapdims_",
            "t_",
            "transpose_",
            "unsqueeze_",
            "rename_",
            "retain_grad_",
        }
        and n[0] != "_"
    ],
)
def test_every_writing_method_names_mode_and_file(numbers, name):
    """Every method that writes raises first, with its name, the mode and the file."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r")
    with pytest.raises(ReadOnlyError, match=rf'x\.{name}\(\) would write.*{numbers[0]}.*mode "r"'):
        getattr(x, name)()


@pytest.mark.parametrize("mode", ["r+", "c"])
@pytest.mark.parametrize(
    "text", [t for t in WRITES[:45] if "relu_" not in t and "map_" not in t and "dropout" not in t]
)
def test_writes_work_in_the_other_modes(numbers, mode, text):
    """In ``r+`` and ``c`` the same writes do what they do to a regular tensor."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode=mode)
    plain = torch.from_numpy(values.copy())
    torch.manual_seed(0)
    evaluate(text, x=x)
    torch.manual_seed(0)
    evaluate(text, x=plain)
    assert torch.equal(x, plain)
    on_disk = np.fromfile(path, "f4").reshape(3, 4)
    np.testing.assert_array_equal(on_disk, plain.numpy() if mode == "r+" else values)


@pytest.mark.parametrize(
    "text",
    [
        "x.add_(w)",
        "x.add_(other=w)",
        "x.copy_(w)",
        "x.__iadd__(w)",
        "x.__setitem__(0, w[0])",
        "x.__setitem__([0], w[:1])",
        "x.__setitem__((0, 0), w[0, 0])",
        "x.addcmul_(x, w)",
        "x.lerp_(x, w)",
        "x.index_put_((torch.tensor([0]),), w[:1])",
        "x.masked_fill_(x > 0, w.sum())",
        "x.requires_grad_()",
        "x.requires_grad_(True)",
        "x.requires_grad_(requires_grad=True)",
        "setattr(x, 'requires_grad', True)",
        "torch.nn.Parameter(x)",
        "torch.nn.Parameter(x, requires_grad=True)",
        "x.data.requires_grad_()",
        "x[0].requires_grad_()",
    ],
)
def test_gradients_are_refused(x, text):
    """Nothing that would make the tensor require gradients is done."""
    before = x.clone()
    w = torch.ones(3, 4, requires_grad=True)
    with pytest.raises(GradientError, match="cannot|would make a memory-mapped tensor require"):
        evaluate(text, x=x, w=w)
    assert not x.requires_grad
    assert x.grad_fn is None
    assert torch.equal(x, before)


def test_writes_without_gradients(x):
    """Under `torch.no_grad` values that require gradients can be written."""
    w = torch.ones(3, 4, requires_grad=True)
    with torch.no_grad():
        x.copy_(w)
        x[0] = w[1]
        x[[1]] = w[:1]
        x += w
    assert not x.requires_grad
    assert x.tolist() == [[2.0] * 4] * 3


def test_gradients_that_went_past_the_methods(x):
    """A function that writes gradients into the tensor is not hidden by the property."""
    torch._foreach_add_([x], [torch.ones(3, 4, requires_grad=True)])
    assert x.requires_grad
    with pytest.raises(GradientError, match="cannot require gradients"):
        MemoryMappedTensor.from_tensor(x)


@pytest.mark.parametrize("kind", [MemoryMappedTensor, type("Sub", (MemoryMappedTensor,), {})])
def test_subclasses(path, kind):
    """Constructors and views of a subclass are of the subclass."""
    x = kind.from_tensor(torch.arange(12.0).view(3, 4), filename=path)
    for view in (x, x[0], x.t(), x.unbind()[1], x.reshape(-1), x.real, copy.copy(x), x.data):
        assert type(view) is kind
    assert type(kind.from_filename(path, "f4", 12)) is kind
    assert type(kind.zeros(3)) is kind
    assert type(x + 1) is torch.Tensor
