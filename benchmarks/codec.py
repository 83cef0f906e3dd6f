"""Rows per second of the codec at D 256 and 512: encode, decode, unrotate.

    python benchmarks/codec.py [--device cuda] [--json]

On a CPU: one thread; a figure is the fastest of many short runs, spread over the whole benchmark, in the
thread's own time: other processes only ever add to it. On a GPU: the median of calls between two events, on
tensors far larger than its cache, and beside it that of a copy within the device that moves as many bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import torch
import typer

from _recording import RESULTS, machine, save, write
from warmattn import decode_values, encode_values, unrotate

CPU_ROWS, CPU_ROUNDS, CPU_RUNS = 512, 30, 20
GPU_VALUES, GPU_ROUNDS = 1 << 28, 30

Table = dict[int, dict[str, float]]
"""A figure for each D and kind of work."""


class Work(NamedTuple):
    """A call of the codec, and the bytes that it reads and writes for one row."""

    call: Callable[[], object]
    row_bytes: int


def works(D: int, rows: int, device: str) -> dict[str, Work]:
    x = torch.randn(rows, D, generator=torch.Generator(device).manual_seed(0), device=device).half()
    norms = 4 * (D // 256)
    named: dict[str, Work] = {}
    for bits in (8, 6, 5):
        coded = encode_values(x, bits=bits)
        named[f"encode, {bits} bits"] = Work(lambda bits=bits: encode_values(x, bits=bits), 3 * D + norms)
        named[f"decode, {bits} bits"] = Work(lambda coded=coded: decode_values(coded), 5 * D + norms)
    o = x.float()
    named["unrotate"] = Work(lambda: unrotate(o), 8 * D)
    return named


def cpu_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(CPU_RUNS):
        begun = time.thread_time()
        call()
        times.append(time.thread_time() - begun)
    return min(times)


def measure_cpu() -> Table:
    cases = {D: works(D, CPU_ROWS, "cpu") for D in (256, 512)}
    best = {D: dict.fromkeys(named, float("inf")) for D, named in cases.items()}
    for _ in range(CPU_ROUNDS):
        for D, named in cases.items():
            for name, work in named.items():
                best[D][name] = min(best[D][name], cpu_seconds(work.call))
    return {D: {name: round(CPU_ROWS / least) for name, least in named.items()} for D, named in best.items()}


def gpu_seconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def measure_gpu() -> tuple[Table, Table]:
    """Rows per second, and the speed as a part of the copy's."""
    rates: Table = {256: {}, 512: {}}
    parts: Table = {256: {}, 512: {}}
    for D in rates:
        rows = GPU_VALUES // D
        for name, work in works(D, rows, "cuda").items():
            source = torch.ones(rows * work.row_bytes // 2, dtype=torch.uint8, device="cuda")
            copy = partial(source.clone().copy_, source)
            times = [(gpu_seconds(work.call), gpu_seconds(copy)) for _ in range(GPU_ROUNDS)]
            ours, least = (statistics.median(column) for column in zip(*times, strict=True))
            rates[D][name], parts[D][name] = round(rows / ours), round(least / ours, 3)
    return rates, parts


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write benchmarks/results/codec.json, or codec_cuda.json.")
    ] = False,
) -> None:
    if device == "cuda":
        rates, parts = measure_gpu()
        print("| rows/s (of a copy's speed) | D = 256 | D = 512 |\n|---|---|---|")
        for name in rates[256]:
            cells = [f"{rates[D][name]:,} ({parts[D][name]:.0%})" for D in rates]
            print(f"| {name} | {cells[0]} | {cells[1]} |")
        if as_json:
            figures = {"unit": "rows per second", **rates, "part of a copy's speed": parts}
            command = "python benchmarks/codec.py --device cuda --json"
            write(RESULTS / "codec_cuda.json", {"command": command, **machine(), "figures": figures})
        return
    torch.set_num_threads(1)
    rates = measure_cpu()
    print("| rows/s, one thread | D = 256 | D = 512 |\n|---|---|---|")
    for name in rates[256]:
        print(f"| {name} | {rates[256][name]:,} | {rates[512][name]:,} |")
    if as_json:
        print(f"written to {save('codec', {'unit': 'rows per second, one thread', **rates})}")


if __name__ == "__main__":
    typer.run(main)
