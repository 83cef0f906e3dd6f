"""What a call costs: the data behind `warmattn.explain`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warmattn.backend import Backend, Tiling
from warmattn.call import AttentionCall
from warmattn.pipelines import PipelineKey
from warmattn.visibility import HIDDEN_AT

__all__ = ["Explanation", "explain_call", "visible_pairs"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one call resolves to.

    Attributes:
        label: the pipeline's label.
        backend: name of the backend.
        tiling: rows and keys of a tile, keys of a split.
        splits: fixed splits of the keys ``[0, T)``; a multiple of ``tiling.split`` is a ``key_offset`` that
            keeps the bits.
        pairs: visible (row, key) pairs over all sequences and heads; with lengths that lie on a GPU, an
            upper bound.
        flops: ``4 * pairs * D``: one multiplication and one addition per pair and element, for Q·K and for
            P·V.
        bytes: least memory traffic: each operand's visible part read once, each output written once.
    """

    label: str
    backend: str
    tiling: Tiling
    splits: int
    pairs: int
    flops: int
    bytes: int


def explain_call(call: AttentionCall, backend: Backend) -> Explanation:
    """Describe a checked call on the backend that will run it."""
    tiling = backend.tiling(call.D)
    kv_lens = [_host(call.kv_len, b, call.C) for b in range(call.B)]
    pairs = visible_pairs(call)
    return Explanation(
        label=PipelineKey.of(call).label,
        backend=backend.name,
        tiling=tiling,
        splits=-(-max(kv_lens) // tiling.split),
        pairs=pairs,
        flops=4 * pairs * call.D,
        bytes=_bytes(call),
    )


def visible_pairs(call: AttentionCall) -> int:
    """Number of visible (row, key) pairs over all sequences and query heads."""
    total = 0
    for b in range(call.B):
        start, end = _host(call.kv_start, b, 0), _host(call.kv_len, b, call.C)
        if call.mask is not None:
            mask = call.mask if call.mask.ndim == 4 else call.mask[None, None]
            plane = mask[b % mask.shape[0], :, :, start:end]
            seen = plane if plane.dtype == torch.bool else plane > HIDDEN_AT
            total += int(seen.sum()) * (call.H // mask.shape[1])
            continue
        if not call.causal:
            total += call.H * call.S * max(0, end - start)
            continue
        position = _host(call.q_offset, b, call.C) - call.key_offset + torch.arange(call.S)
        last = position.clamp(max=end - 1)
        first = torch.full_like(position, start)
        if call.window is not None:
            first = torch.maximum(first, position - call.window + 1)
        total += call.H * int((last - first + 1).clamp(min=0).sum())
    return total


def _bytes(call: AttentionCall) -> int:
    keys = 0
    for b in range(call.B):
        start, end = _host(call.kv_start, b, 0), _host(call.kv_len, b, call.C)
        if call.causal:
            position = _host(call.q_offset, b, call.C) - call.key_offset
            end = min(end, position + call.S)
            if call.window is not None:
                start = max(start, position - call.window + 1)
        keys += max(0, end - start)
    value_row = call.D * call.v.element_size() + (4 * max(1, call.D // 256) if call.coded else 0)
    key_rows = keys * call.Hk * (call.D * call.k.element_size() + value_row)
    out_rows = call.B * call.H * call.S * (4 * call.D + (4 if call.lse is not None else 0))
    mask = 0 if call.mask is None else call.mask.numel() * call.mask.element_size()
    return key_rows + out_rows + mask + call.q.numel() * call.q.element_size()


def _host(length: int | Tensor, b: int, otherwise: int) -> int:
    """Sequence b's length where the host may read it, else ``otherwise``: a GPU tensor is never read."""
    if not isinstance(length, Tensor):
        return length
    return int(length[b]) if length.device.type == "cpu" else otherwise
