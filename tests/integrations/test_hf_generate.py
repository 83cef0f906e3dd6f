"""``model.generate`` with warmattn gives the tokens of eager attention, in every way of generating.

The model is the trained one that ships with the package: its next bytes are rarely in doubt. The reference is
Transformers' eager attention, all in float32, Q and K not rounded, with Transformers' own cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import FORMS, demo, implementation
from torch import Tensor
from transformers import DynamicCache

from warmattn import InvalidInput
from warmattn.hf import WarmCache
from warmattn.integrations.capture import load_demo_text

PAD = 0
NEW = 16
LENGTH = 260
"""Of prompts: two windows of the model."""


@pytest.fixture(scope="module")
def model() -> Any:
    return demo()


def text(start: int, length: int = LENGTH) -> Tensor:
    """Bytes of the text that ships with the model, ``[1, length]``."""
    return torch.tensor([list(load_demo_text()[start : start + length])])


def warm(model: Any, max_length: int = 512, values: str = "f32") -> WarmCache:
    return WarmCache(model.config, max_length, values=values)


def generate(model: Any, name: str, ids: Tensor, **arguments: Any) -> Tensor:
    """``ids`` and what the model says next, with the attention implementation ``name``."""
    torch.manual_seed(11)
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **arguments}
    with implementation(model, name):
        return model.generate(ids, **given)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 5},
    "chunked prefill": {"prefill_chunk_size": 70},
    "repetition penalty": {"repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def eager(model: Any) -> Callable[[str], Tensor]:
    """What eager attention says, by way of generating."""
    return functools.cache(lambda way: generate(model, "eager", text(2000), **WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_generating(model: Any, eager: Callable[[str], Tensor], way: str):
    cache = warm(model)
    out = generate(model, "warmattn", text(2000), cache=cache, **WAYS[way])
    assert torch.equal(out, eager(way))
    assert cache.length == out.shape[1] - 1
    assert len(set(out[0, LENGTH:].tolist())) > 5, "it says something"


@pytest.mark.parametrize(
    ("way", "arguments"),
    [
        ("greedy", {"use_cache": False}),
        ("greedy", {"cache_implementation": "static"}),
        ("beams", {"cache_implementation": "static"}),
        ("prompt lookup", {"cache_implementation": "dynamic"}),
    ],
)
def test_without_a_warm_cache(
    model: Any, eager: Callable[[str], Tensor], way: str, arguments: dict[str, Any]
):
    out = generate(model, "warmattn", text(2000), **arguments, **WAYS[way])
    assert torch.equal(out, eager(way))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_values(model: Any, eager: Callable[[str], Tensor], form: str):
    """Cold and resumed alike; and stock attention says the same from the same cache. (Five bits are too few
    to say what it says of exact values.)
    """
    ids = text(2000)
    out = generate(model, "warmattn", ids, cache=warm(model, values=form))
    if form != "codes5":
        assert torch.equal(out, eager("greedy"))
    assert torch.equal(generate(model, "eager", ids, cache=warm(model, values=form)), out)
    cache = warm(model, values=form)
    generate(model, "warmattn", ids[:, :170], cache=cache, max_new_tokens=1)
    assert torch.equal(generate(model, "warmattn", ids, cache=cache), out)


def test_assisted(model: Any, eager: Callable[[str], Tensor]):
    """The assistant is the same model with its own cache, which is cropped as its tokens are refused."""
    assistant = demo()
    with implementation(assistant, "warmattn"):
        out = generate(model, "warmattn", text(2000), cache=warm(model), assistant_model=assistant)
    assert torch.equal(out, eager("greedy"))


@pytest.mark.parametrize("way", ["greedy", "beams", "sampling"])
def test_left_padded_batch(model: Any, way: str):
    starts = (61, 0)
    ids = text(2000).repeat(2, 1)
    mask = torch.ones_like(ids)
    for row, start in enumerate(starts):
        ids[row, :start], mask[row, :start] = PAD, 0
    arguments = {"attention_mask": mask, **WAYS[way]}
    expected = generate(model, "eager", ids, **arguments)
    out = generate(model, "warmattn", ids, cache=warm(model), **arguments)
    assert torch.equal(out, expected)
    if way == "greedy":
        for row, start in enumerate(starts):
            alone = generate(model, "warmattn", ids[row : row + 1, start:], cache=warm(model))
            assert torch.equal(alone[0], out[row, start:]), "padding has no part in it"


@pytest.mark.parametrize("removed", [1, 200, LENGTH])
def test_go_back_and_go_on_otherwise(model: Any, removed: int):
    """Past the window of 128 too, where Transformers' own caches cannot go back."""
    cache = warm(model)
    first = generate(model, "warmattn", text(2000), cache=cache)
    cache.crop(-removed)
    other = torch.cat((first[:, : cache.length], text(3000, 50)), 1)
    out = generate(model, "warmattn", other, cache=cache)
    assert torch.equal(out, generate(model, "eager", other))


def test_one_cache_over_three_turns(model: Any):
    """Each turn hands over all tokens so far; only the new ones are computed."""
    cache, stock = warm(model), DynamicCache(config=model.config)
    talk = talk_eager = text(2000, 90)
    computed = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _, given, __: computed.append(given[0].shape[1])
    )
    for turn in (3000, 4000, 5000):
        computed.clear()
        talk = generate(model, "warmattn", talk, cache=cache)
        assert computed[0] <= 91
        talk_eager = generate(model, "eager", talk_eager, cache=stock)
        assert torch.equal(talk, talk_eager)
        talk, talk_eager = (torch.cat((said, text(turn, 90)), 1) for said in (talk, talk_eager))
    hook.remove()


def test_a_prompt_cache_serves_many_questions(model: Any):
    """One document, several questions: each goes on from a clone."""
    document = text(2000)
    prompt = warm(model, values="codes8")
    generate(model, "warmattn", document, cache=prompt, max_new_tokens=1)
    for start in (3000, 4000):
        question = torch.cat((document, text(start, 30)), 1)
        out = generate(model, "warmattn", question, cache=prompt.clone())
        assert torch.equal(out, generate(model, "warmattn", question, cache=warm(model, values="codes8")))
    assert prompt.length == LENGTH


def test_the_old_spelling_of_the_cache_keyword(model: Any, eager: Callable[[str], Tensor]):
    cache = warm(model)
    with pytest.warns(FutureWarning, match="past_key_values"):
        out = generate(model, "warmattn", text(2000), past_key_values=cache)
    assert torch.equal(out, eager("greedy"))
    assert cache.length > LENGTH


def test_generation_past_max_length_is_refused(model: Any):
    with pytest.raises(InvalidInput, match=r"capacity \(270\)"):
        generate(model, "warmattn", text(2000), cache=warm(model, 270))
