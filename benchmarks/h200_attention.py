"""Time warmattn on a CUDA GPU against the fastest attention that its users could call instead, interleaved.

    python benchmarks/h200_attention.py [--json [PATH]] [--shapes S1 S4] [--contenders warmattn fa4]
        [--forms f16 codes8] [--budget 500] [--rounds 15] [--flashinfer DIR]

Inputs are fresh random numbers, in sets that together pass the L2 cache several times; caches are longer
than T, with NaN in the tail, and outputs hold NaN before they are checked. A contender is every sensible way
to call one library: each is checked against float64 on sampled rows, those that are right are timed briefly,
and the fastest goes on. Every round then times each contender once, in turn, by events around calls launched
one after the other (``graph`` false) and in the replay of a CUDA graph (true); a figure is the median over
the rounds. Peers that are not installed are reported as failed. The time budget covers everything; what it
cut short is reported, and what was measured by then is written.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from _gpu import (
    Clock,
    InputSet,
    Run,
    copy_bandwidth,
    exact_rows,
    input_sets,
    matmul_rate,
    sampled_rows,
)
from _gpu_peers import CONTENDERS, Contender, contenders
from _gpu_report import goals, table
from _recording import RESULTS, machine, write
from warmattn.backend import load
from warmattn.call import AttentionCall
from warmattn.plan import Explanation, explain_call
from warmattn.testing import relative_error
from warmattn.workloads import H200_WORKLOADS, Workload

SEED = 20260
WRONG = 5e-3
"""Relative error above which a result is not a rounded one: f16 arithmetic gives about 2e-4."""
PRODUCTS = {"f16": 3, "f32": 4, "codes8": 4}
"""Matrix products of warmattn, in units of one f16 product over all visible pairs: Q·K is 1, P·V 2 where V is
one f16 term and 3 where it is two. A peer in f16 takes 2.
"""
PEER_PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl")


class Roof(NamedTuple):
    """What this device reaches: bytes per second of a copy, FLOP/s of f16 and bf16 matrix products."""

    bandwidth: float
    f16: float
    bf16: float


@dataclass
class Budget:
    """The seconds that are left of a benchmark's time."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)


@dataclass
class Entry:
    """One contender on one shape: the variant chosen, and its samples by ``graph``."""

    contender: Contender
    run: Run
    facts: dict[str, Any]
    samplers: dict[bool, Callable[[], float]] = field(default_factory=dict)
    samples: dict[bool, list[float]] = field(default_factory=dict)


class Measurement(NamedTuple):
    """Rows of the published file, and what could not be measured with the reason."""

    rows: list[dict[str, Any]]
    failed: list[dict[str, Any]]


def measure(
    work: Workload,
    sets: list[InputSet],
    entrants: Iterator[Contender],
    clock: Clock,
    budget: Budget,
    *,
    rounds: int,
    roof: Roof,
    backend: str,
) -> Measurement:
    """Check and time contenders on one shape within the budget."""
    failed: list[dict[str, Any]] = []
    entries: list[Entry] = []
    exact: dict[str, Tensor] = {}
    rows = sampled_rows(work.rows)
    for contender in entrants:
        if budget.left <= 0:
            failed.append(identity(work, contender) | {"reason": "out of time before it began"})
            continue
        if contender.values not in exact:
            exact[contender.values] = exact_rows(work, sets[0], contender.values, rows)
        found = fastest_variant(contender, sets, exact[contender.values], rows, clock, budget)
        if isinstance(found, Entry):
            entries.append(found)
        else:
            failed.append(identity(work, contender) | {"reason": "no variant is right", "variants": found})
    for entry in entries:
        refusal = prepare(entry, len(sets), clock)
        if refusal is not None:
            failed.append(identity(work, entry.contender) | {"reason": refusal})
    for turn in range(rounds):
        if turn > 0 and budget.left <= 0:
            break
        for entry in entries:
            for graph, sample in entry.samplers.items():
                entry.samples.setdefault(graph, []).append(sample())
    plans = {form: explained(work, sets[0], form, backend) for form in exact}
    rows_by_entry = (published(work, entry, plans[entry.contender.values], roof) for entry in entries)
    return Measurement([row for rows in rows_by_entry for row in rows], failed)


def identity(work: Workload, contender: Contender) -> dict[str, Any]:
    return {"shape": work.name, "contender": contender.name, "values": contender.values}


def fastest_variant(
    contender: Contender,
    sets: list[InputSet],
    exact: Tensor,
    rows: Tensor,
    clock: Clock,
    budget: Budget,
) -> Entry | dict[str, Any]:
    """The fastest variant whose result is right, or what became of each of them."""
    best: Entry | None = None
    outcomes: dict[str, Any] = {}
    for name, set_up in contender.variants:
        if best is not None and budget.left <= 0:
            outcomes[name] = "out of time"
            continue
        # A peer may refuse a shape, run out of memory or not be there at all: that is its result.
        try:
            with warnings.catch_warnings(action="ignore"):
                run = set_up()
                run(0)
            sample = clock.eager(run, len(sets))
            if best is not None and (ms := sample()) > 2 * best.facts["quick"]:
                outcomes[name] = f"{ms:.4f}, too slow to be checked"
                continue
            error, peak = check(run, sets[0], exact, rows, clock)
            ms = statistics.median(sample() for _ in range(5))
        except Exception as failure:
            outcomes[name] = reason(failure)
            continue
        if not error <= WRONG:
            outcomes[name] = f"wrong: error {error:.2e}"
            continue
        outcomes[name] = round(ms, 4)
        if best is None or ms < best.facts["quick"]:
            facts = {"error": error, "variant": name, "quick": ms, "peak_bytes": peak}
            best = Entry(contender, run, facts)
    if best is None:
        return outcomes
    best.facts["variants"] = outcomes
    return best


def check(run: Run, inputs: InputSet, exact: Tensor, rows: Tensor, clock: Clock) -> tuple[float, int]:
    """Relative error on the sampled rows (NaN if any element of the result is not finite), and the bytes that
    a call allocates.
    """
    peak = clock.peak_bytes(run)
    inputs.out.fill_(math.nan)
    out = run(0)
    clock.wait()
    if not bool(out.isfinite().all()):
        return math.nan, peak
    return relative_error(out[:, :, rows.to(out.device)], exact), peak


def prepare(entry: Entry, sets: int, clock: Clock) -> str | None:
    """Set up the samplers and count the host's time; returns why no graph could be captured, if so."""
    entry.samplers[False] = clock.eager(entry.run, sets)
    calls = max(1, min(20, int(20 / entry.facts["quick"])))
    entry.facts["host_us"] = round(clock.host(entry.run, sets, calls), 1)
    try:
        entry.samplers[True] = clock.graph(entry.run, sets)
    except Exception as failure:
        return f"graph capture: {reason(failure)}"
    return None


def reason(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def explained(work: Workload, x: InputSet, form: str, backend: str) -> Explanation:
    """FLOPs and bytes of the shape, whether or not the backend takes the call."""
    call = AttentionCall.of(x.q, x.k, x.v[form], visible=work.visible, kv_len=work.keys)
    return explain_call(call.rounded().check(), load(backend))


def published(work: Workload, entry: Entry, plan: Explanation, roof: Roof) -> Iterator[dict[str, Any]]:
    """The rows of one contender, graph replay last."""
    facts = entry.facts
    for graph, samples in sorted(entry.samples.items()):
        ms = statistics.median(samples)
        yield {
            **identity(work, entry.contender),
            "ms": round(ms, 5),
            "graph": graph,
            "error": float(f"{facts['error']:.3g}"),
            "range_ms": [round(min(samples), 5), round(max(samples), 5)],
            "rounds": len(samples),
            "tflops": round(plan.flops / ms / 1e9, 1),
            **prediction(entry.contender, plan, roof),
            "host_us": facts["host_us"],
            "peak_bytes": facts["peak_bytes"],
            "variant": facts["variant"],
            "variants": facts["variants"],
        }


def prediction(contender: Contender, plan: Explanation, roof: Roof) -> dict[str, Any]:
    """The roofline's figure: products over the measured matrix rate, bytes over the measured copy rate. None
    for float32 products, which run on other units.
    """
    if contender.name == "sdpa_f32":
        return {}
    products = PRODUCTS[contender.values] if contender.name == "warmattn" else 2
    products_ms = products * plan.flops / 2 / roof.f16 * 1e3
    bytes_ms = plan.bytes / roof.bandwidth * 1e3
    return {
        "products": products,
        "bytes": plan.bytes,
        "predicted_ms": round(max(products_ms, bytes_ms), 5),
        "bound_by": "products" if products_ms >= bytes_ms else "bytes",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [work.name for work in H200_WORKLOADS]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument(
        "--forms", nargs="+", choices=list(PRODUCTS), default=list(PRODUCTS), help="of warmattn's V"
    )
    parser.add_argument("--budget", type=float, default=1800, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--flashinfer", type=Path, help="folder of libfa2.so and libfa3.so")
    parser.add_argument("--commit", help="of the code measured, where the checkout is not at hand")
    default = RESULTS / "h200-attention.json"
    parser.add_argument("--json", nargs="?", type=Path, const=default, help=f"write {default.name}, or PATH")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    budget, clock, backend = Budget(arguments.budget), Clock(), "cuda"
    roof = Roof(copy_bandwidth(), matmul_rate(torch.float16), matmul_rate(torch.bfloat16))
    print(
        "copy {:.2f}, f16 product {:.0f}, bf16 product {:.0f} in T/s".format(*(rate / 1e12 for rate in roof))
    )
    document: dict[str, Any] = {
        "machine": {
            "command": " ".join(["python", *sys.argv]),
            **machine(arguments.commit),
            "peers": {p.name: p.version for p in metadata.distributions() if p.name in PEER_PACKAGES},
            "roof": roof._asdict(),
            "seed": SEED,
        },
        "rows": [],
        "failed": [],
    }
    works = [work for work in H200_WORKLOADS if work.name in arguments.shapes]
    with torch.no_grad():
        for index, work in enumerate(works):
            share = Budget(min(budget.left, 2 * budget.left / (len(works) - index)))
            sets = input_sets(work, ("f16", "f32", "codes8"), SEED, torch.device("cuda"))
            entrants = contenders(
                work,
                sets,
                names=arguments.contenders,
                forms=arguments.forms,
                backend=backend,
                flashinfer=arguments.flashinfer,
            )
            measured = measure(
                work, sets, entrants, clock, share, rounds=arguments.rounds, roof=roof, backend=backend
            )
            document["rows"] += measured.rows
            document["failed"] += measured.failed
            print(table(measured.rows, measured.failed), flush=True)
            if arguments.json is not None:
                write(arguments.json, document)
            del sets, entrants, measured
            torch.cuda.empty_cache()
    print(goals(document["rows"]))
    if any(failure["contender"] == "warmattn" for failure in document["failed"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
