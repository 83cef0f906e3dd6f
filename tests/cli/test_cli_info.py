"""``warmattn info``: everything when all is well, and something true when torch is broken."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from cli_helpers import Invoke
from test_cli_usage import warmattn_process

import warmattn
from warmattn.backend.cpu import native
from warmattn.pipelines import REGISTRY


def test_document_describes_this_process(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(REGISTRY, "_status", {})
    result = invoke("info", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert document["version"] == warmattn.__version__
    assert document["torch"]["version"] == torch.__version__
    assert document["packages"]["torch"] == metadata.version("torch")
    assert document["torch"]["threads"] == torch.get_num_threads()
    assert document["cpu"]["usable"] >= 1
    backends = {entry["name"]: entry["available"] for entry in document["backends"]}
    assert backends == {name: status.available for name, status in warmattn.backends().items()}
    assert document["pipelines"] == []


def test_registry_lists_what_was_prewarmed(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(REGISTRY, "_status", {})
    monkeypatch.setattr(REGISTRY, "_built", {})
    (label, *_) = warmattn.prewarm(global_="f16")
    pipelines = json.loads(invoke("info", "--json").stdout)["pipelines"]
    assert len(pipelines) == 4
    assert {"backend": "cpu", "device": "cpu", "label": label, "status": "ready"} in pipelines
    assert label in invoke("info", columns=200).stdout


def test_the_instruction_set_is_shown_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    isas = native.isas()
    fastest = next(isa.name for isa in isas if isa.missing is None)
    for forced, isa, why in (
        (None, fastest, "the fastest that runs here"),
        (isas[-1].name, isas[-1].name, "as WARMATTN_CPU_ISA says"),
    ):
        monkeypatch.delenv("WARMATTN_CPU_ISA", raising=False)
        if forced is not None:
            monkeypatch.setenv("WARMATTN_CPU_ISA", forced)
        kernels = json.loads(warmattn_process("info", "--json").stdout)["cpu_kernels"]
        assert kernels == {
            "selected": isa,
            "forced": forced,
            "missing": {isa.name: isa.missing for isa in isas},
        }
        assert f"{isa}, {why}" in warmattn_process("info").stdout
    monkeypatch.setenv("WARMATTN_CPU_ISA", "mmx")
    impossible = warmattn_process("info")
    assert (impossible.returncode, impossible.stderr) == (0, "")
    assert "WARMATTN_CPU_ISA=mmx" in impossible.stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_table_fits_the_screen(invoke: Invoke, columns: int):
    lines = invoke("info", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("backend cpu") for line in lines)


BROKEN = {
    "ImportError": "raise ImportError('libtorch_cpu.so: cannot open shared object file')",
    "OSError": "raise OSError('libc10.so: file too short')",
    "RuntimeError": "raise RuntimeError('operator torchvision::nms does not exist')",
    "ModuleNotFoundError": "raise ModuleNotFoundError(\"No module named 'torch'\")",
    "AttributeError": "",  # a stub that imports, and holds nothing
}


@pytest.mark.parametrize(("error", "source"), BROKEN.items(), ids=BROKEN)
def test_broken_torch_is_a_line_not_a_failure(tmp_path: Path, error: str, source: str):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    result = warmattn_process("info", "--json", path=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    for section in ("torch", "backends", "pipelines"):
        assert document[section]["error"].split(":")[0] in (error, "ImportError")
    result = warmattn_process("info", path=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "cannot be used" in result.stdout
    assert "Traceback" not in result.stdout
