"""The file of a cache: safetensors whose metadata seals it, written whole or not at all.

Metadata, all strings: ``format``, the kind of cache; ``version``; ``cache``, the writer's fields as JSON;
``crc32``, JSON of the CRC-32 of each tensor's bytes; ``seal``, SHA-256 over the other metadata and every
tensor's name, dtype and shape. A change of a field, of the header or of a byte of data is found. CRC-32 takes
less time than the disk does, and is there to find faults, not forgers.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from warmattn.errors import InvalidInput

__all__ = ["read", "write"]

VERSION = "1"


def write(path: str | Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any], *, format: str) -> None:
    """Replace ``path`` by a file of these tensors and JSON fields.

    The file is written beside it, flushed to the disk, and takes its name in one step: whenever the process
    or the machine stops, the name means the old file or the new one, both whole.

    Raises:
        OSError: no such folder, no right to write there, no room, …; the old file is whole.
    """
    path = Path(path)
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: _crc32(tensor) for name, tensor in contents.items()}
    metadata = {"format": format, "version": VERSION}
    metadata |= {"cache": json.dumps(fields), "crc32": json.dumps(checksums)}
    metadata["seal"] = _seal(metadata, contents)
    beside = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        try:
            save_file(contents, beside, metadata)
        except SafetensorError as error:  # its name for what the system said
            raise OSError(f"{path}: {error}") from error
        _flush(beside)
        os.replace(beside, path)
        _flush(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def read(path: str | Path, *, format: str, op: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors of a file, the tensors mapped from it, not loaded: copy what is to stay.

    Raises:
        InvalidInput: no file of this format and version, or one that is truncated or damaged in any way.
        OSError: what `open` raises, as where there is no file.
    """
    path = Path(path)
    path.open("rb").close()  # so that errors name the path, which those of mapping a folder do not
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for name, value in (("format", format), ("version", VERSION)):
                if metadata.get(name) != value:
                    raise _refusal(f"{name} {value!r}", f"{metadata.get(name)!r} in {path}", op)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise _refusal("a whole safetensors file", f"{path}: {error}", op) from error
    seal = metadata.pop("seal", None)
    if seal != _seal(metadata, tensors):
        raise _refusal("metadata as it was written", f"others in {path}", op)
    checksums = json.loads(metadata["crc32"])
    for name, tensor in tensors.items():
        if checksums[name] != _crc32(tensor):
            raise _refusal("data as it was written", f"other bytes of {name} in {path}", op)
    return json.loads(metadata["cache"]), tensors


def _refusal(expected: str, got: str, op: str) -> InvalidInput:
    return InvalidInput("path", expected=expected, got=got, op=op)


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data)


def _seal(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    layout = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    text = json.dumps([sorted(metadata.items()), layout])
    return hashlib.sha256(text.encode()).hexdigest()


def _flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
