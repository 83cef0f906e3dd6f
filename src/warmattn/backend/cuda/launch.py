"""From an `AttentionCall` to kernels on a stream, and the building of those kernels ahead of time."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import _allocation

from warmattn.backend import SplitPartials, Tiling
from warmattn.backend.cuda import hopper, merge, portable
from warmattn.backend.cuda.profiling import launching
from warmattn.backend.cuda.tuning import HOPPER, HOPPER_SPLIT, PORTABLE, PORTABLE_SPLIT, portable_family
from warmattn.backend.cuda.workspace import Workspace
from warmattn.call import LARGEST_POSITION, AttentionCall
from warmattn.partials import Exponential, Partials
from warmattn.pipelines import PipelineKey

__all__ = ["BASE_TWO", "Sizes", "build", "run", "run_partials", "sizes"]

BASE_TWO = Exponential(1.0, True, math.log(2.0))
"""What weighs the kernels' partial results: their maxima are exponents of two."""

_FULL = 0.7
"""Where programs fill this part of the device, each walks all splits of its rows, one after the other."""
_DESCRIPTORS = 256
"""Bytes of global memory in which one program of the Hopper kernel keeps its descriptors."""
_P_SCALED, _V_SCALED = 2.0**-15, 2.0**-8
"""Undo the scaling of weights and of converted values."""

_WORKSPACE = Workspace()
_COMPILED: dict[tuple[Any, ...], Any] = {}


class Sizes(NamedTuple):
    """How one device cuts calls of one head dim.

    Attributes:
        kernel: ``hopper`` or ``portable``.
        family: row of the portable kernel's table, by compute capability.
        tiling: rows, keys and splits.
        columns: columns of V of a program.
        scratch: bytes of global memory that a program uses besides.
    """

    kernel: str
    family: int
    tiling: Tiling
    columns: int
    scratch: int


@cache
def sizes(index: int, D: int) -> Sizes:
    """The kernel and its sizes for a device and head dim: the same for every call, whatever its S."""
    capability, is_amd = torch.cuda.get_device_capability(index), torch.version.hip is not None
    family = portable_family(capability, is_amd=is_amd)
    if capability == (9, 0) and not is_amd and D in HOPPER_SPLIT:
        return Sizes("hopper", family, Tiling(128, 64, HOPPER_SPLIT[D]), 256, _DESCRIPTORS)
    config = PORTABLE[family, D]
    return Sizes("portable", family, Tiling(config.rows, config.tile, PORTABLE_SPLIT[D]), config.columns, 0)


class _Outputs(NamedTuple):
    """Where the kernel writes, by address. ``walk``: the result itself; else partials per split."""

    walk: bool
    out: int
    maxima: int
    sums: int
    first_split: int
    splits: int


def run(call: AttentionCall) -> None:
    """Write ``call.out``, and ``call.lse`` unless it is ``None``."""
    index = call.q.device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return run(call)
    with _WORKSPACE.lock:  # another thread's kernels on this stream must not come between ours
        _run(call, index)
    return None


def _run(call: AttentionCall, index: int) -> None:
    assert call.out is not None
    stream = torch.cuda.current_stream(index).cuda_stream
    cut = sizes(index, call.D)
    programs, rows = _programs(call, cut), call.B * call.H * call.S
    first, splits = _visible_splits(call, cut)
    walk = splits == 1 or programs >= _FULL * _processors(index)
    if walk:
        splits = 1
    scratch_bytes = cut.scratch * programs * splits
    row_bytes = 4 * splits * rows
    part_bytes = 0 if walk else row_bytes * call.D
    workspace = _WORKSPACE.take(scratch_bytes + part_bytes + 2 * row_bytes, call.q.device, stream)
    parts = workspace.data_ptr() + scratch_bytes
    maxima = parts + part_bytes
    out = call.out.data_ptr() if walk else parts
    outputs = _Outputs(walk, out, maxima, maxima + row_bytes, first, splits)
    _attend(call, cut, outputs, workspace, stream)
    if not walk:
        _merge(call, outputs, rows, stream)
    elif call.lse is not None:
        _log_sum_exp(call, outputs, rows, stream)


def run_partials(call: AttentionCall) -> SplitPartials:
    """Partial results per split, for the splits that any row of the call sees a key of (at least one)."""
    device = call.q.device
    with torch.cuda.device(device), _WORKSPACE.lock:
        stream = torch.cuda.current_stream(device).cuda_stream
        cut = sizes(device.index, call.D)
        first, splits = _visible_splits(call, cut)
        shape = (splits, *call.q.shape)
        maxima, sums, parts = (
            torch.empty(size, dtype=torch.float32, device=device) for size in (shape[:-1], shape[:-1], shape)
        )
        scratch = _WORKSPACE.take(cut.scratch * _programs(call, cut) * splits, device, stream)
        outputs = _Outputs(False, parts.data_ptr(), maxima.data_ptr(), sums.data_ptr(), first, splits)
        _attend(call, cut, outputs, scratch, stream)
    return SplitPartials(first, Partials(maxima, sums, parts), BASE_TWO)


def _programs(call: AttentionCall, cut: Sizes) -> int:
    """Programs that walk all splits."""
    return call.B * call.Hk * (call.D // cut.columns) * -(-call.S * call.group // cut.tiling.rows)


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _visible_splits(call: AttentionCall, cut: Sizes) -> tuple[int, int]:
    """First and number of the splits that hold a key which some row may see, as far as the host knows."""
    start = 0 if isinstance(call.kv_start, Tensor) else call.kv_start
    end = call.C if isinstance(call.kv_len, Tensor) else call.kv_len
    if call.causal and not isinstance(call.q_offset, Tensor):
        position = call.q_offset - call.key_offset
        end = min(end, position + call.S)
        if call.window is not None:
            start = max(start, position - call.window + 1)
    if start >= end:
        return 0, 1
    split = cut.tiling.split
    first = start // split
    return first, -(-end // split) - first


def _attend(call: AttentionCall, cut: Sizes, outputs: _Outputs, scratch: Tensor, stream: int) -> None:
    q, k, v, D = call.q, call.k, call.v, call.D
    q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    form = "codes" if call.norms is not None else "f16" if v.dtype == torch.float16 else "f32"
    bulk_k = _aligned(q, q_strides) and _aligned(k, k_strides)
    aligned_v = _aligned(v, v_strides)
    q_unit = k_unit = v_unit = 1
    if bulk_k:
        q_unit = k_unit = 8
    if aligned_v:
        v_unit = 16 // v.element_size()

    walk, out, maxima, sums, first_split, splits = outputs
    out_batch, out_head, out_row, aligned_out = 0, 0, 0, True
    if walk:
        assert call.out is not None
        out_batch, out_head, out_row, _ = call.out.stride()
        aligned_out = (out_batch | out_head | out_row) % 2 == 0 and out % 16 == 0
        if aligned_out:
            out_batch, out_head, out_row = out_batch // 2, out_head // 2, out_row // 2

    norms, norm_strides, centroids, code_mask = 0, (0, 0, 0, 0), 0, 0
    if call.norms is not None:
        assert call.centroids is not None
        dense = call.norms if call.norms.ndim == 4 else call.norms[..., None]
        norms, norm_strides, centroids = dense.data_ptr(), dense.stride(), call.centroids.data_ptr()
        code_mask = len(call.centroids) - 1

    scale = call.scale if call.softcap is None else 1.0
    mask, mask_strides, inverse_scale, mask_dtype, tile_map, map_columns = 0, (0, 0, 0, 0), 1.0, None, 0, 0
    if call.mask is not None:
        planes = call.mask if call.mask.ndim == 4 else call.mask[None, None]
        mask, inverse_scale = planes.data_ptr(), 1.0 / scale
        mask_strides = planes.expand(call.B, call.H, -1, -1).stride()
        mask_dtype = torch.uint8 if planes.dtype == torch.bool else planes.dtype
        if call.tile_map is not None:
            tile_map, map_columns = call.tile_map.data_ptr(), call.tile_map.shape[1]

    lengths = (call.q_offset, call.kv_len, call.kv_start)
    tensors = [
        n.to(q.device, non_blocking=True).contiguous() if isinstance(n, Tensor) else None for n in lengths
    ]
    tensor_lengths = any(tensor is not None for tensor in tensors)

    constants = _constants(
        cut.kernel, cut.family, D, call.causal, call.window is not None, call.mask is not None,
        call.tile_map is not None, call.softcap is not None, tensor_lengths, form, bulk_k, aligned_v,
        aligned_out, walk,
    )  # fmt: skip
    kernel = _kernel(q.device.index, cut, q.dtype, v.dtype, mask_dtype, constants)
    token = _allocation._allocator.set(lambda size, alignment, stream: scratch)
    launching(call)
    try:
        kernel[call.B * call.Hk * (D // cut.columns), -(-call.S * call.group // cut.tiling.rows), splits](
            q.data_ptr(), q_strides[0] // q_unit, q_strides[1] // q_unit, q_strides[2] // q_unit,
            k.data_ptr(), k_strides[0], k_strides[1], k_strides[2] // k_unit,
            v.data_ptr(), v_strides[0] // v_unit, v_strides[1] // v_unit, v_strides[2] // v_unit,
            norms, *norm_strides, centroids, code_mask, call.sf,
            mask, *mask_strides, inverse_scale, tile_map, map_columns,
            out, out_batch, out_head, out_row, maxima, sums,
            _P_SCALED if form == "f16" else _P_SCALED * _V_SCALED,
            *(0 if t is None else t.data_ptr() for t in tensors),
            *(0 if isinstance(n, Tensor) else n for n in lengths), call.key_offset,
            min(call.window or 0, LARGEST_POSITION),
            call.H, call.Hk, call.S, call.C, _factor(scale),
            0.0 if call.softcap is None else call.scale / call.softcap, call.softcap or 0.0,
            first_split, call.B,
            *constants, stream=stream,
        )  # fmt: skip
    finally:
        _allocation._allocator.reset(token)


@cache
def _constants(
    kernel: str,
    family: int,
    D: int,
    causal: bool,
    window: bool,
    mask: bool,
    tile_map: bool,
    softcap: bool,
    tensor_lengths: bool,
    form: str,
    aligned_qk: bool,
    aligned_v: bool,
    aligned_out: bool,
    walk: bool,
) -> tuple[Any, ...]:
    """The compile-time constants of the kernel's ``attend``, in its order."""
    kind = (D, causal, window, mask, tile_map, softcap, tensor_lengths, form, aligned_qk)
    if kernel == "portable":
        rows, tile, columns, _, _ = PORTABLE[family, D]
        return (*kind, aligned_v, aligned_out, walk, PORTABLE_SPLIT[D], rows, tile, columns)
    bulk_v = form == "f16" and not mask and aligned_qk and aligned_v
    variant = "copied" if bulk_v else "loaded" if form == "f16" else "converted"
    return (*kind, bulk_v, aligned_v, aligned_out, walk, HOPPER_SPLIT[D], *HOPPER[D, variant])


def build(key: PipelineKey, index: int) -> None:
    """Compile every kernel that a pipeline's calls launch: with one program for all splits of a row and with
    one per split, for operands aligned to 16 bytes.
    """
    scores = torch.bfloat16 if key.on(322) else torch.float16
    form = {"v32": "f32", "v16": "f16", "vcodes": "codes"}[key.form]
    values = {"f32": torch.float32, "f16": torch.float16, "codes": torch.uint8}[form]
    if key.on(323):
        form, values = "f32", torch.bfloat16
    mask = torch.float16 if key.on(300) else None
    cut = sizes(index, key.head_dim)
    for walk in (True, False):
        constants = _constants(
            cut.kernel, cut.family, key.head_dim, key.on(301), key.on(310), key.on(300), key.on(303),
            key.on(320), key.on(325), form,
            True, True, True, walk,
        )  # fmt: skip
        _kernel(index, cut, scores, values, mask, constants)
    for lse in (False, True):
        _merging(index, "merge_splits", (key.head_dim, min(key.head_dim, merge.COLUMNS), lse))
    _merging(index, "log_sum_exp", (merge.ROWS,))


def _aligned(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether every row begins at a multiple of 16 bytes, and 64 rows span less than 2^31 elements."""
    batch, head, row, _ = strides
    unit = 16 // tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and (batch | head | row) % unit == 0 and 0 < row < 2**24


@dataclass(frozen=True)
class _Pointer:
    """A pointer's type, and whether it is a multiple of 16, as Triton asks a tensor for them."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


def _kernel(
    index: int,
    cut: Sizes,
    scores: torch.dtype,
    values: torch.dtype,
    mask: torch.dtype | None,
    constants: tuple[Any, ...],
) -> Any:
    """The kernel's ``attend``, compiled for these types and constants."""
    key = (index, scores, values, mask, constants)
    found = _COMPILED.get(key)
    if found is None:
        kernel, options = hopper.attend, {"num_warps": 4}
        if cut.kernel == "portable":
            config = PORTABLE[cut.family, constants[0]]
            kernel, options = portable.attend, {"num_warps": config.warps, "num_stages": config.stages}
        aligned_qk = constants[8]
        at = {parameter.name: i for i, parameter in enumerate(p for p in kernel.params if p.is_constexpr)}
        types = {
            "q": _Pointer(scores, aligned_qk),
            "k": _Pointer(scores, aligned_qk),
            "v": _Pointer(values, constants[at["V_ALIGNED"]]),
            "mask": _Pointer(mask or torch.uint8, False),
            "tile_map": _Pointer(torch.uint8, False),
            "out": _Pointer(torch.float32, constants[at["OUT_ALIGNED"]]),
            **dict.fromkeys(("norms", "centroids", "maxima", "sums"), _Pointer(torch.float32, False)),
            **dict.fromkeys(("q_offsets", "kv_lens", "kv_starts"), _Pointer(torch.int32, False)),
            **dict.fromkeys(("sf", "inverse_scale", "unscale", "factor", "cap_in", "cap_out"), 1.0),
        }
        names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
        arguments = [types.get(name, 2) for name in names]
        found = kernel.warmup(*arguments, *constants, grid=(1,), enable_fp_fusion=False, **options)
        _COMPILED[key] = found
    return found


@cache
def _factor(scale: float) -> float:
    """``fl32(fl32(scale) * fl32(log2 e))``: scores become exponents of two."""
    return ctypes.c_float(scale * ctypes.c_float(math.log2(math.e)).value).value


def _merge(call: AttentionCall, outputs: _Outputs, rows: int, stream: int) -> None:
    out, lse = call.out, call.lse
    assert out is not None
    columns = min(call.D, merge.COLUMNS)
    lse_pointer, lse_strides = (0, (0, 0, 0)) if lse is None else (lse.data_ptr(), lse.stride())
    kernel = _merging(out.device.index, "merge_splits", (call.D, columns, lse is not None))
    kernel[rows, call.D // columns, 1](
        outputs.out, outputs.maxima, outputs.sums, outputs.splits, rows, call.H, call.S,
        out.data_ptr(), *out.stride()[:3], lse_pointer, *lse_strides, call.D, columns, lse is not None,
        stream=stream,
    )  # fmt: skip


def _log_sum_exp(call: AttentionCall, outputs: _Outputs, rows: int, stream: int) -> None:
    lse = call.lse
    assert lse is not None
    kernel = _merging(lse.device.index, "log_sum_exp", (merge.ROWS,))
    kernel[-(-rows // merge.ROWS), 1, 1](
        outputs.maxima, outputs.sums, rows, call.H, call.S, lse.data_ptr(), *lse.stride(), merge.ROWS,
        stream=stream,
    )  # fmt: skip


def _merging(index: int, name: str, constants: tuple[Any, ...]) -> Any:
    """A kernel of `merge`, compiled."""
    key = (index, name, constants)
    found = _COMPILED.get(key)
    if found is None:
        kernel = getattr(merge, name)
        pointers = {"parts": _Pointer(torch.float32, True)} | dict.fromkeys(
            ("maxima", "sums", "out", "lse"), _Pointer(torch.float32, False)
        )
        names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
        arguments = [pointers.get(parameter, 2) for parameter in names]
        warps = 1 if name == "merge_splits" else 4
        found = kernel.warmup(*arguments, *constants, grid=(1,), num_warps=warps, enable_fp_fusion=False)
        _COMPILED[key] = found
    return found
