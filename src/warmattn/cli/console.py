"""What the commands print with: one table style, numbers as people read them, one JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["console", "duration", "facts", "mark", "print_json", "quantity", "stderr", "table"]


def console() -> Console:
    """The console on stdout, as it is now: a test may have replaced the stream."""
    return Console(highlight=False)


def stderr() -> Console:
    """The console for progress and remarks, which ``--json`` keeps off stdout."""
    return Console(stderr=True, highlight=False)


def table(title: str, *, caption: str | None = None) -> Table:
    """An empty table in the style of all commands."""
    return Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        title_style="bold",
        title_justify="left",
        caption_justify="left",
        header_style="bold cyan",
        padding=(0, 1),
        pad_edge=False,
    )


def facts(rows: Mapping[str, str]) -> Table:
    """Two columns without a head: a name, and what there is to say; long text folds, nothing is cut."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows.items():
        grid.add_row(name, Text(text))
    return grid


def mark(good: bool) -> Text:
    """A green tick or a red cross."""
    return Text("✓", style="bold green") if good else Text("✗", style="bold red")


def duration(seconds: float) -> str:
    """Seconds with three digits: ``950 µs``, ``12.3 ms``, ``4.56 s``."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def quantity(value: float, unit: str) -> str:
    """A count with a decimal prefix: ``1.23 MB``, ``45.6 GFLOP``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {prefix}{unit}"
    return f"{value:g} {unit}"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def print_json(command: str, document: Mapping[str, Any]) -> None:
    """The one JSON document of a command, on stdout; numbers that JSON lacks (NaN, inf) become null."""
    from warmattn import __version__

    whole = {"command": command, "version": __version__, **document}
    print(json.dumps(_finite(whole), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
