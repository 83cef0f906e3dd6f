"""Train warmattn's demo model: a byte-level language model of the Gemma 4 architecture.

    python scripts/train_demo_model.py --text /usr/share/common-licenses --out src/warmattn/demo_model

Real Gemma 4 weights are large and not ours to ship; the demo needs attention that is as real, over head dims
256 (sliding window) and 512 (global). Training stops by validation loss, not by time. The same seed, thread
count, PyTorch build and processor give the same weights.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

DEMO_MODEL = Path(__file__).parents[1] / "src/warmattn/demo_model"

CONTEXT = 256
"""Bytes per training sequence: twice the window, so that both kinds of layer learn to look far."""
BATCH = 4
STEPS = 400
"""Length of the learning rate's cosine; training fails if it gets here."""
WARMUP = 20
LEARNING_RATE = 5e-3
"""Of Muon, for the matrices; embedding and norms train with AdamW at `SMALL_RATE`."""
SMALL_RATE = 3e-3
WEIGHT_DECAY = 0.1
EVALUATE_EVERY = 25
LONGER_CONTEXTS = (1024, 8192)
"""For the card: longer than any training sequence, as in the demo."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes as int64 tensors: the first nine tenths of every file, and the last tenths."""

    training: Tensor
    validation: Tensor
    files: int


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    demo_text = torch.tensor(list((DEMO_MODEL / "text.txt").read_bytes()))
    corpus = read_corpus(arguments.text)
    unigram, bigram = entropies(corpus.validation)
    print(f"training {len(corpus.training)} bytes, validation {len(corpus.validation)} bytes")
    print(f"validation text: unigram entropy {unigram:.3f}, bigram {bigram:.3f} nats/byte", flush=True)

    model = build_model()
    start = time.process_time()
    steps = train(model, corpus, arguments.target)
    cpu_seconds = time.process_time() - start

    save(model, arguments.out)
    model = Gemma4ForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    losses = {context: loss_of(model, corpus.validation, context) for context in (CONTEXT, *LONGER_CONTEXTS)}
    text_loss = loss_of(model, demo_text, len(demo_text))
    print("after rounding to bfloat16:")
    for context, loss in losses.items():
        print(f"  validation, {context} bytes at a time: {loss:.3f}")
    print(f"  text.txt, read at once: {text_loss:.3f}")

    facts = {
        "sources": " ".join(map(str, arguments.text)),
        "files": corpus.files,
        "bytes": len(corpus.training) + len(corpus.validation),
        "parameters": model.num_parameters(),
        "unigram": unigram,
        "bigram": bigram,
        "losses": "\n".join(f"| validation text, {n} bytes at a time | {x:.3f} |" for n, x in losses.items()),
        "text_bigram": entropies(demo_text)[1],
        "text_loss": text_loss,
        "steps": steps,
        "cpu_seconds": cpu_seconds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: getattr(arguments, name) for name in ("target", "seed", "threads")},
    }
    template = Path(__file__).with_name("demo_model_card.md").read_text(encoding="utf-8")
    (arguments.out / "README.md").write_text(template.format_map(facts), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train warmattn's demo model.")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[Path("/usr/share/common-licenses")], help="files or folders"
    )
    parser.add_argument("--out", type=Path, default=DEMO_MODEL, help="folder to write to")
    parser.add_argument("--target", type=float, default=1.55, help="validation loss to stop at, nats/byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def read_corpus(paths: Sequence[Path]) -> Corpus:
    """Every file once, however many links lead to it, ordered by name."""
    found = (file for path in paths for file in (path.iterdir() if path.is_dir() else [path]))
    files = sorted({file.resolve() for file in found if file.is_file()}, key=lambda file: file.name)
    training, validation = bytearray(), bytearray()
    for file in files:
        content = file.read_bytes()
        cut = len(content) * 9 // 10
        training += content[:cut]
        validation += content[cut:]
    return Corpus(torch.tensor(list(training)), torch.tensor(list(validation)), len(files))


def entropies(text: Tensor) -> tuple[float, float]:
    """Unigram entropy H(x) and bigram entropy H(x | byte before) of the text itself, nats per byte."""

    def entropy(symbols: Tensor) -> float:
        p = torch.bincount(symbols).double() / len(symbols)
        return -float(torch.special.xlogy(p, p).sum())

    return entropy(text), entropy(text[:-1] * 256 + text[1:]) - entropy(text[:-1])


def build_model() -> Gemma4ForCausalLM:
    """A small Gemma 4 with random weights and all of its attention, but no per-layer embeddings, experts or
    shared KV layers.
    """
    model = Gemma4ForCausalLM(
        Gemma4TextConfig(
            vocab_size=256,
            vocab_size_per_layer_input=256,
            hidden_size=128,
            hidden_size_per_layer_input=0,
            intermediate_size=256,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            sliding_window=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=256,
            global_head_dim=512,  # pyright: ignore[reportCallIssue]
            max_position_embeddings=32768,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            attention: Any = layer.self_attn
            for norm in (attention.q_norm, attention.k_norm):
                # Gemma 4 does not scale its scores: with norm weights of 1 their deviation would start at
                # sqrt(D), with these it starts at 1.
                norm.weight.fill_(attention.head_dim**-0.25)
    return model


def train(model: Gemma4ForCausalLM, corpus: Corpus, target: float) -> int:
    """Train until the validation loss is at most ``target``; returns the number of steps.

    Raises:
        SystemExit: `STEPS` did not get there.
    """
    inner = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in inner}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    optimizers = [
        torch.optim.Muon(inner, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=SMALL_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_at) for optimizer in optimizers]
    start = time.perf_counter()
    for step, batch in enumerate(batches(corpus.training), start=1):
        loss = next_byte_loss(model, batch)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % EVALUATE_EVERY == 0:
            validation = loss_of(model, corpus.validation, CONTEXT)
            elapsed = time.perf_counter() - start
            print(
                f"step {step:4}  training {loss.item():.3f}  validation {validation:.3f}  {elapsed:.0f} s",
                flush=True,
            )
            if validation <= target:
                return step
    raise SystemExit(f"validation loss {target} not reached in {STEPS} steps")


def learning_rate_at(step: int) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    return min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


def batches(text: Tensor) -> Iterator[Tensor]:
    """`STEPS` times `BATCH` pieces of `CONTEXT` bytes from random places."""
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT + 1, (BATCH, 1))
        yield text[starts + torch.arange(CONTEXT)]


def next_byte_loss(model: Gemma4ForCausalLM, batch: Tensor) -> Tensor:
    """Mean cross entropy of every byte of ``batch`` ``[B, S]`` but each row's first, nats."""
    logits = model(input_ids=batch, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def loss_of(model: Gemma4ForCausalLM, text: Tensor, context: int) -> float:
    """`next_byte_loss` over a text cut into pieces of ``context`` bytes, a shorter rest left out."""
    pieces = text[: len(text) // context * context].view(-1, context)
    groups = pieces.split(max(1, 8192 // context))
    return sum(next_byte_loss(model, group).item() * len(group) for group in groups) / len(pieces)


def save(model: Gemma4ForCausalLM, folder: Path) -> None:
    """Write ``model.safetensors`` in bfloat16 and ``config.json``; ``model`` is rounded in place."""
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink()  # the defaults, in a file of their own


if __name__ == "__main__":
    main()
