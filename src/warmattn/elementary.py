"""exp2 and log with the same bits everywhere.

A library's exponential and logarithm differ in their last bits between machines, vector widths, and the
vector and
the scalar part of one loop: the place of a row in a tensor would show. These two are additions, products and
divisions in float64, each of which IEEE 754 rounds in one way only, in a fixed order, and one rounding to
the result's dtype at the end. A kernel that follows the same steps gets the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["exp2", "log"]

_LN_2 = 0.6931471805599453
_MANTISSA = 52
_EXPONENT_BIAS = 1023

_EXP_TAYLOR = tuple(1.0 / math.factorial(k) for k in range(8, -1, -1))
_ATANH_TAYLOR = tuple(1.0 / k for k in range(17, 0, -2))


def exp2(x: Tensor) -> Tensor:
    """``2 ** x`` for float64 x <= 0 (−inf gives 0, NaN stays): float64 with a relative error below 1e-9.

    ``2**n`` times the Taylor polynomial of ``exp(ln(2) * r)``, degree 8 by Horner's rule, where n + r = x
    and n is the nearest integer. Below −200 it is 2**−200, which is 0 in float32.
    """
    x = x.clamp(min=-200.0)
    whole = x.round()
    power = ((whole.to(torch.int64) + _EXPONENT_BIAS) << _MANTISSA).view(torch.float64)
    return _horner(_EXP_TAYLOR, (x - whole) * _LN_2) * power


def log(x: Tensor) -> Tensor:
    """Natural logarithm of normal float64 x > 0 (inf and NaN stay): float64 with an error below 1e-9.

    ``n * ln(2) + 2 * atanh((m - 1) / (m + 1))``, where x = m * 2**n and m is in [3/4, 3/2); the series of
    atanh in its square, 9 terms by Horner's rule.
    """
    bits = x.view(torch.int64)
    # Half a unit added to the mantissa carries into the exponent from 3/2 on.
    exponent = ((bits + (1 << (_MANTISSA - 1))) >> _MANTISSA) - _EXPONENT_BIAS
    mantissa = (bits - (exponent << _MANTISSA)).view(torch.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    logarithm = exponent.to(torch.float64) * _LN_2 + 2.0 * ratio * _horner(_ATANH_TAYLOR, ratio * ratio)
    return torch.where(x.isfinite(), logarithm, x)


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """The polynomial with these coefficients, highest power first."""
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value
