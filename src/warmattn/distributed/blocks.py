"""A rank's keys and values as a block that can be attended, and sent to other ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warmattn.backend import SplitPartials, select
from warmattn.call import AttentionCall
from warmattn.codec.values import CodedValues
from warmattn.visibility import TILE_KEYS, External, Visibility

__all__ = ["Block", "Rows"]


@dataclass(frozen=True)
class Block:
    """Keys ``[start, end)`` and their values.

    Attributes:
        k: ``[B, Hk, >= end - start, D]``.
        v: dense or coded, likewise.
    """

    start: int
    end: int
    k: Tensor
    v: Tensor | CodedValues

    def tensors(self) -> list[Tensor]:
        """The rows to send, contiguous; codes travel as codes."""
        stores = [self.k, self.v] if isinstance(self.v, Tensor) else [self.k, self.v.codes, self.v.norms]
        return [store[:, :, : self.end - self.start].contiguous() for store in stores]

    def empty_like(self, start: int, end: int) -> Block:
        """Room for another rank's block of the same kind."""

        def room(store: Tensor) -> Tensor:
            return store.new_empty(*store.shape[:2], end - start, *store.shape[3:])

        v = self.v
        if isinstance(v, CodedValues):
            return Block(start, end, room(self.k), replace(v, codes=room(v.codes), norms=room(v.norms)))
        return Block(start, end, room(self.k), room(v))


@dataclass(frozen=True)
class Rows:
    """Queries, and what they see, in positions of the whole sequence: `warmattn.attention`'s arguments."""

    q: Tensor
    visible: Visibility
    kv_len: int | Tensor | None
    kv_start: int | Tensor | None
    scale: float | None
    softcap: float | None
    backend: str

    def call(self, block: Block) -> AttentionCall | None:
        """The checked call over the block's keys; ``None`` where no sequence has keys in it.

        Raises:
            Unsupported, InvalidInput: as `warmattn.attention`.
        """
        held = block.end - block.start
        length, begin = self._within(self.kv_len, block, held), self._within(self.kv_start, block, 0)
        if isinstance(length, int) and isinstance(begin, int):
            begin = min(begin, length)
            if length == 0:
                return None
        else:
            length, begin = (torch.as_tensor(n, dtype=torch.int32) for n in (length, begin))
            length, begin = torch.broadcast_tensors(length, begin.to(length.device))
            # A sequence without keys here has one, which nobody sees: a call has no empty sequences.
            begin = torch.where(length == 0, 1, torch.minimum(begin, length)).to(torch.int32)
            length = length.clamp(min=1)
        return (
            AttentionCall.of(
                self.q,
                block.k,
                block.v,
                visible=self._over(block, length),
                kv_len=length,
                kv_start=begin,
                key_offset=block.start,
                scale=self.scale,
                softcap=self.softcap,
            )
            .rounded()
            .check(offsets=False)
        )

    def partials(self, block: Block) -> SplitPartials | None:
        """Partial results of the block's splits; `SplitPartials.first` counts from the block's start."""
        call = self.call(block)
        return None if call is None else select(call, self.backend).run_partials(call)

    def _within(self, value: int | Tensor | None, block: Block, default: int) -> int | Tensor:
        """A length or start of the whole sequence, as a number of the block's rows."""
        held = block.end - block.start
        if value is None:
            return default
        if isinstance(value, Tensor):
            return (value.long() - block.start).clamp(0, held).to(torch.int32)
        return min(max(value - block.start, 0), held)

    def _over(self, block: Block, length: int | Tensor) -> Visibility:
        if not isinstance(self.visible, External):
            return self.visible
        keys = length if isinstance(length, int) else block.end - block.start
        if isinstance(length, Tensor) and length.device.type == "cpu":
            keys = int(length.max())
        mask, tile_map = self.visible.mask, self.visible.tile_map
        if tile_map is not None:
            first, end = block.start // TILE_KEYS, -(-(block.start + keys) // TILE_KEYS)
            tile_map = tile_map[:, first:end].contiguous()
        return External(mask[..., block.start : block.start + keys], tile_map)
