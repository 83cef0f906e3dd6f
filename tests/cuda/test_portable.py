"""The portable kernel's results on Triton's interpreter; code of both ``attend`` kernels, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from attend_cases import FEW, Case, check

from warmattn.backend.cuda import hopper, portable


def test_results(request: pytest.FixtureRequest) -> None:
    """`portable_cases.py`, in its own process: its import decides if Triton compiles or interprets."""
    cases = Path(__file__).with_name("portable_cases.py")
    seed = f"--seed={request.config.getoption('--seed')}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", seed, str(cases)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_both_kernels_take_the_same_arguments() -> None:
    kernels: tuple[Any, ...] = (portable.attend, hopper.attend)
    ours, theirs = (
        [parameter.name for parameter in kernel.params if not parameter.is_constexpr] for kernel in kernels
    )
    assert ours == theirs


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_few_of_many_compile(case: Case, tmp_path: Path) -> None:
    """``make compile-all`` compiles all."""
    check(case, tmp_path, walk=True)
