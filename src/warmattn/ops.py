"""The registered op ``warmattn::attention``. Imports torch only; a backend is reached when a call runs.

`torch.library.Library.define/impl` costs about a tenth of `torch.library.custom_op` per call. The op writes
into the outputs it is given. DTensors go through ``warmattn::attend``, which returns them instead: only then
is the sharding of the outputs the op's own to choose.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warmattn.backend import select
from warmattn.call import AttentionCall

__all__ = ["attention"]

_LIBRARY = torch.library.Library("warmattn", "DEF")
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? norms, Tensor? centroids, float sf,"
    " bool causal, SymInt? window, Tensor? mask, Tensor? tile_map,"
    " SymInt q_offset, Tensor? q_offsets, SymInt kv_len, Tensor? kv_lens, SymInt kv_start, Tensor? kv_starts,"
    " SymInt key_offset, float scale, float? softcap"
)
_HOW = "str backend, bool checked"
_LIBRARY.define(f"attention({_INPUTS}, Tensor(a!) out, Tensor(b!)? lse, {_HOW}) -> ()")
_LIBRARY.define(f"attend({_INPUTS}, {_HOW}) -> (Tensor out, Tensor lse)")

_LENGTHS_END = 16
"""Arguments up to the last of the three lengths."""


def attention(call: AttentionCall, out: Tensor, lse: Tensor | None, *, backend: str, checked: bool) -> None:
    """Run a call through the registered op, into ``out`` and ``lse``.

    Args:
        call: its own outputs are ignored.
        checked: the call has passed `AttentionCall.check`; otherwise the op checks it when it runs.
    """
    if checked and not _watched(call):
        select(call, backend).run(call._replace(out=out, lse=lse))
        return
    (*head, q_offset, kv_len, kv_start, key_offset, scale, softcap, _, _) = call
    lengths = (*_split(q_offset), *_split(kv_len), *_split(kv_start))
    inputs = (*head, *lengths, key_offset, scale, softcap)
    if hasattr(call.q, "placements"):  # a DTensor
        found = importlib.import_module("warmattn.sharding").attend(*inputs, backend, False)
        for output, result in zip((out, lse), found, strict=True):
            if output is not None:
                output.copy_(result)
    else:
        _OP(*inputs, out, lse, backend, checked)


def _watched(call: AttentionCall) -> bool:
    """Whether anything would notice that an eager call does not pass through torch's dispatcher, which takes
    longer over 23 arguments than the launch itself.
    """
    plain = type(call.q) is type(call.k) is type(call.v) is Tensor and not call.q.is_meta
    return not plain or torch._C._len_torch_dispatch_stack() > 0 or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def _split(length: int | Tensor) -> tuple[int, Tensor | None]:
    """A schema has no "int or tensor": an int and an optional tensor stand for it."""
    return (0, length) if isinstance(length, Tensor) else (length, None)


def _call(arguments: Sequence[Any]) -> AttentionCall:
    """The call that the op's arguments spell, up to ``lse``."""
    (*head, q_offset, q_offsets, kv_len, kv_lens, kv_start, kv_starts) = arguments[:_LENGTHS_END]
    lengths = (
        q_offset if q_offsets is None else q_offsets,
        kv_len if kv_lens is None else kv_lens,
        kv_start if kv_starts is None else kv_starts,
    )
    return AttentionCall._make((*head, *lengths, *arguments[_LENGTHS_END:]))


def _run(*arguments: Any) -> None:
    *operands, backend, checked = arguments
    call = _call(operands)
    if not checked:
        call = call.rounded().check()
    select(call, backend).run(call)


def _trace(*arguments: Any) -> None:
    _call(arguments[:-2]).check(values=False)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    outputs = _outputs(arguments[0])
    _run(*arguments[:-2], *outputs, *arguments[-2:])
    return outputs


_LIBRARY.impl("attention", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
# Forward only: AttentionCall refuses what requires grad, so autograd has nothing to do here.
_LIBRARY.impl("attention", torch.library.fallthrough_kernel, "Autograd")
_LIBRARY.impl("attend", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("warmattn::attention", _trace, lib=_LIBRARY)
torch.library.register_fake("warmattn::attend", lambda *arguments: _outputs(arguments[0]), lib=_LIBRARY)
_OP = torch.ops.warmattn.attention.default
