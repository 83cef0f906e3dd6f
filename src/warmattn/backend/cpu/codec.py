"""Compiled kernels of the codec: the sequence of `warmattn.codec.turboquant`, bit for bit.

They are `warmattn.codec.kernels.RowKernels` of the CPU, in the library and for the instruction set that serve
attention.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch
from torch import Tensor

from warmattn.backend.cpu import native
from warmattn.codec.codebook import midpoints

__all__ = ["available", "decode", "encode", "unrotate"]

_ENCODE, _DECODE, _UNROTATE = range(3)


class _Rows(ctypes.Structure):
    """``WaRows`` of native/call.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rank", "D")),
        *((name, ctypes.c_void_p) for name in ("sizes", "source", "strides")),
        ("last", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("norms", "norm_strides")),
        ("norm_last", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("signs", "table", "target", "norms_out", "broken")),
        *((name, ctypes.c_float) for name in ("rsqrt_D", "scale")),
        *((name, ctypes.c_int32) for name in ("task", "dtype", "bits", "threads")),
    )


def available() -> bool:
    """Whether this process has the compiled kernels."""
    return native.selected_isa() is not None


def encode(
    x: Tensor, signs: Tensor, centroids: Tensor, sf: float, codes: Tensor, norms: Tensor, broken: Tensor
) -> None:
    """Steps 1 to 7 for every row of ``x``, f16, bf16 or f32 ``[..., D]``; writes the last three."""
    D, bits = x.shape[-1], centroids.numel().bit_length() - 1
    rows, keep = _rows(_ENCODE, x, codes)
    rows.bits, rows.scale = bits, math.sqrt(D) if D <= 256 else sf
    signs, tree = signs.contiguous(), _search_tree(midpoints(centroids))
    rows.signs, rows.table = signs.data_ptr(), tree.data_ptr()
    rows.norms_out, rows.broken = norms.data_ptr(), broken.data_ptr()
    _run(rows)
    del keep


def decode(codes: Tensor, norms: Tensor, centroids: Tensor, sf: float, values: Tensor) -> None:
    """Steps 8 and 9 for every row of ``codes``, u8 ``[..., D]``; writes ``values``."""
    rows, keep = _rows(_DECODE, codes, values)
    strides = (ctypes.c_int64 * rows.rank)(*norms.stride()[:-1])
    rows.norms, rows.norm_strides, rows.norm_last = (
        norms.data_ptr(),
        ctypes.addressof(strides),
        norms.stride(-1),
    )
    table = native.centroids_by_byte(centroids)
    rows.table, rows.scale = table.data_ptr(), sf
    _run(rows)
    del keep


def unrotate(o: Tensor, signs: Tensor, result: Tensor) -> None:
    """The rotation back for every row of ``o``, f32 ``[..., D]``; writes ``result``."""
    rows, keep = _rows(_UNROTATE, o, result)
    signs = signs.contiguous()
    rows.signs = signs.data_ptr()
    _run(rows)
    del keep


def _rows(task: int, source: Tensor, target: Tensor) -> tuple[_Rows, tuple[object, ...]]:
    """What the three tasks share, and what its addresses point to."""
    rank, D = source.ndim - 1, source.shape[-1]
    sizes, strides = ((ctypes.c_int64 * rank)(*axes[:rank]) for axes in (source.shape, source.stride()))
    rows = _Rows(rank, D)
    rows.source, rows.last = source.data_ptr(), source.stride(-1)
    rows.sizes, rows.strides = ctypes.addressof(sizes), ctypes.addressof(strides)
    rows.target, rows.task, rows.dtype = target.data_ptr(), task, native.DTYPES[source.dtype]
    rows.rsqrt_D, rows.threads = 1 / math.sqrt(D), torch.get_num_threads()
    return rows, (sizes, strides)


def _run(rows: _Rows) -> None:
    library, isa = native.load_library(), native.selected_isa()
    assert library is not None
    assert isa is not None
    assert library.warmattn_rows_bytes() == ctypes.sizeof(_Rows), "codec.py and native/call.h disagree"
    library.warmattn_rows(isa.index, ctypes.byref(rows))


def _search_tree(boundaries: Tensor) -> Tensor:
    """Sorted boundaries as a binary tree, f32 ``[2^bits]``: root at 1, children of k at 2k and 2k + 1. Entry
    0 is not read.
    """
    return torch.cat((boundaries[:1], boundaries[_level_order(boundaries.numel() + 1)]))


@cache
def _level_order(count: int) -> Tensor:
    """Of a complete binary search tree with count - 1 nodes: the rank of each, level by level."""
    strides = [count >> level for level in range(count.bit_length() - 1)]
    return torch.cat([torch.arange(stride // 2 - 1, count - 1, stride) for stride in strides])
