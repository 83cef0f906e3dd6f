"""Write the measured tables of the docs from the committed results, between ``<!-- table: NAME -->`` marks.

    python scripts/docs_tables.py

A test holds the pages to what this writes, so that no figure differs from its JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from warmattn.workloads import H200_WORKLOADS, Workload

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]
CONTENDERS = {
    ("warmattn", "f16"): "warmattn, f16 V",
    ("warmattn", "codes8"): "8-bit codes",
    ("warmattn", "f32"): "f32 V",
    ("fa4", "f16"): "FlashAttention-4",
    ("flashinfer_fa2", "f16"): "FlashInfer",
    ("flex_f16", "f16"): "FlexAttention",
    ("sdpa_f16", "f16"): "SDPA f16",
    ("sdpa_f32", "f32"): "SDPA f32",
}


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def load(name: str) -> list[Row]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]


def h200_attention() -> str:
    """Milliseconds in graph replay; where a contender cannot be captured, of eager calls."""
    best = {(row["shape"], row["contender"], row["values"]): row for row in load("h200-attention.json")}
    works = [work for work in H200_WORKLOADS if work.name.startswith("S")]

    def line(work: Workload) -> list[str]:
        cells = [work.name, described(work)]
        for contender in CONTENDERS:
            row = best.get((work.name, *contender))
            cells.append("" if row is None else f"{row['ms']:.3g}")
        return [*cells, f"{best[work.name, 'warmattn', 'f16']['predicted_ms']:.2g}"]

    return markdown(["", "shape", *CONTENDERS.values(), "roof"], map(line, works))


def described(work: Workload) -> str:
    window = "" if work.window is None else f", window {work.window:,}"
    return f"{work.rows:,} × {work.keys:,}{window}, D {work.head_dim}, H {work.heads}, Hk {work.kv_heads}"


def h200_short() -> str:
    """A cold prefill and a long resume of both head dims."""
    best = {(row["shape"], row["contender"], row["values"]): row for row in load("h200-attention.json")}
    shown = [contender for contender in CONTENDERS if contender != ("warmattn", "f32")]

    def line(name: str) -> list[str]:
        work = next(work for work in H200_WORKLOADS if work.name == name)
        rows = (best.get((name, *contender)) for contender in shown)
        return [described(work), *("" if row is None else f"{row['ms']:.3g}" for row in rows)]

    header = ["rows × keys", *(CONTENDERS[contender] for contender in shown)]
    return markdown(header, map(line, ("S1", "S3", "S4", "S6")))


def h200_host() -> str:
    host = {
        (row["contender"], row["values"]): row["host_us"]
        for row in load("h200-attention.json")
        if row["shape"] == "L"
    }
    return markdown(CONTENDERS.values(), [[f"{host[contender]:.0f}" for contender in CONTENDERS]])


def h200_errors() -> str:
    """Relative error of each contender on each shape."""
    best = {(row["shape"], row["contender"], row["values"]): row for row in load("h200-attention.json")}
    works = [work.name for work in H200_WORKLOADS if work.name.startswith("S")]

    def line(contender: tuple[str, str]) -> list[str]:
        rows = (best.get((name, *contender)) for name in works)
        return [CONTENDERS[contender], *("" if row is None else f"{row['error']:.1e}" for row in rows)]

    return markdown(["", *works], map(line, CONTENDERS))


def h200_accuracy() -> str:
    """The largest error of every head dim and length over all distributions, and the closest to its bound."""
    rows = load("h200-accuracy.json")
    lines = []
    for D, T in sorted({(row["head_dim"], row["keys"]) for row in rows}):
        here = [row for row in rows if (row["head_dim"], row["keys"]) == (D, T)]
        standard = [row for row in here if row["distribution"] == "standard" and row["deviation"] == 1.0]
        torch = max(max(row["sdpa_f32_expanded"], row["sdpa_f32_packed"]) for row in standard)
        worst = max(row["error"] / row["bound"] for row in here)
        lines.append(
            [f"{D}", f"{T:,}", f"{max(r['error'] for r in standard):.1e}", f"{torch:.1e}", f"{worst:.0%}"]
        )
    return markdown(["D", "T", "warmattn", "SDPA f32", "of the bound, at worst"], lines)


def figures(name: str) -> dict[str, Row]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))["figures"]["contenders"]


def transformers_quality() -> str:
    """Divergence from float32 eager attention, and how often the first choice is the same."""
    lines = [
        [name, f"{row['kl_mean']:.1e}", f"{row['kl_99th_percentile']:.1e}", f"{row['same_first_choice']:.2%}"]
        for name, row in figures("transformers_quality.json").items()
    ]
    return markdown(["", "KL, mean", "KL, 99 %", "same first choice"], lines)


def time_to_first_token() -> str:
    lines = [
        [
            name,
            f"{row['cold_s']:.2f}",
            f"{row['warm_s']:.2f}",
            f"{row['speedup']:.1f}",
            f"{row['bytes_per_token_and_full_layer']:,}",
            f"{row['bytes'] / 1e6:.1f}",
        ]
        for name, row in figures("time_to_first_token.json").items()
    ]
    header = ["", "cold, s", "warm, s", "cold / warm", "bytes of a token and full layer", "cache, MB"]
    return markdown(header, lines)


TABLES: dict[str, Callable[[], str]] = {
    "h200-attention": h200_attention,
    "h200-errors": h200_errors,
    "h200-host": h200_host,
    "h200-short": h200_short,
    "h200-accuracy": h200_accuracy,
    "transformers-quality": transformers_quality,
    "time-to-first-token": time_to_first_token,
}


def filled(page: str) -> str:
    """The page with every marked table written anew."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def main() -> None:
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]):
        page = path.read_text(encoding="utf-8")
        if filled(page) != page:
            path.write_text(filled(page), encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
