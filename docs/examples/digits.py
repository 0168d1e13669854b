"""Train a classifier on raw files that a NumPy pipeline wrote, and check what was promised.

A NumPy pipeline writes scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels) as
raw files. mmtensor opens them read-only; a small network trains on them through a
`DataLoader` with two workers, which get references to the files. At the end the program
prints the accuracy on images it has not seen, and checks that nothing was copied on the
way and that the files are what they were. It exits with 1 if a promise is broken.

Run ``python digits.py [DIRECTORY]``; without a directory the files go to a temporary one.
"""

import argparse
import hashlib
import pickle
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import mmtensor
from mmtensor import MemoryMappedTensor

IMAGES, LABELS = "digits.images.f32", "digits.labels.i64"
TRAINING = 1437  # four fifths of the images
EPOCHS = 15


def write_raw_files(directory: Path) -> None:
    """Do the NumPy side of the job: plain NumPy, neither torch nor mmtensor."""
    # Here, since the workers import this file too and have no use for scikit-learn.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)  # pixels are 0 to 16
    images.tofile(directory / IMAGES)
    digits.target[order].astype(np.int64).tofile(directory / LABELS)


class Digits(Dataset):
    """Images and labels, by batch. What it holds are views of the files.

    Parameters
    ----------
    images, labels
        Tensors with one row per image.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Gather a whole batch, and say from which file the gathering process reads."""
        place = mmtensor.locate(self.images)
        return self.images[ids], self.labels[ids], str(place and place.path)


def as_it_is(batch: tuple) -> tuple:
    """Collate nothing: the data set has gathered the batch already."""
    return batch


def train(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.nn.Module, set[str]]:
    """Train with two workers; return the model and the files that the workers read from."""
    # "spawn" starts the workers as new processes: what they know was pickled and sent.
    loader = DataLoader(
        Digits(images, labels),
        batch_size=64,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
        collate_fn=as_it_is,
    )
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sources = set()
    for _ in tqdm(range(EPOCHS), desc="training", unit="epoch"):
        for inputs, targets, source in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sources.add(source)
    return model, sources


def private_bytes(path: Path) -> int | None:
    """Return how many bytes of the maps of a file are private copies of this process.

    From ``/proc/self/smaps``, which the kernel writes and mmtensor has no part in; None if
    the file is not mapped at all.
    """
    total, inside = None, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            inside = rest[-1:] == [str(path)]
        elif inside and first == "Anonymous:":
            total = (total or 0) + 1024 * int(rest[0])
    return total


def run(directory: Path) -> bool:
    """Do the whole job in a directory; return whether all promises were kept."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kept = True

    def promise(what: str, *, holds: bool) -> None:
        nonlocal kept
        kept = kept and holds
        print(f"  {'ok    ' if holds else 'BROKEN'} {what}")

    write_raw_files(directory)
    paths = [directory / IMAGES, directory / LABELS]
    before = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    sizes = [path.stat().st_size for path in paths]

    images = MemoryMappedTensor.from_filename(paths[0], torch.float32, (-1, 64), mode="r")
    labels = MemoryMappedTensor.from_filename(paths[1], torch.int64, (-1,), mode="r")
    model, sources = train(images[:TRAINING], labels[:TRAINING])
    with torch.no_grad():
        predicted = model(images[TRAINING:]).argmax(1)
    accuracy = (predicted == labels[TRAINING:]).float().mean().item()

    print(f"data           {len(images)} images, {sum(sizes):,} bytes in {directory}")
    print(f"test accuracy  {accuracy:.3f}")
    promise("over 0.9 on images that it was not trained on", holds=accuracy > 0.9)

    copied = [private_bytes(path) for path in paths]
    print(f"copied         {sum(size or 0 for size in copied)} bytes")
    promise("the kernel has no private page of either file", holds=copied == [0, 0])
    array = np.asarray(images)
    promise(
        "np.asarray(tensor) stands on the tensor's own mapping of the file",
        holds=np.shares_memory(array, images.numpy())
        and mmtensor.locate(array) == mmtensor.locate(images),
    )
    promise(
        "every batch was gathered by a worker from its own mapping of the file",
        holds=sources == {str(paths[0])},
    )

    reference = pickle.dumps(images[:TRAINING])
    print(f"reference      {len(reference)} bytes for {TRAINING * 64 * 4:,} bytes of images")
    promise("a pickled view holds no data", holds=len(reference) <= 300 + len(str(paths[0])))
    promise(
        "unpickled, it has the same values",
        holds=torch.equal(pickle.loads(reference), images[:TRAINING]),
    )

    after = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    for path, digest in zip(paths, after, strict=True):
        print(f"SHA-256        {digest}  {path.name}")
    promise("the files are what they were before training", holds=after == before)
    return kept


def main() -> int:
    """Run the example; the exit status is 0 if all promises were kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, help="where the raw files go")
    chosen = parser.parse_args().directory
    if chosen is not None:
        return 0 if run(chosen.resolve(strict=True)) else 1
    with tempfile.TemporaryDirectory() as temporary:
        return 0 if run(Path(temporary).resolve()) else 1


if __name__ == "__main__":
    sys.exit(main())
