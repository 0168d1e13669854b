"""Results of a function for chunks: put together, taken apart, written where they belong."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mmtensor.chunks import Cut, Misfit, are_alike, describe
from mmtensor.errors import MapError
from mmtensor.jobs import JOINED, NOTHING, Outcome

__all__ = ["apart", "joined", "misfit", "naming", "store"]


def joined(place: Cut, outcome: Outcome, first: int) -> list[Any]:
    """Return what is to be concatenated with the rest, in as few pieces as change nothing."""
    results = outcome.value
    if outcome.kind == JOINED:
        return [results]
    with naming(place, range(first, first + len(results)), results, place.join):
        if are_alike(results):
            return [place.join(results)]  # which the worker could not
        return [place.join([one]) for one in results]


@contextmanager
def naming(
    place: Cut,
    chunks: Sequence[int],
    pieces: list[Any],
    join: Callable[[list[Any]], Any],
    sample: Callable[[Any], Any] = lambda piece: piece,
) -> Iterator[None]:
    """Say of pieces that cannot be joined which chunks they are for.

    Parameters
    ----------
    place
        Where chunks are.
    chunks, pieces
        What is joined, and for which chunks it is.
    join
        What may raise.
    sample
        Makes a result to show of a piece.

    Raises
    ------
    MapError
        It names the first piece that does not go with most of the others; a `TypeError` where it
        is no tensor.
    """
    try:
        yield
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        joinable = [_goes(join, [piece]) for piece in pieces]
        if True not in joinable:
            raise  # it is not about one of them
        model = joinable.index(True)
        others = [n for n, piece in enumerate(pieces) if not _goes(join, [pieces[model], piece])]
        if not others:
            raise
        number = others[0]
        if joinable[number] and 2 * len(others) > len(pieces):
            number, model = model, number  # the first of them is the odd one
        message = (
            f"the results of fn must fit together, but for {place.describe(chunks[number])} "
            f"it returned {describe(sample(pieces[number]))}, and for "
            f"{place.describe(chunks[model])} {describe(sample(pieces[model]))}."
        )
        if not joinable[number]:
            raise TypeError(message) from error
        raise MapError(message, chunks[number]) from error


def _goes(join: Callable[[list[Any]], Any], pieces: list[Any]) -> bool:
    try:
        join(pieces)
    except (RuntimeError, TypeError, KeyError, IndexError):
        return False
    return True


def apart(place: Cut, outcome: Outcome, count: int) -> list[Any]:
    """Return the results for a number of chunks one by one."""
    if outcome.kind == NOTHING:
        return [None] * count
    return list(place.apart(outcome.value)) if outcome.kind == JOINED else outcome.value


def store(place: Cut, out: Any, first: int, results: list[Any]) -> None:
    """Write results into `out`, those of the first of some chunks and of the next ones.

    Raises
    ------
    MapError
        It names the chunk whose result does not fit.
    """
    try:
        place.store(out, first, results)
    except Misfit as error:
        cause = error.__cause__
        raise misfit(place, error.chunk, cause) from cause


def misfit(place: Cut, chunk: int, cause: Any) -> MapError:
    """Return the error that says for which chunk a result does not fit, and why."""
    what = place.describe(chunk)
    return MapError(f"the result for {what} cannot be written to out: {cause}", chunk)
