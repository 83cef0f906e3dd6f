"""The call file that ``warmattn run`` reads, the result file it writes, and files that are whole or absent.

A call file is safetensors: tensors ``q`` ``[B, H, S, D]``, ``k`` ``[B, Hk, C, D]``, and either ``v`` or
``codes``, ``norms``, ``centroids`` and perhaps ``signs``; optional ``mask`` and ``kv_lens`` (int32 ``[B]``).
Its string metadata says the rest: ``format`` and ``version``, ``visible``, and where they apply ``window``,
``q_offset``, ``kv_len``, ``scale``, ``softcap``, ``sf``. docs/cli.md has the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from warmattn.codec.codebook import Codebook
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput
from warmattn.visibility import Causal, External, Full, Visibility, Window

__all__ = ["CallFile", "read_call", "replacing", "write_result"]

FORMAT = "warmattn-attention"
RESULT_FORMAT = "warmattn-result"
VERSION = "1"

_REQUIRED = {"q", "k"}
_CODED = {"codes", "norms", "centroids"}
_OPTIONAL = {"v", "signs", "mask", "kv_lens"}

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class CallFile:
    """The operands and arguments of one `warmattn.attention` call; tensors are mapped from the file, not
    read.

    Attributes:
        q, k, v: operands, v dense or coded.
        visible: what the rows see.
        kv_len: an int, an int32 tensor ``[B]``, or ``None`` for all rows of k.
        scale, softcap: ``None``: the default, none.
    """

    q: Tensor
    k: Tensor
    v: Tensor | CodedValues
    visible: Visibility
    kv_len: int | Tensor | None
    scale: float | None
    softcap: float | None


def read_call(path: Path) -> CallFile:
    """Map a call file.

    Raises:
        OSError: the file cannot be opened.
        InvalidInput: it is not safetensors, not of this format and version, or tensors or metadata are
            missing, unknown or contradict each other.
    """
    with path.open("rb"):
        pass  # an OSError that names the file: safetensors has several, some without the name
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(header)
            names = set(file.keys())
            _check_names(names)
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        _refuse("file", "a safetensors file", f"{path} ({error})")
    if "kv_lens" in tensors and "kv_len" in header:
        _refuse("kv_len", "kv_len or kv_lens, not both", "both")
    return CallFile(
        q=tensors["q"],
        k=tensors["k"],
        v=_values(tensors, header),
        visible=_visible(tensors, header),
        kv_len=tensors.get("kv_lens", _number(header, "kv_len", int)),
        scale=_number(header, "scale", float),
        softcap=_number(header, "softcap", float),
    )


def write_result(path: Path, out: Tensor, lse: Tensor, metadata: Mapping[str, str]) -> None:
    """Write ``out`` ``[B, H, S, D]`` and ``lse`` ``[B, H, S]``, float32, so that ``path`` is whole or
    untouched.
    """
    header = {"format": RESULT_FORMAT, "version": VERSION, **metadata}
    with replacing(path) as temporary:
        save_file({"out": out, "lse": lse}, temporary, metadata=header)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``: moved onto it when the block succeeds, removed when it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # else a crash may leave the new name on an empty file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_header(header: Mapping[str, str]) -> None:
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        if header.get(key) != expected:
            _refuse(key, f"{expected!r} in the file's metadata", repr(header.get(key)))


def _check_names(names: set[str]) -> None:
    coded = bool(names & _CODED)
    required = _REQUIRED | (_CODED if coded else {"v"})
    missing, unknown = required - names, names - _REQUIRED - _CODED - _OPTIONAL
    if missing:
        _refuse("file", f"tensors {', '.join(sorted(required))}", f"none named {', '.join(sorted(missing))}")
    if unknown:
        known = ", ".join(sorted(_REQUIRED | _CODED | _OPTIONAL))
        _refuse("file", f"no tensors but {known}", ", ".join(sorted(unknown)))
    if coded and "v" in names:
        _refuse("v", "v or codes, not both", "both")
    if not coded and "signs" in names:
        _refuse("signs", "signs only beside codes", "signs beside v")


def _values(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> Tensor | CodedValues:
    if "v" in tensors:
        return tensors["v"]
    sf = _number(header, "sf", float)
    codebook = Codebook(tensors["centroids"])
    return CodedValues(
        tensors["codes"], tensors["norms"], codebook, 1.0 if sf is None else sf, tensors.get("signs")
    )


def _visible(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> Visibility:
    kind = header.get("visible")
    window, q_offset = _number(header, "window", int), _number(header, "q_offset", int)
    if (kind == "external") != ("mask" in tensors):
        _refuse("mask", "a tensor 'mask' exactly when visible is 'external'", f"visible {kind!r}")
    if (kind == "window") != (window is not None):
        _refuse("window", "metadata 'window' exactly when visible is 'window'", f"visible {kind!r}")
    if kind == "causal":
        return Causal(q_offset)
    if kind == "window":
        assert window is not None
        return Window(window, q_offset)
    if kind == "external":
        return External(tensors["mask"])
    if kind == "full":
        return Full()
    return _refuse("visible", "'causal', 'window', 'full' or 'external' in the file's metadata", repr(kind))


def _number(header: Mapping[str, str], key: str, kind: Callable[[str], Number]) -> Number | None:
    text = header.get(key)
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        return _refuse(key, f"{'an int' if kind is int else 'a number'} in the file's metadata", repr(text))


def _refuse(operand: str, expected: str, got: str) -> NoReturn:
    raise InvalidInput(operand, expected=expected, got=got, op="run")
