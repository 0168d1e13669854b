"""Decode a folder of JPEG files once, and train from memory maps from then on.

The folder is made first: crops of the real images that ship with scikit-image, each of another
size. Then

1. all files are decoded in parallel, into a jagged leaf of a TensorDict on disk, which the
   workers fill in place;
2. all images are resized in parallel into another one, dense, which the workers write to;
3. a DataLoader reads that for an epoch.

The program prints what an epoch takes when every image is decoded again, and from the memory
maps; it checks what was read, and leaves a contact sheet to look at. It exits with 1 if
anything is not what it should be.

Run ``python images.py [DIRECTORY] [--count N] [--sheet FILE]``; without a directory the data
goes to a temporary one.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import skimage
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from mmtensor import JaggedTensor, TensorDict

# Those of scikit-image's own images that are photographs.
SOURCES = (
    "astronaut",
    "brick",
    "camera",
    "cell",
    "chelsea",
    "clock_motion",
    "coffee",
    "coins",
    "grass",
    "gravel",
    "hubble_deep_field",
    "ihc",
    "moon",
    "motorcycle_left",
    "motorcycle_right",
)
SIDE = 96  # of the images to train on
BATCH = 50
WORKERS = os.cpu_count() or 1


# --- the folder of files -----------------------------------------------------------------


def source_images() -> list[Image.Image]:
    """Open the images that ship with scikit-image; nothing is downloaded."""
    root = Path(skimage.__file__).parent / "data"
    paths = [next(path for path in root.iterdir() if path.stem == name) for name in SOURCES]
    return [Image.open(path).convert("RGB") for path in paths]


def write_folder(folder: Path, count: int) -> tuple[list[str], list[int]]:
    """Write JPEG files of differing sizes; return their paths, and what each is a crop of."""
    images = source_images()
    rng = np.random.default_rng(0)
    files, labels = [], []
    for number in range(count):
        label = number % len(images)
        image = images[label]
        width, height = (int(side * rng.uniform(0.5, 1.0)) for side in image.size)
        left = int(rng.integers(image.width - width + 1))
        top = int(rng.integers(image.height - height + 1))
        crop = image.crop((left, top, left + width, top + height))
        path = folder / f"{number:05d}-{SOURCES[label]}.jpg"
        crop.save(path, quality=90)
        files.append(str(path))
        labels.append(label)
    return files, labels


def shape_of(file: str) -> tuple[int, int, int]:
    """Read the size of an image from the header of its file."""
    with Image.open(file) as image:
        return image.height, image.width, 3


def decode(file: str) -> np.ndarray:
    """Read a file as height x width x 3 bytes."""
    with Image.open(file) as image:
        return np.array(image.convert("RGB"))


def fit(pixels: np.ndarray) -> torch.Tensor:
    """Crop and resize an image to a square."""
    square = ImageOps.fit(Image.fromarray(pixels), (SIDE, SIDE))
    return torch.from_numpy(np.array(square))


# --- what workers do ---------------------------------------------------------------------


def load(one: TensorDict) -> None:
    """Decode the file of an element into its place."""
    one.set_("image", torch.from_numpy(decode(one["file"])))


def resize(one: TensorDict) -> TensorDict:
    """Make a small square image of an element."""
    return TensorDict({"image": fit(one["image"].numpy()), "label": one["label"]})


# --- reading -----------------------------------------------------------------------------


class Files(Dataset):
    """The same images without memory maps: every one is decoded and resized when asked for."""

    def __init__(self, files: list[str], labels: list[int]) -> None:
        self.files = files
        self.labels = labels

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Decode a file."""
        return {
            "image": fit(decode(self.files[index])),
            "label": torch.tensor(self.labels[index]),
        }


def epoch(batches: Iterable) -> tuple[float, float, list[int]]:
    """Read all batches; return the seconds, the mean of all images, and how many of each label."""
    start = time.perf_counter()
    total, pixels = 0, 0
    seen = torch.zeros(len(SOURCES), dtype=torch.int64)
    for batch in batches:
        total += int(batch["image"].sum())
        pixels += batch["image"].numel()
        seen += torch.bincount(batch["label"], minlength=len(SOURCES))
    return time.perf_counter() - start, total / pixels, seen.tolist()


def timed(what: str, work: Callable[[], object]) -> float:
    """Do something and say how long it took."""
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    print(f"  {what:44} {seconds:8.2f} s")
    return seconds


def contact_sheet(images: torch.Tensor, path: Path, columns: int = 15) -> None:
    """Write some of the images, side by side, as a PNG file."""
    rows = min(8, -(-len(images) // columns))
    sheet = Image.new("RGB", (columns * (SIDE + 4) + 4, rows * (SIDE + 4) + 4), "white")
    for number in range(min(rows * columns, len(images))):
        row, column = divmod(number, columns)
        tile = Image.fromarray(images[number].numpy())
        sheet.paste(tile, (4 + column * (SIDE + 4), 4 + row * (SIDE + 4)))
    sheet.save(path)


# --- the job -----------------------------------------------------------------------------


def run(directory: Path, count: int, sheet: Path) -> bool:
    """Do the whole job in a directory; return whether everything is what it should be."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kept = True

    def promise(what: str, *, holds: bool) -> None:
        nonlocal kept
        kept = kept and holds
        print(f"  {'ok    ' if holds else 'BROKEN'} {what}")

    folder = directory / "jpeg"
    folder.mkdir()
    files, labels = write_folder(folder, count)
    shapes = [shape_of(file) for file in files]
    print(f"{count} JPEG files, {sum(os.path.getsize(file) for file in files) / 1e6:.1f} MB")

    print("once, in parallel")
    # Room for every image, on disk. The workers get a reference to it, and then numbers.
    images = TensorDict(
        {
            "file": files,
            "label": torch.tensor(labels),
            "image": JaggedTensor.empty(shapes, dtype=torch.uint8),
        },
        [count],
    ).memmap(directory / "images")
    small = TensorDict(
        {
            "image": torch.zeros(1, SIDE, SIDE, 3, dtype=torch.uint8).expand(count, -1, -1, -1),
            "label": torch.zeros(1, dtype=torch.int64).expand(count),
        },
        [count],
    ).memmap_like(directory / "small")
    once = timed(
        f"decode, {WORKERS} workers, in place",
        lambda: images.map(load, chunksize=0, num_workers=WORKERS, pbar=True),
    )
    once += timed(
        f"resize, {WORKERS} workers, into out",
        lambda: images.map(resize, chunksize=0, num_workers=WORKERS, out=small, pbar=True),
    )

    print("one epoch, shuffled                              seconds    images/s")
    small = TensorDict.load_memmap(directory / "small", mode="r")
    data = Files(files, labels)
    options = {"batch_size": BATCH, "shuffle": True}
    ways = {
        "decode and resize, DataLoader": DataLoader(data, **options),
        f"decode and resize, DataLoader, {WORKERS} workers": DataLoader(
            data, num_workers=WORKERS, **options
        ),
        "memory map, DataLoader": DataLoader(small, **options),
        "memory map, td.batches()": small.batches(BATCH, shuffle=True),
    }
    results = {}
    for name, batches in ways.items():
        results[name] = epoch(batches)
        seconds = results[name][0]
        print(f"  {name:44} {seconds:8.3f}  {count / seconds:10,.0f}")
    decoded, _, mapped, batched = (seconds for seconds, *_ in results.values())
    print(f"  the memory map takes 1/{decoded / mapped:,.0f} of the time, td.batches() ", end="")
    print(f"1/{decoded / batched:,.0f}; decoding once took {once / decoded:.1f} such epochs")

    counts = [len(range(label, count, len(SOURCES))) for label in range(len(SOURCES))]
    promise(
        "every way has read every image once",
        holds=all(seen == counts for *_, seen in results.values()),
    )
    promise(
        "every way has read the same pixels",
        holds=len({mean for _, mean, _ in results.values()}) == 1,
    )
    again = TensorDict.load_memmap(directory / "images", mode="r")
    some = range(0, count, max(1, count // 50))
    promise(
        "the files on disk hold what is in the JPEG files",
        holds=all(
            np.array_equal(again[number]["image"].numpy(), decode(files[number]))
            for number in some
        ),
    )
    contact_sheet(small["image"], sheet)
    print(f"look at {sheet}")
    return kept


def main() -> int:
    """Run the example; the exit status is 0 if everything is what it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, help="where the data goes")
    parser.add_argument("--count", type=int, default=1000, help="how many images")
    parser.add_argument("--sheet", type=Path, default=Path("contact_sheet.png"))
    chosen = parser.parse_args()
    sheet = chosen.sheet.resolve()
    if chosen.directory is not None:
        return 0 if run(chosen.directory.resolve(strict=True), chosen.count, sheet) else 1
    with tempfile.TemporaryDirectory() as temporary:
        return 0 if run(Path(temporary).resolve(), chosen.count, sheet) else 1


if __name__ == "__main__":
    sys.exit(main())
