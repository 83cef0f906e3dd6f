"""The attention function: Transformers' arguments as one `warmattn.attention` call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warmattn.api import attention
from warmattn.cache.values import all_finite
from warmattn.codec.turboquant import unrotate
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported
from warmattn.integrations.arguments import INEXPRESSIBLE
from warmattn.integrations.transformers.cached import CachedKeys, CachedValues
from warmattn.integrations.transformers.lazy import untraced
from warmattn.integrations.transformers.masks import PositionMask
from warmattn.visibility import Causal, External, Full, Visibility, Window

__all__ = ["attend"]

_HARMLESS = frozenset(
    {
        "position_ids",  # they are in Q and K already
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "return_shared_kv_states",
        "shift_labels",
        "use_cache",
    }
)
"""Keywords that reach an attention function and have no part in what it computes."""


@untraced
def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function under the name "warmattn".

    Args:
        module: the attention layer; its ``is_causal`` counts where neither mask nor ``is_causal`` is given.
        query: ``[B, H, S, D]``; taken in the dtype of K.
        key: ``[B, Hk, T, D]``: of a `WarmCache`, read in place; else float16 or bfloat16 as it is, float32
            rounded to float16.
        value: ``[B, Hk, T, D]``, likewise, but every dtype as it is.
        attention_mask: what `make_mask` gave, or a mask of the user's, ``[B or 1, H or 1, S, T]``, bool
            (True = visible) or added to the scores.
        sliding_window: keys that a row sees, itself included; counts where there is no mask.

    Returns:
        ``(out, None)``: out ``[B, S, H, D]``, query's dtype.

    Raises:
        Unsupported: dropout, attention weights, sinks, position biases, keywords that are not known to be
            harmless; a window without causality or a mask; another head dim than 64, 128, 256, 512; operands
            that require grad while grad is on; Q or K past the range of their dtype, or mask cells that
            float16 cannot hold.
        InvalidInput: operands whose shapes do not fit, a mask of another dtype.
    """
    _refuse(dropout, others)
    # bfloat16 stays what it is; a float32 key, which a cache would have rounded, is rounded here.
    dtype = torch.bfloat16 if key.dtype == torch.bfloat16 else torch.float16
    k = key.kv.k if isinstance(key, CachedKeys) else _rounded(key, dtype, "K")
    v = value.kv.v if isinstance(value, CachedValues) else value
    q = _rounded(query, k.dtype, "Q")

    B, H, S, D = q.shape
    T = key.shape[2]
    kv_start = attention_mask.kv_start if isinstance(attention_mask, PositionMask) else None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    out = torch.empty(B, S, H, D, dtype=torch.float32, device=q.device)
    out = attention(
        q,
        k,
        v,
        visible=_visible(attention_mask, bool(is_causal), sliding_window, S, T),
        kv_len=T,
        kv_start=kv_start,
        scale=scaling,
        softcap=softcap,
        out=out.transpose(1, 2),
    ).transpose(1, 2)
    if isinstance(v, CodedValues):
        out = unrotate(out, signs=v.signs)
    return out.to(query.dtype), None


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise Unsupported("dropout: forward only, call model.eval()")
    for name, given in others.items():
        if given is None or given is False or name in _HARMLESS:
            continue
        if name == "output_attentions":
            raise Unsupported('attention weights are never formed: use the "eager" implementation')
        known = "changes the result and cannot be expressed" if name in INEXPRESSIBLE else "is not known"
        raise Unsupported(f"the attention keyword {name!r} {known}")


def _visible(mask: Tensor | None, causal: bool, window: int | None, rows: int, keys: int) -> Visibility:
    if isinstance(mask, PositionMask):
        if mask.shape[2:] != (rows, keys):
            expected = f"[.., .., S, T] = [.., .., {rows}, {keys}]"
            raise InvalidInput("mask", expected=expected, got=list(mask.shape))
        return mask.visible
    if mask is not None:
        return External(mask if mask.dtype == torch.bool else _additive(mask))
    if not causal:
        if window is not None:
            raise Unsupported("a window that is not causal needs a mask")
        return Full()
    # With shared K and V, or `logits_to_keep`, the S rows are the last of T, whatever the cache held before.
    q_offset = keys - rows
    return Causal(q_offset) if window is None else Window(window, q_offset)


def _rounded(rows: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if rows.dtype == dtype:
        return rows
    rounded = rows.to(dtype)
    # A GPU is not made to wait for the answer: there, such rows come out as NaN.
    if rounded.device.type == "cpu" and not all_finite(rounded):
        raise Unsupported(f"{name} is past the range of {dtype}")
    return rounded


def _additive(mask: Tensor) -> Tensor:
    """A float mask in float16; what lies below its range, as the least value of another dtype, hides."""
    if not mask.is_floating_point():  # of ints, some mean "visible" by 1, some add
        raise InvalidInput("mask", expected="bool or a float dtype", got=mask.dtype)
    rounded = mask.to(torch.float16)
    hidden = mask < torch.finfo(torch.float16).min
    if not (hidden | (rounded == mask)).all():
        raise Unsupported("the float mask has cells that float16 does not hold: pass bool, or 0 and -inf")
    return rounded
