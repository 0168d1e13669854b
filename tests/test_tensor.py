"""`MemoryMappedTensor` as a citizen of torch: printing, copies, modules, metadata."""

import copy
import io
import os
import pickle
import tempfile

import numpy as np
import pytest
import torch

import mmtensor
from mmtensor import GradientError, MemoryMappedTensor
from mmtensor.dtypes import DTYPES


@pytest.fixture(params=["r", "r+", "c"])
def x(request, numbers):
    """Return a tensor of a file in each mode."""
    return MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode=request.param)


# --- attributes ------------------------------------------------------------------------


def test_filename_of_a_view(x, numbers):
    """Views know their file, and results have none."""
    assert x[1].t().filename == x.filename == numbers[0]
    assert os.path.isabs(x.filename)
    assert not hasattr(x + 1, "filename")


def test_no_file():
    """Anonymous memory has no file: a RuntimeError that says what to do."""
    with pytest.raises(RuntimeError, match=r"from_tensor\(x, filename=\.\.\.\)"):
        _ = MemoryMappedTensor.ones(3).filename


@pytest.mark.parametrize("name", ["filename", "mode"])
def test_fixed_attributes(x, name):
    """File and mode cannot be assigned: another mode is another opening."""
    with pytest.raises(AttributeError, match="no setter|can't set"):
        setattr(x, name, "r+")


def test_own_attributes(x):
    """Attributes of one's own can be set on a tensor, and travel with it."""
    x.label = "digits"
    assert x.label == "digits"
    assert copy.copy(x).label == "digits"
    assert pickle.loads(pickle.dumps(x)).label == "digits"
    assert copy.deepcopy(x).label == "digits"


# --- printing and formatting -----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_printing(path, dtype, mode):
    """A tensor prints as a regular one, under the name of its class, in every dtype."""
    MemoryMappedTensor.ones(2, 3, dtype=dtype, filename=path)
    x = MemoryMappedTensor.from_filename(path, dtype, (2, 3), mode=mode)
    expected = repr(x.clone()).replace("tensor(", "MemoryMappedTensor(", 1)
    for text in (repr(x), str(x), f"{x}"):
        assert "".join(text.split()) == "".join(expected.split())


def test_printing_empty_and_large(path):
    """Tensors without elements, and with too many to show, print as regular ones do."""
    assert "[]" in repr(MemoryMappedTensor.zeros(0, filename=path))
    text = repr(
        MemoryMappedTensor.zeros(
            10_000, 10_000, dtype=torch.int8, preallocate=False, filename=path + "2"
        )
    )
    assert "..." in text
    assert len(text) < 1000


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("", "6.0"), (".2f", "6.00"), ("8.1f", "     6.0"), ("e", "6.000000e+00")],
)
def test_formatting_a_number(x, spec, expected):
    """A tensor without dimensions formats as its number."""
    assert format(x[1, 2], spec) == expected


def test_formatting_an_array(x):
    """A format for a tensor with dimensions is an error, as it is for a regular one."""
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{x:.2f}"


@pytest.mark.parametrize(
    "function",
    [
        float,
        int,
        bool,
        complex,
        lambda t: t.item(),
        lambda t: t.tolist(),
        lambda t: range(t.long()),
    ],
)
def test_numbers(x, function):
    """A tensor without dimensions converts to Python's numbers."""
    assert function(x[1, 2]) == function(torch.tensor(6.0))


def test_truth_of_an_array(x):
    """The truth of several elements is torch's error."""
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x)


def test_protocols(x):
    """Length, iteration, containment, identity and hashing are torch's."""
    assert len(x) == 3
    assert [row.tolist() for row in x] == x.tolist()
    assert 6.0 in x
    assert 60.0 not in x
    assert {x: 1}[x] == 1
    assert next(iter(reversed(x))).tolist() == x[-1].tolist()


# --- copies ----------------------------------------------------------------------------


def test_shallow_copy(x):
    """A shallow copy is another tensor on the same mapping."""
    twin = copy.copy(x)
    assert twin is not x
    assert type(twin) is MemoryMappedTensor
    assert twin.data_ptr() == x.data_ptr()


def test_deep_copy(x, numbers):
    """A deep copy is an independent regular tensor with the layout of the view."""
    for view in (x, x.t(), x[:, ::2], x[0].expand(5, 4)):
        twin = copy.deepcopy(view)
        assert type(twin) is torch.Tensor
        assert torch.equal(twin, view)
        assert twin.untyped_storage().nbytes() <= 48
    twin = copy.deepcopy(x)
    twin.zero_()
    assert x.tolist() == numbers[1].tolist()
    assert twin.is_contiguous()
    assert copy.deepcopy(x.t()).stride() == (1, 4)


def test_deep_copy_of_a_structure(x):
    """A tensor that stands in a structure twice is copied once."""
    first, second = copy.deepcopy([x, x])
    assert first is second


def test_deep_copy_of_plain_views(x):
    """Plain views are copied through their storage."""
    twin = copy.deepcopy(torch.t(x))
    assert type(twin) is torch.Tensor
    assert torch.equal(twin, torch.t(x))
    assert twin.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_old_pickle_protocols(x, protocol):
    """Protocols up to 2, which `torch.save` uses, store the values."""
    again = pickle.loads(pickle.dumps(x.t(), protocol))
    assert type(again) is torch.Tensor
    assert torch.equal(again, x.t())


@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t.t(), lambda t: t[1], lambda t: t[0].expand(9, 4)]
)
def test_checkpoint(x, view):
    """`torch.save` stores a view's values, and the result loads without the file."""
    file = io.BytesIO()
    torch.save({"x": view(x), "again": view(x)}, file)
    expected = view(x).tolist()
    os.unlink(x.filename)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["x"]
    assert type(loaded) is torch.Tensor
    assert loaded.tolist() == expected


# --- modules ---------------------------------------------------------------------------


class Module(torch.nn.Module):
    """A module with a memory-mapped buffer and a memory-mapped parameter."""

    def __init__(self, x):
        super().__init__()
        self.register_buffer("buffer", x)
        self.frozen = torch.nn.Parameter(x[0], requires_grad=False)
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, inputs):
        return self.linear(inputs * self.frozen + self.buffer.sum(0))


def test_parameter(x):
    """A parameter without gradients stays on the file, and is a Parameter."""
    parameter = torch.nn.Parameter(x, requires_grad=False)
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(parameter, MemoryMappedTensor)
    assert parameter.data_ptr() == x.data_ptr()
    assert parameter.filename == x.filename
    assert not parameter.requires_grad
    assert not isinstance(x, torch.nn.Parameter)
    assert not isinstance(parameter[0], torch.nn.Parameter)


def test_parameter_with_gradients(x):
    """A parameter with gradients is an error that shows how to get one."""
    with pytest.raises(GradientError, match=r"torch\.nn\.Parameter\(x\.clone\(\)\)"):
        torch.nn.Parameter(x)


def test_parameters_travel(x):
    """A parameter is a parameter again after pickling, copying and a checkpoint."""
    parameter = torch.nn.Parameter(x, requires_grad=False)
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    for again in (
        pickle.loads(pickle.dumps(parameter)),
        copy.deepcopy(parameter),
        copy.copy(parameter),
        torch.load(file, weights_only=True),
    ):
        assert isinstance(again, torch.nn.Parameter)
        assert not again.requires_grad
        assert torch.equal(again, x)


def test_training_beside_a_buffer(x, numbers):
    """A module with memory-mapped parts trains its regular ones, and changes no file."""
    module = Module(x)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    before = module.linear.weight.clone()
    module(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(module.linear.weight, before)
    assert np.fromfile(numbers[0], "f4").tobytes() == numbers[1].tobytes()


def test_state_of_a_module(x):
    """The state of a module has its memory-mapped parts, on their file."""
    state = Module(x).state_dict()
    assert list(state)[:2] == ["frozen", "buffer"]
    assert state["buffer"].data_ptr() == x.data_ptr()
    assert state["buffer"].tolist() == x.tolist()


def test_loading_a_state(x, numbers):
    """Loading a state writes to the file in ``r+``, privately in ``c``, and raises in ``r``."""
    module = Module(x)
    state = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    if x.mode == "r":
        with pytest.raises(RuntimeError, match='opened with mode "r"'):
            module.load_state_dict(state)
    else:
        module.load_state_dict(state)
        assert not x.any()
    assert np.fromfile(numbers[0], "f4").any() == (x.mode != "r+")


def test_assigning_a_state(x):
    """A state that is assigned replaces the memory-mapped parts, and a mapped one is taken."""
    module = Module(torch.zeros(3, 4))
    module.load_state_dict(Module(x).state_dict(), assign=True)
    assert module.buffer.data_ptr() == x.data_ptr()
    assert isinstance(module.frozen, torch.nn.Parameter)


def test_copy_of_a_module(x):
    """A deep copy of a module is independent of the file, its parameters are parameters."""
    module = copy.deepcopy(Module(x))
    assert type(module.buffer) is torch.Tensor
    assert isinstance(module.frozen, torch.nn.Parameter)
    assert len(list(module.parameters())) == 3
    module.buffer.zero_()
    assert x[1, 1] == 5


def test_module_travels(x):
    """A pickled module has its memory-mapped parts on the file again."""
    module = pickle.loads(pickle.dumps(Module(x)))
    assert module.buffer.filename == x.filename
    assert module.frozen.tolist() == x[0].tolist()


@pytest.mark.parametrize(
    "convert", [lambda m: m.double(), lambda m: m.to(torch.float64), lambda m: m.half().double()]
)
def test_converted_module(x, numbers, convert):
    """Converting a module gives regular tensors, and leaves the file alone."""
    module = convert(Module(x))
    assert (module.buffer.dtype, module.frozen.dtype) == (torch.float64, torch.float64)
    assert type(module.buffer) is torch.Tensor
    assert isinstance(module.frozen, torch.nn.Parameter)
    assert module.frozen.tolist() == numbers[1][0].tolist()
    module.buffer.zero_()
    module.frozen.data.zero_()
    assert np.fromfile(numbers[0], "f4").tobytes() == numbers[1].tobytes()


def test_moved_module(x):
    """Moving a module to where it is keeps its memory-mapped parts."""
    module = Module(x).to("cpu").cpu().float().eval().requires_grad_(False)
    assert module.buffer.data_ptr() == x.data_ptr()
    assert module.frozen.data_ptr() == x.data_ptr()


def test_batch_norm_statistics(numbers):
    """Batch norm in training cannot write its running statistics to a read-only file."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r")
    norm = torch.nn.BatchNorm1d(4)
    norm.running_mean = x[0]
    norm.running_var = x[1]
    with pytest.raises(RuntimeError, match="data pointer"):
        norm(torch.randn(5, 4))
    assert norm.eval()(torch.randn(5, 4)).shape == (5, 4)


# --- metadata that changes in place ----------------------------------------------------

METADATA = [
    "x.t_()",
    "x.transpose_(0, 1)",
    "x.swapaxes_(0, 1)",
    "x.swapdims_(0, 1)",
    "x.unsqueeze_(0)",
    "x.unsqueeze_(0).squeeze_(0)",
    "x.squeeze_()",
    "x.resize_(3)",
    "x.resize_(2, 2)",
    "x.resize_as_(torch.empty(2, 5))",
    "x.as_strided_((2, 2), (4, 1), 1)",
    "x.set_(x.untyped_storage(), 2, (2, 2), (3, 1))",
    "x.set_(x[1])",
    "x.detach_()",
    "x.requires_grad_(False)",
    "setattr(x, 'data', x[1:])",
    "setattr(x, 'data', x.t())",
]


@pytest.mark.parametrize("text", METADATA)
def test_changed_metadata_travels(x, text):
    """A tensor whose geometry was changed in place travels with exactly that geometry."""
    plain = x.clone()
    for tensor in (x, plain):
        eval(text, {"torch": torch}, {"x": tensor})  # noqa: S307  # the table's own
    assert type(x) is MemoryMappedTensor
    assert (x.shape, x.stride()) == (plain.shape, plain.stride())
    again = pickle.loads(pickle.dumps(x))
    assert (again.shape, again.stride()) == (x.shape, x.stride())
    assert again.storage_offset() == x.storage_offset()
    assert torch.equal(again, x)
    assert torch.equal(again, plain)


@pytest.mark.parametrize(
    "text",
    [
        "x.set_(torch.arange(3.0))",
        "x.set_()",
        "setattr(x, 'data', torch.arange(3.0))",
        "x.set_(torch.arange(3.0).untyped_storage(), 0, (3,), (1,))",
    ],
)
def test_other_memory(x, text):
    """A tensor that is put on other memory is a regular one, and travels as what it is."""
    eval(text, {"torch": torch}, {"x": x})  # noqa: S307  # the table's own
    assert type(x) is torch.Tensor
    expected = [] if text == "x.set_()" else [0, 1, 2]
    assert pickle.loads(pickle.dumps(x)).tolist() == expected


def test_other_file(numbers, path, tmp_path):
    """A tensor that is put on another file is of that file."""
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r+")
    y = MemoryMappedTensor.from_tensor(torch.ones(3), filename=tmp_path / "y")
    x.data = y
    assert x.filename == str(tmp_path / "y")
    assert pickle.loads(pickle.dumps(x)).filename == x.filename
    assert np.fromfile(path, "f4").tobytes() == numbers[1].tobytes()


# --- gradients -------------------------------------------------------------------------


def test_never_requires_gradients(x):
    """The tensor and its views require none, whatever is asked."""
    assert x.requires_grad is x[0].requires_grad is False
    assert x.requires_grad_(False) is x
    x.requires_grad = False
    for ask in (x.requires_grad_, lambda: setattr(x, "requires_grad", True)):
        with pytest.raises(GradientError, match="cannot require gradients"):
            ask()
    assert x.is_leaf
    assert x.grad is None


@pytest.mark.parametrize(
    "make",
    [
        MemoryMappedTensor.from_tensor,
        MemoryMappedTensor,
        lambda t: MemoryMappedTensor.from_tensor(t * 2),
        lambda t: MemoryMappedTensor.from_tensor(torch.nn.Parameter(t)),
    ],
)
def test_input_with_gradients(make):
    """An input that requires gradients is refused, with the way out."""
    with pytest.raises(GradientError, match=r"Pass x\.detach\(\)"):
        make(torch.ones(3, requires_grad=True))


def test_gradients_of_others(x):
    """Gradients flow through operations on the tensor to what requires them."""
    weight = torch.ones(4, requires_grad=True)
    (x @ weight).sum().backward()
    assert torch.equal(weight.grad, x.sum(0))


def test_functional_gradients(x):
    """`torch.func.grad` differentiates with respect to the tensor."""
    gradient = torch.func.grad(lambda t: (t**2).sum())(x)
    assert torch.equal(gradient, 2 * x)


# --- private changes -------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__((0, 0), 50.0),
        lambda x: x.numpy().__setitem__((0, 0), 50.0),
        lambda x: x.data[0].fill_(50.0),
        lambda x: torch.add(x, 50, out=x),
    ],
)
def test_private_changes_travel_by_value(numbers, write):
    """A tensor in ``c`` that was written to travels as a regular tensor with its values."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="c")
    assert type(pickle.loads(pickle.dumps(x))) is MemoryMappedTensor
    write(x)
    again = pickle.loads(pickle.dumps(x.t()))
    assert type(again) is torch.Tensor
    assert torch.equal(again, x.t())


def test_pages_that_were_not_written(path):
    """Of a tensor in ``c`` the parts that were not written to still travel by reference."""
    np.arange(10_000.0).tofile(path)
    x = MemoryMappedTensor.from_filename(path, "f8", -1, mode="c")
    x[9_000] = -1
    assert type(pickle.loads(pickle.dumps(x[:100]))) is MemoryMappedTensor
    assert pickle.loads(pickle.dumps(x[8_999:9_002])).tolist() == [8_999, -1, 9_001]


def test_private_changes_as_another_user(run, public_directory):
    """A user who is not root can tell written pages as well."""
    np.arange(12, dtype=np.float32).tofile(public_directory / "x")
    program = """
        import ctypes, os, pickle, sys, torch
        from mmtensor import MemoryMappedTensor
        x = MemoryMappedTensor.from_filename(sys.argv[1], torch.float32, (3, 4), mode="c")
        pickle.loads(pickle.dumps(x))  # imports what root alone may read
        os.setuid(65534)
        # Changing the user takes /proc/self away (PR_SET_DUMPABLE of prctl(2)), which a
        # program that such a user starts has.
        ctypes.CDLL(None).prctl(4, 1)
        x = MemoryMappedTensor.from_filename(sys.argv[1], torch.float32, (3, 4), mode="c")
        print(type(pickle.loads(pickle.dumps(x))).__name__)
        x[0, 0] = 50
        again = pickle.loads(pickle.dumps(x))
        print(type(again).__name__, float(again[0, 0]))
    """
    (public_directory / "x").chmod(0o666)
    printed = run(program, public_directory / "x").splitlines()
    assert printed == ["MemoryMappedTensor", "Tensor 50.0"]


# --- references ------------------------------------------------------------------------


def test_reference_to_a_replaced_file(numbers):
    """A reference to a file that was replaced meanwhile is an error, never other bytes."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r")
    message = pickle.dumps(x)
    mmtensor.save_array(path, values + 1, existsok=True)
    with pytest.raises(mmtensor.StaleFileError, match="not the one that the reference was made"):
        pickle.loads(message)
    again = pickle.loads(pickle.dumps(x))
    assert type(again) is torch.Tensor
    assert again.tolist() == values.tolist()


def test_reference_to_a_successor(numbers):
    """A file of the same name and size is another file, even with the same inode number."""
    path, values = numbers
    # ext4 gives the number of a deleted file to the next one; other systems take new ones.
    for _ in range(20):
        message = pickle.dumps(MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r"))
        os.unlink(path)
        (values + 1).tofile(path)
        with pytest.raises(mmtensor.StaleFileError, match="another file has its name"):
            pickle.loads(message)


@pytest.mark.parametrize("size", [0, 40, 44])
def test_reference_to_a_truncated_file(numbers, size):
    """A reference to a file that is too short by now is an error with both sizes."""
    path, _ = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r+")
    message = pickle.dumps(x)
    del x
    os.truncate(path, size)
    with pytest.raises(ValueError, match=f"must have 48 bytes.* is {size} bytes"):
        pickle.loads(message)
    assert os.path.getsize(path) == size


def test_reference_to_a_grown_file(numbers):
    """A reference to a file that has grown is an error."""
    path, _ = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r+")
    message = pickle.dumps(x)
    assert pickle.loads(message).data_ptr() == x.data_ptr()
    with open(path, "ab") as file:
        file.write(b"more")
    # The mapping that the first one found is still there, and is not the answer any more.
    with pytest.raises(mmtensor.StaleFileError, match="size is 52 bytes, 48 were expected"):
        pickle.loads(message)


def test_truncated_file_is_not_sent(numbers):
    """A tensor whose file was cut short is not sent: an error, and no SIGBUS."""
    path, _ = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r+")
    os.truncate(path, 8)
    with pytest.raises(ValueError, match="it was truncated meanwhile"):
        pickle.dumps(x)


def test_reference_to_a_part(numbers):
    """A reference to a part of a file, with an offset, comes back as that part."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (2, 2), mode="r", offset=16, partial=True)
    again = pickle.loads(pickle.dumps(x.t()))
    assert again.tolist() == values[1].reshape(2, 2).T.tolist()
    assert mmtensor.locate(again).offset == 16


def test_renamed_file_travels_by_value(numbers):
    """A tensor whose file has another name by now travels by value."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4), mode="r")
    os.rename(path, path + ".moved")
    again = pickle.loads(pickle.dumps(x))
    assert type(again) is torch.Tensor
    assert again.tolist() == values.tolist()


def test_message_size(numbers):
    """A reference is at most 300 bytes, and a small view costs no more than a large one."""
    with tempfile.NamedTemporaryFile() as file:  # a short name, as the figure is meant
        numbers[1].tofile(file.name)
        x = MemoryMappedTensor.from_filename(file.name, "f4", (3, 4), mode="r")
        assert len(pickle.dumps(x)) <= 300
        assert len(pickle.dumps(x.t()[1:])) <= 300


def test_views_of_one_file_share_a_mapping(numbers):
    """Views that arrive separately stand on one storage."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r")
    messages = [pickle.dumps(row) for row in x]
    del x
    rows = [pickle.loads(message) for message in messages]
    assert len({row.untyped_storage() for row in rows}) == 1


def test_anonymous_memory_travels_by_value():
    """Through `pickle` anonymous memory goes by value, compactly."""
    x = MemoryMappedTensor.ones(1000, 1000)
    message = pickle.dumps(x[3, :10])
    again = pickle.loads(message)
    assert type(again) is torch.Tensor
    assert again.tolist() == [1] * 10
    assert len(message) < 1000


def test_conjugated_views_travel(path):
    """Conjugate and negative bits travel with a reference."""
    z = torch.randn(3, 4, dtype=torch.complex64)
    x = MemoryMappedTensor.from_tensor(z, filename=path)
    for view, plain in ((x.conj(), z.conj()), (x.conj().imag, z.conj().imag), (x.H[1:], z.H[1:])):
        again = pickle.loads(pickle.dumps(view))
        assert type(again) is MemoryMappedTensor
        assert (again.is_conj(), again.is_neg()) == (plain.is_conj(), plain.is_neg())
        assert torch.equal(again, plain)


def test_take_into_a_tensor_that_requires_gradients(numbers):
    """Rows are not gathered into a tensor whose gradients they would break."""
    path, values = numbers
    x = MemoryMappedTensor.from_filename(path, "f4", (3, 4))
    out = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="out must not require gradients"):
        x.take([1, 0], out=out)
    assert out.tolist() == [[1.0] * 4] * 2
    with torch.no_grad():
        assert x.take([1, 0], out=out) is out
    assert out.tolist() == values[[1, 0]].tolist()
