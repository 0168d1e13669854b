"""The container: keys, leaves, batch size, lock, copies."""

import copy
import gc
import io
import os
import pickle
import re
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import mmtensor
from mmtensor import (
    DeviceError,
    DtypeError,
    JaggedTensor,
    LockedError,
    MemoryMappedTensor,
    ShapeError,
    TensorDict,
)


@pytest.fixture
def td():
    """Return a container with leaves of every kind, regular and unlocked."""
    return TensorDict(
        {
            "x": torch.arange(6.0).view(3, 2),
            "n": {"y": torch.arange(3), "m": {"z": torch.zeros(3, 1, dtype=torch.bool)}},
            "j": JaggedTensor(torch.arange(6), [[2, 1], [0, 3], [1, 4]]),
            "title": "a title",
            "names": ["a", "b", "c"],
        },
        batch_size=[3],
    )


def tree(td):
    """Return the values of a container as nested lists."""
    result = {}
    for path, leaf in td.items(True, True):
        result[path] = leaf if isinstance(leaf, str | list) else leaf.tolist()
    return result


# --- construction and setting ------------------------------------------------------------


def test_empty():
    """A container of nothing has no keys, no batch dimensions, and no length."""
    td = TensorDict()
    assert list(td.keys()) == []
    assert td.batch_size == torch.Size([])
    assert td.is_empty()
    with pytest.raises(TypeError, match="without batch dimensions has no length"):
        len(td)


@pytest.mark.parametrize("size", [3, [3], (3,), torch.Size([3]), torch.tensor([3])])
def test_batch_size_as_a_shape(size):
    """The batch size is an integer or a sequence of integers."""
    td = TensorDict({"x": torch.ones(3, 2)}, size)
    assert td.batch_size == torch.Size([3])
    assert td.shape == td.batch_size == td.size()
    assert (len(td), td.ndim, td.dim(), td.numel(), td.size(0)) == (3, 1, 1, 3, 3)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (np.arange(2), torch.int64, [0, 1]),
        (np.float32(1.5), torch.float32, 1.5),
        (3, torch.int64, 3),
        (True, torch.bool, True),
        (2.5, torch.float32, 2.5),
        ([1, 2], torch.int64, [1, 2]),
        ([[1.0], [2.0]], torch.float32, [[1], [2]]),
    ],
    ids=str,
)
def test_values_become_tensors(value, dtype, expected):
    """Arrays, numbers and lists of numbers are set as tensors."""
    leaf = TensorDict({"x": value})["x"]
    assert leaf.dtype == dtype
    assert leaf.tolist() == expected


def test_an_array_shares_its_memory():
    """An array that is set is not copied."""
    array = np.zeros(3)
    td = TensorDict({"x": array}, [3])
    td["x"][1] = 5
    assert array.tolist() == [0, 5, 0]


@pytest.mark.parametrize("value", [object(), {1, 2}, None, b"bytes", [object()], np.array(["a"])])
def test_values_that_are_no_leaves(value):
    """What can be no leaf is a TypeError."""
    with pytest.raises(TypeError, match="must be a tensor|be made a tensor|must be of a dtype"):
        TensorDict({"x": value})


@pytest.mark.parametrize("key", [1, None, b"x", (), ("a", 1), 2.5])
def test_keys_that_are_none(key):
    """A key is a string or a tuple of strings."""
    td = TensorDict()
    with pytest.raises(TypeError, match="a key must be a string or a tuple of strings, got"):
        td.set(key, torch.ones(1))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        torch.ones(()),
        torch.ones(2, 3),
        1.0,
        np.ones(4),
        MemoryMappedTensor.zeros(5),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=str,
)
def test_batch_size_is_checked(value):
    """A leaf without the batch size is an error that names the key and both shapes."""
    shape = list(getattr(value, "shape", ()))
    message = re.escape(f"leaf 'x' must start with the batch size [3], got {shape}")
    with pytest.raises(RuntimeError, match=message):
        TensorDict({"x": value}, [3])
    td = TensorDict(batch_size=[3])
    with pytest.raises(RuntimeError, match=message):
        td["x"] = value
    assert td.is_empty()


def test_batch_size_of_nested_leaves_is_checked(td):
    """The message names a nested key as a tuple."""
    with pytest.raises(
        RuntimeError, match=r"leaf \('n', 'q'\) must start with .*\[3\], got \[4\]"
    ):
        td["n", "q"] = torch.ones(4)
    with pytest.raises(
        RuntimeError, match=r"leaf \('n', 'q'\) must start with .*\[3\], got \[4\]"
    ):
        TensorDict({"n": TensorDict({"q": torch.ones(4)})}, [3])


def test_nested_containers_take_the_batch_size():
    """A nested container with a shorter batch size is copied with that of its parent."""
    inner = TensorDict({"y": torch.ones(3, 2)})
    td = TensorDict({"n": inner}, [3])
    assert td["n"].batch_size == torch.Size([3])
    assert inner.batch_size == torch.Size([])
    longer = TensorDict({"y": torch.ones(3, 2)}, [3, 2])
    td["m"] = longer
    assert td["m"] is longer


def test_a_container_does_not_contain_itself(td):
    """Setting a container into itself, at any depth, is refused."""
    with pytest.raises(ValueError, match="cannot contain itself"):
        td["self"] = td
    with pytest.raises(ValueError, match="cannot contain itself"):
        td["n"]["self"] = TensorDict({"q": td["n"]}, [3])


@pytest.mark.parametrize("value", [["a", "b"], ("a", "b", "c", "d")])
def test_a_list_of_strings_has_the_batch_size(value):
    """A list of strings has as many as the batch has elements."""
    with pytest.raises(RuntimeError, match=f"batch size \\[3\\], got a list of .* {len(value)}"):
        TensorDict({"s": value}, [3])


@pytest.mark.parametrize("size", [[], [2, 1]])
@pytest.mark.parametrize(
    ("value", "what"),
    [
        (["a", "b"], "a list of strings"),
        (JaggedTensor(torch.ones(3), [[1], [2]]), "a JaggedTensor"),
    ],
    ids=["strings", "jagged"],
)
def test_rows_need_one_batch_dimension(value, what, size):
    """A list of strings and a jagged leaf go with one batch dimension; the error names them."""
    with pytest.raises(RuntimeError, match=f"leaf 'k' is {what}, which has one dimension"):
        TensorDict({"k": value}, size)


def test_a_jagged_leaf_has_the_batch_size():
    """A jagged leaf has as many elements as the batch."""
    j = JaggedTensor(torch.ones(3), [[1], [2]])
    with pytest.raises(RuntimeError, match="batch size \\[3\\], got a JaggedTensor of 2"):
        TensorDict({"j": j}, [3])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_become_jagged_leaves(layout):
    """A nested tensor of torch, of either layout, is set as a JaggedTensor."""
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=layout)
    td = TensorDict({"j": nested}, [2])
    assert type(td["j"]) is JaggedTensor
    assert [e.tolist() for e in td["j"]] == [[[1] * 3] * 2, [[0] * 3] * 4]
    td["again"] = nested
    assert td["again"].shapes.tolist() == [[2, 3], [4, 3]]


def test_set_makes_nested_containers():
    """Setting a nested key makes the containers on the way, with the batch size."""
    td = TensorDict(batch_size=[2])
    assert td.set(("a", "b", "c"), torch.ones(2)) is td
    assert td["a", "b"].batch_size == torch.Size([2])
    td["d", "e"] = torch.ones(2, 1)
    assert list(td.keys(True, True)) == [("a", "b", "c"), ("d", "e")]
    with pytest.raises(KeyError, match="is a leaf, not nested"):
        td["d", "e", "f"] = torch.ones(2)


def test_nothing_is_copied_on_setting():
    """A tensor that is set is the one that is got, whatever its class."""
    parameter = torch.nn.Parameter(torch.ones(3))
    mapped = MemoryMappedTensor.zeros(3)
    td = TensorDict({"p": parameter, "m": mapped}, [3])
    assert td["p"] is parameter
    assert td["m"] is mapped
    nested = td.set("n", TensorDict({"q": mapped}, [3]))["n"]
    assert td["n"] is nested


# --- keys --------------------------------------------------------------------------------


def test_get(td):
    """Keys are found as strings and as tuples, however they are nested."""
    assert td["x"] is td.get("x") is td["x",] is td.get(("x",))
    assert td["n", "m", "z"] is td["n"]["m"]["z"] is td.get(("n", ("m", "z")))
    assert td.get("nothing") is None
    assert td.get(("n", "nothing"), 5) == 5
    assert td.get(("x", "y"), 5) == 5
    for key in ("nothing", ("n", "nothing"), ("x", "y"), ("nothing", "x")):
        with pytest.raises(KeyError, match="nothing|x"):
            td[key]


def test_contains(td):
    """``in`` looks for keys, nested ones too."""
    assert "x" in td
    assert ("n", "y") in td
    assert "q" not in td
    assert ("x", "y") not in td


def test_keys_values_items(td):
    """Keys come in the order in which they were set; nested ones follow their container."""
    assert list(td.keys()) == ["x", "n", "j", "title", "names"]
    leaves = ["x", ("n", "y"), ("n", "m", "z"), "j", "title", "names"]
    assert list(td.keys(True, True)) == leaves
    assert list(td.keys(include_nested=True)) == [
        *("x", "n", ("n", "y"), ("n", "m"), ("n", "m", "z"), "j", "title", "names")
    ]
    assert list(td.keys(leaves_only=True)) == ["x", "j", "title", "names"]
    assert [key for key, _ in td.items(True, True)] == leaves
    assert all(value is td[key] for key, value in td.items(True))
    assert len(list(td.values())) == 5
    assert len(td.values(True, True)) == 6


def test_update(td):
    """Updating replaces leaves, adds new ones, and merges nested mappings."""
    y = td["n", "y"]
    td.update({"x": torch.ones(3), "n": {"new": torch.zeros(3)}, "q": {"r": torch.ones(3)}})
    assert td["x"].tolist() == [1, 1, 1]
    assert td["n", "y"] is y
    assert td["n", "new"].tolist() == [0, 0, 0]
    assert td["q", "r"].tolist() == [1, 1, 1]
    td.update(TensorDict({"x": torch.zeros(3)}, [3]))
    assert td["x"].tolist() == [0, 0, 0]


def test_delete_and_pop(td):
    """Keys are removed by del_, del and pop, nested ones too."""
    x = td["x"]
    assert td.pop("x") is x
    assert td.pop("x", None) is None
    with pytest.raises(KeyError, match="x"):
        td.pop("x")
    del td["n", "y"]
    assert td.del_("title") is td
    assert list(td.keys(True, True)) == [("n", "m", "z"), "j", "names"]
    with pytest.raises(KeyError, match="nothing"):
        td.del_("nothing")


def test_rename(td):
    """A key is renamed, into a nested container and out of it; never over another."""
    x = td["x"]
    td.rename_key_("x", ("n", "x"))
    assert td["n", "x"] is x
    td.rename_key_(("n", "x"), "z")
    assert list(td.keys())[-1] == "z"
    assert td.rename_key_("z", "z") is td
    with pytest.raises(KeyError, match="'j' is taken"):
        td.rename_key_("z", "j")


def test_select_and_exclude(td):
    """Selecting and excluding keys leaves the container as it is and shares the leaves."""
    chosen = td.select("names", ("n", "m", "z"), "x")
    assert list(chosen.keys(True, True)) == ["names", ("n", "m", "z"), "x"]
    assert chosen["x"] is td["x"]
    chosen["n", "new"] = torch.ones(3)
    assert ("n", "new") not in td
    with pytest.raises(KeyError, match="nothing"):
        td.select("nothing")
    rest = td.exclude("x", ("n", "m"), "nothing", ("n", "nothing", "q"))
    assert list(rest.keys(True, True)) == [("n", "y"), "j", "title", "names"]
    rest["n", "new"] = torch.ones(3)
    assert ("n", "new") not in td


def test_flatten_and_unflatten_keys(td):
    """Nested keys are joined and taken apart again."""
    flat = td.flatten_keys("/")
    assert list(flat.keys()) == ["x", "n/y", "n/m/z", "j", "title", "names"]
    assert flat["n/y"] is td["n", "y"]
    assert list(flat.unflatten_keys("/").keys(True, True)) == list(td.keys(True, True))
    clash = TensorDict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
    with pytest.raises(KeyError, match="two leaves would have the key 'a.b'"):
        clash.flatten_keys()
    with pytest.raises(KeyError, match="two leaves would have the key"):
        clash.unflatten_keys()


# --- writing in place --------------------------------------------------------------------


def test_set_in_place(td):
    """Setting in place writes into the memory of the leaf and converts to its dtype."""
    x = td["x"]
    assert td.set_("x", torch.ones(3, 2, dtype=torch.int32)) is td
    assert td["x"] is x
    assert x.tolist() == [[1, 1]] * 3
    td.set_(("n", "y"), np.array([5, 6, 7]))
    assert td["n", "y"].tolist() == [5, 6, 7]
    td.set_("j", JaggedTensor(torch.ones(6, dtype=torch.int64), td["j"].shapes))
    assert td["j"].to_list()[2].tolist() == [[1] * 4]
    td.set_("names", ["d", "e", "f"])
    assert td["names"] == ["d", "e", "f"]
    td.set_("title", "a title")
    td.set_("n", {"y": torch.zeros(3)})
    assert td["n", "y"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("x", torch.ones(3), RuntimeError, r"leaf 'x' is \[3, 2\] and cannot change .* got \[3\]"),
        ("x", "text", TypeError, "leaf 'x' must be a tensor"),
        ("q", torch.ones(3), KeyError, "q"),
        (("n", "q"), torch.ones(3), KeyError, "q"),
        ("j", JaggedTensor(torch.ones(3), [[1, 1], [2, 1], [0, 0]]), RuntimeError, "leaf 'j'"),
        ("names", ["a"], RuntimeError, "leaf 'names' is text"),
        ("title", "another", RuntimeError, "leaf 'title' is text"),
    ],
    ids=["shape", "text", "key", "nested key", "jagged shapes", "length", "string"],
)
def test_set_in_place_what_does_not_fit(td, key, value, error, message):
    """Setting in place refuses what the leaf cannot hold, and changes nothing."""
    before = tree(td)
    with pytest.raises(error, match=message):
        td.set_(key, value)
    assert tree(td) == before


def test_update_in_place(td):
    """Updating in place writes into the leaves that are there, and adds none."""
    x = td["x"]
    td.update_({"x": torch.zeros(3, 2), "n": {"y": torch.ones(3)}})
    assert td["x"] is x
    assert x.sum() == 0
    assert td["n", "y"].tolist() == [1, 1, 1]
    with pytest.raises(KeyError, match="new"):
        td.update_({"new": torch.ones(3)})


# --- the lock ----------------------------------------------------------------------------

CHANGES = {
    "set": lambda td: td.set("x", torch.ones(3, 2)),
    "new key": lambda td: td.set("new", torch.ones(3)),
    "setitem": lambda td: td.__setitem__("x", torch.ones(3, 2)),
    "nested": lambda td: td.__setitem__(("n", "y"), torch.ones(3)),
    "nested new": lambda td: td.__setitem__(("n", "q", "r"), torch.ones(3)),
    "nested container": lambda td: td["n"].set("y", torch.ones(3)),
    "slow road": lambda td: td.set("names", ["d", "e", "f"]),
    "update": lambda td: td.update({"x": torch.ones(3, 2)}),
    "del": lambda td: td.del_("x"),
    "nested del": lambda td: td.del_(("n", "y")),
    "pop": lambda td: td.pop("x"),
    "pop nothing": lambda td: td.pop("nothing", None),
    "rename": lambda td: td.rename_key_("x", "y"),
    "batch size": lambda td: setattr(td, "batch_size", [3]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_locked_container_keeps_its_keys(td, change):
    """A change of keys is refused with what to do instead, and leaves nothing behind."""
    keys, before = list(td.keys(True)), tree(td)
    td.lock_()
    with pytest.raises(
        LockedError, match=r"cannot .*: this TensorDict is locked. Write .*set_"
    ) as e:
        CHANGES[change](td)
    assert isinstance(e.value, RuntimeError)
    assert list(td.keys(True)) == keys
    assert tree(td) == before
    td.unlock_()
    CHANGES[change](td)


def test_values_of_a_locked_container_can_be_written(td):
    """A locked container takes values in place."""
    td.lock_()
    td.set_("x", torch.ones(3, 2))
    td[0] = td.select("n")[1]
    assert td["n", "y"].tolist() == [1, 1, 2]


def test_lock_and_unlock(td):
    """A lock holds for nested containers and ends for them; both calls can be repeated."""
    assert not td.is_locked
    assert td.lock_() is td.lock_() is td
    assert td.is_locked
    assert td["n", "m"].is_locked
    assert td.unlock_() is td.unlock_() is td
    assert not td["n", "m"].is_locked


def test_a_part_of_a_locked_container_stays_locked(td):
    """A nested container cannot be unlocked while the one that it is part of is locked."""
    td.lock_()
    with pytest.raises(LockedError, match="part of a locked one.*Unlock the outermost"):
        td["n"].unlock_()
    assert td["n"].is_locked
    view = td[1:]
    with pytest.raises(LockedError, match="part of a locked one"):
        view["n"].unlock_()
    inner = td["n"]
    kept = weakref.ref(td)
    del td, view
    gc.collect()
    assert kept() is not None  # the fixture has it
    assert inner.is_locked


def test_what_is_left_of_a_locked_container_can_be_unlocked():
    """A nested container outlives its parent's lock."""
    inner = TensorDict({"n": {"x": torch.ones(1)}}).lock_()["n"]
    gc.collect()
    assert inner.is_locked
    assert not inner.unlock_().is_locked


def test_two_locks():
    """A container that is part of two locked ones is locked until both are unlocked."""
    inner = TensorDict({"x": torch.ones(1)})
    first, second = TensorDict({"n": inner}), TensorDict({"n": inner})
    first.lock_()
    second.lock_()
    first.unlock_()
    assert inner.is_locked
    second.unlock_()
    assert not inner.is_locked


def test_views_of_a_locked_container_keep_what_they_saw(td):
    """Unlocking a container and replacing a leaf does not change views that were made before."""
    td.lock_()
    row, rows = td[1], td[0:2]
    td.unlock_()
    td["x"] = torch.zeros(3, 2)
    td["n"]["y"] = torch.zeros(3)
    assert row["x"].tolist() == [2, 3]
    assert rows["n", "y"].tolist() == [0, 1]
    assert row.is_locked
    assert list(row.keys()) == list(rows.keys()) == ["x", "n", "j", "title", "names"]


def test_views_of_a_locked_container_have_its_order(td):
    """The keys of a view come in the order of the container, whatever was asked for first."""
    row = td.lock_()[1]
    assert row["names"] == "b"
    assert row["n", "m", "z"].tolist() == [False]
    assert list(row.keys(True, True)) == list(td.keys(True, True))
    assert [key for key, _ in row.items()] == list(td.keys())
    assert row["x"] is row["x"]
    again = row.unlock_()
    again["new"] = torch.ones(())
    assert list(again.keys())[-1] == "new"


def test_batch_size_can_change(td):
    """The batch size of an unlocked container can be set where all leaves have it."""
    del td["j"], td["names"]
    td.batch_size = []
    assert td[()].batch_size == torch.Size([])
    td.batch_size = [3]
    with pytest.raises(RuntimeError, match=r"leaf 'x' must start with the batch size \[3, 3\]"):
        td.batch_size = [3, 3]
    assert td.batch_size == torch.Size([3])


# --- copies ------------------------------------------------------------------------------


def test_clone(td):
    """A clone has values of its own; a shallow one has the same leaves."""
    deep, shallow = td.clone(), td.clone(recurse=False)
    td["x"].zero_()
    td["names"][0] = "z"
    assert deep["x"].sum() == 15
    assert deep["names"] == ["a", "b", "c"]
    assert shallow["x"] is td["x"]
    shallow["n", "new"] = torch.ones(3)
    assert ("n", "new") not in td
    assert td.copy()["x"] is copy.copy(td)["x"] is td["x"]


def test_deepcopy(td):
    """A deep copy is an independent container in regular memory, once per copy."""
    td.lock_()
    first, second = copy.deepcopy([td, td])
    assert first is second
    td["x"].zero_()
    assert first["x"].sum() == 15
    assert not first.is_locked


def test_apply(td):
    """A function is applied to every tensor, with those of others; text stays as it is."""
    result = td.exclude("j").lock_().apply(lambda x: x + 1)
    assert result["x"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert result["title"] == "a title"
    assert not result.is_locked
    both = TensorDict({"x": torch.ones(3)}, [3]).apply(
        torch.add, TensorDict({"x": torch.ones(3)}, [3])
    )
    assert both["x"].tolist() == [2, 2, 2]


def test_apply_to_other_shapes(td):
    """What a function returns must have the batch size, or the one that is given."""
    part = td.select("x", "n")
    with pytest.raises(RuntimeError, match=r"leaf 'x' must start with the batch size \[3\]"):
        part.apply(torch.sum)
    assert part.apply(torch.sum, batch_size=[])["x"] == 15
    assert list(part.apply(lambda x: None if x.dim() == 1 else x).keys(True, True)) == [
        *("x", ("n", "m", "z"))
    ]


def test_to(td):
    """`to` converts every tensor and leaves text and jagged leaves."""
    result = td.to(torch.float64)
    assert result["x"].dtype == result["n", "y"].dtype == torch.float64
    assert result["names"] == ["a", "b", "c"]


def test_as_tensor(tmp_path, td):
    """Asking for tensors gives regular tensors on the same storages, unlocked."""
    mapped = td.memmap(tmp_path / "td")
    plain = mapped.as_tensor()
    assert type(plain["x"]) is torch.Tensor
    plain["x"][0] = 9
    assert mapped["x"][0].tolist() == [9, 9]
    assert not plain.is_locked
    assert not plain.is_memmap()
    assert type(mapped[1].as_tensor()["n", "y"]) is torch.Tensor


def test_to_dict(td):
    """Asking for a dict gives nested dicts of the leaves."""
    assert td.to_dict()["n"]["y"] is td["n", "y"]
    assert list(td.to_dict()) == list(td.keys())


def test_stack_and_cat(td):
    """torch.stack and torch.cat join containers leaf by leaf, in regular memory."""
    part = td.select("x", "n", "title")
    stacked = torch.stack([part, part], 1)
    assert stacked.batch_size == torch.Size([3, 2])
    assert stacked["n", "m", "z"].shape == (3, 2, 1)
    assert stacked["title"] == "a title"
    joined = torch.cat([td.lock_(), td[0:2]])
    assert joined.batch_size == torch.Size([5])
    assert joined["names"] == ["a", "b", "c", "a", "b"]
    assert joined["j"].shapes.tolist() == [[2, 1], [0, 3], [1, 4], [2, 1], [0, 3]]
    assert joined["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert not joined.is_locked
    rows = torch.stack([row.exclude("j") for row in td])
    assert tree(rows) == tree(td.exclude("j").set("title", ["a title"] * 3))


def test_stack_and_cat_what_does_not_fit(td):
    """Containers that cannot be joined are an error that says why."""
    with pytest.raises(KeyError, match=r"same keys everywhere, but \['x'\]"):
        torch.stack([td.exclude("x"), td])
    with pytest.raises(RuntimeError, match="needs one batch size"):
        torch.stack([td.select("x"), td.select("x")[0:1]])
    with pytest.raises(RuntimeError, match="differ in one dimension only"):
        torch.cat([td.select("x"), td.select("x").unsqueeze(0)])
    with pytest.raises(RuntimeError, match="leaf 'x'"):
        torch.cat([td.select("x"), TensorDict({"x": torch.ones(3, 5)}, [3])])
    with pytest.raises(RuntimeError, match="leaf 'j' cannot be joined"):
        torch.stack([td.select("j"), td.select("j")])
    with pytest.raises(IndexError, match="dimension 2 is out of range"):
        torch.cat([td.select("x")], 2)
    with pytest.raises(TypeError, match="TensorDict"):
        torch.sum(td)


# --- what others see ---------------------------------------------------------------------


def test_pytree(td):
    """The pytrees of torch see through a container: tensors are leaves, text is structure."""
    result = pytree.tree_map(lambda x: x * 2, td.exclude("j"))
    assert tree(result) == tree(td.exclude("j").apply(lambda x: x * 2))
    values, spec = pytree.tree_flatten(td)
    assert len(values) == 4
    assert tree(pytree.tree_unflatten(values, spec)) == tree(td)
    assert spec == pytree.tree_structure(td.clone())
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(td)[0]]
    assert paths == ["['x']", "['n']['y']", "['n']['m']['z']", "['j']"]


def test_pytree_of_other_shapes(td):
    """A function that changes shapes gives a container without batch dimensions."""
    assert pytree.tree_map(torch.sum, td.select("x", "n")).batch_size == torch.Size([])
    assert pytree.tree_map(lambda _: None, td.select("x"))["x"] is None


# torch's own modules use what torch deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["regular", "memory-mapped"])
def test_compile(tmp_path, td, kind, backend):
    """Compiled functions take containers and index them."""
    torch._dynamo.reset()  # each new container compiles anew, a few times at most
    part = td.select("x", "n")
    if kind == "memory-mapped":
        part = part.memmap(tmp_path / "td")
    function = torch.compile(
        lambda t: t["x"] * 2 + t["n", "y"][:, None] + t[1]["x"], backend=backend, fullgraph=True
    )
    assert function(part).tolist() == [[2, 5], [7, 10], [12, 15]]
    if kind == "memory-mapped":
        for mode in ("r+", "c"):
            loaded = TensorDict.load(tmp_path / "td", mode=mode)
            assert function(loaded).tolist() == [[2, 5], [7, 10], [12, 15]]
            assert function(loaded[:]).tolist() == [[2, 5], [7, 10], [12, 15]]


def test_compile_returns_containers(td):
    """Compiled functions make containers."""
    function = torch.compile(
        lambda t: TensorDict({"y": t["x"] + 1}, t.batch_size), backend="eager"
    )
    assert function(td.select("x"))["y"].sum() == 21


def test_repr(tmp_path, td):
    """Printing shows keys, shapes, dtypes, and where the data is."""
    assert repr(td) == (
        "TensorDict(batch_size=[3])\n"
        "    x: [3, 2] float32, memory\n"
        "    n:\n"
        "        y: [3] int64, memory\n"
        "        m:\n"
        "            z: [3, 1] bool, memory\n"
        "    j: [3, *, *] int64, memory\n"
        "    title: 'a title' str, memory\n"
        "    names: [3] str, memory"
    )
    path = str(tmp_path / "td")
    mapped = td.memmap(path)
    assert repr(mapped).startswith(
        f"TensorDict(batch_size=[3], memory-mapped, directory={path!r})\n"
        "    x: [3, 2] float32, file, mode 'r+'\n"
    )
    assert "directory" not in repr(mapped[0:1])
    assert "x: [2] float32, file, mode 'r+'" in repr(mapped[0])
    assert repr(td.share_memory_()).startswith(
        "TensorDict(batch_size=[3], shared)\n    x: [3, 2] float32, shared memory\n"
    )
    odd = TensorDict({"a b": torch.ones(1), "n": TensorDict({"s": "x" * 99}, [1, 1])}, [1]).lock_()
    assert repr(odd) == (
        "TensorDict(batch_size=[1], locked)\n"
        "    'a b': [1] float32, memory\n"
        "    n: [1, 1]\n"
        f"        s: '{'x' * 37}...' str, memory"
    )


def test_repr_html(td):
    """Notebooks show a table, with keys as text."""
    td["<b>"] = torch.ones(3)
    html = td._repr_html_()
    assert html.startswith("<table>")
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert html.count("<tr>") == 1 + 9


def test_truth(td):
    """Whether a container is true is not guessed."""
    with pytest.raises(TypeError, match="ambiguous"):
        bool(td)


def test_iteration(td):
    """Iterating gives the elements along the first batch dimension."""
    assert [row["names"] for row in td] == ["a", "b", "c"]
    assert [row["j"].shape for row in td] == [(2, 1), (0, 3), (1, 4)]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(td, protocol):
    """A regular container pickles by value, whatever the protocol, and keeps a lock."""
    for source in (td, td.clone().lock_()):
        copy_ = pickle.loads(pickle.dumps(source, protocol))
        assert tree(copy_) == tree(td)
        assert copy_.batch_size == td.batch_size
        assert copy_.is_locked == (source.is_locked and protocol > 2)
    nothing = pickle.loads(pickle.dumps(TensorDict(batch_size=[4]), protocol))
    assert nothing.batch_size == torch.Size([4])


def test_torch_save(tmp_path, td):
    """A checkpoint stores the values of a memory-mapped container, not its files."""
    mapped = td.memmap(tmp_path / "td")
    torch.save(mapped, tmp_path / "td.pt")
    mapped["x"].zero_()
    loaded = torch.load(tmp_path / "td.pt", weights_only=False)
    assert tree(loaded) == tree(td)
    assert not loaded.is_memmap()
    assert not loaded.is_locked


def test_torch_save_stores_views_compactly_and_what_is_shared_once(tmp_path):
    """A checkpoint holds ten elements of a large tensor, and one memory of two leaves once."""
    large = torch.arange(100_000)
    td = TensorDict({"part": large[:10], "one": large, "two": large})
    torch.save(td, tmp_path / "td.pt")
    assert (tmp_path / "td.pt").stat().st_size < large.nbytes + 10_000
    loaded = torch.load(tmp_path / "td.pt", weights_only=False)
    assert tree(loaded) == tree(td)
    assert loaded["part"].untyped_storage().nbytes() == 80
    assert loaded["one"].data_ptr() == loaded["two"].data_ptr()


def test_subclass(tmp_path):
    """A subclass stays one through views, copies and files."""

    class Sample(TensorDict):
        __slots__ = ()

    sample = Sample({"x": torch.ones(2), "n": {"y": torch.ones(2)}}, [2])
    for made in (
        sample[0],
        sample[0:1],
        sample["n"],
        sample.clone(),
        sample.view(1, 2),
        sample.memmap(tmp_path / "td"),
        Sample.load(tmp_path / "td"),
        torch.stack([sample, sample]),
    ):
        assert type(made) is Sample


def test_names_are_exported():
    """The container and its errors are names of the package."""
    assert mmtensor.TensorDict is TensorDict
    assert issubclass(mmtensor.LockedError, RuntimeError)


@pytest.mark.parametrize("kind", ["files", "shared", "locked"])
def test_in_place_operators_on_a_locked_leaf(tmp_path, kind):
    """They change the leaf and set the very same one, which the lock allows."""
    td = TensorDict({"x": torch.arange(3), "n": {"y": torch.zeros(3, 2)}}, [3])
    if kind == "files":
        td = td.memmap(tmp_path / "td")
    elif kind == "shared":
        td.share_memory_()
    else:
        td.lock_()
    td["x"] += 1
    td["n", "y"] += 1
    td["n"]["y"] *= 3
    td[0]["x"] -= 5
    td["n"] = td["n"]
    assert td["x"].tolist() == [-4, 2, 3]
    assert (td["n", "y"] == 3).all()
    with pytest.raises(LockedError, match="cannot set key 'x'"):
        td["x"] = td["x"].clone()
    with pytest.raises(LockedError, match="cannot set key"):
        td["n", "y"] = td["n", "y"].clone()


def test_writing_to_a_leaf_that_is_not_there():
    """The error names the leaves there are."""
    td = TensorDict({"x": torch.zeros(2)}, [2])
    with pytest.raises(KeyError, match=r"there is no key 'z'. The leaves are: 'x'"):
        td.set_("z", torch.ones(2))


def test_lists_that_are_no_tensors():
    """The error names the leaf and the way on."""
    with pytest.raises(
        TypeError, match=r"leaf 'a' cannot be made a tensor: .*torch.stack\(tensors\)"
    ):
        TensorDict({"a": [torch.ones(2), torch.ones(3)]}, [2])
    with pytest.raises(TypeError, match=r"leaf \('n', 'a'\) .*array.astype\(str\).tolist"):
        TensorDict({"n": {"a": np.array(["x", "y"])}}, [2])


@pytest.mark.parametrize("columns", [1, 512])
class TestGatherOfOtherClasses:
    """Large results are gathered into new memory of ours only where a leaf is its bytes."""

    def test_subclass(self, columns):
        """A class keeps what it holds."""
        a, b = torch.randn(4096, columns), torch.randn(4096, columns)
        ids = torch.arange(3000)
        found = TensorDict({"x": TwoTensor(a, b)}, [4096])[ids]["x"]
        assert type(found) is TwoTensor
        assert torch.equal(found.a, a[ids])
        assert torch.equal(found.b, b[ids])

    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    def test_traced(self, columns, mode):
        """Tensors without bytes are gathered by torch."""
        a, ids = torch.randn(4096, columns), torch.arange(3000)
        graph = make_fx(lambda a, i: TensorDict({"x": a}, [4096])[i]["x"], tracing_mode=mode)(
            a, ids
        )
        assert torch.equal(graph(a, ids), a[ids])

    def test_numbers_from_a_file(self, columns, tmp_path):
        """Row numbers may be memory-mapped themselves."""
        a = MemoryMappedTensor.from_tensor(torch.randn(4096, columns), filename=tmp_path / "a")
        ids = MemoryMappedTensor.from_tensor(torch.arange(3000), filename=tmp_path / "i")
        assert torch.equal(TensorDict({"x": a}, [4096])[ids]["x"], a.clone()[:3000])


@pytest.mark.parametrize("outer", [dict, OrderedDict])
class TestNestedMappings:
    """Errors name the whole key, wherever in a nested mapping it is."""

    def test_wrong_batch_size(self, outer):
        """Three levels down."""
        with pytest.raises(RuntimeError, match=r"leaf \('a', 'b', 'c'\) must start with"):
            TensorDict(outer({"a": outer({"b": outer({"c": torch.ones(3)})})}), [2])
        with pytest.raises(RuntimeError, match=r"leaf \('a', 'b', 'c'\) must start with"):
            TensorDict({}, [2]).set("a", outer({"b": outer({"c": torch.ones(3)})}))

    def test_wrong_key(self, outer):
        """A key that is no string."""
        with pytest.raises(TypeError, match=r"got 3. It is in \('a', 'b'\)"):
            TensorDict({"a": outer({"b": outer({3: torch.ones(2)})})}, [2])

    def test_mapping_in_itself(self, outer):
        """It has no end."""
        endless = outer()
        endless["a"] = endless
        with pytest.raises(ValueError, match=r"cannot contain itself, as key \('a', 'a', 'a'\)"):
            TensorDict(endless, [2])
        with pytest.raises(ValueError, match="cannot contain itself"):
            TensorDict({}, [2]).set("b", endless)


def test_a_refused_leaf_leaves_nothing_behind():
    """Nested containers are made for a leaf that is taken only."""
    td = TensorDict({"n": {}}, [2])
    for key in (("a", "b", "c"), ("n", "m", "x")):
        with pytest.raises(RuntimeError, match="must start with the batch size"):
            td.set(key, torch.ones(3))
    assert list(td.keys(True)) == ["n"]
    td.set(("a", "b", "c"), torch.ones(2))
    assert ("a", "b", "c") in td


@pytest.mark.parametrize("order", [1, -1])
def test_unflatten_keys_beside_nested_ones(order):
    """What was nested before and what becomes so end in one container, in any order."""
    x = torch.ones(2)
    items = [("a", {"c": x}), ("a.b", x)][::order]
    assert set(TensorDict(dict(items), [2]).unflatten_keys().keys(True, True)) == {
        ("a", "b"),
        ("a", "c"),
    }
    for clash in ([("a", {"b": x}), ("a.b", x)], [("a", x), ("a.b", x)]):
        with pytest.raises(KeyError, match=r"two leaves would have the key|is a leaf, not nested"):
            TensorDict(dict(clash[::order]), [2]).unflatten_keys()


def test_a_longer_batch_size_is_that_of_nested_ones(tmp_path):
    """A batch size that is set reaches nested containers, which may have longer ones still."""
    td = TensorDict({"n": {"y": torch.zeros(3, 4, 5)}, "m": TensorDict({}, [3, 4, 5])}, [3])
    td.batch_size = [3, 4]
    assert td["n"].batch_size == torch.stack([td, td])["n"].batch_size[1:] == (3, 4)
    assert td["m"].batch_size == (3, 4, 5)
    assert TensorDict.load_memmap(td.memmap(tmp_path / "td")._locks[0].directory).shape == (3, 4)
    with pytest.raises(RuntimeError, match="must start with the batch size"):
        td.batch_size = [3, 5]
    assert td.batch_size == td["n"].batch_size == (3, 4)


def test_to_converts_jagged_leaves():
    """Jagged leaves are converted as dense ones are; to another device they cannot go."""
    j = JaggedTensor.from_tensors([torch.ones(2), torch.ones(3)])
    td = TensorDict({"n": {"j": j}, "x": torch.ones(2), "s": "text"}, [2])
    half = td.to(torch.float16)
    assert half["n", "j"].dtype is half["x"].dtype is torch.float16
    assert half["n", "j"].tolist() == j.tolist()
    with pytest.raises(DeviceError, match=r"leaf \('n', 'j'\) cannot be moved: a jagged tensor"):
        td.to("meta")


def test_pop_with_a_default():
    """The default stands in for whatever is not there."""
    td = TensorDict({"x": torch.ones(1)})
    assert td.pop(("missing", "y"), 3) == td.pop(("x", "y"), 3) == td.pop("z", 3) == 3
    for key in (("missing", "y"), ("x", "y"), "z"):
        with pytest.raises(KeyError, match="there is no key"):
            td.pop(key)


def test_renaming_out_of_a_locked_one():
    """A key that cannot be taken away is not copied either."""
    td = TensorDict({"n": {"x": torch.ones(1)}})
    td["n"].lock_()
    with pytest.raises(LockedError, match=r"cannot rename key \('n', 'x'\)"):
        td.rename_key_(("n", "x"), "y")
    assert list(td.keys(True, True)) == [("n", "x")]


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (
            lambda _: TensorDict(5),
            TypeError,
            "expected a mapping or a TensorDict, got <class 'int'>",
        ),
        (lambda td: td.update(5), TypeError, "expected a mapping or a TensorDict"),
        (lambda td: td.update_(5), TypeError, "expected a mapping or a TensorDict"),
        (lambda td: td.set_("n", 5), TypeError, "expected a mapping or a TensorDict"),
        (lambda td: td.apply(torch.add, {"x": 1}), TypeError, "others must be TensorDicts, got"),
        (lambda td: td.apply(torch.add, TensorDict({})), KeyError, "there is no key 'x'"),
        (lambda td: torch.stack([torch.ones(1), td]), TypeError, "torch.stack takes TensorDicts"),
        (lambda td: td.set(("a",) * 300, 1), ValueError, "can be 100 levels deep, and cannot"),
    ],
)
def test_what_is_no_container(attempt, error, message):
    """What takes a container says so, whatever it gets."""
    td = TensorDict({"x": torch.ones(1), "n": {"y": torch.ones(1)}})
    with pytest.raises(error, match=message):
        attempt(td)
    assert list(td.keys(True, True)) == ["x", ("n", "y")]


def test_as_deep_as_can_be_saved(tmp_path):
    """What can be saved can be loaded."""
    td = TensorDict({}).set(("a",) * 101, torch.ones(1))
    td.memmap(tmp_path / "td")
    assert TensorDict.load_memmap(tmp_path / "td")[("a",) * 101] == 1
    deeper = TensorDict({"b": td})
    with pytest.raises(ValueError, match="can be 100 levels deep"):
        deeper.memmap(tmp_path / "deeper")
    assert os.listdir(tmp_path) == ["td"]


def test_assigning_elements_of_another_shape():
    """Where one leaf cannot take its part, no leaf is written."""
    j = JaggedTensor.from_tensors([torch.zeros(n) for n in (1, 2, 3)])
    td = TensorDict({"x": torch.zeros(3), "j": j}, [3])
    one, two = torch.ones(1), torch.ones(2)
    for index, elements, error, message in (
        (slice(2), [one, one], ShapeError, r"an element of leaf 'j' has shape \[2\].*got \[1\]"),
        ([0, 1], [one[None], two[None]], ShapeError, r"has shape \[1\].*got \[1, 1\]"),
        (slice(2), [one.long(), two.long()], DtypeError, "leaf 'j' have dtype torch.float32"),
    ):
        with pytest.raises(error, match=message):
            td[index] = TensorDict({"x": two, "j": JaggedTensor.from_tensors(elements)}, [2])
    with pytest.raises(ShapeError, match=r"has shape \[2\], which cannot change, got \[1\]"):
        td[1] = TensorDict({"x": torch.tensor(1.0), "j": one})
    assert not td["x"].any()
    assert not j.values.any()
    td[1:] = TensorDict({"x": two, "j": JaggedTensor.from_tensors([two, torch.ones(3)])}, [2])
    td[0] = TensorDict({"x": torch.tensor(1.0), "j": one})
    assert td["x"].all()
    assert j.values.all()


def test_lists_of_arrays():
    """A list of arrays is stacked; of arrays that differ, the message says what to do."""
    td = TensorDict({"x": [np.ones(2, np.float32)] * 3}, [3])
    assert td["x"].dtype is torch.float32
    with pytest.raises(TypeError, match=r"leaf 'x' cannot be made a tensor.*JaggedTensor.from"):
        TensorDict({"x": [np.ones(2), np.ones(3)]}, [2])


def test_joining_strings_from_files(tmp_path):
    """Lists of strings of memory-mapped containers are joined as other lists are."""
    td = TensorDict({"s": ["a", "b"]}, [2]).memmap(tmp_path / "td")
    assert torch.cat([td, td.clone()])["s"] == ["a", "b", "a", "b"]


def test_numbers_of_numpy_as_sizes():
    """Sizes may be any integers."""
    td = TensorDict({"x": torch.zeros(6)}, [6])
    assert td.view(np.int64(2), 3).batch_size == td.view(np.array([2, 3])).batch_size == (2, 3)


def test_joining_jagged_leaves():
    """Jagged leaves are joined in regular memory; without elements they keep their dtype."""
    one = JaggedTensor.from_tensors([torch.ones(2), torch.zeros(3)])
    td = TensorDict({"j": one}, [2])
    joined = torch.cat([td, td[1:], td[::2]])["j"]
    assert joined.tolist() == [[1, 1], [0, 0, 0], [0, 0, 0], [1, 1]]
    assert joined.mode is None
    none = JaggedTensor.empty(torch.zeros((0, 2), dtype=torch.int64), dtype=torch.float64)
    empty = TensorDict({"j": none}, [0])
    for joined in (torch.cat([empty, empty]), empty.map(lambda c: c, chunksize=5, num_workers=0)):
        assert (len(joined["j"]), joined["j"].ndim, joined["j"].dtype) == (0, 2, torch.float64)
    with pytest.raises(RuntimeError, match="leaf 'j' cannot be joined: its elements are of"):
        torch.cat([td, empty])


@pytest.mark.parametrize("how", ["files", "shared"])
def test_strings_that_others_see_cannot_be_changed(tmp_path, how):
    """Nor can those of views, and of what has come from another process."""
    td = TensorDict({"s": ["a", "b", "c"]}, [3])
    td = td.memmap(tmp_path / "td") if how == "files" else td.share_memory_()
    for one in (td, td[0:2], td[:], td[1:][:1], pickle.loads(pickle.dumps(td))):
        if how == "shared" and not one.is_shared():
            continue  # by value
        with pytest.raises(LockedError, match="strings are part of a TensorDict that is memory"):
            one["s"].append("z")
    for one in (td.clone(), copy.deepcopy(td), td[[0, 1]]):
        assert type(one["s"]) is list
    stream = io.BytesIO()
    torch.save(td.to_dict(), stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=True) == {"s": ["a", "b", "c"]}


@pytest.mark.parametrize("how", ["files", "shared"])
def test_views_of_an_unlocked_one_with_a_locked_one_in_it(tmp_path, how):
    """What is memory-mapped or shared inside of a view stays so, whatever the view."""
    inner = TensorDict({"m": {"x": torch.arange(4)}}, [4])
    inner = inner.memmap(tmp_path / "td") if how == "files" else inner.share_memory_()
    outer = TensorDict({"y": torch.zeros(4), "n": inner}, [4])
    views = (
        lambda td: td[0:2],
        lambda td: td[None],
        lambda td: td[...],
        lambda td: td.unbind(0)[0],
        lambda td: td.split(2)[0],
        lambda td: td.view(4),
        lambda td: td.view(2, 2),
        lambda td: td.unsqueeze(0),
        lambda td: td.permute(0),
        lambda td: td.expand(2, 4),
    )
    for view in views:
        seen = view(outer)
        for nested in (seen["n"], seen["n", "m"]):
            assert nested.is_locked
            assert nested.is_memmap() if how == "files" else nested.is_shared()
        assert not seen.is_locked
    for other in (outer.clone(), outer.clone(False), outer.reshape(2, 2), outer[[0]]):
        assert not other["n"].is_locked


@pytest.mark.parametrize("index", [[0, 2], torch.tensor([2, 0]), slice(2), 1])
def test_indexing_in_one_compiled_graph(tmp_path, index):
    """Containers are indexed without a break of the graph."""
    td = TensorDict({"x": torch.arange(6.0).view(3, 2), "n": {"y": torch.arange(3)}}, [3])
    for each in (td, td.memmap(tmp_path / "td")):
        torch._dynamo.reset()
        found = torch.compile(lambda td: td[index], backend="eager", fullgraph=True)(each)
        assert torch.equal(found["x"], td[index]["x"])
        assert torch.equal(found["n", "y"], td[index]["n", "y"])


@pytest.mark.parametrize("name", ["map", "batches", "select"])
def test_errors_name_functions_as_users_know_them(name):
    """A wrong argument speaks of TensorDict, and of no class beneath it."""
    td = TensorDict({"x": torch.zeros(2)}, [2])
    with pytest.raises(TypeError, match=rf"^TensorDict\.{name}\(\) got an unexpected keyword"):
        getattr(td, name)(1, workers=2)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_uint8_is_a_mask_for_every_leaf(kind):
    """As it is to torch: the leaves of one result are about the same elements."""
    j = JaggedTensor.from_tensors([torch.full((2,), n) for n in range(3)])
    td = TensorDict({"x": torch.arange(3), "s": list("abc"), "j": j}, [3])
    mask = kind([1, 0, 1], dtype=torch.uint8 if kind is torch.tensor else np.uint8)
    found = td[mask]
    assert (found["x"].tolist(), found["s"], found.batch_size) == ([0, 2], ["a", "c"], (2,))
    assert [one.tolist() for one in found["j"]] == [[0, 0], [2, 2]]


def test_a_batch_of_nothing():
    """A sampler may ask for no element at all."""
    td = TensorDict({"x": torch.arange(3), "s": list("abc")}, [3])
    assert td.__getitems__([]).batch_size == (0,)
