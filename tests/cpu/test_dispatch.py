"""Which kernels a process runs: the forced one, the fastest that can run, or torch operations without any."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from warmattn import Causal, Unsupported, attention, reference
from warmattn.backend import backends, load
from warmattn.backend.cpu import native, torch_ops
from warmattn.testing import assert_accurate, make_inputs


@pytest.fixture
def _fresh_choice() -> Iterator[None]:
    """The choice is made once in a process: forget it before and after the test."""
    caches = (native.load_library, native.isas, native.selected_isa)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("_fresh_choice")
def test_the_variable_forces_each_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in native.isas():
        monkeypatch.setenv("WARMATTN_CPU_ISA", isa.name)
        native.selected_isa.cache_clear()
        if isa.missing is None:
            assert native.refusal() is None
            assert native.selected_isa() == isa
            assert load("cpu").tiling(256) == native.tiling(isa)
        else:
            assert isa.missing in str(native.refusal())


@pytest.mark.usefixtures("_fresh_choice")
def test_an_unknown_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMATTN_CPU_ISA", "mmx")
    status = backends()["cpu"]
    assert not status.available
    assert "WARMATTN_CPU_ISA=mmx" in str(status.reason)
    assert "portable" in str(status.reason)
    inputs = make_inputs(1, S=1, T=8, D=64)
    with pytest.raises(Unsupported, match="WARMATTN_CPU_ISA=mmx"):
        attention(inputs.q, inputs.k, inputs.v, visible=Causal(7), kv_len=8)


@pytest.mark.usefixtures("_fresh_choice")
def test_without_a_library_torch_operations_serve_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_LIBRARY", "_not_built.so")
    monkeypatch.delenv("WARMATTN_CPU_ISA", raising=False)
    inputs = make_inputs(2, S=5, T=40, D=64)
    with caplog.at_level(logging.WARNING, logger="warmattn"):
        attention(inputs.q, inputs.k, inputs.v, visible=Causal(35), kv_len=40)
        out = attention(inputs.q, inputs.k, inputs.v, visible=Causal(35), kv_len=40)
    assert len([record for record in caplog.records if "not built" in record.message]) == 1
    assert load("cpu").tiling(64) == torch_ops.TILING
    expected, _ = reference.attention(inputs.q, inputs.k, inputs.v, visible=Causal(35), kv_len=40)
    assert_accurate(out, expected, keys=40)


def test_the_library_shares_torchs_openmp_runtime() -> None:
    """No second runtime: every mapped libgomp is one file."""
    inputs = make_inputs(3, S=64, T=64, D=64)
    attention(inputs.q, inputs.k, inputs.v, visible=Causal(0), kv_len=64)
    assert torch.get_num_threads() >= 1
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(runtimes) == 1
