"""Addresses on a GPU past what 32 bits can count, of elements and of bytes: caches of more than 4 GiB."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from warmattn import Causal, CodedValues, Window, attention, explain
from warmattn.testing import Inputs, assert_same_bits, make_inputs

FAR = 2**31
"""Elements."""

each_form = pytest.mark.parametrize("values", ["f16", "f32", "codes8"])
each_head_dim = pytest.mark.parametrize("D", [256, 512])


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Other processes test on the same GPU."""
    yield
    torch.cuda.empty_cache()


def far_down(rows: Tensor, capacity: int, filler: float, row_stride: int) -> Tensor:
    """``rows [1, 1, T, n]`` as the last of ``capacity`` rows that begin ``row_stride`` elements apart;
    everything else is ``filler``.
    """
    T, n = rows.shape[2:]
    memory = rows.new_full((capacity * row_stride,), filler)
    cache = memory.as_strided((1, 1, capacity, n), (memory.numel(), memory.numel(), row_stride, 1))
    cache[:, :, capacity - T :] = rows
    return cache


def far_apart(tensor: Tensor, filler: float) -> Tensor:
    """``[1, 2, rows, n]`` with more than `FAR` elements of ``filler`` between the heads."""
    _, _, rows, n = tensor.shape
    head = FAR + 64
    memory = tensor.new_full((head + rows * n,), filler)
    return memory.as_strided(tensor.shape, (2 * head, head, n, 1)).copy_(tensor)


def attend(inputs: Inputs, **arguments: Any) -> tuple[Tensor, Tensor]:
    return attention(inputs.q, inputs.k, inputs.v, return_lse=True, **arguments)


def same_bits(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


@each_form
@each_head_dim
def test_keys_far_down_the_cache(seed: int, device: torch.device, D: int, values: str) -> None:
    """The keys that rows see lie behind the 2^31st element of K, V, codes and norms; all others are NaN."""
    S, T, window = 40, 1000, 300
    near = make_inputs(seed, device=device, S=S, T=T, C=T, D=D, values=values)
    split = explain(near.q, near.k, near.v, visible=Window(window)).tiling.split
    before = (FAR // D // split + 1) * split
    if isinstance(near.v, CodedValues):
        v: Tensor | CodedValues = replace(
            near.v,
            codes=far_down(near.v.codes, before + T, 255, D),
            norms=far_down(near.v.norms, before + T, math.nan, D + 1),
        )
    else:
        v = far_down(near.v, before + T, math.nan, D)
    k = far_down(near.k, before + T, math.nan, D)
    k[:, :, before : before + T - S - window] = math.nan  # before the window of the first row
    same_bits(
        attend(Inputs(near.q, k, v, before + T), visible=Window(window, before + T - S)),
        attend(near, visible=Window(window, T - S)),
    )


@each_form
@each_head_dim
def test_heads_far_apart(seed: int, device: torch.device, D: int, values: str) -> None:
    S, T = 9, 300
    near = make_inputs(seed, device=device, S=S, T=T, C=T, D=D, H=2, Hk=2, values=values)
    if isinstance(near.v, CodedValues):
        v: Tensor | CodedValues = replace(
            near.v, codes=far_apart(near.v.codes, 255), norms=far_apart(near.v.norms, math.nan)
        )
    else:
        v = far_apart(near.v, math.nan)
    far = Inputs(near.q, far_apart(near.k, math.nan), v, T)
    same_bits(attend(far, visible=Causal(T - S)), attend(near, visible=Causal(T - S)))


@each_head_dim
def test_queries_and_outputs_far_apart(seed: int, device: torch.device, D: int) -> None:
    S, T = 9, 300
    near = make_inputs(seed, device=device, S=S, T=T, C=T, D=D, H=2, Hk=2, values="f16")
    expected = attend(near, visible=Causal(T - S))
    out = far_apart(torch.full_like(expected[0], math.nan), math.nan)
    far = replace(near, q=far_apart(near.q, math.nan))
    same_bits(attend(far, visible=Causal(T - S), out=out), expected)
    assert bool(out.isfinite().all())
