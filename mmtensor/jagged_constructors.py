"""The class methods that make a `JaggedTensor`, and what they promise."""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from mmtensor import jagged_bridges
from mmtensor.jagged_files import Files, check_all
from mmtensor.jagged_parts import Parts, filled_parts, make_parts, open_parts
from mmtensor.jagged_source import Elements
from mmtensor.jagged_strings import encoded
from mmtensor.modes import ModeName
from mmtensor.rawfile import Path

__all__ = ["JaggedConstructors"]


class JaggedConstructors:
    """What `JaggedTensor` is made with; each method computes parts and hands them to `_of`."""

    __slots__ = ()

    @classmethod
    def _of(cls, parts: Parts, *window: int) -> Self:
        raise NotImplementedError

    @classmethod
    def from_tensors(
        cls, sequence: Iterable[Any], *, filename: Path | None = None, existsok: bool = False
    ) -> Self:
        """Write tensors or arrays of one dtype to files, or to anonymous shared memory.

        Parameters
        ----------
        sequence
            Tensors or NumPy arrays of one dtype and one number of dimensions; a
            `JaggedTensor` is one.
        filename
            The file of the values, such as ``x.memmap``; ``x.offsets.memmap`` and
            ``x.shape.memmap`` are written beside it.
        existsok
            Whether existing files are replaced. Whoever has them mapped keeps the old ones.

        Returns
        -------
        JaggedTensor
            With mode ``"r+"``.

        Raises
        ------
        DtypeError, ShapeError
            A `TypeError` or `ValueError` that names the element that does not fit.
        ExistingFileError
            A `FileExistsError`: one of the files exists.

        Examples
        --------
        >>> j = JaggedTensor.from_tensors([torch.ones(2, 3), torch.zeros(4, 1)])
        >>> j.shapes.tolist()
        [[2, 3], [4, 1]]
        """
        if isinstance(sequence, JaggedConstructors):
            source: Any = sequence
            return cls._of(
                make_parts(
                    source.dtype, source._table(), source._chunks(), filename, existsok=existsok
                )
            )
        elements = Elements(sequence)
        return cls._of(
            make_parts(
                elements.dtype, elements.shapes, elements.chunks(), filename, existsok=existsok
            )
        )

    @classmethod
    def from_filename(
        cls,
        filename: Path,
        dtype: Any,
        shapes: Any = None,
        mode: ModeName | None = None,
        *,
        validate: bool = False,
    ) -> Self:
        """Open the files of a jagged tensor, without reading them.

        Parameters
        ----------
        filename
            The file of the values, such as ``x.memmap``.
        dtype
            Anything that torch, NumPy or ml_dtypes calls a dtype, or its name.
        shapes
            None: offsets and shapes are in the files beside `filename`. Otherwise a table with
            one row per element, from which the offsets are computed, and `filename` is the
            only file that is opened.
        mode
            As for `MemoryMappedTensor.from_filename`, for all three files.
        validate
            Whether to check the offsets and shapes of all elements. Otherwise the first and
            last offset and the sizes of the files are, and each element as it is read.

        Returns
        -------
        JaggedTensor
            Of all elements that are complete.

        Raises
        ------
        FileNotFoundError
            It names the file that is missing.
        SizeError
            A `ValueError`: the files do not fit together.

        Examples
        --------
        >>> _ = JaggedTensor.from_tensors([torch.ones(2), torch.zeros(3)], filename="j.memmap")
        >>> j = JaggedTensor.from_filename("j.memmap", torch.float32, mode="r")
        >>> len(j), j[1]
        (2, MemoryMappedTensor([0., 0., 0.]))
        """
        parts = open_parts(filename, dtype, shapes, mode)
        if validate and isinstance(parts.source, Files):
            check_all(parts.source)
        return cls._of(parts)

    @classmethod
    def from_nested(
        cls, nested: Tensor, *, filename: Path | None = None, existsok: bool = False
    ) -> Self:
        """Write a torch nested tensor, of either layout; see `from_tensors`.

        Parameters
        ----------
        nested
            Contiguous or not.
        filename, existsok
            As for `from_tensors`.

        Raises
        ------
        TypeError
            If `nested` is no nested tensor.

        Examples
        --------
        >>> nested = torch.nested.nested_tensor(
        ...     [torch.ones(2), torch.zeros(3)], layout=torch.jagged
        ... )
        >>> len(JaggedTensor.from_nested(nested))
        2
        """
        dtype, shapes, chunks = jagged_bridges.read_nested(nested)
        return cls._of(make_parts(dtype, shapes, chunks, filename, existsok=existsok))

    @classmethod
    def from_strings(
        cls,
        strings: Iterable[str | bytes],
        *,
        filename: Path | None = None,
        existsok: bool = False,
    ) -> Self:
        """Write strings as UTF-8, or bytes as they are; see `from_tensors`.

        Parameters
        ----------
        strings
            Any of both.
        filename, existsok
            As for `from_tensors`.

        Returns
        -------
        JaggedTensor
            Of uint8, with one dimension. ``j.strings[i]`` is a str again.

        Examples
        --------
        >>> j = JaggedTensor.from_strings(["zwölf", "", "one"])
        >>> j.strings[0], j[2].tolist()
        ('zwölf', [111, 110, 101])
        """
        shapes, chunks = encoded(strings)
        return cls._of(make_parts(torch.uint8, shapes, chunks, filename, existsok=existsok))

    @classmethod
    def from_awkward(
        cls, array: Any, *, filename: Path | None = None, existsok: bool = False
    ) -> Self:
        """Write an `awkward.Array` of lists of numbers; see `from_tensors`.

        Parameters
        ----------
        array
            Each of its elements must be a rectangular block.
        filename, existsok
            As for `from_tensors`.

        Raises
        ------
        ImportError
            If the package awkward is not installed.
        ShapeError
            A `ValueError`: an element is not rectangular.
        """
        dtype, shapes, chunks = jagged_bridges.read_awkward(array)
        return cls._of(make_parts(dtype, shapes, chunks, filename, existsok=existsok))

    @classmethod
    def empty(
        cls,
        shapes: Any,
        *,
        dtype: Any = None,
        filename: Path | None = None,
        existsok: bool = False,
        preallocate: bool = True,
    ) -> Self:
        """Make elements of zeros with their memory or disk space reserved.

        Parameters
        ----------
        shapes
            A table of integers with one row per element.
        dtype
            None: `torch.get_default_dtype`.
        filename, existsok
            As for `from_tensors`.
        preallocate
            False leaves the file sparse: a full disk then ends the process at some later
            write instead of raising here.

        Returns
        -------
        JaggedTensor
            With mode ``"r+"``: ready to be filled, by several processes at once as well.

        Raises
        ------
        OSError
            ``ENOSPC`` without room; no file is left.

        Examples
        --------
        >>> j = JaggedTensor.empty([[2, 3], [4, 1]], dtype=torch.uint8, filename="e.memmap")
        >>> j[0] = torch.ones(2, 3, dtype=torch.uint8)
        >>> j.values.tolist()
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]
        """
        return cls._of(
            filled_parts(shapes, dtype, 0, filename, existsok=existsok, preallocate=preallocate)
        )

    @classmethod
    def zeros(
        cls,
        shapes: Any,
        *,
        dtype: Any = None,
        filename: Path | None = None,
        existsok: bool = False,
        preallocate: bool = True,
    ) -> Self:
        """Make elements of zeros; parameters and errors as for `empty`.

        Examples
        --------
        >>> JaggedTensor.zeros([[1], [2]])[1]
        MemoryMappedTensor([0., 0.])
        """
        return cls.empty(
            shapes, dtype=dtype, filename=filename, existsok=existsok, preallocate=preallocate
        )

    @classmethod
    def ones(
        cls,
        shapes: Any,
        *,
        dtype: Any = None,
        filename: Path | None = None,
        existsok: bool = False,
    ) -> Self:
        """Make elements of ones; parameters and errors as for `empty`.

        Examples
        --------
        >>> JaggedTensor.ones([[1], [2]], dtype=torch.int64)[1]
        MemoryMappedTensor([1, 1])
        """
        return cls.full(shapes, 1, dtype=dtype, filename=filename, existsok=existsok)

    @classmethod
    def full(
        cls,
        shapes: Any,
        fill_value: Any,
        *,
        dtype: Any = None,
        filename: Path | None = None,
        existsok: bool = False,
    ) -> Self:
        """Make elements with one value everywhere; other parameters as for `empty`.

        Parameters
        ----------
        shapes
            A table of integers with one row per element.
        fill_value
            A number or bool.
        dtype, filename, existsok
            As for `empty`.

        Examples
        --------
        >>> JaggedTensor.full([[1], [2]], 7, dtype=torch.int64)[1]
        MemoryMappedTensor([7, 7])
        """
        return cls._of(filled_parts(shapes, dtype, fill_value, filename, existsok=existsok))
