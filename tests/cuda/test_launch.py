"""From calls to launches, with a device and kernels that only note what they are asked for."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warmattn import Causal, External, Window, tile_map
from warmattn.call import AttentionCall
from warmattn.pipelines import prewarm_keys
from warmattn.testing import make_inputs
from warmattn.visibility import Visibility

pytest.importorskip("triton")
from warmattn.backend.cuda import building, hopper, kernels, launch, merge, portable

SPLIT = 2048


class Kernel:
    """In place of a kernel: counts its builds, and holds every launch to the number of its parameters."""

    def __init__(self, real: Any, built: list[tuple[Any, ...]], launched: list[tuple[Any, ...]]) -> None:
        self.params, self.built, self.launched = real.params, built, launched

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Kernel:
        assert len(arguments) == len(self.params)
        self.built.append(arguments)
        return self

    function = packed_metadata = None

    def run(self, x: int, y: int, z: int, *arguments: Any) -> None:
        """Grid, six arguments of Triton's own, and the kernel's."""
        assert len(arguments) == 6 + len(self.params)
        self.launched.append((x, y, z))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """An H200 that runs nothing."""
    built: list[tuple[Any, ...]] = []
    launched: list[tuple[Any, ...]] = []
    for module, names in (
        (hopper, ["attend"]),
        (portable, ["attend"]),
        (merge, ["merge_splits", "log_sum_exp"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Kernel(getattr(module, name), built, launched))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launch, "_current_stream", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernels, "_COMPILED", {})
    monkeypatch.setattr(launch, "_PLANS", {})
    caches = (kernels.sizes, launch._processors)
    for cached in caches:
        cached.cache_clear()
    yield SimpleNamespace(built=built, launched=launched)
    for cached in caches:
        cached.cache_clear()


def run(D: int, values: str, visible: Visibility, S: int, T: int, *, lse: bool = False) -> None:
    x = make_inputs(1, S=S, T=T, D=D, H=4, Hk=2, values=values, C=T + 8)
    call = AttentionCall.of(x.q, x.k, x.v, visible=visible, kv_len=T).rounded().check()
    call = call._replace(out=torch.empty(x.q.shape), lse=torch.empty(x.q.shape[:3]) if lse else None)
    launch.run(call)


def kinds(kind: str, S: int, T: int) -> Visibility:
    mask = torch.zeros(S, T, dtype=torch.float16)
    return {
        "causal": Causal(T - S),
        "window": Window(100, T - S),
        "external": External(mask),
        "external+map": External(mask, tile_map(mask)),
    }[kind]


@pytest.mark.parametrize("kind", ["causal", "window", "external", "external+map"])
@pytest.mark.parametrize("form", ["f32", "f16", "codes"])
def test_after_prewarm_nothing_is_compiled(device: SimpleNamespace, form: str, kind: str) -> None:
    for key in prewarm_keys((form, kind), form):
        kernels.build(key, None)  # type: ignore[arg-type]
    built = len(device.built)
    assert built > 0
    values = "codes8" if form == "codes" else form
    for S, T in ((1, 64), (16, 300), (3, 2 * SPLIT + 9)):
        run(256, values, kinds(kind, S, T), S, T)
        run(256, values, kinds(kind, S, T), S, T, lse=True)
        run(512, values, Causal(T - S), S, T, lse=True)
    assert len(device.built) == built


@pytest.mark.parametrize("D", [64, 256])
def test_few_rows_over_many_keys_are_split(device: SimpleNamespace, D: int) -> None:
    run(D, "f16", Causal(3 * SPLIT), 1, 3 * SPLIT + 1)
    # 2 KV heads x 1 tile of rows x 4 splits; then 4 rows are merged, 128 columns at a time
    assert device.launched == [(2, 1, 4), (4, max(1, D // 128), 1)]


def test_a_window_launches_only_the_splits_it_touches(device: SimpleNamespace) -> None:
    run(256, "f16", Window(100, 3 * SPLIT + 50), 1, 3 * SPLIT + 51)
    assert device.launched[0] == (2, 1, 2)


def test_many_rows_walk_their_splits(device: SimpleNamespace) -> None:
    run(256, "f16", Causal(0), 3200, 3200, lse=True)
    assert device.launched == [
        (2, 50, 1),
        (100, 1, 1),
    ]  # 100 programs fill the device; then the LSE of 12,800 rows


def test_pipelines_are_shared_out_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[str] = []

    class Stdin(io.BytesIO):
        def close(self) -> None:
            if not self.closed:
                tasks.append(self.getvalue().decode())
            super().close()

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(stdin=Stdin(), wait=lambda: 0))
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    keys = prewarm_keys(("codes", "window"), "codes")
    building.build_side_by_side(keys, "cuda:1")
    assert len(tasks) == 3
    assert {json.loads(task)[0] for task in tasks} == {"cuda:1"}
    shared = [name for task in tasks for name, _ in json.loads(task)[1]]
    assert sorted(shared) == sorted(key.name for key in keys)
