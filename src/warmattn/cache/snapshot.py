"""`Snapshot`: tokens of a `KVCache`, kept without its spare capacity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmattn.cache.kv import KVCache

__all__ = ["Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Tokens of a `KVCache` without its spare capacity; what `PrefixCache` keeps. Do not write to it.

    Attributes:
        rows: a cache that is full.
        capacity: of the caches that `clone` gives.
    """

    rows: KVCache
    capacity: int

    @property
    def length(self) -> int:
        """Tokens, as `KVCache.length`."""
        return self.rows.length

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.rows.nbytes

    @property
    def rewind_limit(self) -> int:
        """As `KVCache.rewind_limit`."""
        return self.rows.rewind_limit

    def clone(self, length: int | None = None) -> KVCache:
        """A cache of the original's capacity with the first ``length`` tokens, as `KVCache.clone`."""
        return self.rows.clone(length, capacity=self.capacity)
