"""Who codes the rows of a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from warmattn.codec import kernels


@pytest.fixture(autouse=True)
def _load_anew() -> Iterator[None]:
    kernels._load.cache_clear()
    yield
    kernels._load.cache_clear()


def test_the_cpu_has_kernels_where_they_were_built(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = kernels.row_kernels(torch.device("cpu"))
    assert codec is not None
    assert codec.encode.__module__ == "warmattn.backend.cpu.codec"
    kernels._load.cache_clear()
    monkeypatch.setattr("warmattn.backend.cpu.codec.available", lambda: False)
    assert kernels.row_kernels(torch.device("cpu")) is None


def test_a_gpu_without_triton_has_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels.row_kernels(torch.device("cuda")) is None


def test_a_gpu_with_triton_has_kernels() -> None:
    pytest.importorskip("triton")
    codec = kernels.row_kernels(torch.device("cuda"))
    assert codec is not None
    assert codec.encode.__module__ == "warmattn.backend.cuda.codec"


def test_a_graph_is_traced_through_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert kernels.row_kernels(torch.device("cuda")) is None
