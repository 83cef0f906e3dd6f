"""The pictures that ``warmattn demo`` saves: its table as SVG, and a chart of error against memory as PNG."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from warmattn.cli.console import duration
from warmattn.cli.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from warmattn.cli.demo import Row

__all__ = ["save_chart", "save_svg"]

# Told apart by every kind of colour vision (Okabe & Ito, 2008).
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#8A8A8A"

_HEADINGS = ("Cache", "Time", "Error of the output")
_REMARKS = (
    "bytes per token, K and V of the layer",
    "seconds, cache writes included",
    "relative, against float64 (log scale)",
)


def save_svg(picture: RenderableType, path: Path) -> Path:
    """The picture as a terminal of 84 columns shows it."""
    screen = Console(record=True, width=84, file=io.StringIO(), highlight=False)
    screen.print(picture)
    svg = screen.export_svg(title="warmattn demo")
    # rich names fonts on a server of others; without them the file needs no network.
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.DOTALL)
    with replacing(path) as temporary:
        temporary.write_text(svg, encoding="utf-8")
    return path


def save_chart(rows: list[Row], title: str, path: Path) -> Path | None:
    """Memory, time and error of every V form, a row of panels for each layer; ``None`` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    layers = {row.layer: [r for r in rows if r.layer == row.layer] for row in rows}
    figure = Figure(figsize=(11, 1.6 + 2.2 * len(layers)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(layers), 3, squeeze=False)
    for panels, of_layer in zip(grid, layers.values(), strict=True):
        for draw, axes in zip((_memory_panel, _time_panel, _error_panel), panels, strict=True):
            draw(axes, of_layer)
        panels[0].set_ylabel(f"D {of_layer[0].head_dim}, {of_layer[0].kind}", fontsize=10)
    for axes, heading in zip(grid[0], _HEADINGS, strict=True):
        axes.set_title(heading, loc="left", fontsize=10, fontweight="bold")
    for axes, remark in zip(grid[-1], _REMARKS, strict=True):
        axes.set_xlabel(remark, fontsize=8, loc="left")
    for axes in grid[-1][1:]:
        # Below the panel, where it hides no measurement.
        place = {"loc": "upper left", "bbox_to_anchor": (0, -0.3), "borderaxespad": 0}
        axes.legend(fontsize=8, frameon=False, **place)
    differing, elements = sum(row.differing for row in rows), sum(row.elements for row in rows)
    verdict = f"{differing:,} of {elements:,} elements differ in any bit between cold and warm"
    figure.suptitle(f"{title}\n{verdict}", x=0.01, ha="left", fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    return path


def _memory_panel(axes: Axes, rows: list[Row]) -> None:
    _forms_axis(axes, rows)
    bars = axes.barh(range(len(rows)), [row.cache_bytes_per_token for row in rows], color=_GREY, height=0.6)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axes.margins(x=0.2)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _time_panel(axes: Axes, rows: list[Row]) -> None:
    _forms_axis(axes, rows)
    for offset, color, name, seconds in (
        (-0.2, _BLUE, "cold: one call", [row.seconds_cold for row in rows]),
        (0.2, _ORANGE, f"warm: {rows[0].chunks} calls in turn", [row.seconds_warm for row in rows]),
    ):
        bars = axes.barh(
            [y + offset for y in range(len(rows))], seconds, color=color, height=0.36, label=name
        )
        axes.bar_label(bars, labels=[duration(s) for s in seconds], padding=3, fontsize=7)
    axes.margins(x=0.25)


def _error_panel(axes: Axes, rows: list[Row]) -> None:
    _forms_axis(axes, rows)
    heights = range(len(rows))
    axes.plot([row.error for row in rows], heights, "o", color=_BLUE, label="the kernel: V as it is cached")
    errors = [row.error_true for row in rows]
    axes.plot(errors, heights, "D", color=_ORANGE, ms=4, label="kernel and V form: the model's own V")
    axes.axvline(1e-6, color="grey", lw=0.8, ls="--", label="1e-6, the kernel's bound on normal data")
    axes.set_xscale("log")
    axes.set_xlim(1e-8, 1)
    axes.grid(axis="x", lw=0.3)


def _forms_axis(axes: Axes, rows: list[Row]) -> None:
    axes.set_yticks(range(len(rows)), [row.values for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
