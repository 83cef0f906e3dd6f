"""What the GPU benchmark prints: a table for each shape, and how its figures stand to the project's goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["goals", "table"]

Row = dict[str, Any]


class Goal(NamedTuple):
    """Time of ``against`` over time of warmattn, in graph replay: at least ``must``, better ``stretch``."""

    shapes: tuple[str, ...]
    values: str
    against: str
    must: float
    stretch: float


F16 = "any f16 peer"
GOALS = (
    Goal(("S1",), "f16", "fa4", 0.55, 0.62),
    Goal(("S2",), "f16", "fa4", 0.58, 0.65),
    Goal(("S3",), "f16", "fa4", 0.80, 0.95),
    Goal(("S8",), "f16", F16, 0.8, 1.0),
    Goal(("S1", "S3"), "f16", "sdpa_f32", 9.0, 9.0),
    Goal(("S4", "S5", "S7"), "f16", F16, 1.6, 2.0),
    Goal(("S6",), "f16", F16, 2.5, 3.0),
    Goal(("S1", "S2", "S3"), "codes8", "warmattn f16", 1 / 1.6, 1 / 1.4),
    Goal(("S4", "S5", "S7"), "codes8", "warmattn f16", 1 / 1.7, 1 / 1.4),
    Goal(("S6",), "codes8", "warmattn f16", 1 / 1.5, 1.0),
    Goal(("S8",), "codes8", "warmattn f16", 1 / 1.25, 1.0),
)
HOST_US = 20.0
"""Goal for the Python time of an eager call."""


def table(rows: list[Row], failed: list[Row]) -> str:
    """One line per contender, and one per failure."""
    lines = []
    for key in dict.fromkeys(map(_key, rows)):
        by_graph = {row["graph"]: row for row in rows if _key(row) == key}
        lines.append(_cells(by_graph.get(False), by_graph.get(True)))
    text = _aligned([list(lines[0]), *(list(line.values()) for line in lines)]) if lines else []
    for failure in failed:
        text.append(f"{' '.join(_key(failure))} failed: {failure['reason']}")
        text += [f"    {name}: {outcome}" for name, outcome in failure.get("variants", {}).items()]
    return "\n".join(text)


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in lines]


def _cells(eager: Row | None, graph: Row | None) -> dict[str, str]:
    row = graph or eager
    assert row is not None
    low, high = row["range_ms"]
    return {
        "": row["shape"],
        "contender": row["contender"],
        "V": row["values"],
        "graph ms": "" if graph is None else f"{graph['ms']:.4f}",
        "range": f"{low:.4f} – {high:.4f}",
        "eager ms": "" if eager is None else f"{eager['ms']:.4f}",
        "TFLOP/s": f"{row['tflops']:.1f}",
        "error": f"{row['error']:.1e}",
        "predicted": f"{row['predicted_ms']:.4f}" if "predicted_ms" in row else "",
        "bound by": row.get("bound_by", ""),
        "host µs": f"{row['host_us']:.1f}",
        "peak MiB": f"{row['peak_bytes'] / 2**20:.1f}",
        "variant": row["variant"],
    }


def goals(rows: list[Row]) -> str:
    """Each goal whose two figures were measured: the ratio reached, what it must be and should be."""
    return "\n".join(_goal_lines(rows))


def _goal_lines(rows: list[Row]) -> Iterator[str]:
    times = {_key(row): row["ms"] for row in rows if row["graph"]}
    for goal in GOALS:
        for shape in goal.shapes:
            ours, peer = times.get((shape, "warmattn", goal.values)), _against(goal, shape, times)
            if ours is None or peer is None:
                continue
            ratio = peer / ours
            verdict = "stretch" if ratio >= goal.stretch else "must" if ratio >= goal.must else "MISSED"
            yield (
                f"{shape} {goal.values:7} {ratio:6.3f} of {goal.against:13}"
                f" (must {goal.must:.3f}, stretch {goal.stretch:.3f}): {verdict}"
            )
    host = max((row["host_us"] for row in rows if row["contender"] == "warmattn"), default=None)
    if host is not None:
        yield f"host time of a call: up to {host:.1f} µs ({'must' if host <= HOST_US else 'MISSED'})"


def _against(goal: Goal, shape: str, times: dict[tuple[str, str, str], float]) -> float | None:
    if goal.against == "warmattn f16":
        return times.get((shape, "warmattn", "f16"))
    named = [
        ms
        for (at, contender, values), ms in times.items()
        if at == shape and contender != "warmattn"
        if contender == goal.against or (goal.against == F16 and values == "f16")
    ]
    return min(named, default=None)


def _key(row: Row) -> tuple[str, str, str]:
    return row["shape"], row["contender"], row["values"]
