"""The examples run as they are shipped, on small sizes, and say the truth."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warmattn

EXAMPLES = Path(__file__).parents[1] / "examples"


def main_of(name: str) -> Callable[..., None]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "chat_resume",
        "context_parallel",
        "long_document",
    }


def test_chat_resume(capsys: pytest.CaptureFixture[str]):
    main_of("chat_resume")(model="demo", new=5)
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    held = [int(line.split()[0][1:]) for line in lines if "are in the cache" in line]
    first = len("Q: What may I do with a copy of the Program?\nA:") + 5
    assert held[:2] == [0, first - 1]  # the last token of an answer has not been through the model yet
    assert held[3:] == [first, 0]
    assert lines[-1] == "The two answers are the same."


def test_a_crop_that_does_nothing_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(warmattn.hf.WarmCache, "crop", lambda self, tokens: None)
    main_of("chat_resume")(model="demo", new=5)
    assert capsys.readouterr().out.endswith("The two answers are NOT the same.\n")


def test_long_document(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    found: list[int] = []
    find = warmattn.PrefixCache.find

    def noted(self: warmattn.PrefixCache, tokens: Any) -> Any:
        hit = find(self, tokens)
        found.append(0 if hit is None else hit.length)
        return hit

    monkeypatch.setattr(warmattn.PrefixCache, "find", noted)
    chart = tmp_path / "chart.png"
    main_of("long_document")(model="demo", tokens=150, new=4, out=chart)
    assert found == [0, 0, *[0, 150] * 5]  # what keeps nothing, and what keeps the document, in turn
    out = capsys.readouterr().out
    assert out.count("the same answer") == 6
    assert "ANOTHER ANSWER" not in out
    assert chart.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_context_parallel():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run = subprocess.run(
        [*torchrun, str(EXAMPLES / "context_parallel.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *ranks, last = run.stdout.splitlines()
    assert [line.split(":")[0] for line in ranks] == [f"rank {rank}" for rank in range(4)]
    assert last == "0 of 655360 elements differ from one process"
