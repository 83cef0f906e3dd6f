"""The two models that the demo, the examples and the benchmarks run: one that ships, and one that is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmattn.errors import InvalidInput
from warmattn.integrations.capture import load_demo_model
from warmattn.integrations.gemma3_270m import load_gemma3_270m

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MODELS", "TextModel", "load_text_model"]


@dataclass(frozen=True, slots=True)
class TextModel:
    """A causal language model with its tokens.

    Attributes:
        model: in float32 on the CPU.
        start: tokens that every text begins with.
        encode: tokens of a text in UTF-8; of anything else too, if need be with replacements.
        decode: the text of tokens.
    """

    model: PreTrainedModel
    start: list[int]
    encode: Callable[[bytes], list[int]]
    decode: Callable[[Sequence[int]], str]


def load_text_model(model: str = "demo") -> TextModel:
    """``"demo"``, the byte-level model that ships with the package, or ``"gemma3-270m"``.

    Raises:
        InvalidInput: another name.
        Unsupported: a package that the model needs is not installed; the message says which.
    """
    if model not in MODELS:
        raise InvalidInput("model", expected=f"one of {', '.join(MODELS)}", got=model, op="load_text_model")
    return MODELS[model]()


def _demo() -> TextModel:
    return TextModel(
        load_demo_model(),
        start=[],
        encode=list,
        decode=lambda ids: bytes(ids).decode(errors="replace"),
    )


def _gemma3_270m() -> TextModel:
    model, tokenizer = load_gemma3_270m()
    return TextModel(
        model,
        start=[tokenizer.bos_token_id],
        encode=lambda text: tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )


MODELS: dict[str, Callable[[], TextModel]] = {"demo": _demo, "gemma3-270m": _gemma3_270m}
