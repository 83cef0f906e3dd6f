"""Values, norms and scores of any magnitude, in rows of their own: every V form, on any device.

Backends scale V, P or both to fit the products of their hardware. None of that may show: neither in the
accuracy, nor in the bits of a row whose neighbours or whose hidden keys are of another magnitude.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from warmattn import Causal, Codebook, CodedValues, External, Full, attention, decode_values, reference
from warmattn.testing import (
    VALUE_FORMS,
    Inputs,
    assert_accurate,
    assert_same_bits,
    assert_same_values,
    lse_error,
    lse_tolerance,
    make_inputs,
    relative_error,
)
from warmattn.visibility import Visibility

INF = math.inf
HEAD_DIMS = (64, 128, 256, 512)
each_head_dim = pytest.mark.parametrize("D", HEAD_DIMS)

Result = tuple[Tensor, Tensor]


def attend(inputs: Inputs, visible: Visibility, **arguments: Any) -> Result:
    operands: dict[str, Any] = {"kv_len": inputs.kv_len} | arguments
    return attention(inputs.q, inputs.k, inputs.v, visible=visible, return_lse=True, **operands)


def same_bits(actual: Result, expected: Result) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


def scaled(inputs: Inputs, factors: Tensor) -> Inputs:
    """Key t's row of V times ``factors[t]`` (of the coded form: its norms), rounded to float32."""
    v, T = inputs.v, inputs.kv_len
    factors = factors.to(inputs.q.device)[:, None]
    if isinstance(v, CodedValues):
        norms = v.norms.clone()
        norms[:, :, :T] *= factors
        return replace(inputs, v=replace(v, norms=norms))
    v = v.clone()
    v[:, :, :T] = (v[:, :, :T].float() * factors).to(v.dtype)
    return replace(inputs, v=v)


def assert_every_row_is_accurate(inputs: Inputs, visible: Visibility, **arguments: Any) -> None:
    """The contract's bound with every row of the result as long as the next, so that none is lost in a sum
    of squares.
    """
    out, lse = attend(inputs, visible, **arguments)
    exact, exact_lse = reference.attention(
        inputs.q, inputs.k, inputs.v, visible=visible, kv_len=inputs.kv_len, **arguments
    )
    length = exact.norm(dim=-1, keepdim=True)
    zero = length[..., 0] == 0
    assert_same_bits(out[zero], torch.zeros_like(out[zero]))
    assert_accurate(out[~zero].double() / length[~zero], exact[~zero] / length[~zero], keys=inputs.kv_len)
    assert lse_error(lse, exact_lse) <= lse_tolerance(lse)


MAGNITUDES = (1e-31, 1e-28, 1e-12, 1e-5, 1e4, 1e12, 1e30, 1e35)
"""Within float32's range, with room for a sum over the keys and for the low terms of split products."""


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("values", ["f32", "bf16", "codes8"])
@each_head_dim
def test_rows_of_one_magnitude(
    seed: int, device: torch.device, D: int, values: str, magnitude: float
) -> None:
    """Under nearly even weights: small ones would take the tiniest rows out of float32's range."""
    inputs = make_inputs(seed, device=device, S=9, T=150, D=D, values=values)
    factors = torch.full((150,), magnitude)
    assert_every_row_is_accurate(scaled(inputs, factors), Causal(141), scale=0.01)


@pytest.mark.parametrize("values", ["f32", "codes8"])
@each_head_dim
def test_the_tiniest_rows_neither_vanish_nor_overflow(
    seed: int, device: torch.device, D: int, values: str
) -> None:
    """At 1e-35 the low terms of split products are lost: the accuracy left is that of the high ones."""
    inputs = make_inputs(seed, device=device, S=9, T=150, D=D, values=values)
    tiny = scaled(inputs, torch.full((150,), 1e-35))
    out, lse = attend(tiny, Causal(141), scale=0.01)
    exact, exact_lse = reference.attention(
        tiny.q, tiny.k, tiny.v, visible=Causal(141), kv_len=150, scale=0.01
    )
    assert relative_error(out, exact) <= 2.0**-8
    assert lse_error(lse, exact_lse) <= lse_tolerance(lse)


def mixed_factors(seed: int, T: int) -> Tensor:
    """Tiny, huge, ordinary and zero rows at random; the first 20, which early rows see alone, are tiny."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.tensor([*MAGNITUDES, 1.0, 1.0, 0.0, 0.0])
    factors = magnitudes[torch.randint(len(magnitudes), (T,), generator=generator)]
    factors[:20] = 1e-28
    return factors


@pytest.mark.parametrize("values", ["f32", "bf16", "codes5", "codes8"])
@each_head_dim
def test_rows_of_mixed_magnitudes(seed: int, device: torch.device, D: int, values: str) -> None:
    """Row i of a cold prefill sees the keys up to i: a few tiny ones at first, at last some of 1e35."""
    T = 200
    inputs = scaled(make_inputs(seed, device=device, S=T, T=T, D=D, values=values), mixed_factors(seed, T))
    assert_every_row_is_accurate(inputs, Causal(0))


@pytest.mark.parametrize("values", ["f32", "bf16", "codes8"])
@each_head_dim
def test_rows_of_zeros_among_tiny_ones(seed: int, device: torch.device, D: int, values: str) -> None:
    """A key whose value is zero takes part in the sum alone: what it would weigh must not drown the rest."""
    T = 150
    inputs = make_inputs(seed, device=device, S=T, T=T, D=D, values=values)
    factors = torch.full((T,), 1e-28)
    factors[torch.rand(T, generator=torch.Generator().manual_seed(seed)) < 0.5] = 0.0
    assert_every_row_is_accurate(scaled(inputs, factors), Causal(0))


@pytest.mark.parametrize("values", ["f32", "bf16", "codes6", "codes8"])
@each_head_dim
def test_hidden_magnitudes_leave_no_trace(seed: int, device: torch.device, D: int, values: str) -> None:
    """A row's bits with keys of any magnitude behind it, in its tile, and without them."""
    T = 200
    inputs = scaled(make_inputs(seed, device=device, S=T, T=T, D=D, values=values), mixed_factors(seed, T))
    cold = attend(inputs, Causal(0))
    plain = attend(scaled(inputs, (torch.arange(T) < 100).float()), Causal(0))
    same_bits((plain[0][:, :, :100], plain[1]), (cold[0][:, :, :100], cold[1]))
    for row in (0, 1, 19, 20, 63, 64, 100, 127, 199):
        alone = attend(replace(inputs, q=inputs.q[:, :, row : row + 1]), Causal(row), kv_len=row + 1)
        same_bits(alone, (cold[0][:, :, row : row + 1], cold[1][:, :, row : row + 1]))


@pytest.mark.parametrize("values", ["f32", "codes8"])
@each_head_dim
def test_values_that_nobody_sees_may_be_nan(seed: int, device: torch.device, D: int, values: str) -> None:
    """Rows of V hidden by a mask from every row of the call, next to rows of 1e35 and 1e-31."""
    S, T = 9, 200
    factors = mixed_factors(seed, T)
    hidden = torch.rand(T, generator=torch.Generator().manual_seed(seed)) < 0.3
    hidden[16:32] = True
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D, values=values)
    visible = External((~hidden).expand(S, T).to(device))
    expected = attend(scaled(inputs, factors.masked_fill(hidden, 0.0)), visible)
    tile = torch.zeros(T, dtype=torch.bool)
    tile[16:32] = True  # a tile of the mask that is hidden as a whole may hold anything
    same_bits(attend(scaled(inputs, factors.masked_fill(tile, math.nan)), visible), expected)


@pytest.mark.parametrize("values", ["codes5", "codes6", "codes8"])
@each_head_dim
def test_codes_with_wild_norms_equal_their_decoded_values(
    seed: int, device: torch.device, D: int, values: str
) -> None:
    """Of either sign, over the whole range of float32, subnormal, zero; a split boundary is crossed."""
    S, T = 70, 4096 + 70
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D, values=values)
    assert isinstance(inputs.v, CodedValues)
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(inputs.v.norms.shape, generator=generator) * 70 - 38
    ordinary = torch.rand(exponent.shape, generator=generator) < 0.5
    norms = torch.where(ordinary, 16 + exponent / 8, 10.0**exponent)
    norms = norms * torch.tensor([1.0, -1.0, 1.0, 0.0])[torch.randint(4, norms.shape, generator=generator)]
    norms[:, :, T:] = math.nan
    coded = replace(inputs.v, norms=norms.to(device))
    dense = decode_values(coded)
    for visible in (Causal(T - S), Full()):
        of_codes = attend(replace(inputs, v=coded), visible)
        assert bool(of_codes[0].isfinite().all())
        same_bits(of_codes, attend(replace(inputs, v=dense), visible))


@each_head_dim
def test_codebooks_of_any_magnitude_one_after_the_other(seed: int, device: torch.device, D: int) -> None:
    """Each is gone before the next comes, which may then lie where it lay."""
    inputs = make_inputs(seed, device=device, S=9, T=150, D=D, values="codes5")
    assert isinstance(inputs.v, CodedValues)
    centroids = inputs.v.codebook.centroids
    for magnitude in (1.0, 1e-6, 1e6, 1e-12, 1e12, 1.0):
        coded = replace(inputs.v, codebook=Codebook(centroids * magnitude))
        expected = attend(replace(inputs, v=decode_values(coded)), Causal(141))
        same_bits(attend(replace(inputs, v=coded), Causal(141)), expected)
        assert_every_row_is_accurate(replace(inputs, v=coded), Causal(141))


@pytest.mark.parametrize("spread", [1e-20, 1.0, 1e20])
@each_head_dim
def test_bfloat16_values_are_widened_exactly(seed: int, device: torch.device, D: int, spread: float) -> None:
    """Over a split boundary."""
    S, T = 40, 4096 + 40
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D, values="bf16", spread=spread)
    assert isinstance(inputs.v, Tensor)
    widened = replace(inputs, v=inputs.v.float())
    for visible in (Causal(T - S), Full()):
        same_bits(attend(inputs, visible), attend(widened, visible))


# Scores.


@pytest.mark.parametrize("values", VALUE_FORMS)
@each_head_dim
def test_equal_scores(seed: int, device: torch.device, D: int, values: str) -> None:
    """Every weight is as large as a weight can be, whatever the score: −3e4, 0 or 3e4."""
    S, T = 9, 300
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D, values=values)
    mean, lses = None, []
    for score in (-3e4, 0.0, 3e4):
        q, k = torch.zeros_like(inputs.q), inputs.k.clone()
        q[..., 0] = 1.0 if score else 0.0
        k[:, :, :T] = 0.0
        k[:, :, :T, 0] = score
        out, lse = attend(replace(inputs, q=q, k=k), Full(), scale=1.0)
        assert_every_row_is_accurate(replace(inputs, q=q, k=k), Full(), scale=1.0)
        mean = out if mean is None else mean
        assert_same_values(out, mean)
        lses.append(lse - score)
    assert bool(((torch.stack(lses) - math.log(T)).abs() <= 0.03).all())


@pytest.mark.parametrize("values", ["f32", "f16", "codes8"])
@each_head_dim
def test_scores_from_one_end_to_the_other(seed: int, device: torch.device, D: int, values: str) -> None:
    """−6e4 … 6e4, rising, falling, or a peak: the row maximum moves at every tile, or is met first."""
    T = 300
    inputs = make_inputs(seed, device=device, S=3, T=T, D=D, values=values)
    q, k = torch.zeros_like(inputs.q), inputs.k.clone()
    rising = torch.linspace(-6e4, 6e4, T, device=device)
    q[:, :, 0, 0] = q[:, :, 1, 1] = q[:, :, 2, 2] = 1.0
    k[:, :, :T] = 0.0
    k[:, :, :T, 0], k[:, :, :T, 1], k[:, :, :T, 2] = rising, -rising, -rising.abs()
    extreme = replace(inputs, q=q, k=k)
    assert_every_row_is_accurate(extreme, Full(), scale=1.0)
    for scale in (1e-4, 1e-3):
        assert_every_row_is_accurate(extreme, Full(), scale=scale)


@pytest.mark.parametrize("values", ["f32", "f16", "codes8"])
@each_head_dim
def test_rows_that_see_one_key(seed: int, device: torch.device, D: int, values: str) -> None:
    """The result is that key's row wherever the key lies and whatever its score."""
    S, T = 40, 4200
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D, values=values)
    keys = torch.randint(T, (S,), generator=torch.Generator().manual_seed(seed)).to(device)
    keys[:4] = torch.tensor([0, T - 1, 4095, 4096], device=device)
    seen = torch.zeros(S, T, dtype=torch.bool, device=device)
    seen[torch.arange(S, device=device), keys] = True
    additive = torch.zeros(S, T, dtype=torch.float16, device=device).masked_fill_(~seen, -INF)
    rows = decode_values(inputs.v) if isinstance(inputs.v, CodedValues) else inputs.v.float()
    for mask in (seen, additive):
        out, _ = attend(inputs, External(mask), scale=7.0)
        assert_same_values(out, rows[:, :, keys].expand_as(out))
