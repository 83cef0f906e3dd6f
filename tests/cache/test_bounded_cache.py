"""A bounded cache drops what no later row sees, and the bits stay those of a cache that holds everything."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cache_helpers import HK, B, D, all_bytes, make_rows, new_cache, poison
from torch import Tensor

from warmattn import InvalidInput, KVCache, backends
from warmattn.backend import load
from warmattn.cache.kv import DROPPED_ROWS
from warmattn.codec.values import HEAD_DIMS
from warmattn.testing import VALUE_FORMS, assert_same_bits

TOKENS = 2 * DROPPED_ROWS + 1500


def cold_run(q: Tensor, k: Tensor, v: Tensor, *, values: str = "f16", **options: Any) -> Tensor:
    """All rows in one call, over a cache that holds everything."""
    cache = KVCache(B, HK, k.shape[2], D, values=values, device=k.device)
    cache.append(k, v)
    return cache.attention(q, **options)


def bounded(
    seed: int, tokens: int, *, window: int, room: int, **options: Any
) -> tuple[KVCache, list[Tensor]]:
    """A bounded cache after appends of 500 tokens each, and all rows."""
    cache = new_cache(window + DROPPED_ROWS + room, window=window, **options)
    rows = make_rows(seed, tokens)
    for start in range(0, tokens, 500):
        cache.append(*(part[:, :, start : start + 500] for part in rows[1:]))
    return cache, rows


CASES = [("f16", 300, 0), *((values, *sizes) for values in VALUE_FORMS for sizes in ((1, 700), (900, 55)))]


@pytest.mark.parametrize(("values", "window", "room"), CASES)
def test_bits_of_the_unbounded_cache(values: str, window: int, room: int, seed: int, device: torch.device):
    """Over appends of any sizes up to the promised one, at any length."""
    q, k, v = make_rows(seed, TOKENS, device=device)
    cold = cold_run(q, k, v, values=values, window=window)
    cache = new_cache(window + DROPPED_ROWS + room, values=values, window=window, device=device)
    largest, generator, start = room + 2, random.Random(seed), 0
    while start < TOKENS:
        n = min(generator.choice((1, generator.randint(1, largest), largest)), TOKENS - start)
        offset = cache.key_offset
        cache.append(k[:, :, start : start + n], v[:, :, start : start + n])
        start += n
        assert cache.length == start
        if cache.key_offset > offset or generator.random() < largest / 600:
            out = poison(cache).attention(q[:, :, start - n : start])
            assert_same_bits(out, cold[:, :, start - n : start])
    assert cache.key_offset == 2 * DROPPED_ROWS


def test_narrower_window_and_padding(seed: int):
    """Positions that a caller names stay positions, whatever was dropped."""
    cache, rows = bounded(seed, TOKENS, window=200, room=500)
    assert cache.key_offset > 0
    last = rows[0][:, :, -40:]
    padding = torch.tensor([3, TOKENS - 30], dtype=torch.int32)
    cases: list[dict[str, Any]] = [{"window": 7}, *({"kv_start": s} for s in (TOKENS - 30, 3, padding))]
    for options in cases:
        cold = cold_run(*rows, **{"window": 200, **options})
        assert_same_bits(cache.attention(last, **options), cold[:, :, -40:])


@pytest.mark.parametrize(
    "wrong", [-1, 1.5, True, "1", torch.tensor([-1, 0], dtype=torch.int32), torch.ones(2)]
)
def test_padding_that_is_no_position_is_refused(wrong: Any, seed: int):
    """As it is before anything was dropped."""
    cache, rows = bounded(seed, TOKENS, window=200, room=500)
    for of in (cache, cache.clone()):
        with pytest.raises(InvalidInput, match="kv_start: expected"):
            of.attention(rows[0][:, :, -40:], kv_start=wrong)
        of.reset()
        of.append(*(part[:, :, :40] for part in rows[1:]))
        with pytest.raises(InvalidInput, match="kv_start: expected"):
            of.attention(rows[0][:, :, :40], kv_start=wrong)


def test_rewinds_as_far_as_it_says(seed: int):
    window = 300
    cache, (q, k, v) = bounded(seed, TOKENS, window=window, room=500)
    cold = cold_run(q, k, v, window=window)
    limit = cache.rewind_limit
    assert limit == cache.key_offset + window - 1 < TOKENS - 500
    before = all_bytes(cache)
    for operation in (cache.crop, cache.clone, cache.snapshot):
        with pytest.raises(InvalidInput, match=rf"length: {limit - 1} is below the rewind limit {limit}"):
            operation(limit - 1)
    with pytest.raises(
        InvalidInput, match=rf"window of token {limit - 1} is no longer held; from {limit} on"
    ):
        cache.attention(q[:, :, limit - 1 :])
    with pytest.raises(InvalidInput, match="window: expected <= the cache's 300, got 301"):
        cache.attention(q[:, :, -1:], window=window + 1)
    assert all_bytes(cache) == before
    assert_same_bits(cache.attention(q[:, :, limit:]), cold[:, :, limit:])

    resumed = [cache.snapshot(limit + 60).clone(limit), cache.clone(limit), cache]
    cache.crop(limit)
    for rewound in resumed:
        poison(rewound).append(k[:, :, limit : limit + 400], v[:, :, limit : limit + 400])
        out = rewound.attention(q[:, :, limit : limit + 400])
        assert_same_bits(out, cold[:, :, limit : limit + 400])
    cache.reset()
    assert (cache.key_offset, cache.rewind_limit) == (0, 0)


def test_nothing_is_dropped_while_there_is_room(seed: int):
    cache, _ = bounded(seed, DROPPED_ROWS + 500, window=100, room=400)
    assert (cache.key_offset, cache.kv_len, cache.rewind_limit) == (0, cache.capacity, 0)
    cache.crop(1)
    assert cache.length == 1


def test_refused_where_it_does_not_fit(seed: int):
    with pytest.raises(InvalidInput, match=r"capacity \(4195\) < window \(100\) \+ 4096"):
        KVCache(1, 1, 4195, 64, window=100)
    cache = new_cache(100 + DROPPED_ROWS, window=100)
    with pytest.raises(InvalidInput, match=r"clone: capacity: .*capacity \(4195\) < window \(100\) \+ 4096"):
        cache.clone(capacity=4195)
    _, k, v = make_rows(seed, 100 + DROPPED_ROWS)
    cache.append(k[:, :, : 98 + DROPPED_ROWS], v[:, :, : 98 + DROPPED_ROWS])  # one row short of a drop
    before = all_bytes(cache)
    match = r"rows to keep \(4194\) \+ n \(3\) > capacity \(4196\); at any length, appends of 2 rows fit"
    with pytest.raises(InvalidInput, match=match):
        cache.append(k[:, :, :3], v[:, :, :3])
    assert all_bytes(cache) == before
    cache.append(k[:, :, :2], v[:, :, :2])
    assert cache.key_offset == 0
    cache.append(k[:, :, :2], v[:, :, :2])
    assert cache.key_offset == DROPPED_ROWS
    with pytest.raises(InvalidInput, match=r"> capacity \(4196\)"):
        cache.append(k, v)


def test_refused_rows_drop_nothing(seed: int):
    cache, _ = bounded(seed, DROPPED_ROWS + 500, window=100, room=400)
    _, k, v = make_rows(seed, 5)
    before = all_bytes(cache)
    with pytest.raises(InvalidInput, match="k: expected values that are finite"):
        cache.append(k * torch.inf, v)
    assert all_bytes(cache) == before


@pytest.mark.parametrize("name", [name for name, status in backends().items() if status.available])
def test_what_is_dropped_is_whole_splits_of_the_backend(name: str):
    for head_dim in HEAD_DIMS:
        assert DROPPED_ROWS % load(name).tiling(head_dim).split == 0
