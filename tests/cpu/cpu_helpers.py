"""One call on one instruction set, without the choice that a process makes once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warmattn.backend.cpu import native
from warmattn.backend.cpu.native import Isa
from warmattn.call import AttentionCall
from warmattn.codec.values import CodedValues
from warmattn.visibility import Visibility

__all__ = ["attend", "attend_with_lse"]


def attend_with_lse(
    isa: Isa, q: Tensor, k: Tensor, v: Tensor | CodedValues, visible: Visibility, **options: Any
) -> tuple[Tensor, Tensor]:
    """``warmattn.attention(..., return_lse=True)`` on the instruction set ``isa``."""
    out, lse = torch.full(q.shape, torch.nan), torch.full(q.shape[:3], torch.nan)
    call = AttentionCall.of(q, k, v, visible=visible, **options)
    native.run(isa, call._replace(out=out, lse=lse).rounded().check())
    return out, lse


def attend(
    isa: Isa, q: Tensor, k: Tensor, v: Tensor | CodedValues, visible: Visibility, **options: Any
) -> Tensor:
    """The output alone; it takes the kernels' path without row sums."""
    out = torch.full(q.shape, torch.nan)
    call = AttentionCall.of(q, k, v, visible=visible, **options)
    native.run(isa, call._replace(out=out).rounded().check())
    return out
