"""The registered op ``warmattn::attention``. Imports torch only; a backend is reached when a call runs.

`torch.library.Library.define/impl` costs about a tenth of `torch.library.custom_op` per call. The op writes
into the outputs it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warmattn.call import AttentionCall, round_to_f32

__all__ = ["attention"]

_LIBRARY = torch.library.Library("warmattn", "DEF")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? norms, Tensor? centroids, float sf,"
    " bool causal, SymInt? window, Tensor? mask, Tensor? tile_map,"
    " SymInt q_offset, Tensor? q_offsets, SymInt kv_len, Tensor? kv_lens, SymInt kv_start, Tensor? kv_starts,"
    " SymInt key_offset, float scale, float? softcap,"
    " Tensor(a!) out, Tensor(b!)? lse, str backend, bool checked) -> ()"
)


def attention(call: AttentionCall, out: Tensor, lse: Tensor | None, *, backend: str, checked: bool) -> None:
    """Run a call through the registered op, into ``out`` and ``lse``.

    Args:
        call: its own outputs are ignored.
        checked: the call has passed `AttentionCall.check`; otherwise the op checks it when it runs.
    """
    (*head, q_offset, kv_len, kv_start, key_offset, scale, softcap, _, _) = call
    torch.ops.warmattn.attention.default(
        *head,
        *_split(q_offset),
        *_split(kv_len),
        *_split(kv_start),
        key_offset,
        scale,
        softcap,
        out,
        lse,
        backend,
        checked,
    )


def _split(length: int | Tensor) -> tuple[int, Tensor | None]:
    """A schema has no "int or tensor": an int and an optional tensor stand for it."""
    return (0, length) if isinstance(length, Tensor) else (length, None)


def _join(length: int, lengths: Tensor | None) -> int | Tensor:
    return length if lengths is None else lengths


def _call(arguments: tuple) -> AttentionCall:
    (q, k, v, norms, centroids, sf, causal, window, mask, tile_map, *rest) = arguments
    (q_offset, q_offsets, kv_len, kv_lens, kv_start, kv_starts, key_offset, scale, softcap, out, lse) = rest
    return AttentionCall(
        q,
        k,
        v,
        norms,
        centroids,
        round_to_f32(sf),
        causal,
        window,
        mask,
        tile_map,
        _join(q_offset, q_offsets),
        _join(kv_len, kv_lens),
        _join(kv_start, kv_starts),
        key_offset,
        round_to_f32(scale),
        round_to_f32(softcap),
        out,
        lse,
    )


def _run(*arguments) -> None:
    from warmattn.backend import select

    *operands, backend, checked = arguments
    call = _call(tuple(operands))
    if not checked:
        call.check()
    select(call, backend).run(call)


def _trace(*arguments) -> None:
    _call(arguments[:-2]).check(values=False)


_LIBRARY.impl("attention", _run, "CompositeExplicitAutograd")
# Forward only: AttentionCall refuses what requires grad, so autograd has nothing to do here.
_LIBRARY.impl("attention", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("warmattn::attention", _trace, lib=_LIBRARY)
