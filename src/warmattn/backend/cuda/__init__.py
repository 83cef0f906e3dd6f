"""The CUDA backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch

from warmattn.backend import SplitPartials, Tiling
from warmattn.call import AttentionCall
from warmattn.partials import Exponential
from warmattn.pipelines import PipelineKey

__all__ = ["BACKEND", "CudaBackend"]

_OLDEST = (8, 0)


class CudaBackend:
    """Attention on NVIDIA GPUs, by Triton. Its kernels are imported, and compiled, when they are needed."""

    name = "cuda"
    device_types = ("cuda",)

    def unavailable(self) -> str | None:
        return _unavailable()

    def supports(self, call: AttentionCall) -> str | None:
        device = call.q.device
        if device.type != "cuda":
            return f"operands are on {device}, not on a GPU"
        major, minor = _capability(device.index)
        if (major, minor) < _OLDEST:
            needed = ".".join(map(str, _OLDEST))
            return f"{device} has compute capability {major}.{minor}, the kernels need {needed}"
        return None

    def tiling(self, head_dim: int) -> Tiling:
        from warmattn.backend.cuda import kernels

        return kernels.sizes(torch.cuda.current_device(), head_dim).tiling

    def exponential(self, call: AttentionCall) -> Exponential:
        from warmattn.backend.cuda import launch

        return launch.BASE_TWO

    def prepare(self, keys: Sequence[PipelineKey], device: torch.device) -> None:
        from warmattn.backend.cuda.building import build_side_by_side

        build_side_by_side(keys, str(device))

    def build(self, key: PipelineKey, device: torch.device) -> None:
        from warmattn.backend.cuda import codec, kernels

        with torch.cuda.device(device):
            kernels.build(key, torch.cuda.current_device())
            if key.form == "vcodes":
                codec.build(key.head_dim, torch.device("cuda", torch.cuda.current_device()))

    def run(self, call: AttentionCall) -> None:
        from warmattn.backend.cuda import launch

        launch.run(call)

    def run_partials(self, call: AttentionCall) -> SplitPartials:
        from warmattn.backend.cuda import launch

        return launch.run_partials(call)


@cache
def _unavailable() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


BACKEND = CudaBackend()
