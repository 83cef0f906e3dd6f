"""Every rank has its own queries, and the blocks of keys come by.

A row merges its keys in ascending order, so every rank takes the blocks in rank order: those below from its
predecessor, its own, those above from its successor. A rank passes a block on as soon as it has it, and the
next block arrives while it attends this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from warmattn.distributed.blocks import Block, Rows
from warmattn.distributed.shards import Shard
from warmattn.distributed.traffic import count, waiting_for
from warmattn.partials import Exponential, Partials, finish, fold

__all__ = ["attend_all_blocks"]

_IN_FLIGHT = 2
"""Blocks on their way to a neighbour before the next one has to wait."""


class _Neighbour:
    """The rank before or after this one: blocks come from it and go to it in ascending order."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.group = rank, group
        self.peer = rank if group is None else dist.get_global_rank(group, rank)
        self.sending: deque[tuple[int, list[Tensor], list[dist.Work | None]]] = deque()

    def send(self, number: int, block: Block) -> None:
        """Begin to send a block; it must not change until `finish`."""
        while len(self.sending) >= _IN_FLIGHT:
            self._finish_first()
        tensors = block.tensors()
        works = [dist.isend(tensor, self.peer, group=self.group) for tensor in tensors]
        count(sent=sum(tensor.nbytes for tensor in tensors))
        self.sending.append((number, tensors, works))

    def finish(self) -> None:
        while self.sending:
            self._finish_first()

    def _finish_first(self) -> None:
        number, _, works = self.sending.popleft()
        with waiting_for(f"rank {self.rank} to take the keys of rank {number}"):
            _wait(works)

    def receive(
        self, numbers: Sequence[int], shards: Sequence[Shard], like: Block
    ) -> Iterator[tuple[int, Block]]:
        """The blocks of those numbers, each while the next one is on its way."""
        coming: deque[tuple[int, Block, list[dist.Work | None]]] = deque()
        for number in numbers:
            coming.append((number, *self._begin(shards[number], like)))
            if len(coming) > 1:
                yield self._arrived(*coming.popleft())
        if coming:
            yield self._arrived(*coming.popleft())

    def _begin(self, shard: Shard, like: Block) -> tuple[Block, list[dist.Work | None]]:
        block = like.empty_like(shard.start, shard.end)
        return block, [dist.irecv(tensor, self.peer, group=self.group) for tensor in block.tensors()]

    def _arrived(self, number: int, block: Block, works: list[dist.Work | None]) -> tuple[int, Block]:
        with waiting_for(f"the keys of rank {number} from rank {self.rank}"):
            _wait(works)
        count(received=sum(tensor.nbytes for tensor in block.tensors()))
        return number, block


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def attend_all_blocks(
    rows: Rows,
    mine: Block,
    shards: Sequence[Shard],
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """``(out [B, H, S, D], lse [B, H, S])`` of this rank's rows over every rank's keys.

    Args:
        mine: the block of this rank.
        shards: of every rank, in rank order.
    """
    rank, ranks = dist.get_rank(group), len(shards)
    lower, upper = _Neighbour(rank - 1, group), _Neighbour(rank + 1, group)

    def wanted(number: int, by: range) -> bool:
        return any(shards[r].needs(shards[number]) for r in by)

    merged: tuple[Partials, Exponential] | None = None

    def attend(block: Block, number: int) -> None:
        nonlocal merged
        if not shards[rank].needs(shards[number]):
            return
        found = rows.partials(block)
        if found is None:
            return
        for part in zip(*found.partials, strict=True):
            partial = Partials(*part)
            merged = (
                partial if merged is None else fold(merged[0], partial, found.exponential.weight),
                found.exponential,
            )

    below = [number for number in range(rank) if wanted(number, range(rank, ranks))]
    above = [number for number in range(rank + 1, ranks) if wanted(number, range(rank + 1))]
    if wanted(rank, range(rank)):
        lower.send(rank, mine)
    for number, block in lower.receive(below, shards, mine):
        if wanted(number, range(rank + 1, ranks)):
            upper.send(number, block)
        attend(block, number)
    if wanted(rank, range(rank + 1, ranks)):
        upper.send(rank, mine)
    attend(mine, rank)
    for number, block in upper.receive(above, shards, mine):
        if wanted(number, range(rank)):
            lower.send(number, block)
        attend(block, number)
    lower.finish()
    upper.finish()
    if merged is None:
        out = torch.zeros(rows.q.shape, dtype=torch.float32, device=rows.q.device)
        return out, out.new_full(rows.q.shape[:3], -torch.inf)
    return finish(*merged)
