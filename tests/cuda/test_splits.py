"""Warm equals cold where the two are cut differently: long prompts on a GPU.

A cold prefill has programs enough to fill the device, and each then walks over all keys of its rows; a chunk
has few, and its keys are split among programs. At 4096 rows one head dim's prompt has two splits, at 20,000
up to ten; a chunk's splits are those of the keys so far.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from warmattn import Causal, Window, attention, explain
from warmattn.testing import VALUE_FORMS, Inputs, assert_same_bits, make_inputs
from warmattn.visibility import Visibility

LENGTHS = (4096, 20_000)
CHUNKS = (1, 7, 64, 512)
CALLS = 400
"""Chunk sizes that need more calls are tried where splits meet and at the end."""

KINDS: dict[str, Callable[[int], Visibility]] = {
    "causal": Causal,
    "window": lambda q_offset: Window(5000, q_offset),
}

Result = tuple[Tensor, Tensor]


def rows_of(inputs: Inputs, start: int, stop: int, visible: Callable[[int], Visibility]) -> Result:
    """Rows ``[start, stop)`` of the prompt over the keys up to the last of them."""
    q = inputs.q[:, :, start:stop]
    return attention(q, inputs.k, inputs.v, visible=visible(start), kv_len=stop, return_lse=True)


def same_bits(actual: Result, expected: Result) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


def starts(length: int, chunk: int, split: int) -> list[int]:
    """Of the chunks to compare."""
    every = range(0, length, chunk)
    if len(every) <= CALLS:
        return list(every)
    return [start for start in every if (start + chunk + 3) % split < chunk + 6 or start + 20 > length]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("D", [256, 512])
def test_chunks_have_the_bits_of_the_cold_prefill(
    seed: int, device: torch.device, D: int, values: str, kind: str
) -> None:
    visible, longest = KINDS[kind], max(LENGTHS)
    inputs = make_inputs(seed, device=device, S=longest, T=longest, D=D, H=2, Hk=1, values=values)
    cold = rows_of(inputs, 0, longest, visible)
    plan = explain(inputs.q, inputs.k, inputs.v, visible=visible(0), kv_len=longest)
    assert plan.splits >= 2
    for length in LENGTHS:
        same_bits(rows_of(inputs, 0, length, visible), (cold[0][:, :, :length], cold[1][:, :, :length]))
    for chunk in CHUNKS:
        for start in starts(longest, chunk, plan.tiling.split):
            stop = min(start + chunk, longest)
            part = cold[0][:, :, start:stop], cold[1][:, :, start:stop]
            same_bits(rows_of(inputs, start, stop, visible), part)
