"""The one rule for views: what keeps lock, flags and memory; and what an index gives."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmtensor import JaggedTensor, MemoryMappedTensor, TensorDict

# Every operation presents the same data otherwise, on a batch of [1, 4].
VIEWS = {
    "int": lambda td: td[0],
    "negative int": lambda td: td[-1],
    "np.int64": lambda td: td[np.int64(0)],
    "0-dim tensor": lambda td: td[torch.tensor(0)],
    "slice": lambda td: td[0:1],
    "empty slice": lambda td: td[1:],
    "whole slice": lambda td: td[:],
    "step": lambda td: td[:, ::2],
    "None": lambda td: td[None],
    "...": lambda td: td[...],
    "... and int": lambda td: td[..., 1],
    "tuple": lambda td: td[0, 1:3],
    "tuple with None": lambda td: td[:, None, 2],
    "empty tuple": lambda td: td[()],
    "view": lambda td: td.view(2, 2),
    "view of a list": lambda td: td.view([4]),
    "view of -1": lambda td: td.view(-1),
    "view as it is": lambda td: td.view(1, 4),
    "transpose": lambda td: td.transpose(0, 1),
    "transpose of nothing": lambda td: td.transpose(1, -1),
    "permute": lambda td: td.permute(1, 0),
    "permute of a list": lambda td: td.permute([-1, 0]),
    "permute of nothing": lambda td: td.permute(0, 1),
    "squeeze": lambda td: td.squeeze(),
    "squeeze of a dimension": lambda td: td.squeeze(0),
    "squeeze of nothing": lambda td: td.squeeze(1),
    "squeeze of all": lambda td: td[:, 0:1].squeeze(),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "unsqueeze at the end": lambda td: td.unsqueeze(-1),
    "unbind": lambda td: td.unbind(0)[0],
    "unbind of a later dimension": lambda td: td.unbind(-1)[2],
    "split": lambda td: td.split(3, 1)[0],
    "split of sizes": lambda td: td.split([1, 3], 1)[1],
    "split of the first": lambda td: td.split(1)[0],
    "chunk": lambda td: td.chunk(2, 1)[1],
    "expand": lambda td: td.expand(3, 4),
    "expand with new dimension": lambda td: td.expand(2, 1, 4),
    "expand of nothing": lambda td: td.expand(1, -1),
    "iteration": lambda td: next(iter(td)),
    "view of a view": lambda td: td[0][1:].view(3, 1)[2],
    "torch.unbind": lambda td: torch.unbind(td, 1)[0],
    "torch.transpose": lambda td: torch.transpose(td, 0, 1),
}
KEYS = {
    "clone(recurse=False)": lambda td: td.clone(recurse=False),
    "copy": lambda td: td.copy(),
    "select": lambda td: td.select("x", ("n", "y")),
    "select of a container": lambda td: td.select("x", "n"),
    "exclude": lambda td: td.exclude("nothing"),
    "flatten_keys": lambda td: td.flatten_keys().unflatten_keys(),
    "unflatten_keys": lambda td: td.unflatten_keys(),
}
RESHAPES = {
    "reshape": lambda td: td.reshape(2, 2),
    "reshape of -1": lambda td: td.reshape([-1]),
    "reshape as it is": lambda td: td.reshape(1, 4),
}
COPIES = {
    "list": lambda td: td[[0]],
    "ids": lambda td: td[torch.tensor([0, 0])],
    "negative ids": lambda td: td[torch.tensor([-1])],
    "ids of two dimensions": lambda td: td[torch.tensor([[0], [0]])],
    "array": lambda td: td[np.array([0])],
    "mask": lambda td: td[torch.tensor([True])],
    "mask of two dimensions": lambda td: td[torch.tensor([[True, False, True, True]])],
    "array mask of two dimensions": lambda td: td[np.array([[True, False, True, True]])],
    "ids in a tuple": lambda td: td[0, [1, 3]],
    "True": lambda td: td[True],
    "clone": lambda td: td.clone(),
    "apply": lambda td: td.apply(lambda x: x + 1),
    "stack": lambda td: torch.stack([td, td], 2),
    "cat": lambda td: torch.cat([td, td], 1),
    "torch.clone": torch.clone,
}
KINDS = ("regular", "locked", "shared", "r", "r+", "c")


def make(kind, directory):
    """Return a container of a kind, with nested leaves and a longer nested batch size."""
    td = TensorDict(
        {
            "x": torch.arange(8.0).view(1, 4, 2),
            "n": TensorDict(
                {"y": torch.arange(4).view(1, 4), "m": {"z": torch.zeros(1, 4, 3)}}, [1, 4]
            ),
            "long": TensorDict({"w": torch.ones(1, 4, 5)}, [1, 4, 5]),
            "text": "the same everywhere",
        },
        [1, 4],
    )
    if kind == "locked":
        return td.lock_()
    if kind == "shared":
        return td.share_memory_()
    if kind == "regular":
        return td
    td.memmap(directory)
    return TensorDict.load_memmap(directory, mode=kind)


def facts(td):
    """Return whether a container is locked, shared, memory-mapped."""
    return td.is_locked, td.is_shared(), td.is_memmap()


def containers(td):
    """Return a container and all nested ones."""
    return [td, *(value for _, value in td.items(True) if isinstance(value, TensorDict))]


def tensors(td):
    """Return the tensors of a container by key."""
    return {key: leaf for key, leaf in td.items(True, True) if isinstance(leaf, torch.Tensor)}


def storage(x):
    """Return what tells a storage from others."""
    return x.untyped_storage()._cdata


OWN = {
    "regular": (False, False, False),
    "locked": (True, False, False),
    "shared": (True, True, False),
    "r": (True, False, True),
    "r+": (True, False, True),
    "c": (True, False, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sources(kind, tmp_path):
    """A container that is shared or on files is locked, says so, and its leaves are so."""
    td = make(kind, tmp_path / "td")
    for each in containers(td):
        assert facts(each) == OWN[kind]
    for leaf in tensors(td).values():
        assert (type(leaf) is MemoryMappedTensor) == (kind not in ("regular", "locked"))
    if kind in ("r", "r+", "c"):
        assert {leaf.mode for leaf in tensors(td).values()} == {kind}
    if kind == "shared":
        assert len({storage(leaf) for leaf in tensors(td).values()}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", VIEWS)
def test_views_keep_everything(operation, kind, tmp_path):
    """A view is locked, shared and memory-mapped as its source is, on the same storages."""
    source = make(kind, tmp_path / "td")
    view = VIEWS[operation](source)
    for each in containers(view):
        assert facts(each) == OWN[kind]
    before, after = tensors(source), tensors(view)
    assert list(before) == list(after)
    for key, leaf in after.items():
        assert type(leaf) is type(before[key])
        assert storage(leaf) == storage(before[key])
    assert view["text"] == "the same everywhere"
    assert facts(source) == OWN[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", KEYS)
def test_operations_on_keys_hold_the_same_leaves(operation, kind, tmp_path):
    """An operation on keys is unlocked, without flags, and holds the very same leaves."""
    source = make(kind, tmp_path / "td")
    result = KEYS[operation](source)
    for each in containers(result):
        assert facts(each) == (False, False, False)
    before = tensors(source)
    assert all(leaf is before[key] for key, leaf in tensors(result).items())
    result["n", "new"] = torch.ones(1, 4)
    assert ("n", "new") not in source
    assert facts(source) == OWN[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", RESHAPES)
def test_reshape_keeps_neither_lock_nor_flags(operation, kind, tmp_path):
    """A reshape is unlocked and without flags, also where it does not copy."""
    source = make(kind, tmp_path / "td")
    result = RESHAPES[operation](source)
    for each in containers(result):
        assert facts(each) == (False, False, False)
    for key, leaf in tensors(result).items():
        assert storage(leaf) == storage(tensors(source)[key])
    swapped = source.transpose(0, 1).expand(4, 2).reshape(-1)
    assert facts(swapped) == (False, False, False)
    assert swapped["x"].shape == (8, 2)
    assert {type(leaf) for leaf in tensors(swapped).values()} == {torch.Tensor}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", COPIES)
def test_copies_are_regular(operation, kind, tmp_path):
    """What copies gives an unlocked container in regular memory."""
    source = make(kind, tmp_path / "td")
    result = COPIES[operation](source)
    for each in containers(result):
        assert facts(each) == (False, False, False)
    for key, leaf in tensors(result).items():
        assert type(leaf) is torch.Tensor
        assert storage(leaf) != storage(tensors(source)[key])
    assert facts(source) == OWN[kind]


@pytest.mark.parametrize("operation", {**VIEWS, **RESHAPES, **COPIES})
def test_values_and_batch_sizes(operation, tmp_path):
    """Each leaf is what the operation makes of it alone, and has the batch size that is said."""
    done = {**VIEWS, **RESHAPES, **COPIES}[operation]
    results = [done(make(kind, tmp_path / kind)) for kind in KINDS]
    reference = done(TensorDict({"batch": torch.arange(4).view(1, 4)}, [1, 4]))
    for result in results:
        size = result.batch_size
        assert size == reference.batch_size
        for key, leaf in tensors(result).items():
            assert leaf.shape[: len(size)] == size
            assert torch.equal(leaf, tensors(results[0])[key])
        for nested in containers(result):
            assert nested.batch_size[: len(size)] == size
        assert result["long"].batch_size == (*size, 5)
        if operation != "apply":
            assert torch.equal(result["n", "y"], reference["batch"])


@pytest.mark.parametrize("kind", ["shared", "r", "r+", "c"])
def test_unlocking_ends_the_flags(kind, tmp_path):
    """Unlocked, a container is neither shared nor memory-mapped; leaves can be replaced then."""
    td = make(kind, tmp_path / "td")
    leaf = td["x"]
    td.unlock_()
    for each in containers(td):
        assert facts(each) == (False, False, False)
    assert td["x"] is leaf
    td["x"] = torch.ones(1, 4)
    td.lock_()
    assert facts(td) == (True, False, False)


# --- one batch dimension, leaves of every kind -------------------------------------------


@pytest.fixture(params=KINDS)
def rows(request, tmp_path):
    """Return a container with one batch dimension and leaves of every kind."""
    td = TensorDict(
        {
            "x": torch.arange(5.0),
            "j": JaggedTensor(torch.arange(15), [[n] for n in range(1, 6)]),
            "s": ["a", "b", "c", "d", "e"],
            "t": "text",
            "n": {"k": ["v", "w", "x", "y", "z"]},
        },
        [5],
    )
    kind = request.param
    if kind in ("r", "r+", "c"):
        td.memmap(tmp_path / "rows")
        return TensorDict.load_memmap(tmp_path / "rows", mode=kind)
    return {"locked": td.lock_, "shared": td.share_memory_, "regular": lambda: td}[kind]()


def plain(td):
    """Return the values of the leaves of `rows`."""
    j = td["j"]
    lists = j.tolist() if isinstance(j, torch.Tensor) else [e.tolist() for e in j]
    return td["x"].tolist(), lists, td["s"], td["t"], td["n", "k"]


SINGLE = {"x": [*range(5)], "s": [*"abcde"], "k": [*"vwxyz"]}
JAGGED = [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14]]


@pytest.mark.parametrize(
    "index",
    [0, -1, slice(1, 3), slice(None), slice(0, 0), slice(None, None, 2), slice(-2, None)],
    ids=str,
)
def test_rows_as_views(rows, index):
    """Integers and slices index every kind of leaf, and keep lock and flags."""
    view = rows[index]
    expected = (
        SINGLE["x"][index],
        JAGGED[index],
        SINGLE["s"][index],
        "text",
        SINGLE["k"][index],
    )
    assert plain(view) == expected
    assert facts(view) == facts(rows)
    assert plain(rows[index,]) == expected
    if isinstance(index, slice):
        assert type(view["j"]) is JaggedTensor
        assert plain(rows[..., index]) == expected


@pytest.mark.parametrize(
    ("index", "numbers"),
    [
        ([3, 0], [3, 0]),
        ([], []),
        (torch.tensor([1, -1, 1]), [1, 4, 1]),
        (torch.tensor([2], dtype=torch.int32), [2]),
        (np.array([4, 2]), [4, 2]),
        (torch.tensor([True, False, True, False, False]), [0, 2]),
        ([False] * 5, []),
        (np.array([False, True, False, False, True]), [1, 4]),
    ],
    ids=str,
)
def test_rows_as_copies(rows, index, numbers):
    """Lists, ids and masks gather from every kind of leaf, into regular memory."""
    result = rows[index]
    assert plain(result) == (
        [SINGLE["x"][n] for n in numbers],
        [JAGGED[n] for n in numbers],
        [SINGLE["s"][n] for n in numbers],
        "text",
        [SINGLE["k"][n] for n in numbers],
    )
    assert facts(result) == (False, False, False)
    assert result.batch_size == (len(numbers),)
    assert result["j"].mode is None


def test_parts_of_rows(rows):
    """Unbinding, splitting, chunking and iterating go over every kind of leaf."""
    expected = [plain(rows[n]) for n in range(5)]
    assert [plain(row) for row in rows.unbind()] == expected
    assert [plain(row) for row in rows] == expected
    assert [len(part) for part in rows.split(2)] == [2, 2, 1]
    assert [part["s"] for part in rows.chunk(2)] == [["a", "b", "c"], ["d", "e"]]
    assert plain(rows.split([1, 4])[1]) == plain(rows[1:])
    assert plain(rows.view(5)) == plain(rows.expand(5)) == plain(rows.reshape(-1)) == plain(rows)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("unsqueeze", lambda td: td.unsqueeze(0)),
        ("this index", lambda td: td[None]),
        ("view", lambda td: td.view(5, 1)),
        ("reshape", lambda td: td.reshape(1, 5)),
        ("expand", lambda td: td.expand(2, 5)),
    ],
)
def test_rows_have_one_dimension(rows, name, operation):
    """What gives elements more dimensions is refused, at once, with the leaf that cannot."""
    with pytest.raises(RuntimeError, match=f"{name} does not go with jagged .* leaf 'j' is one"):
        operation(rows)
    with pytest.raises(RuntimeError, match=f"{name} does not go with .* leaf 's' is one"):
        operation(rows.exclude("j"))


@pytest.mark.parametrize("index", [5, -6])
def test_out_of_range(rows, index):
    """An index out of range is an IndexError, whatever its form."""
    with pytest.raises(IndexError, match="out of range for a batch of 5"):
        rows[index]
    with pytest.raises(IndexError, match="out of (range|bounds)"):
        rows[[index]]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ((0, 0), IndexError, "too many indices for a TensorDict of 1 batch dimensions: 2"),
        ((..., ...), IndexError, "one ellipsis"),
        (slice(None, None, -1), ValueError, "must have a positive step, got -1"),
        (torch.tensor([True]), IndexError, "mask|index"),
        (1.5, IndexError, "indices|index"),
        (object(), IndexError, "indices|index"),
    ],
    ids=["tuple", "ellipses", "step", "mask", "float", "object"],
)
def test_index_that_is_none(rows, index, error, message):
    """What can be no index is an error."""
    with pytest.raises((error, TypeError), match=message):
        rows[index]


def test_without_batch_dimensions():
    """A container without batch dimensions takes None, ``...`` and () only."""
    td = TensorDict({"x": torch.arange(3)})
    assert td[None]["x"].shape == (1, 3)
    assert td[...]["x"].shape == td[()]["x"].shape == (3,)
    for index in (0, slice(None), [0], (0,), torch.tensor([0])):
        with pytest.raises(IndexError, match="without batch dimensions|too many indices"):
            td[index]


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda td: td.view(3), "shape '\\[3\\]' is invalid"),
        (lambda td: td.view(-1, -1), "only one dimension can be inferred"),
        (lambda td: td.transpose(0, 2), "dimension 2 is out of range for 2 batch dimensions"),
        (lambda td: td.permute(0, 0), "permute needs each of 2 batch dimensions once"),
        (lambda td: td.permute(0), "permute needs each of 2 batch dimensions once"),
        (lambda td: td.squeeze(2), "dimension 2 is out of range"),
        (lambda td: td.unsqueeze(3), "dimension 3 is out of range"),
        (lambda td: td.expand(1, 5), "expand"),
        (lambda td: td.unbind(2), "dimension 2 is out of range"),
        (lambda td: td.split([1, 1], 1), "split_with_sizes"),
        (lambda td: td.chunk(0), "chunk"),
    ],
)
@pytest.mark.parametrize("kind", ["regular", "r"])
def test_shapes_that_do_not_fit(operation, message, kind, tmp_path):
    """Operations see the batch dimensions only, and refuse what does not fit them."""
    with pytest.raises((RuntimeError, IndexError, ValueError), match=message):
        operation(make(kind, tmp_path / "td"))


def test_a_view_that_needs_a_copy(tmp_path):
    """A view that torch cannot make is refused at once, not when a leaf is asked for."""
    td = make("r", tmp_path / "td").expand(3, 4)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        td.transpose(0, 1).view(12)


# --- assignment --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["regular", "locked", "shared", "r+", "c"])
def test_assignment(kind, tmp_path):
    """Assigning writes into the memory of the leaves, which every view sees."""
    td = make(kind, tmp_path / "td").squeeze(0)
    view = td[1]
    x = td["x"]
    td[1] = td[3].clone()
    assert view["x"].tolist() == [6, 7]
    td[0:2] = {"x": torch.zeros(2, 2), "n": {"y": torch.tensor([8, 9])}}
    assert view["n", "y"] == 9
    td[[3, 0]] = td[[0, 3]]
    assert x[:, 0].tolist() == [6, 0, 4, 0]
    td[torch.tensor([True, False, False, False])] = 1
    assert td[0]["n", "m", "z"].tolist() == [1, 1, 1]
    td[...] = 2
    assert set(td["x"].flatten().tolist()) == {2}
    assert td["x"].data_ptr() == x.data_ptr()
    if kind == "r+":
        assert TensorDict.load(tmp_path / "td")["x"].unique().tolist() == [2]
    if kind == "c":
        assert TensorDict.load(tmp_path / "td")["x"].sum() == 28


def test_assignment_of_rows(rows):
    """Rows of jagged leaves and lists of strings are assigned where they fit."""
    if rows.is_memmap() and rows["x"].mode == "r":
        with pytest.raises(RuntimeError, match="leaf 'x' would write to a read-only tensor"):
            rows[1] = {"x": 5}
        with pytest.raises(RuntimeError, match="leaf 'j' would write to a read-only tensor"):
            rows[1] = {"j": torch.zeros(2, dtype=torch.int64)}
        return
    rows[1] = {"x": 5, "j": torch.tensor([7, 7])}
    assert plain(rows[1])[:2] == (5, [7, 7])
    rows[2:4] = rows[2:4].clone()
    assert plain(rows)[1] == [[0], [7, 7], *JAGGED[2:]]
    if rows.is_memmap() or rows.is_shared():
        with pytest.raises(RuntimeError, match="leaf 's' is text, which cannot be written"):
            rows[0] = {"s": "q"}
        with pytest.raises(RuntimeError, match="leaf 's' is text, which cannot be written"):
            rows.set_("s", [*"qrstu"])
        rows.set_("s", [*"abcde"])  # what is there already
        return
    rows[0] = {"s": "q"}
    rows[[4, 2]] = {"s": ["r", "t"]}
    assert rows["s"] == ["q", "b", "t", "d", "r"]


def test_assignment_that_does_not_fit():
    """An unknown key is an error, before anything is written."""
    td = TensorDict({"x": torch.zeros(2), "n": {"y": torch.zeros(2)}}, [2])
    for value in ({"x": 1.0, "q": 1.0}, {"x": 1.0, "n": {"q": 1.0}}, {"x": 1.0, "n": 1.0}):
        with pytest.raises(KeyError, match="no key of|nested on one side only"):
            td[0] = value
    with pytest.raises(IndexError, match="out of|index"):
        td[2] = 1
    with pytest.raises(RuntimeError, match="must start with the batch size|expand|shape"):
        td[0:2] = {"x": torch.ones(3)}
    with pytest.raises(RuntimeError, match=r"leaf \('n', 'y'\) takes shape \[\] .* got \[2\]"):
        td[0] = TensorDict({"x": 1.0, "n": TensorDict({"y": torch.ones(2)})})
    with pytest.raises(RuntimeError, match="leaf 's' takes text like"):
        TensorDict({"s": ["a", "b"]}, [2])[0:1] = {"s": "c"}
    assert td["x"].tolist() == [0, 0]


def test_assignment_of_numbers(rows):
    """A number is written to every tensor; text stays as it is."""
    if rows.is_memmap() and rows["x"].mode == "r":
        with pytest.raises(RuntimeError, match="would write to a read-only tensor"):
            rows[1:] = 3
        return
    rows[1:3] = 3
    assert plain(rows)[:3] == (
        [0, 3, 3, 3, 4],
        [[0], [3, 3], [3, 3, 3], *JAGGED[3:]],
        [*"abcde"],
    )


INDICES = st.one_of(
    st.integers(-3, 2),
    st.slices(3).filter(lambda s: s.step is None or s.step > 0),
    st.none(),
    st.just(...),
    st.lists(st.integers(-3, 2), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=3, max_size=3).map(torch.tensor),
)


@given(
    st.one_of(INDICES, st.lists(INDICES, max_size=3).map(tuple)),
    st.booleans(),
)
def test_indices_are_those_of_torch(index, locked):
    """An index does to the batch dimensions what torch does to a tensor of that shape."""
    batch = torch.arange(9).view(3, 3)
    td = TensorDict({"x": batch, "y": torch.stack([batch] * 2, -1)}, [3, 3])
    if locked:
        td.lock_()
    try:
        expected = batch[index]
    except (IndexError, TypeError):
        with pytest.raises((IndexError, TypeError), match=""):
            td[index]
        return
    result = td[index]
    assert result.batch_size == expected.shape
    assert torch.equal(result["x"], expected)
    assert torch.equal(result["y"], torch.stack([expected] * 2, -1))
    other = td.clone()
    batch = batch.clone()
    other[index] = other[index].apply(torch.neg)
    batch[index] = -batch[index]
    assert torch.equal(other["x"], batch)
