"""The GPU benchmark on tiny shapes of a CPU: what it checks, what it refuses to time, and what it writes."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from warmattn.testing import relative_error
from warmattn.workloads import H200_WORKLOADS, Workload

TINY = (
    Workload("square", 256, 4, 2, 40, 40),
    Workload("resume", 512, 8, 2, 7, 130),
    Workload("window", 256, 4, 2, 33, 200, 50),
)
CPU = torch.device("cpu")


class HostClock:
    """`_gpu.Clock` for a CPU, which has neither events nor graphs."""

    def eager(self, run: Callable[[int], Tensor], sets: int) -> Callable[[], float]:
        def sample() -> float:
            begun = time.perf_counter()
            for index in range(sets):
                run(index)
            return (time.perf_counter() - begun) / sets * 1e3

        return sample

    def graph(self, run: Callable[[int], Tensor], sets: int) -> Callable[[], float]:
        raise RuntimeError("a CPU captures no graph")

    def host(self, run: Callable[[int], Tensor], sets: int, calls: int) -> float:
        return 1.0

    def peak_bytes(self, run: Callable[[int], Tensor]) -> int:
        return 0

    def wait(self) -> None: ...


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module


def measured(
    bench: Callable[[str], ModuleType], work: Workload, entrants: Any, sets: Any, seconds: float
) -> Any:
    module = bench("h200_attention")
    budget, roof = module.Budget(seconds), module.Roof(4e12, 8e14, 8e14)
    return module.measure(work, sets, entrants, HostClock(), budget, rounds=2, roof=roof, backend="cpu")


@pytest.mark.parametrize("work", TINY, ids=lambda work: work.name)
def test_every_contender_that_runs_here_is_right(bench: Callable[[str], ModuleType], work: Workload) -> None:
    sets = bench("_gpu").input_sets(work, ("f16", "f32", "codes8"), 5, CPU)
    names = ("warmattn", "sdpa_f16", "sdpa_f32", "fa4")
    entrants = bench("_gpu_peers").contenders(work, sets, names=names, backend="cpu")
    rows, failed = measured(bench, work, entrants, sets, 100.0)
    errors = {(row["contender"], row["values"]): row["error"] for row in rows}
    assert errors.keys() == {
        *(("warmattn", form) for form in ("f16", "f32", "codes8")),
        ("sdpa_f16", "f16"),
        ("sdpa_f32", "f32"),
    }
    for (name, _), error in errors.items():
        assert error < (1e-3 if name == "sdpa_f16" else 1e-6)
    assert {failure["contender"] for failure in failed if "no variant" in failure["reason"]} == {"fa4"}
    assert sum("graph capture" in failure["reason"] for failure in failed) == 5
    json.dumps(rows)


@pytest.mark.parametrize("work", TINY, ids=lambda work: work.name)
def test_every_way_to_call_sdpa_computes_the_same(bench: Callable[[str], ModuleType], work: Workload) -> None:
    sets = bench("_gpu").input_sets(work, ("f16", "f32"), 5, CPU)
    rows, ran = torch.arange(work.rows), set()
    for contender in bench("_gpu_peers").contenders(work, sets, names=("sdpa_f16", "sdpa_f32")):
        exact = bench("_gpu").exact_rows(work, sets[1], contender.values, rows)
        for variant in contender.variants:
            run = variant.set_up()
            if variant.name.endswith(("efficient", "cudnn")):
                with pytest.raises(RuntimeError, match="No viable backend"):
                    run(1)
                continue
            assert relative_error(run(1), exact) < (1e-3 if contender.values == "f16" else 1e-6), variant.name
            ran.add(variant.name.split(",")[0])
    assert ran == {"gqa", "expanded", "packed"}


@pytest.mark.parametrize("work", TINY, ids=lambda work: work.name)
def test_the_check_agrees_with_the_oracle_on_whole_calls(
    bench: Callable[[str], ModuleType], work: Workload
) -> None:
    gpu, oracle = bench("_gpu"), importlib.import_module("warmattn").reference
    x = gpu.input_sets(work, ("f16",), 6, CPU)[0]
    assert x.k[:, :, work.keys :].isnan().all()
    rows = gpu.sampled_rows(work.rows)
    assert {0, work.rows - 1} <= set(rows.tolist())
    whole = oracle.attention(x.q, x.k, x.v["f16"], visible=work.visible, kv_len=work.keys)[0]
    assert relative_error(gpu.exact_rows(work, x, "f16", rows), whole[:, :, rows]) < 1e-12


@pytest.mark.parametrize("fault", ["wrong", "unwritten", "refused"])
def test_a_contender_that_is_not_right_is_not_timed(bench: Callable[[str], ModuleType], fault: str) -> None:
    work = TINY[0]
    sets = bench("_gpu").input_sets(work, ("f16",), 5, CPU)
    peers = bench("_gpu_peers")
    right = next(peers.contenders(work, sets, names=["warmattn"], forms=["f16"], backend="cpu"))

    def set_up() -> Callable[[int], Tensor]:
        if fault == "refused":
            raise RuntimeError("no kernel for this head dim")
        run = right.variants[0].set_up()

        def spoiled(index: int) -> Tensor:
            out = run(index).clone()
            out[:, :, 3] = math.nan if fault == "unwritten" else 0.0
            return out

        return spoiled

    peer = peers.Contender("peer", "f16", [peers.Variant("spoiled", set_up)])
    rows, failed = measured(bench, work, iter([peer]), sets, 100.0)
    assert rows == []
    assert fault == "refused" or "wrong" in failed[0]["variants"]["spoiled"]
    both = peers.Contender("peer", "f16", [*peer.variants, *right.variants])
    rows, failed = measured(bench, work, iter([both]), sets, 100.0)
    assert [row["variant"] for row in rows] == [""]


def test_a_spent_budget_is_reported(bench: Callable[[str], ModuleType]) -> None:
    work = TINY[0]
    sets = bench("_gpu").input_sets(work, ("f16",), 5, CPU)
    entrants = bench("_gpu_peers").contenders(work, sets, names=["warmattn"], forms=["f16"], backend="cpu")
    rows, failed = measured(bench, work, entrants, sets, -1.0)
    assert rows == []
    assert failed[0]["reason"] == "out of time before it began"


def test_the_goals_compare_replays_of_one_shape(bench: Callable[[str], ModuleType]) -> None:
    report = bench("_gpu_report")
    times = {
        ("warmattn", "f16"): 0.32,
        ("warmattn", "codes8"): 0.40,
        ("fa4", "f16"): 0.20,
        ("sdpa_f32", "f32"): 3.2,
    }
    rows = [
        {
            "shape": shape,
            "contender": name,
            "values": values,
            "ms": ms * (1 if graph else 9 if name == "warmattn" else 5),
            "graph": graph,
            "error": 1e-6,
            "range_ms": [ms, ms],
            "tflops": 1.0,
            "host_us": 18.0,
            "peak_bytes": 0,
            "variant": "",
        }
        for shape, ((name, values), ms), graph in itertools.product(
            ("S1", "S6"), times.items(), (True, False)
        )
    ]
    lines = report.goals(rows).splitlines()
    assert any(line.startswith("S1 f16      0.625 of fa4") and line.endswith("stretch") for line in lines)
    assert any(line.startswith("S1 f16     10.000 of sdpa_f32") for line in lines)
    assert any(
        line.startswith("S6 f16      0.625 of any f16 peer") and line.endswith("MISSED") for line in lines
    )
    assert any(
        line.startswith("S6 codes8   0.800 of warmattn f16") and line.endswith("must") for line in lines
    )
    table = report.table(
        rows, [{"shape": "S1", "contender": "fa4", "values": "f16", "reason": "not installed"}]
    )
    assert len(table.splitlines()) == 1 + 2 * len(times) + 1
    assert "0.3200" in table
    assert "2.8800" in table


def test_the_shapes_are_resumes_at_the_end_of_their_keys() -> None:
    for work in H200_WORKLOADS:
        assert work.q_offset + work.rows == work.keys
    assert {work.name: work.first_key for work in H200_WORKLOADS if work.window is not None} == {"S2": 29697}


@pytest.mark.parametrize("D", [256, 512])
def test_the_accuracy_sweep_holds_here_and_sees_a_coarse_result(
    bench: Callable[[str], ModuleType], D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = bench("h200_accuracy")
    heads, kv_heads = sweep.HEADS[D]
    work = Workload("", D, heads, kv_heads, 5, 300)
    rows = [row for name in sweep.VALUES for row in sweep.rows_of(work, name, sweep.FORMS, CPU, "cpu")]
    assert len(rows) == len(sweep.VALUES) * len(sweep.FORMS) * len(sweep.DEVIATIONS)
    assert all(row["holds"] for row in rows)
    assert all(
        row["bound"] <= 1e-6 for row in rows if row["distribution"] == "standard" and row["deviation"] == 1
    )

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "sdpa_f32", lambda work, x, form, scale: (x.q.float(), x.q.float()))
        bounds = {
            row["deviation"]: row["bound"] for row in sweep.rows_of(work, "standard", ("f16",), CPU, "cpu")
        }
    assert bounds[1.0] == 1e-6
    assert bounds[4.0] > 1

    exact = sweep.warmattn.attention
    monkeypatch.setattr(sweep.warmattn, "attention", lambda *a, out, **k: out.copy_(exact(*a, **k).half()))
    assert not any(row["holds"] for row in sweep.rows_of(work, "standard", ("f16",), CPU, "cpu"))
