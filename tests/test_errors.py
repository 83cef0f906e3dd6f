"""Every error of a call: its type and message, and that a refused call changed nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import warmattn
from warmattn.backend.cpu import CpuBackend
from warmattn.call import AttentionCall
from warmattn.codec.codebook import Codebook
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported
from warmattn.testing import assert_same_bits
from warmattn.visibility import Causal, External, Full, Window

B, H, HK, S, C, D = 2, 4, 2, 3, 8, 256
SENTINEL = -7.25
LAST = 2**31 - 1
HUGE = 2**70
META = torch.device("meta")

NOT_POSITIVE = (0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e-60, 1e60, np.float64(1e-60), 10**400)
"""Numbers that are not finite and > 0 once rounded to float32."""
NOT_NUMBERS = (True, "0.5", [0.5])
NOT_LENGTHS = (8.0, True, "8", np.int64(8), [8, 8], math.nan)


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def byte(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


NOT_INT32_B = (
    int32(8, 8).long(),
    int32(8, 8).float(),
    int32(8),
    int32(8, 8, 8),
    int32(8, 8)[:, None],
    int32(8, 8)[0],
    int32(),
)


def arguments(**changes: Any) -> dict[str, Any]:
    """A good call, with ``changes``."""
    good = {
        "q": half(B, H, S, D),
        "k": half(B, HK, C, D),
        "v": torch.zeros(B, HK, C, D),
        "visible": Full(),
        "out": torch.full((B, H, S, D), SENTINEL),
    }
    return good | changes


def of_head_dim(head_dim: int, **changes: Any) -> dict[str, Any]:
    """What makes it a call of another head dim."""
    return {
        "q": half(B, H, S, head_dim),
        "k": half(B, HK, C, head_dim),
        "v": torch.zeros(B, HK, C, head_dim),
        "out": torch.full((B, H, S, head_dim), SENTINEL),
    } | changes


def coded(**changes: Any) -> CodedValues:
    """Well-formed coded values, with ``changes``."""
    codes = changes.get("codes", byte(B, HK, C, D))
    norms = torch.ones(B, HK, C, max(1, codes.shape[-1] // 256))
    return dataclasses.replace(CodedValues(codes, norms, Codebook.lloyd_max(8)), **changes)


def at_512(**changes: Any) -> dict[str, Any]:
    return of_head_dim(512, v=coded(codes=byte(B, HK, C, 512), **changes))


def mapped(tiles: Any) -> dict[str, Any]:
    """A call whose map has the grid [2, 3]."""
    return {
        "q": half(B, H, 40, D),
        "k": half(B, HK, 33, D),
        "v": half(B, HK, 33, D),
        "out": None,
        "visible": External(half(40, 33), tiles),
    }


def in_steps_of_2(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def bad(name: str, operand: str, *fragments: str, error: Any = InvalidInput, **changes: Any) -> Any:
    """A row of the table: ``changes`` make a call refused with ``error``, naming operand and fragments."""
    return pytest.param(error, operand, fragments, changes, id=name)


def head_dims_and_types() -> Iterator[Any]:
    for n in (0, 1, 96, 255, 1024):
        expected = (f"head dim {n}", "64, 128, 256, 512")
        yield bad(f"head dim {n}", "q", *expected, error=Unsupported, **of_head_dim(n))
    for name, wrong in itertools.product("qkv", (None, [1.0], np.zeros((B, HK, C, D), np.float16))):
        kind = type(wrong).__name__
        yield bad(f"{name} is a {kind}", name, "a tensor", kind, **{name: wrong})
    yield bad("q of rank 3", "q", "rank 4", f"[{H}, {S}, {D}]", q=half(H, S, D))
    yield bad("k of rank 5", "k", "rank 4", f"[1, {B}, {HK}, {C}, {D}]", k=half(1, B, HK, C, D))
    yield bad("v of rank 3", "v", "rank 4", f"[{HK}, {C}, {D}]", v=half(HK, C, D))
    yield bad("codes of rank 3", "v", "rank 4", f"[{HK}, {C}, {D}]", v=coded(codes=byte(HK, C, D)))
    kinds = "Causal, Window, External or Full"
    yield bad("no visibility", "visible", kinds, "None", visible=None)
    yield bad("visibility is a class", "visible", kinds, "Causal'", visible=Causal)
    yield bad("visibility is a mask", "visible", kinds, visible=half(S, C))


def axes() -> Iterator[Any]:
    yield bad("B = 0", "q", "axis B", "B = 0", q=half(0, H, S, D))
    yield bad("H = 0", "q", "axis H", "H = 0", q=half(B, 0, S, D))
    yield bad("Hk = 0", "k", "axis Hk", "Hk = 0", k=half(B, 0, C, D))
    yield bad("S = 0", "q", "axis S", "S = 0", q=half(B, H, 0, D))
    yield bad("C = 0", "k", "axis C", "C = 0", k=half(B, HK, 0, D))
    for n in (0, -1, -HUGE):
        yield bad(f"kv_len {n}", "kv_len", "axis T", f"T = {n}", kv_len=n)
    yield bad("kv_len 0 in a batch", "kv_len", "axis T", "T = 0", kv_len=int32(8, 0))
    yield bad("H = 4, Hk = 3", "q", "multiple of Hk (3)", "H = 4", k=half(B, 3, C, D))
    yield bad("H = 4, Hk = 8", "q", "multiple of Hk (8)", "H = 4", k=half(B, 8, C, D))
    for n in (C + 1, LAST + 1, HUGE):
        yield bad(f"kv_len {n}", "kv_len", f"T ({n}) > C ({C})", kv_len=n)
    yield bad("kv_len > C in a batch", "kv_len", f"T (9) > C ({C})", kv_len=int32(8, 9))


def numbers() -> Iterator[Any]:
    for n in (*NOT_POSITIVE, *NOT_NUMBERS):
        name = repr(n)[:20]
        yield bad(f"scale {name}", "scale", "finite and > 0", "float32", "got ", scale=n)
        yield bad(f"softcap {name}", "softcap", "finite and > 0", "float32", "got ", softcap=n)
        yield bad(f"sf {name}", "v.sf", "finite and > 0", "float32", "got ", **at_512(sf=n))
    yield bad("sf None", "v.sf", "finite and > 0", "got None", **at_512(sf=None))
    yield bad("scale is a tensor", "scale", "finite and > 0", "got 0.5", scale=torch.tensor(0.5))


def scores_and_out() -> Iterator[Any]:
    for dtype in (torch.float32, torch.float64, torch.uint8):
        yield bad(f"q {dtype}", "q", "float16 or bfloat16", str(dtype), q=half(B, H, S, D).to(dtype))
    yield bad("k of another dtype", "k", "float16", "bfloat16", k=half(B, HK, C, D).bfloat16())
    shape = f"[{B}, Hk, C, {D}]"
    yield bad("k of another batch", "k", shape, f"[1, {HK}, {C}, {D}]", k=half(1, HK, C, D))
    yield bad("k of another D", "k", shape, f"[{B}, {HK}, {C}, 128]", k=half(B, HK, C, 128))
    shape = f"[{B}, {H}, {S}, {D}]"
    yield bad("out of f16", "out", "float32", "float16", out=half(B, H, S, D))
    yield bad("out too wide", "out", shape, f"[{B}, {H}, {S}, 257]", out=torch.zeros(B, H, S, 257))
    yield bad("out of rank 3", "out", shape, f"[{H}, {S}, {D}]", out=torch.zeros(H, S, D))
    yield bad("out is a list", "out", "a tensor", "list", out=[0.0])


def value_forms() -> Iterator[Any]:
    forms = "float32, float16, bfloat16 or CodedValues"
    for dtype in (torch.float64, torch.int8, torch.uint8):
        yield bad(f"v {dtype}", "v", forms, str(dtype), v=half(B, HK, C, D).to(dtype))
    for shape in ((1, HK, C, D), (B, H, C, D), (B, HK, C - 1, D), (B, HK, C, 512)):
        got = (f"[{B}, {HK}, >= {C}, {D}]", str(list(shape)))
        yield bad(f"v {shape}", "v", *got, v=half(*shape))
        yield bad(f"codes {shape}", "v.codes", *got, v=coded(codes=byte(*shape)))
    yield bad("v shorter than one T", "v", ">= 6", f"5, {D}]", v=half(B, HK, 5, D), kv_len=int32(4, 6))
    codes = torch.zeros(B, HK, C, D, dtype=torch.int8)
    yield bad("codes of int8", "v.codes", "uint8", "int8", v=coded(codes=codes))
    yield bad(
        "norms of f64", "v.norms", "float32", "float64", v=coded(norms=torch.ones(B, HK, C, 1).double())
    )
    for shape in ((B, HK, C - 1, 1), (B, HK, C, 2), (1, HK, C, 1), (B, H, C), (HK, C)):
        yield bad(f"norms {shape}", "v.norms", f">= {C}", str(list(shape)), v=coded(norms=torch.ones(shape)))
    for shape in ((B, HK, C, 1), (B, HK, C), (B, HK, C - 1, 2)):
        norms = torch.ones(shape)
        yield bad(f"norms {shape} at 512", "v.norms", f">= {C}, 2]", str(list(shape)), **at_512(norms=norms))


def masks_and_maps() -> Iterator[Any]:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        mask = half(S, C).to(dtype)
        yield bad(f"mask {dtype}", "mask", "float16 or bool", str(dtype), visible=External(mask))
    for wrong in (None, [[0.0] * C] * S):
        yield bad(f"mask is a {type(wrong).__name__}", "mask", "float16 or bool", visible=External(wrong))  # type: ignore[arg-type]
    for shape in ((C,), (1, S, C), (S, C - 1), (S, C + 1), (S + 1, C), (1, S), (3, 1, S, C), (1, HK, S, C)):
        got = (f"[{S}, {C}]", f"[1 or {B}, 1 or {H}, {S}, {C}]", str(list(shape)))
        yield bad(f"mask {shape}", "mask", *got, visible=External(half(*shape)))
    wide = External(half(S, C))
    yield bad("mask as wide as C", "mask", f"[{S}, 5]", f"[{S}, {C}]", visible=wide, kv_len=5)
    yield bad("mask of no T", "mask", f"[{S}, 6]", f"[{S}, {C}]", visible=wide, kv_len=int32(4, 6))
    yield bad("map of int32", "tile_map", "uint8", "int32", **mapped(int32(1)))
    yield bad("map is a list", "tile_map", "uint8", "list", **mapped([[1]]))
    for shape in ((2, 2), (3, 3), (3, 2), (6,), (1, 2, 3), (0, 3)):
        got = ("[2, 3] (32 x 16", str(list(shape)))
        yield bad(f"map {shape}", "tile_map", *got, **mapped(byte(*shape)))
    yield bad("map not contiguous", "tile_map", "[2, 3] (32 x 16", "not contiguous", **mapped(byte(3, 2).T))


def windows_and_offsets() -> Iterator[Any]:
    for n in (0, -1, -HUGE, True, 2.0, math.nan, None, "3", np.int64(3)):
        yield bad(f"window {n!r}", "window", "an int >= 1", str(n), visible=Window(n))  # type: ignore[arg-type]
    for n in (-1, -HUGE):
        yield bad(f"key_offset {n}", "key_offset", ">= 0", str(n), key_offset=n)
    offsets = (
        (-1, ">= 0, got -1", {}),
        (-HUGE, f">= 0, got {-HUGE}", {}),
        (int32(0, -1), ">= 0, got -1", {}),
        (6, "q_offset (6) + S (3) > T (8)", {}),
        (None, "q_offset (0) + S (3) > T (2)", {"kv_len": 2}),
        (LAST + 1, f"q_offset ({LAST + 1}) + S (3) > T (8)", {}),
        (HUGE, f"q_offset ({HUGE}) + S (3) > T (8)", {}),
        (16, "q_offset (16) + S (3) > key_offset (10) + T (8)", {"key_offset": 10}),
        (int32(5, 6), "q_offset (6) + S (3) > T (8) in sequence 1", {}),
        (3, "q_offset (3) + S (3) > T (5) in sequence 1", {"kv_len": int32(8, 5)}),
        (int32(4, 5), "q_offset (4) + S (3) > T (5) in sequence 0", {"kv_len": int32(5, 8)}),
    )
    for offset, message, changes in offsets:
        yield bad(f"causal {message}", "q_offset", message, visible=Causal(offset), **changes)
        yield bad(f"window {message}", "q_offset", message, visible=Window(2, offset), **changes)
    for n in (-1, C + 1, -HUGE, HUGE):
        yield bad(f"kv_start {n}", "kv_start", f"[0, T = {C}]", str(n), kv_start=n)
    yield bad("kv_start in a batch", "kv_start", f"[0, T = {C}]", "9", kv_start=int32(8, 9))
    yield bad("kv_start past one T", "kv_start", "[0, T = 4]", "5", kv_start=5, kv_len=int32(8, 4))


def lengths() -> Iterator[Any]:
    expected = f"an int or an int32 tensor [{B}]"
    for n in NOT_LENGTHS:
        got = (expected, f"got {n!r}")
        yield bad(f"kv_len {n!r}", "kv_len", *got, kv_len=n)
        yield bad(f"kv_start {n!r}", "kv_start", *got, kv_start=n)
        yield bad(f"q_offset {n!r}", "q_offset", *got, visible=Causal(n))  # type: ignore[arg-type]
        yield bad(f"key_offset {n!r}", "key_offset", "an int", f"got {n!r}", key_offset=n)
    for n in NOT_INT32_B:
        got = (expected, f"got {described(n)}")
        yield bad(f"kv_len {described(n)}", "kv_len", *got, kv_len=n)
        yield bad(f"kv_start {described(n)}", "kv_start", *got, kv_start=n)
        yield bad(f"q_offset {described(n)}", "q_offset", *got, visible=Window(2, n - n))
    yield bad("key_offset is a tensor", "key_offset", "an int", "tensor(", key_offset=int32(0, 0))
    yield bad("key_offset None", "key_offset", "an int", "None", key_offset=None)
    limit = f"<= {LAST}"
    for n in (LAST + 1, 2**32 + 1, HUGE):
        yield bad(f"key_offset {n}", "key_offset", limit, str(n), key_offset=n)
    far = half(1, 1, 1, D).expand(B, HK, 2**31 + 9, D)  # a cache past the last position, in one row of memory
    unread = int32(8, 8).to(META)
    beyond = (limit, str(LAST + 1))
    yield bad("kv_len past 2^31", "kv_len", *beyond, k=far, v=far, kv_len=LAST + 1)
    yield bad("kv_start past 2^31", "kv_start", *beyond, k=far, v=far, kv_len=unread, kv_start=LAST + 1)
    yield bad("q_offset past 2^31", "q_offset", *beyond, visible=Causal(LAST + 1), key_offset=LAST)


def devices_and_strides() -> Iterator[Any]:
    elsewhere: dict[str, dict[str, Any]] = {
        "k": {"k": half(B, HK, C, D).to(META)},
        "v": {"v": half(B, HK, C, D).to(META)},
        "v.codes": {"v": coded(codes=byte(B, HK, C, D).to(META))},
        "v.norms": {"v": coded(norms=torch.ones(B, HK, C, 1, device=META))},
        "mask": {"visible": External(half(S, C).to(META))},
        "tile_map": {"visible": External(half(S, C), byte(1, 1).to(META))},
        "out": {"out": torch.zeros(B, H, S, D, device=META)},
        "q_offset": {"visible": Causal(int32(0, 0).to(META))},
        "kv_len": {"kv_len": int32(8, 8).to(META)},
        "kv_start": {"kv_start": int32(0, 0).to(META)},
    }
    for operand, changes in elsewhere.items():
        yield bad(f"{operand} elsewhere", operand, "on q's device cpu", "got meta", **changes)
    yield bad("q elsewhere", "k", "on q's device meta", "got cpu", q=half(B, H, S, D).to(META))
    stepped: dict[str, dict[str, Any]] = {
        "q": {"q": in_steps_of_2(half(B, H, S, D))},
        "k": {"k": in_steps_of_2(half(B, HK, C, D))},
        "v": {"v": in_steps_of_2(torch.zeros(B, HK, C, D))},
        "v.codes": {"v": coded(codes=in_steps_of_2(byte(B, HK, C, D)))},
        "out": {"out": in_steps_of_2(torch.full((B, H, S, D), SENTINEL))},
    }
    for operand, changes in stepped.items():
        yield bad(f"{operand} in steps of 2", operand, "last axis (D) contiguous", ", 2)", **changes)


def on_one_buffer(dtype: torch.dtype, *shape: int, shift: int, fill: int = 0) -> tuple[Tensor, Tensor]:
    """``out`` and an operand that begins ``shift`` bytes after it."""
    buffer = byte(2**16)
    out = buffer[: B * H * S * D * 4].view(torch.float32).view(B, H, S, D).fill_(SENTINEL)
    size = math.prod(shape) * dtype.itemsize
    return out, buffer[shift : shift + size].view(dtype).view(shape).fill_(fill)


def overlaps() -> Iterator[Any]:
    operands = {
        "q": (torch.float16, (B, H, S, D), 0, lambda q: {"q": q}),
        "k": (torch.float16, (B, HK, C, D), 0, lambda k: {"k": k}),
        "v": (torch.bfloat16, (B, HK, C, D), 0, lambda v: {"v": v}),
        "v.codes": (torch.uint8, (B, HK, C, D), 0, lambda codes: {"v": coded(codes=codes)}),
        "v.norms": (torch.float32, (B, HK, C, 1), 0, lambda norms: {"v": coded(norms=norms)}),
        "mask": (torch.float16, (S, C), 0, lambda mask: {"visible": External(mask)}),
        "tile_map": (torch.uint8, (1, 1), 0, lambda tiles: {"visible": External(half(S, C), tiles)}),
        "q_offset": (torch.int32, (B,), 4, lambda offsets: {"visible": Causal(offsets)}),
        "kv_len": (torch.int32, (B,), 4, lambda n: {"kv_len": n}),
        "kv_start": (torch.int32, (B,), 4, lambda n: {"kv_start": n}),
    }
    for shift, where in ((0, "first"), (B * H * S * D * 4 - 16, "last")):
        for operand, (dtype, shape, fill, changes) in operands.items():
            out, tensor = on_one_buffer(dtype, *shape, shift=shift, fill=fill)
            got = ("memory of its own", f"overlaps {operand}")
            yield bad(f"the {where} bytes of out are {operand}", "out", *got, out=out, **changes(tensor))
    out = torch.zeros(B, H, S, D)
    yield bad("out is v", "out", "overlaps v", k=half(B, H, S, D), v=out, out=out)
    for shape in ((B, 1, S, D), (B, H, 1, D)):
        out = torch.zeros(shape).expand(B, H, S, D)
        yield bad(f"out steps by 0 over {shape}", "out", "distinct memory", str(out.stride()), out=out)
    out = torch.zeros(2**13).as_strided((B, H, S, D), (H * S * D // 2, S * D, D, 1))
    yield bad("out overlaps itself", "out", "distinct memory", str(out.stride()), out=out)


def backends() -> Iterator[Any]:
    for name in (None, 3):
        yield bad(f"backend {name}", "backend", "a str", f"got {name}", backend=name)
    for name in ("nope", "CPU", ""):
        got = ("does not exist", "'auto'", "cpu")
        yield bad(f"backend {name!r}", f"backend {name!r}", *got, error=Unsupported, backend=name)


CASES = [
    *head_dims_and_types(),
    *axes(),
    *numbers(),
    *scores_and_out(),
    *value_forms(),
    *masks_and_maps(),
    *windows_and_offsets(),
    *lengths(),
    *devices_and_strides(),
    *overlaps(),
    *backends(),
]


def memory(call: dict[str, Any]) -> list[Tensor]:
    """A copy of every byte behind the tensors of a call."""
    parts: list[Any] = []
    for value in call.values():
        nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        parts += [getattr(value, f.name) for f in dataclasses.fields(value)] if nested else [value]
    tensors = [part for part in parts if isinstance(part, Tensor) and part.device.type == "cpu"]
    return [byte(0).set_(tensor.untyped_storage()).clone() for tensor in tensors]  # type: ignore[call-overload]


@pytest.mark.parametrize(("error", "operand", "fragments", "changes"), CASES)
def test_a_bad_call_is_refused_and_changes_nothing(
    error: type[Exception], operand: str, fragments: tuple[str, ...], changes: dict[str, Any]
) -> None:
    call = arguments(**changes)
    before = memory(call)
    with pytest.raises(error) as raised:
        warmattn.attention(**call)
    assert type(raised.value) is error
    message = str(raised.value)
    assert message.startswith("attention: ")
    assert [text for text in (operand, *fragments) if text not in message] == []
    if isinstance(raised.value, InvalidInput):
        assert raised.value.operand == operand
    assert all(map(torch.equal, memory(call), before))

    with pytest.raises(error) as explained:
        warmattn.explain(**call)
    assert str(explained.value) == message


@pytest.mark.parametrize("operand", ["q", "k", "v", "v.norms", "mask", "out"])
def test_an_operand_that_requires_grad_is_refused_while_grad_is_on(operand: str) -> None:
    call = arguments(visible=External(half(S, C)))
    expected = warmattn.attention(**call).clone()
    if operand == "v.norms":
        call["v"] = coded(norms=torch.zeros(B, HK, C, 1, requires_grad=True))
    elif operand == "mask":
        call["visible"] = External(half(S, C).requires_grad_())
    else:
        call[operand].requires_grad_()
    with torch.no_grad():
        call["out"].fill_(SENTINEL)
    with pytest.raises(Unsupported, match=rf"^attention: {operand} requires grad: forward only.*no_grad"):
        warmattn.attention(**call)
    assert bool((call["out"] == SENTINEL).all())
    for grad_off in (torch.no_grad(), torch.inference_mode()):
        with grad_off:
            assert_same_bits(warmattn.attention(**call), expected)
            assert not warmattn.attention(**dict(call, out=None)).requires_grad


def test_centroids_of_another_kind_are_refused() -> None:
    call = AttentionCall.of(**arguments(v=coded()))
    for centroids in (None, torch.zeros(16), torch.zeros(2, 128), torch.zeros(256).double()):
        with pytest.raises(InvalidInput, match=r"v\.codebook: expected float32 \[32\], \[64\] or \[256\]"):
            call._replace(centroids=centroids).check()


def test_sf_plays_no_part_up_to_d_256() -> None:
    expected = warmattn.attention(**arguments(v=coded()))
    for sf in (0.0, -1.0, math.nan, math.inf, 10**400):
        assert_same_bits(warmattn.attention(**arguments(v=coded(sf=sf))), expected)


@pytest.mark.parametrize("method", ["supports", "unavailable"])
def test_a_backend_that_cannot_says_why_and_none_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(CpuBackend, method, lambda *_: "it is being repaired")
    call = arguments()
    for run in (warmattn.attention, warmattn.explain):
        with pytest.raises(Unsupported, match=r"^attention: backend 'cpu': it is being repaired$"):
            run(**call, backend="cpu")
        with pytest.raises(
            Unsupported, match=r"^attention: no backend fits: cuda: .+; cpu: it is being repaired$"
        ):
            run(**call)
    assert bool((call["out"] == SENTINEL).all())


def test_outputs_and_operands_may_interleave_in_one_buffer(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(B, H, S, 2, D, generator=generator)
    q = torch.randn(B, H, S, D, generator=generator).half()
    v, out = buffer.unbind(3)
    k = torch.randn(B, S, H, D, generator=generator).half().transpose(1, 2)
    mask = torch.randint(0, 2, (C, S), generator=generator).bool().T[:, :S]
    norms = torch.rand(S, H, B, generator=generator).permute(2, 1, 0)
    codes = torch.randint(0, 256, (B, H, S, D), generator=generator, dtype=torch.uint8)
    for values in (v, CodedValues(codes, norms, Codebook.lloyd_max(8))):
        expected = warmattn.attention(q, k, values, visible=External(mask))
        before = v.clone()
        assert warmattn.attention(q, k, values, visible=External(mask), out=out) is out
        assert_same_bits(out, expected)
        assert_same_bits(v, before)


@pytest.mark.parametrize(
    ("operand", "expected", "outs", "lses"),
    [
        ("outs", "float32", half(2, B, H, S, D), torch.zeros(2, B, H, S)),
        ("outs", "a float32 tensor, got list", [0.0], torch.zeros(2, B, H, S)),
        (
            "outs",
            "[N, B, H, S, D], N >= 1, got [2, 4, 3, 256]",
            torch.zeros(B, H, S, D),
            torch.zeros(B, H, S),
        ),
        ("outs", "N >= 1, got [0, 2", torch.zeros(0, B, H, S, D), torch.zeros(0, B, H, S)),
        ("lses", "float32", torch.zeros(2, B, H, S, D), torch.zeros(2, B, H, S).double()),
        ("lses", "a float32 tensor, got NoneType", torch.zeros(2, B, H, S, D), None),
        ("lses", "[2, 2, 4, 3], got [1, 2, 4, 3]", torch.zeros(2, B, H, S, D), torch.zeros(1, B, H, S)),
        ("lses", "[2, 2, 4, 3], got [2, 2, 4, 3, 1]", torch.zeros(2, B, H, S, D), torch.zeros(2, B, H, S, 1)),
        ("lses", "on cpu, got meta", torch.zeros(2, B, H, S, D), torch.zeros(2, B, H, S).to(META)),
    ],
)
def test_merge_partials_refuses(operand: str, expected: str, outs: Any, lses: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        warmattn.merge_partials(outs, lses)
    assert str(raised.value).startswith(f"merge_partials: {operand}: ")
    assert expected in str(raised.value)
