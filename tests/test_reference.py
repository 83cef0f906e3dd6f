"""The oracle against the contract written out in plain Python loops, and against MLX's attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from torch import Tensor

from warmattn import Causal, CodedValues, External, Full, Window, reference
from warmattn.testing import VALUE_FORMS, Inputs, make_inputs, relative_error, tolerance
from warmattn.visibility import Visibility

B, H, HK, S, T = 2, 4, 2, 3, 6
HEAD_DIMS = (64, 128, 256, 512)
INF = math.inf

Cells = Callable[[int, int, int, int], float]
"""What is added to the score of (b, h, row i, key row t): 0 where visible, −inf where hidden."""


def loops(
    inputs: Inputs, cells: Cells, *, scale: float | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Sections 1 and 2 of the contract, one element at a time, in Python's float64."""
    q, k, v = inputs.q.tolist(), inputs.k.tolist(), decoded(inputs.v).tolist()
    D = inputs.q.shape[3]
    scale = fl32(1 / math.sqrt(D) if scale is None else scale)
    softcap = None if softcap is None else fl32(softcap)
    out, lse = torch.zeros(inputs.q.shape, dtype=torch.float64), torch.zeros(inputs.q.shape[:3]).double()
    for b in range(len(q)):
        for h in range(len(q[b])):
            kv_head = h // (len(q[b]) // len(k[b]))
            for i in range(len(q[b][h])):
                scores = {}
                for t in range(inputs.kv_len):
                    cell = cells(b, h, i, t)
                    if cell == -INF:
                        continue
                    score = scale * sum(q[b][h][i][d] * k[b][kv_head][t][d] for d in range(D))
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    scores[t] = score + cell
                if not scores:
                    out[b, h, i], lse[b, h, i] = 0.0, -INF
                elif any(math.isnan(score) or score == INF for score in scores.values()):
                    out[b, h, i], lse[b, h, i] = math.nan, math.nan
                else:
                    top = max(scores.values())
                    weights = {t: math.exp(score - top) for t, score in scores.items()}
                    total = sum(weights.values())
                    lse[b, h, i] = top + math.log(total)
                    for d in range(D):
                        out[b, h, i, d] = sum(w * v[b][kv_head][t][d] for t, w in weights.items()) / total
    return out, lse


def fl32(x: float) -> float:
    return float(np.float32(x))


def decoded(v: Tensor | CodedValues) -> Tensor:
    """V as numbers; codes after section 4, every operation rounded to F32."""
    if isinstance(v, Tensor):
        return v
    codes, norms, centroids = v.codes.numpy(), v.norms.numpy(), v.codebook.centroids.numpy()
    D = codes.shape[-1]
    values = np.zeros(codes.shape, dtype=np.float32)
    for index in np.ndindex(codes.shape):
        norm = norms[index[:-1]][index[-1] // 256]
        weight = norm / np.float32(v.sf) if D == 512 else norm * np.float32(1 / math.sqrt(D))
        values[index] = centroids[int(codes[index]) % len(centroids)] * weight
    return torch.from_numpy(values)


def visible_where(seen: Callable[[int, int, int, int], bool]) -> Cells:
    return lambda b, h, i, t: 0.0 if seen(b, h, i, t) else -INF


def assert_matches(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Equal to float64 rounding; NaN, inf and −inf at the same places."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12, equal_nan=True)


def f16(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float16)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


MIXED = f16((0, -INF, 0.5, -0.0, -INF, -2), (-INF,) * 6, (-INF, 3, -INF, 0, -1.25, -INF))
"""A mask ``[S, T]`` with open, hidden and finite cells, and a row that sees nothing."""
PLANES = torch.stack([MIXED.roll(shift, dims=1) for shift in range(B * H)]).view(B, H, S, T)

POSITIONS: dict[str, tuple[Visibility, Mapping[str, Any], Cells]] = {
    "causal": (Causal(2), {}, visible_where(lambda b, h, i, t: t <= 2 + i)),
    "causal from 0": (Causal(), {}, visible_where(lambda b, h, i, t: t <= i)),
    "causal, an offset per sequence": (
        Causal(int32(3, 0)),
        {},
        visible_where(lambda b, h, i, t: t <= (3, 0)[b] + i),
    ),
    "window 1": (Window(1, 2), {}, visible_where(lambda b, h, i, t: t == 2 + i)),
    "window 2": (Window(2, 3), {}, visible_where(lambda b, h, i, t: 3 + i - 2 < t <= 3 + i)),
    "window past T": (Window(10**20, 2), {}, visible_where(lambda b, h, i, t: t <= 2 + i)),
    "full": (Full(), {}, visible_where(lambda b, h, i, t: True)),
    "kv_start": (Full(), {"kv_start": 2}, visible_where(lambda b, h, i, t: t >= 2)),
    "kv_start = T": (Full(), {"kv_start": T}, visible_where(lambda b, h, i, t: False)),
    "kv_start past some rows": (
        Causal(1),
        {"kv_start": int32(0, 3)},
        visible_where(lambda b, h, i, t: (0, 3)[b] <= t <= 1 + i),
    ),
    "lengths that differ": (
        Causal(int32(1, 3)),
        {"kv_len": int32(4, 6), "kv_start": int32(1, 0)},
        visible_where(lambda b, h, i, t: (1, 0)[b] <= t < (4, 6)[b] and t <= (1, 3)[b] + i),
    ),
    "full, lengths that differ": (
        Full(),
        {"kv_len": int32(6, 2)},
        visible_where(lambda b, h, i, t: t < (6, 2)[b]),
    ),
    "key_offset": (
        Causal(102),
        {"key_offset": 100},
        visible_where(lambda b, h, i, t: 100 + t <= 102 + i),
    ),
    "key_offset past every row": (
        Causal(2),
        {"key_offset": 100},
        visible_where(lambda b, h, i, t: False),
    ),
    "key_offset and window": (
        Window(3, 103),
        {"key_offset": 100, "kv_start": 1},
        visible_where(lambda b, h, i, t: t >= 1 and 0 <= 103 + i - (100 + t) < 3),
    ),
    "key_offset means nothing to full": (
        Full(),
        {"key_offset": 2**31 - 1},
        visible_where(lambda b, h, i, t: True),
    ),
}

MASKS: dict[str, tuple[Visibility, Mapping[str, Any], Cells]] = {
    "[S, T]": (External(MIXED), {}, lambda b, h, i, t: float(MIXED[i, t])),
    "[B, H, S, T]": (External(PLANES), {}, lambda b, h, i, t: float(PLANES[b, h, i, t])),
    "[B, 1, S, T]": (External(PLANES[:, :1]), {}, lambda b, h, i, t: float(PLANES[b, 0, i, t])),
    "[1, H, S, T]": (External(PLANES[:1]), {}, lambda b, h, i, t: float(PLANES[0, h, i, t])),
    "[1, 1, S, T]": (External(PLANES[1:, 2:3]), {}, lambda b, h, i, t: float(PLANES[1, 2, i, t])),
    "bool": (
        External(PLANES > -INF),
        {},
        visible_where(lambda b, h, i, t: float(PLANES[b, h, i, t]) > -INF),
    ),
    "mask and kv_start": (
        External(MIXED),
        {"kv_start": int32(2, 4)},
        lambda b, h, i, t: float(MIXED[i, t]) if t >= (2, 4)[b] else -INF,
    ),
    "mask and lengths": (
        External(MIXED),
        {"kv_len": int32(3, 6)},
        lambda b, h, i, t: float(MIXED[i, t]) if t < (3, 6)[b] else -INF,
    ),
}

CASES = POSITIONS | MASKS


def inputs_of(seed: int, D: int, values: str = "f32", dtype: torch.dtype = torch.float16) -> Inputs:
    return make_inputs(seed, S=S, T=T, D=D, B=B, H=H, Hk=HK, C=T + 2, values=values, dtype=dtype)


@pytest.mark.parametrize("name", CASES)
def test_visibility(seed: int, name: str) -> None:
    visible, lengths, cells = CASES[name]
    inputs = inputs_of(seed, 64)
    actual = reference.attention(inputs.q, inputs.k, inputs.v, visible=visible, **{"kv_len": T, **lengths})
    assert_matches(actual, loops(inputs, cells))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_value_forms(seed: int, D: int, values: str, dtype: torch.dtype) -> None:
    visible, _, cells = CASES["causal"]
    inputs = inputs_of(seed, D, values, dtype)
    actual = reference.attention(inputs.q, inputs.k, inputs.v, visible=visible, kv_len=T)
    assert_matches(actual, loops(inputs, cells))


@pytest.mark.parametrize("sf", [1.0, 0.3, 2.5e4])
def test_sf_divides_the_norms_at_512_alone(seed: int, sf: float) -> None:
    for D in (256, 512):
        inputs = inputs_of(seed, D, "codes6")
        assert isinstance(inputs.v, CodedValues)
        codes = inputs.v.codes | 0b1100_0000  # of a code's byte, 6 bits count
        v = CodedValues(codes, inputs.v.norms, inputs.v.codebook, sf)
        rescaled = Inputs(inputs.q, inputs.k, v, T)
        actual = reference.attention(inputs.q, inputs.k, v, visible=Full(), kv_len=T)
        assert_matches(actual, loops(rescaled, lambda *_: 0.0))


@pytest.mark.parametrize(("H", "Hk"), [(1, 1), (3, 3), (4, 1), (6, 2), (6, 3)])
def test_head_h_reads_kv_head_h_over_group(seed: int, H: int, Hk: int) -> None:
    inputs = make_inputs(seed, S=2, T=3, D=64, H=H, Hk=Hk)
    actual = reference.attention(inputs.q, inputs.k, inputs.v, visible=Full(), kv_len=3)
    assert_matches(actual, loops(inputs, lambda *_: 0.0))


@pytest.mark.parametrize("scale", [None, 1.0, 0.3, 1e-3])
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
@pytest.mark.parametrize("name", ["causal", "[B, H, S, T]"])
def test_scale_and_softcap(seed: int, name: str, softcap: float | None, scale: float | None) -> None:
    """The cap bends the scaled score, and a finite mask cell is added after it."""
    visible, _, cells = CASES[name]
    inputs = inputs_of(seed, 64)
    actual = reference.attention(
        inputs.q, inputs.k, inputs.v, visible=visible, kv_len=T, scale=scale, softcap=softcap
    )
    assert_matches(actual, loops(inputs, cells, scale=scale, softcap=softcap))


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize("name", ["causal", "window 2", "[B, H, S, T]", "kv_start past some rows"])
def test_non_finite_keys_touch_only_the_rows_that_see_them(
    seed: int, name: str, operand: str, poison: float
) -> None:
    visible, lengths, cells = CASES[name]
    inputs = inputs_of(seed, 64)
    arguments = {"visible": visible, "kv_len": T, **lengths}
    q, v = inputs.q, inputs.v
    assert isinstance(v, Tensor)
    clean, clean_lse = reference.attention(q, inputs.k, v, **arguments)
    for t in range(T):
        poisoned = {"k": inputs.k.clone(), "v": v.clone()}
        # One element does for V. In K it must be all, or the score of inf is −inf where q is negative.
        poisoned[operand][:, :, t, 0 if operand == "v" else slice(None)] = poison
        out, lse = reference.attention(q, poisoned["k"], poisoned["v"], **arguments)
        sees = torch.tensor(
            [[[cells(b, h, i, t) > -INF for i in range(S)] for h in range(H)] for b in range(B)]
        )
        assert torch.equal(~out.isfinite().all(dim=3), sees)
        assert torch.equal(out[~sees], clean[~sees])
        assert torch.equal(lse[~sees], clean_lse[~sees])
        if operand == "k":
            assert bool(lse[sees].isnan().all())


def test_rows_that_see_nothing_give_zero_and_minus_infinity(seed: int) -> None:
    inputs = inputs_of(seed, 64)
    mask = MIXED.clone()
    mask[2] = -1e4  # far from hidden: a finite cell that every key of a row has in common cancels out
    out, lse = reference.attention(inputs.q, inputs.k, inputs.v, visible=External(mask), kv_len=T)
    assert torch.equal(out[:, :, 1], torch.zeros(B, H, 64).double())
    assert torch.equal(lse[:, :, 1], torch.full((B, H), -INF).double())
    everything, _ = reference.attention(inputs.q, inputs.k, inputs.v, visible=Full(), kv_len=T)
    torch.testing.assert_close(out[:, :, 2], everything[:, :, 2], rtol=0, atol=1e-9)


@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("D", [256, 512])
def test_float32_mode_is_float32_accurate(seed: int, D: int, values: str) -> None:
    inputs = make_inputs(seed, S=40, T=700, D=D, values=values)
    arguments = {"visible": Causal(660), "kv_len": 700}
    exact, exact_lse = reference.attention(inputs.q, inputs.k, inputs.v, **arguments)
    single, single_lse = reference.attention(inputs.q, inputs.k, inputs.v, **arguments, dtype=torch.float32)
    assert single.dtype == single_lse.dtype == torch.float32
    assert 0 < relative_error(single, exact) <= tolerance(700)
    assert bool(((single_lse - exact_lse).abs() <= 1e-6 * exact_lse.abs().clamp(min=1)).all())


def mlx_attention(inputs: Inputs, scale: float, mask: mx.array | str | None) -> Tensor:
    """MLX's own attention in float64, on exactly our operands."""
    T = inputs.kv_len

    def array(tensor: Tensor) -> mx.array:
        return mx.array(tensor.double().numpy(), dtype=mx.float64)

    with mx.stream(mx.cpu):  # the only device with float64
        out = mx.fast.scaled_dot_product_attention(
            array(inputs.q),
            array(inputs.k[:, :, :T]),
            array(decoded(inputs.v)[:, :, :T]),
            scale=fl32(scale),
            mask=mask,
        )
        return torch.from_numpy(np.array(out))


# MLX's softmax over float64 is of float32 accuracy: exp and the sum carry 2^-24, not 2^-53.
MLX_TOLERANCE = 1e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("H", "Hk"), [(2, 2), (8, 2), (3, 1)])
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_mlx_causal(seed: int, D: int, H: int, Hk: int, dtype: torch.dtype) -> None:
    """MLX aligns the last query with the last key: q_offset = T − S."""
    for rows, keys in ((1, 1), (1, 33), (7, 33), (70, 130)):
        inputs = make_inputs(seed, B=2, S=rows, T=keys, D=D, H=H, Hk=Hk, dtype=dtype)
        visible = Causal(keys - rows)
        out, _ = reference.attention(inputs.q, inputs.k, inputs.v, visible=visible, kv_len=keys)
        assert relative_error(mlx_attention(inputs, 1 / math.sqrt(D), "causal"), out) <= MLX_TOLERANCE


@pytest.mark.parametrize("kind", ["full", "bool", "additive", "window"])
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_mlx_masks(seed: int, D: int, kind: str) -> None:
    rows, keys = 9, 41
    inputs = make_inputs(seed, B=2, S=rows, T=keys, D=D, H=4, Hk=2)
    generator = torch.Generator().manual_seed(seed)
    open_ = torch.rand(2, 4, rows, keys, generator=generator) < 0.6
    open_[..., 0] = True  # MLX averages over every key where a row sees none; the contract says 0
    additive = torch.randn(2, 4, rows, keys, generator=generator).half().masked_fill(~open_, -INF)
    band = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    visible, mask = {
        "full": (Full(), None),
        "bool": (External(open_), mx.array(open_.numpy())),
        "additive": (External(additive), mx.array(additive.double().numpy(), dtype=mx.float64)),
        "window": (Window(5, keys - rows), mx.array(((band >= 0) & (band < 5)).numpy())),
    }[kind]
    out, _ = reference.attention(inputs.q, inputs.k, inputs.v, visible=visible, kv_len=keys, scale=0.1)
    assert relative_error(mlx_attention(inputs, 0.1, mask), out) <= MLX_TOLERANCE
