"""`AttentionCall`: the frozen, fully checked description of one call. Every error of the contract is raised
here.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from warmattn.codec.values import HEAD_DIMS, CodedValues, norm_blocks
from warmattn.errors import InvalidInput, Unsupported
from warmattn.memory import lie_apart, overlap, repeats_memory, span
from warmattn.visibility import TILE_KEYS, TILE_ROWS, Causal, External, Full, Visibility, Window, tile_grid

__all__ = ["LARGEST_POSITION", "AttentionCall"]

LARGEST_POSITION = 2**31 - 1
_BEYOND_POSITIONS = 2**33
_CODEBOOK_SHAPES = ([32], [64], [256])

_SCORE_DTYPES = (torch.float16, torch.bfloat16)
_DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INTS = (int, torch.SymInt)
_CPU = torch.device("cpu")
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
            if window is None:
                raise InvalidInput("window", expected="an int >= 1", got=None)
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
            sf,
            causal,
            _bound(window),
            mask,
            tile_map,
            0 if q_offset is None else q_offset,
            kv_len,
            0 if kv_start is None else kv_start,
            key_offset,
            scale,
            softcap,
            out,
        )

    def rounded(self) -> AttentionCall:
        """Numbers as the kernels take them: scale, softcap and sf rounded to float32 (out of range: inf)."""
        softcap = None if self.softcap is None else _to_f32(self.softcap)
        return self._replace(scale=_to_f32(self.scale), softcap=softcap, sf=_to_f32(self.sf))

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
            values: read CPU length tensors and compare addresses; traced and meta tensors have neither.
            offsets: hold ``q_offset + S <= key_offset + T``; partial results of an earlier range do not.

        Raises:
            Unsupported: head dim; an operand that requires grad while grad is on.
            InvalidInput: everything else, naming operand, expected and got.
        """
        if values and offsets and self._resembles_a_right_one():
            return self
        q, k, scale, softcap, window = self.q, self.k, self.scale, self.softcap, self.window
        for name, tensor in (("q", q), ("k", k), ("v", self.v)):
            if not isinstance(tensor, Tensor):
                raise InvalidInput(name, expected="a tensor", got=type(tensor).__name__)
            if tensor.ndim != 4:
                raise InvalidInput(name, expected="rank 4, [B, heads, rows, D]", got=list(tensor.shape))
        # What a DTensor holds is checked where it lies, rank by rank.
        values = values and not (isinstance(q, FakeTensor) or q.is_meta or hasattr(q, "placements"))
        B, H, S, D = q.shape
        if D not in HEAD_DIMS:
            raise Unsupported(f"q: head dim {D}: expected one of {', '.join(map(str, HEAD_DIMS))}")
        self.refuse_grad()

        kv_lens = _known(self.kv_len, values)
        Hk, C = k.shape[1:3]
        T = None if kv_lens is None else max(kv_lens)
        shortest = 1 if kv_lens is None else min(kv_lens)
        if B < 1 or H < 1 or S < 1 or Hk < 1 or C < 1 or shortest < 1:
            _refuse_empty_axis({"B": B, "H": H, "S": S, "Hk": Hk, "C": C, "T": shortest})
        if H % Hk:
            raise InvalidInput("q", expected=f"H a multiple of Hk ({Hk})", got=f"H = {H}")
        if not (_is_number(scale) and 0.0 < scale < math.inf):
            raise InvalidInput("scale", expected="finite and > 0 as float32", got=scale)
        if T is not None and T > C:
            reason = f"T ({T}) > C ({C}), the rows of k"
            raise InvalidInput("kv_len", expected=f"<= {C}", got=T, reason=reason)

        self._check_scores()
        self._check_values(1 if T is None else T)
        if self.mask is not None:
            self._check_mask(self.mask, T)
        if window is not None and not (_is_position(window) and window >= 1):
            raise InvalidInput("window", expected="an int >= 1", got=window)
        starts, q_offsets = _known(self.kv_start, values), _known(self.q_offset, values)
        self._check_offsets(kv_lens, q_offsets, with_sum=offsets)
        if starts is not None and starts != [0]:
            _check_starts(starts, [C] if kv_lens is None else kv_lens)
        if softcap is not None and not (_is_number(softcap) and 0.0 < softcap < math.inf):
            raise InvalidInput("softcap", expected="finite and > 0 as float32", got=softcap)
        _check_length("kv_len", self.kv_len, B)
        _check_length("kv_start", self.kv_start, B)
        _check_length("q_offset", self.q_offset, B)
        if not _is_position(self.key_offset):
            raise InvalidInput("key_offset", expected="an int", got=repr(self.key_offset))
        if self.key_offset > LARGEST_POSITION:
            raise InvalidInput("key_offset", expected=f"<= {LARGEST_POSITION}", got=self.key_offset)

        self._check_devices()
        v_name = "v.codes" if self.coded else "v"
        for name, tensor in (("q", q), ("k", k), (v_name, self.v), ("out", self.out)):
            if tensor is not None and tensor.stride(3) != 1:
                expected = "the last axis (D) contiguous, stride 1"
                raise InvalidInput(name, expected=expected, got=f"strides {tensor.stride()}")
        if values and self.out is not None:
            self._check_output_memory("out", self.out)
        if values and self.lse is not None:
            self._check_output_memory("lse", self.lse)
        if values and self.mask is None and type(q) is Tensor:
            if len(_RIGHT_LAYOUTS) >= _LAYOUTS_KEPT:
                _RIGHT_LAYOUTS.clear()
            _RIGHT_LAYOUTS[self.layout()] = [0 if t is None else span(t) for t in self._tensors()]
        return self

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return (*self._inputs(), self.out, self.lse)

    def layout(self) -> tuple[Any, ...]:
        """All of the tensors but lengths that a check or a launch asks for, addresses aside; hashable."""
        layout: list[Any] = []
        for t in self._tensors():
            layout += (None,) if t is None else (t.shape, t.stride(), t.dtype, t.device, type(t))
        return tuple(layout)

    def _resembles_a_right_one(self) -> bool:
        """Whether tensors of this layout have passed before and the numbers are plainly right, as nearly all
        calls of a server are. ``False`` says nothing.
        """
        kv_len, q_offset, kv_start, key_offset = self.kv_len, self.q_offset, self.kv_start, self.key_offset
        if not (type(kv_len) is type(q_offset) is type(kv_start) is type(key_offset) is int):
            return False
        tensors = self._tensors()
        if self.mask is not None or not all(t is None or type(t) is Tensor for t in tensors):
            return False
        spans = _RIGHT_LAYOUTS.get(self.layout())
        if spans is None:
            return False
        S, C, scale, softcap, window = self.q.shape[2], self.k.shape[2], self.scale, self.softcap, self.window
        rows = self.v.shape[2] if self.norms is None else min(self.v.shape[2], self.norms.shape[2])
        numbers = (
            0 <= kv_start <= kv_len <= min(C, rows, LARGEST_POSITION)
            and kv_len >= 1
            and 0 <= q_offset <= LARGEST_POSITION
            and 0 <= key_offset <= LARGEST_POSITION
            and (not self.causal or q_offset + S <= key_offset + kv_len)
            and type(scale) is type(self.sf) is float
            and 0.0 < scale < math.inf
            and 0.0 < self.sf < math.inf
            and (softcap is None or (type(softcap) is float and 0.0 < softcap < math.inf))
            and (window is None or (type(window) is int and window >= 1))
        )
        if not numbers or (
            torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        ):
            return False
        return lie_apart(tensors, spans, last=2)

    def refuse_grad(self) -> None:
        """Raise where an operand requires grad while grad is on: the kernels are forward only."""
        operands = (*self._inputs(), self.out)
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in operands):
            named = [*self._named_inputs(), ("out", self.out)]
            name = next(n for n, t in named if isinstance(t, Tensor) and t.requires_grad)
            raise Unsupported(f"{name} requires grad: forward only, use torch.no_grad()")

    def _inputs(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.v, self.norms, self.centroids, self.mask, self.tile_map

    def _named_inputs(self) -> list[tuple[str, Tensor]]:
        """The inputs that are there, by the names that errors use."""
        names = ("q", "k", "v.codes" if self.coded else "v", "v.norms", "v.codebook", "mask", "tile_map")
        return [(n, t) for n, t in zip(names, self._inputs(), strict=True) if t is not None]

    def _check_scores(self) -> None:
        q, k = self.q, self.k
        if q.dtype not in _SCORE_DTYPES:
            raise InvalidInput("q", expected="float16 or bfloat16", got=q.dtype)
        if k.dtype != q.dtype:
            raise InvalidInput("k", expected=f"q's dtype {q.dtype}", got=k.dtype)
        if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
            raise InvalidInput("k", expected=f"[{self.B}, Hk, C, {self.D}]", got=list(k.shape))
        for name, tensor in (("out", self.out), ("lse", self.lse)):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise InvalidInput(name, expected="a tensor", got=type(tensor).__name__)
            if tensor.dtype != torch.float32:
                raise InvalidInput(name, expected="float32", got=tensor.dtype)
            shape = q.shape if name == "out" else q.shape[:3]
            if tensor.shape != shape:
                raise InvalidInput(name, expected=str(list(shape)), got=list(tensor.shape))

    def _check_values(self, rows: int) -> None:
        v, norms, centroids, D = self.v, self.norms, self.centroids, self.D
        if norms is None:
            if v.dtype not in _DENSE_DTYPES:
                raise InvalidInput("v", expected="float32, float16, bfloat16 or CodedValues", got=v.dtype)
            self._check_value_shape("v", v, rows, (D,))
            return
        if v.dtype != torch.uint8:
            raise InvalidInput("v.codes", expected="uint8", got=v.dtype)
        self._check_value_shape("v.codes", v, rows, (D,))
        if norms.dtype != torch.float32:
            raise InvalidInput("v.norms", expected="float32", got=norms.dtype)
        blocks = norm_blocks(D)
        without_axis = blocks == 1 and norms.ndim == 3
        self._check_value_shape("v.norms", norms, rows, () if without_axis else (blocks,))
        if (
            centroids is None
            or centroids.dtype != torch.float32
            or list(centroids.shape) not in _CODEBOOK_SHAPES
        ):
            got = None if centroids is None else f"{centroids.dtype} {list(centroids.shape)}"
            raise InvalidInput("v.codebook", expected="float32 [32], [64] or [256]", got=got)
        if D == 512 and not (_is_number(self.sf) and 0.0 < self.sf < math.inf):
            raise InvalidInput("v.sf", expected="finite and > 0 as float32", got=self.sf)

    def _check_value_shape(self, name: str, tensor: Tensor, rows: int, last: tuple[int, ...]) -> None:
        shape = tuple(tensor.shape)
        fits = shape[:2] == (self.B, self.Hk) and len(shape) == 3 + len(last) and shape[3:] == last
        if not fits or shape[2] < rows:
            expected = ", ".join(map(str, (self.B, self.Hk, f">= {rows}", *last)))
            raise InvalidInput(name, expected=f"[{expected}]", got=list(shape))

    def _check_mask(self, mask: Tensor, T: int | None) -> None:
        if not isinstance(mask, Tensor) or mask.dtype not in (torch.float16, torch.bool):
            raise InvalidInput("mask", expected="float16 or bool", got=getattr(mask, "dtype", type(mask)))
        shape, B, H, S = tuple(mask.shape), self.B, self.H, self.S
        # Lengths that only the device knows: the kernel reads no column past a sequence's own length.
        keys = shape[-1] if T is None and shape else T
        fits = len(shape) in (2, 4) and shape[-2:] == (S, keys)
        if not fits or (len(shape) == 4 and (shape[0] not in (1, B) or shape[1] not in (1, H))):
            expected = f"[S, T] = [{S}, {keys}], or [1 or {B}, 1 or {H}, {S}, {keys}]"
            raise InvalidInput("mask", expected=expected, got=list(shape))
        tile_map = self.tile_map
        if tile_map is None:
            return
        if not isinstance(tile_map, Tensor) or tile_map.dtype != torch.uint8:
            raise InvalidInput("tile_map", expected="uint8", got=getattr(tile_map, "dtype", type(tile_map)))
        grid = tile_grid(S, shape[-1])
        if tuple(tile_map.shape) != grid or not tile_map.is_contiguous():
            expected = f"contiguous {list(grid)} ({TILE_ROWS} x {TILE_KEYS} tiles of the mask)"
            got = f"{list(tile_map.shape)}{'' if tile_map.is_contiguous() else ', not contiguous'}"
            raise InvalidInput("tile_map", expected=expected, got=got)

    def _check_offsets(
        self, kv_lens: list[int] | None, q_offsets: list[int] | None, *, with_sum: bool
    ) -> None:
        key_offset = self.key_offset if _is_position(self.key_offset) else 0
        if key_offset < 0:
            raise InvalidInput("key_offset", expected=">= 0", got=key_offset)
        if not self.causal or q_offsets is None:
            return
        if min(q_offsets) < 0:
            raise InvalidInput("q_offset", expected=">= 0", got=min(q_offsets))
        if kv_lens is None or not with_sum:
            return
        S, count = self.S, max(len(q_offsets), len(kv_lens))
        for b in range(count):
            q_offset, kv_len = q_offsets[b % len(q_offsets)], kv_lens[b % len(kv_lens)]
            if q_offset + S > key_offset + kv_len:
                end = f"key_offset ({key_offset}) + T ({kv_len})" if key_offset else f"T ({kv_len})"
                where = f" in sequence {b}" if count > 1 else ""
                reason = f"q_offset ({q_offset}) + S ({S}) > {end}{where}"
                expected = "q_offset + S <= key_offset + T"
                raise InvalidInput("q_offset", expected=expected, got=q_offset, reason=reason)

    def _check_devices(self) -> None:
        device = self.q.device
        if any(t is not None and t.device != device for t in (*self._inputs(), self.out, self.lse)):
            outputs = [(n, t) for n, t in (("out", self.out), ("lse", self.lse)) if t is not None]
            name, tensor = next((n, t) for n, t in self._named_inputs() + outputs if t.device != device)
            raise InvalidInput(name, expected=f"on q's device {device}", got=tensor.device)
        for name, length in (
            ("q_offset", self.q_offset),
            ("kv_len", self.kv_len),
            ("kv_start", self.kv_start),
        ):
            if isinstance(length, Tensor) and length.device not in (device, _CPU):
                raise InvalidInput(name, expected=f"on q's device {device} or the CPU", got=length.device)

    def _check_output_memory(self, name: str, output: Tensor) -> None:
        if repeats_memory(output):
            expected = "distinct memory for every element"
            raise InvalidInput(name, expected=expected, got=f"strides {output.stride()}")
        lengths = (("q_offset", self.q_offset), ("kv_len", self.kv_len), ("kv_start", self.kv_start))
        for other, tensor in (*self._named_inputs(), *lengths):
            if isinstance(tensor, Tensor) and overlap(output, tensor):
                raise InvalidInput(name, expected="memory of its own", got=f"memory that overlaps {other}")


_RIGHT_LAYOUTS: dict[tuple[Any, ...], list[int]] = {}
"""Layouts that passed every check, with the bytes that each tensor spans."""
_LAYOUTS_KEPT = 4096


def _refuse_empty_axis(sizes: dict[str, int]) -> NoReturn:
    axis = next(axis for axis, size in sizes.items() if size < 1)
    operand = {"B": "q", "H": "q", "S": "q", "Hk": "k", "C": "k", "T": "kv_len"}[axis]
    raise InvalidInput(
        operand, expected=f"every axis >= 1 (empty axis {axis})", got=f"{axis} = {sizes[axis]}"
    )


def _check_starts(starts: list[int], kv_lens: list[int]) -> None:
    for b in range(max(len(starts), len(kv_lens))):
        start, kv_len = starts[b % len(starts)], kv_lens[b % len(kv_lens)]
        if not 0 <= start <= kv_len:
            raise InvalidInput("kv_start", expected=f"in [0, T = {kv_len}]", got=start)


def _check_length(name: str, length: Any, B: int) -> None:
    if isinstance(length, Tensor):
        if length.dtype != torch.int32 or tuple(length.shape) != (B,):
            got = f"{length.dtype} {list(length.shape)}"
            raise InvalidInput(name, expected=f"an int or an int32 tensor [{B}]", got=got)
    elif not _is_position(length):
        raise InvalidInput(name, expected=f"an int or an int32 tensor [{B}]", got=repr(length))
    elif length > LARGEST_POSITION:
        raise InvalidInput(name, expected=f"<= {LARGEST_POSITION}", got=length)


def _is_position(value: Any) -> bool:
    return type(value) is int or (isinstance(value, _INTS) and not isinstance(value, bool))


def _is_number(value: Any) -> bool:
    return type(value) is float or (isinstance(value, _NUMBERS) and not isinstance(value, bool))


def _to_f32(value: Any) -> Any:
    """What is not a plain number is left to the checks."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) >= 2**128:  # too large for a C double, perhaps
        return math.inf if value > 0 else -math.inf
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
