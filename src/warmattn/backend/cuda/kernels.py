"""Which kernel a call takes on a device, its compile-time constants, and the compiling, once each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from warmattn.backend import Tiling
from warmattn.backend.cuda import hopper, merge, portable
from warmattn.backend.cuda.tuning import (
    HOPPER,
    HOPPER_SPLIT,
    PORTABLE,
    PORTABLE_SPLIT,
    hopper_variant,
    portable_family,
)
from warmattn.pipelines import PipelineKey

__all__ = ["Sizes", "attend_constants", "attend_kernel", "build", "merge_kernel", "sizes"]

_DESCRIPTORS = 256
"""Bytes of global memory in which one program of the Hopper kernel keeps its descriptors."""

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


def attend_constants(
    cut: Sizes,
    D: int,
    *,
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
    if cut.kernel == "portable":
        rows, tile, columns, _, _ = PORTABLE[cut.family, D]
        return (*kind, aligned_v, aligned_out, walk, PORTABLE_SPLIT[D], rows, tile, columns)
    bulk_v = form == "f16" and not mask and aligned_qk and aligned_v
    config = HOPPER[D, hopper_variant(form, bulk=bulk_v)]
    return (*kind, bulk_v, aligned_v, aligned_out, walk, HOPPER_SPLIT[D], *config)


def attend_kernel(
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


def merge_kernel(index: int, name: str, constants: tuple[Any, ...]) -> Any:
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
        constants = attend_constants(
            cut,
            key.head_dim,
            causal=key.on(301),
            window=key.on(310),
            mask=key.on(300),
            tile_map=key.on(303),
            softcap=key.on(320),
            tensor_lengths=key.on(325),
            form=form,
            aligned_qk=True,
            aligned_v=True,
            aligned_out=True,
            walk=walk,
        )
        attend_kernel(index, cut, scores, values, mask, constants)
    for lse in (False, True):
        merge_kernel(index, "merge_splits", (key.head_dim, min(key.head_dim, merge.COLUMNS), lse))
    merge_kernel(index, "log_sum_exp", (merge.ROWS,))


@dataclass(frozen=True)
class _Pointer:
    """A pointer's type, and whether it is a multiple of 16, as Triton asks a tensor for them."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1
