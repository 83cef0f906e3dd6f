"""Rows per second of the codec on one CPU thread: encode, decode, unrotate, at D 256 and 512.

A figure is the fastest of many short runs, in the thread's own time: other processes only ever add to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from _recording import save
from warmattn import decode_values, encode_values, unrotate

ROWS, RUNS = 512, 1000


def rows_per_second(work: Callable[[], object]) -> int:
    work()
    times = []
    for _ in range(RUNS):
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return round(ROWS / min(times))


def measure(D: int) -> dict[str, int]:
    x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(0)).half()
    figures = {}
    for bits in (8, 6, 5):
        coded = encode_values(x, bits=bits)
        figures[f"encode, {bits} bits"] = rows_per_second(lambda bits=bits: encode_values(x, bits=bits))
        figures[f"decode, {bits} bits"] = rows_per_second(lambda coded=coded: decode_values(coded))
    figures["unrotate"] = rows_per_second(lambda: unrotate(x.float()))
    return figures


def main(
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write benchmarks/results/codec.json.")
    ] = False,
) -> None:
    torch.set_num_threads(1)
    figures = {D: measure(D) for D in (256, 512)}
    print("| rows/s, one thread | D = 256 | D = 512 |\n|---|---|---|")
    for name in figures[256]:
        print(f"| {name} | {figures[256][name]:,} | {figures[512][name]:,} |")
    if as_json:
        print(f"written to {save('codec', {'unit': 'rows per second, one thread', **figures})}")


if __name__ == "__main__":
    typer.run(main)
