"""Every rank has all queries: it attends its own keys, and the ranks merge what they found, row by row.

A row is merged in one chain of ascending keys, whatever the number of ranks: partial results go, split by
split, to the one rank that merges the row, and its result comes back.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from warmattn.backend import SplitPartials
from warmattn.distributed.shards import Shard
from warmattn.distributed.traffic import count, waiting_for
from warmattn.partials import Exponential, Partials, finish, merge

__all__ = ["merge_over_ranks"]


def merge_over_ranks(
    mine: SplitPartials | None,
    shards: list[Shard],
    shape: torch.Size,
    group: dist.ProcessGroup | None,
    exponential: Exponential,
    *,
    split: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """``(out [B, H, S, D], lse [B, H, S])`` of all rows, on every rank.

    Args:
        mine: partial results over this rank's keys.
        shape: of q, the same on every rank.
        split: keys of a split.
    """
    rank, ranks = dist.get_rank(group), len(shards)
    rows, D = shape.numel() // shape[-1], shape[-1]
    share = -(-rows // ranks)
    cuts = [min(share * r, rows) for r in range(ranks + 1)]
    shares = [end - start for start, end in pairwise(cuts)]
    splits = [_splits(shard, shards[rank], split) for shard in shards]

    packed = torch.empty(0, rows, D + 2, dtype=torch.float32, device=device)
    if mine is not None and splits[rank]:
        begun = mine.first + shards[rank].start // split
        kept = slice(splits[rank].start - begun, splits[rank].stop - begun)
        maximum, total, accumulator = (part[kept] for part in mine.partials)
        flat = (maximum.flatten(1)[..., None], total.flatten(1)[..., None], accumulator.flatten(1, 3))
        packed = torch.cat(flat, dim=-1)
    sent = torch.cat([packed[:, start:end].flatten() for start, end in pairwise(cuts)])
    received = sent.new_empty(sum(map(len, splits)) * shares[rank] * (D + 2))
    with waiting_for("the partial results of the other ranks"):
        dist.all_to_all_single(
            received,
            sent,
            [len(theirs) * shares[rank] * (D + 2) for theirs in splits],
            [len(splits[rank]) * to * (D + 2) for to in shares],
            group=group,
        )
    own = 4 * len(splits[rank]) * shares[rank] * (D + 2)
    count(sent=sent.nbytes - own, received=received.nbytes - own)

    result = torch.zeros(share, D + 1, dtype=torch.float32, device=device)
    result[:, D] = -torch.inf
    parts = received.view(-1, shares[rank], D + 2) if shares[rank] else received.view(0, 0, D + 2)
    if len(parts):
        merged = merge((Partials(p[:, 0], p[:, 1], p[:, 2:]) for p in parts), exponential)
        result[: shares[rank], :D], result[: shares[rank], D] = finish(merged, exponential)
    results = [torch.empty_like(result) for _ in range(ranks)]
    with waiting_for("the merged rows of the other ranks"):
        dist.all_gather(results, result, group=group)
    count(sent=result.nbytes * (ranks - 1), received=result.nbytes * (ranks - 1))
    whole = torch.cat(results)[:rows]
    return whole[:, :D].reshape(shape), whole[:, D].reshape(shape[:-1])


def _splits(shard: Shard, rows: Shard, split: int) -> range:
    """The splits of a rank's keys that rows may see."""
    first, end = max(shard.start, rows.first_key), min(shard.end, rows.end_key)
    return range(first // split, -(-end // split)) if first < end else range(0)
