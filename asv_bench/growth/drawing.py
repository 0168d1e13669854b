"""Figures as PNG."""

import io
import itertools
import pathlib
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
)
from PIL import Image

from asv_bench.growth.curves import Curve, Figure, Panel, show_bytes

__all__ = ["draw"]

mpl.use("Agg")

# Colours that stay apart for those who see few (Okabe and Ito), each with a mark of its own.
_STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "-"),
    ("#009E73", "^", "-"),
    ("#CC79A7", "v", "-"),
    ("#E69F00", "D", "-"),
    ("#56B4E9", "P", "-"),
)
# For curves that may lie on each other: what is under a dashed one is seen between its dashes.
_DASHES = ("-", (0, (6, 4)), (0, (1, 1.5)), (3, (6, 4)), (6, (3, 7)), "-")
_KNOWN = ("mmtensor", "tensordict", "numpy", "torch", "safetensors", "mmap_ninja")
Style = tuple[str, str, Any]  # colour, mark, dashes

_GAP = 0.075  # of the height of the axes, between two numbers at the ends of curves


def _styles(figure: Figure) -> dict[str, Style]:
    names = dict.fromkeys(curve.library for panel in figure.panels for curve in panel.curves)
    if set(names) <= set(_KNOWN):
        return {name: _STYLES[_KNOWN.index(name)] for name in names}
    dashes = _DASHES if len(names) > 4 else itertools.repeat("-")
    return {
        name: (colour, mark, dash)
        for name, (colour, mark, _), dash in zip(names, _STYLES, dashes, strict=False)
    }


def _spread(heights: list[float], gap: float) -> list[float]:
    """Move heights apart, so that no two are closer than a gap, and keep them inside."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for _ in range(200):
        for low, high in itertools.pairwise(order):
            overlap = gap - (placed[high] - placed[low])
            if overlap > 0:
                placed[low] -= overlap / 2
                placed[high] += overlap / 2
        placed = [min(max(height, gap / 2), 1 - gap / 2) for height in placed]
    return placed


def _number_the_ends(axes: Any, panel: Panel, styles: dict[str, Any]) -> None:
    """Write the number of each curve beside its last point."""
    if panel.bound is None:
        return
    curves = [curve for curve in panel.curves if len(curve.points) > 1]
    ends = [list(curve.points.items())[-1] for curve in curves]
    pixels = [axes.transData.transform(end) for end in ends]
    places = axes.transAxes.inverted().transform(pixels)
    heights = _spread([y for _, y in places], _GAP)
    for curve, (x, _), height in zip(curves, places, heights, strict=True):
        axes.annotate(
            panel.bound.show(panel.bound.number(curve.points)),
            (x, height),
            xycoords="axes fraction",
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=styles[curve.library][0],
            fontweight="bold" if curve is panel.curves[0] else None,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )


def _plot(axes: Any, curve: Curve, style: Style, *, first: bool, marks: bool) -> None:
    colour, mark, line = style
    axes.plot(
        list(curve.points),
        list(curve.points.values()),
        color=colour,
        linestyle=line,
        linewidth=2.4 if first else 1.5,
        marker=mark if marks else None,
        markersize=5 if first else 4,
        label=curve.library,
        zorder=3,
    )


def _draw_panel(axes: Any, panel: Panel, styles: dict[str, Any], room: float) -> None:
    marks = panel.y_unit == "s"
    # The thick one last, unless others would vanish beneath it.
    for curve in reversed(panel.curves) if marks else panel.curves:
        first = curve is panel.curves[0]
        _plot(axes, curve, styles[curve.library], first=first, marks=marks)
    axes.set_title(panel.title.replace("`", ""), fontsize=10)
    axes.set_xlabel(panel.over + (f" ({panel.x_unit})" if panel.x_unit == "MB" else ""))
    axes.set_ylabel(panel.y_label + (f" ({panel.y_unit})" if panel.y_unit == "MB" else ""))
    axes.grid(visible=True, alpha=0.3)
    if panel.y_unit == "s":
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high / low < 10:  # a decade at least: noise shall not look like growth
            middle = (low * high) ** 0.5
            axes.set_ylim(middle / 10**0.5, middle * 10**0.5)
        few = high / low < 50
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.yaxis.set_major_formatter(EngFormatter("s"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        _, high = axes.get_ylim()
        axes.set_ylim(-0.04 * high, 1.04 * high)  # so that what is flat is not on the frame
        axes.set_xlim(left=0)
    if panel.limit is not None:
        axes.axhline(panel.limit, color="0.45", linewidth=1, zorder=2)
        axes.text(
            0.99,
            panel.limit,
            "limit",
            transform=axes.get_yaxis_transform(),
            color="0.35",
            fontsize=8,
            ha="right",
            va="bottom",
        )
    sizes = list(panel.curves[0].points)
    if panel.x_unit == "B":
        axes.xaxis.set_major_locator(FixedLocator(sizes[::3] if len(sizes) > 7 else sizes[::2]))
        axes.xaxis.set_minor_locator(FixedLocator(sizes))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: show_bytes(value)))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda _value, _position: ""))
    elif len(sizes) < 4:
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    low, high = axes.get_xlim()
    if panel.bound is not None:  # room for the numbers
        log = panel.y_unit == "s"
        axes.set_xlim(right=high * (high / low) ** room if log else high + room * (high - low))


def draw(figure: Figure, path: pathlib.Path) -> None:
    """Draw a figure.

    Parameters
    ----------
    figure
        What was measured.
    path
        The PNG; it is overwritten.
    """
    rows, columns = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}[len(figure.panels)]
    drawing, grid = plt.subplots(
        rows,
        columns,
        figsize=({1: 7, 2: 10.5, 3: 12}[columns], 3.5 * rows + 0.7),
        layout="constrained",
        squeeze=False,
    )
    styles = _styles(figure)
    for axes, panel in zip(grid.flat, figure.panels, strict=True):
        _draw_panel(axes, panel, styles, room=0.2 if columns == 3 else 0.14)
    drawing.suptitle(figure.title.replace("`", ""), fontsize=12)
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    drawing.legend(
        [handles[name] for name in styles],
        list(styles),
        loc="outside lower center",
        ncols=6 if set(styles) <= set(_KNOWN) else 3 if columns > 1 else 2,
        frameon=False,
        title=next(
            f"The number at the end of a curve: {panel.bound.is_}"
            for panel in figure.panels
            if panel.bound is not None
        ),
        title_fontsize=9,
    )
    drawing.draw_without_rendering()  # where the ends of the curves are is known from here on
    for axes, panel in zip(grid.flat, figure.panels, strict=True):
        _number_the_ends(axes, panel, styles)
    buffer = io.BytesIO()
    drawing.savefig(buffer, dpi=90)
    plt.close(drawing)
    with Image.open(buffer) as image:  # 256 colours are enough, at half the size
        image.convert("RGB").quantize(256).save(path, optimize=True)
