"""`PrefixCache`: caches by their tokens, so that a prompt resumes where it leaves an earlier one's way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from warmattn.cache.checks import check_count
from warmattn.errors import InvalidInput

__all__ = ["PrefixCache", "PrefixHit", "Reusable"]


class Reusable(Protocol):
    """What `PrefixCache` can keep: a cache of one sequence, such as `KVCache`.

    Two more members are used where they exist: ``snapshot(length)``, a `Reusable` that is leaner to keep than
    a clone, and ``rewind_limit``, the shortest length that ``clone`` accepts.
    """

    @property
    def length(self) -> int:
        """Tokens held."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        ...

    def clone(self, length: int) -> Any:
        """A cache of its own with the first ``length`` tokens. Only reads this one."""
        ...


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What `PrefixCache.find` found.

    Attributes:
        length: tokens that need not be computed again.
        cache: holds them; the caller's own, to append to.
    """

    length: int
    cache: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """Lengths in ``[shortest, len(ids)]`` can be had."""

    ids: np.ndarray
    shortest: int
    cache: Reusable
    nbytes: int

    def covers(self, ids: np.ndarray, shortest: int) -> bool:
        """Whether all that such an entry would give can be had from this one."""
        return _common(self.ids, ids) == len(ids) and self.shortest <= shortest


class PrefixCache:
    """Copies of caches by their tokens, up to a number of bytes; the least recently used go first.

    A prompt finds the longest prefix that it shares with any entry, cut at any token. Because warm equals
    cold, what is computed from there has the bits of a run from the start. An entry whose tokens begin
    another's is covered by it, and not kept twice. Tokens are all that is compared: have one for each model
    and form of cache.

    Safe to use from several threads: entries are never written to, and what is handed out shares no memory
    with them. On a GPU the threads share a stream or synchronise, as with every tensor. A look-up compares
    the prompt with every entry, one vector operation each: meant for up to thousands of entries.

    Attributes:
        max_bytes: bound of `nbytes`.
        hits, misses: how often `find` found something, or nothing.
        hit_tokens: sum of the lengths found.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start empty.

        Raises:
            InvalidInput: max_bytes is not an int >= 0.
        """
        check_count("max_bytes", max_bytes, least=0, most=2**63 - 1, op="PrefixCache")
        self.max_bytes = max_bytes
        self.hits = self.misses = self.hit_tokens = 0
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        """The least recently used first."""

    def __bool__(self) -> bool:
        """An empty one is no missing one."""
        return True

    def __len__(self) -> int:
        """Entries held."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        with self._lock:
            return self._bytes_held()

    def insert(self, tokens: Sequence[int] | np.ndarray | Tensor, cache: Reusable) -> bool:
        """Keep a copy of a cache.

        Args:
            tokens: ids whose rows the cache holds, in order. Where one of the two is longer, as after a
                generation whose last token was never fed back, what both have is kept.
            cache: a `Reusable`, not kept itself.

        Returns:
            Whether the tokens can be found now: not when there are none, or when the copy alone exceeds
            `max_bytes`.

        Raises:
            InvalidInput: tokens are not one sequence of ints.
        """
        ids = _token_ids(tokens, op="PrefixCache.insert")[: cache.length]
        if len(ids) == 0:
            return False
        shortest = getattr(cache, "rewind_limit", 0)
        with self._lock:
            for held in self._entries:
                if held.covers(ids, shortest):
                    self._use(held)
                    return True
        copy: Reusable = getattr(cache, "snapshot", cache.clone)(len(ids))
        entry = _Entry(ids, shortest, copy, copy.nbytes)
        if entry.nbytes > self.max_bytes:
            return False
        with self._lock:
            self._entries = [held for held in self._entries if not entry.covers(held.ids, held.shortest)]
            self._entries.append(entry)
            while self._bytes_held() > self.max_bytes:
                del self._entries[0]
        return True

    def find(self, tokens: Sequence[int] | np.ndarray | Tensor) -> PrefixHit | None:
        """The longest prefix of ``tokens`` that an entry holds, in a cache of the caller's own.

        A model needs at least one token to compute: look up all but the last.

        Returns:
            `PrefixHit`, or ``None`` when no entry begins as the tokens do.

        Raises:
            InvalidInput: tokens are not one sequence of ints.
        """
        ids = _token_ids(tokens, op="PrefixCache.find")
        with self._lock:
            best, length = None, 0
            for entry in reversed(self._entries):
                common = _common(entry.ids, ids)
                if common > length and common >= entry.shortest:
                    best, length = entry, common
            if best is None:
                self.misses += 1
                return None
            self._use(best)
            self.hits += 1
            self.hit_tokens += length
        return PrefixHit(length, best.cache.clone(length))

    def clear(self) -> None:
        """Forget all entries; the counts stay."""
        with self._lock:
            self._entries = []

    def _use(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def _bytes_held(self) -> int:
        return sum(entry.nbytes for entry in self._entries)


def _token_ids(tokens: Sequence[int] | np.ndarray | Tensor, *, op: str) -> np.ndarray:
    """A copy as int64 ``[n]``."""
    ids = np.array(tokens.numpy(force=True) if isinstance(tokens, Tensor) else tokens)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size > 0):
        raise InvalidInput("tokens", expected="ints [n]", got=f"{ids.dtype} {list(ids.shape)}", op=op)
    return ids.astype(np.int64)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
