"""Capturing real operands from a Transformers model, and the demo model they are taken from."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import cross_entropy

from warmattn import reference
from warmattn.cli.files import read_call
from warmattn.errors import InvalidInput, Unsupported
from warmattn.integrations.capture import (
    CapturedLayer,
    capture,
    load_demo_model,
    load_demo_text,
    save_capture,
)
from warmattn.testing import relative_error
from warmattn.visibility import Causal, Window

if TYPE_CHECKING:
    from transformers import Gemma4ForCausalLM

S = 384
"""Rows of the captured text: three windows."""
SLIDING, GLOBAL = (0, 1), 2
"""Layers of the demo model."""
WINDOW = 128

ROUNDING = 4e-4
"""Bound on the relative error of a layer's output from Q and K rounded to float16; measured, 1.8e-4."""


@pytest.fixture(scope="module")
def model() -> Gemma4ForCausalLM:
    return load_demo_model()


@pytest.fixture(scope="module")
def text() -> bytes:
    return load_demo_text()


@pytest.fixture(scope="module")
def layers(model: Gemma4ForCausalLM, text: bytes) -> list[CapturedLayer]:
    return capture(model, text[:S])


@pytest.fixture(scope="module")
def outputs(model: Gemma4ForCausalLM, text: bytes) -> dict[str, list[Tensor]]:
    """What the same text gives with each of Transformers' own implementations."""
    return {name: stock_outputs(model, text[:S], name) for name in ("eager", "sdpa")}


def attention_of(model: Gemma4ForCausalLM, layer: int) -> Any:
    """The layer's attention module, whose attributes PyTorch does not declare."""
    return model.model.layers[layer].self_attn


def oracle(layer: CapturedLayer) -> Tensor:
    """float64 ``[1, H, S, D]``."""
    return reference.attention(layer.q, layer.k, layer.v, visible=layer.visible, scale=layer.scale)[0]


@contextmanager
def attention_outputs(model: Gemma4ForCausalLM) -> Iterator[list[Tensor]]:
    """Inside, a forward pass appends what enters each layer's ``o_proj``: its attention output."""
    outputs: list[Tensor] = []
    heads = model.config.num_attention_heads

    def keep(_: torch.nn.Module, arguments: tuple[Tensor]) -> None:
        outputs.append(arguments[0].unflatten(-1, (heads, -1)).transpose(1, 2))

    hooks = [
        attention_of(model, layer).o_proj.register_forward_pre_hook(keep) for layer in (*SLIDING, GLOBAL)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def stock_outputs(model: Gemma4ForCausalLM, tokens: bytes, implementation: str = "sdpa") -> list[Tensor]:
    """Every layer's attention output by Transformers' own attention."""
    model.set_attn_implementation(implementation)
    with attention_outputs(model) as outputs:
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    model.set_attn_implementation("sdpa")
    return outputs


# The demo model


def test_demo_text_is_long_enough_for_the_demo(text: bytes):
    assert len(text) >= 8192
    assert text.isascii()


def test_demo_model_reads_its_text_far_better_than_bigrams(model: Gemma4ForCausalLM, text: bytes):
    """Bigrams counted on this very text give 2.3 nats a byte, random weights 5.5."""
    ids = torch.tensor([list(text[:4096])])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    losses = cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    assert losses.mean() < 2.1
    assert losses[-1024:].mean() < 2.1, "it does not work far past the 256 bytes of a training sequence"


def test_demo_model_is_small_and_loads_quietly(capfd: pytest.CaptureFixture[str]):
    model = load_demo_model()
    assert capfd.readouterr() == ("", "")
    assert not model.training
    assert model.dtype == torch.float32
    assert 1.8e6 < model.num_parameters() < 2.0e6


def test_demo_attention_is_peaked(layers: list[CapturedLayer]):
    """Even weights over a window of 128 would give 0.008."""
    for layer in layers:
        group = layer.q.shape[1] // layer.k.shape[1]
        scores = layer.q.double() @ layer.k.double().repeat_interleave(group, dim=1).mT * layer.scale
        seen = torch.ones(S, S, dtype=torch.bool).tril()
        if layer.window is not None:
            seen = seen.triu(1 - layer.window)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        largest = weights[0, :, WINDOW:].amax(-1).mean(-1)
        print(layer.layer, largest, scores.std())
        assert largest.max() > 0.3, f"layer {layer.layer}: largest weights {largest.tolist()}"


# What is captured


def test_captured_layers_are_the_models(layers: list[CapturedLayer], text: bytes):
    assert [layer.layer for layer in layers] == [*SLIDING, GLOBAL]
    assert [layer.head_dim for layer in layers] == [256, 256, 512]
    assert [layer.window for layer in layers] == [WINDOW, WINDOW, None]
    assert [layer.visible for layer in layers] == [Window(WINDOW, 0), Window(WINDOW, 0), Causal(0)]
    for layer in layers:
        D = layer.head_dim
        assert layer.scale == 1.0
        assert layer.model == "demo_model"
        assert (layer.q.shape, layer.q.dtype) == ((1, 4, S, D), torch.float16)
        assert (layer.k.shape, layer.k.dtype) == ((1, 2, S, D), torch.float16)
        assert (layer.v.shape, layer.v.dtype) == ((1, 2, S, D), torch.float32)
        assert all(rows.is_contiguous() and not rows.requires_grad for rows in (layer.q, layer.k, layer.v))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_over_the_captured_operands_is_what_the_model_computed(
    layers: list[CapturedLayer], outputs: dict[str, list[Tensor]], implementation: str
):
    for layer, output in zip(layers, outputs[implementation], strict=True):
        error = relative_error(oracle(layer), output)
        print(layer.layer, error)
        assert error < ROUNDING, f"layer {layer.layer}"


@pytest.mark.parametrize(
    ("index", "change"),
    [
        pytest.param(index, change, id=f"{name}-layer{index}")
        for name, change, indices in (
            ("scale", lambda layer: replace(layer, scale=0.99), (*SLIDING, GLOBAL)),
            ("kv heads swapped", lambda layer: replace(layer, k=layer.k.flip(1)), (*SLIDING, GLOBAL)),
            ("a wider window", lambda layer: replace(layer, window=WINDOW + 1), SLIDING),
            ("a narrower window", lambda layer: replace(layer, window=WINDOW - 1), SLIDING),
            ("causal for window", lambda layer: replace(layer, window=None), SLIDING),
            ("window for causal", lambda layer: replace(layer, window=S // 2), (GLOBAL,)),
        )
        for index in indices
    ],
)
def test_that_comparison_would_notice(
    layers: list[CapturedLayer],
    outputs: dict[str, list[Tensor]],
    index: int,
    change: Callable[[CapturedLayer], CapturedLayer],
):
    error = relative_error(oracle(change(layers[index])), outputs["sdpa"][index])
    print(error)
    assert error > 4 * ROUNDING


def test_the_window_counts_the_row_itself(model: Gemma4ForCausalLM, text: bytes):
    """The model's first layer, at position p, sees key p − W + 1 and not p − W: what `Window` says."""
    p = 2 * WINDOW
    rows = {}
    for changed in (None, p - WINDOW, p - WINDOW + 1):
        tokens = bytearray(text[: p + 1])
        if changed is not None:
            tokens[changed] ^= 1
        layer = capture(model, tokens, [0])[0]
        rows[changed] = (stock_outputs(model, bytes(tokens))[0][0, :, p], oracle(layer)[0, :, p])
    for unchanged, outside, inside in zip(*rows.values(), strict=True):
        assert torch.equal(outside, unchanged)
        assert not torch.equal(inside, unchanged)


def test_layers_are_chosen_by_index(model: Gemma4ForCausalLM, layers: list[CapturedLayer], text: bytes):
    chosen = capture(model, torch.tensor(list(text[:S])), [GLOBAL, 0])
    assert [layer.layer for layer in chosen] == [0, GLOBAL]
    for layer in chosen:
        for name in ("q", "k", "v"):
            assert torch.equal(getattr(layer, name), getattr(layers[layer.layer], name))


def test_one_token_is_a_text(model: Gemma4ForCausalLM):
    assert [layer.q.shape[2] for layer in capture(model, b"G")] == [1, 1, 1]


# The model is left as it was


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementation_is_put_back(model: Gemma4ForCausalLM, text: bytes, implementation: str):
    ids = torch.tensor([list(text[:64])])
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        capture(model, text[:64])
        after = model(input_ids=ids, use_cache=False).logits
    assert model.config._attn_implementation == implementation
    assert torch.equal(before, after)
    model.set_attn_implementation("sdpa")


def test_attention_implementation_is_put_back_after_an_error(model: Gemma4ForCausalLM, text: bytes):
    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="in the middle"):
            capture(model, text[:8])
    finally:
        hook.remove()
    assert model.config._attn_implementation == "sdpa"
    assert len(capture(model, text[:8])) == 3


# The file


@pytest.mark.parametrize("index", [*SLIDING, GLOBAL])
def test_saved_file_is_a_call_file(layers: list[CapturedLayer], tmp_path: Path, index: int):
    layer, path = layers[index], tmp_path / "layer.safetensors"
    save_capture(path, layer)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    expected = {
        "format": "warmattn-attention",
        "version": "1",
        "visible": "causal" if index == GLOBAL else "window",
        "q_offset": "0",
        "kv_len": str(S),
        "scale": "1.0",
        "layer": str(index),
        "model": "demo_model",
    }
    assert metadata == expected | ({} if index == GLOBAL else {"window": str(WINDOW)})

    call = read_call(path)
    for read, kept in ((call.q, layer.q), (call.k, layer.k), (call.v, layer.v)):
        assert isinstance(read, Tensor)
        assert read.dtype == kept.dtype
        assert torch.equal(read, kept)
    assert (call.visible, call.kv_len, call.scale) == (layer.visible, S, layer.scale)


# Refusals


@pytest.mark.parametrize("layers", [[3], [-1], [0, 7]])
def test_unknown_layer_is_refused(model: Gemma4ForCausalLM, layers: list[int]):
    with pytest.raises(InvalidInput, match=r"capture: layers: expected indices in \[0, 3\), got \["):
        capture(model, b"text", layers)


@pytest.mark.parametrize(
    ("token_ids", "got"),
    [
        (b"", r"torch.float32 \[0\]"),
        ([0.5], r"torch.float32 \[1\]"),
        (torch.zeros(1, 4, dtype=torch.int64), r"torch.int64 \[1, 4\]"),
        ([0, 256], r"0 \.\.\. 256"),
        ([-1, 3], r"-1 \.\.\. 3"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(model: Gemma4ForCausalLM, token_ids: Any, got: str):
    with pytest.raises(InvalidInput, match=rf"capture: token_ids: expected .*\[0, 256\).*, got {got}$"):
        capture(model, token_ids)


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch, model: Gemma4ForCausalLM):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (load_demo_model, lambda: capture(model, b"text")):
        with pytest.raises(Unsupported, match=r'pip install "warmattn\[hf\]"'):
            call()


def with_softcap(model: Gemma4ForCausalLM) -> None:
    def add(_: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return arguments, {**keywords, "softcap": 50.0}

    attention_of(model, 1).register_forward_pre_hook(add, with_kwargs=True)


def with_dropout(model: Gemma4ForCausalLM) -> None:
    model.train()
    attention_of(model, 1).attention_dropout = 0.5


def with_bidirectional_layers(model: Gemma4ForCausalLM) -> None:
    model.config.is_causal = False
    for layer in (*SLIDING, GLOBAL):
        attention_of(model, layer).is_causal = False


def with_window_unlike_its_mask(model: Gemma4ForCausalLM) -> None:
    attention_of(model, 1).sliding_window = WINDOW - 1


def with_huge_keys(model: Gemma4ForCausalLM) -> None:
    attention_of(model, 1).k_norm.weight.data.fill_(1e5)


def with_attention_of_its_own(model: Gemma4ForCausalLM) -> None:
    attention_of(model, 1).config = copy.deepcopy(model.config)


@pytest.mark.parametrize(
    ("change", "rows", "message"),
    [
        (with_softcap, S, "layer 1 attends with softcap"),
        (with_dropout, S, r"layer 1 attends with dropout: call model.eval\(\) first"),
        (with_bidirectional_layers, 8, "the model's mask for layer 0 is not the window of 128 one"),
        (with_bidirectional_layers, S, "the model's mask for layer 0 is not the window of 128 one"),
        (with_window_unlike_its_mask, S, "the model's mask for layer 1 is not the window of 127 one"),
        (with_huge_keys, S, "K of layer 1 is past the range of float16"),
        (with_attention_of_its_own, S, r"layers \[1\] do not go through AttentionInterface"),
    ],
)
def test_attention_that_a_file_cannot_say_is_refused(
    text: bytes, change: Callable[[Gemma4ForCausalLM], None], rows: int, message: str
):
    model = load_demo_model()
    change(model)
    with pytest.raises(Unsupported, match=f"capture: {message}"):
        capture(model, text[:rows])
    assert model.config._attn_implementation == "sdpa"
