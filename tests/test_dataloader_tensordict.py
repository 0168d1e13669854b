"""A TensorDict as the data set of a DataLoader, which needs nothing else."""

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from mmtensor import JaggedTensor, TensorDict

pytestmark = pytest.mark.timeout(120)

ROWS = 22
X = torch.arange(ROWS * 3.0).view(ROWS, 3)
TEXTS = [f"text {n}" for n in range(ROWS)]


def source():
    """Return a TensorDict with dense, nested, jagged and text leaves."""
    images = JaggedTensor.from_tensors([torch.full((n % 4, 2), n) for n in range(ROWS)])
    return TensorDict(
        {"x": X.clone(), "n": {"id": torch.arange(ROWS)}, "image": images, "text": TEXTS}, [ROWS]
    )


def make(directory, kind):
    """Put the source somewhere."""
    if kind == "regular":
        return source()
    if kind == "shared":
        return source().share_memory_()
    source().memmap(directory / "td")
    return TensorDict.load_memmap(directory / "td", mode=kind)


KINDS = ("regular", "shared", "r", "r+", "c")


@pytest.fixture(params=KINDS)
def td(request, tmp_path):
    """Return the source in memory, shared, and on files."""
    return make(tmp_path, request.param)


def check(batch):
    """Check that all leaves of a batch are of the same rows; return which."""
    ids = batch["n", "id"].tolist()
    assert type(batch) is TensorDict
    assert batch.batch_size == (len(ids),)
    assert torch.equal(batch["x"], X[ids])
    assert [one.tolist() for one in batch["image"]] == [[[n, n]] * (n % 4) for n in ids]
    assert batch["text"] == [TEXTS[n] for n in ids]
    return ids


def rows(loader):
    """Read an epoch; return the rows in order."""
    return [n for batch in loader for n in check(batch)]


@pytest.mark.parametrize("workers", [0, 2])
def test_default_collate(td, workers):
    """The default collate takes the batches of all leaves as they are, in order."""
    options = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(td, batch_size=4, num_workers=workers, **options)
    assert len(loader) == 6
    for _ in range(2):
        assert rows(loader) == list(range(ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled(td, workers):
    """A shuffled epoch has every row once, in the order of the generator."""

    def epoch():
        generator = torch.Generator().manual_seed(7)
        return rows(
            DataLoader(td, batch_size=4, shuffle=True, generator=generator, num_workers=workers)
        )

    first = epoch()
    assert sorted(first) == list(range(ROWS))
    assert first != list(range(ROWS))
    assert epoch() == first


@pytest.mark.parametrize("kind", KINDS)
def test_spawned_workers(kind, tmp_path):
    """Workers that were spawned read the same."""
    loader = DataLoader(
        make(tmp_path, kind), batch_size=4, num_workers=1, multiprocessing_context="spawn"
    )
    assert rows(loader) == list(range(ROWS))


def test_distributed_sampler(td):
    """Two replicas of a DistributedSampler read every row once between them."""
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(td, num_replicas=2, rank=rank, shuffle=True)
        loader = DataLoader(td, batch_size=4, sampler=sampler)
        part = rows(loader)
        assert len(part) == ROWS // 2
        seen += part
    assert sorted(seen) == list(range(ROWS))


def test_other_samplers(td):
    """Samplers may give tensors and NumPy integers, and rows twice."""
    sampler = WeightedRandomSampler(torch.ones(ROWS), 30, replacement=True)
    assert len(rows(DataLoader(td, batch_size=4, sampler=sampler))) == 30
    for numbers in (torch.tensor([3, 1, 2]), np.array([3, 1, 2]), iter([3, 1, 2])):
        assert rows(DataLoader(td, batch_size=2, sampler=list(numbers))) == [3, 1, 2]


def test_subsets(td):
    """Parts of the data set read as the whole does."""
    assert rows(DataLoader(Subset(td, [5, 3, 9]), batch_size=2)) == [5, 3, 9]
    one, two = random_split(td, [10, 12], generator=torch.Generator().manual_seed(0))
    both = rows(DataLoader(one, batch_size=4)) + rows(DataLoader(two, batch_size=4))
    assert sorted(both) == list(range(ROWS))


def test_a_batch_of_one(td):
    """A batch of one row keeps its batch dimension."""
    assert [len(check(batch)) for batch in DataLoader(td, batch_size=1)] == [1] * ROWS
    assert [len(check(batch)) for batch in DataLoader(td, batch_size=21)] == [21, 1]


def test_without_batches(td):
    """Without automatic batching the elements come one by one."""
    elements = list(DataLoader(td, batch_size=None))
    assert torch.equal(elements[3]["x"], X[3])
    assert elements[3].batch_size == ()


@pytest.mark.parametrize("workers", [0, 2])
def test_elements_are_stacked(workers):
    """Data sets that fetch elements one by one get the same batches, where they can be stacked."""
    part = source().exclude("image")
    loader = DataLoader(ConcatDataset([part, part]), batch_size=4, num_workers=workers)
    batches = list(loader)
    assert [batch.batch_size for batch in batches] == [(4,)] * 11
    assert [n for batch in batches for n in batch["n", "id"].tolist()] == [*range(ROWS)] * 2
    assert batches[1]["text"] == TEXTS[4:8]


def test_elements_of_different_shapes_are_an_error():
    """Elements of a jagged leaf that come one by one cannot be stacked."""
    with pytest.raises(RuntimeError, match="leaf 'image': stack expects each tensor"):
        default_collate([source()[1], source()[2]])


def test_collate_function(td):
    """A collate function of the user gets the gathered batch."""
    loader = DataLoader(td, batch_size=4, collate_fn=lambda batch: batch["x"].sum().item())
    assert sum(loader) == X.sum().item()


def test_in_a_dict(td):
    """The default collate stacks TensorDicts that are parts of samples."""
    part = td.exclude("image", "text").as_tensor()
    batch = default_collate([{"td": part[n], "k": n} for n in (2, 5)])
    assert torch.equal(batch["td"]["x"], X[[2, 5]])
    assert batch["k"].tolist() == [2, 5]


def test_batches_of_workers_are_regular_memory(tmp_path):
    """Batches can be written to and kept, and the source stays as it is."""
    td = make(tmp_path, "r")
    kept = []
    for batch in DataLoader(td, batch_size=4, num_workers=1):
        kept.append(batch["x"].clone())
        batch["x"].zero_()
        batch["more"] = batch["x"] + 1
    assert torch.equal(torch.cat(kept), X)
    assert torch.equal(td["x"], X)
