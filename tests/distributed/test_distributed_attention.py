"""Keys over 1 to 4 ranks: the bits of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

import warmattn
from warmattn import Causal, CodedValues, External, Full, Window, distributed, tile_map
from warmattn.testing import assert_same_bits, make_inputs
from warmattn.visibility import Visibility

SPLIT = 4096
RANGES = {
    1: [[0, 9000]],
    2: [[0, 4096, 9000], [0, 0, 9000], [0, 8192, 8200], [0, 300, 300]],
    3: [[0, 4096, 8192, 9000], [0, 8192, 8192, 9000], [0, 0, 4096, 8000]],
    4: [[0, 4096, 8192, 12288, 13000], [0, 0, 8192, 8192, 12289], [0, 4096, 4096, 4096, 4100]],
}
"""Where the ranks' keys begin and end: even, uneven, with ranks that have none."""


@dataclass
class Case:
    """One call of the whole group, and the same call of one process."""

    name: str
    cuts: list[int]
    rows: int
    values: str
    visible: Visibility
    D: int = 64
    keywords: dict[str, Any] | None = None


def cases(cuts: list[int], seed: int) -> Iterator[Case]:
    T = cuts[-1]
    generator = torch.Generator().manual_seed(seed)
    mask = torch.where(torch.rand(5, T, generator=generator) < 0.3, 0.0, -math.inf).half()
    mask[:, 4000:5000] = -math.inf
    for values in ("f16", "codes8"):
        yield Case("causal", cuts, 5, values, Causal(T - 5))
    yield Case("earlier rows", cuts, 7, "f32", Causal(T // 2))
    yield Case("window", cuts, 9, "f16", Window(100, T - 9))
    yield Case("wide window", cuts, 3, "codes5", Window(5000, T - 3))
    yield Case("full", cuts, 2, "bf16", Full())
    yield Case("one row", cuts, 1, "f32", Causal(T - 1), D=512)
    yield Case("mask", cuts, 5, "f16", External(mask))
    yield Case("mask and map", cuts, 5, "f32", External(mask, tile_map(mask)))
    yield Case("bool mask", cuts, 5, "codes8", External(mask == 0))
    yield Case("softcap, scale", cuts, 4, "f16", Causal(T - 4), keywords={"softcap": 3.0, "scale": 0.3})
    yield Case("padded", cuts, 4, "f32", Full(), keywords={"kv_start": T // 2 + 3, "kv_len": T - 20})
    lengths = torch.tensor([T, min(T, 77)], dtype=torch.int32)
    starts = torch.tensor([T // 3, 0], dtype=torch.int32)
    keywords = {"kv_len": lengths, "kv_start": starts}
    yield Case("lengths", cuts, 3, "f16", Causal(lengths - 3), keywords=keywords)
    yield Case("lengths, full", cuts, 3, "codes6", Full(), keywords=keywords)


def own(values: Any, start: int, end: int) -> Any:
    """A rank's rows, with room and poison behind them."""
    if isinstance(values, CodedValues):
        codes, norms = own(values.codes, start, end), own(values.norms, start, end)
        return replace(values, codes=codes, norms=norms)
    held = values.new_full(
        (*values.shape[:2], end - start + 3, *values.shape[3:]),
        255 if values.dtype == torch.uint8 else math.nan,
    )
    held[:, :, : end - start] = values[:, :, start:end]
    return held


def attend_everything(ranges: list[list[int]], seed: int) -> int:
    """Every case, queries replicated and sharded, on this rank; the number of comparisons."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    compared = 0
    for nth, cuts in enumerate(ranges):
        for number, case in enumerate(cases(cuts, seed)):
            if (
                nth > 0 and number % 3 != nth - 1
            ):  # all of them over the first ranges, a third over each other
                continue
            T = cuts[-1]
            keywords = case.keywords or {}
            B = 2 if any(isinstance(v, Tensor) for v in keywords.values()) else 1
            x = make_inputs(seed + number, B=B, S=case.rows, T=T, D=case.D, H=4, Hk=2, values=case.values)
            whole = warmattn.attention(
                x.q, x.k[:, :, :T], x.v, visible=case.visible, return_lse=True, **{"kv_len": T, **keywords}
            )
            start, end = cuts[rank], cuts[rank + 1]
            mine = {"key_range": (start, end), "return_lse": True, **keywords}
            k, v = own(x.k, start, end), own(x.v, start, end)
            found = distributed.attention(x.q, k, v, visible=case.visible, **mine)
            for actual, expected in zip(found, whole, strict=True):
                assert_same_bits(actual, expected)
            # Rows cut unevenly; with more ranks than rows, some have none.
            edges = [case.rows * r // ranks for r in range(ranks + 1)]
            rows = slice(edges[rank], edges[rank + 1])
            found = distributed.attention(
                x.q[:, :, rows], k, v, visible=of_rows(case.visible, rows), queries="sharded", **mine
            )
            assert_same_bits(found[0], whole[0][:, :, rows])
            assert_same_bits(found[1], whole[1][:, :, rows])
            compared += 2
    return compared


def of_rows(visible: Visibility, rows: slice) -> Visibility:
    if isinstance(visible, External):
        mask = visible.mask[rows]
        return External(mask, None if visible.tile_map is None or len(mask) == 0 else tile_map(mask))
    if isinstance(visible, Causal | Window):
        assert visible.q_offset is not None
        return replace(visible, q_offset=visible.q_offset + rows.start)
    return visible


@pytest.mark.parametrize("ranks", RANGES)
def test_any_number_of_ranks_gives_the_bits_of_one_process(ranks: int, seed: int, tmp_path: Path) -> None:
    for outcome in run_ranks(ranks, tmp_path, attend_everything, RANGES[ranks], seed):
        assert outcome.error is None, outcome.traceback
        assert outcome.value >= 28


def moved(queries: str) -> tuple[int, int]:
    """Bytes that a call sends and receives on this rank: 3 rows of 13,000 keys over 3 ranks."""
    rank, cuts = dist.get_rank(), RANGES[3][0]
    x = make_inputs(0, S=3, T=cuts[-1], D=64, H=4, Hk=2, values="codes8")
    start, end = cuts[rank], cuts[rank + 1]
    k, v = own(x.k, start, end), own(x.v, start, end)
    rows = slice(None) if queries == "replicated" else slice(rank, rank + 1)
    with distributed.traffic() as traffic:
        visible = of_rows(Causal(cuts[-1] - 3), slice(rows.start or 0, None))
        distributed.attention(x.q[:, :, rows], k, v, key_range=(start, end), visible=visible, queries=queries)
    return traffic.sent, traffic.received


def moved_by_both() -> tuple[tuple[int, int], tuple[int, int]]:
    return moved("replicated"), moved("sharded")


def test_bytes_that_travel(tmp_path: Path) -> None:
    """Replicated, one split a rank: 12 rows of 64 + 2 numbers, 4 of them merged on each rank, and 64 + 1
    numbers back. Sharded, a key of 2 heads is 64 float16, 64 codes and a norm each; blocks pass through the
    rank in the middle.
    """
    partials = 2 * 4 * (66 + 65) * 4
    key = 2 * (2 * 64 + 64 + 4)
    first, second, third = 4096 * key, 4096 * key, (9000 - 8192) * key
    outcomes = run_ranks(3, tmp_path, moved_by_both)
    assert [outcome.value for outcome in outcomes] == [
        ((partials, partials), (first, second + third)),
        ((partials, partials), (first + second + second + third, first + third)),
        ((partials, partials), (third, first + second)),
    ]
