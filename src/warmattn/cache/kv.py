"""`KVCache`: K and V of one layer, allocated once, appended in place, read in place by `attention`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warmattn.api import attention
from warmattn.cache import file
from warmattn.cache.checks import check_count, check_index, check_rows, require_finite
from warmattn.cache.snapshot import Snapshot
from warmattn.cache.values import Stores, all_finite, allocate, value_form
from warmattn.codec.codebook import Codebook
from warmattn.codec.turboquant import unrotate
from warmattn.codec.values import CodedValues, check_head_dim
from warmattn.errors import InvalidInput
from warmattn.visibility import Causal, Window

__all__ = ["DROPPED_ROWS", "KVCache"]

DROPPED_ROWS = 4096
"""A bounded cache drops rows by multiples of this, a multiple of every backend's split length: bits stay."""

_FILE_FORMAT = "warmattn.kv_cache"
_KEY_DTYPES = (torch.float16, torch.bfloat16)


class KVCache:
    """K and V of one attention layer, for B sequences of one length.

    Memory is allocated once; `append` writes new rows behind the old ones, and `attention` reads all of them
    where they lie. Rows past the length are never read.

    A *bounded* cache (``window=W``, for sliding layers) holds only what later rows can see: when an append
    finds no room, rows that left the window are dropped, by multiples of `DROPPED_ROWS`, and `key_offset`
    says how many. The bits of a result stay those of an unbounded cache. What was dropped cannot come back:
    see `rewind_limit`.

    Attributes:
        length: tokens so far, the dropped ones included.
        key_offset: position of row 0 of `k`; 0 unless the cache is bounded.
        capacity: rows allocated per KV head, C.
        window: W of a bounded cache, else ``None``.
        values: form of V.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        values: str = "f16",
        keys: torch.dtype = torch.float16,
        device: str | torch.device | None = None,
        codebook: Codebook | None = None,
        signs: Tensor | None = None,
        sf: float = 1.0,
        window: int | None = None,
    ) -> None:
        """Allocate an empty cache.

        Args:
            batch: B, sequences.
            kv_heads: Hk.
            capacity: C, rows per KV head. A bounded cache needs ``window + 4096`` at least, and serves
                appends of ``capacity - window - 4094`` rows at any length.
            head_dim: D: 64, 128, 256 or 512.
            values: form of V: "f32", "f16" or "bf16", or "codes5", "codes6" or "codes8" (one byte a value).
            keys: dtype of K, float16 or bfloat16; queries have it too.
            device: where the cache lies; ``None``: the CPU.
            codebook: of coded V; ``None``: `Codebook.lloyd_max`.
            signs: of coded V, float32 ``[D]`` of ±1; ``None``: the default vector.
            sf: of coded V at D = 512.
            window: keep only what rows with this window can see.

        Raises:
            Unsupported: head dim.
            InvalidInput: anything else that does not fit.
        """
        op = "KVCache"
        for name, size in (("batch", batch), ("kv_heads", kv_heads), ("capacity", capacity)):
            check_count(name, size, op=op)
        check_head_dim(head_dim, op=op)
        if keys not in _KEY_DTYPES:
            raise InvalidInput("keys", expected="float16 or bfloat16", got=keys, op=op)
        if window is not None:
            check_count("window", window, op=op)
            _check_room(capacity, window, op=op)

        shape = (batch, kv_heads, capacity, head_dim)
        k = allocate(shape, keys, torch.device("cpu" if device is None else device))
        self._form = value_form(values, head_dim, k.device, codebook=codebook, signs=signs, sf=sf)
        self._stores: Stores = {"k": k, **self._form.allocate(shape, k.device)}
        # Of K and of V: whether every row was finite that `append` did not look at.
        self._finite = allocate([2], torch.bool, k.device).fill_(True)
        self.values, self.window = values, window
        self.length, self.key_offset = 0, 0

    def __repr__(self) -> str:
        B, Hk, C, D = self.k.shape
        bounded = "" if self.window is None else f", window={self.window}"
        return (
            f"KVCache({B}, {Hk}, {C}, {D}, values={self.values!r}, keys={self.k.dtype}, "
            f"device={str(self.device)!r}{bounded}; length {self.length})"
        )

    @property
    def k(self) -> Tensor:
        """K ``[B, Hk, C, D]``; its first `kv_len` rows hold tokens."""
        return self._stores["k"]

    @property
    def v(self) -> Tensor | CodedValues:
        """V as `warmattn.attention` takes it, its rows beside those of `k`."""
        return self._form.view(self._stores)

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def kv_len(self) -> int:
        """T: rows of `k` that hold tokens, positions ``[key_offset, length)``."""
        return self.length - self.key_offset

    @property
    def nbytes(self) -> int:
        """Bytes allocated for K and V, used or not."""
        return sum(store.nbytes for store in self._stores.values())

    @property
    def rewind_limit(self) -> int:
        """The shortest length that `crop` and `clone` can go back to: the next row must find its window."""
        if self.window is None or self.key_offset == 0:
            return 0
        return self.key_offset + self.window - 1

    def append(self, k: Tensor, v: Tensor, *, check: bool = False) -> None:
        """Write n tokens behind the `length` ones.

        Args:
            k: ``[B, Hk, n, D]``, any float dtype and strides, no view of this cache; rounded to the dtype of
                the cache's K.
            v: the same shape; rounded to the cache's dtype, or coded.
            check: on a GPU too, look now whether the rows are finite; that synchronises. Without it a GPU
                only notes it (`check` reads the note), and such rows are written: of coded V, as zeros.

        Raises:
            Unsupported: k or v require grad while grad is on.
            InvalidInput: shape, dtype or device; more tokens than there is room for; values that are not
                finite once they are rounded to the cache's dtype. Nothing has been written then.
        """
        op = "KVCache.append"
        n = check_rows("k", k, self.k, op=op)
        if check_rows("v", v, self.k, op=op) != n:
            raise InvalidInput("v", expected=f"k's {n} rows", got=v.shape[2], op=op)
        dropped = self._rows_to_drop(n)
        if n == 0:
            return
        rows, finite_v = self._form.convert(v)
        rows["k"] = k.to(self.k.dtype)
        finite = torch.stack((all_finite(rows["k"]), finite_v))
        if check or self.device.type == "cpu":
            require_finite(finite, op=op)
        else:
            self._finite.logical_and_(finite)
        self._drop(dropped)
        for name, store in self._stores.items():
            store[:, :, self.kv_len : self.kv_len + n].copy_(rows[name])
        self.length += n

    def check(self) -> None:
        """Raise when any append since the last `reset` has brought values that are not finite.

        Raises:
            InvalidInput: naming k or v.
        """
        require_finite(self._finite, op="KVCache.check")

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens.

        Raises:
            InvalidInput: outside ``[rewind_limit, length]``.
        """
        self._check_length(length, "KVCache.crop")
        self.length = length

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.length, self.key_offset = 0, 0
        self._finite.fill_(True)

    def clone(self, length: int | None = None, *, capacity: int | None = None) -> KVCache:
        """A cache of its own with the first ``length`` tokens. Only those rows are copied.

        Args:
            length: ``None``: all.
            capacity: of the clone, enough for those rows, and in a bounded cache as `__init__` asks;
                ``None``: the same.

        Raises:
            InvalidInput: length outside ``[rewind_limit, length]``, or a capacity too small.
        """
        op = "KVCache.clone"
        length = self.length if length is None else length
        capacity = self.capacity if capacity is None else capacity
        self._check_length(length, op)
        check_count("capacity", capacity, least=max(1, length - self.key_offset), op=op)
        if self.window is not None:
            _check_room(capacity, self.window, op=op)
        return self._copied(length, capacity)

    def snapshot(self, length: int | None = None) -> Snapshot:
        """The first ``length`` tokens without the spare capacity, to be kept and cloned from.

        Raises:
            InvalidInput: as `clone`.
        """
        length = self.length if length is None else length
        self._check_length(length, "KVCache.snapshot")
        return Snapshot(self._copied(length, max(1, length - self.key_offset)), self.capacity)

    def select(self, index: Tensor) -> None:
        """Keep the sequences that ``index`` names, in its order; one may be named often. Only rows that hold
        tokens move, within the memory there is when the batch keeps its size.

        Args:
            index: int64 or int32 ``[new B]``, values in ``[0, B)`` (on a GPU they are the caller's promise).

        Raises:
            InvalidInput: dtype, shape, no sequence left, or (on the CPU) a value outside.
        """
        check_index(index, self.k.shape[0], op="KVCache.select")
        index, old = index.to(self.device), self._live()
        if len(index) != self.k.shape[0]:
            self._stores = self._allocate(len(index), self.capacity)
        for name, rows in self._live().items():
            rows.copy_(old[name].index_select(0, index))

    def reorder(self, index: Tensor) -> None:
        """`select` that keeps the number of sequences, as a step of beam search does.

        Raises:
            InvalidInput: as `select`, or another number of sequences.
        """
        check_index(index, self.k.shape[0], op="KVCache.reorder")
        if len(index) != self.k.shape[0]:
            expected = f"[B] = [{self.k.shape[0]}]"
            raise InvalidInput("index", expected=expected, got=list(index.shape), op="KVCache.reorder")
        self.select(index)

    def repeat(self, n: int) -> None:
        """Make n neighbouring copies of every sequence: ``[a, b]`` becomes ``[a, a, b, b]`` for n = 2.

        Raises:
            InvalidInput: n < 1.
        """
        check_count("n", n, op="KVCache.repeat")
        self.select(torch.arange(self.k.shape[0], device=self.device).repeat_interleave(n))

    def attention(
        self,
        q: Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        kv_start: int | Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """Causal `warmattn.attention` of the last S tokens over the cache, in V's own domain.

        Args:
            q: ``[B, H, S, D]``, K's dtype: the queries of the last S of the `length` tokens.
            window: ``None``: the cache's own, and every key up to the row where it has none.
            scale: as in `warmattn.attention`, like the two below.
            softcap: see scale.
            backend: see scale.
            kv_start: first visible position (left padding), an int or an int32 tensor ``[B]``.

        Returns:
            float32 ``[B, H, S, D]``.

        Raises:
            Unsupported: as `warmattn.attention`.
            InvalidInput: as `warmattn.attention`; more rows than tokens; a window wider than a bounded
                cache's, or rows whose window is no longer held.
        """
        op = "KVCache.attention"
        S = q.shape[2] if isinstance(q, Tensor) and q.ndim == 4 else 0
        q_offset = self.length - S
        if q_offset < 0:
            reason = f"S ({S}) > length ({self.length})"
            raise InvalidInput("q", expected=f"S <= {self.length}", got=S, op=op, reason=reason)
        if self.window is not None:
            window = self.window if window is None else window
            if isinstance(window, int) and window > self.window:
                raise InvalidInput("window", expected=f"<= the cache's {self.window}", got=window, op=op)
            if q_offset < self.rewind_limit:
                reason = (
                    f"the window of token {q_offset} is no longer held; from {self.rewind_limit} on it is"
                )
                expected = f"S <= {self.length - self.rewind_limit}"
                raise InvalidInput("q", expected=expected, got=S, op=op, reason=reason)
        v = self.v
        out = attention(
            q,
            self.k,
            v,
            visible=Causal(q_offset) if window is None else Window(window, q_offset),
            kv_len=self.kv_len,
            kv_start=self._start(kv_start),
            key_offset=self.key_offset,
            scale=scale,
            softcap=softcap,
            backend=backend,
        )
        return unrotate(out, signs=v.signs) if isinstance(v, CodedValues) else out

    def save(self, path: str | Path) -> None:
        """Write the tokens, and the tables of coded V, as a safetensors file that `load` reads back exactly.

        The file appears whole or not at all: killed at any moment, this leaves the file that was there (and
        perhaps a hidden temporary one beside it).

        Raises:
            InvalidInput: as `check`.
            OSError: the file cannot be written; the old one is whole.
        """
        file.write(path, *self.state(), format=_FILE_FORMAT)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `save` writes, and `from_state` takes back: the tokens' rows (views) and the tables of coded V
        by name, and what can be said in JSON.

        Raises:
            InvalidInput: as `check`.
        """
        self.check()
        return {**self._live(), **self._form.tables()}, self._fields()

    @classmethod
    def load(
        cls, path: str | Path, device: str | torch.device | None = None, capacity: int | None = None
    ) -> KVCache:
        """The cache that `save` wrote. The file is mapped, and its rows are copied straight to their places.

        Args:
            path: of the file.
            device: ``None``: the CPU.
            capacity: rows to allocate, enough for the tokens; ``None``: as the cache had.

        Raises:
            InvalidInput: another version, a truncated or damaged file (the message names it), or a capacity
                too small.
            FileNotFoundError: no file.
        """
        op = "KVCache.load"
        fields, tensors = file.read(path, format=_FILE_FORMAT, op=op)
        return cls.from_state(tensors, fields, device=device, capacity=capacity, op=op)

    @classmethod
    def from_state(
        cls,
        tensors: Mapping[str, Tensor],
        fields: Mapping[str, Any],
        *,
        device: str | torch.device | None = None,
        capacity: int | None = None,
        op: str = "KVCache.from_state",
    ) -> KVCache:
        """The cache whose `state` this was; the rows are copied.

        Raises:
            InvalidInput: tables that are not those that the fields name, or a capacity too small.
        """
        B, Hk, T, D = tensors["k"].shape
        if capacity is None:
            capacity = int(fields["capacity"])
        check_count("capacity", capacity, least=max(1, T), op=op)
        cache = cls(
            B,
            Hk,
            capacity,
            D,
            values=fields["values"],
            keys=tensors["k"].dtype,
            device=device,
            codebook=Codebook(tensors["codebook"]) if "codebook" in tensors else None,
            signs=tensors.get("signs"),
            sf=fields.get("sf", 1.0),
            window=fields["window"],
        )
        cache.length, cache.key_offset = fields["length"], fields["key_offset"]
        if cache._fields() != {**fields, "capacity": capacity} or cache.kv_len != T:
            expected = f"tables and rows that agree with {dict(fields)}"
            raise InvalidInput("fields", expected=expected, got=f"{T} rows, {cache._fields()}", op=op)
        for name, rows in cache._live().items():
            rows.copy_(tensors[name])
        return cache

    def _fields(self) -> dict[str, Any]:
        """All of a cache that its tensors do not say."""
        return {
            "values": self.values,
            "length": self.length,
            "key_offset": self.key_offset,
            "capacity": self.capacity,
            "window": self.window,
            **self._form.names(),
        }

    def _start(self, kv_start: int | Tensor | None) -> int | Tensor | None:
        """A position as a row of `k`: what was dropped is row 0, and what is no position stays none."""
        if self.key_offset == 0:
            return kv_start
        if type(kv_start) is int:
            return max(kv_start - self.key_offset, min(kv_start, 0))
        if isinstance(kv_start, Tensor):
            return (kv_start - self.key_offset).maximum(kv_start.clamp(max=0))
        return kv_start

    def _live(self) -> Stores:
        """The rows that hold tokens."""
        return {name: store[:, :, : self.kv_len] for name, store in self._stores.items()}

    def _copied(self, length: int, capacity: int) -> KVCache:
        """`clone`, unchecked."""
        other = copy.copy(self)
        other.length = length
        other._stores = self._allocate(self.k.shape[0], capacity)
        other._finite = allocate([2], torch.bool, self._finite.device).copy_(self._finite)
        for name, rows in other._live().items():
            rows.copy_(self._stores[name][:, :, : other.kv_len])
        return other

    def _allocate(self, batch: int, capacity: int) -> Stores:
        """Memory for a cache like this one."""
        return {
            name: allocate((batch, store.shape[1], capacity, *store.shape[3:]), store.dtype, store.device)
            for name, store in self._stores.items()
        }

    def _rows_to_drop(self, n: int) -> int:
        """How many rows make place for n more: none while there is room, else all that may go."""
        if self.kv_len + n <= self.capacity:
            return 0
        if self.window is None:
            reason = f"length ({self.length}) + n ({n}) > capacity ({self.capacity})"
            expected = f"n <= {self.capacity - self.length}"
            raise InvalidInput("k", expected=expected, got=n, op="KVCache.append", reason=reason)
        left_the_window = max(0, self.kv_len - (self.window - 1))
        dropped = left_the_window // DROPPED_ROWS * DROPPED_ROWS
        held = self.kv_len - dropped
        if held + n > self.capacity:
            always = max(0, self.capacity - self.window + 2 - DROPPED_ROWS)
            reason = (
                f"rows to keep ({held}) + n ({n}) > capacity ({self.capacity}); at any length, appends of "
                f"{always} rows fit beside a window of {self.window}"
            )
            expected = f"n <= {self.capacity - held}"
            raise InvalidInput("k", expected=expected, got=n, op="KVCache.append", reason=reason)
        return dropped

    def _drop(self, dropped: int) -> None:
        """Move the rows behind the first ``dropped`` ones to the front."""
        if dropped == 0:
            return
        for rows in self._live().values():
            for start in range(dropped, self.kv_len, dropped):  # by pieces that do not overlap where they go
                piece = rows[:, :, start : start + dropped]
                rows[:, :, start - dropped : start - dropped + piece.shape[2]].copy_(piece)
        self.key_offset += dropped

    def _check_length(self, length: int, op: str) -> None:
        check_count("length", length, least=0, most=self.length, op=op)
        if length < self.rewind_limit:
            reason = f"{length} is below the rewind limit {self.rewind_limit}: its window is no longer held"
            expected = f"an int in [{self.rewind_limit}, {self.length}]"
            raise InvalidInput("length", expected=expected, got=length, op=op, reason=reason)


def _check_room(capacity: int, window: int, *, op: str) -> None:
    """Refuse a capacity in which a bounded cache could not drop rows."""
    if capacity < window + DROPPED_ROWS:
        reason = f"capacity ({capacity}) < window ({window}) + {DROPPED_ROWS}, dropped at once"
        expected = f">= {window + DROPPED_ROWS}"
        raise InvalidInput("capacity", expected=expected, got=capacity, op=op, reason=reason)
