"""What a cache refuses, each with an error that names operand, expected and got."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warmattn.call import LARGEST_POSITION
from warmattn.errors import InvalidInput, Unsupported

__all__ = ["check_count", "check_index", "check_rows", "require_finite"]


def check_count(name: str, value: Any, *, op: str, least: int = 1, most: int = LARGEST_POSITION) -> None:
    """Refuse what is not an int in ``[least, most]``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidInput(name, expected=f"an int in [{least}, {most}]", got=repr(value), op=op)


def check_rows(name: str, rows: Tensor, store: Tensor, *, op: str) -> int:
    """Refuse rows that cannot go into a store ``[B, Hk, C, D]``; return how many there are."""
    B, Hk, _, D = store.shape
    if not isinstance(rows, Tensor):
        raise InvalidInput(name, expected="a tensor", got=type(rows).__name__, op=op)
    if rows.ndim != 4 or (*rows.shape[:2], rows.shape[3]) != (B, Hk, D):
        raise InvalidInput(name, expected=f"[{B}, {Hk}, n, {D}]", got=list(rows.shape), op=op)
    if not rows.is_floating_point():
        raise InvalidInput(name, expected="a float dtype", got=rows.dtype, op=op)
    if rows.device != store.device:
        raise InvalidInput(name, expected=f"on the cache's device {store.device}", got=rows.device, op=op)
    if rows.requires_grad and torch.is_grad_enabled():
        raise Unsupported(f"{name} requires grad: forward only, use torch.no_grad()", op=op)
    return rows.shape[2]


def check_index(index: Tensor, batch: int, *, op: str) -> None:
    """Refuse what does not name sequences of a batch; values on a GPU are not read."""
    if not isinstance(index, Tensor):
        raise InvalidInput("index", expected="a tensor", got=type(index).__name__, op=op)
    if index.dtype not in (torch.int64, torch.int32) or index.ndim != 1 or index.numel() == 0:
        got = f"{index.dtype} {list(index.shape)}"
        raise InvalidInput("index", expected="int64 or int32 [>= 1]", got=got, op=op)
    if index.device.type == "cpu" and not bool(((index >= 0) & (index < batch)).all()):
        raise InvalidInput("index", expected=f"values in [0, {batch})", got=index.tolist(), op=op)


def require_finite(finite: Tensor, *, op: str) -> None:
    """Refuse unless ``finite``, bool ``[2]``, is true of K and of V. Reading it synchronises."""
    for name, fine in zip(("k", "v"), finite.tolist(), strict=True):
        if not fine:
            expected = "values that are finite as the cache stores them"
            raise InvalidInput(name, expected=expected, got="NaN, infinity or an overflow", op=op)
