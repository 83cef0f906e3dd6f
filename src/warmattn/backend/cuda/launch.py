"""From an `AttentionCall` to kernels on a stream."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import _allocation, driver

from warmattn.backend import SplitPartials
from warmattn.backend.cuda import merge
from warmattn.backend.cuda.kernels import Sizes, attend_constants, attend_kernel, merge_kernel, sizes
from warmattn.backend.cuda.profiling import launching
from warmattn.backend.cuda.workspace import Workspace
from warmattn.call import LARGEST_POSITION, AttentionCall
from warmattn.partials import Exponential, Partials

__all__ = ["BASE_TWO", "run", "run_partials"]

BASE_TWO = Exponential(1.0, True, math.log(2.0))
"""What weighs the kernels' partial results: their maxima are exponents of two."""

_FULL = 0.7
"""Where programs fill this part of the device, each walks all splits of its rows, one after the other."""
_P_SCALED, _V_SCALED = 2.0**-15, 2.0**-8
"""Undo the scaling of weights and of converted values."""

_WORKSPACE = Workspace()


class _Outputs(NamedTuple):
    """Where the kernel writes, by address. ``walk``: the result itself; else partials per split."""

    walk: bool
    out: int
    maxima: int
    sums: int
    first_split: int
    splits: int


class _Plan(NamedTuple):
    """What the launches for all calls of one layout share, in the units that the kernel takes."""

    kernel: Any
    constants: tuple[Any, ...]
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    norm_strides: tuple[int, ...]
    mask_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    code_mask: int
    map_columns: int
    unscale: float


_PLANS: dict[tuple[Any, ...], _Plan] = {}
_PLANS_KEPT = 4096


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
    stream = _current_stream(index)
    cut = sizes(index, call.D)
    grid = _grid(call, cut)
    programs, rows = grid[0] * grid[1], call.B * call.H * call.S
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
    _attend(call, index, cut, grid, outputs, workspace, stream)
    if not walk:
        _merge(call, outputs, rows, stream)
    elif call.lse is not None:
        _log_sum_exp(call, outputs, rows, stream)


def run_partials(call: AttentionCall) -> SplitPartials:
    """Partial results per split, for the splits that any row of the call sees a key of (at least one)."""
    device, index = call.q.device, call.q.device.index
    with torch.cuda.device(device), _WORKSPACE.lock:
        stream = _current_stream(index)
        cut = sizes(index, call.D)
        grid = _grid(call, cut)
        first, splits = _visible_splits(call, cut)
        shape = (splits, *call.q.shape)
        maxima, sums, parts = (
            torch.empty(size, dtype=torch.float32, device=device) for size in (shape[:-1], shape[:-1], shape)
        )
        scratch = _WORKSPACE.take(cut.scratch * grid[0] * grid[1] * splits, device, stream)
        outputs = _Outputs(False, parts.data_ptr(), maxima.data_ptr(), sums.data_ptr(), first, splits)
        _attend(call, index, cut, grid, outputs, scratch, stream)
    return SplitPartials(first, Partials(maxima, sums, parts), BASE_TWO)


def _current_stream(index: int) -> int:
    return driver.active.get_current_stream(index)  # type: ignore[attr-defined]


def _grid(call: AttentionCall, cut: Sizes) -> tuple[int, int]:
    """Programs that walk all splits: by heads and columns, and by tiles of packed rows."""
    (B, H, S, D), Hk = call.q.shape, call.k.shape[1]
    return B * Hk * (D // cut.columns), -(-S * (H // Hk) // cut.tiling.rows)


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


def _attend(
    call: AttentionCall,
    index: int,
    cut: Sizes,
    grid: tuple[int, int],
    outputs: _Outputs,
    scratch: Tensor,
    stream: int,
) -> None:
    q, k, v, norms, centroids, mask = call.q, call.k, call.v, call.norms, call.centroids, call.mask
    walk, out, maxima, sums, first_split, splits = outputs
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    numbers: list[int | Tensor] = [call.q_offset, call.kv_len, call.kv_start]
    tensors, addresses = {}, [0, 0, 0]
    for i, length in enumerate(numbers):
        if isinstance(length, Tensor):
            tensors[i] = length.to(q.device, non_blocking=True).contiguous()
            addresses[i], numbers[i] = tensors[i].data_ptr(), 0

    aligned = ((q_at | k_at) % 16 == 0, v_at % 16 == 0, out % 16 == 0)
    kind = (call.causal, call.window is None, call.softcap is None, not tensors, walk)
    key = (index, call.layout(), aligned, kind)
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _PLANS_KEPT:
            _PLANS.clear()
        plan = _PLANS[key] = _plan(call, index, cut, aligned, bool(tensors), walk)

    scale = call.scale if call.softcap is None else 1.0
    token = _allocation._allocator.set(lambda size, alignment, stream: scratch)
    launching(call)
    try:
        _launch(
            plan.kernel, (*grid, splits), stream,
            q_at, *plan.q_strides, k_at, *plan.k_strides, v_at, *plan.v_strides,
            0 if norms is None else norms.data_ptr(), *plan.norm_strides,
            0 if centroids is None else centroids.data_ptr(), plan.code_mask, call.sf,
            0 if mask is None else mask.data_ptr(), *plan.mask_strides, 1.0 / scale,
            0 if call.tile_map is None else call.tile_map.data_ptr(), plan.map_columns,
            out, *plan.out_strides, maxima, sums, plan.unscale,
            *addresses, *numbers, call.key_offset,
            min(call.window or 0, LARGEST_POSITION),
            q.shape[1], k.shape[1], q.shape[2], k.shape[2], _factor(scale),
            0.0 if call.softcap is None else call.scale / call.softcap, call.softcap or 0.0,
            first_split, q.shape[0],
            *plan.constants,
        )  # fmt: skip
    finally:
        _allocation._allocator.reset(token)


def _plan(
    call: AttentionCall,
    index: int,
    cut: Sizes,
    aligned: tuple[bool, bool, bool],
    tensor_lengths: bool,
    walk: bool,
) -> _Plan:
    q, k, v = call.q, call.k, call.v
    aligned_qk = aligned[0] and _aligned_rows(q) and _aligned_rows(k)
    aligned_v = aligned[1] and _aligned_rows(v)
    qk_unit = 8 if aligned_qk else 1
    v_unit = 16 // v.element_size() if aligned_v else 1
    q_batch, q_head, q_row, _ = (stride // qk_unit for stride in q.stride())
    k_batch, k_head, k_row, _ = k.stride()
    v_strides = tuple(stride // v_unit for stride in v.stride()[:3])

    form, norm_strides, code_mask = "f16" if v.dtype == torch.float16 else "f32", (0, 0, 0, 0), 0
    if call.norms is not None:
        assert call.centroids is not None
        form, code_mask = "codes", len(call.centroids) - 1
        norm_strides = (call.norms if call.norms.ndim == 4 else call.norms[..., None]).stride()

    mask_strides, mask_dtype, map_columns = (0, 0, 0, 0), None, 0
    if call.mask is not None:
        planes = call.mask if call.mask.ndim == 4 else call.mask[None, None]
        mask_strides = planes.expand(call.B, call.H, -1, -1).stride()
        mask_dtype = torch.uint8 if planes.dtype == torch.bool else planes.dtype
        map_columns = 0 if call.tile_map is None else call.tile_map.shape[1]

    out_strides, aligned_out = (0, 0, 0), True
    if walk:
        assert call.out is not None
        out_strides = call.out.stride()[:3]
        aligned_out = aligned[2] and all(stride % 2 == 0 for stride in out_strides)
        if aligned_out:
            out_strides = tuple(stride // 2 for stride in out_strides)

    constants = attend_constants(
        cut,
        call.D,
        causal=call.causal,
        window=call.window is not None,
        mask=call.mask is not None,
        tile_map=call.tile_map is not None,
        softcap=call.softcap is not None,
        tensor_lengths=tensor_lengths,
        form=form,
        aligned_qk=aligned_qk,
        aligned_v=aligned_v,
        aligned_out=aligned_out,
        walk=walk,
    )
    return _Plan(
        kernel=attend_kernel(index, cut, q.dtype, v.dtype, mask_dtype, constants),
        constants=constants,
        q_strides=(q_batch, q_head, q_row),
        # The kernel takes heads and batches of K by elements, and its rows in units of 16 bytes.
        k_strides=(k_batch, k_head, k_row // qk_unit),
        v_strides=v_strides,
        norm_strides=norm_strides,
        mask_strides=mask_strides,
        out_strides=out_strides,
        code_mask=code_mask,
        map_columns=map_columns,
        unscale=_P_SCALED if form == "f16" else _P_SCALED * _V_SCALED,
    )


def _aligned_rows(tensor: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes if the first does, and 64 rows span less than 2^31
    elements.
    """
    batch, head, row, _ = tensor.stride()
    unit = 16 // tensor.element_size()
    return (batch | head | row) % unit == 0 and 0 < row < 2**24


@cache
def _factor(scale: float) -> float:
    """``fl32(fl32(scale) * fl32(log2 e))``: scores become exponents of two."""
    return ctypes.c_float(scale * ctypes.c_float(math.log2(math.e)).value).value


def _merge(call: AttentionCall, outputs: _Outputs, rows: int, stream: int) -> None:
    out, lse = call.out, call.lse
    assert out is not None
    columns = min(call.D, merge.COLUMNS)
    lse_pointer, lse_strides = (0, (0, 0, 0)) if lse is None else (lse.data_ptr(), lse.stride())
    constants = (call.D, columns, lse is not None)
    _launch(
        merge_kernel(out.device.index, "merge_splits", constants), (rows, call.D // columns, 1), stream,
        outputs.out, outputs.maxima, outputs.sums, outputs.splits, rows, call.H, call.S,
        out.data_ptr(), *out.stride()[:3], lse_pointer, *lse_strides, *constants,
    )  # fmt: skip


def _log_sum_exp(call: AttentionCall, outputs: _Outputs, rows: int, stream: int) -> None:
    lse = call.lse
    assert lse is not None
    constants = (merge.ROWS,)
    _launch(
        merge_kernel(lse.device.index, "log_sum_exp", constants), (-(-rows // merge.ROWS), 1, 1), stream,
        outputs.maxima, outputs.sums, rows, call.H, call.S, lse.data_ptr(), *lse.stride(), *constants,
    )  # fmt: skip


def _launch(kernel: Any, grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
    """``kernel[grid](*arguments, stream=stream)``, without what only profilers ask for, unless one does."""
    if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        kernel[grid](*arguments, stream=stream)
    else:
        kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
