"""How a benchmark publishes figures: ``benchmarks/results/NAME.json``, with machine, versions and commit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

__all__ = ["RESULTS", "machine", "save", "write"]

RESULTS = Path(__file__).parent / "results"


def save(name: str, figures: Any) -> Path:
    """Write figures beside what they depend on: commit, processor, threads, package versions."""
    document = {"command": f"python benchmarks/{name}.py --json", **machine(), "figures": figures}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    write(path, document)
    return path


def write(path: Path, document: Any) -> None:
    """Write a document as UTF-8 JSON."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def machine(commit: str | None = None) -> dict[str, Any]:
    """What figures depend on. ``commit`` names the code where it does not run from a checkout."""
    info = json.loads(subprocess.check_output([sys.executable, "-m", "warmattn", "info", "--json"]))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or _commit(),
        "python": info["python"],
        "platform": info["platform"],
        "cpu": info["cpu"],
        "threads": torch.get_num_threads(),
        "devices": info["torch"]["devices"],
        "packages": info["packages"],
    }


def _commit() -> str | None:
    """The commit measured, ``-dirty`` where the tree differs from it; ``None`` outside a checkout or without
    git.
    """
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--exclude", "*"]
    result = subprocess.run(git, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
