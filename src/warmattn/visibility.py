"""Which keys a query row sees, and the tile map of an external mask.

Row ``i`` has the absolute key position ``p = q_offset + i``; key ``k`` has ``key_offset + row`` (contract:
docs/contract.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warmattn.errors import InvalidInput

__all__ = [
    "HIDDEN_AT",
    "TILE_KEYS",
    "TILE_ROWS",
    "Causal",
    "External",
    "Full",
    "TileKind",
    "Visibility",
    "Window",
    "tile_grid",
    "tile_map",
]

TILE_ROWS = 32
"""Query rows of one tile of the map."""
TILE_KEYS = 16
"""Keys of one tile of the map."""
HIDDEN_AT = -1e30
"""A mask cell at or below this value hides its key."""


@dataclass(frozen=True, slots=True)
class Causal:
    """Key ``k`` is visible when ``k <= p``.

    Args:
        q_offset: absolute position of query row 0: an int, or an int32 tensor ``[B]``.
            ``None`` is 0 in `warmattn.attention`.
    """

    q_offset: int | Tensor | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Key ``k`` is visible when ``k <= p`` and ``p - k < window``: the row itself is one of the ``window``
    keys.

    Args:
        window: number of keys, >= 1; any value >= T is `Causal` bit for bit.
        q_offset: as in `Causal`.
    """

    window: int
    q_offset: int | Tensor | None = None


@dataclass(frozen=True, slots=True)
class External:
    """Visibility from an additive mask; positions play no part.

    Args:
        mask: float16, cells 0, −0 or −inf (a finite cell is added to the scaled score), or bool (True =
            visible); ``[S, T]``, or ``[B or 1, H or 1, S, T]``; any strides.
        tile_map: the mask's map from `warmattn.tile_map`, made after the mask's last write, or ``None``.
    """

    mask: Tensor
    tile_map: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Full:
    """Every key ``[0, T)`` is visible."""


Visibility = Causal | Window | External | Full


class TileKind:
    """The byte of one 32 x 16 tile of the map."""

    HIDDEN = 0
    """Every cell is hidden: the tile is skipped."""
    MIXED = 1
    """The mask is read."""
    OPEN = 2
    """Every cell is exactly 0 (or True): the mask is not read."""


def tile_grid(rows: int, keys: int) -> tuple[int, int]:
    """Shape of the tile map over a mask of ``rows`` x ``keys`` cells."""
    return -(-rows // TILE_ROWS), -(-keys // TILE_KEYS)


def tile_map(mask: Tensor) -> Tensor:
    """Classify every 32 x 16 tile of a mask, for `External`.

    Args:
        mask: ``[S, T]`` or ``[B or 1, H or 1, S, T]``, float16 or bool, any strides.

    Returns:
        uint8 ``[ceil(S/32), ceil(T/16)]``, contiguous, in storage rounded up to 32 bytes: `TileKind` of
        each tile. Over a rank-4 mask a tile is `HIDDEN` or `OPEN` only where it is so in every plane.

    Raises:
        InvalidInput: another dtype or rank, or an empty mask.
    """
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.float16, torch.bool):
        got = getattr(mask, "dtype", type(mask).__name__)
        raise InvalidInput("mask", expected="float16 or bool", got=got, op="tile_map")
    if mask.ndim not in (2, 4) or mask.numel() == 0:
        expected = "[S, T] or [B or 1, H or 1, S, T], no axis empty"
        raise InvalidInput("mask", expected=expected, got=list(mask.shape), op="tile_map")
    is_bool = mask.dtype == torch.bool
    hidden = _every_cell_of_tile(~mask if is_bool else mask <= HIDDEN_AT)
    is_open = _every_cell_of_tile(mask if is_bool else mask == 0)

    rows, keys = hidden.shape
    size = rows * keys
    storage = torch.empty(-(-size // 32) * 32, dtype=torch.uint8, device=mask.device)
    tiles = storage[:size].view(rows, keys)
    tiles.fill_(TileKind.MIXED)
    tiles.masked_fill_(hidden, TileKind.HIDDEN)
    return tiles.masked_fill_(is_open, TileKind.OPEN)


def _every_cell_of_tile(cells: Tensor) -> Tensor:
    """bool ``[..., S, T]`` -> bool ``[tile rows, tile keys]``; cells past S and T do not count."""
    if cells.ndim == 4:
        cells = cells.all(dim=0).all(dim=0)
    rows, keys = cells.shape
    grid_rows, grid_keys = tile_grid(rows, keys)
    padding = (0, grid_keys * TILE_KEYS - keys, 0, grid_rows * TILE_ROWS - rows)
    padded = torch.nn.functional.pad(cells, padding, value=True)
    return padded.view(grid_rows, TILE_ROWS, grid_keys, TILE_KEYS).all(dim=3).all(dim=1)
