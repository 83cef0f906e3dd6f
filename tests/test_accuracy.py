"""Section 6 of the contract: error against float64, next to the error of torch's float32 attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from warmattn import Causal, CodedValues, External, Full, Window, attention, decode_values, reference
from warmattn.testing import (
    VALUE_FORMS,
    Inputs,
    assert_accurate,
    assert_same_bits,
    lse_error,
    lse_tolerance,
    make_inputs,
    relative_error,
)
from warmattn.visibility import Visibility

DTYPES = (torch.float16, torch.bfloat16)
ROWS = {1: 1, 17: 17, 512: 64, 8192: 16, 32768: 4}
"""The last S rows of T keys: few where T is long."""


def sdpa_error(inputs: Inputs, scale: float, exact: Tensor) -> float:
    """The larger error of torch's float32 attention with heads expanded and with GQA rows packed."""
    B, H, S, D = inputs.q.shape
    T, Hk = inputs.kv_len, inputs.k.shape[1]
    group = H // Hk
    v = decode_values(inputs.v) if isinstance(inputs.v, CodedValues) else inputs.v
    q, k, v = inputs.q.float(), inputs.k[:, :, :T].float(), v[:, :, :T].float()
    positions = torch.arange(T, device=q.device)
    seen = positions[T - S :, None] >= positions

    expanded = scaled_dot_product_attention(
        q,
        k.repeat_interleave(group, dim=1),
        v.repeat_interleave(group, dim=1),
        attn_mask=seen,
        scale=scale,
    )
    packed = scaled_dot_product_attention(
        q.view(B, Hk, group * S, D), k, v, attn_mask=seen.repeat(group, 1), scale=scale
    )
    return max(relative_error(expanded, exact), relative_error(packed.view(B, H, S, D), exact))


def assert_as_accurate_as_torch(inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """At most max(5e-7, 1.5 × torch's error), and the LSE within 1e-6; returns ``(out, exact)``."""
    S, T = inputs.q.shape[2], inputs.kv_len
    arguments: dict[str, Any] = {"visible": Causal(T - S), "kv_len": T, "scale": scale}
    exact, exact_lse = reference.attention(inputs.q, inputs.k, inputs.v, **arguments)
    out, lse = attention(inputs.q, inputs.k, inputs.v, **arguments, return_lse=True)
    error, bound = relative_error(out, exact), max(5e-7, 1.5 * sdpa_error(inputs, scale, exact))
    assert error <= bound, f"relative error {error:.2e} > {bound:.2e}"
    assert lse_error(lse, exact_lse, deviation=scale * math.sqrt(inputs.q.shape[3])) <= lse_tolerance(lse)
    return out, exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("D", [256, 512])
@pytest.mark.parametrize("T", [1, 17, 512, 8192])
def test_standard_normal(
    seed: int, device: torch.device, T: int, D: int, values: str, dtype: torch.dtype
) -> None:
    assert_standard_normal_is_accurate(seed, device, T, D, values, dtype)


@pytest.mark.parametrize(
    ("D", "values", "dtype"),
    [
        (D, values, DTYPES[(i + j) % 2])
        for i, D in enumerate((256, 512))
        for j, values in enumerate(VALUE_FORMS)
    ],
)
def test_standard_normal_over_32768_keys(
    seed: int, device: torch.device, D: int, values: str, dtype: torch.dtype
) -> None:
    """A call takes seconds, so each form meets each head dim with one type of Q and K, in turn."""
    assert_standard_normal_is_accurate(seed, device, 32768, D, values, dtype)


def assert_standard_normal_is_accurate(
    seed: int, device: torch.device, T: int, D: int, values: str, dtype: torch.dtype
) -> None:
    inputs = make_inputs(seed, device=device, S=ROWS[T], T=T, D=D, values=values, dtype=dtype)
    out, exact = assert_as_accurate_as_torch(inputs, 1 / math.sqrt(D))
    assert_accurate(out, exact, keys=T)


DISTRIBUTIONS: dict[str, tuple[float, dict[str, Any]]] = {
    "V of mean 1": (1.0, {"mean": 1.0}),
    "V · 1e-5": (1.0, {"spread": 1e-5}),
    "V · 1e4": (1.0, {"spread": 1e4}),
    "scores of deviation 4": (4.0, {}),
    "scores of deviation 16": (16.0, {}),
}
"""Standard deviation of the scaled scores, and how V differs from standard-normal."""


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize(("T", "D"), [(512, 256), (512, 512), (8192, 256), (8192, 512)])
def test_other_distributions(
    seed: int, device: torch.device, T: int, D: int, values: str, distribution: str
) -> None:
    deviation, of_values = DISTRIBUTIONS[distribution]
    dtype = torch.bfloat16 if D == 512 else torch.float16
    inputs = make_inputs(seed, device=device, S=ROWS[T], T=T, D=D, values=values, dtype=dtype, **of_values)
    assert_as_accurate_as_torch(inputs, deviation / math.sqrt(D))


@pytest.mark.parametrize("deviation", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("D", [256, 512])
def test_lse_of_rows_that_see_one_key(seed: int, device: torch.device, D: int, deviation: float) -> None:
    """The log-sum-exp is then the score itself, which may be small where its products are large."""
    inputs = make_inputs(seed, device=device, S=512, T=1, D=D, H=16, Hk=16)
    arguments: dict[str, Any] = {"visible": Full(), "kv_len": 1, "scale": deviation / math.sqrt(D)}
    _, exact = reference.attention(inputs.q, inputs.k, inputs.v, **arguments)
    _, lse = attention(inputs.q, inputs.k, inputs.v, **arguments, return_lse=True)
    assert lse_error(lse, exact, deviation=deviation) <= lse_tolerance(lse)


@pytest.mark.parametrize("spread", [0.01, 0.5])
@pytest.mark.parametrize("scale", [1.0, 1 / 16, 1e-3])
@pytest.mark.parametrize("D", [256, 512])
def test_dots_of_1e5(seed: int, device: torch.device, D: int, scale: float, spread: float) -> None:
    """Past float16's 65504: every score is near 1e5, and what counts is their difference."""
    centre = math.sqrt(1e5 / D)
    normal = make_inputs(seed, device=device, S=20, T=300, D=D)
    q, k = ((centre + spread * operand.float()).half() for operand in (normal.q, normal.k))
    dots = q[0].float() @ k[0, :, :300].float().mT
    assert 65504 < dots.min() < 1e5 < dots.max()
    assert_as_accurate_as_torch(Inputs(q, k, normal.v, 300), scale)


@pytest.mark.parametrize("softcap", [5.0, 50.0])
@pytest.mark.parametrize("D", [256, 512])
def test_softcap_and_finite_mask_cells(seed: int, device: torch.device, D: int, softcap: float) -> None:
    S, T = 40, 600
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D)
    mask = torch.randn(S, T, generator=torch.Generator().manual_seed(seed)).half().to(device)
    mask[mask > 1] = -math.inf
    arguments: dict[str, Any] = {"visible": External(mask), "kv_len": T, "softcap": softcap, "scale": 0.3}
    exact, exact_lse = reference.attention(inputs.q, inputs.k, inputs.v, **arguments)
    out, lse = attention(inputs.q, inputs.k, inputs.v, **arguments, return_lse=True)
    assert_accurate(out, exact, keys=T)
    assert lse_error(lse, exact_lse, deviation=0.3 * math.sqrt(D)) <= lse_tolerance(lse)


@pytest.mark.parametrize("sf", [1.0, 0.7])
@pytest.mark.parametrize("values", ["codes5", "codes6", "codes8"])
@pytest.mark.parametrize("D", [64, 128, 256, 512])
def test_codes_equal_their_decoded_values_bit_for_bit(
    seed: int, device: torch.device, D: int, values: str, sf: float
) -> None:
    """Over a split boundary, in every visibility; the norms of one block also without their axis."""
    S, T = 6, 4096 + 140
    inputs = make_inputs(seed, device=device, H=4, Hk=2, S=S, T=T, D=D, values=values)
    assert isinstance(inputs.v, CodedValues)
    coded = CodedValues(inputs.v.codes, inputs.v.norms, inputs.v.codebook, sf)
    forms = [coded]
    if D <= 256:
        forms.append(CodedValues(coded.codes, coded.norms[..., 0], coded.codebook, sf))
    dense = decode_values(coded)
    mask = (torch.rand(S, T, generator=torch.Generator().manual_seed(seed)) < 0.5).to(device)
    kinds: tuple[Visibility, ...] = (Causal(T - S), Window(300, T - S), External(mask), Full())
    for visible in kinds:
        expected = attention(inputs.q, inputs.k, dense, visible=visible, kv_len=T)
        for form in forms:
            assert_same_bits(attention(inputs.q, inputs.k, form, visible=visible, kv_len=T), expected)
