"""K and V of a cache on their way to an attention function, which reads them where they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from warmattn.cache.kv import KVCache
from warmattn.codec.turboquant import decode_values, unrotate
from warmattn.codec.values import CodedValues
from warmattn.integrations.transformers.lazy import LazyTensor

__all__ = ["CachedKeys", "CachedValues"]


class _CachedRows(LazyTensor):
    """The rows ``[B, Hk, T, D]`` that ``kv`` holds at this moment, in the model's dtype.

    Attributes:
        kv: the cache; it lives on, and rows that are written later are not these.
    """

    kv: KVCache

    @classmethod
    def of(cls, kv: KVCache, dtype: torch.dtype) -> Self:
        B, Hk, _, D = kv.k.shape
        rows = cls.standing_for((B, Hk, kv.length, D), dtype, kv.device)
        rows.kv = kv
        return rows


class CachedKeys(_CachedRows):
    """K of a cache."""

    def elements(self) -> Tensor:
        return self.kv.k[:, :, : self.shape[2]].to(self.dtype)


class CachedValues(_CachedRows):
    """V of a cache: decoded, and in the model's own domain, where something other than warmattn reads it."""

    def elements(self) -> Tensor:
        T, v = self.shape[2], self.kv.v
        if not isinstance(v, CodedValues):
            return v[:, :, :T].to(self.dtype)
        rows = replace(v, codes=v.codes[:, :, :T], norms=v.norms[:, :, :T])
        return unrotate(decode_values(rows), signs=v.signs).to(self.dtype)
