"""One call on one instruction set, without the choice that a process makes once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from warmattn.backend.cpu import native
from warmattn.backend.cpu.native import Isa
from warmattn.call import AttentionCall
from warmattn.codec.values import CodedValues
from warmattn.testing import make_inputs
from warmattn.visibility import Causal, External, Full, Visibility, Window, tile_map

__all__ = ["attend", "attend_calls_of_every_kind", "attend_with_lse"]


def attend_with_lse(
    isa: Isa, q: Tensor, k: Tensor, v: Tensor | CodedValues, visible: Visibility, **options: Any
) -> tuple[Tensor, Tensor]:
    """``warmattn.attention(..., return_lse=True)`` on the instruction set ``isa``."""
    out, lse = torch.full(q.shape, torch.nan), torch.full(q.shape[:3], torch.nan)
    call = AttentionCall.of(q, k, v, visible=visible, **options)
    native.run(isa, call._replace(out=out, lse=lse).rounded().check())
    return out, lse


def attend(
    isa: Isa,
    q: Tensor,
    k: Tensor,
    v: Tensor | CodedValues,
    visible: Visibility,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The output alone; it takes the kernels' path without row sums."""
    out = torch.full(q.shape, torch.nan) if out is None else out
    call = AttentionCall.of(q, k, v, visible=visible, **options)
    native.run(isa, call._replace(out=out).rounded().check())
    return out


def attend_calls_of_every_kind(isa: Isa, head_dim: int, form: str) -> Iterator[Tensor]:
    """Outputs and log-sum-exps over every visibility: thin and wide panels of rows, odd ends, two splits."""
    rows, keys = 77, 300
    inputs = make_inputs(20, B=2, S=rows, T=keys, D=head_dim, H=6, Hk=2, values=form)
    generator = torch.Generator().manual_seed(20)
    cells = torch.randn(rows, keys, generator=generator).half()
    cells[torch.rand(rows, keys, generator=generator) < 0.5] = -math.inf
    starts = torch.tensor([3, 150], dtype=torch.int32)
    calls: list[tuple[Visibility, dict[str, Any]]] = [
        (Causal(keys - rows), {"softcap": 5.0}),
        (Window(50, keys - rows), {"scale": 0.3}),
        (Full(), {"kv_start": starts}),
        (External(cells), {}),
        (External(cells == -math.inf, tile_map(cells == -math.inf)), {}),
    ]
    for visible, options in calls:
        yield from attend_with_lse(isa, inputs.q, inputs.k, inputs.v, visible, kv_len=keys, **options)
    keys = 4500
    inputs = make_inputs(21, S=5, T=keys, D=head_dim, H=4, Hk=2, values=form)
    for rows in (1, 2, 5):
        q = inputs.q[:, :, :rows]
        yield from attend_with_lse(isa, q, inputs.k, inputs.v, Causal(keys - rows), kv_len=keys)
