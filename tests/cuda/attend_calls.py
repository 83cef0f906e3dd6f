"""The run-time arguments and constants with which an `AttentionCall` launches an ``attend`` kernel, plainly.

Both kernels take the same arguments. This is written apart from `warmattn.backend.cuda.launch`, which needs a
GPU, caches what it can and spreads its work over streams.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warmattn.call import AttentionCall


class Aligned(NamedTuple):
    """Where rows begin at multiples of 16 bytes (out: 8): the kernels take strides in such units then."""

    qk: bool
    v: bool
    out: bool

    @classmethod
    def of(cls, call: AttentionCall, out: Tensor) -> Aligned:
        return cls(_starts(16, call.q) and _starts(16, call.k), _starts(16, call.v), _starts(8, out))


def _starts(unit: int, tensor: Tensor) -> bool:
    offsets = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:3]))
    return not any(offset % unit for offset in offsets)


def form(call: AttentionCall) -> str:
    return "codes" if call.coded else "f16" if call.v.dtype == torch.float16 else "f32"


def lengths_on_device(call: AttentionCall) -> bool:
    return any(isinstance(n, Tensor) for n in (call.q_offset, call.kv_len, call.kv_start))


def constants(call: AttentionCall, *, walk: bool, split: int) -> dict[str, Any]:
    """Those that the two kernels share."""
    return {
        "D": call.D,
        "CAUSAL": call.causal,
        "WINDOW": call.window is not None,
        "MASK": call.mask is not None,
        "MAP": call.tile_map is not None,
        "SOFTCAP": call.softcap is not None,
        "LENGTHS": lengths_on_device(call),
        "FORM": form(call),
        "WALK": walk,
        "SPLIT": split,
    }


def arguments(
    call: AttentionCall, aligned: Aligned, out: Tensor, maxima: Tensor, sums: Tensor, *, walk: bool
) -> tuple[Any, ...]:
    """Of a launch over splits from the first on. ``out`` is the call's, or holds its partial results."""
    q, k, v = call.q, call.k, call.v
    qk_unit = 8 if aligned.qk else 1
    v_unit = 16 // v.element_size() if aligned.v else 1
    out_unit = 2 if aligned.out else 1
    out_strides = out.stride()[:3] if walk else (0, 0, 0)
    unused = torch.zeros(1)

    norms, centroids, norm_strides = unused, unused, (0, 0, 0, 0)
    if call.norms is not None:
        assert call.centroids is not None
        norms = call.norms if call.norms.ndim == 4 else call.norms[..., None]
        norm_strides, centroids = norms.stride(), call.centroids

    scale = call.scale if call.softcap is None else 1.0
    mask, mask_strides = torch.zeros(1, dtype=torch.float16), (0, 0, 0, 0)
    if call.mask is not None:
        mask = call.mask if call.mask.ndim == 4 else call.mask[None, None]
        mask_strides = mask.expand(call.B, call.H, -1, -1).stride()
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    tile_map = torch.zeros(1, dtype=torch.uint8) if call.tile_map is None else call.tile_map

    lengths = (call.q_offset, call.kv_len, call.kv_start)
    nowhere = torch.empty(0, dtype=torch.int32)
    pointers = tuple(n if isinstance(n, Tensor) else nowhere for n in lengths)
    numbers = tuple(0 if isinstance(n, Tensor) else n for n in lengths)
    cap_in = 0.0 if call.softcap is None else call.scale / call.softcap
    return (
        q, *(stride // qk_unit for stride in q.stride()[:3]),
        k, *k.stride()[:2], k.stride(2) // qk_unit,
        v, *(stride // v_unit for stride in v.stride()[:3]),
        norms, *norm_strides, centroids, centroids.numel() - 1, call.sf,
        mask, *mask_strides, 1.0 / scale, tile_map, tile_map.shape[-1],
        out, *(stride // out_unit for stride in out_strides),
        maxima, sums, 2.0**-15 if form(call) == "f16" else 2.0**-23,
        *pointers, *numbers, call.key_offset, call.window or 0,
        call.H, call.Hk, call.S, call.C, scale * math.log2(math.e), cap_in, call.softcap or 0.0, 0, call.B,
    )  # fmt: skip
