"""Lengths and offsets in tensors of the GPU, which the host never reads."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from warmattn import Causal, CodedValues, External, Full, Window, attention
from warmattn.testing import Inputs, assert_same_bits, make_inputs
from warmattn.visibility import Visibility

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
Result = tuple[Tensor, Tensor]

each_head_dim = pytest.mark.parametrize("D", [256, 512])


def same_bits(actual: Result, expected: Result) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


def sequence(inputs: Inputs, b: int) -> dict[str, Any]:
    """Operands of one sequence alone."""
    one, v = slice(b, b + 1), inputs.v
    cut = replace(v, codes=v.codes[one], norms=v.norms[one]) if isinstance(v, CodedValues) else v[one]
    return {"q": inputs.q[one], "k": inputs.k[one], "v": cut}


@pytest.mark.parametrize("kind", ["causal", "full"])
@pytest.mark.parametrize("values", ["f16", "codes8"])
@each_head_dim
def test_ints_and_tensors_of_either_device(
    seed: int, device: torch.device, D: int, values: str, kind: str
) -> None:
    """Three sequences of other lengths, offsets and padding, alone and together."""
    kv_lens, offsets, starts = [90, 301, 4200], [86, 200, 4196], [0, 130, 4000]
    inputs = make_inputs(seed, device=device, B=3, H=4, Hk=2, S=4, T=4200, D=D, values=values)

    def visible(q_offset: int | Tensor) -> Visibility:
        return Causal(q_offset) if kind == "causal" else Full()

    alone = [
        attention(
            **sequence(inputs, b),
            visible=visible(offsets[b]),
            kv_len=kv_lens[b],
            kv_start=starts[b],
            return_lse=True,
        )
        for b in range(3)
    ]
    outs, lses = (torch.cat(parts) for parts in zip(*alone, strict=True))
    for where in (torch.device("cpu"), device):
        kv_len, q_offset, kv_start = (
            torch.tensor(numbers, dtype=torch.int32, device=where) for numbers in (kv_lens, offsets, starts)
        )
        together = attention(
            inputs.q,
            inputs.k,
            inputs.v,
            visible=visible(q_offset),
            kv_len=kv_len,
            kv_start=kv_start,
            return_lse=True,
        )
        same_bits(together, (outs, lses))


C = 300
GARBAGE = [
    # kv_len, kv_start, q_offset
    (0, 0, 5),
    (-5, 0, 5),
    (INT_MIN, INT_MIN, INT_MIN),
    (INT_MAX, 0, C - 8),
    (C + 1000, -7, INT_MAX),
    (200, 200, 190),
    (200, INT_MAX, 190),
    (200, 150, -1),
    (200, 0, -3),
    (INT_MAX, INT_MIN, INT_MAX),
    (130, 64, 126),
    (C, 0, 0),
]
"""Lengths, starts and offsets of sequences that no check has seen; the last two are ordinary."""


@pytest.mark.parametrize("kind", ["causal", "window", "full"])
@pytest.mark.parametrize("values", ["f16", "codes8"])
@each_head_dim
def test_garbage_reads_nothing_outside(
    seed: int, device: torch.device, D: int, values: str, kind: str
) -> None:
    """The result is what a mask gives that shows the keys of the cache which the numbers leave."""
    B, S, window = len(GARBAGE), 8, 40
    inputs = make_inputs(seed, device=device, B=B, H=2, Hk=1, S=S, T=C, C=C, D=D, values=values)
    lengths, starts, offsets = (
        torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*GARBAGE, strict=True)
    )
    key = torch.arange(C, device=device)
    position = (offsets[:, None].long() + torch.arange(S, device=device))[..., None]
    seen = ((key < lengths[:, None]) & (key >= starts[:, None]))[:, None].expand(B, S, C)
    if kind != "full":
        seen = seen & (key <= position)
    if kind == "window":
        seen = seen & (position - key < window)
    visible: dict[str, Visibility] = {
        "causal": Causal(offsets),
        "window": Window(window, offsets),
        "full": Full(),
    }
    out = torch.full(inputs.q.shape, math.nan, device=device)
    _, lse = attention(
        inputs.q,
        inputs.k,
        inputs.v,
        visible=visible[kind],
        kv_len=lengths,
        kv_start=starts,
        out=out,
        return_lse=True,
    )
    expected = attention(
        inputs.q, inputs.k, inputs.v, visible=External(seen[:, None]), kv_len=C, return_lse=True
    )
    blind = ~seen.any(dim=2)[:, None].expand_as(lse)
    assert int(blind[:, 0].all(dim=1).sum()) >= 4
    assert_same_bits(out[blind], torch.zeros_like(out[blind]))
    assert bool((lse[blind] == -math.inf).all())
    same_bits((out, lse), expected)
