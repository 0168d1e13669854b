"""Jagged tensors as nested, padded, awkward and joined ones, and as strings."""

import pickle
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import mmtensor
from mmtensor import DtypeError, JaggedCollate, JaggedTensor, MemoryMappedTensor, TensorDict

# torch says so of every nested tensor in the strided layout.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
)

LAYOUTS = [torch.jagged, torch.strided]


def elements_of(*shapes):
    """Return tensors of these shapes with numbers that all differ."""
    counts = [int(np.prod(shape)) for shape in shapes]
    parts = torch.arange(float(sum(counts))).split(counts)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def make(elements, place, tmp_path):
    """Return a jagged tensor on files opened in a mode, in shared or in regular memory."""
    if place == "anonymous":
        return JaggedTensor.from_tensors(elements)
    if place == "regular":
        return JaggedTensor.from_tensors(elements)[list(range(len(elements)))]
    JaggedTensor.from_tensors(elements, filename=tmp_path / "x.memmap")
    dtype = elements[0].dtype if elements else "float32"
    return JaggedTensor.from_filename(tmp_path / "x.memmap", dtype, mode=place)


@pytest.fixture(params=["r", "r+", "c", "anonymous", "regular"])
def place(request):
    """Return where the data is."""
    return request.param


FIRST_VARIES = {
    "1-D": [(2,), (0,), (3,)],
    "2-D": [(2, 3), (1, 3), (0, 3), (4, 3)],
    "ones": [(2, 1, 1), (3, 1, 1)],
    "nothing in them": [(2, 0), (3, 0)],
    "one": [(5, 2)],
    "none": [],
}


@pytest.mark.parametrize("shapes", FIRST_VARIES.values(), ids=FIRST_VARIES)
def test_to_nested_without_a_copy(shapes, place, tmp_path):
    """Where only the first dimension varies, torch.jagged stands on the same values."""
    elements = elements_of(*shapes)
    j = make(elements, place, tmp_path)
    nested = j.to_nested()
    assert nested.layout is torch.jagged
    assert nested.size(0) == len(elements)
    torch.testing.assert_close(list(nested.unbind()), elements, rtol=0, atol=0)
    if j.numel():
        storage = j.values.untyped_storage()
        assert nested.values().untyped_storage() is storage
        part = j[1:].to_nested()
        torch.testing.assert_close(list(part.unbind()), elements[1:], rtol=0, atol=0)
        assert part.values().untyped_storage() is storage
    again = JaggedTensor.from_nested(nested)
    torch.testing.assert_close(again, elements, rtol=0, atol=0)


def test_to_nested_of_another_dimension(place, tmp_path):
    """Where one other dimension varies, torch.jagged has a copy with the same elements."""
    elements = elements_of((2, 3), (2, 1), (2, 5))
    nested = make(elements, place, tmp_path).to_nested()
    torch.testing.assert_close([x.contiguous() for x in nested.unbind()], elements, rtol=0, atol=0)
    torch.testing.assert_close(JaggedTensor.from_nested(nested), elements, rtol=0, atol=0)


@pytest.mark.parametrize("shapes", [[(2, 3), (4, 1), (0, 5)], [(2,), (0,)], [(1, 2, 3)], []])
def test_to_nested_strided(shapes, place, tmp_path):
    """torch.strided takes elements of any shapes, as a copy."""
    elements = elements_of(*shapes)
    nested = make(elements, place, tmp_path).to_nested(torch.strided)
    assert nested.layout is torch.strided
    torch.testing.assert_close(list(nested.unbind()), elements, rtol=0, atol=0)
    if elements:
        torch.testing.assert_close(JaggedTensor.from_nested(nested), elements, rtol=0, atol=0)


def test_to_nested_that_torch_cannot_have():
    """Shapes that torch.jagged cannot have, and other layouts, raise and name a way out."""
    j = JaggedTensor.from_tensors(elements_of((2, 3), (4, 1)))
    with pytest.raises(ValueError, match="differ in one dimension only"):
        j.to_nested()
    with pytest.raises(ValueError, match="layout must be torch.jagged or torch.strided"):
        j.to_nested(torch.sparse_coo)
    with pytest.raises(ValueError, match="at least one dimension"):
        JaggedTensor.from_tensors([torch.tensor(1.0)]).to_nested()


NESTED = {
    # Case 18: elements that are transposed.
    "transposed strided": lambda: torch.nested.nested_tensor(
        elements_of((2, 3), (4, 3)), layout=torch.strided
    ).transpose(1, 2),
    "strided, no rows": lambda: torch.nested.nested_tensor([], layout=torch.strided),
    "strided, all empty": lambda: torch.nested.nested_tensor(
        [torch.ones(0, 2), torch.ones(0, 3)], layout=torch.strided
    ),
    "jagged": lambda: torch.nested.nested_tensor(
        elements_of((2, 3), (4, 3)), layout=torch.jagged
    ),
    "transposed jagged": lambda: torch.nested.nested_tensor(
        elements_of((2, 3, 2), (4, 3, 2)), layout=torch.jagged
    ).transpose(1, 2),
    "jagged with holes": lambda: torch.nested.narrow(
        torch.arange(20.0).view(2, 10), 1, torch.tensor([1, 4]), torch.tensor([3, 2]),
        layout=torch.jagged,
    ),
    "jagged, no rows": lambda: torch.nested.nested_tensor_from_jagged(
        torch.ones(0, 3), torch.zeros(1, dtype=torch.int64)
    ),
    "bool": lambda: torch.nested.nested_tensor(
        [torch.tensor([True]), torch.tensor([False, True])], layout=torch.jagged
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", NESTED)
@pytest.mark.parametrize("door", ["from_nested", "from_tensor"])
@pytest.mark.parametrize("on_file", [False, True])
def test_from_nested(on_file, door, which, tmp_path):
    """Nested tensors of both layouts, contiguous or not, are stored as they are seen."""
    nested = NESTED[which]()
    filename = tmp_path / "x.memmap" if on_file else None
    if door == "from_nested":
        j = JaggedTensor.from_nested(nested, filename=filename)
    else:
        j = MemoryMappedTensor.from_tensor(nested, filename=filename)
    assert type(j) is JaggedTensor
    expected = [x.contiguous() for x in nested.unbind()]
    assert len(j) == len(expected) == nested.size(0)
    torch.testing.assert_close(j, expected, rtol=0, atol=0)
    if on_file:
        again = JaggedTensor.from_filename(filename, nested.dtype, mode="r", validate=True)
        torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_from_nested_without_data():
    """``copy_data=False`` makes room for the elements of a nested tensor."""
    nested = torch.nested.nested_tensor(elements_of((2, 3), (4, 3)), layout=torch.jagged)
    j = MemoryMappedTensor.from_tensor(nested, copy_data=False)
    assert j.shapes.tolist() == [[2, 3], [4, 3]]
    assert not bool(j.values.any())


def test_wrong_nested(tmp_path):
    """What is no nested tensor, requires gradients, or comes with a shape, is refused."""
    for wrong in (torch.ones(2, 2), [torch.ones(2)]):
        with pytest.raises(TypeError, match="expected a torch nested tensor"):
            JaggedTensor.from_nested(wrong, filename=tmp_path / "x.memmap")
    nested = torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True
    )
    with pytest.raises(RuntimeError, match="cannot require gradients"):
        JaggedTensor.from_nested(nested, filename=tmp_path / "x.memmap")
    with pytest.raises(TypeError, match="leave shape= out"):
        MemoryMappedTensor.from_tensor(nested.detach(), shape=(2, 3))
    assert list(tmp_path.iterdir()) == []


# --- padded ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [[(2,), (0,), (3,)], [(2, 3), (4, 1), (0, 9)], [(1, 2, 3), (3, 2, 1)], [()], [],
     [(0, 2), (0, 3)], [(40, 40), (3, 50)], [(400,), (1,)]],
    ids=str,
)  # fmt: skip
def test_to_padded(shapes, place, tmp_path):
    """A padded tensor has the elements in its corner and the padding value elsewhere."""
    elements = elements_of(*shapes)
    j = make(elements, place, tmp_path)
    padded, mask = j.to_padded(-1, return_mask=True)
    assert torch.equal(padded, j.to_padded(-1))
    largest = np.max([x.shape for x in elements], axis=0).astype(int) if elements else [0]
    assert padded.shape == mask.shape == (len(elements), *largest)
    assert mask.dtype is torch.bool
    for number, element in enumerate(elements):
        corner = tuple(slice(size) for size in element.shape)
        assert torch.equal(padded[number][corner], element)
        assert bool(mask[number][corner].all())
        assert int(mask[number].sum()) == element.numel()
    assert bool((padded[~mask] == -1).all())
    backwards = j[::-1].to_padded(-1)
    assert torch.equal(backwards, padded.flip(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.uint8, torch.complex64])
def test_to_padded_keeps_the_dtype(dtype):
    """A padded tensor has the dtype of the elements; without a value it is padded with 0."""
    j = JaggedTensor.from_tensors([torch.ones(2).to(dtype), torch.ones(1).to(dtype)])
    expected = torch.tensor([[1, 1], [1, 0]]).to(dtype)
    assert j.to_padded().dtype is dtype
    assert torch.equal(j.to_padded(), expected)


# --- awkward -----------------------------------------------------------------------------

AWKWARD = {
    "1-D": [[1, 2], [], [3]],
    "2-D": [[[1, 2], [3, 4]], [], [[5]], [[], []]],
    "3-D": [[[[1], [2]], [[3], [4]]], [[[5, 6]]]],
    "floats": [[[1.5, 2.5], [3.5, 4.5]], [[1.0, 2.0]]],
}


@pytest.mark.parametrize("which", AWKWARD)
def test_awkward(which, tmp_path):
    """Lists of an awkward array go to files and come back as an awkward array."""
    ak = pytest.importorskip("awkward")
    j = JaggedTensor.from_awkward(ak.Array(AWKWARD[which]), filename=tmp_path / "x.memmap")
    assert j.tolist() == [np.array(x).tolist() for x in AWKWARD[which]]
    assert ak.to_list(j.to_awkward()) == AWKWARD[which]
    assert ak.to_list(j[1:].to_awkward()) == AWKWARD[which][1:]
    assert ak.to_list(j[::-1].to_awkward()) == AWKWARD[which][::-1]


def test_awkward_stands_on_the_values(tmp_path):
    """An awkward array has no copy of the values, of 1-D elements none of the offsets either."""
    ak = pytest.importorskip("awkward")
    j = JaggedTensor.from_tensors(elements_of((2,), (3,)), filename=tmp_path / "x.memmap")
    array = j.to_awkward()
    assert np.shares_memory(array.layout.content.data, np.asarray(j.values))
    assert np.shares_memory(array.layout.offsets.data, np.asarray(j.offsets))
    j[1][0] = -5
    assert ak.to_list(array)[1][0] == -5
    deep = JaggedTensor.from_tensors(elements_of((2, 2), (1, 3))).to_awkward()
    assert ak.to_list(deep) == [[[0, 1], [2, 3]], [[4, 5, 6]]]
    scalars = JaggedTensor.from_tensors([torch.tensor(1), torch.tensor(2)]).to_awkward()
    assert ak.to_list(scalars) == [1, 2]


@pytest.mark.parametrize(
    ("lists", "error", "message"),
    [
        ([[[1, 2], [3]]], ValueError, "element 0 is not rectangular: its lists have 1 to 2"),
        ([[[[1], [2]], [[3]]]], ValueError, "element 0 is not rectangular"),
        ([1, 2], ValueError, "expected an awkward array of lists"),
        ([[1, None]], ValueError, "missing values"),
        ([[1], None], ValueError, "missing values"),
        ([[[1], None], [[2]]], ValueError, "missing values"),
        ([["a"]], TypeError, "dtype must be one that torch has"),
    ],
)
def test_wrong_awkward(lists, error, message, tmp_path):
    """Lists that are no blocks of numbers raise and say why; no file is written."""
    ak = pytest.importorskip("awkward")
    with pytest.raises(error, match=message):
        JaggedTensor.from_awkward(ak.Array(lists), filename=tmp_path / "x.memmap")
    assert list(tmp_path.iterdir()) == []


def test_without_awkward(monkeypatch):
    """Where the package is not installed, both directions say so."""
    monkeypatch.setitem(sys.modules, "awkward", None)
    j = JaggedTensor.zeros([[1]])
    for call in (j.to_awkward, lambda: JaggedTensor.from_awkward([[1]])):
        with pytest.raises(ImportError, match="pip install awkward"):
            call()


# --- strings -----------------------------------------------------------------------------

TEXTS = ["zwölf", "", "one", "日本語", "a\x00b", "🧵"]


def test_strings(tmp_path):
    """Strings come back from files, one at a time, in slices, or all at once."""
    j = JaggedTensor.from_strings(TEXTS, filename=tmp_path / "x.memmap")
    assert (j.dtype, j.ndim) == (torch.uint8, 1)
    assert (tmp_path / "x.memmap").read_bytes() == "".join(TEXTS).encode()
    for mode in ("r", "r+", "c"):
        j = JaggedTensor.from_filename(tmp_path / "x.memmap", "uint8", mode=mode)
        assert j.to_strings() == TEXTS
        assert list(j.strings) == TEXTS
        assert [j.strings[i] for i in range(-6, 6)] == TEXTS * 2
        assert j.strings[np.int64(3)] == TEXTS[3]
        assert list(j.strings[1:5:2]) == TEXTS[1:5:2]
        assert list(j.strings[::-1][1:]) == TEXTS[::-1][1:]
        assert list(j.strings[4:4]) == []
        assert j[::-2].to_strings() == TEXTS[::-2]
        assert j[[3, 0]].to_strings() == [TEXTS[3], TEXTS[0]]
        assert list(j[1:].strings[1:]) == TEXTS[2:]
        assert (len(j.strings), "one" in j.strings, j.strings.index("one")) == (6, True, 2)
    assert repr(j.strings) == f"Strings([{', '.join(map(repr, TEXTS[:5]))}, ...], len=6)"
    for index in (6, -7):
        with pytest.raises(IndexError, match=f"element {index} is out of range for 6"):
            j.strings[index]


def test_bytes():
    """Bytes are kept as they are; as strings, those that are no UTF-8 raise."""
    items = [b"\xff\x00", bytearray(b"ab"), memoryview(b"c"), "ö", b""]
    j = JaggedTensor.from_strings(items)
    assert j.to_bytes() == [b"\xff\x00", b"ab", b"c", "ö".encode(), b""]
    assert j.strings[1] == "ab"
    with pytest.raises(UnicodeDecodeError, match="can't decode byte 0xff"):
        j.strings[0]


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        (["a", 3], TypeError, "element 1 must be a str or bytes"),
        (["a", None], TypeError, "element 1 must be a str or bytes"),
        ("abc", TypeError, "expected a list of strings, got one"),
        (b"abc", TypeError, "expected a list of strings, got one"),
        (["a", "\ud800"], ValueError, "has no UTF-8 form"),
    ],
)
def test_wrong_strings(items, error, message, tmp_path):
    """What is no string raises and is named; no file is written."""
    with pytest.raises(error, match=message):
        JaggedTensor.from_strings(items, filename=tmp_path / "x.memmap")
    assert list(tmp_path.iterdir()) == []


def test_strings_are_read_only():
    """Assigning one says how to replace them all."""
    j = JaggedTensor.from_strings(TEXTS)
    with pytest.raises(TypeError, match=r"read-only: .* Replace them all"):
        j.strings[0] = "other"
    assert list(j.strings) == TEXTS


def test_strings_of_numbers():
    """Only uint8 of one dimension can be strings."""
    for j in (JaggedTensor.zeros([[1]]), JaggedTensor.zeros([[1, 1]], dtype="uint8")):
        for use in (lambda j=j: j.strings, j.to_strings, j.to_bytes):
            with pytest.raises(TypeError, match="strings are elements of torch.uint8"):
                use()


def test_no_strings():
    """A list of no strings is a jagged tensor of none."""
    j = JaggedTensor.from_strings([])
    assert (j.to_strings(), len(j.strings), list(j.strings)) == ([], 0, [])


# --- one of many -------------------------------------------------------------------------


@pytest.mark.parametrize("on_file", [False, True])
def test_cat(on_file, place, tmp_path):
    """`mmtensor.cat` copies jagged tensors, slices and gathered ones into one."""
    elements = elements_of((2, 3), (0, 1), (4, 1), (1, 1))
    j = make(elements, place, tmp_path)
    filename = tmp_path / "all.memmap" if on_file else None
    one = mmtensor.cat([j, j[1:3], j[::-1], j[[2]], j[:0]], filename)
    expected = [*elements, *elements[1:3], *elements[::-1], elements[2]]
    torch.testing.assert_close(one, expected, rtol=0, atol=0)
    assert one.mode == "r+"
    if on_file:
        again = JaggedTensor.from_filename(filename, "float32", mode="r", validate=True)
        torch.testing.assert_close(again, expected, rtol=0, atol=0)
        mmtensor.cat([again, again[:1]], filename, existsok=True)
        assert len(JaggedTensor.from_filename(filename, "float32")) == len(expected) + 1
        torch.testing.assert_close(again, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (JaggedTensor.zeros([[1, 1]], dtype="int32"), TypeError, "tensor 1 has dtype torch.int32"),
        (
            JaggedTensor.zeros([[1]]),
            ValueError,
            "of tensor 1 have 1 dimensions, .* tensor 0 have 2",
        ),
        (torch.zeros(1, 1), TypeError, "takes jagged tensors, got .* as number 1"),
    ],
    ids=["dtype", "ndim", "class"],
)
def test_wrong_cat(more, error, message, tmp_path):
    """Jagged tensors that do not fit together raise, and no file is written."""
    with pytest.raises(error, match=message):
        mmtensor.cat([JaggedTensor.zeros([[1, 1]]), more], tmp_path / "x.memmap")
    with pytest.raises(ValueError, match="at least one"):
        mmtensor.cat([], tmp_path / "x.memmap")
    assert list(tmp_path.iterdir()) == []


# --- batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["jagged", "nested", "strided", "padded"])
def test_collate(layout):
    """The collate helper makes one tensor of a jagged tensor, or of a list of tensors."""
    elements = elements_of((2, 3), (0, 3), (4, 3))
    collate = JaggedCollate(layout, padding_value=-1)
    j = JaggedTensor.from_tensors(elements)
    for batch in (j, [j], elements, list(j), [x.numpy() for x in elements]):
        got = collate(batch)
        if layout == "padded":
            assert torch.equal(got, j.to_padded(-1))
        else:
            torch.testing.assert_close(list(got.unbind()), elements, rtol=0, atol=0)
    batches = list(DataLoader(j, batch_size=2, collate_fn=collate))
    assert [len(batch.unbind()) for batch in batches] == [2, 1]


def test_collate_with_a_mask():
    """With ``return_mask``, a padded batch is a tuple of the tensor and its mask."""
    padded, mask = JaggedCollate("padded", return_mask=True)([torch.ones(1), torch.ones(2)])
    assert padded.tolist() == [[1, 0], [1, 1]]
    assert mask.tolist() == [[True, False], [True, True]]


def test_wrong_collate():
    """An unknown layout raises at once; elements that do not fit, when they come."""
    with pytest.raises(ValueError, match="layout must be one of .*got \"sparse\"|got 'sparse'"):
        JaggedCollate("sparse")
    assert repr(JaggedCollate()) == "JaggedCollate('nested', padding_value=0)"
    with pytest.raises(TypeError, match="element 1 has dtype"):
        JaggedCollate()([torch.ones(1), torch.ones(1, dtype=torch.int64)])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("size", [3, 1000])
def test_padding_of_unsigned_numbers(dtype, size):
    """Dtypes of which torch has few kernels are padded, long elements and short ones."""
    top = torch.iinfo(dtype).max
    pieces = [[top] * size, [1]]
    j = JaggedTensor.from_tensors([torch.tensor(one, dtype=dtype) for one in pieces])
    padded, mask = j.to_padded(7, return_mask=True)
    assert padded.dtype is dtype
    assert padded.tolist() == [[top] * size, [1] + [7] * (size - 1)]
    assert mask.sum() == size + 1


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e5m2])
def test_dtypes_without_strided_nested_tensors(dtype):
    """What torch cannot hold in a nested tensor is an error that says what can."""
    j = JaggedTensor.zeros([[1], [2]], dtype=dtype)
    with pytest.raises(DtypeError, match=r"torch has no nested tensors of .*j.to\(torch.int64\)"):
        j.to_nested(torch.strided)


def test_strings_cross_processes(tmp_path):
    """Strings travel as their jagged tensor does, slices too."""
    j = JaggedTensor.from_strings(TEXTS, filename=tmp_path / "x.memmap")
    strings = pickle.loads(pickle.dumps(j.strings[::-1]))
    assert list(strings) == TEXTS[::-1]
    assert len(pickle.dumps(j.strings)) < 1000
    assert strings[[5, 0]].decode_all() == [TEXTS[0], TEXTS[5]]
    assert j.strings[torch.tensor([True] + [False] * 5)].decode_all() == TEXTS[:1]


def test_collating_a_container():
    """A batch of a TensorDict is no jagged tensor; the message says how to pad a leaf of it."""
    td = TensorDict({"j": JaggedTensor.zeros([[1], [2]]), "x": torch.zeros(2)}, [2])
    with pytest.raises(TypeError, match=r"got a TensorDict.*batch\[\"tokens\"\].to_padded"):
        next(iter(DataLoader(td, 2, collate_fn=JaggedCollate("padded"))))
