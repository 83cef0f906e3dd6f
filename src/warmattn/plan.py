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
        bytes: least memory traffic: q, the mask and every row of k and v that some row sees read once, each
            output written once; with lengths that lie on a GPU, an upper bound.
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
            total += int(_shown(call.mask, b, start, end).expand(call.H, -1, -1).sum())
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


def _shown(mask: Tensor, b: int, start: int, end: int) -> Tensor:
    """bool ``[1 or H, S, end - start]``: what a mask shows of sequence b's keys."""
    planes = mask if mask.ndim == 4 else mask[None, None]
    cells = planes[b % planes.shape[0], :, :, start:end]
    return cells if cells.dtype == torch.bool else cells > HIDDEN_AT


def _bytes(call: AttentionCall) -> int:
    key_rows = 0
    for b in range(call.B):
        start, end = _host(call.kv_start, b, 0), _host(call.kv_len, b, call.C)
        if call.mask is not None:
            by_head = _shown(call.mask, b, start, end).any(dim=1).expand(call.H, -1)
            key_rows += int(by_head.unflatten(0, (call.Hk, call.group)).any(dim=1).sum())
            continue
        if call.causal:
            position = _host(call.q_offset, b, call.C) - call.key_offset
            end = min(end, position + call.S)
            if call.window is not None:
                start = max(start, position - call.window + 1)
        key_rows += call.Hk * max(0, end - start)
    value_row = call.D * call.v.element_size() + (4 * max(1, call.D // 256) if call.coded else 0)
    operands = (
        key_rows * (call.D * call.k.element_size() + value_row) + call.q.numel() * call.q.element_size()
    )
    mask = 0 if call.mask is None else call.mask.numel() * call.mask.element_size()
    outputs = call.B * call.H * call.S * (4 * call.D + (4 if call.lse is not None else 0))
    return operands + mask + outputs


def _host(length: int | Tensor, b: int, otherwise: int) -> int:
    """Sequence b's length where the host may read it, else ``otherwise``: a GPU tensor is never read."""
    if not isinstance(length, Tensor):
        return length
    return int(length[b]) if length.device.type == "cpu" else otherwise
