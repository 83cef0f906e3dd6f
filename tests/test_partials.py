"""Partial results: the merge law itself, `merge_partials` on finished results, and a backend's splits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from warmattn import (
    Causal,
    CodedValues,
    External,
    Full,
    InvalidInput,
    Window,
    attention,
    merge_partials,
    reference,
)
from warmattn.backend import SplitPartials, select
from warmattn.call import AttentionCall
from warmattn.partials import NATURAL, Exponential, Partials, finish, fold, merge
from warmattn.testing import VALUE_FORMS, Inputs, assert_accurate, assert_same_bits, make_inputs
from warmattn.visibility import Visibility

INF = math.inf
HEAD_DIMS = (64, 128, 256, 512)
EXPONENTIALS = {
    "exp2": Exponential.of(256, 1 / 16),
    "exp": Exponential.of(512, 0.04),
    "natural": NATURAL,
}
laws = pytest.mark.parametrize("exponential", EXPONENTIALS.values(), ids=EXPONENTIALS.keys())


def random_partials(seed: int, rows: int, D: int = 8) -> Partials:
    generator = torch.Generator().manual_seed(seed)
    return Partials(
        20 * torch.randn(rows, generator=generator),
        1 + torch.rand(rows, generator=generator),
        torch.randn(rows, D, generator=generator),
    )


def empty_partials(rows: int, D: int = 8) -> Partials:
    return Partials(torch.full((rows,), -INF), torch.zeros(rows), torch.zeros(rows, D))


def same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


# The law.


@laws
def test_fold_is_the_formula(seed: int, exponential: Exponential) -> None:
    first, second = random_partials(seed, 50), random_partials(seed + 1, 50)
    (m1, l1, a1), (m2, l2, a2) = ([t.double() for t in part] for part in (first, second))
    m = torch.maximum(m1, m2)
    w1, w2 = torch.exp(exponential.scale * (m1 - m)), torch.exp(exponential.scale * (m2 - m))
    folded = fold(first, second, exponential.weight)
    assert torch.equal(folded.maximum, m.float())
    torch.testing.assert_close(folded.sum.double(), l1 * w1 + l2 * w2, rtol=1e-6, atol=0)
    exact = a1 * w1[:, None] + a2 * w2[:, None]
    torch.testing.assert_close(folded.accumulator.double(), exact, rtol=0, atol=1e-6)


@laws
def test_an_empty_partial_changes_no_bit(seed: int, exponential: Exponential) -> None:
    part, empty = random_partials(seed, 50), empty_partials(50)
    same_bits(fold(part, empty, exponential.weight), part)
    same_bits(fold(empty, part, exponential.weight), part)
    same_bits(fold(empty, empty, exponential.weight), empty)
    same_bits(merge([empty, part, empty, empty], exponential), part)


@laws
def test_fold_is_symmetric_and_merge_goes_in_order(seed: int, exponential: Exponential) -> None:
    a, b, c = (random_partials(seed + i, 50) for i in range(3))
    same_bits(fold(a, b, exponential.weight), fold(b, a, exponential.weight))
    same_bits(merge([a, b, c], exponential), fold(fold(a, b, exponential.weight), c, exponential.weight))


@laws
def test_the_bits_of_a_row_do_not_depend_on_how_many_there_are(seed: int, exponential: Exponential) -> None:
    """Vector loops end in scalar ones: neither a row's place nor the number of rows may show."""
    a, b = random_partials(seed, 131), random_partials(seed + 1, 131)
    whole, finished = fold(a, b, exponential.weight), finish(a, exponential)
    for start, stop in ((0, 1), (0, 3), (1, 18), (5, 38), (31, 131), (130, 131)):

        def cut(part: Partials, rows: slice = slice(start, stop)) -> Partials:
            return Partials(*(t[rows] for t in part))

        same_bits(fold(cut(a), cut(b), exponential.weight), cut(whole))
        same_bits(finish(cut(a), exponential), tuple(t[start:stop] for t in finished))


@laws
@pytest.mark.parametrize("field", [0, 2], ids=["maximum", "accumulator"])
@pytest.mark.parametrize("value", [math.nan, INF])
def test_non_finite_rows_stay_non_finite(
    seed: int, exponential: Exponential, field: int, value: float
) -> None:
    """An infinite maximum comes with the NaN sum that exp(inf − inf) gives."""
    clean, other = random_partials(seed, 6), random_partials(seed + 1, 6)
    dirty = Partials(*(t.clone() for t in clean))
    dirty[field][2] = value
    if field == 0:
        dirty.sum[2] = dirty.accumulator[2] = math.nan
    for parts in ([dirty, other], [other, dirty], [dirty, empty_partials(6), other]):
        out, lse = finish(merge(parts, exponential), exponential)
        assert not bool(out[2].isfinite().any())
        if field == 0:
            assert bool(lse[2].isnan())
        expected = finish(merge([clean if p is dirty else p for p in parts], exponential), exponential)
        others = [0, 1, 3, 4, 5]
        same_bits((out[others], lse[others]), tuple(t[others] for t in expected))


@laws
def test_finish(seed: int, exponential: Exponential) -> None:
    part = random_partials(seed, 50)
    part.maximum[7], part.sum[7], part.accumulator[7] = -INF, 0.0, 0.0
    out, lse = finish(part, exponential)
    assert_same_bits(out[7], torch.zeros(8))
    assert lse[7] == -INF
    seen = torch.arange(50) != 7
    assert torch.equal(out[seen], part.accumulator[seen] / part.sum[seen][:, None])
    exact = exponential.scale * part.maximum.double() + part.sum.double().log()
    torch.testing.assert_close(lse[seen].double(), exact[seen], rtol=1e-6, atol=1e-6)


@laws
def test_exponential_and_weight_are_exp_of_the_scaled_difference(seed: int, exponential: Exponential) -> None:
    x = -80 / exponential.scale * torch.rand(1000, generator=torch.Generator().manual_seed(seed))
    exact = torch.exp(exponential.scale * x.double())
    # Factor and argument, down to −80, are rounded to float32, and the exponential makes that relative.
    rounding = 80 * 2.0**-23
    torch.testing.assert_close(exponential(x.clone()).double(), exact, rtol=rounding, atol=0)
    torch.testing.assert_close(exponential.weight(x).double(), exact, rtol=rounding, atol=0)
    for function in (exponential, exponential.weight):
        ends = torch.tensor([0.0, -INF, -1e6 / exponential.scale, math.nan])
        assert torch.equal(function(ends).nan_to_num(nan=7.0), torch.tensor([1.0, 0.0, 0.0, 7.0]))


# merge_partials.


@pytest.mark.parametrize("cuts", [[], [150], [1, 2, 299], [128, 256]])
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_merged_ranges_are_as_accurate_as_one_shot(
    seed: int, device: torch.device, D: int, cuts: list[int]
) -> None:
    """Ranges of keys under a mask that leaves some rows empty in some ranges, and one row in all."""
    S, T = 13, 300
    inputs = make_inputs(seed, device=device, B=2, H=4, Hk=2, S=S, T=T, D=D)
    seen = torch.rand(S, T, generator=torch.Generator().manual_seed(seed)) < 0.5
    seen[3], seen[4, :200], seen[5, 100:] = False, False, False
    seen = seen.to(device)
    assert isinstance(inputs.v, Tensor)
    parts = [
        attention(
            inputs.q,
            inputs.k[:, :, start:stop],
            inputs.v[:, :, start:stop],
            visible=External(seen[:, start:stop]),
            return_lse=True,
        )
        for start, stop in zip([0, *cuts], [*cuts, T], strict=True)
    ]
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    out, lse = merge_partials(outs, lses)
    exact, exact_lse = reference.attention(inputs.q, inputs.k, inputs.v, visible=External(seen), kv_len=T)
    assert_accurate(out, exact, keys=T)
    sees = exact_lse > -INF
    assert torch.equal(lse > -INF, sees)
    assert bool(((lse - exact_lse)[sees].abs() <= 1e-6 * exact_lse[sees].abs().clamp(min=1)).all())
    if not cuts:
        same_bits((out, lse), parts[0])


def finished(seed: int, N: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 2, 3, 5, 64, generator=generator), 4 * torch.randn(N, 2, 3, 5, generator=generator)


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF, 3e38])
def test_an_empty_partial_contributes_nothing_whatever_it_holds(seed: int, garbage: float) -> None:
    outs, lses = finished(seed, 4)
    expected = merge_partials(outs[1:3], lses[1:3])
    lses[0] = lses[3] = -INF
    outs[0] = outs[3] = garbage
    same_bits(merge_partials(outs, lses), expected)
    lses[:, 1, 2, 4], outs[:, 1, 2, 4] = -INF, garbage
    out, lse = merge_partials(outs, lses)
    assert_same_bits(out[1, 2, 4], torch.zeros(64))
    assert lse[1, 2, 4] == -INF
    assert_same_bits(out[0], expected[0][0])


@pytest.mark.parametrize("poison", [math.nan, INF])
def test_a_partial_that_is_not_finite_spoils_its_row_alone(seed: int, poison: float) -> None:
    outs, lses = finished(seed, 3)
    expected = merge_partials(outs, lses)
    lses[1, 0, 1, 2] = poison
    outs[2, 1, 0, 0] = poison
    out, lse = merge_partials(outs, lses)
    spoilt = torch.zeros(2, 3, 5, dtype=torch.bool)
    spoilt[0, 1, 2] = spoilt[1, 0, 0] = True
    assert torch.equal(~out.isfinite().all(dim=3), spoilt)
    assert not bool(lse[0, 1, 2].isfinite())
    same_bits((out[~spoilt], lse[~spoilt]), tuple(t[~spoilt] for t in expected))


def test_merge_partials_reads_strided_inputs_and_changes_none(seed: int) -> None:
    outs, lses = finished(seed, 3)
    expected = merge_partials(outs, lses)
    strided = outs.permute(4, 3, 0, 2, 1).contiguous().permute(2, 4, 3, 1, 0)
    before = strided.clone(), lses.clone()
    same_bits(merge_partials(strided, lses.mT.contiguous().mT), expected)
    same_bits((strided, lses), before)


OUTS, LSES = torch.zeros(2, 1, 1, 3, 64), torch.zeros(2, 1, 1, 3)
BAD_PARTIALS: dict[str, tuple[Any, Any, str, str]] = {
    "outs no tensor": ([OUTS], LSES, "outs", "expected a float32 tensor, got list"),
    "outs float64": (OUTS.double(), LSES, "outs", "expected a float32 tensor, got torch.float64"),
    "lses no tensor": (OUTS, None, "lses", "expected a float32 tensor, got NoneType"),
    "lses float16": (OUTS, LSES.half(), "lses", "expected a float32 tensor, got torch.float16"),
    "rank 4": (OUTS[0], LSES[0], "outs", "expected [N, B, H, S, D], N >= 1, got [1, 1, 3, 64]"),
    "N = 0": (OUTS[:0], LSES[:0], "outs", "expected [N, B, H, S, D], N >= 1, got [0, 1, 1, 3, 64]"),
    "another N": (OUTS, LSES[:1], "lses", "expected [2, 1, 1, 3], got [1, 1, 1, 3]"),
    "an axis too many": (OUTS, LSES[..., None], "lses", "expected [2, 1, 1, 3], got [2, 1, 1, 3, 1]"),
    "another device": (OUTS, LSES.to("meta"), "lses", "expected on cpu, got meta"),
}


@pytest.mark.parametrize("name", BAD_PARTIALS)
def test_merge_partials_refuses(name: str) -> None:
    outs, lses, operand, message = BAD_PARTIALS[name]
    with pytest.raises(InvalidInput) as caught:
        merge_partials(outs, lses)
    assert caught.value.operand == operand
    assert str(caught.value) == f"merge_partials: {operand}: {message}"


# A backend's splits.


def split_partials(inputs: Inputs, **arguments: Any) -> tuple[SplitPartials, int]:
    """The splits and their length."""
    call = AttentionCall.of(inputs.q, inputs.k, inputs.v, **arguments).rounded().check(offsets=False)
    backend = select(call)
    return backend.run_partials(call), backend.tiling(call.D).split


def stacked(partials: Partials) -> list[Partials]:
    return [Partials(*part) for part in zip(*partials, strict=True)]


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_splits_merged_and_finished_are_the_result(
    seed: int, device: torch.device, D: int, values: str, softcap: float | None
) -> None:
    S, T = 19, 8192 + 100
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D, H=2, values=values)
    hidden = torch.rand(S, T, generator=torch.Generator().manual_seed(seed)) < 0.5
    hidden[:, 1000:5000] = True
    seen = (~hidden).to(device)
    kinds: tuple[Visibility, ...] = (Causal(T - S), Window(4150, T - S), External(seen))
    for visible in kinds:
        arguments = {"visible": visible, "kv_len": T, "softcap": softcap}
        (first, partials, exponential), split = split_partials(inputs, **arguments)
        assert partials.maximum.shape == partials.sum.shape == (len(partials.sum), 1, 2, S)
        assert partials.accumulator.shape == (len(partials.sum), 1, 2, S, D)
        assert first + len(partials.sum) == -(-T // split)
        result = finish(merge(stacked(partials), exponential), exponential)
        same_bits(result, attention(inputs.q, inputs.k, inputs.v, **arguments, return_lse=True))


def test_splits_start_with_the_first_that_a_row_sees(seed: int, device: torch.device) -> None:
    inputs = make_inputs(seed, device=device, S=3, T=8200, D=64)
    (first, partials, _), split = split_partials(inputs, visible=Window(50, 8197), kv_len=8200)
    assert first == (8197 - 49) // split
    assert bool((partials.maximum > -INF).any(dim=3).all())
    nothing, _ = split_partials(inputs, visible=Full(), kv_len=8200, kv_start=8200)
    same_bits(tuple(nothing.partials), tuple(t[None] for t in empty_of(inputs)))


def empty_of(inputs: Inputs) -> Partials:
    accumulator = torch.zeros_like(inputs.q, dtype=torch.float32)
    total = accumulator[..., 0].clone()
    return Partials(torch.full_like(total, -INF), total, accumulator)


@pytest.mark.parametrize("values", ["f32", "bf16", "codes8"])
@pytest.mark.parametrize("D", [256, 512])
def test_ranges_of_a_sequence_give_the_splits_of_the_whole(
    seed: int, device: torch.device, D: int, values: str
) -> None:
    """K and V cut at split boundaries, each part with its key_offset: what ranks of a group compute."""
    S, T = 5, 8192 + 60
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D, H=2, values=values, C=T)
    visible = Causal(T - 40 - S)
    (first, whole, exponential), split = split_partials(inputs, visible=visible, kv_len=T)
    assert first == 0
    parts = []
    for start in range(0, T, split):
        rows = slice(start, min(start + split, T))
        v = inputs.v
        if isinstance(v, CodedValues):
            v = CodedValues(v.codes[:, :, rows], v.norms[:, :, rows], v.codebook)
        else:
            v = v[:, :, rows]
        ranged = Inputs(inputs.q, inputs.k[:, :, rows], v, rows.stop - rows.start)
        (own_first, part, _), _ = split_partials(
            ranged, visible=visible, kv_len=ranged.kv_len, key_offset=start
        )
        assert own_first == 0
        assert len(part.sum) == 1
        parts.append(part)
    same_bits(tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)), tuple(whole))
    result = finish(merge([Partials(*(t[0] for t in part)) for part in parts], exponential), exponential)
    same_bits(result, attention(inputs.q, inputs.k, inputs.v, visible=visible, kv_len=T, return_lse=True))


def test_a_range_past_every_row_is_empty(seed: int, device: torch.device) -> None:
    inputs = make_inputs(seed, device=device, S=5, T=100, D=256)
    partials, _ = split_partials(inputs, visible=Causal(7), kv_len=100, key_offset=4096)
    same_bits(tuple(partials.partials), tuple(t[None] for t in empty_of(inputs)))
