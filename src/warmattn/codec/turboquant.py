"""Encode rows to codes and norms, decode them, and rotate results back: TurboQuant at high bit rates.

After Zandieh, Daliri, Hadian & Mirrokni, "TurboQuant: Online Vector Quantization with Near-optimal
Distortion Rate" (arXiv:2504.19874, 2025): a random rotation, then one optimal scalar quantiser for every
coordinate. docs/codec.md derives it; the sequence below *is* the format.

**The sequence, bit for bit.** One row x of D values, all in F32. Every line is one rounding to nearest even
per operation, no fused multiply-add, subnormals kept; fl32 rounds a real number to F32 once.
W = min(D, 256) is the width of a block, n = D / W the number of blocks of a row.

Rotate
 1. y[j] = x[j] · sign[j]                                     (x widened exactly; a sign flip is exact)
 2. for h = 1, 2, 4, ..., D/2, for every j with bit h clear:  (y[j], y[j+h]) = (y[j] + y[j+h], y[j] − y[j+h])
 3. y[j] = y[j] · fl32(1/√D)

Norm of each block
 4. t[j] = y[j] · y[j];  for half = W/2, W/4, ..., 1, for every j < half:  t[j] = t[j] + t[j+half]
 5. D ≤ 256: norm = √t[0];   D = 512: norm = √(t[0] · 2^-8)   (√ correctly rounded)

Code
 6. D ≤ 256: u[j] = (y[j] · fl32(√D)) / norm;   D = 512: u[j] = (y[j] · fl32(sf)) / norm
    (/ correctly rounded);   u[j] = 0 where norm = 0
 7. code[j] = number of boundaries b with b < u[j]             (u = b stays below)

Decode, in the rotated domain
 8. D ≤ 256: w = norm · fl32(1/√D);   D = 512: w = norm / fl32(sf)   (once per block; / correctly rounded)
 9. v[j] = centroid[code[j] mod 2^bits] · w

Rotate back: step 2 on the row, then step 3, then the sign flip of step 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from types import EllipsisType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from warmattn.codec.codebook import BITS, Codebook, midpoints
from warmattn.codec.kernels import row_kernels
from warmattn.codec.rotation import check_signs, default_signs, fwht
from warmattn.codec.values import HEAD_DIMS, CodedValues, check_coded, check_head_dim, check_sf, norm_blocks
from warmattn.errors import InvalidInput, Unsupported
from warmattn.memory import overlap, repeats_memory

__all__ = ["decode_rows", "decode_values", "encode_rows", "encode_values", "unrotate"]

# Values worked on at a time; no bit depends on it. On a CPU the temporaries of a chunk stay in a core's L2
# cache; elsewhere a chunk is large enough to hide its launches, and still only tens of MiB.
CHUNK_VALUES_CPU = 1 << 16
CHUNK_VALUES = 1 << 22

_SQRT = {D: float(np.float32(math.sqrt(D))) for D in HEAD_DIMS}
_RSQRT = {D: float(np.float32(1 / math.sqrt(D))) for D in HEAD_DIMS}


def encode_values(
    x: Tensor,
    *,
    bits: int = 8,
    codebook: Codebook | None = None,
    signs: Tensor | None = None,
    sf: float = 1.0,
    nonfinite: Literal["refuse", "zero"] = "refuse",
    out: CodedValues | None = None,
) -> CodedValues:
    """Code rows of values: one byte per value, one F32 norm per block of min(D, 256). Any number of rows.

    The bits are those of the module's sequence, for any strides, device, thread count and number of rows.
    Whether a row was finite is read back by the host, so on a GPU this synchronises.

    Args:
        x: f16, bf16 or f32 ``[..., D]``, D = 64, 128, 256 or 512, any strides.
        bits: 5, 6 or 8: which ``Codebook.lloyd_max`` to use; not looked at when ``codebook`` is given.
        codebook: another table; ``None`` means ``Codebook.lloyd_max(bits)``.
        signs: f32 ``[D]`` of ±1 on x's device; ``None`` means ``default_signs(D)``.
        sf: D = 512 only: scale before the codebook, finite and > 0 in F32.
        nonfinite: a row that holds NaN or inf, or whose norm overflows F32, is refused, or with "zero"
            encoded as a zero row and counted in ``nonfinite_rows``.
        out: written in place: codes of x's shape, norms of its rows, e.g. views of a cache at x's rows. Its
            codebook, signs and (D = 512) sf must be this call's. Nothing else in memory changes, and
            nothing at all when the call is refused.

    Returns:
        Coded values with the signs that were used; its tensors are those of ``out`` when given.

    Raises:
        Unsupported: head dim; x or signs require grad while grad is enabled.
        InvalidInput: anything else that does not fit, non-finite rows with the number and the first.
    """
    op = "encode_values"
    _check_rows(x, "x", (torch.float16, torch.bfloat16, torch.float32), signs, op=op)
    D = x.shape[-1]
    if codebook is None:
        if bits not in BITS:
            raise InvalidInput("bits", expected="5, 6 or 8", got=bits, op=op)
        codebook = Codebook.lloyd_max(bits)
    elif not isinstance(codebook, Codebook):
        raise InvalidInput("codebook", expected="a Codebook", got=type(codebook).__name__, op=op)
    check_sf(sf, "sf", D, op=op)
    if nonfinite not in ("refuse", "zero"):
        raise InvalidInput("nonfinite", expected="'refuse' or 'zero'", got=repr(nonfinite), op=op)
    if signs is None:
        signs = default_signs(D, x.device)
    if out is not None:
        _check_out(out, x, codebook, signs, sf)

    codes, norms, broken = encode_rows(x, codebook, signs, sf)
    nonfinite_rows = int(broken.sum())
    if nonfinite_rows and nonfinite == "refuse":
        first = tuple(broken.nonzero()[0].tolist())
        reason = (
            f"{nonfinite_rows} of {broken.numel()} rows are not finite, or their norm is not; first {first}"
        )
        raise InvalidInput(
            "x", expected="finite rows", got=f"{nonfinite_rows} that are not", op=op, reason=reason
        )
    if out is None:
        return CodedValues(codes, norms, codebook, sf, signs, nonfinite_rows=nonfinite_rows)
    out.codes.copy_(codes)
    out.block_norms.copy_(norms)
    return replace(out, signs=signs, nonfinite_rows=nonfinite_rows)


def decode_values(coded: CodedValues) -> Tensor:
    """The values that the codes stand for, in the rotated domain: a new f32 ``[..., D]``.

    Steps 8 and 9 of the module's sequence. This is V as `attention` sees it; `unrotate` brings rows back.

    Raises:
        Unsupported: head dim; norms require grad while grad is enabled.
        InvalidInput: dtype, shape, sf, device, or codes whose last axis is not contiguous.
    """
    op = "decode_values"
    _check_pair(coded, "coded", op=op)
    _refuse_grad(op, norms=coded.norms)
    codes, norms, D = coded.codes, coded.block_norms, coded.head_dim
    centroids = coded.codebook.on(codes.device)
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    kernels = row_kernels(codes.device)
    if kernels is not None:
        kernels.decode(codes, norms, centroids, coded.sf, values)
        return values
    for box in _chunks(codes):
        rows = decode_rows(
            codes[box].reshape(-1, D), norms[box].reshape(-1, norms.shape[-1]), centroids, coded.sf
        )
        values[box] = rows.view_as(values[box])
    return values


def unrotate(o: Tensor, *, signs: Tensor | None = None) -> Tensor:
    """Undo the rotation of encoded rows, or of any linear combination of them: a new f32 ``[..., D]``.

    Args:
        o: f32 ``[..., D]``, any strides, e.g. the output of `attention` over coded V.
        signs: those of the encoding, f32 ``[D]`` of ±1; ``None`` means ``default_signs(D)``.

    Raises:
        Unsupported: head dim; o or signs require grad while grad is enabled.
        InvalidInput: dtype, shape, device, or signs that are not ±1.
    """
    _check_rows(o, "o", (torch.float32,), signs, op="unrotate")
    D = o.shape[-1]
    if signs is None:
        signs = default_signs(D, o.device)
    result = torch.empty(o.shape, dtype=torch.float32, device=o.device)
    kernels = row_kernels(o.device)
    if kernels is not None:
        kernels.unrotate(o, signs, result)
        return result
    for box in _chunks(o):
        rows = fwht(o[box].reshape(-1, D)).mul_(_RSQRT[D]).mul_(signs)
        result[box] = rows.view_as(result[box])
    return result


def encode_rows(
    x: Tensor, codebook: Codebook, signs: Tensor, sf: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 1 to 7 for rows ``[..., D]`` of any leading axes, unchecked. The host waits for nothing.

    Returns:
        u8 codes ``[..., D]``, f32 norms ``[..., n]``, and bool ``[...]``: the row was not finite, or its norm
        was not, and is coded as zeros.
    """
    D = x.shape[-1]
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    norms = torch.empty(*x.shape[:-1], norm_blocks(D), dtype=torch.float32, device=x.device)
    broken = torch.empty(x.shape[:-1], dtype=torch.bool, device=x.device)
    centroids = codebook.on(x.device)
    kernels = row_kernels(x.device)
    if kernels is not None:
        kernels.encode(x, signs, centroids, sf, codes, norms, broken)
        return codes, norms, broken
    tree = _search_tree(centroids)
    for box in _chunks(x):
        rows = x[box].reshape(-1, D)
        for target, coded in zip((codes, norms, broken), _encode_few(rows, signs, tree, sf), strict=True):
            target[box] = coded.view_as(target[box])
    return codes, norms, broken


def decode_rows(codes: Tensor, norms: Tensor, centroids: Tensor, sf: float) -> Tensor:
    """Steps 8 and 9 for a few rows, unchecked.

    Takes u8 codes ``[N, D]``, f32 norms ``[N, n]``, f32 centroids ``[2^bits]``; gives f32 ``[N, D]``.
    """
    N, D = codes.shape
    n = norms.shape[-1]
    weights = norms * _RSQRT[D] if n == 1 else norms / _on_device(sf, norms)
    if centroids.numel() < 256:
        codes = codes & (centroids.numel() - 1)
    values = centroids.index_select(0, codes.flatten().int())
    return values.view(N, n, D // n).mul_(weights[..., None]).view(N, D)


def _encode_few(x: Tensor, signs: Tensor, tree: Tensor, sf: float) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 1 to 7 for a few rows ``[N, D]``, unchecked.

    Returns:
        u8 codes ``[N, D]``, f32 norms ``[N, n]``, and bool ``[N]``: not finite, coded as zeros.
    """
    N, D = x.shape
    n = norm_blocks(D)
    y = fwht(x.float() * signs).mul_(_RSQRT[D]).view(N, n, D // n)
    squares = _halving_sum(y * y)
    norms = _root(squares if n == 1 else squares * 2.0**-8)
    # A value that is not finite reaches every sum of its row, so the norms alone tell.
    broken = ~norms.isfinite().all(dim=1)
    norms.masked_fill_(broken[:, None], 0.0)
    u = y.mul_(_SQRT[D] if n == 1 else _on_device(sf, y)).div_(norms[..., None])
    u.masked_fill_((norms == 0)[..., None], 0.0)
    return _count_below(u.flatten(), tree).view(N, D), norms, broken


def _halving_sum(t: Tensor) -> Tensor:
    """Step 4: the sum over the last axis, adding its second half to its first until one value is left."""
    while t.shape[-1] > 1:
        low, high = t.chunk(2, dim=-1)
        t = low + high
    return t.squeeze(-1)


def _root(t: Tensor) -> Tensor:
    """The correctly rounded F32 square root; torch's own on a CPU is a unit off for one value in 150.

    In float64 the second rounding does no harm: no root lies that close to the midpoint of two F32 values.
    """
    return t.double().sqrt().float()


def _on_device(sf: float, like: Tensor) -> Tensor:
    """fl32(sf) as a tensor: torch on CUDA divides by a host scalar through its rounded reciprocal."""
    return torch.full((), float(sf), dtype=torch.float32, device=like.device)


def _search_tree(centroids: Tensor) -> Tensor:
    """The boundaries as a binary tree, f32 ``[2^bits]``: root at 1, children of k at 2k and 2k + 1."""
    return midpoints(centroids)[_tree_order(centroids.numel(), centroids.device)]


@cache
def _tree_order(count: int, device: torch.device) -> Tensor:
    """Which of ``count − 1`` sorted boundaries each node holds; node 0 is not used."""
    order = [0]
    for level in range(count.bit_length() - 1):
        stride = count >> level
        order += range(stride // 2 - 1, count - 1, stride)
    return torch.tensor(order, device=device)


def _count_below(u: Tensor, tree: Tensor) -> Tensor:
    """Step 7: how many boundaries lie below each u, f32 ``[M]`` -> u8 ``[M]``.

    One gather and one comparison a level: the branches of ``torch.bucketize``, which gives the same counts,
    are not predictable, and cost three to six times as much on a CPU.
    """
    node = torch.ones(u.shape, dtype=torch.int32, device=u.device)
    above = torch.empty_like(node)
    for _ in range(tree.numel().bit_length() - 1):
        torch.gt(u, tree.index_select(0, node), out=above)
        torch.add(above, node, alpha=2, out=node)
    return (node - tree.numel()).to(torch.uint8)


def _chunks(rows: Tensor) -> Iterator[tuple[int | slice | EllipsisType, ...]]:
    """Indices of chunks that together cover the leading axes of ``rows [..., D]``."""
    values = CHUNK_VALUES_CPU if rows.device.type == "cpu" else CHUNK_VALUES
    return _boxes(rows.shape[:-1], values // rows.shape[-1])


def _boxes(shape: Sequence[int], rows: int) -> Iterator[tuple[int | slice | EllipsisType, ...]]:
    """Indices that tile the leading axes ``shape`` in boxes of at most ``rows`` rows, in row-major order."""
    axis, inner = len(shape), 1
    while axis and inner * shape[axis - 1] <= rows:
        axis -= 1
        inner *= shape[axis]
    if not axis:
        yield (...,)
        return
    step = rows // inner
    for outer in product(*map(range, shape[: axis - 1])):
        for start in range(0, shape[axis - 1], step):
            yield (*outer, slice(start, start + step))


def _check_rows(
    x: Tensor, name: str, dtypes: tuple[torch.dtype, ...], signs: Tensor | None, *, op: str
) -> None:
    """Refuse what is not a tensor of rows of one of ``dtypes`` with fitting signs."""
    if not isinstance(x, Tensor):
        raise InvalidInput(name, expected="a tensor", got=type(x).__name__, op=op)
    if x.ndim == 0:
        raise InvalidInput(name, expected="shape [..., D]", got=[], op=op)
    check_head_dim(x.shape[-1], op=op)
    if x.dtype not in dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidInput(name, expected=expected, got=x.dtype, op=op)
    _refuse_grad(op, **{name: x})
    if signs is not None:
        check_signs(signs, x.shape[-1], x.device, op=op)
        _refuse_grad(op, signs=signs)


def _refuse_grad(op: str, **operands: Tensor) -> None:
    for name, operand in operands.items():
        if torch.is_grad_enabled() and operand.requires_grad:
            raise Unsupported(f"{name} requires grad: forward only, use torch.no_grad()", op=op)


def _check_pair(coded: CodedValues, name: str, *, op: str) -> None:
    """Refuse codes and norms of different rows or devices, and codes that are not bytes in a row."""
    if not isinstance(coded, CodedValues):
        raise InvalidInput(name, expected="CodedValues", got=type(coded).__name__, op=op)
    check_coded(coded, name, op=op)
    codes, norms = coded.codes, coded.norms
    rows = codes.shape[:-1]
    if coded.block_norms.shape[:-1] != rows:
        raise InvalidInput(
            f"{name}.norms", expected=f"rows {list(rows)} as codes", got=list(norms.shape), op=op
        )
    if norms.device != codes.device:
        raise InvalidInput(
            f"{name}.norms", expected=f"device {codes.device} as codes", got=norms.device, op=op
        )
    if codes.stride(-1) != 1:
        raise InvalidInput(
            f"{name}.codes", expected="a contiguous last axis", got=f"strides {codes.stride()}", op=op
        )


def _check_out(out: CodedValues, x: Tensor, codebook: Codebook, signs: Tensor, sf: float) -> None:
    """Refuse an ``out`` that could not hold the rows of x, or would read them back by another rule."""
    op = "encode_values"
    _check_pair(out, "out", op=op)
    if out.codes.shape != x.shape:
        raise InvalidInput(
            "out.codes", expected=f"x's shape {list(x.shape)}", got=list(out.codes.shape), op=op
        )
    if out.codes.device != x.device:
        raise InvalidInput("out", expected=f"device {x.device} as x", got=out.codes.device, op=op)
    if out.codebook.identity != codebook.identity:
        raise InvalidInput("out.codebook", expected=repr(codebook), got=repr(out.codebook), op=op)
    if norm_blocks(x.shape[-1]) > 1 and np.float32(out.sf) != np.float32(sf):
        raise InvalidInput("out.sf", expected=f"this call's {sf}", got=out.sf, op=op)
    held = default_signs(x.shape[-1], x.device) if out.signs is None else out.signs
    check_signs(held, x.shape[-1], x.device, op=op)
    if not torch.equal(held, signs):
        raise InvalidInput("out.signs", expected="this call's signs", got="others", op=op)
    _refuse_grad(op, norms=out.norms)
    for name, target in (("out.codes", out.codes), ("out.norms", out.norms)):
        if repeats_memory(target):
            raise InvalidInput(
                name, expected="one address per element", got=f"strides {target.stride()}", op=op
            )
        if overlap(target, x):
            raise InvalidInput(name, expected="memory apart from x", got="memory that overlaps x", op=op)
    if overlap(out.codes, out.norms):
        raise InvalidInput("out", expected="codes and norms apart", got="codes that overlap norms", op=op)
