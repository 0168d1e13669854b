"""Cutting a container along a batch dimension, and joining what became of the pieces."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmtensor import joining
from mmtensor.geometry import as_count
from mmtensor.leaves import name_path
from mmtensor.shaping import dimension
from mmtensor.tree import Tree

__all__ = ["Cut", "Misfit", "are_alike", "cut", "describe"]

# Results of up to so many bytes are written together: a call takes longer than the copy.
_SMALL = 1 << 15


class Misfit(Exception):  # noqa: N818  # it is never seen outside
    """A result does not fit where it is to be written; the cause says why.

    Parameters
    ----------
    chunk
        Whose result it is.
    """

    def __init__(self, chunk: int) -> None:
        super().__init__(chunk)
        self.chunk = chunk


class Cut:
    """Chunks along a dimension: where each is, by its number.

    Parameters
    ----------
    dim
        Along which batch dimension.
    length
        Size of that dimension.
    size
        Elements in a chunk; 0: each element is one, without the dimension.

    Attributes
    ----------
    count : int
        The number of chunks. Nothing at all is one empty chunk, but no element.
    """

    __slots__ = ("count", "dim", "length", "size")

    def __init__(self, dim: int, length: int, size: int) -> None:
        self.dim = dim
        self.length = length
        self.size = size
        self.count = length if size == 0 else max(1, -(-length // size))

    def _index(self, part: int | slice) -> Any:
        return part if self.dim == 0 else (*[slice(None)] * self.dim, part)

    def index(self, number: int) -> Any:
        """Return the index of a chunk."""
        if self.size == 0:
            return self._index(number)
        start = number * self.size
        return self._index(slice(start, min(start + self.size, self.length)))

    def range(self, first: int, last: int) -> Any:
        """Return the index of the chunks from `first` to before `last`, as one."""
        step = self.size or 1
        return self._index(slice(first * step, min(last * step, self.length)))

    def describe(self, number: int) -> str:
        """Say which chunk it is, for messages."""
        if self.size == 0:
            return f"chunk {number} of {self.count} (element {number} of dimension {self.dim})"
        start = number * self.size
        stop = min(start + self.size, self.length)
        return (
            f"chunk {number} of {self.count} (elements {start} to {stop} of dimension {self.dim})"
        )

    def join(self, results: list[Any]) -> Any:
        """Stack or concatenate what a function made of consecutive chunks.

        Raises
        ------
        TypeError
            If they are not all tensors, or all TensorDicts.
        RuntimeError
            If their shapes do not fit.
        """
        if self.size:
            self._check_dimensions(results)
        if _are_trees(results):
            return (joining.cat if self.size else joining.stack)(results, self.dim)
        return (torch.cat if self.size else torch.stack)(results, self.dim)

    def _check_dimensions(self, results: list[Any]) -> None:
        """Raise if a result has no dimension to be concatenated along."""
        for result in results:
            if isinstance(result, Tree):
                what, shape = "a TensorDict with batch size", tuple(result._batch_size)
            elif isinstance(result, Tensor):
                what, shape = "a tensor of shape", tuple(result.shape)
            else:
                continue
            if len(shape) <= self.dim:
                raise RuntimeError(
                    f"results of chunks are concatenated along dimension {self.dim}, but fn has "
                    f"returned {what} {shape}. Return a row for each element, result[None] for "
                    "one row per chunk, or pass chunksize=0, where results are stacked."
                )

    def concatenate(self, joined: list[Any]) -> Any:
        """Concatenate what `join` made of consecutive results; always a copy."""
        if _are_trees(joined):
            return joining.cat(joined, self.dim)
        return torch.cat(joined, self.dim)

    def apart(self, joined: Any) -> Any:
        """Take stacked results apart again, as views."""
        return joined.unbind(self.dim)

    def sample(self, joined: Any) -> Any:
        """Return the first of results that `join` has put together, or all of them."""
        return self.apart(joined)[0] if self.size == 0 else joined

    def store(self, out: Any, first: int, results: list[Any]) -> None:
        """Write the results for consecutive chunks to where they belong.

        Parameters
        ----------
        out
            A tensor or container.
        first
            Number of the first chunk.
        results
            One for each chunk.

        Raises
        ------
        Misfit
            It says which one does not fit.
        """
        if (
            len(results) > 1
            and _is_small(results[0])
            and self._have_their_lengths(first, results)
            and are_alike(results)
            and self._store_joined(out, first, results)
        ):
            return
        for number, result in enumerate(results, first):
            try:
                _check_result(out, result)
                out[self.index(number)] = result
            except Exception as error:
                raise Misfit(number) from error

    def _have_their_lengths(self, first: int, results: list[Any]) -> bool:
        """Whether each result is as long as its chunk: the next one begins where it ends."""
        if self.size == 0:
            return True
        for number, result in enumerate(results, first):
            shape = getattr(result, "_batch_size" if isinstance(result, Tree) else "shape", ())
            length = min(self.size, self.length - number * self.size)
            if len(shape) <= self.dim or shape[self.dim] != length:
                return False
        return True

    def _store_joined(self, out: Any, first: int, results: list[Any]) -> bool:
        """Write results in one go if that does the same; return whether it was done."""
        try:
            joined = self.join(results)
        except (RuntimeError, TypeError, KeyError, IndexError):
            return False  # whichever is to blame is found one by one
        place = out[self.range(first, first + len(results))]
        if isinstance(joined, Tensor):
            # Any other shape would be broadcast another way than its parts are.
            if not isinstance(place, Tensor) or not _is_like(joined, place):
                return False
            place.copy_(joined)
            return True
        if not isinstance(place, Tree):
            return False
        pairs = list(_beside(place, joined))
        for _, leaf, target in pairs:
            if (
                not isinstance(leaf, Tensor)
                or not isinstance(target, Tensor)
                or not _is_like(leaf, target)
            ):
                return False
        for _, leaf, target in pairs:
            target.copy_(leaf)
        return True


def _are_trees(results: list[Any]) -> bool:
    """Whether they are all TensorDicts, and not all tensors.

    Raises
    ------
    TypeError
        If they are neither.
    """
    trees = sum(isinstance(result, Tree) for result in results)
    if trees == len(results):
        return True
    if trees or not all(isinstance(result, Tensor) for result in results):
        kinds = sorted({type(result).__name__ for result in results})
        raise TypeError(
            "fn must return tensors for every chunk, or TensorDicts, or None, got "
            f"{' and '.join(kinds)}. map_iter takes whatever fn returns."
        )
    return False


def are_alike(results: list[Any]) -> bool:
    """Whether joining results changes no value of them: of one dtype, leaf by leaf.

    Of several dtypes torch makes one that has room for all, and not for all of their digits.
    """
    return len({_dtypes(result) for result in results}) <= 1


def _dtypes(result: Any) -> Any:
    if isinstance(result, Tree):
        return frozenset((path, getattr(leaf, "dtype", None)) for path, leaf in result._flat())
    return getattr(result, "dtype", None)


def _is_like(value: Tensor, target: Tensor) -> bool:
    return value.shape == target.shape and torch.can_cast(value.dtype, target.dtype)


def _check_result(out: Any, result: Any) -> None:
    """Raise if `out` cannot hold what a result may be: leaves, fractions, imaginary parts.

    As ``out=`` of torch does, and unlike an assignment.
    """
    if not isinstance(result, Tensor | Tree) or isinstance(result, Tree) != isinstance(out, Tree):
        what = "a TensorDict" if isinstance(out, Tree) else "a tensor"
        raise TypeError(
            f"with out=, fn must return a tensor or TensorDict for every chunk, as out is: "
            f"{what}, got {type(result)!r}."
        )
    for path, leaf, target in _beside(out, result):
        if (
            isinstance(leaf, Tensor)
            and isinstance(target, Tensor)
            and not torch.can_cast(leaf.dtype, target.dtype)
        ):
            what = f"leaf {name_path(path)}" if path else "the result"
            raise TypeError(
                f"{what} is of {leaf.dtype}, which {target.dtype} of out cannot hold. Convert it "
                f"in fn, for example with .to({target.dtype}), or make out of {leaf.dtype}."
            )


def _beside(out: Any, result: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield path and leaf of a result, or itself, and what is there in `out`; None: nothing."""
    if not isinstance(result, Tree):
        yield (), result, out
        return
    for path, leaf in result._flat():
        target = out
        for key in path:
            inside = isinstance(target, Tree) and key in target._names()
            target = target._leaves[key] if inside else None
        yield path, leaf, target


def describe(result: Any) -> str:
    """Say what a result is, for messages."""
    if isinstance(result, Tree):
        leaves = [
            f"{name_path(path)} of {list(leaf.shape)}"
            if isinstance(leaf, Tensor)
            else name_path(path)
            for path, leaf in result._flat()
        ]
        more = ", ..." if len(leaves) > 10 else ""
        return f"a TensorDict of {list(result._batch_size)} with {', '.join(leaves[:10])}{more}"
    if isinstance(result, Tensor):
        return f"a tensor of {list(result.shape)}"
    return "None" if result is None else f"{type(result)!r}"


def _is_small(result: Any) -> bool:
    if isinstance(result, Tree):
        return sum(getattr(leaf, "nbytes", 0) for _, leaf in result._flat()) <= _SMALL
    return getattr(result, "nbytes", 0) <= _SMALL


def cut(tree: Tree, dim: int, chunksize: int | None, num_chunks: int | None, workers: int) -> Cut:
    """Decide how a container is cut.

    Parameters
    ----------
    tree
        What is cut.
    dim
        A batch dimension; negative ones count from the last.
    chunksize, num_chunks
        One of them at most.
    workers
        The number of chunks where neither is given.

    Raises
    ------
    ValueError
        If both are given, or one is out of range.
    RuntimeError
        If there is no batch dimension.
    """
    if not tree._batch_size:
        raise RuntimeError("a TensorDict without batch dimensions cannot be cut into chunks.")
    if chunksize is not None and num_chunks is not None:
        raise ValueError(
            f"give chunksize or num_chunks, got both: {chunksize!r} and {num_chunks!r}."
        )
    try:
        at = dimension(dim, len(tree._batch_size))
    except IndexError as error:
        raise IndexError(f"dim: {error} Pass the number of workers as num_workers=.") from None
    length = tree._batch_size[at]
    if chunksize is not None:
        return Cut(at, length, as_count("chunksize", chunksize))
    number = workers if num_chunks is None else as_count("num_chunks", num_chunks, 1)
    return Cut(at, length, max(1, -(-length // number)))
