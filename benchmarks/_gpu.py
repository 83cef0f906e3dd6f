"""What the benchmarks of GPU kernels share: inputs larger than the cache, the float64 check, the clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warmattn import CodedValues, External, encode_values, reference
from warmattn.workloads import Workload

__all__ = [
    "Clock",
    "InputSet",
    "Run",
    "copy_bandwidth",
    "exact_rows",
    "input_set",
    "input_sets",
    "matmul_rate",
    "sampled_rows",
    "seen",
]

TAIL = 64
"""Rows of a cache past T; they hold NaN."""
L2_BYTES = 60e6
"""Cache of an H200: the input sets that a timing rotates through are several times as large."""

Run = Callable[[int], Tensor]
"""Attention over input set i: ``[1, H, S, D]`` of any dtype."""


@dataclass(frozen=True)
class InputSet:
    """Operands of one call: q ``[1, H, S, D]`` and k ``[1, Hk, T + TAIL, D]`` in f16, v by form, out f32."""

    q: Tensor
    k: Tensor
    v: dict[str, Tensor | CodedValues]
    out: Tensor


def input_sets(work: Workload, forms: Sequence[str], seed: int, device: torch.device) -> list[InputSet]:
    """Standard-normal inputs made on the device: two sets, or as many as pass four times the L2 cache."""
    touched = 6 * work.rows * work.heads + 4 * (work.keys - work.first_key) * work.kv_heads
    count = max(2, min(8, math.ceil(4 * L2_BYTES / (touched * work.head_dim))))
    return [input_set(work, forms, seed + index, device) for index in range(count)]


def input_set(
    work: Workload,
    forms: Sequence[str],
    seed: int,
    device: torch.device,
    *,
    spread: float = 1.0,
    mean: float = 0.0,
) -> InputSet:
    """One set of standard-normal operands, V ``spread * normal + mean`` in each of the forms."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, rows: int) -> Tensor:
        return torch.randn(1, heads, rows, work.head_dim, generator=generator, device=device)

    q = normal(work.heads, work.rows).half()
    k = _cache(normal(work.kv_heads, work.keys).half(), math.nan)
    values = normal(work.kv_heads, work.keys) * spread + mean
    v = {form: _values(values, form) for form in forms}
    return InputSet(q, k, v, torch.empty_like(q, dtype=torch.float32))


def _values(rows: Tensor, form: str) -> Tensor | CodedValues:
    if not form.startswith("codes"):
        return _cache(rows.to({"f16": torch.float16, "f32": torch.float32}[form]), math.nan)
    coded = encode_values(rows, bits=int(form.removeprefix("codes")))
    codes, norms = _cache(coded.codes, 255), _cache(coded.norms, math.nan)
    return CodedValues(codes, norms, coded.codebook, coded.sf, coded.signs)


def _cache(rows: Tensor, poison: float) -> Tensor:
    """Rows ``[1, Hk, T, n]`` in a cache with poison in TAIL rows past T."""
    cache = rows.new_full((*rows.shape[:2], rows.shape[2] + TAIL, rows.shape[3]), poison)
    cache[:, :, : rows.shape[2]] = rows
    return cache


def sampled_rows(rows: int, count: int = 24) -> Tensor:
    """Sorted indices of the first, the last and up to ``count`` random rows."""
    picked = torch.randperm(rows, generator=torch.Generator().manual_seed(7))[:count]
    return torch.cat([picked, torch.tensor([0, rows - 1])]).unique()


def exact_rows(work: Workload, inputs: InputSet, form: str, rows: Tensor) -> Tensor:
    """float64 attention of some query rows, ``[1, H, len(rows), D]``, by the oracle."""
    rows = rows.to(inputs.q.device)
    q, k, v, visible = inputs.q[:, :, rows], inputs.k, inputs.v[form], External(seen(work, rows))
    return reference.attention(q, k, v, visible=visible, kv_len=work.keys)[0]


def seen(work: Workload, rows: Tensor, first: int = 0) -> Tensor:
    """bool ``[len(rows), T - first]``: the keys from ``first`` on that each of the query rows sees."""
    position = work.q_offset + rows[:, None]
    key = torch.arange(first, work.keys, device=rows.device)
    causal = key <= position
    return causal if work.window is None else causal & (position - key < work.window)


class Clock:
    """Times runs on the current CUDA device. Every method rotates through the ``sets`` input sets."""

    def eager(self, run: Run, sets: int) -> Callable[[], float]:
        """A sampler: ms per call, of one call per input set launched back to back."""

        def once() -> None:
            for index in range(sets):
                run(index)

        return lambda: self._elapsed(once) / sets

    def graph(self, run: Run, sets: int) -> Callable[[], float]:
        """A sampler: ms per call in the replay of a CUDA graph that holds one call per input set."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for index in range(sets):
                run(index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(sets):
                run(index)
        graph.replay()
        torch.cuda.synchronize()
        return lambda: self._elapsed(graph.replay) / sets

    def _elapsed(self, work: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def host(self, run: Run, sets: int, calls: int, batches: int = 7) -> float:
        """µs of host time per call: median over batches of calls that nothing waits for."""
        times = []
        for _ in range(batches):
            self.wait()
            begun = time.perf_counter_ns()
            for call in range(calls):
                run(call % sets)
            times.append((time.perf_counter_ns() - begun) / calls / 1000)
        self.wait()
        return statistics.median(times)

    def peak_bytes(self, run: Run) -> int:
        """Bytes that a call allocates, at their peak, on a stream that has no workspace yet."""
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(torch.cuda.Stream()):
            run(0)
        self.wait()
        return torch.cuda.max_memory_allocated() - before

    def wait(self) -> None:
        torch.cuda.synchronize()


def copy_bandwidth() -> float:
    """Bytes per second that a 4 GiB copy within the device moves, read and written ones together."""
    source = torch.ones(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    sample = Clock().eager(lambda _: target.copy_(source), 1)
    return 2 * source.numel() / (_median(sample) / 1e3)


def matmul_rate(dtype: torch.dtype, size: int = 8192) -> float:
    """FLOP/s of a square matrix product of random operands."""
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    sample = Clock().eager(lambda _: torch.mm(a, b, out=product), 1)
    return 2 * size**3 / (_median(sample) / 1e3)


def _median(sample: Callable[[], float], warm_up: int = 3, rounds: int = 15) -> float:
    for _ in range(warm_up):
        sample()
    return statistics.median(sample() for _ in range(rounds))
