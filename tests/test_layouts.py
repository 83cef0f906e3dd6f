"""A call whose tensors look like an earlier one's is checked by its numbers alone, and no less strictly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from warmattn import call as call_module
from warmattn.call import AttentionCall
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported
from warmattn.testing import make_inputs
from warmattn.visibility import Causal, Window

INPUTS = make_inputs(5, S=4, T=32, D=64, C=40)
GOOD: dict[str, Any] = {"visible": Causal(28), "kv_len": 32, "scale": 0.1}

BAD: dict[str, dict[str, Any]] = {
    "T past C": {"kv_len": 41},
    "T of 0": {"kv_len": 0},
    "T past every position": {"kv_len": 2**31},
    "a row past T": {"visible": Causal(29)},
    "a negative offset": {"visible": Causal(-1)},
    "a row past T, window": {"visible": Window(5, 29)},
    "window of 0": {"visible": Window(0, 28)},
    "start past T": {"kv_start": 33},
    "a negative start": {"kv_start": -1},
    "a negative key offset": {"key_offset": -1},
    "key offset past every position": {"key_offset": 2**31, "visible": Causal(28)},
    "scale of 0": {"scale": 0.0},
    "scale NaN": {"scale": float("nan")},
    "scale of inf": {"scale": float("inf")},
    "a bool for a length": {"kv_start": True},
    "softcap of 0": {"softcap": 0.0},
}


def check(
    q: Tensor, k: Tensor, v: Tensor | CodedValues, *, out: Tensor | None = None, **arguments: Any
) -> None:
    AttentionCall.of(q, k, v, out=out, **arguments).rounded().check()


@pytest.fixture(autouse=True)
def no_layouts() -> None:
    call_module._RIGHT_LAYOUTS.clear()


@pytest.mark.parametrize("name", BAD)
def test_bad_numbers_are_refused_as_on_a_first_call(name: str) -> None:
    with pytest.raises(InvalidInput) as first:
        check(INPUTS.q, INPUTS.k, INPUTS.v, **(GOOD | BAD[name]))
    assert not call_module._RIGHT_LAYOUTS
    check(INPUTS.q, INPUTS.k, INPUTS.v, **GOOD)
    with pytest.raises(InvalidInput) as again:
        check(INPUTS.q, INPUTS.k, INPUTS.v, **(GOOD | BAD[name]))
    assert str(again.value) == str(first.value)


def test_the_second_call_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    check(INPUTS.q, INPUTS.k, INPUTS.v, **GOOD)
    monkeypatch.setattr(AttentionCall, "_check_scores", None)  # a full check would call it
    check(INPUTS.q, INPUTS.k, INPUTS.v, **(GOOD | {"kv_len": 31, "visible": Window(3, 27)}))
    with pytest.raises(TypeError):
        check(INPUTS.q[:, :1], INPUTS.k, INPUTS.v, **GOOD)  # another layout


@pytest.mark.parametrize("at", [0, 4, 40])
def test_an_output_over_an_input_is_seen_whatever_came_before(at: int) -> None:
    """``out`` moves through a buffer whose first part is v."""
    buffer = torch.zeros(40 * 64 + 2 * 4 * 64)
    v = buffer[: 40 * 64].view(1, 1, 40, 64)
    apart = torch.empty(1, 2, 4, 64)
    check(INPUTS.q, INPUTS.k, v, out=apart, **GOOD)
    out = buffer[at * 64 : at * 64 + 2 * 4 * 64].view(1, 2, 4, 64)
    if at == 40:
        check(INPUTS.q, INPUTS.k, v, out=out, **GOOD)
    else:
        with pytest.raises(InvalidInput, match="overlaps v"):
            check(INPUTS.q, INPUTS.k, v, out=out, **GOOD)


def test_a_log_sum_exp_over_an_input_is_seen_without_an_output() -> None:
    buffer = torch.zeros(40 * 64)
    v = buffer.view(1, 1, 40, 64)
    call = AttentionCall.of(INPUTS.q, INPUTS.k, v, **GOOD).rounded()
    call._replace(lse=torch.empty(1, 2, 4)).check()
    with pytest.raises(InvalidInput, match="overlaps v"):
        call._replace(lse=buffer[:8].view(1, 2, 4)).check()


def test_an_operand_that_requires_grad_is_refused() -> None:
    check(INPUTS.q, INPUTS.k, INPUTS.v, **GOOD)
    assert isinstance(INPUTS.v, Tensor)
    v = INPUTS.v.clone().requires_grad_()
    with pytest.raises(Unsupported, match="requires grad"):
        check(INPUTS.q, INPUTS.k, v, **GOOD)


def test_layouts_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "_LAYOUTS_KEPT", 3)
    for capacity in range(40, 50):
        x = make_inputs(1, S=1, T=8, D=64, C=capacity)
        check(x.q, x.k, x.v, visible=Causal(7), kv_len=8)
        assert len(call_module._RIGHT_LAYOUTS) <= 3
