"""What the ranks of a group tell each other before they attend: who holds which keys, who needs which."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from warmattn.distributed.traffic import waiting_for
from warmattn.errors import InvalidInput
from warmattn.visibility import Causal, Visibility, Window

__all__ = ["Shard", "announce", "check_shards", "fingerprint", "keys_seen"]

_OP = "distributed.attention"


class Shard(NamedTuple):
    """One rank's part of a call.

    Attributes:
        start, end: its keys.
        rows: S, its query rows.
        first_key, end_key: keys that its rows may see, as far as the host knows.
        last_position: of its rows; −1 where positions play no part.
        fingerprint: of all that must be the same on every rank.
        sound: 0 where the rank has refused its operands.
    """

    start: int = 0
    end: int = 0
    rows: int = 0
    first_key: int = 0
    end_key: int = 0
    last_position: int = -1
    fingerprint: int = 0
    sound: int = 0

    def needs(self, other: Shard) -> bool:
        """Whether this rank's rows may see keys of another."""
        first, end = max(self.first_key, other.start), min(self.end_key, other.end)
        return self.rows > 0 and first < end


def fingerprint(parts: Iterable[object]) -> int:
    return zlib.crc32(repr(tuple(parts)).encode())


def keys_seen(
    visible: Visibility, rows: int, kv_len: int | Tensor | None, kv_start: int | Tensor | None
) -> tuple[int, int, int]:
    """First and end of the keys that ``rows`` rows may see, and the last row's position or −1. Tensors on a
    GPU are not read: they leave every key possible.
    """
    first = 0 if kv_start is None else _least(kv_start)
    end = _UNKNOWN_END if kv_len is None else _largest(kv_len)
    if not isinstance(visible, Causal | Window):
        return first, end, -1
    offset = 0 if visible.q_offset is None else visible.q_offset
    largest = _largest(offset)
    if isinstance(visible, Window):
        first = max(first, _least(offset) - visible.window + 1)
    position = largest + rows - 1
    return first, min(end, position + 1), -1 if largest == _UNKNOWN_END else position


_UNKNOWN_END = 2**62
"""Past every key, and small enough to be added to."""


def _least(value: int | Tensor) -> int:
    """Of a length or offset; 0 where only a GPU knows it."""
    if isinstance(value, Tensor):
        return int(value.min()) if value.device.type == "cpu" else 0
    return value


def _largest(value: int | Tensor) -> int:
    """Of a length or offset; `_UNKNOWN_END` where only a GPU knows it."""
    if isinstance(value, Tensor):
        return int(value.max()) if value.device.type == "cpu" else _UNKNOWN_END
    return value


def announce(mine: Shard, group: dist.ProcessGroup | None, device: torch.device) -> list[Shard]:
    """Every rank's shard, in rank order.

    Raises:
        RuntimeError: a rank did not answer.
    """
    table = torch.tensor(mine, dtype=torch.int64, device=device)
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size(group))]
    with waiting_for("the key ranges of the other ranks"):
        dist.all_gather(tables, table, group=group)
    return [Shard(*table.tolist()) for table in tables]


def check_shards(shards: Sequence[Shard], *, split: int) -> None:
    """Raise, on every rank, when the shards do not fit together.

    Raises:
        RuntimeError: a rank refused its operands.
        InvalidInput: the ranges are no ascending, gapless sequence that begins at 0 and is cut at splits;
            rows see keys that no rank holds; or the ranks' calls differ in more than their keys.
    """
    for rank, shard in enumerate(shards):
        if not shard.sound:
            raise RuntimeError(f"{_OP}: rank {rank} refused its operands")
    _check_ranges(shards, split)
    for rank, shard in enumerate(shards):
        if shard.fingerprint != shards[0].fingerprint:
            expected = "the same kernel, dtypes, form of V, heads, scale and softcap on every rank"
            raise InvalidInput("q", expected=expected, got=f"others on rank {rank} than on rank 0", op=_OP)


def _check_ranges(shards: Sequence[Shard], split: int) -> None:
    reached = 0
    for rank, (start, end, *_) in enumerate(shards):
        got = f"[{start}, {end}) on rank {rank}, after keys up to {reached}"
        if start != reached or end < start:
            expected = "ranges in rank order, without gaps, from 0 on"
            raise InvalidInput("key_range", expected=expected, got=got, op=_OP)
        if start < end and start % split:
            raise InvalidInput("key_range", expected=f"a start at a multiple of {split}", got=got, op=_OP)
        reached = end
    for rank, shard in enumerate(shards):
        if shard.rows and shard.last_position >= reached:
            reason = f"the last row of rank {rank} is at {shard.last_position}, T is {reached}"
            expected = "q_offset + S <= T"
            raise InvalidInput("q_offset", expected=expected, got=shard.last_position, op=_OP, reason=reason)
