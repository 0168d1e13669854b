"""Every method and attribute of torch.Tensor on a tensor in mode r, and what stays mapped."""

import contextlib
import copy
import functools
import pickle
import types

import numpy as np
import pytest
import torch
from torch import nn

import mmtensor
from mmtensor import MemoryMappedTensor, ReadOnlyError

VALUES = torch.arange(12, dtype=torch.float32).view(3, 4)
REFUSAL = "Cannot access data pointer"


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes values to a file and opens it in a mode."""

    def make(mode, values=VALUES):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
        MemoryMappedTensor.from_tensor(values, filename=path)
        return MemoryMappedTensor.from_filename(path, values.dtype, values.shape, mode=mode)

    return make


@pytest.fixture
def x(opened):
    """Return a tensor in mode r; its bytes must be the same in the end."""
    tensor = opened("r")
    path = tensor.filename
    yield tensor
    assert np.array_equal(np.fromfile(path, "f4"), VALUES.numpy().ravel())


ONE = torch.ones(3, 4)
COLUMN = torch.zeros(3, 1, dtype=torch.int64)
ROW = torch.tensor([0])
# Methods that change sizes, strides or flags, and write no element.
METADATA = {
    "t_": (),
    "transpose_": (0, 1),
    "swapaxes_": (0, 1),
    "swapdims_": (0, 1),
    "unsqueeze_": (0,),
    "squeeze_": (),
    "as_strided_": ((2, 2), (1, 1)),
    "resize_": (2, 3),
    "resize_as_": (torch.empty(2, 2),),
}
NOT_WRITING = {*METADATA, "detach_", "requires_grad_", "set_", "share_memory_"}
OPERATORS = [
    name
    for name in dir(torch.Tensor)
    if name.startswith("__i")
    and name.removeprefix("__i").removesuffix("__")
    in {"add", "and", "div", "floordiv", "lshift", "mod", "mul"}
    | {"or", "pow", "rshift", "sub", "truediv", "xor"}
]


def _writing_methods():
    return [
        name
        for name in dir(torch.Tensor)
        if name.endswith("_") and not name.endswith("__") and not name.startswith("_")
        if name not in NOT_WRITING
    ]


@pytest.mark.parametrize("name", _writing_methods())
def test_writing_methods(name, x):
    """A method that writes raises before it looks at its arguments, and names file and mode."""
    with pytest.raises(ReadOnlyError, match=rf"x\.{name}\(\).*{x.filename}.*mode \"r\""):
        getattr(x, name)()


@pytest.mark.parametrize("name", OPERATORS)
def test_writing_operators(name, x):
    """An in-place operator raises and names the file."""
    with pytest.raises(ReadOnlyError, match=x.filename):
        getattr(x, name)(1)


def test_naming_rule_is_complete(x):
    """No method outside the naming rule writes; the one that is refused only reads."""
    ruled = {*_writing_methods(), *OPERATORS, *NOT_WRITING}
    own = {"__new__", "__init__", "__init_subclass__", "__class__", "__setstate__", "__del__"}
    refused = []
    for name in sorted({*dir(torch.Tensor)} - ruled - own):
        if isinstance(getattr(torch.Tensor, name), property | types.GetSetDescriptorType):
            continue
        method = getattr(x, name)
        for arguments in ((), (1,), (ONE,), (0, ROW), (0, COLUMN, ONE), (0, 1)):
            if callable(method):
                with contextlib.suppress(Exception):
                    try:
                        method(*arguments)
                    except RuntimeError as error:
                        if REFUSAL in str(error):
                            refused.append(name)
    assert {*refused} == {"to_mkldnn"}, "which only reads: docs/operators.md lists it"


def test_setting_items(x):
    """Assignment to items raises and names the file."""
    for index in (0, slice(1), ..., None, (0, 1), [0], torch.tensor([0]), x > 3, np.array([1])):
        with pytest.raises(ReadOnlyError, match=x.filename):
            x[index] = 1
    with pytest.raises(ReadOnlyError, match=x.filename):
        x[0][1:] += 1
    with pytest.raises(ReadOnlyError, match=x.filename):
        x.data.zero_()
    with pytest.raises(ReadOnlyError, match=x.filename):
        x.detach().zero_()


WRITING_FUNCTIONS = {
    "relu_": torch.relu_,
    "F.relu": functools.partial(nn.functional.relu, inplace=True),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "foreach of a view": lambda x: torch._foreach_mul_([x[0]], 2),
    "out": lambda x: torch.add(ONE, 1, out=x),
    "out of a plain view": lambda x: torch.add(ONE.t(), 1, out=torch.t(x)),
    "plain view": lambda x: torch.t(x).zero_(),
    "plain data": lambda x: torch.t(x).data.zero_(),
    "plain detach": lambda x: torch.t(x).detach().fill_(1),
    "running mean": lambda x: nn.functional.batch_norm(
        torch.randn(2, 4), x[0], torch.ones(4), training=True
    ),
    "running variance": lambda x: nn.functional.batch_norm(
        torch.randn(2, 4), torch.ones(4), x[0], training=True
    ),
    "dropout": functools.partial(nn.functional.dropout, inplace=True),
    "uniform": nn.init.uniform_,
    "index_put": lambda x: torch.index_put_(x, (ROW,), torch.ones(4)),
    "embedding": lambda x: nn.functional.embedding(ROW, x, max_norm=0.1),
    "copy": lambda x: torch.Tensor.copy_(x, ONE),
    "setitem": lambda x: torch.Tensor.__setitem__(x, 0, 1),
}


@pytest.mark.parametrize("name", WRITING_FUNCTIONS)
def test_writing_functions(name, x):
    """A function that writes to its argument raises, for the tensor and for plain views."""
    with pytest.raises(RuntimeError, match=rf"{REFUSAL}|read-only tensor.*{x.filename}"):
        WRITING_FUNCTIONS[name](x)


READS = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[1, 2].item(),
    "numpy": lambda x: x.numpy().tolist(),
    "asarray": lambda x: np.asarray(x).tolist(),
    "asarray float64": lambda x: np.asarray(x, "f8").tolist(),
    "from_dlpack of NumPy": lambda x: np.from_dlpack(x).tolist(),
    "dlpack device": lambda x: tuple(map(int, x.__dlpack_device__())),
    "element_size": lambda x: x.element_size(),
    "dim_order": lambda x: x.dim_order(),
    "contains": lambda x: (5 in x, 50 in x),
    "len": len,
    "iter": lambda x: [row.tolist() for row in x],
    "bool": lambda x: bool(x[0, 1]),
    "int": lambda x: int(x[1, 2]),
    "float": lambda x: float(x[1, 2]),
    "complex": lambda x: complex(x[1, 2]),
    "index": lambda x: range(10)[x[1, 2].long()],
    "format": lambda x: f"{x[1, 2]:.3f}",
    "storage": lambda x: x.storage().tolist() if hasattr(x, "storage") else None,
    "untyped_storage": lambda x: x.untyped_storage().nbytes(),
    "new_zeros": lambda x: x.new_zeros(2).tolist(),
    "new_tensor": lambda x: x.new_tensor([1]).tolist(),
    "new_full": lambda x: x.new_full((2,), 3).tolist(),
    "type": lambda x: (x.type(), x.type(torch.int32).tolist()),
    "to": lambda x: x.to(torch.int64).tolist(),
    "to itself": lambda x: x.to(torch.float32).tolist(),
    "cpu": lambda x: x.cpu().tolist(),
    "double": lambda x: x.double().tolist(),
    "equal": lambda x: x.equal(VALUES),
    "allclose": lambda x: x.allclose(VALUES),
    "split": lambda x: [part.tolist() for part in x.split([1, 2])],
    "stack": lambda x: torch.stack([x, x]).tolist(),
    "argmax": lambda x: x.argmax().item(),
    "deepcopy": lambda x: copy.deepcopy(x).tolist(),
    "copy": lambda x: copy.copy(x).tolist(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).tolist(),
    "flags": lambda x: (x.is_contiguous(), x.is_complex(), x.is_floating_point(), x.is_leaf),
    "grad": lambda x: (x.grad, x.grad_fn, x.requires_grad, x.retains_grad),
    "where": lambda x: (x.layout, x.device, x.is_cuda, x.is_sparse),
    "sizes": lambda x: (x.size(), x.stride(), x.numel(), x.ndim, x.nbytes, x.itemsize),
    "sum of rows": lambda x: sum(x).tolist(),
    "unpack": lambda x: [*x][1].tolist(),
    "sorted": lambda x: [element.item() for element in sorted(x[0].flip(0))],
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", READS)
def test_reading(name, x):
    """What only reads gives, in mode r, what it gives for a regular tensor."""
    assert READS[name](x) == READS[name](VALUES.clone())


def test_addresses(x):
    """data_ptr and const_data_ptr give the address of the first element of a view."""
    assert x[1].data_ptr() - x.data_ptr() == 16
    assert x.const_data_ptr() == x.data_ptr() == x.numpy().ctypes.data
    assert x.untyped_storage().data_ptr() == x.data_ptr()


def test_identity(x):
    """A tensor hashes by identity and prints like a regular one, under its own name."""
    assert {x: 1}[x] == 1
    assert hash(x) != hash(x[:])
    assert repr(x[0]) == "MemoryMappedTensor([0., 1., 2., 3.])"
    assert str(x[0]) == repr(x[0])


@pytest.mark.parametrize("values", [[True, False], [True, True], [False, False]])
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_bool_reductions(mode, values, opened):
    """Reductions of bool work as methods in every mode, with and without dimensions."""
    expected = torch.tensor([values, [False, True]])
    x = opened(mode, expected)
    for name in ("max", "min", "aminmax", "all", "any", "sum", "argmax", "amax", "amin"):
        if name != "argmax":  # torch has none for bool
            assert torch.equal(
                torch.stack([*_parts(getattr(x, name)())]),
                torch.stack([*_parts(getattr(expected, name)())]),
            )
    for name in ("max", "min"):
        assert torch.equal(getattr(x, name)(0).values, getattr(expected, name)(0).values)
        assert torch.equal(getattr(x, name)(expected), getattr(expected, name)(expected))
    both = x.aminmax(keepdim=True)
    assert isinstance(both, torch.return_types.aminmax)
    assert torch.equal(both.max, expected.aminmax(keepdim=True).max)
    assert torch.equal(x.aminmax(dim=1).min, expected.aminmax(dim=1).min)


def _parts(result):
    return (result,) if isinstance(result, torch.Tensor) else result


def test_bool_reductions_of_nothing(opened):
    """Reductions of no elements raise what torch raises."""
    x = opened("r", torch.zeros(0, 3, dtype=torch.bool))
    for name in ("max", "min"):
        with pytest.raises(RuntimeError, match="Expected reduction dim"):
            getattr(x, name)()


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("name", METADATA)
def test_metadata_methods(name, mode, opened):
    """Methods that change sizes and strides work in every mode, and the result travels."""
    x = opened(mode)
    expected = VALUES.clone()
    assert getattr(x, name)(*METADATA[name]) is x
    getattr(expected, name)(*METADATA[name])
    assert torch.equal(x, expected)
    assert x.stride() == expected.stride()
    arrived = pickle.loads(pickle.dumps(x))
    assert torch.equal(arrived, expected)
    assert arrived.filename == x.filename


def test_other_storage(opened):
    """set_ and data= put a tensor on other memory: it is what that memory makes of it."""
    x, y = opened("r"), opened("r+")
    x.set_(y)
    assert (x.mode, x.filename) == ("r+", y.filename)
    x.data = opened("c")
    assert x.mode == "c"
    x.data = torch.ones(2)
    assert type(x) is torch.Tensor
    assert x.tolist() == [1, 1]


COMPLEX = torch.complex(VALUES, -VALUES)
VIEWS = {
    "integer": lambda x: x[1],
    "slice": lambda x: x[1:],
    "tuple": lambda x: x[1:, 2],
    "ellipsis": lambda x: x[..., 1],
    "None": lambda x: x[None],
    "element": lambda x: x[1, 2],
    "unbind": lambda x: x.unbind(0),
    "chunk": lambda x: x.chunk(2),
    "split": lambda x: x.split(2),
    "tensor_split": lambda x: x.tensor_split(2),
    "hsplit": lambda x: x.hsplit(2),
    "vsplit": lambda x: x.vsplit(3),
    "view": lambda x: x.view(4, 3),
    "view of dtype": lambda x: x.view(torch.int32),
    "view_as": lambda x: x.view_as(torch.empty(12)),
    "transpose": lambda x: x.transpose(0, 1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "swapdims": lambda x: x.swapdims(0, 1),
    "movedim": lambda x: x.movedim(0, 1),
    "moveaxis": lambda x: x.moveaxis(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "squeeze": lambda x: x.squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "select": lambda x: x.select(0, 1),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "H": lambda x: x.H,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "expand": lambda x: x[0].expand(5, 4),
    "expand_as": lambda x: x[0].expand_as(torch.empty(5, 4)),
    "broadcast_to": lambda x: x.broadcast_to((2, 3, 4)),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "real": lambda x: x.real,
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "reshape": lambda x: x.reshape(-1),
    "reshape_as": lambda x: x.reshape_as(torch.empty(2, 6)),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "diagonal": lambda x: x.diagonal(),
    "iteration": tuple,
    "to": lambda x: x.to(torch.float32),
    "cpu": lambda x: x.cpu(),
    "float": lambda x: x.float(),
    "positive": lambda x: +x,
    "conj of real": lambda x: x.conj(),
}
COMPLEX_VIEWS = {
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "conj": lambda x: x.conj(),
    "imag of conj": lambda x: x.conj().imag,
    "H": lambda x: x.H,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "view": lambda x: x.view(torch.complex64),
}
REGULAR = {
    "sum": lambda x: x + 1,
    "negative": lambda x: -x,
    "rows": lambda x: x[[0, 1]],
    "row tensor": lambda x: x[torch.tensor([2])],
    "mask": lambda x: x[VALUES > 3],
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "flatten": lambda x: x.t().flatten(),
    "reshape": lambda x: x.t().reshape(-1),
    "to": lambda x: x.to(torch.float64),
    "new": lambda x: x.new_zeros(3),
    "stack": lambda x: torch.stack([x, x]),
    "like": torch.zeros_like,
    "repeat": lambda x: x.repeat(2, 1),
    "resolve_conj": lambda x: x.to(torch.complex64).conj().resolve_conj(),
    "deepcopy": copy.deepcopy,
    "max": lambda x: x.max(),
    "maxima": lambda x: tuple(x.max(0)),
    "function t": torch.t,
    "function select": lambda x: torch.select(x, 0, 1),
}


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize(
    ("values", "function"),
    [
        pytest.param(values, function, id=f"{values.dtype} {name}".removeprefix("torch."))
        for values, views in ((VALUES, VIEWS), (COMPLEX, COMPLEX_VIEWS))
        for name, function in views.items()
    ],
)
def test_stays_mapped(values, function, mode, opened):
    """What sits on the same mapping is a MemoryMappedTensor of the same mode."""
    x = opened(mode, values)
    results, expected = _parts(function(x)), _parts(function(values.clone()))
    for result, other in zip(results, expected, strict=True):
        assert type(result) is MemoryMappedTensor
        assert (result.mode, result.filename) == (mode, x.filename)
        assert result.stride() == other.stride()
        assert torch.equal(result, other)


@pytest.mark.parametrize("name", REGULAR)
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_becomes_regular(mode, name, opened):
    """Everything else is a regular tensor; function forms of views stay on the mapping."""
    x = opened(mode)
    for result in _parts(REGULAR[name](x)):
        assert type(result) is torch.Tensor
        assert (mmtensor.locate(result) is not None) == name.startswith("function")
