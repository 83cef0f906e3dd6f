"""`warmattn.distributed.attention`: keys over many ranks, the result of one device bit for bit."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

import warmattn
from warmattn.backend import Backend, select
from warmattn.call import AttentionCall
from warmattn.codec.values import CodedValues
from warmattn.distributed.blocks import Block, Rows
from warmattn.distributed.replicated import merge_over_ranks
from warmattn.distributed.ring import attend_all_blocks
from warmattn.distributed.shards import Shard, announce, check_shards, fingerprint, keys_seen
from warmattn.errors import InvalidInput, Unsupported
from warmattn.visibility import External, Visibility

__all__ = ["attention"]

_OP = "distributed.attention"


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | CodedValues,
    *,
    key_range: tuple[int, int],
    visible: Visibility,
    group: dist.ProcessGroup | None = None,
    queries: str = "replicated",
    kv_len: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | CodedValues,
    *,
    key_range: tuple[int, int],
    visible: Visibility,
    group: dist.ProcessGroup | None = None,
    queries: str = "replicated",
    kv_len: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | CodedValues,
    *,
    key_range: tuple[int, int],
    visible: Visibility,
    group: dist.ProcessGroup | None = None,
    queries: str = "replicated",
    kv_len: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`warmattn.attention` over the keys of all ranks of a group. Every rank calls it, and gets the rows of
    its own queries with the bits that one device would give.

    Positions, lengths and masks are those of the whole sequence. Queries are either *replicated*: every rank
    has all of them, attends its own keys, and the ranks merge partial results (decode, short resumes); or
    *sharded*: every rank has rows of its own, and the ranks pass their keys along, the next ones on their way
    while these are attended (long prefills).

    Args:
        q: ``[B, H, S, D]``, the same on every rank, or this rank's rows (then S may be 0).
        k: ``[B, Hk, >= end - start, D]``: this rank's keys.
        v: dense or `CodedValues`, this rank's rows.
        key_range: ``(start, end)``, this rank's keys among those of the group: in rank order, without gaps,
            from 0 on; start is a multiple of the split length (see `warmattn.explain`). A rank may have none.
        visible: `Causal`, `Window`, `External` (columns: all keys) or `Full`; ``q_offset`` is the position of
            this rank's first query.
        group: of torch.distributed; ``None``: all processes.
        queries: "replicated" or "sharded".
        kv_len: T, an int or an int32 tensor ``[B]``; ``None``: all keys.
        kv_start: as in `warmattn.attention`, like the three below.
        scale: see kv_start.
        softcap: see kv_start.
        backend: see kv_start.
        return_lse: also return the log-sum-exp.

    Returns:
        ``out``, float32 ``[B, H, S, D]``; with ``return_lse`` ``(out, lse)``. Coded values leave it in the
        rotated domain, as in `warmattn.attention`.

    Raises:
        Unsupported, InvalidInput: as `warmattn.attention`; ranges that do not fit together, calls that differ
            between ranks (on every rank then).
        RuntimeError: another rank refused its operands, died, or did not answer within the group's timeout;
            the message names what this rank waited for.
    """
    rows = Rows(q, visible, kv_len, kv_start, scale, softcap, backend)
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    try:
        shard, chosen = _describe(rows, k, v, key_range, queries)
    except (InvalidInput, Unsupported):
        # The others must not wait for an answer that this rank cannot give.
        announce(Shard(), group, device)
        raise
    shards = announce(shard, group, device)
    split = chosen.tiling(q.shape[-1]).split
    check_shards(shards, split=split)
    _check_mask(visible, kv_len, shards[-1].end)
    mine = Block(shard.start, shard.end, k, v)
    if queries == "replicated":
        found = rows.partials(mine) if shard.needs(shard) else None
        unchecked = AttentionCall.of(q, k, v, visible=visible, scale=scale, softcap=softcap).rounded()
        out, lse = merge_over_ranks(
            found, shards, q.shape, group, chosen.exponential(unchecked), split=split, device=q.device
        )
    else:
        out, lse = attend_all_blocks(rows, mine, shards, group)
    return (out, lse) if return_lse else out


def _describe(
    rows: Rows, k: Tensor, v: Tensor | CodedValues, key_range: tuple[int, int], queries: str
) -> tuple[Shard, Backend]:
    """This rank's part of the call, checked as far as one rank can, and what runs it."""
    if queries not in ("replicated", "sharded"):
        raise InvalidInput("queries", expected='"replicated" or "sharded"', got=queries, op=_OP)
    fits = isinstance(key_range, tuple) and len(key_range) == 2 and all(type(n) is int for n in key_range)
    if not fits or not 0 <= key_range[0] <= key_range[1]:
        raise InvalidInput("key_range", expected="(start, end), 0 <= start <= end", got=key_range, op=_OP)
    start, end = key_range
    q = rows.q
    for name, tensor in (("q", q), ("k", k)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 4:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInput(name, expected="a tensor [B, heads, rows, D]", got=got, op=_OP)
    S = q.shape[2]
    if S == 0 and queries == "replicated":
        raise InvalidInput("q", expected="S >= 1 where queries are replicated", got="S = 0", op=_OP)
    if k.shape[2] < end - start:
        expected = f">= {end - start} rows, key_range's"
        raise InvalidInput("k", expected=expected, got=k.shape[2], op=_OP)
    if S > 0 and start < end:
        rows.call(Block(start, end, k, v))

    unchecked = AttentionCall.of(q, k, v, visible=rows.visible, scale=rows.scale, softcap=rows.softcap)
    chosen = select(unchecked, rows.backend)
    B, H, _, D = q.shape
    form: tuple[object, ...] = (unchecked.v.dtype,)
    if isinstance(v, CodedValues):
        form = (v.codebook.centroids.numpy().tobytes(), v.sf)
    alike = (warmattn.__version__, chosen.name, chosen.tiling(D), q.dtype, *form, B, H, k.shape[1], D)
    alike += (unchecked.rounded().scale, unchecked.rounded().softcap, queries)
    alike += (S,) if queries == "replicated" else ()
    alike += (unchecked.mask.shape[-1:],) if isinstance(unchecked.mask, Tensor) else ()
    seen = keys_seen(rows.visible, S, rows.kv_len, rows.kv_start)
    return Shard(start, end, S, *seen, fingerprint(alike), sound=1), chosen


def _check_mask(visible: Visibility, kv_len: int | Tensor | None, keys: int) -> None:
    """The mask's columns are all keys; they are the same on every rank, which all raise or none."""
    keys = kv_len if isinstance(kv_len, int) else keys
    if isinstance(visible, External) and visible.mask.shape[-1] != keys:
        expected = f"[.., S, T], T = {keys}"
        raise InvalidInput("mask", expected=expected, got=list(visible.mask.shape), op=_OP)
