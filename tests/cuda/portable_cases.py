"""The portable kernel against the oracle, and against itself bit for bit.

Not collected by itself: `test_portable.py` runs it on Triton's interpreter. Rows past T are poison in every
case (`make_inputs`), and outputs are NaN before they are written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from attend_calls import Aligned, arguments, constants
from torch import Tensor
from triton.runtime import interpreter

from warmattn import Causal, CodedValues, External, Full, Window, decode_values, reference, tile_map
from warmattn.backend.cuda import merge, portable
from warmattn.call import AttentionCall
from warmattn.testing import (
    Inputs,
    assert_accurate,
    assert_same_bits,
    lse_error,
    make_inputs,
)
from warmattn.visibility import Visibility

assert os.environ.get("TRITON_INTERPRET") == "1"

HEAD_DIMS = (64, 128, 256, 512)
ROWS = 32
INF = math.inf


class Result(NamedTuple):
    out: Tensor
    lse: Tensor


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    """Triton's interpreter, made ready once instead of at every call of a function, and with what it lacks:
    from NumPy 2.4 on an array ``[1]`` is no index by itself, and bfloat16 is held as integers, whose bits
    would be multiplied.
    """
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        bits = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def dot_of_bfloat16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = widened(a), widened(b)
        return dot(self, a, b, *rest)

    library = interpreter._patch_lang(tl.max.fn)
    kernel: Any = portable.attend
    scope = interpreter._patch_lang(kernel.fn)
    scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    scope.set_attr(interpreter.InterpreterBuilder, "create_dot", dot_of_bfloat16)
    scope.set_attr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
    yield
    scope.restore()
    library.restore()


@pytest.fixture(autouse=True)
def _numpy_is_quiet() -> Iterator[None]:
    """The interpreter computes in NumPy, which warns of the infinities and NaN that these rows are about."""
    with np.errstate(all="ignore"):
        yield


def attend(
    q: Tensor,
    k: Tensor,
    v: Any,
    *,
    walk: bool = True,
    aligned: bool = True,
    split: int = 128,
    **keywords: Any,
) -> Result:
    """`warmattn.attention` by the portable kernel: each program walks its splits, or they are merged."""
    return launch(AttentionCall.of(q, k, v, **keywords).rounded().check(), walk, aligned, split)


def launch(call: AttentionCall, walk: bool = True, aligned: bool = True, split: int = 128) -> Result:
    q = call.q
    out, lse = torch.full(q.shape, math.nan), torch.full(q.shape[:3], math.nan)
    splits = 1 if walk else -(-call.C // split)
    rows = call.B * call.H * call.S
    parts = torch.full((splits, *q.shape), math.nan)
    maxima, sums = (torch.full((splits, *q.shape[:3]), math.nan) for _ in range(2))
    target = out if walk else parts
    flags = Aligned.of(call, out) if aligned else Aligned(False, False, False)
    assert not aligned or all(flags)
    flags = flags._replace(out=flags.out and walk)
    columns = min(call.D, 256)
    grid = (call.B * call.Hk * (call.D // columns), -(-call.S * call.group // ROWS), splits)
    kernel: Any = portable.attend
    kernel[grid](
        *arguments(call, flags, target, maxima, sums, walk=walk),
        **constants(call, walk=walk, split=split),
        QK_ALIGNED=flags.qk,
        V_ALIGNED=flags.v,
        OUT_ALIGNED=flags.out,
        ROWS=ROWS,
        TILE=64,
        COLUMNS=columns,
    )
    if walk:
        log_sum_exp: Any = merge.log_sum_exp
        log_sum_exp[(1,)](maxima, sums, rows, call.H, call.S, lse, *lse.stride(), BLOCK=256)
    else:
        merge_splits: Any = merge.merge_splits
        merge_splits[(rows, 1)](
            *(parts, maxima, sums, splits, rows, call.H, call.S),
            *(out, *out.stride()[:3], lse, *lse.stride()),
            D=call.D,
            COLUMNS=call.D,
            LSE=True,
        )
    return Result(out, lse)


def assert_same(actual: Result, expected: Result) -> None:
    assert_same_bits(actual.out, expected.out)
    assert_same_bits(actual.lse, expected.lse)


def check(q: Tensor, k: Tensor, v: Any, **keywords: Any) -> Result:
    """What the kernel gives, held against the oracle."""
    result = attend(q, k, v, **keywords)
    out, lse = reference.attention(q, k, v, **keywords)
    assert_accurate(result.out, out, keys=k.shape[2])
    unseen = lse == -INF
    assert bool((result.lse[unseen] == -INF).all())
    assert bool((result.out[unseen] == 0).all())
    assert lse_error(result.lse[~unseen], lse[~unseen]) <= 1e-6
    return result


def random_mask(seed: int, *shape: int) -> Tensor:
    """0 and -inf cells; keys 64 to 127 hidden, 128 to 191 open."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.where(torch.rand(shape, generator=generator) < 0.3, -INF, 0.0).half()
    mask[..., 64:128] = -INF
    mask[..., 128:192] = 0.0
    return mask


VISIBILITIES = ("causal", "window", "full", "mask", "map")


def visibility(kind: str, seed: int, S: int, T: int) -> Visibility:
    if kind in ("mask", "map"):
        mask = random_mask(seed, S, T)
        return External(mask, tile_map(mask) if kind == "map" else None)
    return {"causal": Causal(T - S), "window": Window(70, T - S), "full": Full()}[kind]


def rows_of(v: Any, *index: Any) -> Any:
    """The same cut ``[B, Hk, rows]`` of V, whatever its form."""
    if isinstance(v, Tensor):
        return v[index]
    return replace(v, codes=v.codes[index], norms=v.norms[index])


def poison(inputs: Inputs, *index: Any) -> None:
    """Make rows ``[B, Hk, rows]`` of K and V anything but numbers."""
    k, v = inputs.k, inputs.v
    k[index] = math.nan
    if isinstance(v, Tensor):
        v[index] = INF
    else:
        v.codes[index] = 255
        v.norms[index] = math.nan


@pytest.mark.parametrize("kind", VISIBILITIES)
@pytest.mark.parametrize("values", ["f32", "f16", "bf16", "codes"])
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_every_form_and_visibility(D: int, values: str, kind: str, seed: int) -> None:
    form = f"codes{5 + seed % 2 if D < 256 else 8}" if values == "codes" else values
    S, T, group = 5, 150 - seed % 16, 1 + seed % 3
    inputs = make_inputs(seed, S=S, T=T, D=D, H=group, values=form)
    check(inputs.q, inputs.k, inputs.v, visible=visibility(kind, seed, S, T), kv_len=T)


@pytest.mark.parametrize(
    ("D", "values", "kind"),
    [
        (64, "f16", "causal"),
        (128, "f32", "window"),
        (256, "codes8", "map"),
        (512, "codes6", "full"),
        (512, "f16", "mask"),
    ],
)
def test_walking_equals_merging(D: int, values: str, kind: str, seed: int) -> None:
    """Over three splits, some of which a row sees nothing of."""
    inputs = make_inputs(seed, S=3, T=300, D=D, values=values)
    keywords: dict[str, Any] = {"visible": visibility(kind, seed, 3, 300), "kv_len": 300, "kv_start": 131}
    walked = check(inputs.q, inputs.k, inputs.v, **keywords)
    assert_same(attend(inputs.q, inputs.k, inputs.v, walk=False, **keywords), walked)


@pytest.mark.parametrize(
    ("D", "values", "kind"),
    [
        (64, "codes8", Causal),
        (128, "bf16", Causal),
        (256, "f16", Causal),
        (512, "f32", Causal),
        (128, "codes5", lambda at: Window(66, at)),
    ],
)
def test_warm_equals_cold(D: int, values: str, kind: Any, seed: int) -> None:
    """Chunks of a prompt over a cache of 60 keys, across the end of a split; K of rows to come is not there
    yet.
    """
    S, before = 9, 60
    inputs = make_inputs(seed, S=S, T=before + S, D=D, H=3, values=values)
    cold = attend(inputs.q, inputs.k, inputs.v, visible=kind(before), kv_len=before + S, split=64)
    for rows in (slice(0, 7), slice(7, 9), slice(0, 1), slice(3, 4), slice(4, 5)):
        k = inputs.k.clone()
        k[:, :, before + rows.stop :] = math.nan
        warm = attend(
            *(inputs.q[:, :, rows], k, inputs.v),
            visible=kind(before + rows.start),
            kv_len=before + rows.stop,
            split=64,
        )
        assert_same(warm, Result(cold.out[:, :, rows], cold.lse[:, :, rows]))


@pytest.mark.parametrize(("D", "bits"), [(64, 8), (128, 5), (256, 6), (512, 8)])
def test_codes_equal_their_values(D: int, bits: int, seed: int) -> None:
    """Also where rows, or blocks of them, are so large or small that they are scaled."""
    inputs = make_inputs(seed, S=4, T=150, D=D, values=f"codes{bits}")
    coded = inputs.v
    assert isinstance(coded, CodedValues)
    coded.norms[:, :, 3] *= 1e-6
    coded.norms[:, :, 60:70] *= 3e4
    coded.norms[:, :, 71, 0] *= 1e-12
    coded.norms[:, :, 72] = 0.0
    coded.norms[:, :, 73] *= -1.0
    values = decode_values(rows_of(coded, slice(None), slice(None), slice(0, 150)))
    keywords: dict[str, Any] = {"visible": Causal(146), "kv_len": 150}
    assert_same(
        attend(inputs.q, inputs.k, coded, **keywords),
        check(inputs.q, inputs.k, values, **keywords),
    )


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_bfloat16_values_equal_themselves_widened(D: int, seed: int) -> None:
    inputs = make_inputs(seed, S=3, T=90, D=D, values="bf16", spread=300.0)
    assert isinstance(inputs.v, Tensor)
    keywords: dict[str, Any] = {"visible": Causal(87), "kv_len": 90}
    assert_same(
        attend(inputs.q, inputs.k, inputs.v, **keywords),
        attend(inputs.q, inputs.k, inputs.v.float(), **keywords),
    )


def test_bfloat16_queries_and_keys(seed: int) -> None:
    inputs = make_inputs(seed, S=3, T=90, D=128, values="f32", dtype=torch.bfloat16)
    check(inputs.q, inputs.k, inputs.v, visible=Causal(87), kv_len=90)


@pytest.mark.parametrize(("spread", "mean"), [(1.0, 1.0), (1e-5, 0.0), (1e4, 0.0), (1e30, 0.0), (1e-28, 0.0)])
def test_sizes_of_values(spread: float, mean: float, seed: int) -> None:
    inputs = make_inputs(seed, S=3, T=150, D=128, values="f32", spread=spread, mean=mean)
    check(inputs.q, inputs.k, inputs.v, visible=Full(), kv_len=150)


@pytest.mark.parametrize("values", ["f32", "codes8"])
@pytest.mark.parametrize(
    "order", [(1e-31, 1.0, 1e35), (1e35, 1e-31, 1.0), (1e30, 1e-30), (1.0, 1e-3), (1e-28, 0.0)]
)
def test_rows_of_mixed_sizes(order: tuple[float, ...], values: str, seed: int) -> None:
    """Every row of a cold prefill, each against what it sees: tiny keys must count as much as huge ones."""
    T = 120
    inputs = make_inputs(seed, S=T, T=T, D=64, values=values)
    factors = torch.tensor(order)[torch.arange(T) * len(order) // T].view(1, 1, T, 1)
    v = inputs.v
    if isinstance(v, CodedValues):
        norms = v.norms.clone()
        norms[:, :, :T] *= factors.view(1, 1, T, *(1,) * (norms.ndim - 3))
        v = replace(v, norms=norms)
    else:
        v = v.clone()
        v[:, :, :T] *= factors
    result = attend(inputs.q, inputs.k, v, visible=Causal(0), kv_len=T)
    exact, exact_lse = reference.attention(inputs.q, inputs.k, v, visible=Causal(0), kv_len=T)
    error = (result.out.double() - exact).norm(dim=3) / exact.norm(dim=3)
    assert float(error.max()) <= 2e-6
    assert lse_error(result.lse, exact_lse) <= 1e-6
    for row in (0, 60, T - 1):
        alone = attend(inputs.q[:, :, row : row + 1], inputs.k, v, visible=Causal(row), kv_len=row + 1)
        assert_same(Result(result.out[:, :, row : row + 1], result.lse[:, :, row : row + 1]), alone)


def test_scores_of_any_size(seed: int) -> None:
    """Dots past float16's range."""
    inputs = make_inputs(seed, S=3, T=150, D=64)
    check(inputs.q * 200, inputs.k * 200, inputs.v, visible=Full(), kv_len=150, scale=1e-4)


@pytest.mark.parametrize(("D", "values"), [(64, "f32"), (256, "codes8")])
def test_sequences_of_different_lengths(D: int, values: str, seed: int) -> None:
    """As each alone, with everything it cannot see poisoned."""
    inputs = make_inputs(seed, S=3, T=150, D=D, B=2, H=4, Hk=2, values=values)
    offsets, lengths, starts = ([147, 60], [150, 63], [70, 5])
    for b in range(2):
        poison(inputs, b, slice(None), slice(lengths[b], None))
        poison(inputs, b, slice(None), slice(0, starts[b]))
    each = [torch.tensor(n, dtype=torch.int32) for n in (offsets, lengths, starts)]
    both = check(inputs.q, inputs.k, inputs.v, visible=Causal(each[0]), kv_len=each[1], kv_start=each[2])
    for b in range(2):
        alone = attend(
            *(inputs.q[b : b + 1], inputs.k[b : b + 1], rows_of(inputs.v, slice(b, b + 1))),
            visible=Causal(offsets[b]),
            kv_len=lengths[b],
            kv_start=starts[b],
        )
        assert_same(Result(both.out[b : b + 1], both.lse[b : b + 1]), alone)


def test_lengths_that_reach_outside_are_clamped(seed: int) -> None:
    """Tensors on a GPU are not checked by the host; the oracle's T is what the cache holds."""
    inputs = make_inputs(seed, S=3, T=90, C=90, D=64, values="f16")
    call = AttentionCall.of(
        inputs.q, inputs.k, inputs.v, visible=Causal(torch.tensor([87], dtype=torch.int32)), kv_len=90
    )
    call = call._replace(
        kv_len=torch.tensor([10**9], dtype=torch.int32), kv_start=torch.tensor([-(10**9)], dtype=torch.int32)
    )
    expected = attend(inputs.q, inputs.k, inputs.v, visible=Causal(87), kv_len=90)
    assert_same(launch(call), expected)
    assert_same(launch(call._replace(kv_start=0)), expected)


@pytest.mark.parametrize("values", ["f16", "codes6"])
def test_key_offset(values: str, seed: int) -> None:
    inputs = make_inputs(seed, S=5, T=150, D=64, values=values)
    at = {"visible": Window(40, 140), "kv_len": 150, "kv_start": 110}
    moved = {**at, "visible": Window(40, 140 + 2**31 - 1024), "key_offset": 2**31 - 1024}
    assert_same(check(inputs.q, inputs.k, inputs.v, **moved), attend(inputs.q, inputs.k, inputs.v, **at))


@pytest.mark.parametrize("kind", ["causal", "map"])
def test_softcap(kind: str, seed: int) -> None:
    """Of scores on both sides of where tanh is a polynomial."""
    inputs = make_inputs(seed, S=5, T=150, D=128, values="f32")
    visible = visibility(kind, seed, 5, 150)
    check(inputs.q * 4, inputs.k, inputs.v, visible=visible, kv_len=150, softcap=3.0)


@pytest.mark.parametrize(
    ("planes", "values"), [((), "f16"), ((1, 4), "codes8"), ((2, 1), "f16"), ((2, 4), "f32")]
)
def test_masks(planes: tuple[int, ...], values: str, seed: int) -> None:
    """Of either rank; the same bits with and without the map, and as bool."""
    T = 150
    inputs = make_inputs(seed, S=7, T=T, D=64, B=2, H=4, Hk=2, values=values)
    mask = random_mask(seed, *planes, 7, T)
    mask[..., 2, :] = -INF
    operands = (inputs.q, inputs.k, inputs.v)
    plain = check(*operands, visible=External(mask), kv_len=T)
    assert bool((plain.lse[:, :, 2] == -INF).all())
    assert_same(attend(*operands, visible=External(mask, tile_map(mask)), kv_len=T), plain)
    shown = (mask == 0).transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_same(attend(*operands, visible=External(shown, tile_map(mask)), kv_len=T), plain)


def test_biases(seed: int) -> None:
    """Finite cells of a mask are added to scaled, capped scores; longer than a block of rows."""
    inputs = make_inputs(seed, S=40, T=90, D=64, values="f16")
    bias = torch.randn(40, 90, generator=torch.Generator().manual_seed(seed)).half()
    bias[3, 5:] = -INF
    check(inputs.q, inputs.k, inputs.v, visible=External(bias, tile_map(bias)), kv_len=90, softcap=2.0)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("causal", "f32"),
        ("causal", "codes8"),
        ("window", "f16"),
        ("full", "f32"),
        ("mask", "f32"),
        ("mask", "f16"),
        ("map", "codes8"),
        ("map", "f16"),
    ],
)
def test_what_no_row_sees_may_hold_anything(kind: str, values: str, seed: int) -> None:
    S, T = 5, 203
    inputs = make_inputs(seed, S=S, T=T, D=64, values=values)
    visible = {"causal": Causal(150), "window": Window(33, 150)}.get(kind) or visibility(kind, seed, S, T)
    keywords: dict[str, Any] = {"visible": visible, "kv_len": T, "kv_start": 9}
    clean = check(inputs.q, inputs.k, inputs.v, **keywords)
    hidden = {"causal": [(155, T)], "window": [(0, 118), (155, T)], "full": []}.get(kind, [(64, 128)])
    for start, stop in [(0, 9), *hidden]:
        poison(inputs, slice(None), slice(None), slice(start, stop))
    assert_same(attend(inputs.q, inputs.k, inputs.v, **keywords), clean)


@pytest.mark.parametrize("walk", [True, False])
def test_rows_that_see_nothing(walk: bool, seed: int) -> None:
    """Beside rows that do; and a call of nothing else."""
    inputs = make_inputs(seed, S=5, T=150, D=64, values="f16")
    operands = (inputs.q, inputs.k, inputs.v)
    some = attend(*operands, walk=walk, visible=Causal(138), kv_len=150, kv_start=140)
    assert (some.lse == -INF).sum() == 2 * 2
    assert bool((some.out[:, :, :2] == 0).all())
    assert_same(check(*operands, visible=Causal(138), kv_len=150, kv_start=140), some)
    none = attend(*operands, walk=walk, visible=Causal(20), kv_len=150, kv_start=140)
    assert bool((none.out == 0).all())
    assert bool((none.lse == -INF).all())


@pytest.mark.parametrize("values", ["f32", "f16", "bf16", "codes8"])
def test_memory_of_any_alignment(values: str, seed: int) -> None:
    """Rows at odd addresses, at strides of their own, give the bits of aligned ones."""
    inputs = make_inputs(seed, S=5, T=90, D=64, Hk=2, H=4, values=values)

    def moved(t: Tensor) -> Tensor:
        memory = torch.zeros(t.shape[2], t.shape[0], t.shape[1], t.shape[3] + 3, dtype=t.dtype)
        view = memory.permute(1, 2, 0, 3)[..., 1 : t.shape[3] + 1]
        return view.copy_(t)

    v = inputs.v
    away = moved(v) if isinstance(v, Tensor) else replace(v, codes=moved(v.codes), norms=moved(v.norms))
    keywords: dict[str, Any] = {"visible": Causal(85), "kv_len": 90}
    expected = attend(inputs.q, inputs.k, v, **keywords)
    assert_same(attend(moved(inputs.q), moved(inputs.k), away, aligned=False, **keywords), expected)
