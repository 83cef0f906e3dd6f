"""Small cases from public bug reports of attention kernels and caches, and the kind of fault behind each.

Where every score is 0 the answer is the mean of the values that a row sees, so it is known exactly: those
cases ask for equality, and the coded values are built by hand so that they decode to the very numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import warmattn
from warmattn.codec.codebook import Codebook
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported
from warmattn.testing import VALUE_FORMS, assert_same_bits, assert_same_values, make_inputs
from warmattn.visibility import Causal, External, Full, Visibility, Window

HEAD_DIMS = (256, 512)
CODEC_ERROR = {5: math.sqrt(2.504668e-3), 6: math.sqrt(6.442397e-4), 8: math.sqrt(4.118508e-5)}
"""Relative root mean square error of the codec on normal data."""
SLACK = 1.25
"""The error of a few rows scatters about it: rare values in the outer cells weigh much."""

each_head_dim = pytest.mark.parametrize("D", HEAD_DIMS)


def each_form(test: Callable) -> Callable:
    return each_head_dim(pytest.mark.parametrize("form", VALUE_FORMS)(test))


def exact_values(rows: Tensor, form: str) -> Tensor | CodedValues:
    """V in one of `VALUE_FORMS` that stands for exactly ``rows``: f32 ``[B, Hk, C, D]``, integers.

    The codes lie on a grid of integers. A block that does not fit it must be constant: its norm carries the
    value. Norms and sf make every weight exact: 16 / sqrt(256), and 2 / 2 at D = 512.
    """
    if not form.startswith("codes"):
        return rows.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[form])
    bits = int(form.removeprefix("codes"))
    middle = 2 ** (bits - 1)
    grid = Codebook([float(code - middle) for code in range(2**bits)])
    blocks = rows.unflatten(-1, (-1, 256))
    on_grid = (blocks.abs() < middle).all(dim=-1)
    weights = torch.where(on_grid, 1.0, blocks[..., 0])
    unused_bits = 256 - 2**bits
    codes = (blocks / weights[..., None] + middle).to(torch.uint8) | unused_bits
    return CodedValues(codes.flatten(-2), weights * (2 if rows.shape[-1] == 512 else 16), grid, sf=2.0)


def constant_rows(values: Any, D: int, device: torch.device) -> Tensor:
    """``[B, Hk, C]`` numbers -> f32 ``[B, Hk, C, D]``: every component of a row is its number."""
    return torch.tensor(values, dtype=torch.float32, device=device)[..., None].repeat(1, 1, 1, D)


def attend_evenly(v: Tensor | CodedValues, *, S: int, H: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention with Q = 0 and K = 0."""
    values = v.codes if isinstance(v, CodedValues) else v
    B, Hk, C, D = values.shape
    q, k = (
        torch.zeros(B, heads, rows, D, dtype=torch.float16, device=values.device)
        for heads, rows in ((H, S), (Hk, C))
    )
    return warmattn.attention(q, k, v, return_lse=True, **options)


def on(visible: Visibility, device: torch.device) -> Visibility:
    """The same visibility; the cases of this file lie on the CPU."""
    if not isinstance(visible, External):
        return visible
    tiles = visible.tile_map
    return External(visible.mask.to(device), None if tiles is None else tiles.to(device))


def with_tail(v: Tensor | CodedValues, T: int, tail: float) -> Tensor | CodedValues:
    """A copy of V whose rows from T on hold ``tail`` (codes: 255, and norms ``tail``)."""
    if isinstance(v, Tensor):
        v = v.clone()
        v[:, :, T:] = tail
        return v
    codes, norms = v.codes.clone(), v.norms.clone()
    codes[:, :, T:], norms[:, :, T:] = 255, tail
    return CodedValues(codes, norms, v.codebook, v.sf)


class Case(NamedTuple):
    """Values ``[Hk][T]``, what shows them, and the answer ``[H][S]``."""

    values: list[list[float]]
    visible: Visibility
    answer: list[list[float]]


def grouped(heads: int, kv_heads: int) -> Case:
    values = [[float(h)] * 3 for h in range(kv_heads)]
    return Case(values, Full(), [[float(h // (heads // kv_heads))] for h in range(heads)])


HIDDEN = -math.inf
B01_MASK = torch.tensor([[0.0] * 4, [HIDDEN] * 4, [HIDDEN] * 3 + [0.0]], dtype=torch.float16)
B01_VALUES = [[1.0, 2.0, 3.0, 4.0]]
B08_VALUES = [[1.0, 2.0, 3.0, 4.0, 5.0]]
MEANS = {
    "B01 fully masked row": Case(B01_VALUES, External(B01_MASK), [[2.5, 0.0, 4.0]]),
    "B01 with a map": Case(B01_VALUES, External(B01_MASK, warmattn.tile_map(B01_MASK)), [[2.5, 0.0, 4.0]]),
    "B01 with a bool mask": Case(B01_VALUES, External(B01_MASK == 0), [[2.5, 0.0, 4.0]]),
    "B08 causal offset 3": Case(B08_VALUES, Causal(3), [[2.5, 3.0]]),
    "B08 causal offset 0": Case(B08_VALUES, Causal(0), [[1.0, 1.5]]),
    "B08 causal offset 1": Case(B08_VALUES, Causal(1), [[1.5, 2.0]]),
    "B11 window of 3": Case([[float(j) for j in range(12)]], Window(3, 8), [[7.0, 8.0, 9.0, 10.0]]),
    "B11 window of 4": Case([[float(j) for j in range(12)]], Window(4, 8), [[6.5, 7.5, 8.5, 9.5]]),
    "B11 window of 1": Case([[float(j) for j in range(12)]], Window(1, 8), [[8.0, 9.0, 10.0, 11.0]]),
} | {
    f"B32 heads {heads} over {kv_heads}": grouped(heads, kv_heads)
    for heads, kv_heads in ((8, 4), (12, 2), (6, 3), (7, 7), (16, 1), (5, 5))
}
each_mean = pytest.mark.parametrize("case", MEANS.values(), ids=MEANS)


@each_mean
@each_form
def test_means_are_exact(device: torch.device, case: Case, form: str, D: int) -> None:
    answer = torch.tensor(case.answer, device=device)
    v = exact_values(constant_rows([case.values], D, device), form)
    out, _ = attend_evenly(v, S=answer.shape[1], H=answer.shape[0], visible=on(case.visible, device))
    assert torch.equal(out[0], answer[..., None].expand_as(out[0]))


@each_mean
@each_head_dim
@pytest.mark.parametrize("bits", CODEC_ERROR)
def test_means_of_encoded_values_are_right_within_the_codecs_error(
    device: torch.device, case: Case, bits: int, D: int
) -> None:
    """The rotation keeps lengths, so by the triangle inequality a mean is off by at most the largest error of
    a row. (Constant rows are far from normal: the codec's error on them is up to twice its usual one.)
    """
    answer = torch.tensor(case.answer, device=device)
    rows = constant_rows([case.values], D, device)
    coded = warmattn.encode_values(rows, bits=bits)
    own_error = float((warmattn.unrotate(warmattn.decode_values(coded)) - rows).norm(dim=-1).max())
    length = float(rows.norm(dim=-1).max())
    assert own_error <= 2.5 * CODEC_ERROR[bits] * length
    out, _ = attend_evenly(coded, S=answer.shape[1], H=answer.shape[0], visible=on(case.visible, device))
    error = (warmattn.unrotate(out)[0] - answer[..., None]).norm(dim=-1)
    assert float(error.max()) <= own_error + 1e-6 * length


@st.composite
def even_calls(draw: st.DrawFn) -> dict[str, Any]:
    """Shapes, lengths, visibility and layout of a call whose scores are all 0; lists are per sequence."""
    B, Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    C = draw(st.integers(1, 300))
    S = draw(st.integers(1, min(C, 40)))
    kv_len = draw(st.lists(st.integers(S, C), min_size=B, max_size=B))
    return {
        "shape": (B, Hk * group, Hk, S, C, draw(st.sampled_from(HEAD_DIMS))),
        "form": draw(st.sampled_from(VALUE_FORMS)),
        "kind": draw(st.sampled_from(["causal", "window", "external", "external+map", "full"])),
        "planes": (draw(st.sampled_from([1, B])), draw(st.sampled_from([1, Hk * group]))),
        "window": draw(st.integers(1, 2 * C)),
        "kv_len": kv_len,
        "kv_start": [draw(st.integers(0, n)) for n in kv_len],
        "first_row": [draw(st.integers(0, n - S)) for n in kv_len],
        "key_offset": draw(st.sampled_from([0, 1, 4096, 2**31 - 400])),
        "rows_first": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@settings(max_examples=150)
@given(call=even_calls())
def test_every_row_is_the_mean_of_what_it_sees(device: torch.device, call: dict[str, Any]) -> None:
    """The kind behind B01, B08, B11, B17, B24, B32 and B60: offsets, windows, masks, lengths, strides, heads.

    Sums of small integers are exact, so the answer is one correctly rounded division.
    """
    B, H, Hk, S, C, D = call["shape"]
    generator = torch.Generator().manual_seed(call["seed"])
    rows = torch.randint(-15, 16, (B, Hk, C, D), generator=generator).float()
    kv_len, kv_start, first_row = (call[name] for name in ("kv_len", "kv_start", "first_row"))
    T, key_offset, kind, window = max(kv_len), call["key_offset"], call["kind"], call["window"]
    mask = torch.randint(0, 3, (*call["planes"], S, T), generator=generator) > 0

    def sees(b: int, i: int, row: int) -> bool:
        p, k = key_offset + first_row[b] + i, key_offset + row
        by_position = {"causal": k <= p, "window": k <= p and p - k < window}
        return kv_start[b] <= row < kv_len[b] and by_position.get(kind, True)

    seen = torch.tensor([[[[sees(b, i, row) for row in range(C)] for i in range(S)]] for b in range(B)])
    seen = seen.expand(B, H, S, C).clone()
    if kind.startswith("external"):
        seen[..., :T] &= mask
    by_head = rows.repeat_interleave(H // Hk, dim=1)
    count = seen.sum(dim=-1)
    answer = (seen.float() @ by_head) / count.clamp(min=1)[..., None]

    offsets = torch.tensor([key_offset + n for n in first_row], dtype=torch.int32)
    cells = torch.where(mask, 0.0, HIDDEN).half() if call["seed"] % 2 else mask
    visible = {
        "causal": Causal(offsets),
        "window": Window(window, offsets),
        "external": External(cells),
        "external+map": External(cells, warmattn.tile_map(cells)),
        "full": Full(),
    }[kind]
    v = with_tail(exact_values(rows.to(device), call["form"]), T, math.nan)
    if isinstance(v, Tensor) and call["rows_first"]:
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = attend_evenly(
        v,
        S=S,
        H=H,
        visible=on(visible, device),
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        kv_start=torch.tensor(kv_start, dtype=torch.int32),
        key_offset=key_offset,
    )
    assert torch.equal(out.cpu(), answer)
    torch.testing.assert_close(lse.cpu(), count.float().log(), rtol=1e-6, atol=1e-6)


@each_form
def test_b01_log_sum_exp_of_a_row_that_sees_nothing(device: torch.device, form: str, D: int) -> None:
    v = exact_values(constant_rows([B01_VALUES], D, device), form)
    _, lse = attend_evenly(v, S=3, H=1, visible=External(B01_MASK.to(device)))
    assert lse.flatten().tolist() == pytest.approx([math.log(4), HIDDEN, 0.0], abs=1e-6)


@each_form
@pytest.mark.parametrize("S", range(1, 18))
def test_b17_rows_and_columns_past_the_mask_do_not_count(
    device: torch.device, S: int, form: str, D: int
) -> None:
    """Every S of a partial tile. A tile at the last columns may be mixed, which costs speed only."""
    T = 70
    case = make_inputs(S, device=device, S=S, T=T, D=D, values=form)

    surrounded = torch.full((1, 1, 80, 256), HIDDEN, dtype=torch.float16, device=device)
    mask = surrounded[:, :, :S, :T]
    mask.zero_()
    tiles = warmattn.tile_map(mask)
    assert 0 not in tiles
    expected = warmattn.attention(case.q, case.k, case.v, visible=Full(), kv_len=T)
    for tile_map in (None, tiles):
        out = warmattn.attention(case.q, case.k, case.v, visible=External(mask, tile_map), kv_len=T)
        assert_same_bits(out, expected)

    surrounded = torch.zeros(1, 1, 80, 256, dtype=torch.float16, device=device)
    mask = surrounded[:, :, :S, :T]
    mask.fill_(HIDDEN)
    tiles = warmattn.tile_map(mask)
    assert 2 not in tiles
    for tile_map in (None, tiles):
        out = warmattn.attention(case.q, case.k, case.v, visible=External(mask, tile_map), kv_len=T)
        assert_same_bits(out, torch.zeros_like(out))


@each_form
@pytest.mark.parametrize("tail", [math.nan, math.inf, -math.inf, 65504.0])
def test_b21_the_tail_of_the_cache_is_never_read(
    device: torch.device, tail: float, form: str, D: int
) -> None:
    C = 128
    q, k = (torch.zeros(1, 1, rows, D, dtype=torch.float16, device=device) for rows in (2, C))
    v = exact_values(torch.ones(1, 1, C, D, device=device), form)
    tile = warmattn.explain(q, k, v, visible=Full()).tiling.keys
    assert 70 != tile <= C
    for T in (1, 70, tile - 1):
        k[:, :, T:] = tail
        out, lse = warmattn.attention(q, k, with_tail(v, T, tail), visible=Full(), kv_len=T, return_lse=True)
        assert torch.equal(out, torch.ones_like(out))
        k[:, :, T:] = 0.0
        clean = warmattn.attention(q, k, with_tail(v, T, 0.0), visible=Full(), kv_len=T, return_lse=True)
        assert_same_bits(out, clean[0])
        assert_same_bits(lse, clean[1])


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    S=st.integers(1, 5),
    T=st.integers(1, 300),
    slack=st.integers(1, 140),
    D=st.sampled_from(HEAD_DIMS),
    form=st.sampled_from(VALUE_FORMS),
    tail=st.sampled_from([math.nan, math.inf, -math.inf, 65504.0, 1e-7]),
)
def test_b21_no_bit_depends_on_the_tail(
    device: torch.device, seed: int, S: int, T: int, slack: int, D: int, form: str, tail: float
) -> None:
    case = make_inputs(seed, device=device, S=min(S, T), T=T, D=D, C=T + slack, values=form)
    visible = Causal(T - min(S, T))
    outputs = []
    for filling in (tail, 0.0):
        k, v = with_tail(case.k, T, filling), with_tail(case.v, T, filling)
        assert isinstance(k, Tensor)
        outputs.append(warmattn.attention(case.q, k, v, visible=visible, kv_len=T, return_lse=True))
    for poisoned, clean in zip(*outputs, strict=True):
        assert_same_bits(poisoned, clean)


@each_form
@pytest.mark.parametrize("C", [64, 65, 77, 4096])
def test_b24_strides_come_from_the_capacity(device: torch.device, C: int, form: str, D: int) -> None:
    values = torch.full((2, 2, C), 9999.0)
    values[:, :, :10] = torch.tensor(
        [[[100.0 * b + 10 * h + j for j in range(10)] for h in (0, 1)] for b in (0, 1)]
    )
    v = exact_values(constant_rows(values.tolist(), D, device), form)
    out, _ = attend_evenly(v, S=1, H=2, visible=Full(), kv_len=10)
    means = torch.tensor([[4.5, 14.5], [104.5, 114.5]], device=device)
    assert torch.equal(out[:, :, 0], means[..., None].expand(2, 2, D))
    if isinstance(v, Tensor):
        assert_same_bits(attend_evenly(v[:, :, :64], S=1, H=2, visible=Full(), kv_len=10)[0], out)


def test_b32_heads_that_do_not_divide_are_refused() -> None:
    v = torch.zeros(1, 4, 3, 256)
    with pytest.raises(InvalidInput, match=r"H a multiple of Hk \(4\), got H = 10"):
        attend_evenly(v, S=1, H=10, visible=Full())


@each_form
@pytest.mark.parametrize(
    ("scale", "answer"), [(1 / 16, 1.0948518), (1.0, 1.0), (1 / math.sqrt(512), 1.2140836)]
)
def test_b37_dots_past_the_range_of_f16(
    device: torch.device, scale: float, answer: float, form: str, D: int
) -> None:
    q = torch.full((1, 1, 1, D), 12.0, dtype=torch.float16, device=device)
    k = torch.full((1, 1, 2, D), 12.0, dtype=torch.float16, device=device)
    k[:, :, 1] = 11.9921875
    v = exact_values(constant_rows([[[1.0, 3.0]]], D, device), form)
    # The answers are those of D = 512; half as many terms at twice the scale are the same scores.
    out = warmattn.attention(q, k, v, visible=Full(), scale=scale * 512 / D)
    assert float((out - answer).abs().max()) <= 1e-6


@settings(max_examples=60)
@given(
    query=st.integers(-104, 104),
    key=st.integers(-104, 104),
    step=st.integers(-8, 8),
    scale=st.one_of(st.sampled_from([2.0**-10, 1 / 16, 1.0, 16.0]), st.floats(2.0**-12, 64.0)),
    D=st.sampled_from(HEAD_DIMS),
    form=st.sampled_from(VALUE_FORMS),
)
def test_b37_large_dots_at_any_scale(
    device: torch.device, query: int, key: int, step: int, scale: float, D: int, form: str
) -> None:
    """Operands in eighths make every dot exact in float32, up to 86,528. The error left is that of one
    exponential: a few units of 2^-24, times its argument, times 2.
    """
    q = torch.full((1, 1, 1, D), query / 8, dtype=torch.float16, device=device)
    k = torch.full((1, 1, 2, D), key / 8, dtype=torch.float16, device=device)
    k[:, :, 1] = (key + step) / 8
    v = exact_values(constant_rows([[[1.0, 3.0]]], D, device), form)
    out = warmattn.attention(q, k, v, visible=Full(), scale=scale)
    rounded = torch.tensor(scale, dtype=torch.float32).double()
    difference = rounded * (query * step * D / 64)
    answer = 1 + 2 * torch.sigmoid(difference)
    assert float((out.double().cpu() - answer).abs().max()) <= 4e-6


def coded_and_attended(x: Tensor, bits: int) -> tuple[CodedValues, Tensor]:
    coded = warmattn.encode_values(x, bits=bits)
    return coded, attend_evenly(coded, S=1, H=1, visible=Full())[0]


@each_head_dim
@pytest.mark.parametrize("bits", CODEC_ERROR)
def test_b44_rows_of_any_length_are_coded_by_their_norm(
    bits: int, D: int, seed: int, device: torch.device
) -> None:
    """64 sequences of one row each; root mean squares over them obey the triangle inequality too."""
    rows = torch.randn(64, 1, 1, D, generator=torch.Generator().manual_seed(seed))
    rows = (rows * (40 / rows.norm(dim=-1, keepdim=True)) * 16).round().div(16).half().to(device)
    length = float(rows.float().norm())

    coded, out = coded_and_attended(rows, bits)
    assert_same_values(out, warmattn.decode_values(coded))
    assert float((warmattn.unrotate(out) - rows).norm()) <= SLACK * CODEC_ERROR[bits] * length
    for factor in (4.0, 1 / 1024):
        assert torch.equal((rows * factor).float(), rows.float() * factor)
        scaled, scaled_out = coded_and_attended(rows * factor, bits)
        assert torch.equal(scaled.codes, coded.codes)
        assert_same_bits(scaled.norms, coded.norms * factor)
        assert_same_values(scaled_out, out * factor)

    coded, out = coded_and_attended(torch.cat((rows, -3 * rows), dim=2), bits)
    error = float((warmattn.unrotate(out) + rows).norm())
    assert error <= SLACK * CODEC_ERROR[bits] * (length + 3 * length) / 2
    doubled = CodedValues(coded.codes, coded.norms * 2, coded.codebook, coded.sf)
    assert_same_values(attend_evenly(doubled, S=1, H=1, visible=Full())[0], out * 2)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-30, 30),
    D=st.sampled_from(HEAD_DIMS),
    bits=st.sampled_from(sorted(CODEC_ERROR)),
)
def test_b44_powers_of_two_pass_through_the_codec(
    device: torch.device, seed: int, exponent: int, D: int, bits: int
) -> None:
    rows = torch.randn(1, 1, 3, D, generator=torch.Generator().manual_seed(seed)).to(device)
    coded, out = coded_and_attended(rows, bits)
    scaled, scaled_out = coded_and_attended(rows * 2.0**exponent, bits)
    assert torch.equal(scaled.codes, coded.codes)
    assert_same_bits(scaled.norms, coded.norms * 2.0**exponent)
    assert_same_values(scaled_out, out * 2.0**exponent)


@each_form
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("masked", [None, "mask", "mask and map"])
@pytest.mark.parametrize(
    ("B", "S", "T", "axis"), [(1, 0, 5, "S"), (1, 3, 0, "C"), (0, 3, 5, "B"), (1, 0, 0, "S"), (2, 1, 1, None)]
)
def test_b60_an_empty_axis_is_named(
    device: torch.device,
    B: int,
    S: int,
    T: int,
    axis: str | None,
    masked: str | None,
    return_lse: bool,
    form: str,
    D: int,
) -> None:
    q, k = (torch.zeros(B, 1, rows, D, dtype=torch.float16, device=device) for rows in (S, T))
    v = exact_values(torch.full((B, 1, T, D), 3.0, device=device), form)
    mask = torch.zeros(S, T, dtype=torch.float16, device=device)
    tiles = torch.ones(-(-S // 32), -(-T // 16), dtype=torch.uint8, device=device)
    visible = External(mask, tiles if masked == "mask and map" else None) if masked else Full()
    if axis is None:
        result = warmattn.attention(q, k, v, visible=visible, return_lse=return_lse)
        out, *lse = result if isinstance(result, tuple) else (result,)
        assert torch.equal(out, torch.full_like(out, 3.0))
        assert all(torch.equal(sums, torch.zeros(B, 1, S, device=device)) for sums in lse)
        return
    with pytest.raises(InvalidInput, match=rf"\(empty axis {axis}\), got {axis} = 0"):
        warmattn.attention(q, k, v, visible=visible, return_lse=return_lse)


@each_form
def test_b60_a_request_that_sees_no_key_gives_zero(device: torch.device, form: str, D: int) -> None:
    v = exact_values(torch.full((2, 1, 5, D), 3.0, device=device), form)
    starts = torch.tensor([5, 4], dtype=torch.int32)
    for visible in (Full(), Causal(2), Window(2, 2)):
        out, lse = attend_evenly(v, S=3, H=1, visible=visible, kv_start=starts)
        assert_same_bits(out[0], torch.zeros_like(out[0]))
        assert lse[0].flatten().tolist() == [HIDDEN] * 3
        assert torch.equal(out[1, :, 2:], torch.full((1, 1, D), 3.0, device=device))


@each_form
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_b71_autograd_is_never_silently_detached(
    device: torch.device, operand: str, form: str, D: int
) -> None:
    case = make_inputs(0, device=device, S=2, T=3, D=D, values=form)
    operands = {"q": case.q, "k": case.k, "v": case.v.norms if isinstance(case.v, CodedValues) else case.v}
    operands[operand].requires_grad_()
    with pytest.raises(Unsupported, match=r"requires grad: forward only, use torch\.no_grad\(\)") as raised:
        warmattn.attention(case.q, case.k, case.v, visible=Causal(1), kv_len=3)
    assert isinstance(raised.value, RuntimeError)
    with torch.no_grad():
        out = warmattn.attention(case.q, case.k, case.v, visible=Causal(1), kv_len=3)
    assert bool(out.isfinite().all())
