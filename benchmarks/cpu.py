"""Time the CPU kernels against the best f32 attention that a careful user of torch could set up, interleaved.

    python benchmarks/cpu.py [--json] [--rounds 15] [--forms f16 codes8] [--flex] [--isas amx avx512 avx2]

Every round times each contender once, in turn, so that a busy moment hits all of them; the figure of a
contender is its median over the rounds, and the ratio is of medians. The peers get what a careful user would
give them: operands already widened to f32 (not timed), keys sliced to the visible range, and GQA heads packed
as rows or expanded, whichever is faster. Each instruction set runs in a process of its own, since one is
chosen per process; AVX2 is set against torch restricted to AVX2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import warmattn
from _recording import save
from warmattn import reference
from warmattn.testing import Inputs, make_inputs, relative_error
from warmattn.workloads import CPU_WORKLOADS, Workload

SEED = 20250


def peers(work: Workload, q: Tensor, k: Tensor, v: Tensor, *, flex: bool) -> dict[str, Callable[[], Tensor]]:
    """f32 attention in torch over ``[1, heads, rows, D]`` operands, set up in every sensible way."""
    group = work.heads // work.kv_heads
    first = 0 if work.window is None else max(0, work.q_offset - work.window + 1)
    q, k, v = q.float(), k[:, :, first : work.keys].float(), v[:, :, first : work.keys].float()
    position = work.q_offset - first + torch.arange(work.rows)[:, None]
    key = torch.arange(k.shape[2])
    seen = key <= position
    if work.window is not None:
        seen &= position - key < work.window
    is_square = work.rows == work.keys and work.window is None
    mask = None if work.rows == 1 else torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    expanded = [tensor.repeat_interleave(group, dim=1) for tensor in (k, v)]
    packed_q = q.reshape(1, work.kv_heads, group * work.rows, work.head_dim)
    packed_mask = None if mask is None else mask.repeat(group, 1)

    contenders = {
        "sdpa expanded": lambda: sdpa(q, expanded[0], expanded[1], attn_mask=mask),
        "sdpa packed": lambda: sdpa(packed_q, k, v, attn_mask=packed_mask).view(q.shape),
    }
    if is_square:
        contenders["sdpa is_causal"] = lambda: sdpa(q, expanded[0], expanded[1], is_causal=True)
        contenders["sdpa is_causal gqa"] = lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True)
    if flex:
        contenders["flex"] = _flex(work, q, k, v, work.q_offset - first)
    return contenders


def _flex(work: Workload, q: Tensor, k: Tensor, v: Tensor, offset: int) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = key <= row + offset
        return seen if work.window is None else seen & (row + offset - key < work.window)

    blocks = create_block_mask(visible, None, None, work.rows, k.shape[2], device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True)


def measure(work: Workload, forms: list[str], rounds: int, *, flex: bool) -> dict[str, object]:
    """Medians in ms of every contender on one workload, and each one's error against float64."""

    def operands(form: str) -> Inputs:
        return make_inputs(
            SEED,
            S=work.rows,
            T=work.keys,
            C=work.keys,
            D=work.head_dim,
            H=work.heads,
            Hk=work.kv_heads,
            values=form,
        )

    inputs = {form: operands(form) for form in dict.fromkeys(("f16", *forms))}
    base = inputs["f16"]
    assert isinstance(base.v, Tensor)
    contenders = peers(work, base.q, base.k, base.v, flex=flex)
    for form in forms:
        case = inputs[form]
        contenders[f"warmattn {form}"] = lambda case=case: warmattn.attention(
            case.q, case.k, case.v, visible=work.visible, kv_len=work.keys
        )
    expected = reference.attention(base.q, base.k, base.v, visible=work.visible, kv_len=work.keys)[0]
    errors = {
        name: relative_error(run(), expected) for name, run in contenders.items() if "codes" not in name
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    spread = {name: [min(values), max(values)] for name, values in times.items()}
    best_sdpa = min(value for name, value in medians.items() if name.startswith("sdpa"))
    ratios = {name: best_sdpa / value for name, value in medians.items() if not name.startswith("sdpa")}
    return {
        "workload": work.name,
        "median_ms": medians,
        "range_ms": spread,
        "ratio_to_best_sdpa": ratios,
        "error": errors,
    }


def in_process(isa: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure one instruction set in a fresh process; AVX2 is set against torch restricted to AVX2."""
    environment = os.environ | {"WARMATTN_CPU_ISA": isa}
    if isa == "avx2":
        environment |= {
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        }
    command = [
        sys.executable,
        __file__,
        "--worker",
        "--rounds",
        str(arguments.rounds),
        "--forms",
        *arguments.forms,
    ]
    if arguments.flex:
        command.append("--flex")
    if arguments.only:
        command += ["--only", arguments.only]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, list[dict]]) -> str:
    """The results as text: one line per instruction set and workload."""
    lines = [f"{'isa':9}{'workload':32}{'best SDPA':>11}{'error':>9}   time and ratio"]
    for isa, rows in results.items():
        ratios = []
        for row in rows:
            medians = row["median_ms"]
            best = min((value, name) for name, value in medians.items() if name.startswith("sdpa"))
            ours = "  ".join(
                f"{name}: {medians[name]:.2f} ms, {ratio:.2f}x"
                for name, ratio in row["ratio_to_best_sdpa"].items()
            )
            lines.append(f"{isa:9}{row['workload']:32}{best[0]:8.2f} ms{row['error'][best[1]]:9.1e}   {ours}")
            ratios.append(row["ratio_to_best_sdpa"]["warmattn f16"])
        lines.append(
            f"{isa:9}f16: geometric mean {statistics.geometric_mean(ratios):.2f}x, least {min(ratios):.2f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--forms", nargs="+", default=["f16", "codes8"])
    parser.add_argument("--isas", nargs="+", default=["amx", "avx512", "avx2"])
    parser.add_argument("--only", help="letters of the workloads to run")
    parser.add_argument(
        "--flex", action="store_true", help="also FlexAttention (compiles a kernel per shape)"
    )
    parser.add_argument("--json", action="store_true", help="publish in benchmarks/results/cpu.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        works = [work for work in CPU_WORKLOADS if not arguments.only or work.name[0] in arguments.only]
        print(
            json.dumps(
                [measure(work, arguments.forms, arguments.rounds, flex=arguments.flex) for work in works]
            )
        )
        return
    results = {isa: in_process(isa, arguments) for isa in arguments.isas}
    print(table(results))
    if arguments.json:
        save("cpu", {"seed": SEED, "load": os.getloadavg(), "results": results})


if __name__ == "__main__":
    main()
