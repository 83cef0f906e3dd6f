"""The CPU backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warmattn.backend import SplitPartials, Tiling
from warmattn.backend.cpu import native, torch_ops
from warmattn.call import AttentionCall
from warmattn.partials import Exponential
from warmattn.pipelines import PipelineKey

__all__ = ["BACKEND", "CpuBackend"]


class CpuBackend:
    """Attention on the CPU: the compiled kernels, or tiled torch operations where they were not built."""

    name = "cpu"
    device_types = ("cpu",)

    def unavailable(self) -> str | None:
        return native.refusal()

    def supports(self, call: AttentionCall) -> str | None:
        device = call.q.device
        return None if device.type == "cpu" else f"operands are on {device}, not on the CPU"

    def tiling(self, head_dim: int) -> Tiling:
        isa = native.selected_isa()
        return torch_ops.TILING if isa is None else native.tiling(isa)

    def exponential(self, call: AttentionCall) -> Exponential:
        return native.exponential_of(call)

    def prepare(self, keys: Sequence[PipelineKey], device: torch.device) -> None:
        """Nothing to prepare, as there is nothing to build."""

    def build(self, key: PipelineKey, device: torch.device) -> None:
        """Nothing to compile: the kernels came with the wheel, and torch operations need no building."""

    def run(self, call: AttentionCall) -> None:
        isa = native.selected_isa()
        if isa is None:
            torch_ops.run(call)
        else:
            native.run(isa, call)

    def run_partials(self, call: AttentionCall) -> SplitPartials:
        isa = native.selected_isa()
        return torch_ops.run_partials(call) if isa is None else native.run_partials(isa, call)


BACKEND = CpuBackend()
