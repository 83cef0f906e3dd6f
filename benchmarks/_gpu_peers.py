"""Every attention that the GPU benchmark times, warmattn's and its peers', in all sensible ways to call it.

The peers get what a careful user would give them, before the clock starts: operands in their own layout and
dtype, keys cut to those that some row sees, GQA heads as the peer takes them, expanded, or packed as rows.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

import warmattn
from _gpu import InputSet, Run, seen
from warmattn.workloads import Workload

__all__ = ["CONTENDERS", "Contender", "Variant", "contenders"]


class Variant(NamedTuple):
    """One way to call a contender. ``set_up`` makes its operands and returns the call to time."""

    name: str
    set_up: Callable[[], Run]


class Contender(NamedTuple):
    """Attention by one library on one form of V; the fastest right variant stands for it."""

    name: str
    values: str
    variants: list[Variant]


CONTENDERS = ("warmattn", "fa4", "flashinfer_fa3", "flashinfer_fa2", "flex_f16", "sdpa_f16", "sdpa_f32")
FLEX_D512 = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
"""Tuned by hand for one H200: FlexAttention's own choice does not fit into shared memory at D = 512."""
MATH_BYTES = 1 << 34
"""Score matrix above which torch's unfused attention is left out."""


def contenders(
    work: Workload,
    sets: list[InputSet],
    *,
    names: Sequence[str] = CONTENDERS,
    forms: Sequence[str] = ("f16", "f32", "codes8"),
    backend: str = "cuda",
    flashinfer: Path | None = None,
) -> Iterator[Contender]:
    """The contenders named, on ``sets``. A peer that cannot run says so when it is set up or first called."""
    if "warmattn" in names:
        for form in forms:
            yield Contender(
                "warmattn", form, [Variant("", lambda form=form: _warmattn(work, sets, form, backend))]
            )
    if "fa4" in names:
        splits = (1, 8) if work.rows <= 512 else (1,)
        variants = [Variant(f"num_splits {n}", lambda n=n: _fa4(work, sets, n)) for n in splits]
        yield Contender("fa4", "f16", variants)
    for generation in ("fa3", "fa2"):
        if flashinfer is not None and f"flashinfer_{generation}" in names:
            variant = Variant("", lambda g=generation: _flashinfer(work, sets, g, flashinfer))
            yield Contender(f"flashinfer_{generation}", "f16", [variant])
    if "flex_f16" in names:
        options = {"default": {}} | ({"tuned": FLEX_D512} if work.head_dim == 512 else {})
        variants = [Variant(name, lambda o=o: _flex(work, sets, o)) for name, o in options.items()]
        yield Contender("flex_f16", "f16", variants)
    if "sdpa_f16" in names:
        yield Contender("sdpa_f16", "f16", list(_sdpa(work, sets, torch.float16)))
    if "sdpa_f32" in names:
        yield Contender("sdpa_f32", "f32", list(_sdpa(work, sets, torch.float32)))


def _warmattn(work: Workload, sets: list[InputSet], form: str, backend: str) -> Run:
    visible, keys = work.visible, work.keys

    def run(index: int) -> Tensor:
        x = sets[index]
        return warmattn.attention(
            x.q, x.k, x.v[form], visible=visible, kv_len=keys, out=x.out, backend=backend
        )

    return run


def _dense(work: Workload, x: InputSet, dtype: torch.dtype, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, and contiguous keys and values ``[first, T)``, in the peer's dtype."""
    v = x.v["f16" if dtype == torch.float16 else "f32"]
    assert isinstance(v, Tensor)
    k, v = (operand[:, :, first : work.keys].to(dtype).contiguous() for operand in (x.k, v))
    return x.q.to(dtype), k, v


def _sdpa(work: Workload, sets: list[InputSet], dtype: torch.dtype) -> Iterator[Variant]:
    """torch's own attention: each of its kernels, on each layout of the heads, with each mask they accept.

    Keys are cut at a multiple of 64, or masks of odd width cost a copy in every call.
    """
    first = work.first_key // 64 * 64
    any_mask: list[SDPBackend | None] = [None, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    if 4 * work.heads * work.rows * (work.keys - first) <= MATH_BYTES:
        any_mask.append(SDPBackend.MATH)
    by_mask = {"mask": any_mask}
    if work.window is None and work.q_offset == 0:
        by_mask = {"is_causal": [*any_mask, SDPBackend.FLASH_ATTENTION]}
    elif work.window is None:
        by_mask["lower right"] = [None, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    for layout in ("gqa", "expanded", "packed"):
        for mask, kernels in by_mask.items() if layout != "packed" else [("mask", any_mask)]:
            for kernel in kernels:
                yield _sdpa_variant(work, sets, dtype, first, layout, mask, kernel)


def _sdpa_variant(
    work: Workload,
    sets: list[InputSet],
    dtype: torch.dtype,
    first: int,
    layout: str,
    mask: str,
    kernel: SDPBackend | None,
) -> Variant:
    group, keys = work.heads // work.kv_heads, work.keys - first

    def set_up() -> Run:
        operands = [_dense(work, x, dtype, first) for x in sets]
        arguments: dict[str, Any] = {"enable_gqa": layout == "gqa"}
        if layout == "expanded":
            operands = [
                (q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))
                for q, k, v in operands
            ]
        if layout == "packed":
            operands = [(q.view(1, work.kv_heads, -1, work.head_dim), k, v) for q, k, v in operands]
        if mask == "is_causal":
            arguments["is_causal"] = True
        elif mask == "lower right":
            arguments["attn_mask"] = causal_lower_right(work.rows, keys)
        else:
            hidden = ~seen(work, torch.arange(work.rows, device=sets[0].q.device), first)
            additive = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -math.inf
            )
            arguments["attn_mask"] = additive.repeat(group, 1) if layout == "packed" else additive

        def run(index: int) -> Tensor:
            q, k, v = operands[index]
            return sdpa(q, k, v, **arguments).view(sets[index].q.shape)

        def run_with_kernel(index: int) -> Tensor:
            assert kernel is not None
            with sdpa_kernel(kernel):
                return run(index)

        return run if kernel is None else run_with_kernel

    chosen = "torch's choice" if kernel is None else kernel.name.removesuffix("_ATTENTION").lower()
    return Variant(f"{layout}, {mask}, {chosen}", set_up)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64  # one program per shape and choice of options
    return torch.compile(flex_attention, dynamic=False)


def _flex(work: Workload, sets: list[InputSet], options: dict[str, int]) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask

    offset, window = work.q_offset, work.window

    def visible(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        causal = key <= row + offset
        return causal if window is None else causal & (row + offset - key < window)

    device = sets[0].q.device
    blocks = create_block_mask(visible, None, None, work.rows, work.keys, device=str(device))
    operands = [_dense(work, x, torch.float16) for x in sets]
    arguments = {"block_mask": blocks, "enable_gqa": True, "kernel_options": options or None}
    return lambda index: _compiled_flex()(*operands[index], **arguments)


def _fa4(work: Workload, sets: list[InputSet], splits: int) -> Run:
    attend = importlib.import_module("flash_attn.cute").flash_attn_func
    operands = [[t.transpose(1, 2).contiguous() for t in _dense(work, x, torch.float16)] for x in sets]
    arguments = {
        "softmax_scale": 1 / math.sqrt(work.head_dim),
        "causal": work.window is None,
        "window_size": (None, None) if work.window is None else (work.window - 1, 0),
        "num_splits": splits,
    }

    def run(index: int) -> Tensor:
        out = attend(*operands[index], **arguments)
        return (out[0] if isinstance(out, tuple | list) else out).transpose(1, 2)

    return run


def _flashinfer(work: Workload, sets: list[InputSet], generation: str, folder: Path) -> Run:
    """A C function ``fi_fa2`` or ``fi_fa3`` around FlashInfer's single-request prefill, rows before heads."""
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    attend = getattr(ctypes.CDLL(str(folder / f"lib{generation}.so")), f"fi_{generation}")
    operands = []
    for x in sets:
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in _dense(work, x, torch.float16))
        operands.append((q, k, v, torch.full_like(q, math.nan)))
    scratch = torch.empty(1 << 28, dtype=torch.uint8, device=sets[0].q.device)
    sizes = (work.heads, work.kv_heads, work.rows, work.keys, work.window or 0)
    scale = ctypes.c_float(1 / math.sqrt(work.head_dim))

    def run(index: int) -> Tensor:
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*operands[index], scratch)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = attend(work.head_dim, *pointers, *sizes, scale, stream)
        if status != 0:
            raise RuntimeError(f"fi_{generation} returned {status}")
        return operands[index][3].transpose(0, 1)[None]

    return run
