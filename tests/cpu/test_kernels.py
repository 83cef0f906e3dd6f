"""The compiled kernels by what they must give: accuracy, bits, poison, strides; on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_helpers import attend, attend_with_lse

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


def test_partials_merge_to_the_bits_of_run(isa: Isa) -> None:
    inputs = make_inputs(16, S=9, T=9000, D=512, H=4, Hk=2, values="f16")
    visible = Window(5000, 9000 - 9)
    call = AttentionCall.of(inputs.q, inputs.k, inputs.v, visible=visible, kv_len=9000).rounded().check()
    split = native.run_partials(isa, call)
    assert split.first == 0
    parts = [partials.Partials(*part) for part in zip(*split.partials, strict=True)]
    assert len(parts) == 3
    exponential = partials.Exponential.of(512, call.scale)
    out, lse = partials.finish(partials.merge(parts, exponential), exponential)
    expected, expected_lse = attend_with_lse(isa, inputs.q, inputs.k, inputs.v, visible, kv_len=9000)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)


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


def test_strided_operands_and_capacity(isa: Isa) -> None:
    inputs = make_inputs(19, B=2, S=S, T=T, D=256, H=4, Hk=2, values="codes8")
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

    norms = scattered(coded.norms.repeat(1, 1, 1, 2))[..., ::2]
    values = CodedValues(scattered(coded.codes), norms, coded.codebook, coded.sf)
    out = attend(isa, scattered(inputs.q), scattered(inputs.k), values, Causal(T - S), kv_len=T)
    assert_same_bits(out, expected)


def test_avx2_and_avx512_have_the_same_bits() -> None:
    by_name = {isa.name: isa for isa in native.isas() if isa.missing is None}
    if not {"avx2", "avx512"} <= by_name.keys():
        pytest.skip("needs a CPU with AVX-512")
    for head_dim, form in ((256, "f16"), (512, "codes8"), (64, "bf16")):
        inputs = make_inputs(20, S=S, T=T, D=head_dim, H=6, Hk=2, values=form)
        results = [
            attend(by_name[name], inputs.q, inputs.k, inputs.v, Causal(T - S), kv_len=T, softcap=5.0)
            for name in ("avx2", "avx512")
        ]
        assert_same_bits(*results)


def test_scores_beyond_f16_and_long_caches_stay_accurate(isa: Isa) -> None:
    inputs = make_inputs(21, S=4, T=9000, D=512, H=4, Hk=2, values="f32", spread=1e4)
    inputs.q.mul_(16)
    inputs.k.mul_(16)
    assert_matches(isa, inputs, Causal(9000 - 4), scale=1 / (256 * math.sqrt(512)))
