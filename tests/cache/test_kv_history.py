"""Whatever a cache has been through, it is the cache that one append of its rows makes: rows and bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cache_helpers import B, assert_same_contents, make_rows, new_cache, poison
from hypothesis import given, settings
from hypothesis import strategies as st

from warmattn import KVCache
from warmattn.testing import VALUE_FORMS, assert_same_bits

CAPACITY, LARGEST_BATCH = 48, 4

PARTS = st.floats(0, 1)
OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 20)),
    st.tuples(st.sampled_from(["crop", "clone", "snapshot"]), PARTS),
    st.tuples(
        st.sampled_from(["reorder", "select"]),
        st.lists(PARTS, min_size=LARGEST_BATCH, max_size=LARGEST_BATCH),
    ),
    st.tuples(st.just("select"), st.lists(PARTS, min_size=1, max_size=LARGEST_BATCH)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.sampled_from(["reset", "save"]), st.none()),
)


class Model:
    """A plain list: q, k and v of every token, as they came."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rows = make_rows(seed, 0)

    @property
    def batch(self) -> int:
        return self.rows[0].shape[0]

    @property
    def length(self) -> int:
        return self.rows[0].shape[2]

    def append(self, n: int) -> list[torch.Tensor]:
        self.seed += 10
        new = make_rows(self.seed, n, batch=self.batch)
        self.rows = [torch.cat(pair, dim=2) for pair in zip(self.rows, new, strict=True)]
        return new

    def crop(self, length: int) -> None:
        self.rows = [rows[:, :, :length] for rows in self.rows]

    def select(self, index: list[int]) -> None:
        self.rows = [rows[index] for rows in self.rows]


def step(cache: KVCache, model: Model, name: str, drawn: Any, path: Path) -> KVCache:
    """One operation on both; returns the cache to go on with."""
    if name == "append":
        _, k, v = model.append(min(drawn, CAPACITY - model.length))
        cache.append(k, v)
    elif name in ("crop", "clone", "snapshot"):
        length = round(drawn * model.length)
        model.crop(length)
        if name == "crop":
            cache.crop(length)
        else:
            cache = cache.clone(length) if name == "clone" else cache.snapshot(length).clone()
    elif name in ("reorder", "select"):
        drawn = drawn[: model.batch] if name == "reorder" else drawn
        index = [min(int(part * model.batch), model.batch - 1) for part in drawn]
        model.select(index)
        getattr(cache, name)(torch.tensor(index))
    elif name == "repeat":
        if model.batch * drawn <= LARGEST_BATCH:
            model.select([b for b in range(model.batch) for _ in range(drawn)])
            cache.repeat(drawn)
    elif name == "reset":
        model.crop(0)
        cache.reset()
    else:
        cache.save(path)
        cache = KVCache.load(path)
    return poison(cache)


@pytest.mark.parametrize("values", VALUE_FORMS)
@settings(max_examples=60)
@given(
    operations=st.lists(OPERATIONS, min_size=1, max_size=12),
    keys=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_any_history_is_one_append(
    values: str,
    operations: list[tuple[str, Any]],
    keys: torch.dtype,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
):
    path = tmp_path_factory.getbasetemp() / "history.safetensors"
    cache, model = new_cache(CAPACITY, values=values, keys=keys), Model(seed)
    assert model.batch == B
    for name, drawn in [*operations, ("append", 3)]:
        cache = step(cache, model, name, drawn, path)
        assert (cache.length, cache.capacity, cache.k.shape[0]) == (model.length, CAPACITY, model.batch)
    q, k, v = model.rows
    fresh = new_cache(CAPACITY + 5, batch=model.batch, values=values, keys=keys)
    fresh.append(k, v)
    assert_same_contents(cache, fresh)
    assert_same_bits(cache.attention(q.to(keys)), fresh.attention(q.to(keys)))
