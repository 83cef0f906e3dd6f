"""Whole models with warmattn's attention: their logits are eager attention's, and a resumed run has the bits
of the cold one.

Bits are compared with every `torch.nn.Linear` computing row by row, since a matrix product's bits depend on
how many rows it has; logits of the two attentions with Q and K rounded to float16 in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import FORMS, MODELS, ROUNDED, WINDOW, demo, gemma2, gemma3, gemma4, logits, tokens
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    StaticCache,
)

from warmattn import Unsupported
from warmattn.hf import WarmCache, register
from warmattn.integrations.linears import linears_by_row
from warmattn.integrations.transformers import masks
from warmattn.integrations.transformers.masks import PositionMask
from warmattn.testing import assert_same_bits, relative_error

S = 3 * WINDOW + 4
PARTS = [[S], [WINDOW + 5, 1, 1, S - WINDOW - 7]]

TOLERANCE = {"gemma2": 5e-3, "gemma3": 2e-3, "gemma4": 2e-2, "demo": 3e-4}
"""Bounds on the relative error of logits against `ROUNDED`: what roundings that flip make of it in a peaked
model; measured 1.4e-3, 2.3e-4, 4.4e-3, 3.8e-5."""


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return MODELS[name]()


@pytest.fixture(scope="module")
def ids(model: Any) -> Tensor:
    """``[2, S]``, past the window of every model."""
    length = max(S, model.config.sliding_window + 20)
    return tokens(2, length, model.config.vocab_size)


@pytest.fixture(scope="module")
def reference(model: Any, ids: Tensor) -> Tensor:
    return logits(model, ROUNDED, ids, use_cache=False)


@pytest.fixture(scope="module")
def padding(ids: Tensor) -> Tensor:
    """The first sequence starts late."""
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return mask


def parts_of(ids: Tensor) -> list[int]:
    """A long first part, single tokens, and the rest."""
    return [ids.shape[1] - 17, 1, 1, 15]


def run(model: Any, ids: Tensor, parts: list[int], cache: Any, mask: Tensor | None = None) -> Tensor:
    """Logits of ``ids``, read part by part into ``cache``."""
    outs, end = [], 0
    for part in ids.split(parts, 1):
        end += part.shape[1]
        seen = None if mask is None else mask[:, :end]
        outs.append(logits(model, "warmattn", part, cache=cache, attention_mask=seen))
    return torch.cat(outs, 1)


CACHES: dict[str, Callable[[Any, int], Any]] = {
    "warm": lambda config, length: WarmCache(config, length, values="f32"),
    "dynamic": lambda config, length: DynamicCache(config=config),
    "dynamic, whole": lambda config, length: DynamicCache(),
    "static": lambda config, length: StaticCache(config=config, max_cache_len=length),
}


@pytest.mark.parametrize("kind", CACHES)
def test_logits_are_those_of_eager_attention(
    name: str, model: Any, ids: Tensor, reference: Tensor, kind: str
):
    for parts in ([ids.shape[1]], parts_of(ids)):
        out = run(model, ids, parts, CACHES[kind](model.config, ids.shape[1]))
        assert relative_error(out, reference) < TOLERANCE[name]


def test_logits_without_a_cache_are_those_of_eager_attention(
    name: str, model: Any, ids: Tensor, reference: Tensor
):
    out = logits(model, "warmattn", ids, use_cache=False)
    assert relative_error(out, reference) < TOLERANCE[name]


@pytest.mark.parametrize("kind", CACHES)
def test_left_padding_hides_the_padding(name: str, model: Any, ids: Tensor, padding: Tensor, kind: str):
    """And nothing else: what a sequence without padding gets, is the same without a mask."""
    expected = logits(model, ROUNDED, ids, use_cache=False, attention_mask=padding)
    for parts in ([ids.shape[1]], parts_of(ids)):
        out = run(model, ids, parts, CACHES[kind](model.config, ids.shape[1]), padding)
        assert relative_error(out[0, 7:], expected[0, 7:]) < TOLERANCE[name]
        assert relative_error(out[1], expected[1]) < TOLERANCE[name]


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_has_the_bits_of_the_cold_one(model: Any, ids: Tensor, form: str):
    with linears_by_row(model):
        cold, warm = (
            run(model, ids, parts, WarmCache(model.config, ids.shape[1], values=form))
            for parts in ([ids.shape[1]], parts_of(ids))
        )
    assert_same_bits(warm, cold)


def test_a_padded_run_has_the_bits_of_the_cold_one(model: Any, ids: Tensor, padding: Tensor):
    with linears_by_row(model):
        cold, warm = (
            run(model, ids, parts, WarmCache(model.config, ids.shape[1], values="codes8"), padding)
            for parts in ([ids.shape[1]], parts_of(ids))
        )
    assert_same_bits(warm[:, 7:].contiguous(), cold[:, 7:].contiguous())


@pytest.mark.parametrize("form", ["f32", "codes6"])
def test_a_run_that_goes_back_past_the_window_has_the_bits_of_the_cold_one(
    model: Any, ids: Tensor, form: str
):
    """To a length that a cache which keeps only its window could not go back to."""
    ids = ids[:1]
    kept = ids.shape[1] - 2 * min(WINDOW, 16)
    other = torch.cat((ids[:, :kept], ids[:, kept:].flip(1)), 1)
    with linears_by_row(model):
        cache = WarmCache(model.config, ids.shape[1], values=form)
        run(model, ids, [ids.shape[1]], cache)
        cache.crop(kept - ids.shape[1])
        again = run(model, other[:, kept:], [3, other.shape[1] - kept - 3], cache)
        cold = run(model, other, [ids.shape[1]], WarmCache(model.config, ids.shape[1], values=form))
    assert_same_bits(again, cold[:, kept:].contiguous())


def test_values_in_float32_have_the_bits_of_no_cache(model: Any, ids: Tensor):
    with linears_by_row(model):
        bare = logits(model, "warmattn", ids, use_cache=False)
        warm = run(model, ids, parts_of(ids), WarmCache(model.config, ids.shape[1], values="f32"))
    assert_same_bits(warm, bare)


@pytest.mark.parametrize("form", FORMS)
def test_other_attention_functions_read_the_same_cache(
    name: str, model: Any, ids: Tensor, reference: Tensor, form: str
):
    """Stock sdpa and eager get K and V decoded, and make of them what warmattn makes of the codes."""
    cache = WarmCache(model.config, ids.shape[1], values=form)
    head = ids.shape[1] - 9
    run(model, ids[:, :head], [head], cache)
    implementations = ["warmattn", ROUNDED] + ["sdpa"] * (name != "gemma2")  # which has a softcap
    outs = [logits(model, other, ids[:, head:], cache=cache.clone()) for other in implementations]
    for out in outs[1:]:
        assert relative_error(outs[0], out) < max(4 * TOLERANCE[name], 0.1 * form.startswith("codes"))
    if form == "f32":
        assert relative_error(outs[0], reference[:, head:]) < TOLERANCE[name]


# Masks


@pytest.fixture
def no_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever builds the cells of a mask fails."""

    def fail(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("cells of a mask were built")

    monkeypatch.setattr(masks, "sdpa_mask", fail)
    monkeypatch.setattr(PositionMask, "elements", fail)


@pytest.mark.usefixtures("no_cells")
@pytest.mark.parametrize("kind", CACHES)
def test_no_mask_is_built(model: Any, ids: Tensor, padding: Tensor, kind: str):
    """With and without left padding: cold, resumed, where the model keeps the last rows. (Of a static cache
    Transformers asks for the cells of a single token's row.)
    """
    n = ids.shape[1]
    for mask in (None, torch.ones_like(padding), padding):
        run(
            model,
            ids,
            [n - 17, 2, 15] if kind == "static" else parts_of(ids),
            CACHES[kind](model.config, n),
            mask,
        )
        logits(model, "warmattn", ids, use_cache=False, attention_mask=mask, logits_to_keep=3)


def test_last_rows_alone_have_the_bits_of_all(model: Any, ids: Tensor, padding: Tensor):
    """Gemma 4 computes only those in the layers that share K and V."""
    with linears_by_row(model):
        for mask in (None, padding):
            whole = logits(model, "warmattn", ids, use_cache=False, attention_mask=mask)
            last = logits(model, "warmattn", ids, use_cache=False, attention_mask=mask, logits_to_keep=5)
            assert_same_bits(last, whole[:, -5:].contiguous())


@pytest.mark.parametrize("kind", ["hole", "right padding", "float 4-D", "bool 4-D", "packed"])
def test_other_masks_are_those_of_eager_attention(name: str, model: Any, ids: Tensor, kind: str):
    ids = ids[:, : WINDOW - 1]  # a mask of the user's own has no window
    n = ids.shape[1]
    arguments: dict[str, Any] = {}
    mask = torch.ones_like(ids)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    causal[5:, 2] = False
    if kind == "hole":
        mask[0, 4] = 0
        arguments["attention_mask"] = mask
    elif kind == "right padding":
        mask[1, 8:] = 0
        arguments["attention_mask"] = mask
    elif kind == "packed":
        arguments["position_ids"] = torch.cat((torch.arange(5), torch.arange(n - 5)))[None]
    else:
        least = torch.finfo(torch.float32).min
        cells = torch.zeros(n, n).masked_fill(~causal, least)
        arguments["attention_mask"] = cells.expand(2, 1, n, n)
    expected = logits(model, ROUNDED, ids, use_cache=False, **arguments)
    if kind == "bool 4-D":
        arguments["attention_mask"] = causal.expand(2, 1, n, n)
    out = logits(model, "warmattn", ids, use_cache=False, **arguments)
    assert relative_error(out, expected) < TOLERANCE[name]
    plain = logits(model, "warmattn", ids, use_cache=False)
    assert relative_error(plain, expected) > 5 * TOLERANCE[name], "the mask matters"


# Other decoders


def test_b11_a_window_of_three():
    model = gemma3()
    model.config.sliding_window = 3
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        attention.sliding_window = None if attention.sliding_window is None else 3
    ids = tokens(1, 20, 64)
    expected = logits(model, ROUNDED, ids, use_cache=False)
    out = run(model, ids, [9, 1, 10], WarmCache(model.config, 20, values="f32"))
    assert relative_error(out, expected) < TOLERANCE["gemma3"]


def test_a_window_that_only_the_mask_tells():
    """Qwen 2 MoE hands no ``sliding_window`` to the attention function."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=2,
        num_experts_per_tok=1,
        use_sliding_window=True,
        sliding_window=5,
        initializer_range=0.06,
    )
    model = Qwen2MoeForCausalLM(config).eval()
    assert config.layer_types == ["sliding_attention", "full_attention"]
    ids = tokens(2, 20, 64)
    expected = logits(model, "eager", ids, use_cache=False)
    out = run(model, ids, [9, 1, 10], WarmCache(config, 20, values="f32"))
    assert relative_error(out, expected) < 1e-3


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_decoder_without_windows_in_half_precision(head_dim: int, dtype: torch.dtype):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        head_dim=head_dim,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=64,
        initializer_range=0.2,
    )
    model: Any = LlamaForCausalLM(config).eval()
    ids = tokens(2, 20, 64)
    exact = logits(model, "eager", ids, use_cache=False)
    model = model.to(dtype)
    stock = relative_error(logits(model, "sdpa", ids, use_cache=False), exact)
    for keys in ("f16",) if dtype == torch.float16 else ("f16", "bf16"):
        out = run(model, ids, [9, 1, 10], WarmCache(config, 20, values="f32", keys=keys))
        assert out.dtype == dtype
        assert relative_error(out, exact) < 1.5 * stock


@torch.no_grad()
def test_blocks_of_an_image_see_each_other():
    """Gemma 3 with a vision tower, whose head dim of 72 warmattn does not serve: only the decoder has it."""
    torch.manual_seed(0)
    text = gemma3().config.to_dict() | {"query_pre_attn_scalar": 16}
    vision = {
        "hidden_size": 72,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60)
    model: Any = Gemma3ForConditionalGeneration(config).eval()
    for weight in model.model.language_model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=weight.shape[-1] ** -0.5)
    ids = tokens(1, 30, 60)
    ids[:, 10:14] = 60
    image = {"pixel_values": torch.randn(1, 3, 28, 28)}
    model.set_attn_implementation({"text_config": ROUNDED})
    expected = model(ids, **image, token_type_ids=(ids == 60).long()).logits

    model.set_attn_implementation({"text_config": "warmattn"})
    cache = WarmCache(config, 30, values="f32")
    first = model(ids[:, :20], **image, token_type_ids=(ids[:, :20] == 60).long(), cache=cache).logits
    rest = model(ids[:, 20:], cache=cache).logits
    error = relative_error(torch.cat((first, rest), 1), expected)
    causal = model(ids, **image, token_type_ids=torch.zeros_like(ids)).logits
    assert error < relative_error(causal, expected) / 10, "the block matters"
    assert error < 5 * TOLERANCE["gemma3"]
    model.set_attn_implementation("warmattn")
    with pytest.raises(Unsupported, match="head dim 72"):
        model(ids, **image)


# What is refused


def test_b71_training_is_refused():
    model = gemma3().train()
    ids = tokens(1, 5, 64)
    model.set_attn_implementation("warmattn")
    cache = WarmCache(model.config, 8)
    for arguments in ({"use_cache": False}, {"cache": cache}):
        with pytest.raises(Unsupported, match=r"requires grad: forward only, use torch.no_grad\(\)"):
            model(ids, **arguments)
    assert cache.length == 0
    with torch.no_grad():
        trained = model(ids, use_cache=False).logits
        assert_same_bits(trained, model.eval()(ids, use_cache=False).logits)
    for frozen in model.parameters():
        frozen.requires_grad_(False)
    assert_same_bits(trained, model(ids, use_cache=False).logits)


@torch.no_grad()
def test_dropout_and_attention_weights_are_refused():
    model = gemma2()
    model.set_attn_implementation("warmattn")
    ids = tokens(1, 5, 64)
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        attention.attention_dropout = 0.1
    model(ids)
    with pytest.raises(Unsupported, match="dropout"):
        model.train()(ids)
    with pytest.raises(Unsupported, match="attention weights"):
        model.eval()(ids, output_attentions=True)


@torch.no_grad()
def test_other_head_dims_are_refused():
    config = LlamaConfig(
        hidden_size=96, num_attention_heads=2, num_hidden_layers=1, vocab_size=8, intermediate_size=8
    )
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("warmattn")
    with pytest.raises(Unsupported, match=r"head dim 48.*64, 128, 256, 512"):
        model(tokens(1, 3, 8))


@torch.no_grad()
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_cache_filled_in_one_mode_goes_on_in_another(mode: Any):
    model, ids = gemma4(), tokens(1, 9, 64)
    cache = WarmCache(model.config, 12, values="codes8")
    with mode():
        run(model, ids[:, :5], [5], cache)
    assert run(model, ids[:, 5:], [4], cache).isfinite().all()


@torch.no_grad()
def test_the_old_spelling_of_the_cache_keyword():
    model, ids = demo(), tokens(1, 9, 256)
    register()  # once more: it may be called often
    model.set_attn_implementation("warmattn")
    old, new = (WarmCache(model.config, 12) for _ in range(2))
    with pytest.warns(FutureWarning, match="past_key_values"):
        first = model(ids, past_key_values=old).logits
    assert_same_bits(first, model(ids, cache=new).logits)
    assert old.length == new.length == 9
