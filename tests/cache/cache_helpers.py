"""What the tests of caches share: rows, poison behind them, and the bytes of a cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from warmattn import KVCache

B, HK, H, D = 2, 2, 4, 64


def normal(seed: int, *shape: int) -> Tensor:
    """Standard-normal float32 on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_rows(seed: int, n: int, *, batch: int = B, device: torch.device | str = "cpu") -> list[Tensor]:
    """q float16 ``[B, H, n, D]``, k and v float32 ``[B, Hk, n, D]``."""
    q = normal(seed, batch, H, n, D).half()
    k, v = normal(seed + 1, batch, HK, n, D), normal(seed + 2, batch, HK, n, D)
    return [tensor.to(device) for tensor in (q, k, v)]


def new_cache(capacity: int = 40, *, batch: int = B, device: Any = "cpu", **options: Any) -> KVCache:
    """An empty cache full of poison."""
    return poison(KVCache(batch, HK, capacity, D, device=device, **options))


def stores(cache: KVCache) -> dict[str, Tensor]:
    """The tensors of a cache by name, rows along axis 2."""
    v = cache.v
    return {"k": cache.k} | ({"v": v} if isinstance(v, Tensor) else {"codes": v.codes, "norms": v.norms})


def poison(cache: KVCache) -> KVCache:
    """Fill every row that holds no token with NaN, codes with 255."""
    for store in stores(cache).values():
        store[:, :, cache.kv_len :].fill_(255 if store.dtype == torch.uint8 else math.nan)
    return cache


def filled(seed: int, n: int, capacity: int = 40, *, device: Any = "cpu", **options: Any) -> KVCache:
    """A cache of n tokens, poison behind them."""
    cache = new_cache(capacity, device=device, **options)
    _, k, v = make_rows(seed, n, device=device)
    cache.append(k, v)
    return cache


def contents(cache: KVCache) -> dict[str, Tensor]:
    """Copies of the rows that hold tokens."""
    return {name: store[:, :, : cache.kv_len].clone() for name, store in stores(cache).items()}


def all_bytes(cache: KVCache) -> list[Any]:
    """Every byte of a cache, and its numbers."""
    held = [store.contiguous().view(torch.uint8).cpu().numpy().tobytes() for store in stores(cache).values()]
    return [*held, cache.length, cache.key_offset]


def assert_same_contents(cache: KVCache, other: KVCache) -> None:
    """Fail unless both hold the same rows at the same positions, byte for byte."""
    assert (cache.length, cache.key_offset) == (other.length, other.key_offset)
    for (name, rows), expected in zip(contents(cache).items(), contents(other).values(), strict=True):
        assert rows.shape == expected.shape, name
        assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8)), name
