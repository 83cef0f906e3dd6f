"""Triton kernels of the codec: the sequence of `warmattn.codec.turboquant`, bit for bit.

A program is one warp that holds ``VALUES`` values, so a few rows, in registers: nothing waits for another
warp, and values change lanes by shuffles or through a little shared memory. Every operation rounds once:
contraction is off, divisions and roots are the correctly rounded ones, subnormals are kept.
"""

# In a kernel, Triton gives annotations, constants and loops a meaning of its own.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from warmattn.codec.codebook import BITS, Codebook
from warmattn.codec.rotation import default_signs
from warmattn.codec.values import norm_blocks

__all__ = ["build", "decode", "encode", "unrotate"]

VALUES = tl.constexpr(1024)
"""Values of one program: 32 for each lane."""

OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


def encode(
    x: Tensor, signs: Tensor, centroids: Tensor, sf: float, codes: Tensor, norms: Tensor, broken: Tensor
) -> None:
    """Steps 1 to 7 for every row of ``x``, unchecked.

    Args:
        x: f16, bf16 or f32 ``[..., D]``, any strides.
        signs: f32 ``[D]``.
        centroids: f32 ``[2^bits]``, contiguous.
        sf: scale before the codebook, used for D = 512.
        codes: u8 ``[..., D]``, written; contiguous, as allocated.
        norms: f32 ``[..., n]``, written; contiguous.
        broken: bool ``[...]``, written; contiguous. The row was not finite and is coded as zeros.
    """
    D = x.shape[-1]
    (x,) = row_views(x)
    _launch(
        encode_kernel,
        x,
        *(x, signs.contiguous(), centroids, codes, norms, broken),
        *(x.shape[1], x.shape[2], *x.stride()[:3]),
        *(1 / math.sqrt(D), math.sqrt(D) if D <= 256 else float(sf)),
        BITS=centroids.numel().bit_length() - 1,
    )


def decode(codes: Tensor, norms: Tensor, centroids: Tensor, sf: float, values: Tensor) -> None:
    """Steps 8 and 9 for every row, unchecked.

    Args:
        codes: u8 ``[..., D]``, any strides.
        norms: f32 ``[..., n]``, any strides.
        centroids: f32 ``[2^bits]``, contiguous.
        sf: the scale of the encoding, used for D = 512.
        values: f32 ``[..., D]``, written; contiguous, as allocated.
    """
    D = codes.shape[-1]
    codes, norms = row_views(codes, norms)
    _launch(
        decode_kernel,
        codes,
        *(codes, norms, centroids, values),
        *(codes.shape[1], codes.shape[2], *codes.stride()[:3], *norms.stride()),
        1 / math.sqrt(D) if D <= 256 else float(sf),
        BITS=centroids.numel().bit_length() - 1,
    )


def unrotate(o: Tensor, signs: Tensor, result: Tensor) -> None:
    """Undo the rotation of every row, unchecked.

    Args:
        o: f32 ``[..., D]``, any strides.
        signs: f32 ``[D]``.
        result: f32 ``[..., D]``, written; contiguous, as allocated.
    """
    D = o.shape[-1]
    (o,) = row_views(o)
    _launch(
        unrotate_kernel,
        o,
        *(o, signs.contiguous(), result),
        *(o.shape[1], o.shape[2], *o.stride()[:3]),
        1 / math.sqrt(D),
    )


def build(head_dim: int, device: torch.device) -> None:
    """Compile and load all that coding rows of a head dim needs, by coding rows of zeros."""

    def row(dtype: torch.dtype, size: int = head_dim) -> Tensor:
        return torch.zeros(1, size, dtype=dtype, device=device)

    signs, norms = default_signs(head_dim, device), row(torch.float32, norm_blocks(head_dim))
    for bits in BITS:
        centroids = Codebook.lloyd_max(bits).on(device)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            encode(row(dtype), signs, centroids, 1.0, row(torch.uint8), norms, row(torch.bool, 1))
        decode(row(torch.uint8), norms, centroids, 1.0, row(torch.float32))
    unrotate(row(torch.float32), signs, row(torch.float32))


def row_views(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors ``[*lead, k]`` of the same leading axes as views ``[n0, n1, n2, k]`` of the same rows in order.

    Neighbouring axes become one where they are evenly spaced in every tensor. The views are of copies where
    more than three axes remain, or where the first tensor's rows are not contiguous at multiples of 16 bytes,
    as the vector loads want them.
    """
    first = tensors[0]
    axes: list[tuple[int, list[int]]] = []
    for size, *strides in zip(first.shape[:-1], *(t.stride()[:-1] for t in tensors), strict=True):
        if axes and axes[-1][1] == [size * stride for stride in strides]:
            axes[-1] = axes[-1][0] * size, strides
        elif size != 1:
            axes.append((size, strides))
    starts = [first.data_ptr(), *(strides[0] * first.element_size() for _, strides in axes)]
    if len(axes) > 3 or first.stride(-1) != 1 or any(start % 16 for start in starts):
        return row_views(*(t.clone(memory_format=torch.contiguous_format) for t in tensors))
    axes = [(1, [0] * len(tensors))] * (3 - len(axes)) + axes
    sizes = [size for size, _ in axes]
    return tuple(
        t.as_strided((*sizes, t.shape[-1]), (*(strides[i] for _, strides in axes), t.stride(-1)))
        for i, t in enumerate(tensors)
    )


def _launch(kernel: Any, rows: Tensor, *arguments: Tensor | int | float, **constants: int) -> None:
    """Run a kernel over ``rows [n0, n1, n2, D]`` on their device, current stream."""
    n0, n1, n2, D = rows.shape
    programs = n0 * n1 * triton.cdiv(n2, VALUES.value // D)
    if programs:
        with torch.cuda.device_of(rows):
            kernel[(programs,)](*arguments, **constants, LOG_D=D.bit_length() - 1, **OPTIONS)


# Nothing but dtypes, D and bits makes another specialisation: none is compiled for the value of a size or a
# stride, nor for where a tensor lies.
_SHAPE = ("n1", "n2", "stride0", "stride1", "stride2")


@triton.jit(do_not_specialize=["x", "signs", "centroids", "codes", "norms", "broken", *_SHAPE])
def encode_kernel(
    x, signs, centroids, codes, norms, broken,
    n1: tl.int64, n2: tl.int64, stride0: tl.int64, stride1: tl.int64, stride2: tl.int64,
    shrink: tl.float32, stretch: tl.float32, BITS: tl.constexpr, LOG_D: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2**LOG_D
    W: tl.constexpr = min(D, 256)
    n: tl.constexpr = D // W
    R: tl.constexpr = VALUES // D
    i0, i1, i2, row = program_rows(n1, n2, R)
    inside = i2 < n2
    d = tl.arange(0, D)

    start = tl.multiple_of(x + (i0 * stride0 + i1 * stride1 + i2 * stride2), [16])
    y = tl.load(start[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    y = fwht(y * tl.load(signs + d)[None, :], R, LOG_D) * shrink

    squares = halving_sum(y * y, R * n, min(LOG_D, 8))
    if n > 1:
        squares *= 0.00390625  # 2^-8
    norm = tl.reshape(tl.sqrt_rn(squares), (R, n))
    # A value that is not finite reaches every sum of its row, so the norms alone tell.
    zeroed = tl.min((norm < float("inf")).to(tl.int32), axis=1) == 0
    norm = tl.where(zeroed[:, None], 0.0, norm)
    void = (norm == 0.0)[:, :, None]
    u = tl.div_rn(tl.reshape(y * stretch, (R, n, W)), tl.where(void, 1.0, norm[:, :, None]))
    code = count_below(tl.reshape(tl.where(void, 0.0, u), (R * D,)), centroids, BITS)

    start = tl.multiple_of(codes + row * D, [16])
    tl.store(start[:, None] + d[None, :], tl.reshape(code, (R, D)).to(tl.uint8), mask=inside[:, None])
    tl.store(norms + (row[:, None] * n + tl.arange(0, n)[None, :]), norm, mask=inside[:, None])
    tl.store(broken + row, zeroed, mask=inside)


_NORM_SHAPE = ("norm_stride0", "norm_stride1", "norm_stride2", "norm_stride3")


@triton.jit(do_not_specialize=["codes", "norms", "centroids", "values", *_SHAPE, *_NORM_SHAPE])
def decode_kernel(
    codes, norms, centroids, values,
    n1: tl.int64, n2: tl.int64, stride0: tl.int64, stride1: tl.int64, stride2: tl.int64,
    norm_stride0: tl.int64, norm_stride1: tl.int64, norm_stride2: tl.int64, norm_stride3: tl.int64,
    factor: tl.float32, BITS: tl.constexpr, LOG_D: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2**LOG_D
    W: tl.constexpr = min(D, 256)
    n: tl.constexpr = D // W
    R: tl.constexpr = VALUES // D
    i0, i1, i2, row = program_rows(n1, n2, R)
    inside = i2 < n2
    d = tl.arange(0, D)

    start = norms + (i0 * norm_stride0 + i1 * norm_stride1 + i2 * norm_stride2)
    norm = tl.load(start[:, None] + tl.arange(0, n)[None, :] * norm_stride3, mask=inside[:, None], other=0.0)
    weight = norm * factor if n == 1 else tl.div_rn(norm, factor)

    start = tl.multiple_of(codes + (i0 * stride0 + i1 * stride1 + i2 * stride2), [16])
    code = tl.load(start[:, None] + d[None, :], mask=inside[:, None], other=0).to(tl.int32)
    index = tl.reshape(code & (2**BITS - 1), (R * D,))
    value = tl.gather(tl.load(centroids + tl.arange(0, 2**BITS)), index, 0)
    value = tl.reshape(value, (R, n, W)) * weight[:, :, None]

    start = tl.multiple_of(values + row * D, [16])
    tl.store(start[:, None] + d[None, :], tl.reshape(value, (R, D)), mask=inside[:, None])


@triton.jit(do_not_specialize=["o", "signs", "result", *_SHAPE])
def unrotate_kernel(
    o, signs, result,
    n1: tl.int64, n2: tl.int64, stride0: tl.int64, stride1: tl.int64, stride2: tl.int64,
    shrink: tl.float32, LOG_D: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2**LOG_D
    R: tl.constexpr = VALUES // D
    i0, i1, i2, row = program_rows(n1, n2, R)
    inside = i2 < n2
    d = tl.arange(0, D)
    start = tl.multiple_of(o + (i0 * stride0 + i1 * stride1 + i2 * stride2), [16])
    y = tl.load(start[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    y = fwht(y, R, LOG_D) * shrink * tl.load(signs + d)[None, :]
    start = tl.multiple_of(result + row * D, [16])
    tl.store(start[:, None] + d[None, :], y, mask=inside[:, None])


@triton.jit
def program_rows(n1, n2, R: tl.constexpr):
    """The rows of this program, R neighbours along axis 2: their index along axes 0, 1 and 2, and in all."""
    blocks = tl.cdiv(n2, R)
    program = tl.program_id(0).to(tl.int64)
    outer = program // blocks
    i2 = (program - outer * blocks) * R + tl.arange(0, R)
    return outer // n1, outer % n1, i2, outer * n2 + i2


@triton.jit
def fwht(y, R: tl.constexpr, LOG_D: tl.constexpr):
    """Step 2 on f32 ``[R, D]``.

    Every level splits neighbours, which differ in bit 0 of j, and puts sums before differences: bit 0 becomes
    the top bit, and the next bit comes down to its place. After log2 D levels all are back where they were.
    """
    D: tl.constexpr = 2**LOG_D
    for _ in tl.static_range(LOG_D):
        low, high = tl.split(tl.reshape(y, (R, D // 2, 2)))
        y = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (R, D))
    return y


@triton.jit
def halving_sum(t, N: tl.constexpr, LEVELS: tl.constexpr):
    """Step 4 on N blocks of 2^LEVELS values: adds the second half to the first down to one, f32 ``[N]``."""
    for level in tl.static_range(LEVELS):
        t = tl.sum(tl.reshape(t, (N, 2, 2 ** (LEVELS - 1 - level))), axis=1)
    return tl.reshape(t, (N,))


@triton.jit
def count_below(u, centroids, BITS: tl.constexpr):
    """Step 7 on f32 ``[M]``: how many midpoints of neighbouring centroids lie below each u, int32 ``[M]``.

    A binary search. Each level has its boundaries in the lanes, so that a lookup is a shuffle or a few, where
    loads from memory would queue. The code is the path, one bit a level.
    """
    N: tl.constexpr = 2**BITS
    middle = (tl.load(centroids + (N // 2 - 1)) + tl.load(centroids + N // 2)) * 0.5
    path = (u > middle).to(tl.int32)
    for level in tl.static_range(1, BITS):
        stride = N // 2**level
        below = centroids + (tl.arange(0, 2**level) * stride + (stride // 2 - 1))
        boundary = (tl.load(below) + tl.load(below + 1)) * 0.5
        path = 2 * path + (u > tl.gather(boundary, path, 0)).to(tl.int32)
    return path
