"""What the CPU kernels make of the memory's bandwidth: a decode step over a long cache, and the codec.

    python benchmarks/cpu_memory.py [--json] [--rounds 9] [--keys 131072]

Everything is timed in turn, round after round, and a figure is a median. A decode step is set against
reading memory (torch's sum of float32), by the bytes of f16 K and V for every form; the codec against copying
float32, by the bytes it reads and writes. The copy goes into memory that exists; the codec allocates what it
returns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from _recording import save
from warmattn import Causal, attention, decode_values, encode_values, unrotate
from warmattn.backend.cpu import native
from warmattn.testing import make_inputs

SEED = 20260
PLAIN = 1 << 26  # values that are read or copied to know the bandwidth
CODED = 1 << 25  # values that the codec works on: 64 MiB of f16


def decode_steps(keys: int) -> dict[str, tuple[Callable[[], object], int]]:
    """One query row over ``keys`` keys, D 512, 8 heads on 2, by form of V; with the bytes of K and f16 V."""
    steps = {}
    for form in ("f16", "codes8"):
        case = make_inputs(SEED, S=1, T=keys, C=keys, D=512, H=8, Hk=2, values=form)
        steps[f"decode step, {form} V"] = (
            lambda case=case: attention(case.q, case.k, case.v, visible=Causal(keys - 1), kv_len=keys),
            2 * case.k.nbytes,
        )
    return steps


def codec_works() -> dict[str, tuple[Callable[[], object], int]]:
    """Encode, decode and unrotate, by head dim; with the bytes read and written."""
    works = {}
    for D in (256, 512):
        x = torch.randn(CODED // D, D, generator=torch.Generator().manual_seed(SEED)).half()
        coded = encode_values(x)
        o = decode_values(coded)
        works |= {
            f"encode, D {D}": (lambda x=x: encode_values(x), x.nbytes + coded.codes.nbytes),
            f"decode, D {D}": (lambda coded=coded: decode_values(coded), coded.codes.nbytes + o.nbytes),
            f"unrotate, D {D}": (lambda o=o: unrotate(o), 2 * o.nbytes),
        }
    return works


def gigabytes_per_second(works: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, float]:
    """Median over the rounds, each of which does everything once; a first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, (work, _) in works.items():
            begun = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begun)
    return {name: works[name][1] / statistics.median(times[name][1:]) / 1e9 for name in works}


def measure(keys: int, rounds: int) -> dict[str, dict[str, float]]:
    """GB/s by name, and as a share of reading or copying."""
    source, target = torch.ones(PLAIN), torch.zeros(PLAIN)
    read = {"read": (source.sum, source.nbytes)}
    copy = {"copy": (lambda: target.copy_(source), 2 * source.nbytes)}
    figures = {}
    for plain, works in ((read, decode_steps(keys)), (copy, codec_works())):
        speeds = gigabytes_per_second(plain | works, rounds)
        (limit,) = (speeds[name] for name in plain)
        figures |= {name: {"GB/s": speed, "share": speed / limit} for name, speed in speeds.items()}
    return figures


def main(
    rounds: int = 9,
    keys: int = 131072,
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write benchmarks/results/cpu_memory.json.")
    ] = False,
) -> None:
    isa = native.selected_isa()
    name = "torch operations" if isa is None else isa.name
    figures = measure(keys, rounds)
    print(f"{name}, {torch.get_num_threads()} threads, {keys} keys")
    print("| | GB/s | of reading or copying |\n|---|---|---|")
    for work, figure in figures.items():
        print(f"| {work} | {figure['GB/s']:.2f} | {figure['share']:.0%} |")
    if as_json:
        print(f"written to {save('cpu_memory', {'isa': name, 'seed': SEED, 'keys': keys, **figures})}")


if __name__ == "__main__":
    typer.run(main)
