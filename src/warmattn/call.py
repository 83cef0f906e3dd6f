"""`AttentionCall`: the frozen, fully checked description of one call. Every error of the contract is raised
here.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warmattn.codec.values import HEAD_DIMS, CodedValues, norm_blocks
from warmattn.errors import InvalidInput, Unsupported
from warmattn.visibility import TILE_KEYS, TILE_ROWS, Causal, External, Full, Visibility, Window, tile_grid

__all__ = ["LARGEST_POSITION", "AttentionCall", "round_to_f32"]

LARGEST_POSITION = 2**31 - 1
_BEYOND_POSITIONS = 2**33
_CODEBOOK_SIZES = (32, 64, 256)

_SCORE_DTYPES = (torch.float16, torch.bfloat16)
_DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INTS = (int, torch.SymInt)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


class AttentionCall(NamedTuple):
    """One attention call, flat, as the registered op carries it. Axes: B batch, H query heads, Hk key/value
    heads, S query rows, T keys, C capacity, D head dim.

    Attributes:
        q: ``[B, H, S, D]`` float16 or bfloat16.
        k: ``[B, Hk, C, D]``, q's dtype.
        v: dense ``[B, Hk, R, D]`` float32, float16 or bfloat16, or uint8 codes of that shape.
        norms: float32 ``[B, Hk, R, n]`` (or without the last axis where n = 1), n = max(1, D // 256); codes
            only.
        centroids: float32 ``[2**bits]``; codes only.
        sf: the codec's scale factor at D = 512, rounded to float32.
        causal, window: `Causal` is ``(True, None)``, `Window` ``(True, W)``; both off for the other kinds.
        mask, tile_map: of `External`.
        q_offset, kv_len, kv_start: an int, or an int32 tensor ``[B]``.
        key_offset: absolute position of K's row 0.
        scale: multiplies the scores, rounded to float32.
        softcap: ``c`` in ``c * tanh(s / c)``, rounded to float32, or ``None``.
        out, lse: float32 ``[B, H, S, D]`` and ``[B, H, S]``, written by a backend; ``None`` where nothing
            is asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    norms: Tensor | None
    centroids: Tensor | None
    sf: float
    causal: bool
    window: int | None
    mask: Tensor | None
    tile_map: Tensor | None
    q_offset: int | Tensor
    kv_len: int | Tensor
    kv_start: int | Tensor
    key_offset: int
    scale: float
    softcap: float | None
    out: Tensor | None = None
    lse: Tensor | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor | CodedValues,
        *,
        visible: Visibility,
        kv_len: int | Tensor | None = None,
        kv_start: int | Tensor | None = None,
        key_offset: int = 0,
        scale: float | None = None,
        softcap: float | None = None,
        out: Tensor | None = None,
    ) -> AttentionCall:
        """Spell out `warmattn.attention`'s arguments and defaults. Checks only that ``visible`` is of a
        known kind.

        Raises:
            InvalidInput: ``visible`` is none of `Causal`, `Window`, `External`, `Full`.
        """
        causal, window, mask, tile_map, q_offset = False, None, None, None, None
        if isinstance(visible, Causal):
            causal, q_offset = True, visible.q_offset
        elif isinstance(visible, Window):
            causal, window, q_offset = True, visible.window, visible.q_offset
        elif isinstance(visible, External):
            mask, tile_map = visible.mask, visible.tile_map
            if mask is None:
                raise InvalidInput("mask", expected="a float16 or bool tensor", got=None)
        elif not isinstance(visible, Full):
            raise InvalidInput("visible", expected="Causal, Window, External or Full", got=visible)

        norms, centroids, sf = None, None, 1.0
        if isinstance(v, CodedValues):
            norms, centroids, sf = v.norms, v.codebook.on(v.codes.device), v.sf
            v = v.codes
        if kv_len is None:
            kv_len = k.shape[2] if isinstance(k, Tensor) and k.ndim == 4 else 0
        if scale is None:
            has_head_dim = isinstance(q, Tensor) and q.ndim > 0 and q.shape[-1] > 0
            scale = 1.0 / math.sqrt(q.shape[-1]) if has_head_dim else 1.0
        return cls(
            q,
            k,
            v,
            norms,
            centroids,
            round_to_f32(sf),
            causal,
            _bound(window),
            mask,
            tile_map,
            0 if q_offset is None else q_offset,
            kv_len,
            0 if kv_start is None else kv_start,
            key_offset,
            round_to_f32(scale),
            round_to_f32(softcap),
            out,
        )

    @property
    def B(self) -> int:  # noqa: N802
        return self.q.shape[0]

    @property
    def H(self) -> int:  # noqa: N802
        return self.q.shape[1]

    @property
    def Hk(self) -> int:  # noqa: N802
        return self.k.shape[1]

    @property
    def S(self) -> int:  # noqa: N802
        return self.q.shape[2]

    @property
    def C(self) -> int:  # noqa: N802
        return self.k.shape[2]

    @property
    def D(self) -> int:  # noqa: N802
        return self.q.shape[3]

    @property
    def group(self) -> int:
        """Query heads that share one KV head: head h reads KV head ``h // group``."""
        return self.H // self.Hk

    @property
    def coded(self) -> bool:
        return self.norms is not None

    def check(self, *, values: bool = True, offsets: bool = True) -> AttentionCall:
        """Raise the first failure, in the order of the contract (section 7); return self when there is none.

        Args:
            values: read CPU length tensors and compare addresses. ``False`` while tracing, where neither
                exists.
            offsets: hold ``q_offset + S <= key_offset + T``; partial results of an earlier range do not.

        Raises:
            Unsupported: head dim; an operand that requires grad while grad is on.
            InvalidInput: everything else, naming operand, expected and got.
        """
        self._check_head_dim()
        kv_lens, starts, q_offsets = (_known(n, values) for n in (self.kv_len, self.kv_start, self.q_offset))
        self._check_axes(kv_lens)
        if not (_is_number(self.scale) and 0 < self.scale < math.inf):
            raise InvalidInput("scale", expected="finite and > 0 as float32", got=self.scale)
        self._check_capacity(kv_lens)
        self._check_scores()
        self._check_values(kv_lens)
        self._check_mask(kv_lens)
        if self.window is not None and not (_is_position(self.window) and self.window >= 1):
            raise InvalidInput("window", expected="an int >= 1", got=self.window)
        self._check_offsets(kv_lens, q_offsets, offsets)
        self._check_starts(kv_lens, starts)
        if self.softcap is not None and not (_is_number(self.softcap) and 0 < self.softcap < math.inf):
            raise InvalidInput("softcap", expected="finite and > 0 as float32", got=self.softcap)
        self._check_lengths(kv_lens, starts, q_offsets)
        self._check_memory(values)
        return self

    def refuse_grad(self) -> None:
        """Raise where an operand requires grad while grad is on: the kernels are forward only."""
        if not torch.is_grad_enabled():
            return
        for name in ("q", "k", "v", "norms", "centroids", "mask"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.requires_grad:
                raise Unsupported(f"{name} requires grad: forward only, use torch.no_grad()")

    def _check_head_dim(self) -> None:
        for name in ("q", "k", "v"):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor):
                raise InvalidInput(name, expected="a tensor", got=type(tensor).__name__)
            if tensor.ndim != 4:
                raise InvalidInput(name, expected="rank 4, [B, heads, rows, D]", got=list(tensor.shape))
        if self.D not in HEAD_DIMS:
            raise Unsupported(f"q: head dim {self.D}: expected one of {', '.join(map(str, HEAD_DIMS))}")
        self.refuse_grad()

    def _check_axes(self, kv_lens: list[int] | None) -> None:
        axes = {"B": self.B, "H": self.H, "Hk": self.Hk, "S": self.S, "C": self.C}
        for axis, size in axes.items():
            if size < 1:
                operand = "q" if axis in "BHS" else "k"
                raise InvalidInput(
                    operand, expected=f"every axis >= 1 (empty axis {axis})", got=f"{axis} = {size}"
                )
        if kv_lens is not None and min(kv_lens) < 1:
            raise InvalidInput("kv_len", expected="every axis >= 1 (empty axis T)", got=f"T = {min(kv_lens)}")
        if self.H % self.Hk:
            raise InvalidInput("q", expected=f"H a multiple of Hk ({self.Hk})", got=f"H = {self.H}")

    def _check_capacity(self, kv_lens: list[int] | None) -> None:
        if kv_lens is not None and max(kv_lens) > self.C:
            reason = f"T ({max(kv_lens)}) > C ({self.C}), the rows of k"
            raise InvalidInput("kv_len", expected=f"<= {self.C}", got=max(kv_lens), reason=reason)

    def _check_scores(self) -> None:
        q, k, out, lse = self.q, self.k, self.out, self.lse
        if q.dtype not in _SCORE_DTYPES:
            raise InvalidInput("q", expected="float16 or bfloat16", got=q.dtype)
        if k.dtype != q.dtype:
            raise InvalidInput("k", expected=f"q's dtype {q.dtype}", got=k.dtype)
        if k.shape[0] != self.B or k.shape[3] != self.D:
            raise InvalidInput("k", expected=f"[{self.B}, Hk, C, {self.D}]", got=list(k.shape))
        for name, tensor, shape in (("out", out, q.shape), ("lse", lse, q.shape[:3])):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise InvalidInput(name, expected="a tensor", got=type(tensor).__name__)
            if tensor.dtype != torch.float32:
                raise InvalidInput(name, expected="float32", got=tensor.dtype)
            if tensor.shape != shape:
                raise InvalidInput(name, expected=str(list(shape)), got=list(tensor.shape))

    def _check_values(self, kv_lens: list[int] | None) -> None:
        rows = 1 if kv_lens is None else max(kv_lens)
        if not self.coded:
            if self.v.dtype not in _DENSE_DTYPES:
                raise InvalidInput(
                    "v", expected="float32, float16, bfloat16 or CodedValues", got=self.v.dtype
                )
            self._check_value_shape("v", self.v, rows, (self.D,))
            return
        codes, norms, centroids = self.v, self.norms, self.centroids
        if codes.dtype != torch.uint8:
            raise InvalidInput("v.codes", expected="uint8", got=codes.dtype)
        self._check_value_shape("v.codes", codes, rows, (self.D,))
        if not isinstance(norms, Tensor) or norms.dtype != torch.float32:
            raise InvalidInput(
                "v.norms", expected="a float32 tensor", got=getattr(norms, "dtype", type(norms))
            )
        blocks = norm_blocks(self.D)
        self._check_value_shape("v.norms", norms, rows, () if blocks == 1 and norms.ndim == 3 else (blocks,))
        if (
            not isinstance(centroids, Tensor)
            or centroids.dtype != torch.float32
            or centroids.ndim != 1
            or centroids.shape[0] not in _CODEBOOK_SIZES
        ):
            got = f"{centroids.dtype} {list(centroids.shape)}" if isinstance(centroids, Tensor) else centroids
            raise InvalidInput("v.codebook", expected="float32 [32], [64] or [256]", got=got)
        if self.D == 512 and not (_is_number(self.sf) and 0 < self.sf < math.inf):
            raise InvalidInput("v.sf", expected="finite and > 0 as float32", got=self.sf)

    def _check_value_shape(self, name: str, tensor: Tensor, rows: int, last: tuple[int, ...]) -> None:
        shape = tensor.shape
        fits = len(shape) == 3 + len(last) and tuple(shape[3:]) == last and shape[2] >= rows
        if not fits or shape[0] != self.B or shape[1] != self.Hk:
            expected = ", ".join(map(str, (self.B, self.Hk, f">= {rows}", *last)))
            raise InvalidInput(name, expected=f"[{expected}]", got=list(shape))

    def _check_mask(self, kv_lens: list[int] | None) -> None:
        mask, tile_map = self.mask, self.tile_map
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.dtype not in (torch.float16, torch.bool):
            raise InvalidInput("mask", expected="float16 or bool", got=getattr(mask, "dtype", type(mask)))
        shape = tuple(mask.shape)
        keys = max(kv_lens) if kv_lens is not None else (shape[-1] if shape else 0)
        fits = len(shape) in (2, 4) and shape[-2:] == (self.S, keys)
        if not fits or (len(shape) == 4 and (shape[0] not in (1, self.B) or shape[1] not in (1, self.H))):
            expected = f"[{self.S}, {keys}] or [1 or {self.B}, 1 or {self.H}, {self.S}, {keys}]"
            raise InvalidInput("mask", expected=f"[S, T], {expected}", got=list(shape))
        if tile_map is None:
            return
        if not isinstance(tile_map, Tensor) or tile_map.dtype != torch.uint8:
            got = getattr(tile_map, "dtype", type(tile_map))
            raise InvalidInput("tile_map", expected="uint8", got=got)
        grid = tile_grid(self.S, keys)
        if tuple(tile_map.shape) != grid or not tile_map.is_contiguous():
            expected = f"contiguous {list(grid)} ({TILE_ROWS} x {TILE_KEYS} tiles of the mask)"
            got = f"{list(tile_map.shape)}{'' if tile_map.is_contiguous() else ', not contiguous'}"
            raise InvalidInput("tile_map", expected=expected, got=got)

    def _check_offsets(self, kv_lens: list[int] | None, q_offsets: list[int] | None, with_sum: bool) -> None:
        if _is_position(self.key_offset) and self.key_offset < 0:
            raise InvalidInput("key_offset", expected=">= 0", got=self.key_offset)
        if not self.causal or q_offsets is None:
            return
        if min(q_offsets) < 0:
            raise InvalidInput("q_offset", expected=">= 0", got=min(q_offsets))
        if kv_lens is None or not with_sum or not _is_position(self.key_offset):
            return
        count = max(len(q_offsets), len(kv_lens))
        for b in range(count):
            q_offset, kv_len = q_offsets[b % len(q_offsets)], kv_lens[b % len(kv_lens)]
            if q_offset + self.S > self.key_offset + kv_len:
                end = f"key_offset ({self.key_offset}) + T ({kv_len})" if self.key_offset else f"T ({kv_len})"
                where = f" in sequence {b}" if count > 1 else ""
                reason = f"q_offset ({q_offset}) + S ({self.S}) > {end}{where}"
                raise InvalidInput(
                    "q_offset", expected="q_offset + S <= key_offset + T", got=q_offset, reason=reason
                )

    def _check_starts(self, kv_lens: list[int] | None, starts: list[int] | None) -> None:
        if starts is None:
            return
        bounds = [self.C] if kv_lens is None else kv_lens
        for b in range(max(len(starts), len(bounds))):
            start, bound = starts[b % len(starts)], bounds[b % len(bounds)]
            if not 0 <= start <= bound:
                raise InvalidInput("kv_start", expected=f"in [0, T = {bound}]", got=start)

    def _check_lengths(
        self, kv_lens: list[int] | None, starts: list[int] | None, q_offsets: list[int] | None
    ) -> None:
        lengths = (
            ("kv_len", self.kv_len, kv_lens),
            ("kv_start", self.kv_start, starts),
            ("q_offset", self.q_offset, q_offsets),
        )
        for name, length, known in lengths:
            if isinstance(length, Tensor):
                if length.dtype != torch.int32 or tuple(length.shape) != (self.B,):
                    got = f"{length.dtype} {list(length.shape)}"
                    raise InvalidInput(name, expected=f"an int or an int32 tensor [{self.B}]", got=got)
            elif not _is_position(length):
                raise InvalidInput(name, expected=f"an int or an int32 tensor [{self.B}]", got=repr(length))
            elif known is not None and max(known) > LARGEST_POSITION:
                raise InvalidInput(name, expected=f"<= {LARGEST_POSITION}", got=max(known))
        if not _is_position(self.key_offset):
            raise InvalidInput("key_offset", expected="an int", got=repr(self.key_offset))
        if self.key_offset > LARGEST_POSITION:
            raise InvalidInput("key_offset", expected=f"<= {LARGEST_POSITION}", got=self.key_offset)

    def _check_memory(self, values: bool) -> None:
        device = self.q.device
        operands = [
            (name, tensor)
            for name, tensor in (
                ("k", self.k),
                ("v.codes" if self.coded else "v", self.v),
                ("v.norms", self.norms),
                ("v.codebook", self.centroids),
                ("mask", self.mask),
                ("tile_map", self.tile_map),
                ("out", self.out),
                ("lse", self.lse),
            )
            if tensor is not None
        ]
        for name, tensor in operands:
            if tensor.device != device:
                raise InvalidInput(name, expected=f"on q's device {device}", got=tensor.device)
        for name in ("q_offset", "kv_len", "kv_start"):
            length = getattr(self, name)
            if isinstance(length, Tensor) and length.device != device and length.device.type != "cpu":
                raise InvalidInput(name, expected=f"on q's device {device} or the CPU", got=length.device)
        for name, tensor in (("q", self.q), ("k", self.k), ("v", self.v), ("out", self.out)):
            if tensor is not None and tensor.stride(3) != 1:
                expected = "the last axis (D) contiguous, stride 1"
                raise InvalidInput(name, expected=expected, got=f"strides {tensor.stride()}")
        if values:
            inputs = [("q", self.q), *(named for named in operands if named[0] not in ("out", "lse"))]
            for name, output in (("out", self.out), ("lse", self.lse)):
                if output is not None:
                    _check_output_memory(name, output, inputs)


def _check_output_memory(name: str, output: Tensor, inputs: list[tuple[str, Tensor]]) -> None:
    if _repeats_memory(output):
        expected = "distinct memory for every element"
        raise InvalidInput(name, expected=expected, got=f"strides {output.stride()}")
    for other, tensor in inputs:
        if _overlap(output, tensor):
            raise InvalidInput(name, expected="memory of its own", got=f"memory that overlaps {other}")


def _is_position(value: Any) -> bool:
    return isinstance(value, _INTS) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def round_to_f32(value: Any) -> Any:
    """Round a number to float32 (out of range: inf); leave what is not a plain number to the checks.

    While tracing, numbers are left alone too: the op rounds what it is given.
    """
    if type(value) not in (float, int) or torch.compiler.is_compiling():
        return value
    return ctypes.c_float(value).value


def _bound(window: Any) -> Any:
    """A window past every position is `Causal`, however large: keep it within 64 bits."""
    return min(window, _BEYOND_POSITIONS) if _is_position(window) else window


def _known(length: Any, values: bool) -> list[int] | None:
    """The lengths the host may look at: ``[n]`` for an int, all of a CPU tensor, ``None`` for the rest."""
    if _is_position(length):
        return [length]
    if values and isinstance(length, Tensor) and length.device.type == "cpu" and length.numel() > 0:
        return length.flatten().tolist() if length.dtype == torch.int32 else None
    return None


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte. Interleaved views of one buffer may meet in range and yet not
    overlap.
    """
    (a_start, a_end), (b_start, b_end) = _byte_range(a), _byte_range(b)
    if a_end <= b_start or b_end <= a_start:
        return False
    origin = min(a_start, b_start)
    touched = torch.zeros(max(a_end, b_end) - origin, dtype=torch.bool)

    def bytes_of(tensor: Tensor) -> Tensor:
        size = tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        return touched.as_strided((*tensor.shape, size), (*strides, 1), tensor.data_ptr() - origin)

    bytes_of(a).fill_(True)
    return bool(bytes_of(b).any())


def _repeats_memory(tensor: Tensor) -> bool:
    """Whether two indices may name one element: an axis steps less than what the finer axes span."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span = stride * (size - 1) + span
    return False
