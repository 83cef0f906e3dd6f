"""A chat that reads no token twice, and takes a turn back.

    python examples/chat_resume.py [--model gemma3-270m]

The cache goes on where the last turn left it: a turn costs its own tokens, not the chat's. Cropping the cache
takes turns back, and what is said next is answered as if they had never been.

The model that ships with warmattn has read nothing but licenses, and chats like one.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

import warmattn
from warmattn.integrations.text_models import load_text_model

TURNS = (
    "Q: What may I do with a copy of the Program?\nA:",
    "\nQ: And if I change it, must I say so?\nA:",
    "\nQ: Who gives a warranty?\nA:",
)
SECOND_THOUGHT = "\nQ: May I sell it?\nA:"


def main(
    model: Annotated[str, typer.Option(help="demo, or gemma3-270m: the real one, an extra.")] = "demo",
    new: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 48,
) -> None:
    text_model = load_text_model(model)
    llm: Any = text_model.model
    warmattn.hf.register()
    llm.set_attn_implementation("warmattn")

    def empty_cache() -> warmattn.hf.WarmCache:
        return warmattn.hf.WarmCache(llm.config, max_length=1024, values="codes8")

    def reply(chat: list[int], text: str, cache: warmattn.hf.WarmCache) -> list[int]:
        """The chat with ``text`` and an answer behind it; only what the cache does not hold is computed."""
        chat = chat + text_model.encode(text.encode())
        print(f"\n[{cache.length} of {len(chat)} tokens are in the cache] {text.strip()}", end="")
        tokens = torch.tensor([chat])
        answer = llm.generate(
            tokens, attention_mask=torch.ones_like(tokens), cache=cache, max_new_tokens=new, do_sample=False
        )[0].tolist()
        print(text_model.decode(answer[len(chat) :]))
        return answer

    chat, cache = text_model.start, empty_cache()
    turns = [chat]
    for text in TURNS:
        chat = reply(chat, text, cache)
        turns.append(chat)

    print("\n--- Take the last two turns back ---")
    cache.crop(len(turns[1]) - cache.length)
    resumed = reply(turns[1], SECOND_THOUGHT, cache)

    print("\n--- The same from an empty cache ---")
    anew = reply(turns[1], SECOND_THOUGHT, empty_cache())
    print(f"\nThe two answers are {'the same' if resumed == anew else 'NOT the same'}.")


if __name__ == "__main__":
    typer.run(main)
