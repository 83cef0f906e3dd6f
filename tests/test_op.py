"""The registered op ``warmattn::attention``: its schema, torch.compile, fake tensors, and the raw call."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import warmattn
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported
from warmattn.testing import VALUE_FORMS, assert_same_bits, make_inputs
from warmattn.visibility import Causal, External, Full, Window

S, T = 5, 40
SENTINEL = -7.25


@pytest.fixture(autouse=True)
def cold_compiler() -> Iterator[None]:
    """Nothing compiled before the test, nothing left after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(form: str = "f32", D: int = 256, **changes: Any) -> dict[str, Any]:
    """Arguments of a call of two sequences and four heads over two."""
    case = make_inputs(0, S=S, T=T, D=D, B=2, H=4, Hk=2, values=form)
    good = {"q": case.q, "k": case.k, "v": case.v, "visible": Causal(T - S), "kv_len": T}
    return good | changes


def mask() -> Tensor:
    mask = torch.zeros(2, 1, S, T, dtype=torch.float16)
    mask[:, :, :, 16:32] = -torch.inf
    mask[1, :, 2, 5] = -torch.inf
    return mask


class RawArguments(TorchDispatchMode):
    """Keeps the arguments of the op as they pass."""

    arguments: tuple[Any, ...]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.warmattn.attention.default:
            self.arguments = args
        return func(*args, **(kwargs or {}))


def raw(**arguments: Any) -> dict[str, Any]:
    """What the op is called with for a call, by the schema's names, unchecked and into fresh outputs."""
    with RawArguments() as mode:
        warmattn.attention(**arguments)
    names = [argument.name for argument in torch.ops.warmattn.attention.default._schema.arguments]
    named = dict(zip(names, mode.arguments, strict=True))
    outputs = {n: torch.full_like(named[n], SENTINEL) for n in ("out", "lse") if named[n] is not None}
    return named | outputs | {"checked": False}


CALLS: dict[str, dict[str, Any]] = {
    **{f"causal {form}": {"form": form} for form in VALUE_FORMS},
    "codes at 512": {"form": "codes6", "D": 512, "return_lse": True},
    "window, lse": {"visible": Window(7, T - S), "return_lse": True},
    "full, softcap, scale": {"visible": Full(), "softcap": 3.0, "scale": 0.5},
    "mask": {"visible": External(mask()), "return_lse": True},
    "bool mask": {"visible": External(mask() == 0)},
    "mask and map": {"visible": External(mask(), warmattn.tile_map(mask())), "D": 512},
    "tensor lengths": {
        "visible": Causal(int32(3, 4)),
        "kv_len": int32(T, T - 1),
        "kv_start": int32(0, 2),
        "return_lse": True,
    },
    "key offset": {"visible": Causal(4096), "key_offset": 4096, "kv_start": 1},
}
each_call = pytest.mark.parametrize("changes", CALLS.values(), ids=CALLS)


@each_call
def test_opcheck(changes: dict[str, Any]) -> None:
    arguments = raw(**call(**changes))
    results = torch.library.opcheck(torch.ops.warmattn.attention.default, tuple(arguments.values()))
    assert set(results.values()) == {"SUCCESS"}


def test_the_schema_marks_the_outputs_and_nothing_else_as_written() -> None:
    schema = torch.ops.warmattn.attention.default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["out", "lse"]
    assert schema.returns == []


@each_call
def test_the_raw_op_is_the_public_call(changes: dict[str, Any]) -> None:
    arguments = call(**changes)
    expected = warmattn.attention(**arguments)
    out, *lse = expected if isinstance(expected, tuple) else (expected,)
    named = raw(**arguments)
    assert torch.ops.warmattn.attention(**named) is None
    assert_same_bits(named["out"], out)
    assert (named["lse"] is not None) == bool(lse) == changes.get("return_lse", False)
    for part in lse:
        assert_same_bits(named["lse"], part)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (InvalidInput, r"kv_len: T \(99\) > C \(45\)", {"kv_len": 99}),
        (InvalidInput, r"kv_len: T \(99\) > C \(45\)", {"kv_lens": int32(4, 99)}),
        (InvalidInput, r"q_offset \(36\) \+ S \(5\) > T \(40\)", {"q_offset": 36}),
        (InvalidInput, "q_offset: expected >= 0", {"q_offsets": int32(-1, 0)}),
        (InvalidInput, "kv_start: expected in", {"kv_start": -1}),
        (InvalidInput, "kv_start: expected in", {"kv_starts": int32(0, -1)}),
        (InvalidInput, "key_offset: expected <=", {"key_offset": 2**31}),
        (InvalidInput, "window: expected", {"window": 0}),
        (InvalidInput, "scale: expected finite", {"scale": float("inf")}),
        (InvalidInput, "scale: expected finite and > 0 as float32, got 0.0", {"scale": 1e-60}),
        (InvalidInput, "softcap: expected finite", {"softcap": 1e60}),
        (InvalidInput, "mask: expected", {"mask": mask()[:, :, :, :-1]}),
        (InvalidInput, "tile_map: .*32 x 16", {"mask": mask(), "tile_map": torch.ones(1, 2).byte()}),
        (InvalidInput, "v: expected float32", {"v": torch.zeros(2, 2, T, 256, dtype=torch.uint8)}),
        (InvalidInput, "v.codes: expected uint8", {"norms": torch.ones(2, 2, T, 1)}),
        (InvalidInput, "lse: expected .*2, 4, 5", {"lse": torch.zeros(2, 4, S + 1)}),
        (InvalidInput, "lse: expected float32", {"lse": torch.zeros(2, 4, S).double()}),
        (InvalidInput, "lse: expected distinct memory", {"lse": torch.zeros(2, 4, 1).expand(2, 4, S)}),
        (Unsupported, "backend 'nope' does not exist", {"backend": "nope"}),
        (Unsupported, "v requires grad", {"v": torch.zeros(2, 2, T, 256, requires_grad=True)}),
    ],
)
def test_the_raw_op_refuses_what_the_public_call_refuses(
    error: type[Exception], message: str, changes: dict[str, Any]
) -> None:
    named = raw(**call()) | changes
    with pytest.raises(error, match=message):
        torch.ops.warmattn.attention(**named)
    assert bool((named["out"] == SENTINEL).all())


def test_the_raw_op_refuses_codes_without_their_table() -> None:
    named = raw(**call("codes8")) | {"centroids": None}
    with pytest.raises(InvalidInput, match=r"v\.codebook: expected float32"):
        torch.ops.warmattn.attention(**named)


def test_the_profiler_shows_the_op() -> None:
    arguments = call()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        warmattn.attention(**arguments)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["warmattn::attention"] == 1


def compiled(function: Callable, backend: str = "aot_eager") -> tuple[Callable, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


@each_call
def test_a_cold_full_graph_gives_the_bits_of_eager(changes: dict[str, Any]) -> None:
    arguments = call(**changes)
    out = torch.full(arguments["q"].shape, SENTINEL)

    def attend(arguments: dict[str, Any], out: Tensor | None) -> Any:
        return warmattn.attention(**arguments, out=out)

    run, counter = compiled(attend)
    first, second = run(arguments, None), run(arguments, out)
    expected = warmattn.attention(**arguments)
    if isinstance(expected, Tensor):
        first, second, expected = (first,), (second,), (expected,)
    assert second[0] is out
    for results in (first, second):
        for result, part in zip(results, expected, strict=True):
            assert_same_bits(result, part)
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which inductor still imports
def test_inductor_gives_the_bits_of_eager() -> None:
    arguments = call("codes5", visible=External(mask(), warmattn.tile_map(mask())), return_lse=True)

    def attend(q: Tensor) -> tuple[Tensor, Tensor]:
        return warmattn.attention(**dict(arguments, q=q))

    run, _ = compiled(attend, "inductor")
    for result, expected in zip(run(arguments["q"]), warmattn.attention(**arguments), strict=True):
        assert_same_bits(result, expected)


def test_compiling_in_a_fresh_process_needs_no_earlier_call() -> None:
    """The first use of any public name is inside the graph."""
    program = """
import torch, warmattn

def attend(q, k):
    return warmattn.attention(q, k, k, visible=warmattn.Window(3, q_offset=1), return_lse=True)

q, k = torch.ones(1, 2, 3, 64).half(), torch.ones(1, 1, 8, 64).half()
out, lse = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k)
print(out.unique().tolist(), torch.equal(lse, attend(q, k)[1]))
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[1.0] True", result.stderr


def test_changing_ints_compile_twice_at_most() -> None:
    arguments = call()

    def attend(q_offset: int, kv_len: int, kv_start: int, window: int) -> Tensor:
        visible = Window(window, q_offset)
        return warmattn.attention(
            **(arguments | {"visible": visible, "kv_len": kv_len, "kv_start": kv_start})
        )

    run, counter = compiled(attend)
    for numbers in ((35, 40, 2, 9), (30, 39, 3, 8), (20, 31, 4, 7), (2, 17, 5, 40), (8, 13, 6, 2)):
        assert_same_bits(run(*numbers), attend(*numbers))
    assert counter.frame_count <= 2


def test_changing_lengths_in_tensors_compile_once() -> None:
    arguments = call()

    def attend(q_offset: Tensor, kv_len: Tensor, kv_start: Tensor) -> Tensor:
        visible = Causal(q_offset)
        return warmattn.attention(
            **(arguments | {"visible": visible, "kv_len": kv_len, "kv_start": kv_start})
        )

    run, counter = compiled(attend)
    for n in (0, 1, 7, 30):
        numbers = (int32(n, n + 2), int32(n + 8, n + 9), int32(n, 0))
        assert_same_bits(run(*numbers), attend(*numbers))
    assert counter.frame_count == 1
    with pytest.raises(InvalidInput, match=r"q_offset \(4\) \+ S \(5\) > T \(8\) in sequence 1"):
        run(int32(0, 4), int32(8, 8), int32(0, 0))


def test_growing_caches_and_chunks_compile_few_times() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return warmattn.attention(q, k, v, visible=Causal(k.shape[2] - q.shape[2]))

    run, counter = compiled(attend)
    for rows, keys in ((5, 40), (6, 41), (9, 50), (12, 77), (30, 130)):
        case = make_inputs(rows, S=rows, T=keys, D=64, C=keys)
        assert_same_bits(run(case.q, case.k, case.v), attend(case.q, case.k, case.v))  # type: ignore[arg-type]
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"q_offset \(36\) \+ S \(5\) > T \(40\)", {"visible": Causal(36)}),
        ("window: expected an int >= 1, got 0", {"visible": Window(0)}),
        ("mask: expected", {"visible": External(mask()[..., 1:])}),
        ("scale: expected finite and > 0", {"scale": -1.0}),
        ("head dim 96", {"q": torch.zeros(2, 4, S, 96).half()}),
    ],
)
def test_a_bad_call_is_refused_while_compiling(message: str, changes: dict[str, Any]) -> None:
    run, _ = compiled(lambda arguments: warmattn.attention(**arguments))
    with pytest.raises(RuntimeError, match=message):
        run(call(**changes))


def test_a_scale_that_float32_cannot_hold_is_refused_by_the_compiled_call() -> None:
    run, _ = compiled(lambda arguments: warmattn.attention(**arguments))
    with pytest.raises(InvalidInput, match=r"scale: expected finite and > 0 as float32, got 0\.0"):
        run(call(scale=1e-60))


NO_MESSAGE = "Observed exception"
"""All that torch before 2.13 says of an exception raised in a full graph."""


@pytest.mark.parametrize("operand", ["q", "k", "v", "v.norms", "mask"])
def test_an_operand_that_requires_grad_is_refused_while_compiling(operand: str) -> None:
    arguments = call("codes8" if operand == "v.norms" else "f32", visible=External(mask()))
    expected = warmattn.attention(**arguments)
    named = {"v.norms": getattr(arguments["v"], "norms", None), "mask": arguments["visible"].mask}
    (arguments | named)[operand].requires_grad_()

    run, _ = compiled(lambda: warmattn.attention(**arguments))
    with pytest.raises(RuntimeError, match=rf"{operand} requires grad: forward only|{NO_MESSAGE}"):
        run()
    with pytest.raises(Unsupported, match=f"{operand} requires grad: forward only"):
        torch.compile(lambda: warmattn.attention(**arguments), backend="aot_eager")()
    with torch.no_grad():
        assert_same_bits(run(), expected)


def test_what_a_graph_makes_of_a_parameter_is_refused_too() -> None:
    arguments = call()
    weight = torch.ones(256, dtype=torch.float16, requires_grad=True)
    run, _ = compiled(lambda: warmattn.attention(**dict(arguments, q=arguments["q"] * weight)))
    with pytest.raises(RuntimeError, match=f"q requires grad: forward only|{NO_MESSAGE}"):
        run()
    with torch.no_grad():
        assert_same_bits(run(), warmattn.attention(**arguments))


def faked(value: Any, mode: FakeTensorMode) -> Any:
    """The tensors of an argument as fake ones."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, CodedValues):
        return dataclasses.replace(
            value, codes=faked(value.codes, mode), norms=faked(value.norms, mode), signs=None
        )
    if isinstance(value, Causal | Window | External | Full):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value)(**{name: faked(field, mode) for name, field in fields.items()})
    return value


@each_call
@pytest.mark.parametrize("give_out", [False, True])
def test_fake_tensors_have_the_shapes_of_the_result(give_out: bool, changes: dict[str, Any]) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the centroids are real
    arguments = {name: faked(value, mode) for name, value in call(**changes).items()}
    with mode:
        given = torch.empty(arguments["q"].shape) if give_out else None
        result = warmattn.attention(**arguments, out=given)
    out, *lse = result if isinstance(result, tuple) else (result,)
    assert out is given or not give_out
    assert (out.shape, out.dtype, out.device) == (arguments["q"].shape, torch.float32, torch.device("cpu"))
    assert [(part.shape, part.dtype) for part in lse] == [(out.shape[:3], torch.float32)] * len(lse)
    assert bool(lse) == changes.get("return_lse", False)


def test_fake_tensors_of_the_wrong_shape_are_refused() -> None:
    mode = FakeTensorMode()
    arguments = {name: faked(value, mode) for name, value in call(kv_len=99).items()}
    with mode, pytest.raises(InvalidInput, match=r"T \(99\) > C \(45\)"):
        warmattn.attention(**arguments)


@pytest.mark.parametrize("give_out", [False, True])
def test_meta_tensors_have_the_shapes_of_the_result(give_out: bool) -> None:
    arguments = call()
    q, k, v = (arguments[name].to("meta") for name in "qkv")
    given = torch.empty(q.shape, device="meta") if give_out else None
    out, lse = warmattn.attention(q, k, v, visible=Causal(2), out=given, return_lse=True)
    assert out is given or not give_out
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.float32, "meta")
    assert (lse.shape, lse.dtype, lse.device.type) == (q.shape[:3], torch.float32, "meta")
