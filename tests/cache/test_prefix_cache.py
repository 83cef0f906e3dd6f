"""PrefixCache: the longest common prefix over all entries, bounded by bytes, never shared memory."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import all_bytes, filled, make_rows, new_cache
from hypothesis import given
from hypothesis import strategies as st

from warmattn import InvalidInput, KVCache, PrefixCache
from warmattn.testing import assert_same_bits


@dataclass
class Plain:
    """The least that can be kept: it holds its own tokens, ten bytes each."""

    tokens: list[int]
    rewind_limit: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return 10 * len(self.tokens)

    def clone(self, length: int) -> Plain:
        assert self.rewind_limit <= length <= self.length
        return Plain(self.tokens[:length], self.rewind_limit)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TOKENS = st.lists(st.integers(0, 1), max_size=6)
CALLS = st.lists(st.tuples(st.sampled_from(["insert", "find"]), TOKENS, st.integers(0, 3)), max_size=40)


@given(calls=CALLS, max_bytes=st.sampled_from([0, 50, 120, 100_000]))
def test_as_a_plain_model(calls: list[tuple[str, list[int], int]], max_bytes: int):
    prefixes, entries = PrefixCache(max_bytes), []  # of the model: (tokens, limit), last used last
    hits = misses = hit_tokens = 0
    for call, tokens, limit in calls:
        limit = min(limit, len(tokens))
        if call == "insert":
            covering = [e for e in entries if e[0][: len(tokens)] == tokens and e[1] <= limit]
            fits = 0 < 10 * len(tokens) <= max_bytes
            stored = prefixes.insert(tokens, Plain(tokens, limit))
            if tokens and covering:
                assert stored
                entries.remove(covering[0])
                entries.append(covering[0])
            else:
                assert stored == fits
                if fits:
                    entries = [e for e in entries if tokens[: len(e[0])] != e[0] or limit > e[1]]
                    entries.append((tokens, limit))
                    while sum(10 * len(e[0]) for e in entries) > max_bytes:
                        entries.pop(0)
        else:
            lengths = [n if n >= e[1] else 0 for e in entries for n in [common(e[0], tokens)]]
            hit = prefixes.find(tokens)
            if not any(lengths):
                assert hit is None
                misses += 1
                continue
            assert hit is not None
            assert hit.length == max(lengths)
            assert hit.cache.tokens == tokens[: hit.length]
            best = max(i for i, n in enumerate(lengths) if n == hit.length)
            entries.append(entries.pop(best))
            hits, hit_tokens = hits + 1, hit_tokens + hit.length
        assert len(prefixes) == len(entries)
        assert prefixes.nbytes == sum(10 * len(e[0]) for e in entries) <= max_bytes
    assert (prefixes.hits, prefixes.misses, prefixes.hit_tokens) == (hits, misses, hit_tokens)


@pytest.mark.parametrize("values", ["f16", "codes8"])
def test_a_prompt_resumes_with_the_bits_of_a_run_from_the_start(values: str, seed: int, device: torch.device):
    """Cut in the middle of an entry, from a copy that shares no memory with it."""
    tokens = list(range(30))
    cache, prefixes = filled(seed, 30, values=values, device=device), PrefixCache(10**6)
    assert prefixes.insert(tokens, cache)
    kept = prefixes.nbytes
    assert kept == cache.nbytes // 40 * 30  # what is live, not what is allocated
    cache.reset()
    q, k, v = make_rows(seed + 1, 25, device=device)
    prompt = [*tokens[:17], *range(100, 125)]
    outs = []
    for _ in range(2):
        hit = prefixes.find(prompt)
        assert hit is not None
        assert (hit.length, hit.cache.capacity) == (17, 40)
        hit.cache.append(k[:, :, :23], v[:, :, :23])
        outs.append(hit.cache.attention(q[:, :, :23]))
        hit.cache.k.fill_(torch.nan)  # spoils the entry, if it were shared
    cold = filled(seed, 30, values=values, device=device).clone(17)
    cold.append(k[:, :, :23], v[:, :, :23])
    for out in outs:
        assert_same_bits(out, cold.attention(q[:, :, :23]))
    assert prefixes.nbytes == kept


def test_what_is_stored_is_a_copy(seed: int):
    cache, prefixes = filled(seed, 30), PrefixCache(10**6)
    expected = all_bytes(cache.snapshot(30).rows)
    prefixes.insert(torch.arange(30), cache)
    cache.k.zero_()
    cache.reset()
    hit = prefixes.find(np.arange(31))
    assert hit is not None
    assert all_bytes(hit.cache.snapshot(30).rows) == expected


@pytest.mark.parametrize(("rows", "kept"), [(6, 4), (4, 4), (2, 2)])
def test_tokens_of_any_kind(rows: int, kept: int, seed: int):
    """Where tokens and rows do not end together, what both have is kept."""
    tokens = [7, 8, 9, 2**40]
    for given_tokens in (tokens, tuple(tokens), np.array(tokens), torch.tensor(tokens)):
        prefixes = PrefixCache(10**6)
        prefixes.insert(given_tokens, filled(seed, rows))
        hit = prefixes.find([*tokens, 1])
        assert hit is not None
        assert hit.length == kept
    prefixes = PrefixCache(10**6)
    many: tuple[Any, ...] = ([[1, 2]], [1.5], torch.zeros(2, 2, dtype=torch.int64), "ab", [True, False], 3)
    for wrong in many:
        for call in (lambda w: prefixes.insert(w, filled(seed, 4)), prefixes.find):
            with pytest.raises(InvalidInput, match=r"tokens: expected ints \[n\]"):
                call(wrong)
    assert (prefixes.hits, prefixes.misses, len(prefixes)) == (0, 0, 0)


def test_nothing_to_keep_and_too_much(seed: int):
    cache = filled(seed, 30)
    prefixes = PrefixCache(cache.snapshot().nbytes - 1)
    assert not prefixes.insert([], cache)
    assert not prefixes.insert([1], new_cache())
    assert not prefixes.insert(range(30), cache)
    assert prefixes.insert(range(29), cache)
    assert len(prefixes) == 1
    assert prefixes.find([]) is None
    assert (prefixes.hits, prefixes.misses) == (0, 1)
    prefixes.clear()
    assert (len(prefixes), prefixes.nbytes) == (0, 0)
    for wrong in (-1, 1.5, None):
        with pytest.raises(InvalidInput, match="PrefixCache: max_bytes: expected an int"):
            PrefixCache(wrong)  # pyright: ignore[reportArgumentType]


def test_a_bounded_cache_gives_what_it_still_can(seed: int):
    window = 50
    cache = new_cache(window + 4096 + 100, window=window)
    _, k, v = make_rows(seed, 4400)
    for start in range(0, 4400, 100):
        cache.append(k[:, :, start : start + 100], v[:, :, start : start + 100])
    tokens, limit = list(range(4400)), 4096 + window - 1
    assert cache.rewind_limit == limit
    prefixes = PrefixCache(10**9)
    prefixes.insert(tokens, cache)
    assert prefixes.find([*tokens[: limit - 1], -1]) is None
    hit = prefixes.find([*tokens[:limit], -1])
    assert hit is not None
    assert (hit.length, hit.cache.key_offset, hit.cache.capacity) == (limit, 4096, cache.capacity)


def test_threads(seed: int):
    """Eight of them, inserting and finding: what comes out is always right, and the counts add up."""
    prefixes, errors = PrefixCache(900), []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        generator = random.Random(seed + number)
        start.wait()
        try:
            for _ in range(300):
                tokens = [
                    t for word in generator.choices(range(5), k=generator.randint(1, 6)) for t in [word] * 4
                ]
                if generator.random() < 0.5:
                    assert prefixes.insert(tokens, Plain(tokens))
                else:
                    hit = prefixes.find(tokens)
                    counts[number] += 1
                    if hit is not None:
                        assert hit.cache.tokens == tokens[: hit.length]
                        hit.cache.tokens.clear()
                        found[number] += hit.length
                assert prefixes.nbytes <= 900
        except BaseException as error:
            errors.append(error)

    counts, found = [0] * 8, [0] * 8
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert prefixes.hits + prefixes.misses == sum(counts)
    assert prefixes.hit_tokens == sum(found) > 0


def test_public_protocol_is_met_by_kv_cache(seed: int):
    """Statically, as pyright checks these calls; and a plain object without the optional members will do."""
    prefixes = PrefixCache(10**6)
    cache: KVCache = filled(seed, 4)
    assert prefixes.insert([1, 2, 3, 4], cache)
    assert prefixes.insert([5], Plain([5]))


def test_an_empty_one_counts_as_there() -> None:
    assert PrefixCache(1)
