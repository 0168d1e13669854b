"""`JaggedTensor`: constructors, indexing, assignment, parts."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmtensor
from mmtensor import DeviceError, JaggedTensor, MemoryMappedTensor, mapping
from mmtensor.testing import dtypes, row_indices

SHAPES = {
    "none": [],
    "one empty": [(0,)],
    "case 16": [(0,), (3,)],
    "all empty": [(0,), (0,), (0,)],
    "1-D": [(3,), (0,), (5,), (1,)],
    "2-D": [(2, 3), (0, 4), (4, 0), (1, 1), (3, 2)],
    "3-D": [(3, 2, 4), (3, 5, 1), (3, 0, 2)],
    "5-D": [(1, 2, 1, 2, 3), (2, 1, 1, 1, 1), (1, 1, 0, 1, 1)],
    "0-D": [(), (), ()],
}
PLACES = ["file", "anonymous", "regular"]


def elements_of(shapes, dtype=torch.float32):
    """Return tensors of these shapes with numbers that all differ."""
    start = 1
    result = []
    for shape in shapes:
        count = int(np.prod(shape))
        result.append(torch.arange(start, start + count).view(shape).to(dtype))
        start += count
    return result


def make(elements, place, tmp_path):
    """Return a jagged tensor of elements: on files, in shared or in regular memory."""
    if place == "regular":
        values = torch.cat([x.reshape(-1) for x in elements]) if elements else torch.empty(0)
        return JaggedTensor(values, [tuple(x.shape) for x in elements])
    filename = tmp_path / "x.memmap" if place == "file" else None
    return JaggedTensor.from_tensors(elements, filename=filename)


@pytest.fixture(params=PLACES)
def place(request):
    """Return where the data is."""
    return request.param


@pytest.fixture
def five(place, tmp_path):
    """Return a jagged tensor of five 2-D elements and the elements."""
    elements = elements_of(SHAPES["2-D"])
    return make(elements, place, tmp_path), elements


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_elements(shapes, place, tmp_path):
    """Elements come back with their values and shapes, whatever the shapes are (case 16)."""
    elements = elements_of(shapes)
    j = make(elements, place, tmp_path)
    assert len(j) == len(elements)
    torch.testing.assert_close(j, elements, rtol=0, atol=0)
    torch.testing.assert_close(list(j), elements, rtol=0, atol=0)
    torch.testing.assert_close(j.unbind(), tuple(elements), rtol=0, atol=0)
    assert [element.stride() for element in j] == [element.stride() for element in elements]
    assert j.numel() == sum(element.numel() for element in elements)
    assert j.nbytes == 4 * j.numel()
    assert j.ndim == (len(shapes[0]) if shapes else 1)


@pytest.mark.parametrize("dtype", list(mmtensor.dtypes.DTYPES))
def test_dtypes(dtype, tmp_path):
    """Every dtype goes to a file and back, and is gathered, small elements and large."""
    found = getattr(torch, dtype)
    elements = elements_of([(3,), (0,), (500,), (2,)], torch.uint8)
    elements = [element.to(torch.float32).to(found) for element in elements]
    JaggedTensor.from_tensors(elements, filename=tmp_path / "x.memmap")
    j = JaggedTensor.from_filename(tmp_path / "x.memmap", dtype, mode="r")
    for got, expected in ((j[[3, 0]], elements[3::-3]), (j[[2, 3]], elements[2:]), (j, elements)):
        assert got.dtype == found
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == found
            assert torch.equal(a.clone().view(torch.uint8), b.view(torch.uint8))


def test_no_elements_have_no_dtype_of_their_own():
    """A list of nothing gives elements of the default dtype with one dimension."""
    j = JaggedTensor.from_tensors([])
    assert (len(j), j.ndim, j.dtype) == (0, 1, torch.get_default_dtype())
    assert (j.values.shape, j.offsets.tolist(), j.shapes.shape) == ((0,), [0], (0, 1))


def test_an_element_is_a_view(five, place):
    """``j[i]`` is on the memory of the values; on a mapping it is a MemoryMappedTensor."""
    j, elements = five
    kind = torch.Tensor if place == "regular" else MemoryMappedTensor
    assert type(j[0]) is kind
    assert type(j.values) is kind
    j[4][1, 1] = -5
    assert j.values[j.offsets[4] + 3] == -5
    assert torch.equal(j[0], elements[0])


@pytest.mark.parametrize(
    "index", [slice(None), slice(1, 4), slice(2, 2), slice(None, None, 2), slice(None, None, -1),
              slice(4, 0, -2), slice(-2, None), slice(10, 20), slice(3, None, 5)],
    ids=str,
)  # fmt: skip
def test_a_slice_is_a_view(index, five):
    """A slice, with any step, has the elements that a slice of a list has, on the same memory."""
    j, elements = five
    part, expected = j[index], elements[index]
    torch.testing.assert_close(part, expected, rtol=0, atol=0)
    again = part[1:][::-1]
    torch.testing.assert_close(again, expected[1:][::-1], rtol=0, atol=0)
    part.fill_(7)
    assert j.numel() == sum(x.numel() for x in elements)
    assert int((j.values == 7).sum()) >= part.numel()
    assert all(bool((x == 7).all()) for x in part)
    untouched = set(range(5)) - set(range(5)[index])
    assert all(torch.equal(j[i], elements[i]) for i in untouched)


@pytest.mark.parametrize("index", [slice(None), slice(2, 4), slice(0, 2), slice(None, None, -2)])
def test_parts_of_a_slice(index, five):
    """Values, offsets and shapes of a slice are those of its elements, and start at 0."""
    j, elements = five
    part, expected = j[index], elements[index]
    assert part.values.tolist() == torch.cat([x.reshape(-1) for x in expected]).tolist()
    assert part.offsets.tolist() == np.cumsum([0, *(x.numel() for x in expected)]).tolist()
    assert part.shapes.tolist() == [list(x.shape) for x in expected]
    assert part.numel() == part.offsets[-1] == len(part.values)
    for number, element in enumerate(part):
        rows = part.values[part.offsets[number] : part.offsets[number + 1]]
        assert torch.equal(rows.view(*part.shapes[number].tolist()), element)


def test_values_of_a_slice_are_on_the_same_memory(five):
    """The values of a slice are a view: writing to them changes the elements."""
    j, _ = five
    j[3:].values[0] = -1
    assert j[3].item() == -1


@pytest.mark.parametrize(
    "index",
    [
        [0, 4], [4, 4, -1, -5, 2], (torch.tensor([1, 3])), torch.tensor([2], dtype=torch.int32),
        np.array([0, -1]), np.array([3], np.uint8), [], torch.tensor([], dtype=torch.int64),
        [True, False, False, True, False], torch.tensor([False] * 5), np.array([True] * 5),
        range(1, 3),
    ],
    ids=repr,
)  # fmt: skip
def test_gather(index, five):
    """A list, tensor, array or mask gathers elements into regular memory (case 17)."""
    j, elements = five
    numbers = np.arange(5)[np.asarray(index, bool if np.asarray(index).dtype == bool else int)]
    got = j[index]
    assert type(got) is JaggedTensor
    assert type(got.values) is torch.Tensor
    assert got.mode is None
    torch.testing.assert_close(got, [elements[i] for i in numbers], rtol=0, atol=0)
    assert got.ndim == j.ndim
    got.fill_(-3)
    assert not bool((j.values == -3).any())


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), max_size=12),
    dtypes(),
    st.data(),
)
def test_like_a_list(shapes, dtype, data):
    """Indexing gives what the same index gives on a list of the elements."""
    elements = [x.to(getattr(torch, dtype)) for x in elements_of(shapes)]
    j = JaggedTensor.from_tensors(elements)
    first = data.draw(st.slices(len(elements)))
    view, expected = j[first], elements[first]
    index = data.draw(row_indices(len(expected), valid=True))
    if isinstance(index, torch.Tensor | np.ndarray | list):
        array = np.asarray(index)
        if array.ndim == 1 and array.size:
            numbers = np.arange(len(expected))[array].tolist()
            view, expected = view[index], [expected[i] for i in numbers]
    assert len(view) == len(expected)
    for a, b in zip(view, expected, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.clone().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_gather_from_a_slice(five):
    """Numbers count inside a slice, also one that runs backwards."""
    j, elements = five
    torch.testing.assert_close(j[::-2][[2, 0]], [elements[0], elements[4]], rtol=0, atol=0)
    torch.testing.assert_close(j[1:4][[-1, 0]], [elements[3], elements[1]], rtol=0, atol=0)


@pytest.mark.parametrize(
    "index", [3, -2, np.int64(3), torch.tensor(3), np.array(3)], ids=lambda i: type(i).__name__
)
def test_numbers_of_any_kind(index, five):
    """Whatever Python takes as an integer is the number of an element."""
    j, elements = five
    assert torch.equal(j[index], elements[3])


def test_one_number_in_a_tensor_is_a_batch(five):
    """A 1-D tensor of one number gathers one element, as a list of one does."""
    j, elements = five
    got = j[torch.tensor([4])]
    assert type(got) is JaggedTensor
    torch.testing.assert_close(got, [elements[4]])


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (5, IndexError, "element 5 is out of range for 5 elements"),
        (-6, IndexError, "element -6 is out of range for 5 elements"),
        ([0, 5], IndexError, "element 5 is out of range"),
        ([-6, 0], IndexError, "element -6 is out of range"),
        ([True, False], IndexError, "one entry per element, got 2 for 5"),
        (torch.zeros(6, dtype=torch.bool), IndexError, "one entry per element, got 6 for 5"),
        (1.0, TypeError, "must be an integer, a slice"),
        ([0.5], TypeError, "must be integers or bools, got float64"),
        ("0", TypeError, "must be an integer, a slice"),
        ((0, 1), TypeError, r"takes one index: j\[i\]"),
        (np.zeros((2, 2), int), TypeError, "got 2 dimensions"),
        (None, TypeError, "must be an integer, a slice"),
    ],
    ids=repr,
)
def test_wrong_index(index, error, message, five):
    """An index that is out of range, or none, raises and says why."""
    with pytest.raises(error, match=message):
        five[0][index]


def test_assign(five):
    """``j[i] = tensor`` writes the element, from a tensor or an array."""
    j, _ = five
    j[0] = torch.full((2, 3), 9.0)
    j[-1] = np.full((3, 2), 8, np.float32)
    j[np.int64(3)] = torch.ones(1, 1)
    j[1] = np.ones((0, 4), np.float32)
    assert j.values.tolist() == [9] * 6 + [1] + [8] * 6
    j[4] = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert j[4].tolist() == [[0, 3], [1, 4], [2, 5]]
    j[::-1][0] = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert j.values.tolist() == [9] * 6 + [1, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("index", "value", "error", "message"),
    [
        (0, torch.ones(3, 2), ValueError, r"element 0 has shape \(2, 3\), which cannot change"),
        (0, torch.ones(1), ValueError, r"got \(1,\)"),
        (0, torch.ones(2, 3, dtype=torch.float64), TypeError, "got torch.float64. Nothing"),
        (0, np.ones((2, 3)), TypeError, "got torch.float64. Nothing is converted"),
        (0, 1.0, TypeError, "an element must be a torch tensor or a NumPy array"),
        (5, torch.ones(1), IndexError, "element 5 is out of range"),
        (slice(0, 2), torch.ones(1), TypeError, "assigned one at a time"),
        ([0], torch.ones(2, 3), TypeError, "assigned one at a time"),
    ],
)
def test_wrong_assignment(index, value, error, message, five):
    """A value of another shape or dtype raises, and nothing is written."""
    j, elements = five
    with pytest.raises(error, match=message):
        j[index] = value
    torch.testing.assert_close(j, elements, rtol=0, atol=0)


def test_gradients_are_refused(tmp_path):
    """An element that requires gradients is named, and no file is written."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="element 1: .* cannot require gradients"):
        JaggedTensor.from_tensors([torch.ones(2), x], filename=tmp_path / "x.memmap")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("elements", "error", "message"),
    [
        # Case 20: mmap_ninja stores 1.5 as 1.
        (
            [torch.ones(2, dtype=torch.int32), torch.tensor([1.5], dtype=torch.float64)],
            TypeError,
            "element 1 has dtype torch.float64, but element 0 has torch.int32",
        ),
        ([np.ones(2), np.ones(2, "f4")], TypeError, "element 1 has dtype torch.float32"),
        ([torch.ones(2), np.ones(2)], TypeError, "element 1 has dtype torch.float64"),
        ([torch.ones(2), torch.ones(2, 2)], ValueError, r"element 1 has 2 dimensions \(shape"),
        ([torch.ones(2), [1.0]], TypeError, "element 1: an element must be a torch tensor"),
        ([[1.0]], TypeError, "element 0: an element must be a torch tensor"),
        ([3], TypeError, "element 0: an element must be a torch tensor"),
        ([np.array(["a"])], TypeError, "element 0: dtype must be one that torch has"),
        ([torch.ones(2), np.ones(2, ">f4")], TypeError, "element 1: dtype must have the byte"),
        ([torch.ones(2).to_sparse()], TypeError, "element 0: expected a dense tensor"),
        ([torch.ones(2), torch.ones(2).to_sparse()], TypeError, "element 1: expected a dense"),
        ([torch.ones(2), torch.ones(2, device="meta")], TypeError, "element 1: .*meta"),
    ],
    ids=str,
)
def test_elements_that_do_not_fit(elements, error, message, tmp_path):
    """Elements of several dtypes or numbers of dimensions raise and name the element."""
    with pytest.raises(error, match=message):
        JaggedTensor.from_tensors(elements, filename=tmp_path / "x.memmap")
    assert list(tmp_path.iterdir()) == []


def test_elements_of_every_layout():
    """Transposed, strided, expanded, conjugated and read-only elements are stored as seen."""
    base = torch.arange(12).view(3, 4) * (1 + 2j)
    array = np.arange(6, dtype=np.complex64).reshape(2, 3)[:, ::-1]
    array.flags.writeable = False
    elements = [base.t(), base[:, ::2], base[:1].expand(3, 4), base.conj(), array, array.T]
    j = JaggedTensor.from_tensors(elements)
    expected = [x.clone() for x in elements[:-2]] + [torch.tensor(x.copy()) for x in elements[-2:]]
    torch.testing.assert_close(j, expected, rtol=0, atol=0)


def test_elements_from_a_generator_of_memory_mapped_tensors(tmp_path):
    """A generator is taken as well as a list, and read-only memory-mapped tensors are."""
    np.arange(12, dtype="f4").tofile(tmp_path / "y")
    x = MemoryMappedTensor.from_filename(tmp_path / "y", "float32", (3, 4), mode="r")
    expected = [[0.0], [4.0, 5.0], [8.0, 9.0, 10.0]]
    j = JaggedTensor.from_tensors(x[i, : i + 1] for i in range(3))
    assert j.tolist() == expected
    plain = [torch.narrow(torch.select(x, 0, i), 0, 0, i + 1) for i in range(3)]
    assert {type(view) for view in plain} == {torch.Tensor}
    assert JaggedTensor.from_tensors(plain).tolist() == expected


def test_a_jagged_tensor_is_a_source(five, tmp_path):
    """`from_tensors` copies a jagged tensor, a slice with a step as well."""
    j, elements = five
    torch.testing.assert_close(JaggedTensor.from_tensors(j, filename=tmp_path / "y"), elements)
    torch.testing.assert_close(JaggedTensor.from_tensors(j[::-2]), elements[::-2])
    torch.testing.assert_close(JaggedTensor.from_tensors(j[1:4]), elements[1:4])


@pytest.mark.parametrize(
    "shapes",
    [[[2, 3], [0, 1]], ((2, 3), (0, 1)), np.array([[2, 3], [0, 1]], np.uint8),
     torch.tensor([[2, 3], [0, 1]]), torch.tensor([[2, 3], [0, 1]], dtype=torch.int32)],
    ids=lambda shapes: type(shapes).__name__,
)  # fmt: skip
@pytest.mark.parametrize("on_file", [False, True])
def test_filled(shapes, on_file, tmp_path):
    """`empty`, `zeros`, `ones` and `full` make room for shapes from any kind of table."""
    name = (lambda n: tmp_path / n) if on_file else (lambda _: None)
    for method, value in (("empty", 0), ("zeros", 0), ("ones", 1)):
        j = getattr(JaggedTensor, method)(shapes, dtype="int16", filename=name(method))
        assert (j.dtype, j.shapes.tolist()) == (torch.int16, [[2, 3], [0, 1]])
        assert j.values.tolist() == [value] * 6
        assert j.mode == "r+"
    j = JaggedTensor.full(shapes, 2.5, filename=name("full"))
    assert (j.dtype, j.values.tolist()) == (torch.get_default_dtype(), [2.5] * 6)
    if on_file:
        assert np.fromfile(tmp_path / "full", "f4").tolist() == [2.5] * 6


@pytest.mark.parametrize(
    ("shapes", "error", "message"),
    [
        ([[2, -1]], ValueError, r"non-negative, got \(2, -1\) for element 0"),
        ([[1], [2, 3]], ValueError, r"one number of dimensions, got \(2, 3\) for element 1"),
        ([1, 2], ValueError, r"For elements of one dimension: \[\[n\] for n in lengths\]"),
        (np.zeros((1, 1, 1), int), ValueError, "got 3 dimensions"),
        ([[1.5]], TypeError, "shapes must be integers, got float64"),
        ([[2**62, 2**62]], ValueError, "at most 2.*63 - 1 numbers, got shape"),
        ([[2**40, 2**40, 0]], ValueError, "at most 2.*63 - 1 numbers, got shape"),
        ([[2**61], [2**61], [2**62]], ValueError, "at most 2.*63 - 1 bytes together"),
        (np.array([[2**63]], np.uint64), ValueError, "sizes of at most"),
        (3, ValueError, "got 0 dimensions"),
    ],
    ids=str,
)
def test_wrong_shapes(shapes, error, message, tmp_path):
    """A table that is none, or of impossible sizes, raises, and no file is written."""
    with pytest.raises(error, match=message):
        JaggedTensor.empty(shapes, filename=tmp_path / "x.memmap")
    assert list(tmp_path.iterdir()) == []


def test_a_zero_makes_the_product_zero():
    """An element with an enormous size and a zero has no numbers."""
    j = JaggedTensor.zeros([[2**40, 2**20, 0], [1, 1, 2]])
    assert j.offsets.tolist() == [0, 0, 2]
    assert j[0].shape == (2**40, 2**20, 0)


@pytest.mark.parametrize("method", ["empty", "zeros", "ones", "full"])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_table_of_shapes_means_jagged(method, keyword):
    """The constructors of MemoryMappedTensor take a 2-D integer tensor as shape."""
    table = torch.tensor([[2], [3]])
    extra = {"fill_value": 1} if method == "full" else {}
    make_it = getattr(MemoryMappedTensor, method)
    j = make_it(shape=table, **extra) if keyword else make_it(table, **extra)
    assert type(j) is JaggedTensor
    assert j.values.tolist() == [1.0 if method in ("ones", "full") else 0.0] * 5


def test_memory_mapped_tensor_opens_and_wraps_jagged(tmp_path):
    """`from_filename` and `from_storage` take a table of shapes, and index the result."""
    np.arange(6, dtype="f4").tofile(tmp_path / "x")
    table = torch.tensor([[1, 2], [4, 1]])
    for mode in ("r", "r+", "c"):
        j = MemoryMappedTensor.from_filename(tmp_path / "x", "float32", table, mode=mode)
        assert (type(j), j.mode) == (JaggedTensor, mode)
        assert j.tolist() == [[[0, 1]], [[2], [3], [4], [5]]]
    element = MemoryMappedTensor.from_filename(tmp_path / "x", "float32", table, 1)
    assert element.tolist() == [[2], [3], [4], [5]]
    assert MemoryMappedTensor(tmp_path / "x", dtype="f4", shape=table)[0].tolist() == [[0, 1]]
    storage = torch.arange(6.0).untyped_storage()
    j = MemoryMappedTensor.from_storage(storage, dtype=torch.float32, shape=table)
    assert j.tolist() == [[[0, 1]], [[2], [3], [4], [5]]]
    j[0][0, 0] = 7
    assert torch.empty(0).set_(storage)[0] == 7
    with pytest.raises(TypeError, match="offset and partial are not for it"):
        MemoryMappedTensor.from_filename(tmp_path / "x", "float32", table, offset=4)
    with pytest.raises(ValueError, match=r"must have 20 bytes .* its size is 24"):
        MemoryMappedTensor.from_filename(tmp_path / "x", "float32", torch.tensor([[5]]))


def test_from_parts():
    """The class itself takes values with shapes, with offsets that may leave gaps."""
    values = torch.arange(10)
    j = JaggedTensor(values[:5], [[2], [3]])
    assert j.tolist() == [[0, 1], [2, 3, 4]]
    j = JaggedTensor(values, [[2, 1], [1, 3]], [5, 7, 10])
    assert j.tolist() == [[[5], [6]], [[7, 8, 9]]]
    assert (j.offsets.tolist(), j.values.tolist()) == ([0, 2, 5], [5, 6, 7, 8, 9])
    j[0][0, 0] = -1
    assert values[5] == -1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.arange(4), [[2], [3]]), ValueError, "must be 5 numbers for these shapes, got 4"),
        ((torch.ones(2, 2), [[4]]), ValueError, r"one dimension, got shape \(2, 2\)"),
        ((torch.arange(8)[::2], [[4]]), ValueError, "must be contiguous"),
        ((torch.arange(4), [[4]], [0, 4, 4]), ValueError, "offsets must be 2 numbers"),
        ((torch.arange(4), [[2], [2]], [0, 3, 2]), ValueError, "element 0 is damaged"),
        ((torch.arange(4), [[1], [-1]], [0, 1, 0]), ValueError, "non-negative"),
        ((torch.arange(4), [[2], [3]], [0, 2, 5]), ValueError, "lie beyond the 4 values"),
        ((torch.arange(4), [[2], [2]], [0.0, 2.0, 4.0]), TypeError, "offsets must be integers"),
        ((np.arange(4), [[4]]), TypeError, "expected a torch tensor"),
        ((torch.ones(4, requires_grad=True), [[4]]), RuntimeError, "cannot require gradients"),
    ],
)
def test_parts_that_do_not_fit(arguments, error, message):
    """Values, shapes and offsets that contradict each other raise."""
    with pytest.raises(error, match=message):
        JaggedTensor(*arguments)


def test_copies_are_independent(five):
    """`copy.deepcopy` gives regular memory with the elements of the slice; copy.copy shares."""
    j, elements = five
    deep, shallow = copy.deepcopy(j[1:]), copy.copy(j[1:])
    j.fill_(0)
    torch.testing.assert_close(deep, elements[1:], rtol=0, atol=0)
    assert deep.mode is None
    assert shallow.numel() == deep.numel()
    assert not bool(shallow.values.any())
    same = copy.deepcopy([j, j])
    assert same[0] is same[1]


def test_names_and_modes(tmp_path):
    """`filename` and `mode` tell of the values; without a file, asking for its name raises."""
    on_file = JaggedTensor.zeros([[1]], filename=tmp_path / "x.memmap")
    assert on_file.filename == str(tmp_path / "x.memmap")
    assert repr(on_file) == (
        f"JaggedTensor(len=1, ndim=1, dtype=torch.float32, filename={on_file.filename!r}, "
        "mode='r+')"
    )
    anonymous = JaggedTensor.zeros([[1]])
    assert anonymous.mode == "r+"
    for j in (anonymous, anonymous[[0]]):
        with pytest.raises(RuntimeError, match="in memory and have no file"):
            j.filename  # noqa: B018  # reading it is the point
    assert repr(anonymous[[0]]) == "JaggedTensor(len=1, ndim=1, dtype=torch.float32)"


def test_numpy_sees_the_parts_without_a_copy(tmp_path):
    """``np.asarray`` of values, offsets and shapes stands on the mapped files."""
    j = JaggedTensor.from_tensors(elements_of(SHAPES["2-D"]), filename=tmp_path / "x.memmap")
    for part, name in ((j.values, "x"), (j.offsets, "x.offsets"), (j.shapes, "x.shape")):
        array = np.asarray(part)
        where = mmtensor.locate(array)
        assert where is not None
        assert where.path == str(tmp_path / f"{name}.memmap")
    np.asarray(j.values)[0] = 77
    assert j[0][0, 0] == 77


def test_reads_do_not_disturb_each_other(five):
    """Elements that are kept stay what they are while others are read."""
    j, elements = five
    kept = [j[i] for i in (0, 4, 0, 3)]
    del j
    torch.testing.assert_close(kept, [elements[i] for i in (0, 4, 0, 3)], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, 70000), (torch.float8_e4m3fn, 500), (torch.uint8, 256)]
)
def test_full_of_what_a_dtype_does_not_have(dtype, value):
    """A value that the dtype cannot hold raises, as in torch; there is no infinity instead."""
    with pytest.raises(RuntimeError, match="without overflow"):
        JaggedTensor.full([[3]], value, dtype=dtype)


def test_to():
    """Another dtype is a copy in regular memory; the same one is the tensor itself."""
    j = JaggedTensor.from_tensors([torch.tensor([[1, 2]]), torch.tensor([[3], [4]])])
    half = j[::-1].to(torch.float16)
    assert half.tolist() == [[[3.0], [4.0]], [[1.0, 2.0]]]
    assert (half.dtype, half.mode) == (torch.float16, None)
    assert j.to(torch.int64) is j.to("cpu") is j.to(j.values) is j
    copy = j.to(torch.int64, copy=True)
    copy.fill_(0)
    assert j.values.tolist() == [1, 2, 3, 4]
    with pytest.raises(DeviceError, match="a jagged tensor lives on the CPU, got device='meta'"):
        j.to("meta")


@pytest.mark.parametrize("step", [1, 2, -1])
def test_flush_writes_what_was_changed(tmp_path, monkeypatch, step):
    """The bytes of the elements are written, of a slice with a step as well."""
    j = JaggedTensor.zeros([[2048], [2048], [2048]], filename=tmp_path / "x.memmap")
    synced = []
    monkeypatch.setattr(mapping, "msync", lambda address, length: synced.append((address, length)))
    j[::step].flush()
    assert (j.values.data_ptr(), 3 * 8192) in synced
    assert len(synced) == 3
