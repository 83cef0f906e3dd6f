"""One long document, many questions: the document is read once, and every question goes on from there.

    python examples/long_document.py [--model gemma3-270m] [--tokens 3000]

A `PrefixCache` finds what a prompt has in common with earlier ones. The first question pays for the document,
the others for themselves alone; their answers are those of a run from the start. Both are timed and drawn.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import warmattn
from warmattn.integrations.capture import load_demo_text
from warmattn.integrations.text_models import load_text_model

QUESTIONS = (
    "Who may copy this?",
    "What is a cache?",
    "Is there a warranty?",
    "When is a row written?",
    "What must a resume equal?",
    "May I change it?",
)
ROOM = 256
"""Tokens that a cache holds beyond the document: a question and its answer."""
BLUE, ORANGE = "#0072B2", "#D55E00"


def answer(
    llm: Any, prefixes: warmattn.PrefixCache, document: list[int], question: list[int], new: int
) -> tuple[list[int], float]:
    """``new`` tokens, greedily, and the seconds to the first."""
    begun = time.perf_counter()
    prompt = document + question
    hit = prefixes.find(prompt[:-1])  # a model needs at least one token to go on from
    if hit is not None:
        cache = hit.cache
    else:
        cache = warmattn.hf.WarmCache(llm.config, max_length=len(document) + ROOM, values="codes8")
    first = generate(llm, prompt, cache, 1)
    seconds = time.perf_counter() - begun
    prefixes.insert(document, cache)  # of all that is in the cache, the document's rows
    return generate(llm, first, cache, new - 1)[len(prompt) :], seconds


def generate(llm: Any, ids: list[int], cache: Any, new: int) -> list[int]:
    """``ids`` and the next ``new`` tokens; only what the cache does not hold is computed."""
    tokens = torch.tensor([ids])
    mask = torch.ones_like(tokens)
    text = llm.generate(tokens, attention_mask=mask, cache=cache, max_new_tokens=new, do_sample=False)
    return text[0].tolist()


def main(
    model: Annotated[str, typer.Option(help="demo, or gemma3-270m: the real one, an extra.")] = "demo",
    tokens: Annotated[int, typer.Option(min=1, help="Of the document, at most.")] = 3000,
    new: Annotated[int, typer.Option(min=2, max=128, help="Tokens of an answer.")] = 24,
    out: Annotated[Path, typer.Option(help="The chart.")] = Path("long_document.png"),
) -> None:
    text_model = load_text_model(model)
    llm: Any = text_model.model
    warmattn.hf.register()
    llm.set_attn_implementation("warmattn")
    document = [*text_model.start, *text_model.encode(load_demo_text())][:tokens]

    nothing, prefixes = warmattn.PrefixCache(max_bytes=0), warmattn.PrefixCache(max_bytes=1 << 30)
    anew, resumed = [], []
    for text in QUESTIONS:
        question = text_model.encode(f"\n\nQ: {text}\nA:".encode())
        plain, seconds = answer(llm, nothing, document, question, new)
        anew.append(seconds)
        reused, seconds = answer(llm, prefixes, document, question, new)
        resumed.append(seconds)
        same = "the same answer" if reused == plain else "ANOTHER ANSWER"
        print(f"{text:28} read again {anew[-1]:6.3f} s, resumed {resumed[-1]:6.3f} s, {same}")
        print(f"    {text_model.decode(reused)!r}")
    draw(anew, resumed, f"A document of {len(document):,} tokens, {len(QUESTIONS)} questions", out)
    print(f"The chart is {out}.")


def draw(anew: list[float], resumed: list[float], title: str, out: Path) -> None:
    """Time to the first token of every question, in both ways."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    for offset, color, name, seconds in (
        (-0.2, BLUE, "document read again", anew),
        (0.2, ORANGE, "resumed from a PrefixCache", resumed),
    ):
        places = [number + offset for number in range(1, len(seconds) + 1)]
        label = f"{name}: {sum(seconds):.1f} s in all"
        bars = axes.bar(places, seconds, width=0.38, color=color, label=label)
        axes.bar_label(bars, fmt="{:.2f}", padding=2, fontsize=8)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("question")
    axes.set_ylabel("seconds to the first token")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2, fontsize=9)
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
