"""What a call must do at least: visible pairs, floating-point operations, bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from warmattn.call import AttentionCall
from warmattn.visibility import HIDDEN_AT

__all__ = ["flops", "host_length", "least_bytes", "visible_pairs"]


def visible_pairs(call: AttentionCall) -> int:
    """Number of visible (row, key) pairs over all sequences and query heads."""
    total = 0
    for b in range(call.B):
        start, end = host_length(call.kv_start, b, 0), host_length(call.kv_len, b, call.C)
        if call.mask is not None:
            total += int(_shown(call.mask, b, start, end).expand(call.H, -1, -1).sum())
            continue
        if not call.causal:
            total += call.H * call.S * max(0, end - start)
            continue
        position = host_length(call.q_offset, b, call.C) - call.key_offset + torch.arange(call.S)
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


def flops(call: AttentionCall) -> int:
    """``4 * pairs * D``: one multiplication and one addition per pair and element, for Q·K and for P·V."""
    return 4 * visible_pairs(call) * call.D


def least_bytes(call: AttentionCall) -> int:
    """Least memory traffic: q, the mask and every row of k and v that some row sees read once, each output
    written once.
    """
    key_rows = 0
    for b in range(call.B):
        start, end = host_length(call.kv_start, b, 0), host_length(call.kv_len, b, call.C)
        if call.mask is not None:
            by_head = _shown(call.mask, b, start, end).any(dim=1).expand(call.H, -1)
            key_rows += int(by_head.unflatten(0, (call.Hk, call.group)).any(dim=1).sum())
            continue
        if call.causal:
            position = host_length(call.q_offset, b, call.C) - call.key_offset
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


def host_length(length: int | Tensor, b: int, otherwise: int) -> int:
    """Sequence b's length where the host may read it, else ``otherwise``: a GPU tensor is never read."""
    if not isinstance(length, Tensor):
        return length
    return int(length[b]) if length.device.type == "cpu" else otherwise
