"""DataLoader: data sets on files and in anonymous memory, with and without workers."""

import pytest
import torch
from processes import Holder, values
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

import mmtensor
from mmtensor import MemoryMappedTensor

pytestmark = pytest.mark.timeout(120)

KINDS = ("r", "r+", "c", "anonymous")
ROWS, COLUMNS = 12, 3
DATA = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


def make(directory, kind):
    """Put the data on a file opened in a mode, or into anonymous memory."""
    if kind == "anonymous":
        return MemoryMappedTensor.from_tensor(DATA)
    path = mmtensor.save_array(directory / "x.bin", DATA.numpy())
    return MemoryMappedTensor.from_filename(path, "float32", (ROWS, -1), mode=kind)


DATASETS = {
    "holds x": Holder,
    "is x": lambda x: x,
    "TensorDataset": TensorDataset,
    "Subset": lambda x: Subset(Holder(x), range(ROWS)),
}


def as_they_come(samples):
    """Collate nothing: a batch is the list of its samples."""
    return samples


def summed(samples):
    """Collate into something else than a stack."""
    return sum(
        sample[0].sum() if isinstance(sample, tuple) else sample.sum() for sample in samples
    )


def loaded(dataset, workers, method=None, **options):
    """Run a loader to its end."""
    more = {"timeout": 60, "multiprocessing_context": method} if workers else {}
    return list(DataLoader(dataset, num_workers=workers, **more, **options))


def rows(batches):
    """Flatten what a loader yields to a list of rows."""
    flat = []
    for batch in batches:
        if isinstance(batch, list | tuple):
            flat += rows(batch)
        else:
            flat += batch.reshape(-1, COLUMNS).tolist()
    return flat


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DATASETS)
class TestFork:
    """Every kind of data set, in this process and in forked workers."""

    def test_default_collate(self, tmp_path, name, kind, workers):
        """Batches of the default collate are regular tensors with the rows in order."""
        batches = loaded(DATASETS[name](make(tmp_path, kind)), workers, batch_size=5)
        assert rows(batches) == values(DATA)
        first = batches[0][0] if name == "TensorDataset" else batches[0]
        assert type(first) is torch.Tensor
        assert first.shape == (5, COLUMNS)

    def test_without_batches(self, tmp_path, name, kind, workers):
        """Without collate function and batch size, samples arrive as they are: on the file."""
        x = make(tmp_path, kind)
        samples = loaded(DATASETS[name](x), workers, batch_size=None)
        assert rows(samples) == values(DATA)
        first = samples[3][0] if name == "TensorDataset" else samples[3]
        assert type(first) is MemoryMappedTensor
        assert mmtensor.locate(first) == mmtensor.locate(x[3])

    def test_custom_collate(self, tmp_path, name, kind, workers):
        """A collate function that passes the samples on gets and returns views."""
        x = make(tmp_path, kind)
        batches = loaded(DATASETS[name](x), workers, batch_size=4, collate_fn=as_they_come)
        assert rows(batches) == values(DATA)
        first = batches[1][0][0] if name == "TensorDataset" else batches[1][0]
        assert mmtensor.locate(first) == mmtensor.locate(x[4])

    def test_computing_collate(self, tmp_path, name, kind, workers):
        """A collate function that computes sends what it computed."""
        batches = loaded(
            DATASETS[name](make(tmp_path, kind)), workers, batch_size=6, collate_fn=summed
        )
        assert [float(batch) for batch in batches] == [
            float(DATA[:6].sum()),
            float(DATA[6:].sum()),
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_persistent_workers(tmp_path, kind):
    """Workers that live on serve several epochs, shuffled ones too."""
    loader = DataLoader(
        Holder(make(tmp_path, kind)),
        batch_size=5,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        timeout=60,
        generator=torch.Generator().manual_seed(0),
    )
    for _ in range(3):
        assert sorted(rows(loader)) == values(DATA)
    loader._iterator._shutdown_workers()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name", "kind"),
    [
        *(("spawn", "holds x", kind) for kind in KINDS),
        ("spawn", "is x", "r"),
        ("spawn", "is x", "anonymous"),
        ("forkserver", "holds x", "c"),
        ("forkserver", "is x", "r"),
    ],
)
def test_fresh_interpreters(tmp_path, name, kind, method):
    """Workers that start as fresh interpreters get the data set by reference."""
    x = make(tmp_path, kind)
    dataset = DATASETS[name](x)
    batches = loaded(dataset, 1, method, batch_size=4, collate_fn=as_they_come)
    assert rows(batches) == values(DATA)
    assert mmtensor.locate(batches[1][0]) == mmtensor.locate(x[4])
    if kind == "r":
        assert rows(loaded(dataset, 1, method, batch_size=5)) == values(DATA)


@pytest.mark.parametrize("kind", ["r+", "anonymous"])
def test_writes_of_workers_are_seen(tmp_path, kind):
    """What a worker writes to its samples is in the tensor of the parent."""
    x = make(tmp_path, kind)
    loaded(Writer(x), 2, batch_size=3)
    assert values(x) == [[-1.0] * COLUMNS] * ROWS


@pytest.mark.parametrize("kind", ["r", "c"])
def test_the_file_stays(tmp_path, kind):
    """In ``r`` a writing worker fails with the reason; in ``c`` its writes stay its own."""
    x = make(tmp_path, kind)
    if kind == "r":
        with pytest.raises(mmtensor.ReadOnlyError, match='opened with mode "r"'):
            loaded(Writer(x), 2, batch_size=3)
    else:
        assert rows(loaded(Writer(x), 2, batch_size=3)) == [[-1.0] * COLUMNS] * ROWS
    assert values(x) == values(DATA)


class Writer(Holder):
    """A data set that overwrites each sample."""

    def __getitem__(self, i):
        return self.x[i].fill_(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_default_collate_here(tmp_path, kind):
    """The default collate makes a regular tensor of rows, of rows in dicts as well."""
    x = make(tmp_path, kind)
    batch = default_collate([{"row": x[i], "number": i} for i in range(3)])
    assert type(batch["row"]) is torch.Tensor
    assert values(batch["row"]) == values(DATA[:3])


def test_labels_of_another_file(tmp_path):
    """Two files in one TensorDataset come in step."""
    x = make(tmp_path, "r")
    y = MemoryMappedTensor.from_tensor(torch.arange(ROWS), filename=tmp_path / "y.bin")
    for workers in (0, 2):
        for data, label in loaded(TensorDataset(x, y), workers, batch_size=5, shuffle=True):
            assert (data[:, 0] / COLUMNS == label).all()
