"""How a benchmark publishes figures: ``benchmarks/results/NAME.json``, with machine, versions and commit."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

__all__ = ["RESULTS", "save"]

RESULTS = Path(__file__).parent / "results"


def save(name: str, figures: Any) -> Path:
    """Write figures beside what they depend on: commit, processor, threads, package versions."""
    info = json.loads(subprocess.check_output([sys.executable, "-m", "warmattn", "info", "--json"]))
    document = {
        "command": f"python benchmarks/{name}.py --json",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "python": info["python"],
        "platform": info["platform"],
        "cpu": info["cpu"],
        "threads": torch.get_num_threads(),
        "packages": info["packages"],
        "figures": figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _commit() -> str | None:
    """The commit measured, ``-dirty`` where the tree differs from it; ``None`` outside a checkout."""
    git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--exclude", "*"]
    result = subprocess.run(git, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
