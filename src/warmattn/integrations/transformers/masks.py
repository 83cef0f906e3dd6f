"""The mask function: what each row sees, in a few numbers where numbers can say it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from transformers.masking_utils import prepare_padding_mask, sdpa_mask

from warmattn.integrations.transformers.lazy import LazyTensor
from warmattn.visibility import Causal, Window

__all__ = ["PositionMask", "make_mask"]

aten = torch.ops.aten

_LAST = torch.iinfo(torch.int64).max
"""Where a slice ends that has no end."""


class PositionMask(LazyTensor):
    """A bool mask ``[B, 1, S, T]`` (True = visible) that follows from positions: causal, perhaps with a
    window, perhaps with left padding. Its cells exist only where something other than warmattn reads them.

    Attributes:
        q_offset: position of row 0 among the T keys.
        window: keys that a row sees, itself included; ``None``: all up to itself.
        kv_start: int32 ``[B]``, the first key that is no padding; ``None``: nothing is padded.
    """

    q_offset: int
    window: int | None
    kv_start: Tensor | None

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int, int],
        *,
        q_offset: int,
        window: int | None,
        kv_start: Tensor | None,
        device: torch.device | str,
    ) -> Self:
        mask = cls.standing_for(shape, torch.bool, torch.device(device))
        mask.q_offset, mask.window, mask.kv_start = q_offset, window, kv_start
        return mask

    @property
    def visible(self) -> Causal | Window:
        return Causal(self.q_offset) if self.window is None else Window(self.window, self.q_offset)

    def elements(self) -> Tensor:
        B, _, S, T = self.shape
        p = torch.arange(self.q_offset, self.q_offset + S, device=self.device)[:, None]
        k = torch.arange(T, device=self.device)
        cells = k <= p
        if self.window is not None:
            cells = cells & (p - k < self.window)
        if self.kv_start is not None:
            cells = cells & (k >= self.kv_start[:, None, None, None])
        return cells.expand(B, 1, S, T)

    def from_row(self, row: int) -> PositionMask:
        """``self[:, :, row:]``."""
        B, _, S, T = self.shape
        return PositionMask.of(
            (B, 1, S - row, T),
            q_offset=self.q_offset + row,
            window=self.window,
            kv_start=self.kv_start,
            device=self.device,
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gemma 4 keeps the last rows of a mask for its last layers; positions say those as well."""
        match func, args:
            case aten.slice.Tensor, (PositionMask() as mask, 2, int(start), end) if end == _LAST:
                return mask.from_row(slice(start, None).indices(mask.shape[2])[0])
            case aten.alias.default, (PositionMask() as mask,):
                return mask.from_row(0)
        return super().__torch_dispatch__(func, types, args, kwargs)


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    attention_mask: Tensor | None,
    allow_is_causal_skip: bool,
    config: Any,
    device: torch.device | str,
    local_size: int | None = None,
    **others: Any,
) -> Tensor | None:
    """Transformers' mask function under the name "warmattn": called once per kind of layer and forward pass,
    with the arguments of `transformers.masking_utils.sdpa_mask`.

    Returns:
        ``None`` where the S rows are the last of T keys and each sees all up to itself. A `PositionMask`
        where a window or left padding is all that there is besides. Else a bool mask ``[B, 1, S, T]``, which
        takes S·T cells: packed sequences, vision blocks, chunked or bidirectional attention, holes in the
        padding mask, and anything under `torch.compile`.
    """
    # False announces a pattern of the model's own, or a caller who needs the cells.
    by_position = allow_is_causal_skip and not torch.compiler.is_compiling()
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    if by_position and not chunked:
        first = int(q_offset) - kv_offset
        padded = _padded(attention_mask, kv_length, kv_offset, first + q_length)
        if padded is None and local_size is None and first + q_length == kv_length:
            return None
        if padded is None or _is_left(padded):
            return PositionMask.of(
                (batch_size, 1, q_length, kv_length),
                q_offset=first,
                window=local_size,
                kv_start=None if padded is None else padded.sum(-1, dtype=torch.int32),
                device=device,
            )
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # pyright: ignore[reportArgumentType]
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        device=device,
        **{**others, "allow_is_bidirectional_skip": False},
    )


def _padded(attention_mask: Tensor | None, kv_length: int, kv_offset: int, end: int) -> Tensor | None:
    """bool ``[B, end]``: which of the keys that the last row may see are padding; ``None``: none is."""
    visible = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if visible is None:
        return None
    padded = ~visible[:, kv_offset : kv_offset + end]
    return padded if bool(padded.any()) else None


def _is_left(padded: Tensor) -> bool:
    """Whether all padding comes before all else."""
    return not bool((padded[:, 1:] > padded[:, :-1]).any())
