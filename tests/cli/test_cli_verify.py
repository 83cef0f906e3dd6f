"""``warmattn verify``: what is printed and the exit code; test_verification.py has the checks themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from cli_helpers import Invoke, assert_refused

import warmattn
from warmattn import verification
from warmattn.backend import BackendStatus
from warmattn.verification import Check, Target


def two_hold(target: Target) -> Iterator[Check]:
    yield Check("promise", "the first case", 1e-7, 1e-6, "relative error")
    yield Check("promise", f"long: {target.long}", 0, 0, "elements differ")


def one_falls_short(target: Target) -> Iterator[Check]:
    yield Check("other promise", "a case", 3, 0, "elements differ")
    yield Check("other promise", "not a number", float("nan"), 1e-6, "relative error")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *groups: monkeypatch.setattr(verification, "CHECKS", groups)


@pytest.mark.parametrize("columns", [80, 120])
def test_table_shows_figures_and_verdicts(invoke: Invoke, checks: Callable[..., None], columns: int):
    checks(two_hold, verification.hidden_rows, verification.refusals)
    result = invoke("verify", columns=columns)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in result.stdout
    assert any(
        line.split() == ["promise", "the", "first", "case", "1.00e-07", "1.00e-06", "✓"] for line in lines
    )
    assert lines[-1].startswith("✓ 24 of 24 checks hold, in ")


def test_exit_code_and_table_tell_a_shortfall(invoke: Invoke, checks: Callable[..., None]):
    checks(two_hold, one_falls_short)
    result = invoke("verify")
    assert result.exit_code == 1
    assert result.stdout.count("✗") == 3
    assert result.stdout.splitlines()[-1].startswith("✗ 2 of 4 checks hold")
    assert result.stderr == ""


def test_json_is_one_document(invoke: Invoke, checks: Callable[..., None]):
    checks(two_hold, one_falls_short)
    result = invoke("verify", "--json", "--long", "--backend", "cpu")
    assert result.exit_code == 1
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert (document["command"], document["long"], document["passed"]) == ("verify", True, False)
    (backend,) = document["backends"]
    assert (backend["name"], backend["available"], backend["device"]) == ("cpu", True, "cpu")
    first, long, short, nan = backend["checks"]
    assert first == {
        "item": "promise",
        "case": "the first case",
        "figure": 1e-7,
        "bound": 1e-6,
        "unit": "relative error",
        "passed": True,
    }
    assert long["case"] == "long: True"
    assert (short["figure"], short["passed"]) == (3, False)
    assert (nan["figure"], nan["passed"]) == (None, False)


def test_absent_backend_is_named_and_not_checked(
    invoke: Invoke, checks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    checks(two_hold)
    absent = BackendStatus(False, "no such device here", ("cuda",))
    monkeypatch.setattr(
        warmattn, "backends", lambda: {"cuda": absent, "cpu": BackendStatus(True, None, ("cpu",))}
    )
    result = invoke("verify")
    assert result.exit_code == 0
    assert "cuda: not checked, no such device here" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("✓ 2 of 2")
    assert_refused(invoke("verify", "--backend", "cuda"), 3, "backend 'cuda': no such device here")


def test_unknown_backend_is_unsupported(invoke: Invoke):
    assert_refused(invoke("verify", "--backend", "abacus"), 3, "backend 'abacus': expected one of cuda, cpu")
