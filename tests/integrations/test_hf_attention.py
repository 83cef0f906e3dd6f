"""The attention function alone: its arguments mean what they mean in Transformers, or are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import warmattn
from warmattn import External, InvalidInput, Unsupported, reference
from warmattn.integrations.capture import CapturedLayer, capture, load_demo_model, load_demo_text
from warmattn.integrations.transformers.attention import attend
from warmattn.integrations.transformers.cache import WarmLayer
from warmattn.integrations.transformers.cached import CachedKeys, CachedValues
from warmattn.integrations.transformers.masks import PositionMask
from warmattn.testing import assert_accurate, assert_same_bits, make_inputs, relative_error
from warmattn.visibility import Causal, Full, Visibility, Window

FORMS = ("f32", "f16", "codes5", "codes6", "codes8")
S, T, D = 7, 40, 64


def layer(is_causal: bool | None = None) -> torch.nn.Module:
    module: Any = torch.nn.Module()
    if is_causal is not None:
        module.is_causal = is_causal
    return module


def operands(seed: int, dtype: torch.dtype = torch.float32, D: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[2, 4, S, D]`` as a model hands it over, transposed; k and v ``[2, 2, T, D]``. Scores of a standard
    deviation of 2, at the default scale.
    """
    inputs = make_inputs(seed, B=2, H=4, Hk=2, S=S, T=T, D=D, C=T)
    assert isinstance(inputs.v, Tensor)
    q = (inputs.q.float() * 2).transpose(1, 2).contiguous().transpose(1, 2)
    return q.to(dtype), inputs.k.to(dtype), inputs.v.to(dtype)


def oracle(q: Tensor, k: Tensor, v: Tensor, visible: Visibility, **arguments: Any) -> Tensor:
    """float64 ``[B, S, H, D]``."""
    return reference.attention(q.half(), k.half(), v, visible=visible, **arguments)[0].transpose(1, 2)


@pytest.mark.parametrize(
    ("arguments", "visible", "same"),
    [
        pytest.param({}, Causal(T - S), {}, id="causal"),
        pytest.param({"scaling": 1 / 16}, Causal(T - S), {"scale": 1 / 16}, id="scaling"),
        pytest.param({"sliding_window": 5}, Window(5, T - S), {}, id="window"),
        pytest.param({"softcap": 1.5}, Causal(T - S), {"softcap": 1.5}, id="softcap"),
        pytest.param({"softcap": None, "position_ids": torch.arange(S)}, Causal(T - S), {}, id="harmless"),
        pytest.param({"is_causal": False}, Full(), {}, id="full"),
    ],
)
def test_arguments_mean_what_they_mean_in_transformers(
    seed: int, arguments: dict[str, Any], visible: Visibility, same: dict[str, Any]
):
    q, k, v = operands(seed)
    out, weights = attend(layer(), q, k, v, None, **arguments)
    assert weights is None
    assert (out.shape, out.dtype) == ((2, S, 4, D), q.dtype)
    assert out.is_contiguous()
    assert_accurate(out, oracle(q, k, v, visible, **same), keys=T)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_layer_says_whether_it_is_causal(seed: int, is_causal: bool):
    q, k, v = operands(seed)
    visible = Causal(T - S) if is_causal else Full()
    assert_accurate(attend(layer(is_causal), q, k, v, None)[0], oracle(q, k, v, visible), keys=T)
    out = attend(layer(not is_causal), q, k, v, None, is_causal=is_causal)[0]
    assert_accurate(out, oracle(q, k, v, visible), keys=T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_taken_as_it_is(seed: int, dtype: torch.dtype):
    q, k, v = operands(seed, dtype)
    out = attend(layer(), q, k, v, None)[0]
    exact = warmattn.attention(q, k, v, visible=Causal(T - S))
    assert out.dtype == dtype
    assert torch.equal(out, exact.transpose(1, 2).to(dtype))


def test_b11_window_counts_the_row_itself():
    v = torch.arange(12.0)[:, None].repeat(1, 1, 1, D)
    q, k = torch.zeros(1, 1, 4, D), torch.randn(1, 1, 12, D)
    out = attend(layer(), q, k, v, None, sliding_window=3)[0]
    assert out[0, :, 0, 0].tolist() == [7, 8, 9, 10]
    mask = PositionMask.of((1, 1, 4, 12), q_offset=8, window=3, kv_start=None, device="cpu")
    assert_same_bits(attend(layer(), q, k, v, mask)[0], out)


@pytest.mark.parametrize("window", [None, 9])
def test_position_mask_is_its_cells(seed: int, window: int | None):
    """Left padding too, and a sequence that is nothing but padding."""
    q, k, v = operands(seed)
    starts = torch.tensor([T, 35], dtype=torch.int32)
    mask = PositionMask.of((2, 1, S, T), q_offset=T - S, window=window, kv_start=starts, device="cpu")
    out = attend(layer(), q, k, v, mask, sliding_window=2)[0]
    assert_same_bits(out, attend(layer(), q, k, v, mask.elements())[0])
    assert not out[0].any()
    cells = mask.elements().expand(2, 4, S, T)
    assert_accurate(out[1], oracle(q, k, v, External(cells))[1], keys=T)


@pytest.mark.parametrize("shape", [(1, 1, S, T), (2, 1, S, T), (2, 4, S, T)])
@pytest.mark.parametrize("kind", ["bool", "finfo.min f32", "finfo.min bf16", "finfo.min f16", "-inf", "bias"])
def test_masks_of_the_user(seed: int, shape: tuple[int, ...], kind: str):
    q, k, v = operands(seed)
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    visible[..., 0] = True
    mask = External(visible)
    if kind == "bias":
        bias = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed)) / 4
        mask = External(bias.half())
        given = bias
    elif kind == "bool":
        given = visible
    else:
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}.get(kind[10:])
        least = -math.inf if dtype is None else torch.finfo(dtype).min
        given = torch.zeros(shape, dtype=dtype).masked_fill(~visible, least)
    # The window is in the mask already.
    out = attend(layer(), q, k, v, given, sliding_window=1)[0]
    assert_accurate(out, oracle(q, k, v, mask), keys=T)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, r"dropout.*eval\(\)"),
        ({"output_attentions": True}, "attention weights.*eager"),
        ({"position_bias": torch.zeros(1, 4, S, T)}, "'position_bias' changes the result"),
        ({"s_aux": torch.zeros(4)}, "'s_aux' changes the result"),
        ({"sinks": torch.zeros(4)}, "'sinks' changes the result"),
        ({"cu_seq_lens_q": torch.tensor([0, S])}, "'cu_seq_lens_q' is not known"),
        ({"block_indices": 3}, "'block_indices' is not known"),
    ],
)
def test_what_cannot_be_expressed_is_refused(seed: int, arguments: dict[str, Any], message: str):
    q, k, v = operands(seed)
    with pytest.raises(Unsupported, match=message):
        attend(layer(), q, k, v, None, **arguments)
    nothing: dict[str, Any] = {name: 0.0 if name == "dropout" else None for name in arguments}
    attend(layer(), q, k, v, None, **nothing)


def test_a_window_without_causality_needs_a_mask(seed: int):
    q, k, v = operands(seed)
    with pytest.raises(Unsupported, match="window that is not causal needs a mask"):
        attend(layer(), q, k, v, None, sliding_window=3, is_causal=False)


@pytest.mark.parametrize("D", [32, 80, 96, 192])
def test_other_head_dims_are_refused(D: int):
    rows = torch.zeros(1, 1, 2, D)
    with pytest.raises(Unsupported, match=f"head dim {D}.*64, 128, 256, 512"):
        attend(layer(), rows, rows, rows, None)


@pytest.mark.parametrize("name", ["Q", "K"])
def test_scores_past_the_range_of_float16_are_refused(seed: int, name: str):
    q, k, v = operands(seed)
    (q if name == "Q" else k)[0, 0, 3, 5] = 7e4
    with pytest.raises(Unsupported, match=f"{name} is past the range of torch.float16"):
        attend(layer(), q, k, v, None)
    out = attend(layer(), q.bfloat16(), k.bfloat16(), v, None)[0]
    assert out.isfinite().all()


def test_float_masks_that_float16_cannot_hold_are_refused(seed: int):
    q, k, v = operands(seed)
    with pytest.raises(Unsupported, match="float16 does not hold"):
        attend(layer(), q, k, v, torch.full((1, 1, S, T), -1000.3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_masks_of_ints_are_refused(seed: int, dtype: torch.dtype):
    """Zeros that mean "hidden" would hide nothing."""
    with pytest.raises(InvalidInput, match=f"mask: expected bool or a float dtype, got {dtype}"):
        attend(layer(), *operands(seed), torch.ones(1, 1, S, T, dtype=dtype).tril())


@pytest.mark.parametrize("shape", [(2, 1, S, T + 1), (2, 1, S + 1, T)])
def test_masks_of_another_shape_are_refused(seed: int, shape: tuple[int, int, int, int]):
    q, k, v = operands(seed)
    position = PositionMask.of(shape, q_offset=0, window=None, kv_start=None, device="cpu")
    for mask in (torch.ones(shape, dtype=torch.bool), torch.zeros(shape), position):
        with pytest.raises(InvalidInput, match="mask: expected"):
            attend(layer(), q, k, v, mask)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_b71_no_gradient_is_lost_in_silence(seed: int, name: str):
    q, k, v = operands(seed, D=256)
    trained = {"q": q, "k": k, "v": v}
    trained[name].requires_grad_()
    with pytest.raises(Unsupported, match=rf"{name} requires grad: forward only, use torch.no_grad\(\)"):
        attend(layer(), q, k, v, None)
    with torch.no_grad():
        assert attend(layer(), q, k, v, None)[0].isfinite().all()


# On what a trained model's layers attend with


@pytest.fixture(scope="module")
def captured() -> list[CapturedLayer]:
    return capture(load_demo_model(), load_demo_text()[2000:2300])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index", [0, 2], ids=["sliding 256", "full 512"])
def test_resumed_rows_are_the_cold_ones(captured: list[CapturedLayer], index: int, form: str):
    """Bit for bit, however the rows came into the cache; and no copy of K or V is made on the way."""
    operand = captured[index]
    q, k, v = operand.q.float(), operand.k.float(), operand.v
    rows = k.shape[2]
    arguments = {"scaling": operand.scale, "sliding_window": operand.window}
    bare, _ = attend(layer(), q, k, v, None, **arguments)
    _, coldly = cache_of(form, k, v, [rows], q, arguments)
    warm, warmly = cache_of(form, k, v, [150, 1, 1, 148], q, arguments)
    assert_same_bits(warmly, coldly)
    assert warm.kv is not None
    keys, values = warm.keys, warm.values
    assert isinstance(keys, CachedKeys)
    assert isinstance(values, CachedValues)
    assert_same_bits(attend(layer(), q, keys, values, None, **arguments)[0], coldly)
    if form == "f32":
        assert_same_bits(coldly, bare)
    bound = {"f32": 1e-7, "f16": 1e-3, "codes8": 0.02, "codes6": 0.06, "codes5": 0.1}[form]
    assert relative_error(coldly, bare) < bound


def cache_of(
    form: str, k: Tensor, v: Tensor, parts: list[int], q: Tensor, arguments: dict[str, Any]
) -> tuple[WarmLayer, Tensor]:
    """A layer filled part by part, and what its rows attended to as they came, ``[1, S, H, D]``."""
    cache = WarmLayer(320, form, torch.float16, is_sliding=False)
    outs = []
    for queries, keys, values in zip(q.split(parts, 2), k.split(parts, 2), v.split(parts, 2), strict=True):
        outs.append(attend(layer(), queries, *cache.update(keys, values), None, **arguments)[0])
    return cache, torch.cat(outs, 1)
