"""Pack real images and source files of differing sizes, and read them at random.

Two collections are packed into jagged tensors: the images that ship with scikit-image and
scikit-learn, decoded once, and every Python source file of the standard library, as bytes.
Then elements are read in random order, from the packed files and the way it is done without
them: decoding the image again, opening the source file again. The program prints the
throughput of packing and of reading, and checks that every element is what was packed. It
exits with 1 if one is not.

Run ``python pack_images.py [DIRECTORY]``; without a directory the files go to a temporary one.
"""

import argparse
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import skimage
import sklearn
import torch
from PIL import Image
from tqdm import tqdm

import mmtensor
from mmtensor import JaggedTensor, JaggedWriter

SUFFIXES = {".png", ".jpg", ".jpeg", ".gif"}
READS = 300  # elements that are read, in random order
BATCH = 16


def image_files() -> list[Path]:
    """Return the image files that ship with scikit-image and scikit-learn."""
    roots = [Path(skimage.__file__).parent / "data", Path(sklearn.__file__).parent / "datasets"]
    return sorted(path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES)


def source_files() -> list[Path]:
    """Return every Python source file of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        path for path in root.rglob("*.py") if "site-packages" not in path.parts and path.is_file()
    )


def decode(path: Path) -> np.ndarray:
    """Read an image file as height x width x 3 bytes."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def read_source(path: Path) -> np.ndarray:
    """Read a source file as bytes."""
    return np.frombuffer(path.read_bytes(), np.uint8)


def rate(nbytes: int, seconds: float) -> str:
    """Write a throughput, and what it is made of."""
    return f"{nbytes / seconds / 1e6:10,.0f} MB/s  ({nbytes / 1e6:,.1f} MB in {seconds:.3f} s)"


def pack(name: str, files: Sequence[Path], load: Callable, ndim: int, target: Path) -> None:
    """Stream files into a jagged tensor, one after the other."""
    start = time.perf_counter()
    spent = 0.0  # in decoding, which is no part of packing
    with JaggedWriter(target, torch.uint8, ndim) as writer:
        for path in tqdm(files, desc=name, unit="file"):
            before = time.perf_counter()
            element = load(path)
            spent += time.perf_counter() - before
            writer.append(element)
    seconds = time.perf_counter() - start - spent
    packed = JaggedTensor.from_filename(target, torch.uint8, mode="r")
    smallest, *_, largest = sorted(len(element) for element in packed)
    print(f"  {len(packed):,} elements, from {smallest:,} to {largest:,} rows")
    print(f"  packed           {rate(packed.nbytes, seconds)}")


def compare(files: Sequence[Path], load: Callable, target: Path) -> bool:
    """Read at random, packed and not packed; return whether both give the same."""
    packed = JaggedTensor.from_filename(target, torch.uint8, mode="r")
    order = np.random.default_rng(0).integers(len(files), size=READS).tolist()
    nbytes = sum(packed[i].nbytes for i in order)

    start = time.perf_counter()
    for i in order:
        packed[i]
    seconds = (time.perf_counter() - start) / READS
    print(f"  one element      {seconds * 1e6:10.1f} us    (a view of the file)")

    start = time.perf_counter()
    for at in range(0, READS, BATCH):
        packed[order[at : at + BATCH]]
    fast = time.perf_counter() - start
    print(f"  read at random   {rate(nbytes, fast)}, in batches of {BATCH}")

    start = time.perf_counter()
    for i in order:
        load(files[i])
    slow = time.perf_counter() - start
    print(f"  without packing  {rate(nbytes, slow)}: {slow / fast:,.0f} times as long")

    gathered = packed[order]
    expected = [load(files[i]) for i in order]
    return all(
        np.array_equal(element.numpy(), array) and np.array_equal(packed[i].numpy(), array)
        for i, element, array in zip(order, gathered, expected, strict=True)
    )


def run(directory: Path) -> bool:
    """Do the whole job in a directory; return whether all elements came back."""
    torch.set_num_threads(1)
    kept = True
    collections = (
        ("images", image_files(), decode, 3),
        ("sources", source_files(), read_source, 1),
    )
    for name, files, load, ndim in collections:
        target = directory / f"{name}.memmap"
        print(name)
        pack(name, files, load, ndim, target)
        same = compare(files, load, target)
        print(f"  {'ok    ' if same else 'BROKEN'} every element that was read is what was packed")
        whole = JaggedTensor.from_filename(target, torch.uint8, mode="r", validate=True)
        complete = len(whole) == len(files)
        print(f"  {'ok    ' if complete else 'BROKEN'} all files are there")
        kept = kept and same and complete

    sources = JaggedTensor.from_filename(directory / "sources.memmap", torch.uint8, mode="r")
    both = mmtensor.cat([sources, sources[::-1]], directory / "both.memmap")
    same = bool(both[0].equal(both[-1]))
    print(f"  {'ok    ' if same else 'BROKEN'} twice as many as one: {len(both):,} elements")
    return kept and same


def main() -> int:
    """Run the example; the exit status is 0 if every element came back."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, help="where the packed files go")
    chosen = parser.parse_args().directory
    if chosen is not None:
        return 0 if run(chosen.resolve(strict=True)) else 1
    with tempfile.TemporaryDirectory() as temporary:
        return 0 if run(Path(temporary).resolve()) else 1


if __name__ == "__main__":
    sys.exit(main())
