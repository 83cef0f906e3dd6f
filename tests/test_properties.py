"""The contract over random calls: shapes, lengths, visibility, strides, poison wherever nothing may read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from warmattn import Causal, CodedValues, External, Full, Window, attention, reference, tile_map
from warmattn.testing import (
    VALUE_FORMS,
    assert_accurate,
    assert_same_bits,
    lse_error,
    lse_tolerance,
    make_values,
)
from warmattn.visibility import Visibility

INF = math.inf
POISON = (math.nan, INF, -INF, 65504.0)
Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One valid call, its operands contiguous and clean: 0 in every row past a sequence's last key.

    Attributes:
        kv_lens, kv_starts, q_offsets: one for each sequence, whether the call gives an int or a tensor.
        mask: of `External`; ``None`` otherwise.
        arguments: the other keywords of `attention`.
    """

    q: Tensor
    k: Tensor
    v: Tensor | CodedValues
    kv_lens: list[int]
    kv_starts: list[int]
    q_offsets: list[int]
    causal: bool
    window: int | None
    mask: Tensor | None
    key_offset: int
    arguments: dict[str, Any]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        shapes = [(list(t.shape), t.dtype) for t in (self.q, self.k)]
        mask = None if self.mask is None else (list(self.mask.shape), self.mask.dtype)
        v = self.v.dtype if isinstance(self.v, Tensor) else f"codes of {self.v.bits} bits"
        printer.text(f"Case(q, k: {shapes}, v: {v}, mask: {mask}, {self.arguments})")

    def seen(self) -> Tensor:
        """bool ``[B, H, S, C]``: section 2 of the contract as one predicate."""
        B, H, S, _ = self.q.shape
        device = self.q.device

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device).view(B, 1, 1, 1)

        row = torch.arange(self.k.shape[2], device=device).view(1, 1, 1, -1)
        seen = (row >= column(self.kv_starts)) & (row < column(self.kv_lens))
        position = column(self.q_offsets) + torch.arange(S, device=device).view(S, 1)
        distance = position - (self.key_offset + row)
        if self.causal:
            seen = seen & (distance >= 0)
        if self.window is not None:
            seen = seen & (distance < self.window)
        seen = seen.expand(B, H, S, -1)
        if self.mask is not None:
            T = self.mask.shape[-1]
            shown = self.mask if self.mask.dtype == torch.bool else self.mask > -INF
            seen = seen & torch.nn.functional.pad(shown, (0, seen.shape[3] - T)).expand_as(seen)
        return seen

    def shown_to_some_row(self) -> Tensor:
        """bool ``[B, Hk, C]``: keys that some row of the call sees."""
        B, Hk, C, _ = self.k.shape
        return self.seen().reshape(B, Hk, -1, C).any(dim=2)

    def to(self, device: torch.device) -> Case:
        """The same call with its operands on ``device``; lengths and offsets stay on the CPU."""
        v, mask, arguments = self.v, self.mask, self.arguments
        if isinstance(v, CodedValues):
            v = CodedValues(v.codes.to(device), v.norms.to(device), v.codebook)
        else:
            v = v.to(device)
        if mask is not None:
            mask, tiles = mask.to(device), arguments["visible"].tile_map
            visible = External(mask, None if tiles is None else tiles.to(device))
            arguments = arguments | {"visible": visible}
        return replace(self, q=self.q.to(device), k=self.k.to(device), v=v, mask=mask, arguments=arguments)

    def run(self, **changes: Any) -> Result:
        operands: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v}
        return attention(**(operands | self.arguments | changes), return_lse=True)


COMBINATIONS = 24


def chooser(draw: st.DrawFn, device: torch.device) -> Callable[[list[Any], str], Any]:
    """Picks what the choice of a kernel depends on. A GPU takes seconds to compile one, so there all that
    could meet is thinned to `COMBINATIONS`, in which every option is as frequent as the next.
    """
    if device.type == "cpu":
        return lambda options, name: draw(st.sampled_from(options), name)
    combination = draw(st.integers(0, COMBINATIONS - 1), "combination")

    def pick(options: list[Any], name: str) -> Any:
        column = (options * COMBINATIONS)[:COMBINATIONS]
        random.Random(f"the {name}").shuffle(column)
        return column[combination]

    return pick


@st.composite
def cases(draw: st.DrawFn, device: torch.device) -> Case:
    pick = chooser(draw, device)
    D = pick([64, 128, 256, 512], "D")
    kind = pick(["causal", "window", "external", "full"], "kind")
    dtype = pick([torch.float16, torch.bfloat16], "dtype")
    values = pick(list(VALUE_FORMS), "values")
    softcap = pick([None, None, 0.5, 30.0], "softcap")
    in_tensors, with_map, as_bool = (pick([False, True], name) for name in ("tensors", "map", "bool"))
    T = draw(st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 256, 300, 4097])), "T")
    B, Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 8]))
    rows = st.integers(1, 6) if T > 1000 else st.sampled_from([1, 2, 3, 8, 31, 32, 33, 65])
    S = min(draw(rows, "S"), T)
    C = T + draw(st.integers(0, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1), "data"))

    def per_sequence(least: int, most: list[int]) -> tuple[list[int], int | Tensor]:
        """A value for each sequence, and how the call is to be given them."""
        if in_tensors and draw(st.booleans()):
            drawn = [draw(st.integers(least, bound)) for bound in most]
            return drawn, torch.tensor(drawn, dtype=torch.int32)
        value = draw(st.sampled_from([least, min(most)]))
        return [value] * B, value

    kv_lens, kv_len = per_sequence(S, [T] * B)
    T = max(kv_lens)
    kv_starts, kv_start = per_sequence(0, kv_lens)
    key_offset = draw(st.sampled_from([0, 0, 5, 4096]))
    q_offsets, q_offset = per_sequence(0, [key_offset + length - S for length in kv_lens])
    window = draw(st.sampled_from([1, 2, 16, 100, T, 10**12])) if kind == "window" else None

    visible: Visibility = Full()
    mask = None
    if kind == "causal":
        visible = Causal(q_offset)
    elif window is not None:
        visible = Window(window, q_offset)
    elif kind == "external":
        mask = draw(masks(B, Hk * group, S, T, as_bool, generator))
        visible = External(mask, tile_map(mask) if with_map else None)

    k = torch.zeros(B, Hk, C, D, dtype=dtype)
    v = torch.zeros(B, Hk, C, D)
    for b, length in enumerate(kv_lens):
        k[b, :, :length] = torch.randn(Hk, length, D, generator=generator).to(dtype)
        v[b, :, :length] = torch.randn(Hk, length, D, generator=generator)
    case = Case(
        q=torch.randn(B, Hk * group, S, D, generator=generator).to(dtype),
        k=k,
        v=make_values(v, C, values),
        kv_lens=kv_lens,
        kv_starts=kv_starts,
        q_offsets=q_offsets,
        causal=kind in ("causal", "window"),
        window=window,
        mask=mask,
        key_offset=key_offset,
        arguments={
            "visible": visible,
            "kv_len": kv_len,
            "kv_start": kv_start,
            "key_offset": key_offset,
            # At most 1/√D, for which the contract bounds the error.
            "scale": draw(st.sampled_from([None, 0.03])),
            "softcap": softcap,
        },
    )
    return case.to(device)


@st.composite
def masks(
    draw: st.DrawFn, B: int, H: int, S: int, T: int, as_bool: bool, generator: torch.Generator
) -> Tensor:
    """Open, hidden and mixed tiles; the mixed ones with finite cells or without; any rank and strides."""
    shape = draw(st.sampled_from([(S, T), (1, 1, S, T), (B, 1, S, T), (1, H, S, T), (B, H, S, T)]), "mask")
    kinds = torch.randint(3, (-(-S // 32), -(-T // 16)), generator=generator)
    kinds = kinds.repeat_interleave(32, dim=0).repeat_interleave(16, dim=1)[:S, :T]
    mixed = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    shown = (kinds == 2) | (mixed & (kinds == 1))
    if draw(st.booleans()):
        shown = shown.mT.contiguous().mT
    if as_bool:
        return shown
    finite = 2 * torch.randn(shape, generator=generator) if draw(st.booleans()) else -torch.zeros(shape)
    cells = torch.where(kinds == 2, 0.0, finite)
    return torch.where(shown, cells, -INF).half()


# Layouts of [B, heads, rows, D].


def contiguous(tensor: Tensor, filler: float) -> Tensor:
    return tensor.clone()


def rows_before_heads(tensor: Tensor, filler: float) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def padded_and_unaligned(tensor: Tensor, filler: float) -> Tensor:
    """A view into a larger buffer of ``filler``, from an odd element on, with gaps along every axis but D."""
    B, heads, rows, D = tensor.shape
    buffer = tensor.new_full((B + 1, heads + 1, rows + 2, D + 5), filler)
    view = buffer[:B, :heads, 1 : rows + 1, 3 : D + 3]
    view.copy_(tensor)
    return view


def repeated_over_the_batch(tensor: Tensor, filler: float) -> Tensor:
    """Stride 0 where every sequence holds the same."""
    if bool((tensor == tensor[:1]).all()):
        return tensor[:1].clone().expand_as(tensor)
    return tensor.clone()


Layout = Callable[[Tensor, float], Tensor]
layouts = st.sampled_from([contiguous, rows_before_heads, padded_and_unaligned, repeated_over_the_batch])


def poisoned(case: Case, poison: float, layout: Layout) -> Case:
    """The same call with poison in every key that no row sees, laid out anew."""
    hidden = ~case.shown_to_some_row()[..., None]
    if isinstance(case.v, Tensor):
        v = layout(case.v.masked_fill(hidden, poison), poison)
    else:
        norms = layout(case.v.norms.masked_fill(hidden, poison), poison)
        v = CodedValues(layout(case.v.codes.masked_fill(hidden, 255), 255), norms, case.v.codebook)
    return replace(case, q=layout(case.q, poison), k=layout(case.k.masked_fill(hidden, poison), poison), v=v)


# The properties.


@settings(max_examples=300)
@given(data=st.data())
def test_as_accurate_as_the_contract_says(device: torch.device, data: st.DataObject) -> None:
    case = data.draw(cases(device))
    out, lse = case.run()
    exact, exact_lse = reference.attention(case.q, case.k, case.v, **case.arguments)
    blind = ~case.seen().any(dim=3)
    event(f"some rows see nothing: {bool(blind.any())}")
    assert_same_bits(out[blind], torch.zeros_like(out[blind]))
    assert_same_bits(lse[blind], torch.full_like(lse[blind], -INF))
    if not bool(blind.all()):
        assert_accurate(out, exact, keys=max(case.kv_lens))
        assert lse_error(lse[~blind], exact_lse[~blind]) <= lse_tolerance(lse[~blind])


@settings(max_examples=300)
@given(data=st.data(), layout=layouts, poison=st.sampled_from(POISON))
def test_layout_and_unread_memory_change_no_bit(
    device: torch.device, data: st.DataObject, layout: Layout, poison: float
) -> None:
    case = data.draw(cases(device))
    expected = case.run()
    hostile = poisoned(case, poison, layout)
    for actual, wanted in zip(hostile.run(), expected, strict=True):
        assert_same_bits(actual, wanted)


@settings(max_examples=100)
@given(data=st.data())
def test_every_element_of_out_is_written_and_nothing_beyond(
    device: torch.device, data: st.DataObject
) -> None:
    case = data.draw(cases(device))
    B, H, S, D = case.q.shape
    guard = 7777.0
    buffer = torch.full((B, S + 2, H + 1, D + 4), guard, device=device)
    out = buffer[:, 1 : S + 1, :H, 2 : D + 2].transpose(1, 2)
    out.fill_(math.nan)
    before = [tensor.clone() for tensor in (case.q, case.k)]
    result, _ = case.run(out=out)
    assert result is out
    assert_same_bits(out, case.run()[0])
    out.fill_(guard)
    assert bool((buffer == guard).all())
    assert all(map(torch.equal, (case.q, case.k), before))


@settings(max_examples=300)
@given(data=st.data(), poison=st.sampled_from([math.nan, INF, -INF]))
def test_a_non_finite_key_or_value_stays_in_its_rows(data: st.DataObject, poison: float) -> None:
    """Planted at one key, it makes exactly the rows that see the key non-finite: no other bit changes.

    The CPU backend promises it; docs/cuda.md says what the CUDA backend does.
    """
    case = data.draw(cases(torch.device("cpu")))
    b = data.draw(st.integers(0, case.k.shape[0] - 1), "b")
    kv_head = data.draw(st.integers(0, case.k.shape[1] - 1), "kv_head")
    key = data.draw(st.integers(0, case.kv_lens[b] - 1), "key")
    k, v = case.k.clone(), case.v
    if data.draw(st.booleans(), "in K"):
        k[b, kv_head, key] = poison  # all of it: inf at one place alone may give a score of −inf
    elif isinstance(v, Tensor):
        v = v.clone()
        v[b, kv_head, key, data.draw(st.integers(0, v.shape[3] - 1), "d")] = poison
    else:
        norms = v.norms.clone()
        norms[b, kv_head, key, -1] = poison
        v = CodedValues(v.codes, norms, v.codebook)

    expected, actual = case.run(), case.run(k=k, v=v)
    heads = torch.arange(case.q.shape[1]) // (case.q.shape[1] // case.k.shape[1])
    sees = torch.zeros(case.q.shape[:3], dtype=torch.bool)
    sees[b] = case.seen()[b, :, :, key] & (heads == kv_head)[:, None]
    event(f"some rows see the key: {bool(sees.any())}")
    assert torch.equal(~actual[0].isfinite().all(dim=3), sees)
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a[~sees], e[~sees])


@settings(max_examples=300)
@given(data=st.data())
def test_a_row_alone_has_the_same_bits(device: torch.device, data: st.DataObject) -> None:
    """One row of one head of one sequence, over no more keys than it can see."""
    case = data.draw(cases(device))
    B, H, S, _ = case.q.shape
    b, h, i = (data.draw(st.integers(0, n - 1), name) for name, n in (("b", B), ("h", H), ("i", S)))
    sequence, head = slice(b, b + 1), slice(h // (H // case.k.shape[1]), h // (H // case.k.shape[1]) + 1)
    T, position = case.kv_lens[b], case.q_offsets[b] + i
    if case.causal:
        T = max(1, min(T, position + 1 - case.key_offset))
    visible: Visibility = Full()
    if case.mask is not None:
        plane = case.mask.expand(B, H, S, -1)[b, h]
        visible = External(plane[i : i + 1, :T])
    elif case.window is not None:
        visible = Window(case.window, position)
    elif case.causal:
        visible = Causal(position)
    v = case.v
    out, lse = case.run()
    alone = case.run(
        q=case.q[sequence, h : h + 1, i : i + 1],
        k=case.k[sequence, head, :T],
        v=v[sequence, head, :T]
        if isinstance(v, Tensor)
        else CodedValues(v.codes[sequence, head], v.norms[sequence, head], v.codebook),
        visible=visible,
        kv_len=T,
        kv_start=min(case.kv_starts[b], T),
    )
    assert_same_bits(alone[0][0, 0, 0], out[b, h, i])
    assert_same_bits(alone[1][0, 0, 0], lse[b, h, i])
