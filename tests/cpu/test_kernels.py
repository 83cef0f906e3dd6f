"""The compiled kernels by what they must give: accuracy, bits, poison, strides; on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_helpers import attend, attend_calls_of_every_kind, attend_with_lse

from warmattn import Causal, External, Full, Window, decode_values, partials, reference, tile_map
from warmattn.backend.cpu import native
from warmattn.backend.cpu.native import Isa
from warmattn.call import AttentionCall
from warmattn.codec.values import CodedValues
from warmattn.testing import VALUE_FORMS, assert_accurate, assert_same_bits, make_inputs

S, T = 77, 300
HEAD_DIMS = (64, 128, 256, 512)


def assert_matches(isa: Isa, inputs, visible, **options) -> None:
    arguments = (inputs.q, inputs.k, inputs.v)
    out, lse = attend_with_lse(isa, *arguments, visible, kv_len=inputs.kv_len, **options)
    expected, expected_lse = reference.attention(*arguments, visible=visible, kv_len=inputs.kv_len, **options)
    assert_accurate(out, expected, keys=inputs.kv_len)
    seen = expected_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    error = (lse.double() - expected_lse)[seen].abs() / expected_lse[seen].abs().clamp(min=1)
    assert error.max() <= 1e-6


@pytest.mark.parametrize("form", VALUE_FORMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_form_of_v_is_accurate(isa: Isa, head_dim: int, form: str) -> None:
    inputs = make_inputs(11, S=S, T=T, D=head_dim, H=6, Hk=2, values=form)
    assert_matches(isa, inputs, Causal(T - S))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("visible", "options"),
    [
        (Window(50, T - S), {}),
        (Window(1, T - S), {}),
        (Full(), {"kv_start": torch.tensor([3, 150], dtype=torch.int32)}),
        (Causal(T - S), {"softcap": 0.7}),
        (Causal(1000 + T - S), {"key_offset": 1000, "scale": 0.3}),
    ],
    ids=["window", "window-1", "start", "softcap", "key-offset"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_visibility_is_accurate(isa: Isa, head_dim: int, visible, options, dtype: torch.dtype) -> None:
    inputs = make_inputs(12, B=2, S=S, T=T, D=head_dim, H=4, Hk=2, values="f16", dtype=dtype)
    assert_matches(isa, inputs, visible, **options)


@pytest.mark.parametrize("addend", [0.0, 1.0], ids=["hides", "adds"])
@pytest.mark.parametrize("with_map", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_external_masks_of_any_stride_are_accurate(
    isa: Isa, addend: float, with_map: bool, transposed: bool
) -> None:
    inputs = make_inputs(13, B=2, S=S, T=T, D=256, H=4, Hk=2, values="f16")
    generator = torch.Generator().manual_seed(13)
    cells = torch.where(torch.rand(2, 4, S, T, generator=generator) < 0.5, 0.0, -math.inf)
    cells[:, :, :33, 32:90] = -math.inf
    cells[:, :, 40] = -math.inf  # a row that sees nothing
    mask = (cells + addend * torch.randn(cells.shape, generator=generator)).half()
    if transposed:
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    assert_matches(isa, inputs, External(mask, tile_map(mask) if with_map else None))


@pytest.mark.parametrize("form", ["f16", "codes8"])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_a_row_has_its_bits_in_any_company(isa: Isa, head_dim: int, form: str) -> None:
    rows, keys = 35, 4500  # two splits
    inputs = make_inputs(14, S=rows, T=keys, D=head_dim, H=4, Hk=2, values=form)
    q, k, v = inputs.q, inputs.k, inputs.v
    offset = keys - rows
    whole = attend(isa, q, k, v, Causal(offset), kv_len=keys)
    for row in (0, 17, 34):
        alone = q[:, :, row : row + 1]
        expected = whole[:, :, row : row + 1]
        seen = offset + row + 1
        assert_same_bits(attend(isa, alone, k, v, Causal(offset + row), kv_len=keys), expected)
        assert_same_bits(attend(isa, alone, k, v, Full(), kv_len=seen), expected)
        assert_same_bits(attend(isa, alone, k, v, Window(keys, offset + row), kv_len=seen), expected)
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(offset)
    for visible in (External(mask), External(mask, tile_map(mask))):
        assert_same_bits(attend(isa, q, k, v, visible, kv_len=keys), whole)
    with_lse, _ = attend_with_lse(isa, q, k, v, Causal(offset), kv_len=keys)
    assert_same_bits(with_lse, whole)


@pytest.mark.parametrize(("S", "T"), [(1, 9000), (300, 300)], ids=["decode", "prefill"])
def test_bits_do_not_depend_on_threads(isa: Isa, S: int, T: int) -> None:
    inputs = make_inputs(15, S=S, T=T, D=256, H=4, Hk=2, values="f16")
    visible = Causal(T - S)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(attend(isa, inputs.q, inputs.k, inputs.v, visible, kv_len=inputs.kv_len))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize(("window", "first", "count"), [(5000, 0, 3), (3000, 1, 2)])
def test_partials_merge_to_the_bits_of_run(isa: Isa, window: int, first: int, count: int) -> None:
    inputs = make_inputs(16, S=9, T=9000, D=512, H=4, Hk=2, values="f16")
    visible = Window(window, 9000 - 9)
    call = AttentionCall.of(inputs.q, inputs.k, inputs.v, visible=visible, kv_len=9000).rounded().check()
    split = native.run_partials(isa, call)
    assert split.first == first
    parts = [partials.Partials(*part) for part in zip(*split.partials, strict=True)]
    assert len(parts) == count
    exponential = partials.Exponential.of(512, call.scale)
    out, lse = partials.finish(partials.merge(parts, exponential), exponential)
    expected, expected_lse = attend_with_lse(isa, inputs.q, inputs.k, inputs.v, visible, kv_len=9000)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)


def test_partials_of_queries_far_past_the_keys_are_empty(isa: Isa) -> None:
    """Where keys lie on several ranks, one may hold none that a window still shows."""
    inputs = make_inputs(22, S=9, T=100, D=64, values="f16")
    assert isinstance(inputs.v, torch.Tensor)
    k, v = (operand[:, :, :100].clone() for operand in (inputs.k, inputs.v))
    call = AttentionCall.of(inputs.q, k, v, visible=Window(50, 9000), kv_len=100)
    split = native.run_partials(isa, call.rounded().check(offsets=False))
    assert split.first == 0
    assert bool((split.partials.maximum == -math.inf).all())
    assert not split.partials.sum.any()
    assert not split.partials.accumulator.any()


@pytest.mark.parametrize("bits", [5, 6, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_codes_have_the_bits_of_their_decoded_values(isa: Isa, head_dim: int, bits: int) -> None:
    inputs = make_inputs(17, S=S, T=T, D=head_dim, H=4, Hk=2, values=f"codes{bits}")
    coded = inputs.v
    assert isinstance(coded, CodedValues)
    high = CodedValues(
        coded.codes | (256 - 2**bits), coded.norms, coded.codebook, coded.sf
    )  # only low bits count
    dense = decode_values(coded)
    expected = attend(isa, inputs.q, inputs.k, dense, Causal(T - S), kv_len=T)
    for values in (coded, high):
        assert_same_bits(attend(isa, inputs.q, inputs.k, values, Causal(T - S), kv_len=T), expected)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operand", ["k", "v"])
def test_poison_touches_only_the_rows_that_see_it(isa: Isa, operand: str, poison: float, rows: int) -> None:
    inputs = make_inputs(18, S=rows, T=T, D=256, H=4, Hk=2, values="f16")
    clean = attend(isa, inputs.q, inputs.k, inputs.v, Window(60, T - rows), kv_len=T)
    key = T - rows // 2 - 1
    assert isinstance(inputs.v, torch.Tensor)
    (inputs.k if operand == "k" else inputs.v)[:, 0, key, 5] = poison
    (inputs.k if operand == "k" else inputs.v)[:, :, : T - rows - 60] = poison  # hidden from every row
    out = attend(isa, inputs.q, inputs.k, inputs.v, Window(60, T - rows), kv_len=T)
    sees = torch.arange(T - rows, T) >= key
    assert_same_bits(out[:, 2:], clean[:, 2:])
    assert_same_bits(out[:, :2, ~sees], clean[:, :2, ~sees])
    if operand == "v" or math.isnan(poison):
        assert not out[:, :2, sees].isfinite().all(dim=-1).any()
    else:  # infinite scores: +inf spoils the row, -inf weighs nothing
        direction = inputs.q[:, :2, :, 5].sign() * math.copysign(1.0, poison)
        spoiled = (direction > 0) & sees
        assert not out[:, :2][spoiled].isfinite().all(dim=-1).any()
        assert out[:, :2][(direction < 0) & sees].isfinite().all()


@pytest.mark.parametrize("head_dim", [256, 512])
def test_strided_operands_and_capacity(isa: Isa, head_dim: int) -> None:
    inputs = make_inputs(19, B=2, S=S, T=T, D=head_dim, H=4, Hk=2, values="codes8")
    coded = inputs.v
    assert isinstance(coded, CodedValues)
    expected = attend(isa, inputs.q, inputs.k, coded, Causal(T - S), kv_len=T)

    def scattered(tensor: torch.Tensor) -> torch.Tensor:
        """The same values, heads inside rows, every other row skipped."""
        wide = torch.empty(
            tensor.shape[0], tensor.shape[2] * 2, tensor.shape[1], tensor.shape[3], dtype=tensor.dtype
        )
        view = wide[:, ::2].transpose(1, 2)
        return view.copy_(tensor)

    norms = scattered(coded.norms.repeat_interleave(2, dim=-1))[..., ::2]
    values = CodedValues(scattered(coded.codes), norms, coded.codebook, coded.sf)
    out = attend(isa, scattered(inputs.q), scattered(inputs.k), values, Causal(T - S), kv_len=T)
    assert_same_bits(out, expected)


def test_what_an_earlier_call_left_in_the_workspace_is_never_used(isa: Isa) -> None:
    """A thread keeps its workspace, where a tile that ends inside a group of 32 keys has rows to spare."""
    spoiled = make_inputs(24, S=200, T=200, D=512, H=1, Hk=1, values="f32")
    spoiled.q.fill_(math.nan)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for rows in (1, 9, 40):
            inputs = make_inputs(25, S=rows, T=40, D=64, H=1, Hk=1, values="f16")
            assert attend(isa, spoiled.q, spoiled.k, spoiled.v, Causal(0), kv_len=200).isnan().all()
            assert_matches(isa, inputs, Causal(40 - rows))
    finally:
        torch.set_num_threads(threads)


def test_an_output_of_any_strides_is_written_where_it_lies(isa: Isa) -> None:
    inputs = make_inputs(23, B=2, S=S, T=T, D=64, H=4, Hk=2, values="f16")
    arguments = (isa, inputs.q, inputs.k, inputs.v, Causal(T - S))
    wide = torch.full((2, 2 * S, 4, 64), torch.nan)
    attend(*arguments, out=wide[:, ::2].transpose(1, 2), kv_len=T)
    assert_same_bits(wide[:, ::2].transpose(1, 2), attend(*arguments, kv_len=T))
    assert bool(wide[:, 1::2].isnan().all())


@pytest.mark.parametrize("form", VALUE_FORMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_avx2_and_avx512_have_the_same_bits(head_dim: int, form: str) -> None:
    by_name = {isa.name: isa for isa in native.isas() if isa.missing is None}
    if not {"avx2", "avx512"} <= by_name.keys():
        pytest.skip("needs a CPU with AVX-512")
    narrow, wide = (attend_calls_of_every_kind(by_name[name], head_dim, form) for name in ("avx2", "avx512"))
    for results in zip(narrow, wide, strict=True):
        assert_same_bits(*results)


def test_scores_beyond_f16_and_long_caches_stay_accurate(isa: Isa) -> None:
    inputs = make_inputs(21, S=4, T=9000, D=512, H=4, Hk=2, values="f32", spread=1e4)
    inputs.q.mul_(16)
    inputs.k.mul_(16)
    assert_matches(isa, inputs, Causal(9000 - 4), scale=1 / (256 * math.sqrt(512)))
