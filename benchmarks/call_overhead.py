"""What a call of `warmattn.attention` costs in Python: checks, choice of a backend and the registered op,
without any kernel. PyTorch's SDPA on the same tiny operands, its kernel included, is the yardstick.

A figure is the least, over many batches spread over the whole benchmark, of the batch's median time per call:
other processes only ever add to it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated
from unittest.mock import patch

import torch
import typer
from torch.nn.functional import scaled_dot_product_attention

import warmattn
from _recording import save
from warmattn.backend import load

ROUNDS, CALLS = 100, 200
D, H, HK, S, T = 256, 8, 4, 1, 16


def microseconds(call: Callable[[], object]) -> float:
    """The median time of a batch of calls, in µs."""
    times = []
    for _ in range(CALLS):
        begun = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begun)
    return statistics.median(times) / 1000


def cases() -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, H, S, D, generator=generator).half()
    k = torch.randn(1, HK, T, D, generator=generator).half()
    v = torch.randn(1, HK, T, D, generator=generator)
    coded = warmattn.encode_values(v)
    mask = torch.zeros(S, T, dtype=torch.float16)
    external = warmattn.External(mask, warmattn.tile_map(mask))
    causal = warmattn.Causal(q_offset=T - S)
    lengths = torch.tensor([T], dtype=torch.int32)
    out = torch.empty(1, H, S, D)
    return {
        "empty [B, H, S, D]": lambda: q.new_empty(q.shape, dtype=torch.float32),
        "SDPA, kernel included": lambda: scaled_dot_product_attention(q, k, k, enable_gqa=True),
        "causal": lambda: warmattn.attention(q, k, v, visible=causal),
        "causal, out given": lambda: warmattn.attention(q, k, v, visible=causal, out=out),
        "causal, log-sum-exp": lambda: warmattn.attention(q, k, v, visible=causal, return_lse=True),
        "causal, length as a tensor": lambda: warmattn.attention(q, k, v, visible=causal, kv_len=lengths),
        "causal, coded V": lambda: warmattn.attention(q, k, coded, visible=causal),
        "mask and tile map": lambda: warmattn.attention(q, k, v, visible=external),
    }


def measure() -> dict[str, float]:
    calls = cases()
    least = dict.fromkeys(calls, math.inf)
    with patch.object(load("cpu"), "run", lambda call: None):
        for _ in range(ROUNDS):
            for name, call in calls.items():
                least[name] = min(least[name], microseconds(call))
    return {name: round(figure, 2) for name, figure in least.items()}


def main(
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write benchmarks/results/call_overhead.json.")
    ] = False,
) -> None:
    torch.set_num_threads(1)
    figures = measure()
    for name, figure in figures.items():
        print(f"{name:28} {figure:7.2f} µs")
    if as_json:
        print(f"written to {save('call_overhead', {'unit': 'µs per call, one thread', **figures})}")


if __name__ == "__main__":
    typer.run(main)
