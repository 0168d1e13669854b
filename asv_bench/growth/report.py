"""The numbers that curves come down to, as a table, and the page that has it."""

import pathlib

from asv_bench.growth.curves import Bound, Curve, Figure, Panel, show_bytes

__all__ = ["HEADER", "ends", "missed", "rows", "write"]

HEADER = (
    "| operation | over | the number | mmtensor | bound | | first point | last point | peers |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
_BEGIN, _END = "<!-- growth: begin -->", "<!-- growth: end -->"


def _size(panel: Panel, size: float) -> str:
    return show_bytes(size) if panel.x_unit == "B" else f"{size:,.0f} {panel.x_unit}".strip()


def _value(panel: Panel, size: float) -> str:
    """Return what mmtensor took at a size."""
    value = panel.curves[0].points[size]
    if panel.y_unit == "MB":
        return f"{value:.0f} MB"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _ours(curve: Curve) -> bool:
    return curve.library.startswith("mmtensor")


def _held(bound: Bound, panel: Panel) -> bool:
    return all(bound.holds(bound.number(c.points)) for c in panel.curves if _ours(c))


def _peer(bound: Bound, panel: Panel, curve: Curve) -> str:
    end = f" (to {_size(panel, list(curve.points)[-1])})" if curve.end else ""
    return f"{curve.library} {bound.show(bound.number(curve.points))}{end}"


def rows(figure: Figure) -> list[str]:
    """Return a row of the table for each panel that has a bound."""
    found = []
    for panel in figure.panels:
        bound = panel.bound
        if bound is None:
            continue
        ours = [curve for curve in panel.curves if _ours(curve)]
        sizes = list(ours[0].points)
        peers = [
            _peer(bound, panel, curve)
            for curve in panel.curves
            if not _ours(curve) and len(curve.points) > 1
        ]
        cells = [
            panel.title,
            panel.over,
            bound.is_,
            ", ".join(bound.show(bound.number(curve.points)) for curve in ours),
            str(bound),
            "holds" if _held(bound, panel) else "**missed**",
            f"{_value(panel, sizes[0])} at {_size(panel, sizes[0])}",
            f"{_value(panel, sizes[-1])} at {_size(panel, sizes[-1])}",
            "; ".join(peers) or "–",
        ]
        found.append("| " + " | ".join(cells) + " |")
    return found


def ends(figure: Figure) -> list[str]:
    """Return what ended curves before the largest size, in words."""
    return [
        f"{panel.title}, {curve.library} after {_size(panel, list(curve.points)[-1])}: {curve.end}"
        for panel in figure.panels
        for curve in panel.curves
        if panel.bound is not None and curve.end
    ]


def missed(figure: Figure) -> list[str]:
    """Return the operations whose bounds do not hold."""
    return [
        f"{figure.name}: {panel.title}"
        for panel in figure.panels
        if panel.bound is not None and not _held(panel.bound, panel)
    ]


def write(page: pathlib.Path, text: str) -> None:
    """Put a text between the marks of a page."""
    old = page.read_text(encoding="utf-8")
    before, _, rest = old.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}", encoding="utf-8")
