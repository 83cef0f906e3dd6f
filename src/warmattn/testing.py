"""What every check of warmattn shares: inputs, poison, the error measure and its tolerances.

For tests, ``warmattn verify`` and benchmarks; also for whoever adds a backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from warmattn.codec.codebook import Codebook
from warmattn.codec.turboquant import encode_values
from warmattn.codec.values import CodedValues

__all__ = [
    "VALUE_FORMS",
    "Inputs",
    "assert_accurate",
    "assert_same_bits",
    "assert_same_values",
    "lse_error",
    "lse_tolerance",
    "make_inputs",
    "make_values",
    "relative_error",
    "same_bits",
    "tolerance",
]

VALUE_FORMS = ("f32", "f16", "bf16", "codes5", "codes6", "codes8")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Operands of one call: q ``[B, H, S, D]``, k ``[B, Hk, C, D]``, v in one of `VALUE_FORMS`; rows past T
    are poison.
    """

    q: Tensor
    k: Tensor
    v: Tensor | CodedValues
    kv_len: int


def make_inputs(
    seed: int,
    *,
    S: int,
    T: int,
    D: int,
    B: int = 1,
    H: int = 2,
    Hk: int = 1,
    C: int | None = None,
    values: str = "f32",
    dtype: torch.dtype = torch.float16,
    spread: float = 1.0,
    mean: float = 0.0,
    device: str | torch.device = "cpu",
) -> Inputs:
    """Standard-normal operands with NaN (codes: 255) in every row past T.

    Args:
        seed: of a generator of its own.
        C: capacity of the cache, default T + 5.
        values: form of V.
        spread, mean: V is ``spread * normal + mean``.
    """
    generator = torch.Generator().manual_seed(seed)
    capacity = T + 5 if C is None else C

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q = normal(B, H, S, D).to(dtype)
    k = torch.full((B, Hk, capacity, D), math.nan, dtype=dtype)
    k[:, :, :T] = normal(B, Hk, T, D).to(dtype)
    v = make_values(normal(B, Hk, T, D) * spread + mean, capacity, values)
    return Inputs(q.to(device), k.to(device), _to(v, device), T)


def make_values(rows: Tensor, capacity: int, form: str) -> Tensor | CodedValues:
    """Lay ``rows`` (f32 ``[B, Hk, T, D]``) into a poisoned cache of ``capacity`` rows, in one of
    `VALUE_FORMS`.
    """
    B, Hk, T, D = rows.shape
    if not form.startswith("codes"):
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[form]
        v = torch.full((B, Hk, capacity, D), math.nan, dtype=dtype)
        v[:, :, :T] = rows.to(dtype)
        return v
    coded = encode_values(rows, bits=int(form.removeprefix("codes")))
    codes = torch.full((B, Hk, capacity, D), 255, dtype=torch.uint8)
    norms = torch.full((B, Hk, capacity, max(1, D // 256)), math.nan)
    codes[:, :, :T], norms[:, :, :T] = coded.codes, coded.norms
    return CodedValues(codes, norms, coded.codebook, coded.sf, coded.signs)


def _to(v: Tensor | CodedValues, device: str | torch.device) -> Tensor | CodedValues:
    if isinstance(v, Tensor):
        return v.to(device)
    signs = None if v.signs is None else v.signs.to(device)
    return CodedValues(v.codes.to(device), v.norms.to(device), Codebook(v.codebook.centroids), v.sf, signs)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error, computed in float64."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def tolerance(keys: int) -> float:
    """The contract's bound on `relative_error` for standard-normal operands and T = ``keys``.

    A float32 sum of T random terms has an error of about sqrt(log2 T) units of 2^-24 when it is summed in
    blocks; scores of unit spread add one such error of a D-term sum. 1e-6 is about 17 units and holds every
    block size in use.
    """
    return 1.0e-6 if keys <= 8192 else 1.5e-6


def assert_accurate(actual: Tensor, expected: Tensor, *, keys: int) -> None:
    """Fail when ``actual`` is not finite or its `relative_error` exceeds `tolerance`."""
    assert bool(actual.isfinite().all()), "the result has non-finite elements"
    error = relative_error(actual, expected)
    assert error <= tolerance(keys), f"relative error {error:.2e} > {tolerance(keys):.2e} at T = {keys}"


def lse_error(lse: Tensor, expected: Tensor, *, deviation: float = 1.0) -> float:
    """Largest error of a log-sum-exp, relative to ``max(1, |expected|, deviation)``; see `lse_tolerance`.

    Args:
        deviation: standard deviation of the scaled scores. A float32 sum errs by the size of its terms, so
            a score near 0 is as inexact as its neighbours.
    """
    error = (lse.double() - expected.double()).abs()
    return float((error / expected.abs().clamp(min=max(1.0, deviation))).max())


def lse_tolerance(lse: Tensor) -> float:
    """Bound of `lse_error`. Twice the contract's on a GPU, whose matrix unit truncates what it adds."""
    return 2e-6 if lse.is_cuda else 1e-6


def assert_same_values(actual: Tensor, expected: Tensor) -> None:
    """Fail where results differ that are one number in exact arithmetic, as all rows over a single key are.
    On the CPU, where the largest weight is 1, they are equal bit for bit; on a GPU it lies in (1/2, 1].
    """
    if actual.is_cuda:
        assert_accurate(actual, expected, keys=1)
    else:
        assert_same_bits(actual, expected)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors are equal bit for bit: NaN equals itself, 0 does not equal −0."""
    return a.shape == b.shape and bool(
        (a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)).all()
    )


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Fail, with the count and the first place, where two float32 tensors differ in any bit."""
    assert actual.shape == expected.shape, f"shapes differ: {list(actual.shape)}, {list(expected.shape)}"
    differs = actual.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32)
    if bool(differs.any()):
        first = tuple(differs.nonzero()[0].tolist())
        pair = f"{actual[first].item():.9g} and {expected[first].item():.9g}"
        raise AssertionError(f"{int(differs.sum())} of {differs.numel()} elements differ; at {first}: {pair}")
