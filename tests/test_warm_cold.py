"""Warm equals cold: the bits of a row depend on its query, the keys and values it sees, and the scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor

from warmattn import Causal, CodedValues, External, Full, Window, attention, explain, tile_map
from warmattn.testing import VALUE_FORMS, Inputs, assert_same_bits, make_inputs
from warmattn.visibility import Visibility

HEAD_DIMS = (64, 128, 256, 512)
INF = math.inf

KINDS: dict[str, tuple[int, Callable[[int], Visibility]]] = {
    "D 256 causal": (256, Causal),
    "D 256 window": (256, lambda q_offset: Window(150, q_offset)),
    "D 512 causal": (512, Causal),
}
"""Head dim, and the visibility of a chunk that starts at a given position."""

Result = tuple[Tensor, Tensor]


def same_bits(actual: Result, expected: Result) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


def rows_of(inputs: Inputs, start: int, stop: int, visible: Visibility, kv_len: int) -> Result:
    """Rows ``[start, stop)`` in a call of their own."""
    q = inputs.q[:, :, start:stop]
    return attention(q, inputs.k, inputs.v, visible=visible, kv_len=kv_len, return_lse=True)


def part(result: Result, start: int, stop: int) -> Result:
    return result[0][:, :, start:stop], result[1][:, :, start:stop]


def resumed(inputs: Inputs, kind: Callable[[int], Visibility], chunk: int, first: int = 0) -> Result:
    """The prompt in chunks, each over the keys written so far; row 0 of q is at position ``first``."""
    S = inputs.q.shape[2]
    parts = [
        rows_of(inputs, at, min(at + chunk, S), kind(first + at), first + min(at + chunk, S))
        for at in range(0, S, chunk)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def select(v: Tensor | CodedValues, *index: slice) -> Tensor | CodedValues:
    """The same cut ``[B, Hk, rows]`` of V, whatever its form."""
    if isinstance(v, Tensor):
        return v[index]
    return CodedValues(v.codes[index], v.norms[index], v.codebook, v.sf, v.signs)


# How the prompt is cut.


@pytest.mark.parametrize("chunk", [7, 64, 512])
@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_equals_one_shot(seed: int, device: torch.device, kind: str, values: str, chunk: int) -> None:
    D, visible = KINDS[kind]
    inputs = make_inputs(seed, device=device, S=530, T=530, D=D, H=2, Hk=1, values=values)
    same_bits(resumed(inputs, visible, chunk), rows_of(inputs, 0, 530, visible(0), 530))


@pytest.mark.parametrize(
    ("kind", "values"), [("D 256 causal", "f16"), ("D 256 window", "codes8"), ("D 512 causal", "codes6")]
)
def test_row_by_row_equals_one_shot(seed: int, device: torch.device, kind: str, values: str) -> None:
    D, visible = KINDS[kind]
    inputs = make_inputs(seed, device=device, S=530, T=530, D=D, H=3, Hk=1, values=values)
    same_bits(resumed(inputs, visible, 1), rows_of(inputs, 0, 530, visible(0), 530))


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_over_several_splits(seed: int, device: torch.device, kind: str) -> None:
    """Past two splits of keys the merge law is at work; the last rows cross a split boundary."""
    D, visible = KINDS[kind]
    T, S = 8192 + 12, 25
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D, H=2, Hk=1, values="f16")
    cold = rows_of(inputs, 0, S, visible(T - S), T)
    for chunk in (1, 7):
        same_bits(resumed(inputs, visible, chunk, first=T - S), cold)


@pytest.mark.parametrize("D", [256, 512])
def test_any_place_in_the_chunk(seed: int, device: torch.device, D: int) -> None:
    """Chunks that start 1 to 130 rows before a row's end put it at every place of a tile and of a block."""
    inputs = make_inputs(
        seed, device=device, S=140, T=140, D=D, H=3, Hk=1, values="codes5", dtype=torch.bfloat16
    )
    cold = rows_of(inputs, 0, 140, Causal(0), 140)
    for start in range(1, 131):
        same_bits(rows_of(inputs, start, 131, Causal(start), 131), part(cold, start, 131))


# What else is in the call.


@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_keys_past_the_row_and_capacity(seed: int, device: torch.device, D: int, values: str) -> None:
    """T beyond what the row sees, C beyond T, and V with more rows than either."""
    inputs = make_inputs(seed, device=device, S=3, T=400, D=D, values=values, C=400)
    alone = Inputs(
        inputs.q, inputs.k[:, :, :203], select(inputs.v, slice(None), slice(None), slice(203)), 203
    )
    expected = rows_of(alone, 0, 3, Causal(200), 203)
    for kv_len in (203, 204, 256, 257, 400):
        same_bits(rows_of(inputs, 0, 3, Causal(200), kv_len), expected)
    for C in (401, 1024):
        larger = make_inputs(seed, device=device, S=3, T=400, D=D, values=values, C=C)
        same_bits(rows_of(larger, 0, 3, Causal(200), 300), expected)


@pytest.mark.parametrize("D", [256, 512])
def test_many_keys_past_the_row(seed: int, device: torch.device, D: int) -> None:
    """A split length that went by T would show: 8200 keys alone, and as the beginning of 20,000."""
    inputs = make_inputs(seed, device=device, S=3, T=20_000, D=D, values="f16")
    assert isinstance(inputs.v, Tensor)
    alone = Inputs(inputs.q, inputs.k[:, :, :8200], inputs.v[:, :, :8200], 8200)
    expected = rows_of(alone, 0, 3, Causal(8197), 8200)
    same_bits(rows_of(inputs, 0, 3, Causal(8197), 20_000), expected)
    positions = torch.arange(20_000, device=device)
    seen = (positions <= positions[8197:8200, None]).expand(1, 1, 3, -1)
    same_bits(rows_of(inputs, 0, 3, External(seen, tile_map(seen)), 20_000), expected)


@pytest.mark.parametrize("kind", ["causal", "full"])
@pytest.mark.parametrize("values", ["f32", "bf16", "codes8"])
@pytest.mark.parametrize("D", [256, 512])
def test_alone_or_in_a_batch_of_other_lengths(
    seed: int, device: torch.device, D: int, values: str, kind: str
) -> None:
    """Sequences of one batch differ in length, offset and left padding."""
    kv_lens, offsets, starts = [90, 301, 4200], [86, 200, 4196], [0, 130, 4000]
    inputs = make_inputs(seed, device=device, B=3, H=4, Hk=2, S=4, T=4200, D=D, values=values)

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    out, lse = attention(
        inputs.q,
        inputs.k,
        inputs.v,
        visible=Causal(int32(offsets)) if kind == "causal" else Full(),
        kv_len=int32(kv_lens),
        kv_start=int32(starts),
        return_lse=True,
    )
    for b in range(3):
        alone = attention(
            inputs.q[b : b + 1],
            inputs.k[b : b + 1],
            select(inputs.v, slice(b, b + 1)),
            visible=Causal(offsets[b]) if kind == "causal" else Full(),
            kv_len=kv_lens[b],
            kv_start=starts[b],
            return_lse=True,
        )
        same_bits(alone, (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize(("H", "Hk"), [(4, 4), (6, 2), (5, 1), (16, 1)])
@pytest.mark.parametrize("D", [256, 512])
def test_heads_packed_or_single(seed: int, device: torch.device, D: int, H: int, Hk: int) -> None:
    inputs = make_inputs(seed, device=device, H=H, Hk=Hk, S=45, T=300, D=D, values="codes8")
    out, lse = rows_of(inputs, 0, 45, Causal(255), 300)
    for h in range(H):
        head, kv_head = slice(h, h + 1), slice(h // (H // Hk), h // (H // Hk) + 1)
        single = Inputs(
            inputs.q[:, head], inputs.k[:, kv_head], select(inputs.v, slice(None), kv_head), inputs.kv_len
        )
        same_bits(rows_of(single, 0, 45, Causal(255), 300), (out[:, head], lse[:, head]))


# How visibility is said.


def banded(S: int, T: int, q_offset: int, window: int) -> Tensor:
    """bool ``[S, T]``: what `Window` shows."""
    distance = q_offset + torch.arange(S)[:, None] - torch.arange(T)
    return (distance >= 0) & (distance < window)


def additive(seen: Tensor, zero: float = 0.0) -> Tensor:
    return torch.full_like(seen, zero, dtype=torch.float16).masked_fill_(~seen, -INF)


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_every_way_to_show_the_same_keys(seed: int, device: torch.device, D: int) -> None:
    S, T, q_offset = 70, 420, 350
    inputs = make_inputs(seed, device=device, H=4, Hk=2, S=S, T=T, D=D, values="codes6")

    def assert_all_equal(*kinds: Visibility) -> None:
        expected = rows_of(inputs, 0, S, kinds[0], T)
        for kind in kinds[1:]:
            same_bits(rows_of(inputs, 0, S, kind, T), expected)

    for window in (1, 16, 100, T):
        seen = banded(S, T, q_offset, window).to(device)
        masks = (additive(seen), additive(seen, -0.0), seen)
        rank_4 = additive(seen).expand(1, 4, S, T)
        assert_all_equal(
            Window(window, q_offset),
            *(External(mask) for mask in masks),
            *(External(mask, tile_map(mask)) for mask in masks),
            External(rank_4),
            External(rank_4, tile_map(rank_4)),
        )
    assert_all_equal(Causal(q_offset), Window(T, q_offset), Window(2**40, q_offset))
    everything = torch.ones(S, T, dtype=torch.bool, device=device)
    assert_all_equal(
        Full(), External(everything), External(additive(everything), tile_map(additive(everything)))
    )
    # The last row of a causal call sees every key.
    last = rows_of(inputs, S - 1, S, Full(), T)
    same_bits(last, rows_of(inputs, S - 1, S, Causal(T - 1), T))
    same_bits(last, part(rows_of(inputs, 0, S, Causal(q_offset), T), S - 1, S))


@pytest.mark.parametrize("D", [256, 512])
def test_a_map_with_every_kind_of_tile(seed: int, device: torch.device, D: int) -> None:
    """Mixed, open and hidden tiles at random, and finite cells, over odd sizes."""
    S, T = 77, 301
    inputs = make_inputs(seed, device=device, B=2, H=4, Hk=2, S=S, T=T, D=D, values="f16")
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(3, (3, 19), generator=generator)
    kinds = kinds.repeat_interleave(32, dim=0).repeat_interleave(16, dim=1)[:S, :T]
    mixed = torch.randn(2, 4, S, T, generator=generator).half()
    mixed[torch.rand(mixed.shape, generator=generator) < 0.5] = -INF
    mask = mixed.masked_fill(kinds == 0, -INF).masked_fill(kinds == 2, 0.0).to(device)
    same_bits(
        rows_of(inputs, 0, S, External(mask, tile_map(mask)), T), rows_of(inputs, 0, S, External(mask), T)
    )


@pytest.mark.parametrize("D", [256, 512])
def test_kv_start_hides_as_a_mask_does(seed: int, device: torch.device, D: int) -> None:
    S, T, start = 20, 290, 141
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D)
    left_padded = attention(
        inputs.q, inputs.k, inputs.v, visible=Full(), kv_len=T, kv_start=start, return_lse=True
    )
    seen = (torch.arange(T, device=device) >= start).expand(S, T)
    same_bits(rows_of(inputs, 0, S, External(seen), T), left_padded)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("D", [256, 512])
def test_a_cache_of_the_later_part(seed: int, device: torch.device, D: int, splits: int) -> None:
    """key_offset at a multiple of the split length keeps the bits of rows that see later keys alone."""
    S, T, window = 5, 8192 + 300, 200
    inputs = make_inputs(seed, device=device, S=S, T=T, D=D, values="codes8")
    visible = Window(window, T - S)
    whole = rows_of(inputs, 0, S, visible, T)
    offset = splits * explain(inputs.q, inputs.k, inputs.v, visible=visible, kv_len=T).tiling.split
    later = slice(offset, None)
    result = attention(
        inputs.q,
        inputs.k[:, :, later],
        select(inputs.v, slice(None), slice(None), later),
        visible=visible,
        kv_len=T - offset,
        key_offset=offset,
        return_lse=True,
    )
    same_bits(result, whole)


# Where the operands lie.


def offset_by_one(tensor: Tensor) -> Tensor:
    """A copy that starts one element into its buffer."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def odd_rows(tensor: Tensor) -> Tensor:
    """A copy whose rows are D + 1 elements apart."""
    *lead, D = tensor.shape
    return tensor.new_zeros(*lead, D + 1)[..., :D].copy_(tensor)


def rows_before_heads(tensor: Tensor) -> Tensor:
    """A copy in the memory order [B, S or T, heads, D]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def unaligned(tensor: Tensor) -> Tensor:
    """All of it: one element in, odd rows, before the heads."""
    B, heads, rows, D = tensor.shape
    buffer = tensor.new_zeros(B * rows * heads * (D + 3) + 1)
    strides = (rows * heads * (D + 3), D + 3, heads * (D + 3), 1)
    return buffer.as_strided(tensor.shape, strides, 1).copy_(tensor)


LAYOUTS = (offset_by_one, odd_rows, rows_before_heads, unaligned)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_layout_and_alignment(
    seed: int, device: torch.device, D: int, values: str, layout: Callable[[Tensor], Tensor]
) -> None:
    inputs = make_inputs(seed, device=device, B=2, H=4, Hk=2, S=9, T=200, D=D, values=values)
    expected = rows_of(inputs, 0, 9, Causal(191), 200)
    if isinstance(inputs.v, Tensor):
        v = layout(inputs.v)
    else:
        norms = inputs.v.norms.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
        v = CodedValues(layout(inputs.v.codes), norms, inputs.v.codebook, inputs.v.sf)
    out = layout(torch.full_like(expected[0], math.nan))
    result = attention(
        layout(inputs.q),
        layout(inputs.k),
        v,
        visible=Causal(191),
        kv_len=200,
        out=out,
        return_lse=True,
    )
    assert result[0] is out
    same_bits(result, expected)


@pytest.mark.parametrize("values", ["f32", "f16", "codes8"])
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_a_batch_that_shares_its_cache(seed: int, device: torch.device, D: int, values: str) -> None:
    """K, V, codes and norms of one sequence, expanded: their batch stride is 0."""
    one = make_inputs(seed, device=device, H=4, Hk=2, S=9, T=200, D=D, values=values)
    q = torch.cat([one.q, -one.q, one.q / 2])
    if isinstance(one.v, Tensor):
        v = one.v.expand(3, -1, -1, -1)
    else:
        codes, norms = (tensor.expand(3, -1, -1, -1) for tensor in (one.v.codes, one.v.norms))
        v = CodedValues(codes, norms, one.v.codebook, one.v.sf)
    out, lse = rows_of(Inputs(q, one.k.expand(3, -1, -1, -1), v, 200), 0, 9, Causal(191), 200)
    for b in range(3):
        alone = rows_of(Inputs(q[b : b + 1], one.k, one.v, 200), 0, 9, Causal(191), 200)
        same_bits((out[b : b + 1], lse[b : b + 1]), alone)


# The machine.


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("D", [256, 512])
def test_number_of_threads(seed: int, D: int) -> None:
    """Odd counts cut work at odd places."""
    inputs = make_inputs(seed, H=3, Hk=1, S=50, T=4500, D=D, values="codes8")
    results = []
    for count in (1, 2, 3, 5):
        with threads(count):
            results.append(rows_of(inputs, 0, 50, Causal(4450), 4500))
    for result in results[1:]:
        same_bits(result, results[0])


def test_callers_at_the_same_time(seed: int, device: torch.device) -> None:
    inputs = make_inputs(seed, device=device, H=4, Hk=2, S=20, T=500, D=256, values="codes8")
    expected = rows_of(inputs, 0, 20, Causal(480), 500)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: rows_of(inputs, 0, 20, Causal(480), 500), range(12)):
            same_bits(result, expected)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[torch.device], AbstractContextManager[object]]] = {
    "autocast to bfloat16": lambda device: torch.autocast(device.type, dtype=torch.bfloat16),
    "autocast to float16": lambda device: torch.autocast(device.type, dtype=torch.float16),
    "matmul precision high": lambda _: matmul_precision("high"),
    "matmul precision medium": lambda _: matmul_precision("medium"),
    "default dtype float64": lambda _: default_dtype(torch.float64),
    "default dtype bfloat16": lambda _: default_dtype(torch.bfloat16),
    "default device": lambda _: torch.device("meta"),
    "inference mode": lambda _: torch.inference_mode(),
    "deterministic algorithms": lambda _: deterministic(),
}
"""torch's settings that a model's code makes around a call."""


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("D", [256, 512])
def test_settings_of_torch_around_the_call(
    seed: int, device: torch.device, D: int, surroundings: str
) -> None:
    inputs = make_inputs(seed, device=device, S=9, T=300, D=D, values="codes8")
    expected = rows_of(inputs, 0, 9, Causal(291), 300)
    with SURROUNDINGS[surroundings](device):
        result = rows_of(inputs, 0, 9, Causal(291), 300)
    same_bits(result, expected)


# Values at the edges of their formats.

EDGES = torch.tensor([0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-14, 1.0, -1.0, 65504.0, -65504.0]).half()


@pytest.mark.parametrize("spread", [2.0**-20, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [256, 512])
def test_edges_of_the_formats(
    seed: int, device: torch.device, D: int, dtype: torch.dtype, spread: float
) -> None:
    """Scores that underflow or are huge; subnormals, signed zeros, the largest values in every operand."""
    generator = torch.Generator().manual_seed(seed)
    inputs = make_inputs(seed, device=device, S=140, T=270, D=D, H=3, Hk=1, values="f16", dtype=dtype, C=270)
    q, k, v = inputs.q * spread, inputs.k.clone(), inputs.v
    assert isinstance(v, Tensor)
    for operand in (q, k, v):
        edges = EDGES[torch.randint(len(EDGES), operand.shape, generator=generator)].to(operand)
        rare = torch.rand(operand.shape, generator=generator) < 0.01
        operand.copy_(torch.where(rare.to(device), edges, operand))
    extreme = Inputs(q.to(dtype), k, v, 270)
    cold = rows_of(extreme, 0, 140, Causal(130), 270)
    assert bool(cold[0].isfinite().all())
    for start in range(0, 140, 9):
        stop = min(start + 9, 140)
        same_bits(rows_of(extreme, start, stop, Causal(130 + start), 130 + stop), part(cold, start, stop))


@pytest.mark.parametrize("values", [torch.float32, torch.float16])
@pytest.mark.parametrize("D", [256, 512])
def test_the_sign_of_zero(device: torch.device, D: int, values: torch.dtype) -> None:
    """Weights underflow on the least negative value of V, and the one key that counts holds −0: the sum is
    −0, or 0 once a key that the row does not see adds its 0.
    """
    T, row = 300, 255
    tiny, score = {torch.float32: (-(2.0**-149), 100.0), torch.float16: (-(2.0**-24), 100.0)}[values]
    q, k = torch.zeros(2, 1, 1, T, D, dtype=torch.float16, device=device)
    q[..., 0], k[0, 0, row, 0] = 1.0, score
    v = torch.full((1, 1, T, D), tiny, dtype=values, device=device)
    v[0, 0, row] = -0.0
    inputs = Inputs(q, k, v, T)

    def call(start: int, stop: int) -> Result:
        chunk = q[:, :, start:stop]
        return attention(chunk, inputs.k, v, visible=Causal(start), kv_len=stop, scale=1.0, return_lse=True)

    alone = call(row, row + 1)
    for start in (0, 44, 100, 200, 254):
        same_bits(part(call(start, T), row - start, row - start + 1), alone)


def test_rerun(seed: int, device: torch.device) -> None:
    inputs = make_inputs(seed, device=device, H=4, Hk=2, S=33, T=700, D=512, values="codes8")
    expected = rows_of(inputs, 0, 33, Causal(667), 700)
    for _ in range(5):
        same_bits(rows_of(inputs, 0, 33, Causal(667), 700), expected)
