"""Measure and draw how cost grows with size.

Each figure becomes a PNG, each curve a number in a table: how much slower the largest is
than the smallest, for example. The exit status is 1 if a bound is missed. Usage::

    python -m asv_bench.growth [--only NAME] [--directory DIR] [--quick] [--write]
"""

import argparse
import gc
import pathlib
import sys
from collections.abc import Callable

from asv_bench.benchmarks import common
from asv_bench.compare import machine
from asv_bench.growth.curves import Figure, Settings
from asv_bench.growth.drawing import draw
from asv_bench.growth.elements import measure_elements
from asv_bench.growth.files import measure_files
from asv_bench.growth.leaves import measure_leaves
from asv_bench.growth.memory import measure_memory
from asv_bench.growth.report import HEADER, ends, missed, rows, write
from asv_bench.growth.workers import measure_workers

__all__ = ["main"]

_FIGURES: dict[str, Callable[[Settings], Figure]] = {
    "files": measure_files,
    "elements": measure_elements,
    "leaves": measure_leaves,
    "workers": measure_workers,
    "memory": measure_memory,
}
_ROUNDS, _ROUNDS_QUICK = 25, 5
_DOCUMENTS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def main(arguments: list[str] | None = None) -> int:
    """Measure, draw and print; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.growth", description=__doc__)
    parser.add_argument("--only", choices=_FIGURES, help="one figure")
    parser.add_argument(
        "--directory",
        type=pathlib.Path,
        default=pathlib.Path("growth"),
        help="where the PNGs go (growth)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, 5 rounds")
    parser.add_argument("--write", action="store_true", help="write docs/growth.md and its PNGs")
    options = parser.parse_args(arguments)
    if options.write and (options.only or options.quick):
        parser.error("--write needs all figures, each with all sizes")
    directory = _DOCUMENTS / "images" if options.write else options.directory
    directory.mkdir(parents=True, exist_ok=True)
    rounds = _ROUNDS_QUICK if options.quick else _ROUNDS
    settings = Settings(rounds, options.quick)
    table, ended, failed = [], [], []
    common.Files.keep = True
    gc.freeze()  # what was imported is not looked through before each measurement
    try:
        for name in [options.only] if options.only else _FIGURES:
            figure = _FIGURES[name](settings)
            path = directory / f"growth-{name}.png"
            draw(figure, path)
            table += rows(figure)
            ended += ends(figure)
            failed += missed(figure)
            print(f"{path}: {figure.title}", file=sys.stderr)
    finally:
        common.remove_files()
    verdict = f"{len(failed)} missed: {'; '.join(failed)}." if failed else "All bounds hold."
    text = "\n\n".join(
        (
            f"{machine()}; medians of {rounds} rounds (leaves and workers: {min(rounds, 5)}).",
            "\n".join((HEADER, *table)),
            verdict,
            *(["Curves that end early:"] if ended else []),
            *(["\n".join(f"- {end}" for end in ended)] if ended else []),
        )
    )
    print(text)
    if options.write:
        write(_DOCUMENTS / "growth.md", text)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
