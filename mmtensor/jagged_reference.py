"""What of a jagged tensor on files goes to another process: their names, and who they are."""

import errno
import os
from typing import Any

from mmtensor.errors import SizeError, StaleFileError
from mmtensor.jagged_files import Files, names_of
from mmtensor.mapping import FileMapping, map_descriptor
from mmtensor.rawfile import open_existing
from mmtensor.syscalls import file_handle, machine

__all__ = ["refer", "reopen"]


def refer(files: Files) -> tuple[Any, ...] | None:
    """Describe three mapped files for another process in few bytes; None if it cannot be done.

    It cannot if one of them has lost its name to another file, or if a private copy of a
    page exists (mode ``"c"``).
    """
    values = files.values
    if names_of(values.path)[1:] != (files.offsets.path, files.shapes.path):
        return None
    identities = []
    for mapping in files[:3]:
        if not mapping.is_at_path():
            return None
        if mapping.written(0, mapping.nbytes):
            return None
        identities += [mapping.st_dev, mapping.st_ino, mapping.handle()]
    return (
        values.path,
        values.mode.name,
        files.length,
        files.ndim,
        files.total,
        machine(),
        *identities,
    )


def reopen(
    path: str,
    mode: str,
    length: int,
    ndim: int,
    total: int,
    origin: bytes,
    *identities: Any,
    itemsize: int,
) -> Files:
    """Map the files that `refer` described, as they were.

    They may have grown meanwhile, since a writer only ever appends.

    Raises
    ------
    FileNotFoundError
        If one of them is gone.
    SizeError
        If one is too small by now.
    StaleFileError
        If another file has its name.
    """
    names = names_of(path)
    sizes = (total * itemsize, 8 * (length + 1), 8 * length * ndim)
    mappings: list[FileMapping] = []
    for number, (name, nbytes) in enumerate(zip(names, sizes, strict=True)):
        fd, status, found = open_existing(name, mode)
        try:
            if status.st_size < nbytes:
                raise SizeError(
                    f"file {name!r} must have {nbytes} bytes, as when the reference was made, "
                    f"but its size is {status.st_size} bytes."
                )
            if origin == machine():
                device, inode, handle = identities[3 * number : 3 * number + 3]
                if (status.st_dev, status.st_ino) != (device, inode) or (
                    handle and file_handle(fd) != handle
                ):
                    raise StaleFileError(
                        errno.ESTALE,
                        "the file is not the one that the reference was made from. Open it again "
                        "by name, or keep the sender's file in place until the reference has "
                        "arrived",
                        name,
                    )
            mappings.append(map_descriptor(fd, status, name, found, 0, nbytes))
        finally:
            os.close(fd)
    values, offsets, shapes = mappings
    return Files(values, offsets, shapes, length, ndim, total)
