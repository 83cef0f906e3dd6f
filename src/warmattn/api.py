"""The public calls: check, select, launch, nothing else."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from warmattn import ops
from warmattn.backend import backends, load, select
from warmattn.call import AttentionCall
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported
from warmattn.pipelines import REGISTRY, prewarm_keys
from warmattn.plan import Explanation, explain_call
from warmattn.visibility import Visibility

__all__ = ["attention", "explain", "prewarm"]


@overload
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
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
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
    out: Tensor | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
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
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of S query rows over T cached keys, read in place, at float32 accuracy.

    ``softmax(scale * q @ k.T) @ v``. Axes: B batch, H query heads, Hk key/value heads, S query rows, T keys
    (``kv_len``), C cache capacity, D head dim (64, 128, 256 or 512). H is a multiple of Hk, and query head h
    reads KV head ``h // (H / Hk)``. Operands may be strided views along every axis but D.

    The bits of an output row depend only on its query, the keys and values it sees, and the scale: a warm
    resume equals the cold run.

    Args:
        q: ``[B, H, S, D]``, float16 or bfloat16.
        k: ``[B, Hk, C, D]``, q's dtype. Rows ``[T, C)`` are never read.
        v: dense ``[B, Hk, R >= T, D]``, float32, float16 or bfloat16; or `CodedValues`, decoded tile by tile:
            the result is then in the rotated domain, see `warmattn.unrotate`.
        visible: `Causal`, `Window`, `External` or `Full`.
        kv_len: T, an int or an int32 tensor ``[B]``; ``None``: all C rows of k.
        kv_start: first visible row of k (left padding), an int or an int32 tensor ``[B]``; ``None``: 0.
        key_offset: absolute position of k's row 0. Multiples of the split length (see `explain`) keep the
            bits.
        scale: multiplies the scores, rounded to float32; ``None``: ``1 / sqrt(D)``.
        softcap: ``c``; a scaled score s becomes ``c * tanh(s / c)`` before masking.
        out: float32 ``[B, H, S, D]`` to write into; it may be strided and must not overlap an input.
        return_lse: also return the log-sum-exp.
        backend: ``"auto"``, or a name of `warmattn.backends`; a named backend never falls back.

    Returns:
        ``out``, float32 ``[B, H, S, D]``; with ``return_lse`` ``(out, lse)``, lse float32 ``[B, H, S]``:
        natural log of the sum of exp of the scaled, masked scores. A row that sees no key gives 0 and −inf.

    Raises:
        Unsupported: head dim, an operand that requires grad while grad is on, or a backend that does not
            exist or cannot run the call.
        InvalidInput: any other fault; the message names operand, expected and got. Nothing has been written
            then.
    """
    call = AttentionCall.of(
        q,
        k,
        v,
        visible=visible,
        kv_len=kv_len,
        kv_start=kv_start,
        key_offset=key_offset,
        scale=scale,
        softcap=softcap,
        out=out,
    )
    tracing = torch.compiler.is_compiling()
    if tracing:
        # The op checks when it runs, but then there is neither grad mode nor requires_grad to see.
        call.refuse_grad()
    else:
        call = call.rounded().check()
    if backend != "auto":
        load(backend)  # names what the op's schema could not: a backend that does not exist
    if out is None:
        out = q.new_empty(q.shape, dtype=torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    ops.attention(call, out, lse, backend=backend, checked=not tracing)
    return out if lse is None else (out, lse)


def explain(
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
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Explanation:
    """What `attention` would do with these arguments: pipeline label, backend, tiles, splits, bytes moved,
    FLOPs. Runs nothing.

    Takes `attention`'s arguments and raises its errors.
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
            out=out,
        )
        .rounded()
        .check()
    )
    if return_lse:
        call = call._replace(lse=q.new_empty(q.shape[:3], dtype=torch.float32))
    return explain_call(call, select(call, backend))


def prewarm(
    *,
    sliding: tuple[str, str] | None = None,
    global_: str | None = None,
    device: str | torch.device | None = None,
    backend: str = "auto",
) -> list[str]:
    """Build every pipeline that a model's attention layers can issue, so that serving compiles nothing.

    Args:
        sliding: ``(form, kind)`` of the D = 256 layers: form "f32", "f16" or "codes" (of V), kind
            "external", "external+map", "window" or "causal".
        global_: form of the D = 512 layers, which are always causal.
        device: where the layers run; ``None``: the CPU.
        backend: ``"auto"`` takes the first backend for that kind of device.

    Returns:
        The labels built: four alignments, the D = 256 label before the D = 512 one; 8, 4 or 0 of them.

    Raises:
        InvalidInput: an unknown form, kind or device.
        Unsupported: no backend for the device, or the named one cannot run here.
        RuntimeError: a pipeline could not be built; the message starts with its label, and no list is
            returned.
    """
    keys = prewarm_keys(sliding, global_)
    try:
        where = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise InvalidInput("device", expected="a device of torch", got=device, op="prewarm") from error
    chosen = load(_first_for(where) if backend == "auto" else backend, op="prewarm")
    if where.type not in chosen.device_types:
        raise Unsupported(f"backend {chosen.name!r} does not run on {where}", op="prewarm")
    reason = chosen.unavailable()
    if reason is not None:
        raise Unsupported(f"backend {chosen.name!r}: {reason}", op="prewarm")
    if keys:
        chosen.prepare(keys, where)
    labels = []
    for key in keys:
        try:
            REGISTRY.get_or_build(chosen.name, where, key, lambda key: chosen.build(key, where))
        except Exception as error:
            raise RuntimeError(f"{key.label}: could not be built: {error}") from error
        labels.append(key.label)
    return labels


def _first_for(device: torch.device) -> str:
    statuses = backends()
    for name, status in statuses.items():
        if device.type in status.device_types and status.available:
            return name
    reasons = "; ".join(f"{n}: {s.reason or f'runs on {s.device_types}'}" for n, s in statuses.items())
    raise Unsupported(f"no backend for {device}: {reasons}", op="prewarm")
