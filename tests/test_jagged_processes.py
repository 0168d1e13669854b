"""Jagged tensors in other processes: references, descriptors, data loaders."""

import multiprocessing
import os
import pickle
import shutil

import cloudpickle
import numpy as np
import pytest
import torch
import torch.multiprocessing
from conftest import descriptors, settled_descriptors
from jagged_children import (
    answer,
    double,
    facts,
    fill,
    of_equal_total,
    replace_again_and_again,
)
from torch.utils.data import DataLoader, Subset

import mmtensor
from mmtensor import JaggedTensor, JaggedWriter, MemoryMappedTensor

pytestmark = pytest.mark.timeout(120)

METHODS = ["fork", "spawn", "forkserver"]
MODES = ["r", "r+", "c"]
PATIENCE = 60
VIEWS = {
    "whole": lambda j: j,
    "slice": lambda j: j[1:4],
    "backwards": lambda j: j[::-2],
    "nothing": lambda j: j[2:2],
    "slice of a slice": lambda j: j[1:][2:],
    "element": lambda j: j[4],
    "empty element": lambda j: j[3],
    "row of an element": lambda j: j[2][1],
    "gathered": lambda j: j[[4, 0, 2]],
    "values": lambda j: j.values,
    "shapes": lambda j: j.shapes,
}


def make(tmp_path, mode, count=5):
    """Return a jagged tensor of elements (n % 3, 4), on files or in anonymous memory."""
    elements = [torch.full((n % 3, 4), float(n)) for n in range(count)]
    if mode == "anonymous":
        return JaggedTensor.from_tensors(elements)
    path = tmp_path / "x.memmap"
    JaggedTensor.from_tensors(elements, filename=path, existsok=True)
    return JaggedTensor.from_filename(path, "float32", mode=mode)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", [*MODES, "anonymous"])
@pytest.mark.parametrize("library", [pickle, cloudpickle], ids=lambda module: module.__name__)
def test_pickle(library, mode, view, tmp_path):
    """Pickled, a tensor of files is a reference, one in memory is a copy: the same elements."""
    x = VIEWS[view](make(tmp_path, mode))
    got = pickle.loads(library.dumps(x))
    if mode != "anonymous" and view != "gathered":
        assert facts(got) == facts(x)
    else:
        assert facts(got)[2:] == facts(x)[2:]
    for protocol in (2, 3, 4, 5):
        assert facts(pickle.loads(pickle.dumps(x, protocol)))[2:] == facts(x)[2:]


def test_the_size_of_references(tmp_path):
    """A reference is small, however many elements there are (case 19)."""
    count = 200_000
    lengths = np.arange(count) % 5
    j = JaggedTensor.empty(lengths.reshape(-1, 1), dtype="uint8", filename=tmp_path / "x.memmap")
    few = JaggedTensor.empty([[1], [2]], dtype="uint8", filename=tmp_path / "y.memmap")
    path = len(str(tmp_path))
    for mode in MODES:
        j = JaggedTensor.from_filename(j.filename, "uint8", mode=mode)
        assert len(pickle.dumps(j)) <= 200 + path
        assert len(pickle.dumps(j)) <= len(pickle.dumps(few)) + 16
        for part in (j[5], j[1234:5678], j[::-3], j[100_000:][5]):
            assert len(pickle.dumps(part)) <= 200 + path


def test_views_share_the_mappings(tmp_path):
    """References that arrive in one process stand on one mapping there."""
    j = make(tmp_path, "r+")
    again, part, element = pickle.loads(pickle.dumps((j, j[1:], j[4])))
    again[4] = torch.zeros(1, 4)
    assert not bool(part[3].any())
    assert not bool(j[4].any())
    assert again.values.untyped_storage() is part.values.untyped_storage()
    assert again.values.untyped_storage() is j.values.untyped_storage()
    assert not bool(element.any())


def test_a_reference_to_files_that_grow(tmp_path):
    """What a writer appends meanwhile does not make a reference stale."""
    j = make(tmp_path, "r")
    data = pickle.dumps((j, j[1:3]))
    with JaggedWriter(tmp_path / "x.memmap", "float32", 2, append=True) as writer:
        writer.extend([torch.ones(2, 4)] * 10)
        writer.flush()
        first = pickle.loads(data)
    for got in (first, pickle.loads(data)):
        assert [len(x) for x in got] == [5, 2]
        assert got[0].tolist() == j.tolist()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_reference_to_files_that_are_gone(number, tmp_path):
    """If one of the files is gone, unpickling is a FileNotFoundError that names it (case 3)."""
    data = pickle.dumps(make(tmp_path, "r"))
    name = ("x.memmap", "x.offsets.memmap", "x.shape.memmap")[number]
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        pickle.loads(data)
    assert not (tmp_path / name).exists()


def test_a_reference_to_files_that_were_replaced(tmp_path):
    """If the files are other ones by now, unpickling raises; a cut one is a ValueError."""
    j = make(tmp_path, "r")
    data = pickle.dumps(j)
    shutil.copy(tmp_path / "x.memmap", tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / "x.memmap")
    with pytest.raises(OSError, match="not the one that the reference was made from"):
        pickle.loads(data)
    del j
    data = pickle.dumps(make(tmp_path, "r"))
    os.truncate(tmp_path / "x.offsets.memmap", 16)
    with pytest.raises(ValueError, match=r"must have 48 bytes, as when .* its size is 16"):
        pickle.loads(data)


@pytest.mark.parametrize("mode", MODES)
def test_replaced_files_travel_by_value(mode, tmp_path):
    """A jagged tensor whose files were replaced under their names is pickled with its values."""
    j = make(tmp_path, mode)
    expected = j.tolist()
    make(tmp_path, "r", count=2)
    got = pickle.loads(pickle.dumps(j))
    assert got.mode is None
    assert got.tolist() == expected
    assert pickle.loads(pickle.dumps(j[1:3])).tolist() == expected[1:3]


def test_private_changes_travel_by_value(tmp_path):
    """What was written in "c" exists in this process only: it is sent with its values."""
    j = make(tmp_path, "c")
    assert pickle.loads(pickle.dumps(j)).mode == "c"
    j[4].fill_(-1)
    got = pickle.loads(pickle.dumps(j))
    assert got.mode is None
    assert got[4].tolist() == [[-1.0] * 4]
    assert JaggedTensor.from_filename(j.filename, "float32")[4].tolist() == [[4.0] * 4]


def test_given_shapes_travel_with_the_reference(tmp_path):
    """With shapes that are in memory, the values are a reference and the shapes are sent."""
    np.arange(6, dtype="f4").tofile(tmp_path / "x")
    j = JaggedTensor.from_filename(tmp_path / "x", "float32", [[1], [2], [3]], "r+")
    for x in (j, j[1:], j[::-1]):
        got = pickle.loads(pickle.dumps(x))
        assert got.mode == "r+"
        assert got.tolist() == x.tolist()
        got[0].fill_(9)
        assert bool((x[0] == 9).all())


def test_torch_save(tmp_path):
    """A checkpoint holds the values of the slice, and stands alone (case 13)."""
    j = make(tmp_path, "r", count=300)
    torch.save({"j": j[10:12]}, tmp_path / "checkpoint")
    expected = j[10:12].tolist()
    assert (tmp_path / "checkpoint").stat().st_size < 4000
    (tmp_path / "x.memmap").unlink()
    got = torch.load(tmp_path / "checkpoint", weights_only=False)["j"]
    assert got.tolist() == expected


@pytest.mark.parametrize("library", [multiprocessing, torch.multiprocessing],
                         ids=["multiprocessing", "torch"])  # fmt: skip
@pytest.mark.parametrize("method", METHODS)
def test_queues(method, library, tmp_path):
    """Jagged tensors, slices and elements arrive as they are, and leave no descriptor behind."""
    context = library.get_context(method)
    inward, outward = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=answer, args=(inward, outward), daemon=True)
    child.start()
    before = None
    for mode in [*MODES, "anonymous"]:
        for view in VIEWS.values():
            x = view(make(tmp_path, mode))
            expected = facts(x)
            inward.put(x)
            del x  # the sender may forget what it has sent
            got = outward.get()
            if expected[1] is None and got[0] == "jagged":
                # Regular memory arrives as anonymous shared memory.
                assert got[1] == "r+"
                assert got[2:] == expected[2:]
            else:
                assert got == expected
        if mode == "c":
            before = settled_descriptors()
    assert descriptors() <= before + 4
    inward.put(None)
    child.join(PATIENCE)
    assert child.exitcode == 0


@pytest.mark.parametrize("kind", ["r+", "anonymous", "wrapped"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_changes_are_seen_by_the_other_process(method, kind, tmp_path):
    """What a child writes to a jagged tensor that came through a queue is seen here."""
    if kind == "wrapped":
        base = MemoryMappedTensor.from_tensor(torch.arange(6.0))
        j = MemoryMappedTensor.from_storage(
            base.untyped_storage(), dtype=torch.float32, shape=torch.tensor([[2], [4]])
        )
    else:
        j = make(tmp_path, kind)
    expected = (j.values * 2).tolist()
    context = multiprocessing.get_context(method)
    inward, outward = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=double, args=(inward, outward), daemon=True)
    child.start()
    inward.put(j)
    assert outward.get() == "done"
    child.join(PATIENCE)
    assert j.values.tolist() == expected


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["file", "anonymous"])
def test_filling_from_many_processes(kind, method, tmp_path):
    """Workers that got a reference fill elements that were made empty: nothing is lost."""
    shapes = [(n % 4, 1 + n % 3) for n in range(400)]
    filename = tmp_path / "x.memmap" if kind == "file" else None
    j = JaggedTensor.empty(shapes, dtype="int32", filename=filename)
    context = multiprocessing.get_context(method)
    workers = 2
    children = [
        context.Process(target=fill, args=(j, first, workers), daemon=True)
        for first in range(workers)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(PATIENCE)
        assert child.exitcode == 0
    expected = [torch.full(shape, n, dtype=torch.int32) for n, shape in enumerate(shapes)]
    torch.testing.assert_close(j, expected, rtol=0, atol=0)
    if kind == "file":
        again = JaggedTensor.from_filename(filename, "int32", mode="r", validate=True)
        torch.testing.assert_close(again, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*MODES, "anonymous"])
@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork")])
@pytest.mark.parametrize("subset", [False, True])
def test_data_loader(subset, workers, method, kind, tmp_path):
    """A DataLoader gets each batch as one jagged tensor, gathered at once."""
    j = make(tmp_path, kind, count=23)
    dataset = Subset(j, range(22, -1, -1)) if subset else j
    options = {"timeout": PATIENCE, "multiprocessing_context": method} if workers else {}
    batches = list(DataLoader(dataset, batch_size=5, num_workers=workers, **options))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert {type(batch) for batch in batches} == {JaggedTensor}
    got = [element.tolist() for batch in batches for element in batch]
    assert got == (j[::-1] if subset else j).tolist()


def test_data_loader_with_spawned_workers(tmp_path):
    """Spawned workers get a reference and shuffle like any others."""
    j = make(tmp_path, "r", count=40)
    loader = DataLoader(
        j, batch_size=8, shuffle=True, num_workers=1, multiprocessing_context="spawn",
        timeout=PATIENCE, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    got = [element.tolist() for batch in loader for element in batch]
    key = str
    assert sorted(got, key=key) == sorted(j.tolist(), key=key)
    assert got != j.tolist()


def test_data_loader_without_batches(tmp_path):
    """Without a batch size, the samples are the elements, on the files."""
    j = make(tmp_path, "r")
    samples = list(DataLoader(j, batch_size=None))
    assert [sample.tolist() for sample in samples] == j.tolist()
    assert {type(sample) for sample in samples} == {MemoryMappedTensor}


def test_batches_of_jagged_samples(tmp_path):
    """Samples that are jagged tensors themselves stay a list: nothing stacks them."""
    j = make(tmp_path, "r")
    batch = torch.utils.data.default_collate([j[:2], j[2:]])
    assert [part.tolist() for part in batch] == [j[:2].tolist(), j[2:].tolist()]


@pytest.mark.parametrize("layout", ["jagged", "nested", "padded"])
def test_collating_in_workers(layout, tmp_path):
    """A collate helper works in the workers, and what it makes arrives."""
    j = make(tmp_path, "r", count=9)
    collate = mmtensor.JaggedCollate(layout)
    loader = DataLoader(j, batch_size=4, num_workers=1, collate_fn=collate, timeout=PATIENCE)
    expected = [collate(j[start : start + 4]) for start in (0, 4, 8)]
    for got, wanted in zip(loader, expected, strict=True):
        if layout == "padded":
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(
                [x.clone() for x in got.unbind()], [x.clone() for x in wanted.unbind()]
            )


@pytest.mark.slow
def test_two_that_replace_at_once(tmp_path):
    """A reader gets one version whole, however many processes replace at the same time."""
    path = tmp_path / "x.bin"
    splits = {number: [len(x) for x in of_equal_total(number)] for number in range(250)}
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    JaggedTensor.from_tensors(of_equal_total(0), filename=path)
    writers = [
        context.Process(target=replace_again_and_again, args=(path, first, stop))
        for first in (0, 100)
    ]
    for writer in writers:
        writer.start()
    try:
        for _ in range(300):
            elements = [x.tolist() for x in JaggedTensor.from_filename(path, "uint8", mode="r")]
            values = set().union(*elements)
            assert len(values) == 1
            assert [len(x) for x in elements] == splits[values.pop()]
    finally:
        stop.set()
        for writer in writers:
            writer.join(PATIENCE)
    assert [writer.exitcode for writer in writers] == [0, 0]


@pytest.mark.parametrize(
    "dtype", ["float8_e5m2", "float8_e8m0fnu", "uint16", "uint64", "bfloat16"]
)
def test_by_value_in_every_dtype(dtype):
    """A jagged tensor in memory goes through plain pickle, whatever its dtype."""
    values = [torch.ones(n).to(getattr(torch, dtype)) for n in (2, 0, 3)]
    again = pickle.loads(pickle.dumps(JaggedTensor.from_tensors(values)))
    assert again.dtype == values[0].dtype
    for found, expected in zip(again, values, strict=True):
        assert found.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_samples_that_are_jagged(batch_size):
    """Samples that are jagged tensors themselves come as a list, of one as well."""
    samples = [JaggedTensor.from_tensors([torch.ones(n)]) for n in (1, 2)]
    batches = list(DataLoader(samples, batch_size=batch_size))
    assert [[x[0].numel() for x in batch] for batch in batches] == (
        [[1], [2]] if batch_size == 1 else [[1, 2]]
    )
