"""Run a function on several processes that form a group, and bring back what became of each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["Outcome", "run_ranks"]


class Outcome(NamedTuple):
    """What a rank returned, or what it raised and the traceback of that; all ``None``: it was killed."""

    value: Any = None
    error: BaseException | None = None
    traceback: str | None = None


def run_ranks(
    ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any, seconds: float = 100
) -> list[Outcome]:
    """``function(*arguments)`` in every rank's process, by rank; ``seconds`` is the group's timeout, and who
    still runs half a minute after it is killed.
    """
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, ranks, str(folder), function, arguments, seconds))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    last = time.monotonic() + seconds + 30
    for process in processes:
        process.join(max(1.0, last - time.monotonic()))
        process.kill()
        process.join()
    found = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [Outcome(*torch.load(path, weights_only=False)) if path.exists() else Outcome() for path in found]


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    seconds: float,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    try:
        outcome = Outcome(function(*arguments))
    except Exception as error:
        outcome = Outcome(None, error, traceback.format_exc())
    torch.save(tuple(outcome), f"{folder}/{rank}.pt")
    if outcome.error is None:
        dist.destroy_process_group()
