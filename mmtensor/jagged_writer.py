"""`JaggedWriter`: appends elements to the files of a jagged tensor, safe against crashes."""

import errno
import os
import struct
import sys
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

from mmtensor.dtypes import numpy_dtype
from mmtensor.errors import DtypeError
from mmtensor.jagged import JaggedTensor
from mmtensor.jagged_files import (
    Names,
    Opened,
    ReplacedError,
    marked,
    marker,
    names_of,
)
from mmtensor.jagged_saving import publish
from mmtensor.jagged_source import bytes_of, rejection
from mmtensor.rawfile import NewFile, Path, absolute, write_all
from mmtensor.storage import native_dtype

if sys.platform != "win32":
    import fcntl

__all__ = ["JaggedWriter"]

# Bytes of values, and elements, that are collected before they are written.
_BUFFER = 1 << 20
_PENDING = 1 << 14
_BYTES = (bytes, bytearray, memoryview)


class JaggedWriter:
    """Appends elements to the files of a jagged tensor.

    What was appended can be read after the next `flush`, which happens by itself whenever
    about 1 MiB is waiting, and on closing. The offsets are written last: after a crash at any
    moment, the files open as a jagged tensor of the elements that were complete, and
    ``append=True`` goes on from there. Tensors that are open meanwhile keep the elements that
    they have.

    Use it as a context manager, or call `close`.

    Parameters
    ----------
    filename
        The file of the values, such as ``x.memmap``; ``x.offsets.memmap`` and
        ``x.shape.memmap`` are beside it.
    dtype
        Anything that torch, NumPy or ml_dtypes calls a dtype, or its name.
    ndim
        Number of dimensions of each element.
    append
        Whether to go on at the end of existing files; where there are none, they are made.
    existsok
        Whether existing files are replaced. Whoever has them mapped keeps the old ones.

    Raises
    ------
    ExistingFileError
        A `FileExistsError`: one of the files exists, and neither `append` nor `existsok` is
        true.
    BlockingIOError
        If another writer has the files open.
    ShapeError, DtypeError, SizeError
        If the existing files do not fit `ndim` or `dtype`.

    Examples
    --------
    >>> with mmtensor.JaggedWriter("w.memmap", torch.float32, ndim=2) as writer:
    ...     writer.append(torch.ones(2, 3))
    ...     writer.extend([torch.zeros(1, 1), torch.zeros(0, 5)])
    >>> mmtensor.JaggedTensor.from_filename("w.memmap", torch.float32).shapes.tolist()
    [[2, 3], [1, 1], [0, 5]]
    """

    def __init__(
        self,
        filename: Path,
        dtype: Any,
        ndim: int = 1,
        *,
        append: bool = False,
        existsok: bool = False,
    ) -> None:
        self._fds: list[int] = []
        self._process = os.getpid()
        self.dtype = native_dtype(dtype)
        if type(ndim) is not int or ndim < 0:
            raise ValueError(f"ndim must be a non-negative integer, got {ndim!r}.")
        self.ndim = ndim
        self._names = names_of(absolute(filename))
        self._length = 0  # elements in the files
        self._total = 0  # numbers in them
        if append and self._is_there():
            self._open()
        else:
            remains = append and any(map(os.path.lexists, self._names))
            self._create(existsok=existsok or remains)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._filled = 0  # bytes in the buffer
        self._written = self._total * self.dtype.itemsize  # bytes of values in the file
        self._sizes: list[int] = []  # of the elements that are waiting
        self._stops: list[int] = []
        _writers.add(self)

    def _is_there(self) -> bool:
        """Whether there is something to append to, not just the remains of a first moment."""
        if os.path.exists(self._names.offsets):
            return True
        try:
            # A writer that was killed before it had offsets left no values either. Values
            # without offsets are somebody's: opening says what is missing.
            return os.stat(self._names.values).st_size > 0
        except FileNotFoundError:
            return False

    def _create(self, *, existsok: bool) -> None:
        names = self._names
        with (
            NewFile(names.values, existsok=existsok) as values,
            NewFile(names.offsets, existsok=existsok) as offsets,
            NewFile(names.shapes, existsok=existsok) as shapes,
        ):
            write_all(offsets.fd, struct.pack("=q", 0))
            write_all(shapes.fd, self._mark())
            try:
                self._hold(values.fd, offsets.fd, shapes.fd)
                _lock(self._fds[1], names)
                publish(values, offsets, shapes, existsok=existsok)
            except BaseException:
                self._release()
                raise
        self._marker = 0  # where the marker stands in the file of shapes

    def _mark(self) -> bytes:
        return marker(self.ndim, self.dtype.itemsize)

    def _hold(self, *fds: int) -> None:
        self._fds = []
        for fd in fds:  # one by one: those from before the last one that there is are closed
            self._fds.append(os.dup(fd))

    def _open(self) -> None:
        try:
            with Opened(self._names, "r+", numpy_dtype(self.dtype), self.ndim) as found:
                self._hold(found.values[0], found.offsets[0], found.shapes[0])
                _lock(self._fds[1], self._names)
                found.check_still()
                self._length, self._total = found.length, found.total
                end = 8 * self._length * self.ndim
                size = -(-found.shapes[1].st_size // 8) * 8
                told = marked(os.pread(self._fds[2], 8, size - 8)) if size > end else None
                # Where there is none, behind whatever an unfinished append has left.
                self._marker = size - 8 if told else max(end, size)
                if not told or not told[1]:
                    write_all(self._fds[2], self._mark(), self._marker)
        except ReplacedError:
            self._release()
            raise FileNotFoundError(
                errno.ENOENT, "the jagged tensor is being replaced just now", self._names.values
            ) from None
        except BaseException:
            self._release()
            raise

    # --- appending ---------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length + len(self._stops)

    @property
    def filename(self) -> str:
        """The absolute path of the file of the values."""
        return self._names.values

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._fds

    def append(self, element: Any) -> None:
        """Append one element.

        Parameters
        ----------
        element
            A tensor or NumPy array of the writer's dtype and number of dimensions; where
            these are uint8 and 1, also bytes, or a str, which is written as UTF-8.

        Raises
        ------
        DtypeError, ShapeError
            A `TypeError` or `ValueError`: it has another dtype or number of dimensions.
            Nothing is written.
        """
        if not self._fds:
            raise self._unusable()
        if (
            type(element) is not Tensor
            or element.dtype is not self.dtype
            or element.dim() != self.ndim
            or element.requires_grad
            or element.layout is not torch.strided
        ):
            element = self._checked(element)
        array = bytes_of(element)
        nbytes = array.nbytes
        # Before the element is taken: one that could not be, for want of room, can come again.
        if nbytes > _BUFFER - self._filled or len(self._stops) >= _PENDING:
            self.flush()
        if nbytes > _BUFFER:
            # Straight to its place; it counts once its offset is written.
            self._written = write_all(
                self._fds[0], array.reshape(-1).view(np.uint8).data, self._written
            )
        elif nbytes:
            end = self._filled + nbytes
            self._buffer[self._filled : end] = array.reshape(-1).view(np.uint8).data
            self._filled = end
        self._sizes += element.shape
        self._stops.append((self._written + self._filled) // self.dtype.itemsize)

    def _checked(self, element: Any) -> Any:
        if isinstance(element, (str, *_BYTES)) and self.dtype is torch.uint8 and self.ndim == 1:
            data = element.encode() if isinstance(element, str) else element
            return np.frombuffer(data, np.uint8)
        error = rejection(element, self.dtype, self.ndim, f"element {len(self)}", "the writer has")
        if error is not None:
            raise error
        return element

    def extend(self, elements: Iterable[Any], pbar: bool = False) -> None:
        """Append the elements of an iterable; see `append`.

        Parameters
        ----------
        elements
            Tensors or arrays, from any iterable. A `JaggedTensor` is copied as a whole.
        pbar
            Whether to show a progress bar.

        Raises
        ------
        DtypeError, ShapeError
            It names the element that does not fit; those before it are appended.
        """
        if isinstance(elements, JaggedTensor):
            self._extend_jagged(elements, pbar=pbar)
            return
        for element in tqdm(elements, unit="element") if pbar else elements:
            self.append(element)

    def _extend_jagged(self, elements: JaggedTensor, *, pbar: bool) -> None:
        if not self._fds:
            raise self._unusable()
        if elements.dtype != self.dtype or elements.ndim != self.ndim:
            raise DtypeError(
                f"the elements have dtype {elements.dtype} and {elements.ndim} dimensions, but "
                f"the writer has {self.dtype} and {self.ndim}."
            )
        with tqdm(total=len(elements), unit="element", disable=not pbar) as bar:
            for start in range(0, len(elements), _PENDING):
                part = elements[start : start + _PENDING]
                self.flush()
                end = self._written
                base = end // self.dtype.itemsize
                for chunk in part._chunks():
                    end = write_all(self._fds[0], chunk, end)
                starts, stops = part._bounds()
                # Only now: where there was no room for all of it, none of it counts.
                self._written = end
                self._sizes = part._table().reshape(-1).tolist()
                self._stops = ((stops - starts).cumsum() + base).tolist()
                self.flush()
                bar.update(len(part))

    def flush(self, *, durable: bool = False) -> None:
        """Hand everything that was appended to the kernel: from now on readers find it.

        Parameters
        ----------
        durable
            Whether to wait until it is on stable storage, so that it outlives a power failure
            as well.

        Raises
        ------
        OSError
            ``ENOSPC`` without room. Nothing is lost: the elements wait for the next flush.
        """
        if not self._fds:
            raise self._unusable()
        values, offsets, shapes = self._fds
        if self._filled:
            write_all(values, self._buffer[: self._filled], self._written)
            self._written += self._filled
            self._filled = 0
        if self._stops:
            length = self._length + len(self._stops)
            end = 8 * length * self.ndim
            # The last number in the file always is the marker: it goes ahead of the rows.
            if end > self._marker:
                write_all(shapes, self._mark(), end)
                self._marker = end
            count = len(self._sizes)
            write_all(shapes, struct.pack(f"={count}q", *self._sizes), end - 8 * count)
        if durable:
            os.fsync(values)
            os.fsync(shapes)
        if self._stops:
            count = len(self._stops)
            write_all(offsets, struct.pack(f"={count}q", *self._stops), 8 * (self._length + 1))
            self._total = self._stops[-1]
            self._length = length
            self._sizes, self._stops = [], []
        if durable:
            os.fsync(offsets)

    def close(self) -> None:
        """Write everything and close the files; a second call does nothing.

        What an earlier append, that did not finish, has left behind the data is cut off.
        """
        if not self._fds:
            return
        self.flush()  # without room it raises, and the writer stays open
        try:
            values, offsets, shapes = self._fds
            # Readers map what the offsets speak of, and nothing behind it.
            _cut(values, self._total * self.dtype.itemsize)
            _cut(offsets, 8 * (self._length + 1))
            if self._length or self.ndim == 1:
                _cut(shapes, 8 * self._length * self.ndim)
            else:
                write_all(shapes, marker(self.ndim))
                _cut(shapes, 8)
        finally:
            self._release()

    def _unusable(self) -> ValueError:
        if os.getpid() != self._process:
            return ValueError(
                f"the writer belongs to process {self._process}, from which this one was forked. "
                "Send the elements there, or fill JaggedTensor.empty(shapes, filename=...) from "
                "several processes."
            )
        return ValueError("the writer is closed.")

    def _release(self) -> None:
        fds, self._fds = self._fds, []
        if len(fds) == 3 and os.getpid() == self._process:
            _unlock(fds[1])
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fds", None):
            try:
                if hasattr(self, "_stops"):
                    self.close()
            finally:
                self._release()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._names.values!r}, {self.dtype}, ndim={self.ndim}, "
            f"len={len(self)}{', closed' if self.closed else ''})"
        )


# Writers of this process that may be open.
_writers: "weakref.WeakSet[JaggedWriter]" = weakref.WeakSet()


def _disown() -> None:
    """Let go of the writers that a forked child has inherited.

    Closing one there would write what is pending a second time, and cut the files to what
    the child knows of them; its descriptors would keep the lock as well.
    """
    for writer in list(_writers):
        writer._release()
    _writers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


def _cut(fd: int, size: int) -> None:
    if os.fstat(fd).st_size > size:
        os.ftruncate(fd, size)


def _unlock(fd: int) -> None:
    """Let others write, even if a child process still has the descriptor."""
    if sys.platform != "win32":
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError:
            pass


def _lock(fd: int, names: Names) -> None:
    """Keep a second writer out, until this one closes its files or dies."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            errno.EWOULDBLOCK, "another writer has the jagged tensor open", names.values
        ) from None
    except OSError:
        pass  # a file system without locks: then nobody checks
