"""Compiled kernels for the rows of a device, where a backend has them; elsewhere torch operations serve."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["RowKernels", "row_kernels"]

_CPU, _CUDA = "warmattn.backend.cpu.codec", "warmattn.backend.cuda.codec"
HOMES = {"cpu": _CPU, "cuda": _CUDA}
"""Modules by device type. Named, not imported: the codec stands without any backend."""


class RowKernels(Protocol):
    """The sequence of `warmattn.codec.turboquant`, bit for bit, over rows of any leading axes.

    Operands are checked before they come here, and inputs may have any strides; what is written is contiguous
    and newly allocated. Shapes and dtypes are those of `encode_values`, `decode_values` and `unrotate`.
    """

    def encode(
        self,
        x: Tensor,
        signs: Tensor,
        centroids: Tensor,
        sf: float,
        codes: Tensor,
        norms: Tensor,
        broken: Tensor,
    ) -> None:
        """Steps 1 to 7. ``broken``, bool ``[...]``, tells which rows were not finite and became zeros."""
        ...

    def decode(self, codes: Tensor, norms: Tensor, centroids: Tensor, sf: float, values: Tensor) -> None:
        """Steps 8 and 9."""
        ...

    def unrotate(self, o: Tensor, signs: Tensor, result: Tensor) -> None:
        """The rotation back."""
        ...


def row_kernels(device: torch.device) -> RowKernels | None:
    """The kernels for rows on ``device``; ``None`` where it has none, and in a graph that is being traced."""
    if torch.compiler.is_compiling() or device.type not in HOMES:
        return None
    return _load(HOMES[device.type])


@cache
def _load(home: str) -> Any:
    # torch calls an AMD GPU "cuda" too; the bits of these kernels are known for NVIDIA's alone.
    if home == _CUDA and (find_spec("triton") is None or torch.version.hip is not None):
        return None
    kernels = importlib.import_module(home)
    return None if home == _CPU and not kernels.available() else kernels
