"""THE oracle: attention as the contract defines it, eager, one head at a time, no tiling, no tricks.

Tests, `warmattn verify` and the benchmarks all judge by this one function. Read it next to docs/contract.md.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from warmattn.call import AttentionCall
from warmattn.codec.turboquant import decode_values
from warmattn.codec.values import CodedValues
from warmattn.visibility import HIDDEN_AT, Visibility

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | CodedValues,
    *,
    visible: Visibility,
    kv_len: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    key_offset: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """What `warmattn.attention` must give, computed plainly in ``dtype`` on the operands' device.

    Takes `warmattn.attention`'s operands; every score, weight and sum is of ``dtype`` (float64 or float32).

    Returns:
        ``(out [B, H, S, D], lse [B, H, S])`` of ``dtype``.

    Raises:
        InvalidInput, Unsupported: as `warmattn.attention`.
    """
    call = (
        AttentionCall.of(
            q,
            k,
            v,
            visible=visible,
            kv_len=kv_len,
            kv_start=kv_start,
            key_offset=key_offset,
            scale=scale,
            softcap=softcap,
        )
        .rounded()
        .check()
    )
    values = _decoded(v, int(_longest(call.kv_len))) if isinstance(v, CodedValues) else v

    out = torch.empty(call.q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(call.q.shape[:3], dtype=dtype, device=q.device)
    for b in range(call.B):
        start, end = int(_of(call.kv_start, b)), int(_of(call.kv_len, b))
        for h in range(call.H):
            kv_head = h // call.group
            keys = k[b, kv_head, :end].to(dtype)
            scores = q[b, h].to(dtype) @ keys.T * call.scale
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)

            seen = _seen(call, b, start, end)
            if call.mask is not None:
                cells = _cells(call.mask, b, h)[:, :end]
                if cells.dtype == torch.bool:
                    seen = seen & cells
                else:
                    seen = seen & ~(cells <= HIDDEN_AT)
                    scores = scores + cells.to(dtype)
            scores = scores.masked_fill(~seen, -math.inf)

            maximum = scores.amax(dim=1, keepdim=True)
            maximum = maximum.masked_fill(maximum == -math.inf, 0.0)
            weights = torch.exp(scores - maximum)
            total = weights.sum(dim=1, keepdim=True)
            out[b, h] = _weighted_sum(weights, seen, values[b, kv_head, :end].to(dtype)) / total
            out[b, h].masked_fill_(total == 0, 0.0)
            lse[b, h] = (maximum + total.log())[:, 0]
    return out, lse


def _decoded(coded: CodedValues, rows: int) -> Tensor:
    """The first rows of a coded V; codes and norms may each be allocated longer."""
    return decode_values(replace(coded, codes=coded.codes[:, :, :rows], norms=coded.norms[:, :, :rows]))


def _longest(length: int | Tensor) -> int | Tensor:
    return length.max() if isinstance(length, Tensor) else length


def _of(length: int | Tensor, b: int) -> int | Tensor:
    return length[b] if isinstance(length, Tensor) else length


def _cells(mask: Tensor, b: int, h: int) -> Tensor:
    """The ``[S, T]`` plane of a mask that sequence ``b`` and head ``h`` read."""
    if mask.ndim == 2:
        return mask
    return mask[b % mask.shape[0], h % mask.shape[1]]


def _seen(call: AttentionCall, b: int, start: int, end: int) -> Tensor:
    """bool ``[S, end]``: the keys each row sees by position alone."""
    rows = torch.arange(end, device=call.q.device)
    seen = (rows >= start).expand(call.S, end)
    if not call.causal:
        return seen
    position = _of(call.q_offset, b) + torch.arange(call.S, device=call.q.device)[:, None]
    key = call.key_offset + rows
    seen = seen & (key <= position)
    if call.window is not None:
        seen = seen & (position - key < call.window)
    return seen


def _weighted_sum(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """``weights @ values``, where a hidden key adds nothing even if its value is NaN or inf (0 * NaN is
    NaN).
    """
    finite = values.isfinite()
    out = weights @ values.masked_fill(~finite, 0.0)
    sees_non_finite = seen.to(weights.dtype) @ (~finite).to(weights.dtype) > 0
    return out.masked_fill(sees_non_finite, math.nan)
