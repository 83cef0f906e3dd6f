"""Partial results of an attention row and the one law that merges them.

A row over some of its keys is three numbers per the streaming softmax of Milakov and Gimelshein (2018, arXiv
1805.02867, section 3) and Dao et al. (2022, arXiv 2205.14135, appendix B): the maximum score ``m``, the sum
``l`` of ``exp(s - m)`` and the unnormalised output ``a``, the sum of ``exp(s - m) * v``. Two partial
results over disjoint keys merge as

    m = max(m1, m2),   l = l1 * exp(m1 - m) + l2 * exp(m2 - m),   a = a1 * exp(m1 - m) + a2 * exp(m2 - m).

Rounding makes the order matter, so every part of warmattn merges in ascending key order: keys of a tile,
tiles of a split, splits of a row, ranks of a group. An empty partial (m = −inf) weighs exactly nothing: the
bits of the other are unchanged.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from warmattn.elementary import exp2, log
from warmattn.errors import InvalidInput

__all__ = ["Exponential", "Partials", "finish", "fold", "log_sum_exp", "merge", "merge_partials"]


class Exponential(NamedTuple):
    """``exp(scale * x)`` as the contract rounds it: one factor, then exp2 or exp.

    Attributes:
        factor: multiplies a difference of scores.
        binary: exp2 instead of exp.
        scale: multiplies a maximum score in the log-sum-exp.
    """

    factor: float
    binary: bool
    scale: float

    @classmethod
    def of(cls, head_dim: int, scale: float) -> Exponential:
        """D = 512 uses ``exp`` and the scale itself; smaller D ``exp2`` and ``fl32(fl32(scale) * fl32(log2
        e))``.
        """
        scale = ctypes.c_float(scale).value
        if head_dim == 512:
            return cls(scale, False, scale)
        log2_e = ctypes.c_float(math.log2(math.e)).value
        return cls(ctypes.c_float(scale * log2_e).value, True, scale)

    def __call__(self, difference: Tensor) -> Tensor:
        scaled = difference * self.factor
        return scaled.exp2_() if self.binary else scaled.exp_()

    @property
    def binary_factor(self) -> float:
        """``f`` for which the exponential of x is ``2 ** (f * x)``, in float64."""
        return self.factor if self.binary else self.factor * math.log2(math.e)

    def weight(self, difference: Tensor) -> Tensor:
        """The exponential as the merge uses it: the same bits wherever it is computed."""
        return exp2(difference.double() * self.binary_factor).to(difference.dtype)


NATURAL = Exponential(1.0, False, 1.0)


class Partials(NamedTuple):
    """Partial results of rows, float32 (the oracle: float64).

    Attributes:
        maximum: ``[..., S]``, the largest score before the exponential's scale; −inf where no key was seen.
        sum: ``[..., S]``.
        accumulator: ``[..., S, D]``, unnormalised.
    """

    maximum: Tensor
    sum: Tensor
    accumulator: Tensor


def fold(first: Partials, second: Partials, weigh: Callable[[Tensor], Tensor]) -> Partials:
    """Merge two partial results; ``second`` holds the later keys, ``weigh`` exponentiates a difference."""
    maximum = torch.maximum(first.maximum, second.maximum)
    # A row that has seen nothing keeps -inf; subtracting 0 there gives exp(-inf) = 0, not exp(-inf +
    # inf) = NaN.
    base = maximum.masked_fill(maximum == -math.inf, 0.0)
    weight_1 = weigh(first.maximum - base)
    weight_2 = weigh(second.maximum - base)
    return Partials(
        maximum,
        first.sum * weight_1 + second.sum * weight_2,
        first.accumulator * weight_1[..., None] + second.accumulator * weight_2[..., None],
    )


def merge(partials: Iterable[Partials], exponential: Exponential) -> Partials:
    """Merge partial results, at least one, in the order given (ascending keys)."""
    return reduce(lambda first, second: fold(first, second, exponential.weight), partials)


def finish(partials: Partials, exponential: Exponential) -> tuple[Tensor, Tensor]:
    """``(out, lse)``: the accumulator over its sum, and ``scale * m + ln l``; a row that saw nothing gives 0
    and −inf.
    """
    maximum, total, accumulator = partials
    saw_nothing = total == 0
    out = accumulator / total.masked_fill(saw_nothing, 1.0)[..., None]
    return out, log_sum_exp(maximum, total, exponential)


def log_sum_exp(maximum: Tensor, total: Tensor, exponential: Exponential) -> Tensor:
    """``scale * m + ln l``, −inf where a row saw nothing."""
    logarithm = log(total.double()).to(total.dtype)
    return (maximum * exponential.scale + logarithm).masked_fill(total == 0, -math.inf)


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention results over N disjoint ranges of keys, in index order.

    Args:
        outs: float32 ``[N, B, H, S, D]``, each normalised, as `warmattn.attention` returns it.
        lses: float32 ``[N, B, H, S]``, natural log. A partial with −inf contributes nothing, whatever its
            ``outs`` hold.

    Returns:
        ``(out [B, H, S, D], lse [B, H, S])``, float32; rows that are empty everywhere give 0 and −inf.

    Raises:
        InvalidInput: another dtype, shapes that do not belong together, or N = 0.
    """
    for name, tensor in (("outs", outs), ("lses", lses)):
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise InvalidInput(name, expected="a float32 tensor", got=got, op="merge_partials")
    if outs.ndim != 5 or outs.shape[0] == 0:
        expected = "[N, B, H, S, D], N >= 1"
        raise InvalidInput("outs", expected=expected, got=list(outs.shape), op="merge_partials")
    if lses.shape != outs.shape[:4]:
        expected = str(list(outs.shape[:4]))
        raise InvalidInput("lses", expected=expected, got=list(lses.shape), op="merge_partials")
    if lses.device != outs.device:
        raise InvalidInput("lses", expected=f"on {outs.device}", got=lses.device, op="merge_partials")
    empty = lses == -math.inf
    sums = torch.ones_like(lses).masked_fill_(empty, 0.0)
    accumulators = outs.masked_fill(empty[..., None], 0.0)
    parts = (Partials(*part) for part in zip(lses, sums, accumulators, strict=True))
    return finish(merge(parts, NATURAL), NATURAL)
