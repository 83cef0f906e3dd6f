"""The contract held against a backend on this machine: what ``warmattn verify`` prints, as plain functions.

Every check measures one figure and passes when it is at most its bound, so a NaN fails. The oracle and the
bounds are those of the tests (`warmattn.reference`, `warmattn.testing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from warmattn import reference
from warmattn.api import attention
from warmattn.backend import load
from warmattn.call import AttentionCall
from warmattn.codec.turboquant import decode_values
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported
from warmattn.partials import Partials, finish, merge
from warmattn.testing import VALUE_FORMS, Inputs, make_inputs, relative_error, tolerance
from warmattn.visibility import Causal, External, Full, Visibility, Window, tile_map

__all__ = ["CHECKS", "Check", "Target", "run_checks"]

HEAD_DIMS = (256, 512)
SEED = 20250

ERROR = "relative error"
DIFFERS = "elements differ"


@dataclass(frozen=True, slots=True)
class Check:
    """One measured figure of the contract.

    Attributes:
        item: the promise, ``"warm = cold"`` for instance.
        case: what it was measured on.
        figure, bound: it passes when ``figure <= bound``.
        unit: of both.
    """

    item: str
    case: str
    figure: float
    bound: float
    unit: str

    @property
    def passed(self) -> bool:
        return self.figure <= self.bound


@dataclass(frozen=True, slots=True)
class Target:
    """A backend on a device, and how far to go.

    Attributes:
        backend, device: names, as `warmattn.attention` and torch know them.
        long: accuracy up to T = 131,072, not 32,768.
    """

    backend: str
    device: str
    long: bool = False

    def inputs(self, **options: Any) -> Inputs:
        """`warmattn.testing.make_inputs` on the device."""
        return make_inputs(SEED, device=self.device, **options)

    def attend(self, x: Inputs, visible: Visibility, **options: Any) -> tuple[Tensor, Tensor]:
        """``(out, lse)`` of `warmattn.attention` over all T keys, unless the options say otherwise."""
        arguments = {"visible": visible, "kv_len": x.kv_len, **options}
        return attention(x.q, x.k, x.v, return_lse=True, backend=self.backend, **arguments)


def run_checks(target: Target) -> Iterator[Check]:
    """Every check, as it is measured."""
    for check in CHECKS:
        yield from check(target)


def accuracy(target: Target) -> Iterator[Check]:
    """Contract section 6 against float64, every V form; and the log-sum-exp of section 1."""
    S = 8
    for D in HEAD_DIMS:
        for T in (1000, 8192, 131_072 if target.long else 32_768):
            visible, lse_error = Causal(T - S), 0.0
            for form in VALUE_FORMS:
                x = target.inputs(S=S, T=T, D=D, H=1, values=form)
                out, lse = target.attend(x, visible)
                expected, expected_lse = reference.attention(x.q, x.k, x.v, visible=visible, kv_len=T)
                yield Check(
                    "accuracy",
                    f"D {D}, T {T:,}, V {form}",
                    relative_error(out, expected),
                    tolerance(T),
                    ERROR,
                )
                lse_error = max(lse_error, _lse_error(lse, expected_lse))
            yield Check("log-sum-exp", f"D {D}, T {T:,}", lse_error, 1e-6, "error / max(1, |LSE|)")


def accuracy_of_options(target: Target) -> Iterator[Check]:
    """Accuracy where a call departs from the plain one: head dims, dtypes, visibilities, softcap, padding."""
    S, T = 40, 1000
    mask = torch.randn(S, T, generator=_generator()).half().to(target.device)
    cases: tuple[tuple[str, int, dict[str, Any], Visibility, dict[str, Any]], ...] = (
        ("D 64", 64, {}, Causal(T - S), {}),
        ("D 128", 128, {}, Causal(T - S), {}),
        ("bf16 Q and K", 256, {"dtype": torch.bfloat16}, Causal(T - S), {}),
        ("window 100", 512, {}, Window(100, T - S), {}),
        ("full", 256, {}, Full(), {}),
        ("additive mask", 512, {}, External(mask), {}),
        ("softcap 2", 256, {}, Causal(T - S), {"softcap": 2.0}),
        ("kv_start 300", 512, {}, Causal(T - S), {"kv_start": 300}),
    )
    for case, D, options, visible, arguments in cases:
        x = target.inputs(S=S, T=T, D=D, **options)
        out, _ = target.attend(x, visible, **arguments)
        expected, _ = reference.attention(x.q, x.k, x.v, visible=visible, kv_len=T, **arguments)
        yield Check("accuracy", f"{case}, T {T:,}", relative_error(out, expected), tolerance(T), ERROR)


def against_sdpa(target: Target) -> Iterator[Check]:
    """Contract section 6: no worse than half again torch's own float32 attention on the same inputs."""
    S, T = 32, 2048
    inputs: tuple[tuple[str, dict[str, float], float], ...] = (
        ("standard normal", {}, 1.0),
        ("V of mean 1", {"mean": 1.0}, 1.0),
        ("V × 1e-5", {"spread": 1e-5}, 1.0),
        ("V × 1e4", {"spread": 1e4}, 1.0),
        ("scores of std 4", {}, 4.0),
        ("scores of std 16", {}, 16.0),
    )
    for D in HEAD_DIMS:
        for case, options, std in inputs:
            x = target.inputs(S=S, T=T, D=D, H=4, Hk=2, C=T, **options)
            scale, visible = std / math.sqrt(D), Causal(T - S)
            out, _ = target.attend(x, visible, scale=scale)
            expected, _ = reference.attention(x.q, x.k, x.v, visible=visible, scale=scale)
            worst = max(relative_error(o, expected) for o in _sdpa_outputs(x, scale))
            bound = max(5e-7, 1.5 * worst)
            yield Check("torch f32 SDPA", f"D {D}, {case}", relative_error(out, expected), bound, ERROR)


def warm_equals_cold(target: Target) -> Iterator[Check]:
    """Contract section 5: a prompt resumed in chunks, each over the keys so far, against one call."""
    cases: tuple[tuple[int, str, Callable[[int], Visibility]], ...] = (
        (256, "causal", Causal),
        (256, "window 100", lambda q_offset: Window(100, q_offset)),
        (512, "causal", Causal),
    )
    for D, kind, visible in cases:
        for form in ("f32", "codes8"):
            name = f"D {D}, {kind}, {form}"
            x = target.inputs(S=520, T=520, D=D, values=form)
            cold = target.attend(x, visible(0))
            for chunk in (1, 7, 64, 512):
                warm = _resume(target, x, visible, chunk)
                yield Check("warm = cold", f"{name}, by {chunk}", _differ(warm, cold), 0, DIFFERS)
            # The last rows of a longer prompt, whose keys reach across the first split.
            T = load(target.backend).tiling(D).split + 24
            x = target.inputs(S=40, T=T, D=D, values=form)
            cold, warm = target.attend(x, visible(T - 40)), _resume(target, x, visible, 7)
            yield Check("warm = cold", f"{name}, T {T:,}", _differ(warm, cold), 0, DIFFERS)


def independent_rows(target: Target) -> Iterator[Check]:
    """Contract section 5: what else is in the call, and how the work is cut, changes no bit of a row."""
    for D in HEAD_DIMS:
        x = target.inputs(B=2, H=4, Hk=2, S=40, T=700, D=D)
        whole = target.attend(x, Causal(660))
        again = target.attend(x, Causal(660))
        yield Check("same bits", f"D {D}, run again", _differ(again, whole), 0, DIFFERS)

        lone = replace(x, q=x.q[1:, 2:], k=x.k[1:, 1:], v=_part(x.v, 1, 1))
        pair = [tensor[1:, 2:] for tensor in whole]
        yield Check(
            "same bits",
            f"D {D}, one KV head alone",
            _differ(target.attend(lone, Causal(660)), pair),
            0,
            DIFFERS,
        )
        lengths = torch.tensor([700, 500], dtype=torch.int32)
        ragged = target.attend(x, Causal(lengths - 40), kv_len=lengths)
        yield Check(
            "same bits",
            f"D {D}, lengths that differ",
            _differ([tensor[:1] for tensor in ragged], [tensor[:1] for tensor in whole]),
            0,
            DIFFERS,
        )

        T = load(target.backend).tiling(D).split + 400
        x = target.inputs(S=8, T=T, D=D)
        whole = target.attend(x, Causal(T - 8))
        yield Check(
            "same bits", f"D {D}, split partials merged", _differ(_merged(target, x), whole), 0, DIFFERS
        )

    if torch.device(target.device).type == "cpu":
        yield from _thread_counts(target)


def same_keys_same_bits(target: Target) -> Iterator[Check]:
    """Contract sections 3 and 5: the kind of visibility, and the tile map, change no bit."""
    S, T = 70, 600
    for D in HEAD_DIMS:
        x = target.inputs(S=S, T=T, D=D)
        keys, rows = torch.arange(T, device=target.device), torch.arange(S, device=target.device)
        causal_mask = keys <= rows[:, None] + T - S
        causal = target.attend(x, Causal(T - S))
        for name, visible in (
            ("mask", External(causal_mask)),
            ("window T", Window(T, T - S)),
        ):
            differ = _differ(target.attend(x, visible), causal)
            yield Check("same bits", f"D {D}, causal as {name}", differ, 0, DIFFERS)

        mask = torch.zeros(S, T, dtype=torch.float16, device=target.device)
        mask[:, 100:260] = -math.inf
        mask[:33, 400:] = -math.inf
        mask[40::2, ::3] = -math.inf
        without, with_map = (target.attend(x, External(mask, tiles)) for tiles in (None, tile_map(mask)))
        yield Check("tile map", f"D {D}, on and off", _differ(with_map, without), 0, DIFFERS)


def codes_equal_decoded(target: Target) -> Iterator[Check]:
    """Contract section 4: attention over codes is attention over the values they stand for."""
    for D in HEAD_DIMS:
        for form in ("codes5", "codes6", "codes8"):
            x = target.inputs(S=33, T=300, C=300, D=D, values=form)
            assert isinstance(x.v, CodedValues)
            dense = replace(x, v=decode_values(x.v))
            differ = _differ(target.attend(x, Causal(267)), target.attend(dense, Causal(267)))
            yield Check("codes = decoded", f"D {D}, {x.v.bits} bits", differ, 0, DIFFERS)


def poison(target: Target) -> Iterator[Check]:
    """Contract section 1: rows past T are never read."""
    S, T, C = 20, 300, 340
    for D in HEAD_DIMS:
        for form in ("f32", "f16", "codes8"):
            x = target.inputs(S=S, T=T, C=C, D=D, values=form)
            clean = target.attend(_with_tail(x, 0.0), Causal(T - S))
            differ = 0
            for tail in (math.nan, math.inf, -math.inf, 65504.0):
                differ += _differ(target.attend(_with_tail(x, tail), Causal(T - S)), clean)
            yield Check("poison past T", f"D {D}, V {form}", differ, 0, DIFFERS)


def hidden_rows(target: Target) -> Iterator[Check]:
    """Contract section 2: a row that sees no key gives 0 and −inf."""
    S, T = 40, 300
    mask = torch.zeros(S, T, dtype=torch.bool, device=target.device)
    for D in HEAD_DIMS:
        x = target.inputs(S=S, T=T, D=D)
        for case, visible, options in (
            ("mask", External(mask), {}),
            ("mask and map", External(mask, tile_map(mask)), {}),
            ("kv_start = T", Causal(T - S), {"kv_start": T}),
        ):
            out, lse = target.attend(x, visible, **options)
            wrong = int((out != 0).sum() + (lse != -math.inf).sum())
            yield Check("rows that see nothing", f"D {D}, {case}", wrong, 0, "elements wrong")


def refusals(target: Target) -> Iterator[Check]:
    """Contract section 7: a bad call raises the right error, names the operand and leaves ``out`` alone."""
    x = target.inputs(S=3, T=7, C=9, D=256)
    mask = torch.zeros(3, 7, dtype=torch.float16, device=target.device)
    small = torch.ones(1, 2, dtype=torch.uint8, device=target.device)
    cases: tuple[tuple[str, type[Exception], str, dict[str, Any]], ...] = (
        ("head dim 192", Unsupported, "192", {"q": x.q[..., :192]}),
        ("grad", Unsupported, "q requires grad", {"q": x.q.clone().requires_grad_()}),
        ("unknown backend", Unsupported, "'nowhere'", {"backend": "nowhere"}),
        ("empty axis", InvalidInput, "S = 0", {"q": x.q[:, :, :0]}),
        ("H and Hk", InvalidInput, "H = 1", {"q": x.q[:, :1], "k": x.k.expand(-1, 2, -1, -1)}),
        ("scale 0", InvalidInput, "scale", {"scale": 0.0}),
        ("T > C", InvalidInput, "T (10) > C (9)", {"kv_len": 10}),
        ("float64 Q", InvalidInput, "float64", {"q": x.q.double()}),
        ("bf16 K", InvalidInput, "k: ", {"k": x.k.bfloat16()}),
        ("integer V", InvalidInput, "v: ", {"v": torch.zeros_like(x.k, dtype=torch.int8)}),
        ("mask of C keys", InvalidInput, "mask", {"visible": External(mask.new_zeros(3, 9))}),
        ("map misshapen", InvalidInput, "32 x 16", {"visible": External(mask, small)}),
        ("window 0", InvalidInput, "window", {"visible": Window(0, 4)}),
        ("offset past T", InvalidInput, "q_offset (5) + S (3) > T (7)", {"visible": Causal(5)}),
        ("kv_start past T", InvalidInput, "kv_start", {"kv_start": 8}),
        ("softcap 0", InvalidInput, "softcap", {"softcap": 0.0}),
    )
    for case, error, text, change in cases:
        out = torch.full((1, 2, 3, 256), 7.0, device=target.device)
        arguments = {"q": x.q, "k": x.k, "v": x.v, "kv_len": 7, "visible": Causal(4), "out": out}
        arguments = {**arguments, "backend": target.backend, **change}
        wrong = _refused_wrongly(error, text, arguments) + int((out != 7.0).sum())
        yield Check("refused", f"{case}: {error.__name__}", wrong, 0, "faults")


CHECKS: tuple[Callable[[Target], Iterator[Check]], ...] = (
    accuracy,
    accuracy_of_options,
    against_sdpa,
    warm_equals_cold,
    independent_rows,
    same_keys_same_bits,
    codes_equal_decoded,
    poison,
    hidden_rows,
    refusals,
)
"""Every group of checks, in the order of the table."""


def _lse_error(lse: Tensor, expected: Tensor) -> float:
    return float(((lse.double() - expected).abs() / expected.abs().clamp(min=1.0)).max())


def _sdpa_outputs(x: Inputs, scale: float) -> Iterator[Tensor]:
    """torch's float32 attention over a causal resume: with heads expanded, and with GQA rows packed."""
    assert isinstance(x.v, Tensor)
    q, k, v = x.q.float(), x.k.float(), x.v.float()
    (B, H, S, D), (Hk, T) = q.shape, k.shape[1:3]
    group = H // Hk
    rows, keys = torch.arange(S, device=q.device), torch.arange(T, device=q.device)
    seen = keys <= rows[:, None] + T - S
    expanded = (operand.repeat_interleave(group, dim=1) for operand in (k, v))
    yield scaled_dot_product_attention(q, *expanded, attn_mask=seen, scale=scale)
    packed, seen = q.reshape(B, Hk, group * S, D), seen.repeat(group, 1)
    out = scaled_dot_product_attention(packed, k, v, attn_mask=seen, scale=scale)
    yield out.view(B, H, S, D)


def _resume(
    target: Target, x: Inputs, visible: Callable[[int], Visibility], chunk: int
) -> tuple[Tensor, Tensor]:
    """The rows of ``x.q`` as a server sees them: each chunk when the cache holds the keys up to its end."""
    S = x.q.shape[2]
    parts = []
    for start in range(0, S, chunk):
        rows = replace(x, q=x.q[:, :, start : start + chunk])
        q_offset = x.kv_len - S + start
        parts.append(target.attend(rows, visible(q_offset), kv_len=q_offset + rows.q.shape[2]))
    out, lse = zip(*parts, strict=True)
    return torch.cat(out, dim=2), torch.cat(lse, dim=2)


def _merged(target: Target, x: Inputs) -> tuple[Tensor, Tensor]:
    """The causal call's result by way of `run_partials` and the merge law."""
    visible = Causal(x.kv_len - x.q.shape[2])
    call = AttentionCall.of(x.q, x.k, x.v, visible=visible, kv_len=x.kv_len).rounded().check()
    _, parts, exponential = load(target.backend).run_partials(call)
    return finish(merge(map(Partials._make, zip(*parts, strict=True)), exponential), exponential)


def _thread_counts(target: Target) -> Iterator[Check]:
    threads = torch.get_num_threads()
    try:
        for D in HEAD_DIMS:
            x = target.inputs(S=64, T=1500, D=D)
            torch.set_num_threads(1)
            one = target.attend(x, Causal(1436))
            torch.set_num_threads(2)
            two = target.attend(x, Causal(1436))
            yield Check("same bits", f"D {D}, 1 and 2 threads", _differ(two, one), 0, DIFFERS)
    finally:
        torch.set_num_threads(threads)


def _part(v: Tensor | CodedValues, sequence: int, head: int) -> Tensor:
    assert isinstance(v, Tensor)
    return v[sequence:, head:]


def _with_tail(x: Inputs, tail: float) -> Inputs:
    """The same operands with ``tail`` in every row past T of K, V and norms, and code 255 unless it is 0."""
    k, v, past = x.k.clone(), x.v, slice(x.kv_len, None)
    k[:, :, past] = tail
    if isinstance(v, CodedValues):
        v = replace(v, codes=v.codes.clone(), norms=v.norms.clone())
        v.codes[:, :, past] = 0 if tail == 0 else 255
        v.norms[:, :, past] = tail
    else:
        v = v.clone()
        v[:, :, past] = tail
    return replace(x, k=k, v=v)


def _refused_wrongly(error: type[Exception], text: str, arguments: dict[str, Any]) -> int:
    """0 when the call raises this very error with this text in its message, else 1."""
    try:
        attention(**arguments)
    except (InvalidInput, Unsupported) as raised:
        return int(type(raised) is not error or text not in str(raised))
    return 1


def _differ(actual: Any, expected: Any) -> int:
    """How many elements of float32 tensors differ in any bit."""
    pairs = zip(actual, expected, strict=True)
    return sum(
        int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum()) for a, b in pairs
    )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)
