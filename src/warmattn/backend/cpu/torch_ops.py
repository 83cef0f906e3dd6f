"""Tiled attention in torch operations.

Every product has one fixed shape, ``[ROWS, D] x [D, KEYS]`` and ``[ROWS, KEYS] x [KEYS, D]``, padded with
zeros: a matrix library picks its summation order by shape, and inside one shape treats all rows alike, so a
row's bits depend on nothing but the row (contract: warm equals cold). Working memory is a few tiles,
whatever S and T are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from warmattn.backend import SplitPartials, Tiling
from warmattn.call import AttentionCall
from warmattn.codec.turboquant import decode_rows
from warmattn.partials import Exponential, Partials, finish, fold, merge
from warmattn.visibility import HIDDEN_AT, TILE_KEYS, TILE_ROWS, TileKind

__all__ = ["TILING", "run", "run_partials"]

TILING = Tiling(rows=128, keys=128, split=4096)
_CHAIN = 128
"""Longest chain of products summed into one score: shorter chains round less."""


@torch.autocast("cpu", enabled=False)
def run(call: AttentionCall) -> None:
    """Write ``call.out`` and ``call.lse``, one block of packed rows after the other."""
    assert call.out is not None
    for block in _blocks(call):
        partials = (block.attend(split) for split in block.splits)
        out, lse = finish(merge(partials, block.exponential), block.exponential)
        index = (block.b, block.heads, block.rows)
        call.out[index] = out[: block.size]
        if call.lse is not None:
            call.lse[index] = lse[: block.size]


@torch.autocast("cpu", enabled=False)
def run_partials(call: AttentionCall) -> SplitPartials:
    """Partial results per split, for the splits that any row of the call sees a key of (at least one)."""
    blocks = list(_blocks(call))
    seen = [block.splits for block in blocks if block.start < block.end] or [range(1)]
    first = min(splits.start for splits in seen)
    shape = (max(splits.stop for splits in seen) - first, *call.q.shape)
    partials = _empty(shape)
    for block in blocks:
        for split in block.splits if block.start < block.end else ():
            index = (split - first, block.b, block.heads, block.rows)
            for whole, part in zip(partials, block.attend(split), strict=True):
                whole[index] = part[: block.size]
    return SplitPartials(first, partials, blocks[0].exponential)


def _blocks(call: AttentionCall) -> Iterator[_Block]:
    """Every block of rows: the ``group`` query heads of a KV head are packed, row by row, so that they share
    its tiles.
    """
    packed = torch.arange(call.S * call.group, device="cpu")
    rows, heads = packed // call.group, packed % call.group
    for b in range(call.B):
        for kv_head in range(call.Hk):
            for start in range(0, len(packed), TILING.rows):
                chunk = slice(start, start + TILING.rows)
                yield _Block.of(call, b, kv_head, kv_head * call.group + heads[chunk], rows[chunk])


@dataclass(frozen=True, slots=True)
class _Block:
    """Up to ROWS packed query rows that read one KV head, and the keys they may see."""

    call: AttentionCall
    b: int
    kv_head: int
    heads: Tensor
    rows: Tensor
    q: Tensor
    position: Tensor
    start: int
    end: int
    exponential: Exponential

    @classmethod
    def of(cls, call: AttentionCall, b: int, kv_head: int, heads: Tensor, rows: Tensor) -> _Block:
        q = _zeros((TILING.rows, call.D))
        q[: len(rows)] = call.q[b, heads, rows]
        # Rows that pad the block repeat the last position, so that they widen no range of keys.
        padded = torch.nn.functional.pad(rows, (0, TILING.rows - len(rows)), value=int(rows[-1]))
        start, end = _of(call.kv_start, b), _of(call.kv_len, b)
        position = padded
        if call.causal:
            position = padded + (_of(call.q_offset, b) - call.key_offset)
            end = min(end, int(position[-1]) + 1)
            if call.window is not None:
                start = max(start, int(position[0]) - call.window + 1)
        scale = 1.0 if call.softcap is not None else call.scale
        exponential = Exponential.of(call.D, scale)
        return cls(call, b, kv_head, heads, rows, q, position, start, end, exponential)

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def splits(self) -> range:
        """Indices of the splits that hold a key which a row of the block may see; if none does, of one."""
        first = self.start // TILING.split
        return range(first, max(first + 1, -(-self.end // TILING.split)))

    def attend(self, split: int) -> Partials:
        """The block over the keys of one split, tile by tile in ascending order."""
        state = _empty((TILING.rows, self.call.D))
        start = max(self.start // TILING.keys * TILING.keys, split * TILING.split)
        for key in range(start, min(self.end, (split + 1) * TILING.split), TILING.keys):
            kind = self._mask_kind(key)
            if kind != TileKind.HIDDEN:
                state = fold(state, self._attend_tile(key, kind), self.exponential.weight)
        return state

    def _attend_tile(self, key: int, mask_kind: int) -> Partials:
        call = self.call
        scores = _products(self.q, self._tile(call.k, key))
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores * call.scale / call.softcap)
        seen = self._seen(key)
        if mask_kind == TileKind.MIXED:
            cells = self._mask_cells(key)
            if cells.dtype == torch.bool:
                seen = cells if seen is None else seen & cells
            else:
                seen = cells > HIDDEN_AT if seen is None else seen & (cells > HIDDEN_AT)
                scores = scores + cells / self.exponential.scale
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)

        maximum = scores.amax(dim=1)
        base = maximum.masked_fill(maximum == -math.inf, 0.0)
        weights = self.exponential(scores - base[:, None])
        return Partials(maximum, weights.sum(dim=1), _weighted_sum(weights, self._value_tile(key), seen))

    def _tile(self, operand: Tensor, key: int) -> Tensor:
        """KEYS rows of a dense operand from row ``key`` on, widened to float32; rows past the last key are
        0.
        """
        tile = _zeros((TILING.keys, operand.shape[3]))
        stop = min(key + TILING.keys, self.end)
        tile[: stop - key] = operand[self.b, self.kv_head, key:stop]
        return tile

    def _value_tile(self, key: int) -> Tensor:
        call = self.call
        if call.norms is None:
            return self._tile(call.v, key)
        assert call.centroids is not None
        stop = min(key + TILING.keys, self.end)
        norms = call.norms if call.norms.ndim == 4 else call.norms[..., None]
        rows = (self.b, self.kv_head, slice(key, stop))
        tile = _zeros((TILING.keys, call.D))
        tile[: stop - key] = decode_rows(call.v[rows], norms[rows], call.centroids, call.sf)
        return tile

    def _seen(self, key: int) -> Tensor | None:
        """bool ``[ROWS, KEYS]``: what position shows of the tile; ``None`` when every row sees every key of
        it.
        """
        call, last = self.call, key + TILING.keys - 1
        causal, window = call.causal, call.window
        shown = self.start <= key and last < self.end
        if causal:
            shown = shown and last <= self.position[0]
        if window is not None:
            shown = shown and self.position[-1] - key < window
        if shown:
            return None
        keys = torch.arange(key, last + 1, device="cpu")
        seen = ((keys >= _of(call.kv_start, self.b)) & (keys < self.end)).expand(TILING.rows, -1)
        if causal:
            distance = self.position[:, None] - keys
            seen = seen & (distance >= 0)
            if window is not None:
                seen = seen & (distance < window)
        return seen

    def _mask_kind(self, key: int) -> int:
        """What the tile map says of the tile at ``key`` for all of the block's rows together."""
        call = self.call
        if call.mask is None:
            return TileKind.OPEN
        if call.tile_map is None:
            return TileKind.MIXED
        rows = slice(int(self.rows[0]) // TILE_ROWS, int(self.rows[-1]) // TILE_ROWS + 1)
        keys = slice(key // TILE_KEYS, -(-min(key + TILING.keys, self.end) // TILE_KEYS))
        kinds = call.tile_map[rows, keys]
        for kind in (TileKind.HIDDEN, TileKind.OPEN):
            if bool((kinds == kind).all()):
                return kind
        return TileKind.MIXED

    def _mask_cells(self, key: int) -> Tensor:
        """The tile's mask cells ``[ROWS, KEYS]``, bool or float32; cells outside the mask are hidden."""
        mask = self.call.mask
        assert mask is not None
        if mask.ndim == 2:
            mask = mask[None, None]
        stop = min(key + TILING.keys, self.end)
        heads = self.heads if mask.shape[1] > 1 else torch.zeros_like(self.heads)
        cells = mask[self.b % mask.shape[0], heads, self.rows, key:stop]
        is_bool = cells.dtype == torch.bool
        padding = (0, TILING.keys - (stop - key), 0, TILING.rows - self.size)
        hidden = 0.0 if is_bool else -math.inf
        return torch.nn.functional.pad(cells if is_bool else cells.float(), padding, value=hidden)


def _zeros(shape: tuple[int, ...]) -> Tensor:
    """Whatever torch's default dtype and device are just now."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _empty(shape: tuple[int, ...]) -> Partials:
    """Partial results ``[..., D]`` of rows that have seen nothing yet."""
    return Partials(_zeros(shape[:-1]).fill_(-math.inf), _zeros(shape[:-1]), _zeros(shape))


def _of(length: int | Tensor, b: int) -> int:
    return int(length[b]) if isinstance(length, Tensor) else length


def _products(q: Tensor, k: Tensor) -> Tensor:
    """``q @ k.T`` with chains of at most `_CHAIN` products."""
    chains = [slice(d, d + _CHAIN) for d in range(0, q.shape[1], _CHAIN)]
    scores = q[:, chains[0]] @ k[:, chains[0]].T
    for chain in chains[1:]:
        scores += q[:, chain] @ k[:, chain].T
    return scores


def _weighted_sum(weights: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """``weights @ values``, where a non-finite value touches only the rows that see its key (0 * NaN is
    NaN).
    """
    # Adding 0 makes a sum of -0 into 0, as the 0 of a key that the row does not see may or may not have done.
    out = (weights @ values).add_(0.0)
    if math.isfinite(out.sum().item()):
        return out
    finite = values.isfinite()
    out = (weights @ values.masked_fill(~finite, 0.0)).add_(0.0)
    shown = torch.ones_like(weights) if seen is None else seen.float()
    return out.masked_fill(shown @ (~finite).float() > 0, math.nan)
