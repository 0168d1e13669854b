"""Writing the three files of a jagged tensor, and putting them in the place of others."""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from mmtensor.jagged_files import Files, locked, marker, names_of
from mmtensor.jagged_layout import Integers
from mmtensor.mapping import map_new
from mmtensor.rawfile import Chunk, NewFile, naming, reserve, write_all, write_chunks

__all__ = ["publish", "write_files"]


def write_files(
    path: str,
    dtype: np.dtype[Any],
    shapes: Integers,
    offsets: Integers,
    chunks: Iterable[Chunk] | None,
    *,
    existsok: bool,
    preallocate: bool = True,
) -> Files:
    """Write the three files and map them with mode ``"r+"``.

    Parameters
    ----------
    path
        Of the values, from `rawfile.absolute`.
    dtype
        Of the values.
    shapes, offsets
        What the side files are to hold.
    chunks
        The bytes of the values; None for zeros.
    existsok, preallocate
        As for `arrays.create_array`.

    Raises
    ------
    ExistingFileError
        If one of the three exists and `existsok` is false.
    """
    names = names_of(path)
    length, ndim = shapes.shape
    total = int(offsets[-1])
    nbytes = total * dtype.itemsize
    with (
        NewFile(names.values, existsok=existsok) as first,
        NewFile(names.offsets, existsok=existsok) as second,
        NewFile(names.shapes, existsok=existsok) as third,
    ):
        with naming(names.values):
            if chunks is None:
                reserve(first.fd, nbytes, preallocate=preallocate)
            else:
                write_chunks(first.fd, chunks, nbytes)
        with naming(names.offsets):
            write_all(second.fd, offsets.data)
        with naming(names.shapes):
            table = shapes.reshape(-1)
            write_all(third.fd, table.data if length or ndim == 1 else marker(ndim))
        files = Files(
            map_new(first.fd, first.path, nbytes),
            map_new(second.fd, second.path, offsets.nbytes),
            map_new(third.fd, third.path, shapes.nbytes),
            length,
            ndim,
            total,
        )
        publish(first, second, third, existsok=existsok)
    return files


def publish(values: NewFile, offsets: NewFile, shapes: NewFile, *, existsok: bool) -> None:
    """Give three new files their names, so that no reader ever mixes two versions.

    Without offsets there is no jagged tensor: they go first and come last. A crash in
    between leaves values and shapes that cannot be opened.
    """
    if existsok:
        # Two that replaced the same one at once would leave the values of one under the
        # offsets of the other.
        with locked(os.path.dirname(offsets.path), shared=False):
            # What may fail for want of room comes before the old one ends.
            for file in (values, shapes, offsets):
                file.name_beside()
            try:
                os.unlink(offsets.path)
            except FileNotFoundError:
                pass
            for file in (values, shapes, offsets):
                file.publish()
        return
    done: list[str] = []
    try:
        for file in (values, shapes, offsets):
            file.publish()
            done.append(file.path)
    except BaseException:
        # Someone else made one of the files meanwhile; these are ours.
        for path in done:
            os.unlink(path)
        raise
