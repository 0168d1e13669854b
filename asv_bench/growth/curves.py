"""What a curve is, how it is measured, and what number it comes down to."""

import gc
import random
import re
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from tqdm import tqdm

from asv_bench.benchmarks.timing import calibrate, seconds_of_call

__all__ = [
    "FLAT",
    "KEPT",
    "LINEAR",
    "SHARED",
    "Bound",
    "Curve",
    "Figure",
    "Operation",
    "Panel",
    "Settings",
    "measure",
    "show_bytes",
]

# Seconds that one point should take in a round: less than the scheduler's slice, so that
# most rounds are undisturbed even where others compute as well.
_ROUND = 0.002

Points = dict[float, float]


def show_bytes(value: float) -> str:
    """Return a number of bytes in words, by powers of 1024."""
    units = ["B", "KB", "MB", "GB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:g} {units[0]}"


class Settings(NamedTuple):
    """How much is measured.

    Parameters
    ----------
    rounds
        How many rounds the medians are taken over.
    quick
        Whether to leave out every second size.
    """

    rounds: int
    quick: bool

    def sizes(self, *sizes: int) -> list[int]:
        """Return all sizes, or the first, the last and every second one between."""
        if not self.quick:
            return list(sizes)
        return sorted({*sizes[::2], sizes[-1]})


class Bound(NamedTuple):
    """What a curve must not exceed.

    Parameters
    ----------
    is_
        What the number is, in words.
    number
        Computes it from the points of a curve, in ascending order.
    most, least
        The bounds on it; None where there is none.
    unit
        What stands behind the number.
    """

    is_: str
    number: Callable[[Points], float]
    most: float | None = None
    least: float | None = None
    unit: str = "×"

    def show(self, number: float) -> str:
        """Return the number in words."""
        digits = 0 if self.unit == " MB" or number >= 10 else 2
        return f"{number:,.{digits}f}{self.unit}"

    def holds(self, number: float) -> bool:
        """Return whether it is within the bounds."""
        return (self.most is None or number <= self.most) and (
            self.least is None or number >= self.least
        )

    def __str__(self) -> str:
        if self.most is not None:
            return f"≤ {self.most:g}{self.unit}"
        return "–" if self.least is None else f"≥ {self.least:g}{self.unit}"


def _slowest_over_fastest(points: Points) -> float:
    return max(points.values()) / min(points.values())


def _growth_for_each(points: Points) -> float:
    first, *_, last = points
    return (points[last] / last) / (points[first] / first)


def _first_over_second(points: Points) -> float:
    first, second, *_ = points.values()
    return first / second


def _kept(points: Points) -> float:
    return max(points.values()) - next(iter(points.values()))


FLAT = Bound("slowest ÷ fastest point", _slowest_over_fastest, most=1.5)
LINEAR = Bound("time for each, at the most ÷ at the fewest", _growth_for_each, most=1.5)
SHARED = Bound("time with one ÷ with two", _first_over_second, least=1.5)
KEPT = Bound("growth over the pass", _kept, most=100, unit=" MB")


class Curve(NamedTuple):
    """One library in one panel.

    Parameters
    ----------
    library
        Who.
    points
        Values by size, in ascending order of the sizes.
    end
        Why there are no more of them, where not all sizes were measured.
    """

    library: str
    points: Points
    end: str = ""


class Panel(NamedTuple):
    """One pair of axes.

    Parameters
    ----------
    title
        The operation.
    over
        What grows: ``"size of the file"`` and so on, with its unit in `x_unit`.
    curves
        The libraries.
    bound
        What mmtensor's curve must keep to; None: only drawn.
    x_unit, y_unit
        ``"B"`` for bytes, ``"s"`` for seconds, ``"MB"``, or nothing for numbers.
    y_label
        What is measured.
    limit
        Where a line is drawn that no curve can pass; None: nowhere.
    """

    title: str
    over: str
    curves: list[Curve]
    bound: Bound | None
    x_unit: str = ""
    y_unit: str = "s"
    y_label: str = "time"
    limit: float | None = None


class Figure(NamedTuple):
    """What becomes one PNG."""

    name: str
    title: str
    panels: list[Panel]


class Operation(NamedTuple):
    """One operation, prepared for each library and size.

    Parameters
    ----------
    title
        What it is called.
    over
        What the sizes are.
    prepare
        Called with a library and a size; returns what is timed. It raises
        NotImplementedError where the library cannot do it.
    libraries
        Who is asked.
    slow
        Seconds of a call after which a library is asked for no larger size; mmtensor is.
    """

    title: str
    over: str
    prepare: Callable[[str, int], Any]
    libraries: tuple[str, ...]
    slow: float = 0.03


class _Case(NamedTuple):
    """One point of a curve."""

    library: str
    size: int
    benchmark: Any
    number: int


def _prepare(operation: Operation, library: str, size: int) -> _Case:
    call = operation.prepare(library, size)
    benchmark = call if hasattr(call, "before") else SimpleNamespace(call=call)
    # The most of three: who was interrupted would be measured with cold caches from then on.
    number = max(calibrate(benchmark, library, _ROUND) for _ in range(3))
    return _Case(library, size, benchmark, number)


def _cases(operation: Operation, sizes: list[int]) -> tuple[list[_Case], dict[str, str]]:
    """Prepare each library for each size, as far as it gets; return also what ended it."""
    cases, ends = [], {}
    for library in operation.libraries:
        for size in sizes:
            try:
                case = _prepare(operation, library, size)
            except (NotImplementedError, OSError, RuntimeError, MemoryError) as error:
                # The path is another one each time.
                ends[library] = re.sub(r"<\S*>", "…", str(error)) or type(error).__name__
                break
            cases.append(case)
            seconds = seconds_of_call(case.benchmark, library, case.number)
            if seconds > operation.slow and library != "mmtensor" and size != sizes[-1]:
                ends[library] = f"more than {operation.slow:g} s for a call"
                break
    return cases, ends


def measure(operation: Operation, sizes: list[int], settings: Settings) -> list[Curve]:
    """Measure all libraries and sizes in turns, and return medians.

    All points take part in every round, in a random order, so that whatever else the
    machine does hits all of them.
    """
    cases, ends = _cases(operation, sizes)
    times: dict[str, dict[int, list[float]]] = {}
    for case in cases:
        times.setdefault(case.library, {})[case.size] = []
    shuffler = random.Random(0)  # noqa: S311  # the same order in every run
    with tqdm(total=len(cases) * settings.rounds, desc=operation.title, leave=False) as bar:
        for _ in range(settings.rounds):
            for library, size, benchmark, number in shuffler.sample(cases, len(cases)):
                gc.collect()
                times[library][size].append(seconds_of_call(benchmark, library, number))
                bar.update()
    return [
        Curve(
            library,
            {size: statistics.median(rounds) for size, rounds in found.items()},
            ends.get(library, ""),
        )
        for library, found in times.items()
    ]
