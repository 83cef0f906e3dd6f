"""What goes wrong on one rank is known on all of them, soon, and by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, run_ranks
from torch import Tensor

from warmattn import Causal, External, InvalidInput, distributed
from warmattn.distributed.blocks import Rows
from warmattn.distributed.ring import _Neighbour
from warmattn.testing import make_inputs

T = 13000
CUTS = [0, 4096, 8192, T]


def operands(rank: int, rows: int = 3) -> tuple[Tensor, Tensor, Any]:
    x = make_inputs(rank, S=rows, T=CUTS[rank + 1] - CUTS[rank], D=64, H=2, Hk=1, values="f32")
    return make_inputs(9, S=rows, T=1, D=64, H=2, Hk=1).q, x.k, x.v


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "gap": ({"key_range": (4097, 8192)}, "without gaps"),
    "backwards": ({"key_range": (8192, 4096)}, "start <= end"),
    "more keys than rows": ({"key_range": (4096, 9192)}, "key_range"),
    "scale": ({"scale": 0.25}, "on every rank"),
    "softcap": ({"softcap": 2.0}, "on every rank"),
    "a cut inside a split": ({}, "multiple of 4096"),
    "row past all keys": ({"visible": Causal(T - 2)}, "q_offset"),
    "a mask with other keys": ({}, f"T = {T}"),
    "mode": ({"queries": "mirrored"}, "replicated"),
}
ALONE = ("backwards", "more keys than rows", "mode")
"""Faults that a rank sees by itself; the others learn that it refused."""


def call_with_a_fault(name: str) -> None:
    rank = dist.get_rank()
    keywords: dict[str, Any] = {"key_range": (CUTS[rank], CUTS[rank + 1]), "visible": Causal(T - 3)}
    if rank == 1:
        keywords |= FAULTS[name][0]
    if name == "a cut inside a split":
        keywords["key_range"] = [(0, 4000), (4000, 8096), (8096, T - 96)][rank]
    if name == "a mask with other keys":
        keywords["visible"] = External(torch.ones(3, T + 1, dtype=torch.bool))
    distributed.attention(*operands(rank), **keywords)


def all_faults() -> list[str]:
    """The message that each fault gave on this rank."""
    messages = []
    for name in FAULTS:
        try:
            call_with_a_fault(name)
        except (InvalidInput, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("none")
    return messages


def test_a_fault_on_one_rank_raises_on_every_rank(tmp_path: Path) -> None:
    outcomes = run_ranks(3, tmp_path, all_faults)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.traceback
        for name, message in zip(FAULTS, outcome.value, strict=True):
            if name in ALONE and rank != 1:
                assert message == "RuntimeError: distributed.attention: rank 1 refused its operands"
            else:
                assert message.startswith("InvalidInput")
                assert FAULTS[name][1] in message


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(*_: Any, **__: Any) -> Any:
    time.sleep(25)


def one_rank_fails(queries: str, where: str) -> float:
    """Seconds until this rank's call raised."""
    rank = dist.get_rank()
    if rank == 1:
        if where == "send":
            _Neighbour.send = die
        else:
            Rows.partials = die if where == "compute" else sleep
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"warmattn\.distributed gave up waiting for"):
        distributed.attention(
            *operands(rank, rows=3 if queries == "replicated" else 1),
            key_range=(CUTS[rank], CUTS[rank + 1]),
            visible=Causal(T - 3),
            queries=queries,
        )
    return time.monotonic() - begun


@pytest.mark.parametrize(
    ("queries", "where"), [("replicated", "compute"), ("sharded", "compute"), ("sharded", "send")]
)
def test_a_rank_that_dies_ends_the_others(queries: str, where: str, tmp_path: Path) -> None:
    first, second, third = run_ranks(3, tmp_path, one_rank_fails, queries, where, seconds=20)
    assert second == Outcome()
    for outcome in (first, third):
        assert outcome.error is None, outcome.traceback
        assert outcome.value < 40


def test_a_rank_that_hangs_ends_the_others(tmp_path: Path) -> None:
    first, _, third = run_ranks(3, tmp_path, one_rank_fails, "replicated", "nowhere", seconds=8)
    for outcome in (first, third):
        assert outcome.error is None, outcome.traceback
        assert outcome.value < 30
