"""Compare mmtensor with its peers and with the limits of the machine, in the same process.

Peers take turns, round after round, so that whatever else the machine does hits all of
them; ratios are taken within a round, and the table shows medians. Each file of benchmarks
has a process of its own: what one leaves in memory would slow the forks of the next. The
exit status is 1 if a target of `asv_bench.targets` is missed. Usage::

    python -m asv_bench.compare [--only PATTERN] [--rounds 9] [--write] [--png FILE]

A pattern is a part of a benchmark's name, such as ``index.`` or ``open.Open``.
"""

import argparse
import datetime as dt
import fnmatch
import gc
import importlib
import importlib.metadata
import inspect
import itertools
import multiprocessing
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from asv_bench.benchmarks import common
from asv_bench.benchmarks.timing import calibrate, seconds_of_call
from asv_bench.targets import GROUPS, TARGETS, Group, Target

__all__ = ["machine", "main"]

_FILES = (
    "index",
    "arithmetic",
    "open",
    "create",
    "write",
    "read",
    "pickle",
    "queue",
    "tensordict",
    "save_load",
    "jagged",
    "map",
    "dataloader",
    "cold",
    "import_time",
    "first_use",
)
_RECORD = 7  # rounds that a table for the record needs
_ROUND = 0.05  # seconds that a round of one library should take
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_DOCUMENT = _ROOT / "docs" / "benchmarks.md"
_BEGIN, _END = "<!-- compare: begin -->", "<!-- compare: end -->"


class Outcome(NamedTuple):
    """What was measured for one operation."""

    name: str
    benchmark: Any
    rounds: dict[str, list[float]]
    nbytes: int | None

    def time(self, library: str) -> float | None:
        """Return the median time of a library in seconds."""
        found = self.rounds.get(library)
        return statistics.median(found) if found else None

    def ratio(self, over: str, under: str = "mmtensor") -> float | None:
        """Return the median over rounds of one library's time over another's."""
        if over not in self.rounds or under not in self.rounds:
            return None
        pairs = zip(self.rounds[over], self.rounds[under], strict=True)
        return statistics.median([a / b for a, b in pairs])


def _benchmarks(pattern: str) -> list[tuple[str, type]]:
    found = []
    for file in _FILES:
        module = importlib.import_module(f"asv_bench.benchmarks.{file}")
        for kind in vars(module).values():
            if (
                isinstance(kind, type)
                and kind.__module__ == module.__name__
                and hasattr(kind, "title")
                and not inspect.isabstract(kind)
            ):
                name = f"{file}.{kind.__name__}"
                if fnmatch.fnmatch(name.lower(), f"*{pattern.lower()}*"):
                    found.append((name, kind))
    return found


def _raw(benchmark: Any) -> Any:
    """Return the method that gives code for a fresh interpreter, under asv's name for it."""
    return next(
        (getattr(benchmark, name) for name in dir(benchmark) if name.startswith("timeraw_")), None
    )


def _time(benchmark: Any, library: str, number: int) -> float:
    """Return the seconds that one of `number` calls takes."""
    if (raw := _raw(benchmark)) is None:
        return seconds_of_call(benchmark, library, number)
    made = raw(library)
    code, before = (made, "") if isinstance(made, str) else made
    code = (
        f"{before}\nimport time; start = time.perf_counter()\n{code}\n"
        "print(time.perf_counter() - start)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return float(run.stdout)


def _calibrate(benchmark: Any, library: str) -> int:
    """Return how many calls take about as long as a round should."""
    return calibrate(benchmark, library, _ROUND) if _raw(benchmark) is None else 1


def measure(name: str, kind: type, rounds: int) -> Outcome:
    """Measure one operation with all libraries that can do it."""
    ready: dict[str, Any] = {}
    times: dict[str, list[float]] = {}
    nbytes = None
    try:
        for library in kind.params[0]:  # type: ignore[attr-defined]  # every benchmark has it
            benchmark = kind()
            try:
                if hasattr(benchmark, "setup"):
                    benchmark.setup(library)
            except NotImplementedError:
                continue
            ready[library] = benchmark
        if hasattr(kind, "track_bytes"):
            nbytes = ready["mmtensor"].track_bytes("mmtensor")
        numbers = {library: _calibrate(b, library) for library, b in ready.items()}
        # A random order, the same in every run: who follows whom decides, for example, in
        # which pieces the free memory is.
        shuffler = random.Random(0)  # noqa: S311
        order = list(ready)
        for _ in range(rounds):
            shuffler.shuffle(order)
            for library in order:
                gc.collect()
                times.setdefault(library, []).append(
                    _time(ready[library], library, numbers[library])
                )
    finally:
        for library, benchmark in ready.items():
            if hasattr(benchmark, "teardown"):
                benchmark.teardown(library)
    return Outcome(name, kind, times, nbytes)


def _measure_all(pattern: str, rounds: int) -> Iterator[Outcome]:
    """Measure what a pattern selects, file after file, each in a new process."""
    found = _benchmarks(pattern)
    context = multiprocessing.get_context("spawn")
    try:
        root = common.root()
        for _, chosen in itertools.groupby(found, key=lambda item: item[0].partition(".")[0]):
            # An executor, since its processes may have children.
            with ProcessPoolExecutor(
                1, mp_context=context, initializer=common.use_root, initargs=(root,)
            ) as process:
                for name, kind in chosen:
                    yield process.submit(measure, name, kind, rounds).result()
    finally:
        common.remove_files()


def judge(outcome: Outcome, target: Target) -> list[tuple[str, bool]]:
    """Return each bound of a target in words, and whether it holds."""
    verdicts = []
    for peer in ("tensordict", "mmap_ninja", "safetensors", "torch"):
        least = getattr(target, peer)
        if least is not None:
            ratio = outcome.ratio(peer)
            verdicts.append((f"{peer} ≥ {least:g}×", ratio is not None and ratio >= least))
    if target.limit is not None:
        ratio = outcome.ratio("mmtensor", outcome.benchmark.limit_column)
        verdicts.append(
            (f"limit ≤ {target.limit:g}×", ratio is not None and ratio <= target.limit)
        )
    if target.bytes_ is not None:
        verdicts.append(
            (
                f"{outcome.nbytes} ≤ {target.bytes_} bytes",
                outcome.nbytes is not None and outcome.nbytes <= target.bytes_,
            )
        )
    if target.more_than_numpy is not None:
        pairs = zip(outcome.rounds["mmtensor"], outcome.rounds["numpy"], strict=True)
        more = statistics.median([a - b for a, b in pairs])
        verdicts.append(
            (f"{more:.3f} ≤ {target.more_than_numpy:g} s more", more <= target.more_than_numpy)
        )
    return verdicts


def judge_group(outcomes: list[Outcome], group: Group) -> tuple[str, bool] | None:
    """Return the verdict on a group in words, and whether it holds; None if not all is there."""
    ratios = {
        outcome.name: ratio
        for outcome in outcomes
        if (not group.members or outcome.name in group.members)
        and (ratio := outcome.ratio("tensordict")) is not None
    }
    if not ratios or not ratios.keys() >= set(group.members):
        return None
    median = statistics.median(ratios.values())
    slow = [
        f"{name} {ratio:.2f}×"
        for name, ratio in ratios.items()
        if ratio < group.exceptions.get(name, group.least)
    ]
    held = median >= group.median and not slow
    bounds = [f"each ≥ {group.least:g}×"]
    bounds += [f"{name} ≥ {least:g}×" for name, least in group.exceptions.items()]
    text = (
        f"{group.name[0].upper()}{group.name[1:]}, tensordict ÷ mmtensor: median {median:.2f}× of "
        f"{len(ratios)} (≥ {group.median:g}×; {', '.join(bounds)}): "
        f"{'holds' if held else '**missed**'}{''.join(f', {item}' for item in slow)}."
    )
    return text, held


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


_HEADER = (
    "| operation | mmtensor | tensordict | mmap_ninja | safetensors | NumPy | torch | limit "
    "| what the limit is | tensordict ÷ mmtensor | mmtensor ÷ limit | target | |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(outcome: Outcome) -> tuple[str, bool]:
    """Return a row of the table, and whether its targets hold."""
    target = TARGETS.get(outcome.name)
    verdicts = judge(outcome, target) if target else []
    held = all(ok for _, ok in verdicts)
    column = outcome.benchmark.limit_column
    cells = [
        outcome.benchmark.title,
        _duration(outcome.time("mmtensor")),
        _duration(outcome.time("tensordict")),
        _duration(outcome.time("mmap_ninja")),
        _duration(outcome.time("safetensors")),
        _duration(outcome.time("numpy")),
        _duration(outcome.time("torch")),
        _duration(outcome.time(column)),
        outcome.benchmark.limit_is or "–",
        _times(outcome.ratio("tensordict")),
        _times(outcome.ratio("mmtensor", column)),
        ", ".join(text if ok else f"**{text}**" for text, ok in verdicts) or "–",
        "" if not verdicts else "holds" if held else "**missed**",
    ]
    return "| " + " | ".join(cells) + " |", held


def machine() -> str:
    """Return the date, the versions and the machine, as a sentence for a table."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "tensordict")
    )
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    return (
        f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}, mmtensor "
        f"{common.mmtensor.__version__}, Python {platform.python_version()}, {versions}; "
        f"{platform.system()} {platform.release()}, {model}, {os.cpu_count()} cores"
    )


def _draw(outcomes: list[Outcome], path: pathlib.Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415  # only with the extra `bench`

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    shown = [o for o in outcomes if o.ratio("tensordict") is not None]
    figure, axes = plt.subplots(figsize=(9, 0.2 * len(shown) + 1.4), layout="constrained")
    for peer in ("tensordict", "numpy", "torch", "mmap_ninja", "safetensors"):
        points = [(r, -i) for i, o in enumerate(shown) if (r := o.ratio(peer)) is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), label=peer, zorder=3)
    axes.axvline(1, color="0.4")
    axes.set_xscale("log")
    axes.set_yticks(
        [-i for i in range(len(shown))], [o.benchmark.title.replace("`", "") for o in shown]
    )
    axes.set_ylim(0.6 - len(shown), 0.4)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("time ÷ that of mmtensor; right of the line, mmtensor is faster")
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    axes.grid(visible=True, axis="both", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.compare", description=__doc__)
    parser.add_argument(
        "--only", default="", help="part of the name, for example index or open.Open"
    )
    parser.add_argument("--rounds", type=int, default=9, help="at least 7 for the record")
    parser.add_argument("--write", action="store_true", help=f"write {_DOCUMENT.name}")
    parser.add_argument("--png", type=pathlib.Path, help="draw the ratios")
    options = parser.parse_args(arguments)
    if options.write and (options.only or options.rounds < _RECORD):
        parser.error(f"--write needs the whole table and at least {_RECORD} rounds")
    if not _benchmarks(options.only):
        names = ", ".join(name for name, _ in _benchmarks(""))
        parser.error(f"no benchmark has {options.only!r} in its name: {names}")
    print(f"{machine()}; medians of {options.rounds} rounds.", _HEADER, sep="\n\n", flush=True)
    outcomes, rows, missed = [], [], []
    for outcome in _measure_all(options.only, options.rounds):
        text, held = row(outcome)
        print(text, flush=True)
        outcomes.append(outcome)
        rows.append(text)
        if not held:
            missed.append(outcome.name)
    verdicts = []
    for group in GROUPS:
        # What is said of all can be judged by all only.
        if (group.members or not options.only) and (found := judge_group(outcomes, group)):
            verdicts.append(found[0])
            if not found[1]:
                missed.append(group.name)
    verdicts.append(
        f"{len(missed)} missed: {', '.join(missed)}." if missed else "All targets hold."
    )
    verdict = "\n\n".join(verdicts)
    print(f"\n{verdict}")
    if options.png:
        _draw(outcomes, options.png)
    if options.write:
        text = "\n".join([_HEADER, *rows])
        _write(f"{machine()}; medians of {options.rounds} rounds.\n\n{text}\n\n{verdict}\n")
    return 1 if missed else 0


def _write(table: str) -> None:
    """Put the table between the marks in the document."""
    before, rest = _DOCUMENT.read_text(encoding="utf-8").split(_BEGIN)
    after = rest.split(_END)[1]
    _DOCUMENT.write_text(f"{before}{_BEGIN}\n\n{table}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
