"""Rows per second of the codec on one CPU thread: encode, decode, unrotate, at D 256 and 512.

A figure is the fastest of many short runs, spread over the whole benchmark, in the thread's own time: other
processes only ever add to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from _recording import save
from warmattn import decode_values, encode_values, unrotate

ROWS, ROUNDS, RUNS = 512, 30, 20


def seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return min(times)


def works(D: int) -> dict[str, Callable[[], object]]:
    x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(0)).half()
    named: dict[str, Callable[[], object]] = {}
    for bits in (8, 6, 5):
        coded = encode_values(x, bits=bits)
        named[f"encode, {bits} bits"] = lambda bits=bits: encode_values(x, bits=bits)
        named[f"decode, {bits} bits"] = lambda coded=coded: decode_values(coded)
    o = x.float()
    named["unrotate"] = lambda: unrotate(o)
    return named


def measure() -> dict[int, dict[str, int]]:
    cases = {D: works(D) for D in (256, 512)}
    best = {D: dict.fromkeys(named, float("inf")) for D, named in cases.items()}
    for _ in range(ROUNDS):
        for D, named in cases.items():
            for name, work in named.items():
                best[D][name] = min(best[D][name], seconds(work))
    return {D: {name: round(ROWS / least) for name, least in named.items()} for D, named in best.items()}


def main(
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write benchmarks/results/codec.json.")
    ] = False,
) -> None:
    torch.set_num_threads(1)
    figures = measure()
    print("| rows/s, one thread | D = 256 | D = 512 |\n|---|---|---|")
    for name in figures[256]:
        print(f"| {name} | {figures[256][name]:,} | {figures[512][name]:,} |")
    if as_json:
        print(f"written to {save('codec', {'unit': 'rows per second, one thread', **figures})}")


if __name__ == "__main__":
    typer.run(main)
