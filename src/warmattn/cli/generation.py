"""What ``warmattn demo`` lets the model write: cold, and resumed from a cache that was cropped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import warmattn
from warmattn.cli.console import duration, facts, table
from warmattn.integrations.linears import linears_by_row
from warmattn.integrations.text_models import TextModel

__all__ = ["Generation", "generations", "legend_of", "table_of"]

PROMPT, NEW = 768, 32
"""Tokens of the prompt, at most, and tokens to write."""
SHORT_PROMPT, SHORT_NEW = 160, 16
"""The same where linear layers compute row by row: slow, but longer than the demo model's window."""
KEPT = 0.75
"""Part of the prompt that a warm run finds in its cache."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What came out for one V form.

    Attributes:
        values: form of V in the cache.
        prompt: tokens of the prompt; the cache of the warm run was cropped back to ``kept`` of them.
        kept: see prompt.
        tokens: written cold.
        text: of these tokens.
        same_text: whether the warm run wrote the same ones.
        seconds_cold, seconds_warm: to the first token.
        logits: scores of next tokens that were compared, with linear layers that compute row by row.
        differing: of these, those whose bits differ between warm and cold.
    """

    values: str
    prompt: int
    kept: int
    tokens: int
    text: str
    same_text: bool
    seconds_cold: float
    seconds_warm: float
    logits: int
    differing: int

    @property
    def bits_equal(self) -> bool:
        return self.differing == 0


def generations(text_model: TextModel, ids: list[int], forms: tuple[str, ...]) -> list[Generation]:
    """Let the model go on from ``ids``, for every form of V."""
    model: Any = text_model.model
    warmattn.hf.register()
    model.set_attn_implementation("warmattn")
    prompt = torch.tensor(ids[:PROMPT])
    with linears_by_row(model):
        exact = [_cold_and_warm(model, prompt[:SHORT_PROMPT], SHORT_NEW, form) for form in forms]
    rows = []
    for form, (exact_cold, exact_warm) in zip(forms, exact, strict=True):
        cold, warm = _cold_and_warm(model, prompt, NEW, form)
        rows.append(
            Generation(
                values=form,
                prompt=len(prompt),
                kept=_kept(prompt),
                tokens=len(cold.ids),
                text=text_model.decode(cold.ids.tolist()),
                same_text=torch.equal(cold.ids, warm.ids),
                seconds_cold=cold.seconds_to_first,
                seconds_warm=warm.seconds_to_first,
                logits=exact_cold.logits.numel(),
                differing=_differing(exact_cold.logits, exact_warm.logits),
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one run of ``generate`` wrote.

    Attributes:
        ids: int64 ``[n]``, the new tokens.
        logits: float32 ``[n, vocabulary]``.
        seconds_to_first: from the beginning to the first new token.
    """

    ids: Tensor
    logits: Tensor
    seconds_to_first: float


class _FirstToken:
    """A streamer that notes when ``generate`` has its first token; what it is given before is the prompt."""

    def __init__(self) -> None:
        self.begun, self.times = time.perf_counter(), list[float]()

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...

    @property
    def seconds(self) -> float:
        return self.times[1] - self.begun


def _cold_and_warm(model: Any, prompt: Tensor, new: int, form: str) -> tuple[_Answer, _Answer]:
    """The warm run goes on from the cold one's cache, cropped back to the first `KEPT` of the prompt."""
    cache = warmattn.hf.WarmCache(model.config, len(prompt) + new, values=form)
    cold = _answer(model, prompt, new, cache)
    cache.crop(_kept(prompt) - cache.length)
    return cold, _answer(model, prompt, new, cache)


def _kept(prompt: Tensor) -> int:
    return int(KEPT * len(prompt))


def _answer(model: Any, prompt: Tensor, new: int, cache: Any) -> _Answer:
    """Greedily; the tokens that the cache holds are not computed again."""
    clock = _FirstToken()
    answer = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        cache=cache,
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        streamer=clock,
    )
    return _Answer(answer.sequences[0, len(prompt) :], torch.cat(answer.logits), clock.seconds)


def _differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ; all, where not even the numbers of tokens are the same."""
    if a.shape != b.shape:
        return max(a.numel(), b.numel())
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


def table_of(rows: list[Generation]) -> Table:
    """A row for each V form."""
    first = rows[0]
    grid = table(f"The model's own text: {first.prompt:,} tokens read, {first.tokens} written")
    grid.add_column("V")
    for heading in ("cold", "warm"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("text")
    grid.add_column("logits", justify="right")
    for row in rows:
        grid.add_row(
            row.values,
            duration(row.seconds_cold),
            duration(row.seconds_warm),
            "same" if row.same_text else "another",
            f"{row.differing:,} of {row.logits:,} differ",
        )
    return grid


def legend_of(rows: list[Generation]) -> Table:
    """What the columns are, and what the model wrote."""
    first = rows[0]
    return facts(
        {
            "cold, warm": "time to the first token: from nothing, and from a cache that was cropped to "
            f"{first.kept:,} tokens",
            "text": "of the warm run, against the cold one's",
            "logits": "whose bits differ, where the linear layers too compute row by row",
            "written": repr(first.text),
        }
    )
