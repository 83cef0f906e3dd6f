"""The compiled kernels: what the library offers on this machine, and a call's way into it through plain C.

The library is built with the wheel (see ``native/``). It has no torch ABI: operands go in as addresses and
strides. Its OpenMP symbols resolve to the runtime that torch has loaded, so both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from warmattn.backend import SplitPartials, Tiling
from warmattn.call import AttentionCall
from warmattn.errors import Unsupported
from warmattn.partials import Exponential, Partials, log_sum_exp

__all__ = [
    "DTYPES",
    "Isa",
    "centroids_by_byte",
    "exponential_of",
    "isas",
    "load_library",
    "refusal",
    "run",
    "run_partials",
    "selected_isa",
    "tiling",
]

_LOG = logging.getLogger("warmattn")
ISA_VARIABLE = "WARMATTN_CPU_ISA"
_LIBRARY = "_native.so"
_SPLIT = 4096
_TILES = {"amx": (32, 128), "avx512": (48, 64), "avx2": (24, 64), "neon": (12, 64), "portable": (12, 64)}
"""Rows and keys of a tile, by instruction set."""

_FULL, _CAUSAL, _WINDOW, _EXTERNAL = range(4)
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.uint8: 3, torch.bool: 4}
"""``WaDtype`` of native/call.h."""


class _Operand(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("last", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """``WaCall`` of native/call.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "Hk", "S", "D")),
        *((name, _Operand) for name in ("q", "k", "v", "norms", "mask")),
        ("tile_map", ctypes.c_void_p),
        ("map_columns", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("centroids", "q_offset", "kv_len", "kv_start")),
        ("window", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_head", "out_row", "first_split", "splits")),
        *((name, ctypes.c_void_p) for name in ("maximum", "sum", "accumulator")),
        ("merge_factor", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("factor", "scale", "softcap", "value_scale")),
        *((name, ctypes.c_int32) for name in ("qk_dtype", "v_form", "kind", "mask_dtype", "threads")),
    )

    keep: list[object]
    """What the addresses point to and the call does not own."""


@dataclass(frozen=True, slots=True)
class Isa:
    """One instruction set that the library was built for.

    Attributes:
        index: its place in the library, fastest first.
        name: "amx", "avx512", "avx2", "neon" or "portable".
        missing: what this machine lacks to run it; ``None`` when it can.
    """

    index: int
    name: str
    missing: str | None


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library; ``None``, said once in the log, where none was built (no GCC)."""
    # An editable install keeps the library in another directory of the package's path than the sources.
    places = [Path(directory) / _LIBRARY for directory in sys.modules[__name__.rpartition(".")[0]].__path__]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        _LOG.warning(
            "the CPU kernels were not built (no GCC at install): running on torch operations, slower"
        )
        return None
    library = ctypes.CDLL(str(path))
    library.warmattn_call_bytes.restype = ctypes.c_int64
    library.warmattn_isa_name.restype = library.warmattn_isa_missing.restype = ctypes.c_char_p
    library.warmattn_attend.argtypes = (ctypes.c_int, ctypes.POINTER(_Call))
    assert library.warmattn_call_bytes() == ctypes.sizeof(_Call), "native.py and native/call.h disagree"
    return library


@cache
def isas() -> tuple[Isa, ...]:
    """The instruction sets of the library, fastest first; empty without a library."""
    library = load_library()
    if library is None:
        return ()

    def isa(index: int) -> Isa:
        missing = library.warmattn_isa_missing(index)
        return Isa(
            index, library.warmattn_isa_name(index).decode(), None if missing is None else missing.decode()
        )

    return tuple(isa(index) for index in range(library.warmattn_isa_count()))


def refusal() -> str | None:
    """Why the instruction set named by WARMATTN_CPU_ISA cannot run; ``None`` when it can or none is named."""
    forced = os.environ.get(ISA_VARIABLE)
    if forced is None:
        return None
    named = next((isa for isa in isas() if isa.name == forced), None)
    if named is None:
        built = ", ".join(isa.name for isa in isas()) or "none"
        return f"{ISA_VARIABLE}={forced}: the compiled kernels have {built}"
    return None if named.missing is None else f"{ISA_VARIABLE}={forced}: {named.missing}"


@cache
def selected_isa() -> Isa | None:
    """The instruction set of this process: the one named by WARMATTN_CPU_ISA, else the fastest that can run.

    ``None`` without a library. One per process, since AMX and the others differ in bits.

    Raises:
        Unsupported: WARMATTN_CPU_ISA names one that cannot run here.
    """
    reason = refusal()
    if reason is not None:
        raise Unsupported(reason)
    forced = os.environ.get(ISA_VARIABLE)
    usable = (isa for isa in isas() if isa.missing is None and forced in (None, isa.name))
    return next(usable, None)


def tiling(isa: Isa) -> Tiling:
    """How the kernels of an instruction set cut a call."""
    return Tiling(*_TILES[isa.name], _SPLIT)


def run(isa: Isa, call: AttentionCall) -> None:
    """Write ``call.out``, and ``call.lse`` unless it is ``None``."""
    assert call.out is not None
    exponential = exponential_of(call)
    native = _describe(call, exponential)
    native.out = call.out.data_ptr()
    native.out_batch, native.out_head, native.out_row, _ = call.out.stride()
    if call.lse is None:
        _attend(isa, native)
        return
    maximum, total = (call.q.new_empty(call.q.shape[:3], dtype=torch.float32) for _ in range(2))
    native.maximum, native.sum = maximum.data_ptr(), total.data_ptr()
    _attend(isa, native)
    call.lse.copy_(log_sum_exp(maximum, total, exponential))


def run_partials(isa: Isa, call: AttentionCall) -> SplitPartials:
    """Partial results per split, for the splits that any row of the call sees a key of (at least one)."""
    native = _describe(call, exponential_of(call))
    first, end = _visible_splits(call)
    shape = (end - first, *call.q.shape)
    maximum, total, accumulator = (
        call.q.new_zeros(size, dtype=torch.float32) for size in (shape[:-1], shape[:-1], shape)
    )
    partials = Partials(maximum.fill_(-torch.inf), total, accumulator)
    native.first_split, native.splits = first, end - first
    native.maximum, native.sum, native.accumulator = (part.data_ptr() for part in partials)
    _attend(isa, native)
    return SplitPartials(first, partials, exponential_of(call))


def _attend(isa: Isa, native: _Call) -> None:
    library = load_library()
    assert library is not None
    if library.warmattn_attend(isa.index, ctypes.byref(native)) != 0:
        raise MemoryError("attention: no memory for the workspace of the CPU kernels")


def exponential_of(call: AttentionCall) -> Exponential:
    """What weighs the call's scores: with a softcap they are scaled already."""
    return Exponential.of(call.D, 1.0 if call.softcap is not None else call.scale)


def _describe(call: AttentionCall, exponential: Exponential) -> _Call:
    """The call as plain C, but for its outputs."""
    native = _Call(call.B, call.H, call.Hk, call.S, call.D)
    native.keep = []
    native.q, native.k, native.v = (_operand(tensor) for tensor in (call.q, call.k, call.v))
    native.qk_dtype, native.v_form = DTYPES[call.q.dtype], DTYPES[call.v.dtype]
    if call.norms is not None:
        assert call.centroids is not None
        native.norms = _operand(call.norms if call.norms.ndim == 4 else call.norms[..., None])
        centroids = centroids_by_byte(call.centroids)
        native.centroids = centroids.data_ptr()
        native.keep.append(centroids)
        native.value_scale = call.sf if call.D == 512 else 1 / call.D**0.5

    native.kind = _WINDOW if call.window is not None else _CAUSAL if call.causal else _FULL
    native.window = min(call.window or 0, 1 << 40)
    if call.mask is not None:
        native.kind, native.mask_dtype = _EXTERNAL, DTYPES[call.mask.dtype]
        mask = call.mask if call.mask.ndim == 4 else call.mask[None, None]
        native.mask = _operand(mask.expand(call.B, call.H, -1, -1))
        if call.tile_map is not None:
            native.tile_map, native.map_columns = call.tile_map.data_ptr(), call.tile_map.shape[1]

    offsets = [offset - call.key_offset for offset in _per_sequence(call.q_offset, call.B)]
    lengths = (offsets, _per_sequence(call.kv_len, call.B), _per_sequence(call.kv_start, call.B))
    arrays = [(ctypes.c_int64 * call.B)(*values) for values in lengths]
    native.q_offset, native.kv_len, native.kv_start = (ctypes.addressof(array) for array in arrays)
    native.keep += arrays

    native.scale, native.softcap = call.scale, call.softcap or 0.0
    native.merge_factor = exponential.binary_factor
    native.factor = exponential.binary_factor
    native.threads = torch.get_num_threads()
    return native


def centroids_by_byte(centroids: Tensor) -> Tensor:
    """f32 ``[256]``: the centroid of a whole byte, of which a shorter code is the low bits."""
    return centroids.repeat(256 // len(centroids))


def _operand(tensor: Tensor) -> _Operand:
    return _Operand(tensor.data_ptr(), *tensor.stride())


def _per_sequence(length: int | Tensor, batch: int) -> list[int]:
    return length.tolist() if isinstance(length, Tensor) else [length] * batch


def _visible_splits(call: AttentionCall) -> tuple[int, int]:
    """First and past-the-last split with a key that some row of the call sees by position."""
    spans = []
    lengths = (_per_sequence(n, call.B) for n in (call.q_offset, call.kv_start, call.kv_len))
    for q_offset, start, end in zip(*lengths, strict=True):
        position = q_offset - call.key_offset
        if call.causal:
            end = min(end, position + call.S)
        if call.window is not None:
            start = max(start, position - call.window + 1)
        if start < end:
            spans.append((start // _SPLIT, -(-end // _SPLIT)))
    return min((first for first, _ in spans), default=0), max((end for _, end in spans), default=1)
