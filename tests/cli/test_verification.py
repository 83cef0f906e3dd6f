"""The checks behind ``warmattn verify``: the CPU backend passes, and a backend with one fault is caught."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

import warmattn
import warmattn.backend
from warmattn import verification
from warmattn.backend.cpu import CpuBackend
from warmattn.call import AttentionCall
from warmattn.verification import Check, Target

CPU = Target("cpu", "cpu")
Group = Callable[[Target], Iterator[Check]]
QUICK = [
    group
    for group in verification.CHECKS
    if group not in (verification.accuracy, verification.warm_equals_cold)
]


@pytest.mark.parametrize("group", QUICK, ids=lambda group: group.__name__)
def test_cpu_backend_holds(group: Group):
    checks = list(group(CPU))
    assert checks
    assert [check for check in checks if not check.passed] == []


def test_cpu_backend_is_accurate():
    checks = list(islice(verification.accuracy(CPU), 7))
    assert {check.item for check in checks} == {"accuracy", "log-sum-exp"}
    assert all(0 < check.figure <= check.bound for check in checks)


def test_resume_holds_on_the_cpu():
    assert all(check.passed for check in islice(verification.warm_equals_cold(CPU), 5))


@pytest.mark.parametrize(("figure", "passed"), [(1.0, True), (1.1, False), (math.nan, False)])
def test_figure_passes_up_to_its_bound(figure: float, passed: bool):
    assert Check("promise", "case", figure, 1.0, "unit").passed is passed


def scale_up(call: AttentionCall) -> None:
    assert call.out is not None
    call.out.mul_(1.001)


def shift_lse(call: AttentionCall) -> None:
    if call.lse is not None:
        call.lse.add_(1e-3)


def depend_on_rows(call: AttentionCall) -> None:
    if call.S % 2:
        flip_last_bit(call)


def depend_on_batch(call: AttentionCall) -> None:
    if call.B > 1:
        flip_last_bit(call)


def depend_on_threads(call: AttentionCall) -> None:
    if torch.get_num_threads() > 1:
        flip_last_bit(call)


def depend_on_mask(call: AttentionCall) -> None:
    if call.mask is not None:
        flip_last_bit(call)


def depend_on_map(call: AttentionCall) -> None:
    if call.tile_map is not None:
        flip_last_bit(call)


def depend_on_codes(call: AttentionCall) -> None:
    if call.coded:
        flip_last_bit(call)


def read_past_the_end(call: AttentionCall) -> None:
    assert call.out is not None
    call.out.add_(call.k[:, :, -1:].float().sum() * 0)


def fill_hidden_rows(call: AttentionCall) -> None:
    assert call.out is not None
    call.out.masked_fill_(call.out == 0, 1.0)


def flip_last_bit(call: AttentionCall) -> None:
    assert call.out is not None
    call.out.view(torch.int32).bitwise_xor_(1)


FAULTS = (
    (scale_up, verification.accuracy, "accuracy"),
    (shift_lse, verification.accuracy, "log-sum-exp"),
    (scale_up, verification.accuracy_of_options, "accuracy"),
    (scale_up, verification.against_sdpa, "torch f32 SDPA"),
    (depend_on_rows, verification.warm_equals_cold, "warm = cold"),
    (depend_on_batch, verification.independent_rows, "same bits"),
    (depend_on_threads, verification.independent_rows, "same bits"),
    (flip_last_bit, verification.independent_rows, "same bits"),  # run differs from run_partials
    (depend_on_mask, verification.same_keys_same_bits, "same bits"),
    (depend_on_map, verification.same_keys_same_bits, "tile map"),
    (depend_on_codes, verification.codes_equal_decoded, "codes = decoded"),
    (read_past_the_end, verification.poison, "poison past T"),
    (fill_hidden_rows, verification.hidden_rows, "rows that see nothing"),
)


Fault = Callable[[AttentionCall], None]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Fault], Target]]:
    """Register a backend that computes as the CPU's does, then applies a fault to the result."""
    warmattn.backend.load.cache_clear()

    def register(fault: Fault) -> Target:
        class Faulty(CpuBackend):
            name = "faulty"

            def run(self, call: AttentionCall) -> None:
                super().run(call)
                fault(call)

        module = types.ModuleType("faulty_backend")
        module.__dict__["BACKEND"] = Faulty()
        monkeypatch.setitem(warmattn.backend._TABLE, "faulty", module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return Target("faulty", "cpu")

    yield register
    warmattn.backend.load.cache_clear()


@pytest.mark.parametrize(
    ("fault", "group", "item"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_fault_is_caught(faulty: Callable[[Fault], Target], fault: Fault, group: Group, item: str):
    failed = (check for check in group(faulty(fault)) if not check.passed)
    assert next(failed).item == item


def test_missing_refusal_is_caught(monkeypatch: pytest.MonkeyPatch):
    def lenient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | None:
        if isinstance(options["visible"], warmattn.External):
            return None
        return warmattn.attention(q, k, v, **options)

    monkeypatch.setattr(verification, "attention", lenient)
    failed = [check.case for check in verification.refusals(CPU) if not check.passed]
    assert failed == ["mask of C keys: InvalidInput", "map misshapen: InvalidInput"]


def test_wrong_message_and_early_write_are_caught(monkeypatch: pytest.MonkeyPatch):
    def hasty(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, **options: Any) -> Tensor:
        if options["visible"] == warmattn.Window(0, 4):
            out.zero_()
        if options.get("scale") == 0:
            raise warmattn.InvalidInput("something", expected="good", got="bad")
        return warmattn.attention(q, k, v, out=out, **options)

    monkeypatch.setattr(verification, "attention", hasty)
    failed = [check.case for check in verification.refusals(CPU) if not check.passed]
    assert failed == ["scale 0: InvalidInput", "window 0: InvalidInput"]
