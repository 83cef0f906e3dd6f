"""Reading the tables a codec needs from files: our safetensors, or the JSON that other caches ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from warmattn.errors import InvalidInput

__all__ = ["is_json", "read_json_section", "read_tensor"]


def is_json(path: str | Path) -> bool:
    """Whether ``path`` names a JSON table (by its suffix); every other file is taken as safetensors."""
    return Path(path).suffix.lower() == ".json"


def read_json_section(path: str | Path, section: str, *, op: str) -> dict[str, Any]:
    """The object under the top-level key ``section`` of a JSON file, e.g. ``{"8": [...]}``."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not isinstance(document.get(section), dict):
        raise InvalidInput("path", expected=f"a JSON object with an object {section!r}", got=str(path), op=op)
    return document[section]


def read_tensor(path: str | Path, name: str, *, op: str) -> Tensor:
    """The tensor ``name`` of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        if name not in names:
            raise InvalidInput(
                "path", expected=f"a safetensors file with a tensor {name!r}", got=names, op=op
            )
        return file.get_tensor(name)
