"""Small Transformers models whose attention matters, and exact ways to compare their runs.

Everything runs in float32. The reference is Transformers' own eager attention; `ROUNDED` is the same with Q
and K rounded to float16, as `warmattn.attention` takes them, so that no more than a float32 sum's error (and
what a rounding that flips makes of it, layer by layer) is left between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)
from transformers.masking_utils import eager_mask
from transformers.models.gemma4.modeling_gemma4 import eager_attention_forward

import warmattn
from warmattn.integrations.capture import load_demo_model

ROUNDED = "eager_float16_scores"
WINDOW = 12
"""Of the sliding layers: sequences here outgrow it."""
FORMS = ("f32", "f16", "codes5", "codes6", "codes8")

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _rounded(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **arguments: Any) -> Any:
    return eager_attention_forward(module, q.half().float(), k.half().float(), v, mask, **arguments)


AttentionInterface.register(ROUNDED, _rounded)
AttentionMaskInterface.register(ROUNDED, eager_mask)
warmattn.hf.register()


def gemma2() -> Gemma2ForCausalLM:
    """Softcap, and a window in every other layer; its scores reach far into the softcap's bend."""
    config = Gemma2Config(
        **_SIZES, num_hidden_layers=4, attn_logit_softcapping=3.0, query_pre_attn_scalar=256
    )
    return _peaked(Gemma2ForCausalLM, config, lambda name: 6.0 if "q_proj" in name or "k_proj" in name else 1)


def gemma3() -> Gemma3ForCausalLM:
    """A window in the first two layers of three."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**_SIZES, num_hidden_layers=3, layer_types=kinds, query_pre_attn_scalar=64)
    return _peaked(Gemma3ForCausalLM, config, lambda name: 1)


def gemma4() -> Gemma4ForCausalLM:
    """D = 256 and 512, Hk = 2 and 1, K and V from one projection, layers of both kinds that share them."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    extra: dict[str, Any] = {"global_head_dim": 512, "num_global_key_value_heads": 1}
    config = Gemma4TextConfig(
        **_SIZES,
        **extra,
        num_hidden_layers=6,
        layer_types=["sliding_attention", *kinds, "full_attention"],
        num_kv_shared_layers=2,
        attention_k_eq_v=True,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=32,  # PyTorch's gelu has other bits in rows of fewer numbers
    )
    return _peaked(Gemma4ForCausalLM, config, lambda name: 0.5 if "q_norm" in name else 1)


def demo() -> Gemma4ForCausalLM:
    """The trained model that ships with the package."""
    return load_demo_model()


MODELS: dict[str, Callable[[], Any]] = {"gemma2": gemma2, "gemma3": gemma3, "gemma4": gemma4, "demo": demo}


def _peaked(kind: Callable[[Any], Any], config: Any, factor: Callable[[str], float]) -> Any:
    """A random model whose scores have a standard deviation of a few units, so that every key counts."""
    torch.manual_seed(5)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            weight *= factor(name)
    return model


def tokens(B: int, S: int, vocabulary: int, seed: int = 1) -> Tensor:
    """int64 ``[B, S]``; token 0 is for padding."""
    return torch.randint(1, vocabulary, (B, S), generator=torch.Generator().manual_seed(seed))


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    previous = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@torch.no_grad()
def logits(model: Any, name: str, ids: Tensor, **arguments: Any) -> Tensor:
    """``[B, S, vocabulary]`` of one forward pass with the attention implementation ``name``."""
    with implementation(model, name):
        return model(ids, **arguments).logits
