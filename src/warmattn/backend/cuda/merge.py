"""Merge partial results of splits in ascending key order, and the log-sum-exp, in Triton.

The arithmetic is `warmattn.partials.fold` and `finish` step by step, for bases that are integers: every
weight is a power of two, so products are exact and one order of the sums is all that a bit depends on.
"""

# Triton annotates arguments with types of its own.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

__all__ = ["COLUMNS", "ROWS", "log_sum_exp", "merge_splits", "power_of_two"]

COLUMNS = 128
"""Columns of the output that one program merges."""
ROWS = 128
"""Rows whose log-sum-exp one program writes."""

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def power_of_two(x):
    """2 ** x of an integral x < 128, exact down to the smallest subnormal; -inf gives 0."""
    n = tl.maximum(x, -252.0).to(tl.int32)
    near = tl.maximum(n, -126)
    a = ((near + 127) << 23).to(tl.float32, bitcast=True)
    b = ((n - near + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -252.0, 0.0, a * b)


@triton.jit
def _divide(a, divisor):
    """Markstein's correctly rounded division (1990), with one reciprocal for a row: as the kernels divide."""
    inverse = tl.div_rn(1.0, divisor)
    quotient = a * inverse
    rest = tl.fma(-quotient, tl.zeros_like(a) + divisor, a)
    return tl.fma(rest, tl.zeros_like(a) + inverse, quotient)


@triton.jit
def _log(x):
    """`warmattn.elementary.log`, step by step."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits + (1 << 51)) >> 52) - 1023
    mantissa = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = ratio * 0.0 + 1.0 / 17.0
    for k in tl.static_range(8):
        series = series * square + 1.0 / (15 - 2 * k)
    value = exponent.to(tl.float64) * LN_2 + 2.0 * ratio * series
    return tl.where(x < float("inf"), value, x)


@triton.jit
def _store_lse(lse, at, base, total, inside):
    logarithm = _log(tl.where(total == 0.0, 1.0, total).to(tl.float64)).to(tl.float32)
    value = base * 0.6931471805599453 + logarithm
    tl.store(lse + at, tl.where(total == 0.0, float("-inf"), value), mask=inside)


@triton.jit(
    do_not_specialize=[
        "splits", "rows", "H", "S", "out_batch", "out_head", "out_row", "lse_batch", "lse_head", "lse_row",
    ]
)  # fmt: skip
def merge_splits(
    parts, maxima, sums, splits, rows, H, S,
    out, out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    lse, lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    D: tl.constexpr, COLUMNS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """``parts [splits, rows, D]``, ``maxima`` and ``sums [splits, rows]`` to rows of ``out``; rows is
    B * H * S. Grid: (rows, D / COLUMNS).
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    base = float("-inf")
    total = 0.0
    a = tl.zeros([COLUMNS], tl.float32)
    for j in tl.range(0, splits, loop_unroll_factor=4):
        m = tl.load(maxima + j * rows.to(tl.int64) + row)
        l = tl.load(sums + j * rows.to(tl.int64) + row)  # noqa: E741 (the literature's letter)
        part = tl.load(parts + (j * rows.to(tl.int64) + row) * D + d, mask=m > float("-inf"), other=0.0)
        new = tl.maximum(base, m)
        shift = tl.where(new == float("-inf"), 0.0, new)
        before = power_of_two(base - shift)
        weight = power_of_two(m - shift)
        a = a * before + part * weight
        total = total * before + l * weight
        base = new
    s = row % S
    h = row // S % H
    b = row // S // H
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(out + b * out_batch + h * out_head + s * out_row + d, _divide(a, divisor))
    if LSE:
        _store_lse(lse, b * lse_batch + h * lse_head + s * lse_row, base, total, tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["rows", "H", "S", "lse_batch", "lse_head", "lse_row"])
def log_sum_exp(
    maxima, sums, rows, H, S, lse, lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``maxima`` and ``sums [B * H * S]`` to ``lse``. Grid: (ceil(rows / BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    base = tl.load(maxima + row, mask=inside, other=0.0)
    total = tl.load(sums + row, mask=inside, other=0.0)
    at = row // S // H * lse_batch + row // S % H * lse_head + row % S * lse_row
    _store_lse(lse, at, base, total, inside)
