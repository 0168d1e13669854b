"""How long one call takes: the same for asv and for `asv_bench.compare`."""

import gc
import statistics
import time
import timeit
from typing import Any

__all__ = ["calibrate", "seconds_of_call"]

_MOST, _MOST_FILES = 20_000, 300  # calls in a round


def seconds_of_call(benchmark: Any, library: str, number: int) -> float:
    """Return the seconds that one of `number` calls takes.

    Parameters
    ----------
    benchmark
        A `common.Comparison` after its `setup`. One that makes an argument for each call
        (it has `before`) is timed call by call, the others in a loop.
    library
        Whose inputs it has.
    number
        How often to call it.
    """
    if hasattr(benchmark, "before"):
        # A journal that is written meanwhile takes milliseconds: the median of the calls.
        seconds = []
        clock = time.perf_counter
        call = benchmark.call
        for _ in range(number):
            argument = benchmark.before(library)
            start = clock()
            call(argument)
            seconds.append(clock() - start)
            benchmark.after(argument)
        return statistics.median(seconds)
    if hasattr(benchmark, "statement"):  # a call around an expression would distort it
        timer = timeit.Timer(
            benchmark.statement, "gc.enable()", globals={**benchmark.names, "gc": gc}
        )
    else:
        timer = timeit.Timer(benchmark.call, "gc.enable()", globals={"gc": gc})
    return timer.timeit(number) / number


def calibrate(benchmark: Any, library: str, length: float) -> int:
    """Return how many calls take about `length` seconds, what is not timed included."""
    number = 1
    most = _MOST_FILES if hasattr(benchmark, "before") else _MOST
    while True:
        seconds = _seconds_of_round(benchmark, library, number)
        if seconds > length / 5 or number >= most:
            if seconds < 4 * length:
                # Whatever held it up just then would leave rounds of a few calls, all cold.
                seconds = min(seconds, _seconds_of_round(benchmark, library, number))
            return max(1, min(most, round(number * length / seconds)))
        number *= 4


def _seconds_of_round(benchmark: Any, library: str, number: int) -> float:
    start = time.perf_counter()
    seconds_of_call(benchmark, library, number)
    return time.perf_counter() - start
