"""``warmattn run``: one attention call from a file to a file."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import warmattn
from warmattn.cli.console import console, duration, facts, print_json, quantity, stderr
from warmattn.cli.files import CallFile, read_call, write_result
from warmattn.codec.rotation import check_signs
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput
from warmattn.visibility import Causal, External, Visibility, Window

__all__ = ["run"]

STEP_FLOPS = 2e10
"""Work between two moves of the progress bar: about a second on two CPU cores."""


def run(
    file: Path,
    out: Path | None,
    backend: str,
    softcap: float | None,
    chunk: int | None,
    unrotate: bool,
    as_json: bool,
) -> None:
    """Compute ``out`` and ``lse`` of a call file, some query rows at a time, and write them as one file.

    The steps change no bit: the bits of a row depend on the row, the keys it sees and the scale alone.

    Raises:
        OSError: a file cannot be read or written.
        InvalidInput: the file or its operands do not fit; nothing has been written then.
        Unsupported: the backend cannot run the call.
    """
    target = file.with_suffix(".out.safetensors") if out is None else out
    call = read_call(file)
    _check_target(file, target)
    signs = _signs(call.v, unrotate)
    if softcap is not None:
        call = replace(call, softcap=softcap)
    call = _on_device_of(backend, call)
    S = call.q.shape[2]
    plan = warmattn.explain(**_arguments(call, slice(0, S)), return_lse=True, backend=backend)
    step = _rows_per_step(S, plan.flops) if chunk is None else chunk

    result = torch.empty(call.q.shape, dtype=torch.float32)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32)
    start = time.perf_counter()
    for rows in _with_progress([slice(i, min(i + step, S)) for i in range(0, S, step)]):
        arguments = _arguments(call, rows)
        part, lse_part = warmattn.attention(**arguments, return_lse=True, backend=plan.backend)
        if unrotate:
            part = warmattn.unrotate(part, signs=signs)
        result[:, :, rows], lse[:, :, rows] = part, lse_part
    seconds = time.perf_counter() - start

    write_result(
        target,
        result,
        lse,
        {
            "warmattn": warmattn.__version__,
            "label": plan.label,
            "backend": plan.backend,
            "unrotated": str(unrotate).lower(),
        },
    )
    document = {
        "file": str(file),
        "out": str(target),
        "label": plan.label,
        "backend": plan.backend,
        "shape": _shape(call),
        "values": _value_form(call.v),
        "unrotated": unrotate,
        "rows_per_step": step,
        "seconds": seconds,
        "flops": plan.flops,
        "bytes": plan.bytes,
        "sha256": _digest(result, lse),
    }
    if as_json:
        print_json("run", document)
    else:
        _print_report(document)


def _check_target(file: Path, target: Path) -> None:
    """Refuse before the work what would fail after it."""
    if target.is_dir():
        raise InvalidInput("--out", expected="a file", got=f"the directory {target}", op="run")
    if target.exists() and target.samefile(file):
        raise InvalidInput("--out", expected="another file than FILE", got=str(target), op="run")
    if not os.access(target.parent, os.W_OK):
        raise InvalidInput("--out", expected="a directory to write to", got=str(target.parent), op="run")


def _signs(v: Tensor | CodedValues, unrotate: bool) -> Tensor | None:
    """The checked sign vector of coded V; ``None`` is the default one."""
    if not isinstance(v, CodedValues):
        if unrotate:
            raise InvalidInput("--unrotate", expected="coded V in the file", got="dense V", op="run")
        return None
    if v.signs is not None:
        check_signs(v.signs, v.head_dim, v.signs.device, op="run")
    return v.signs


def _on_device_of(backend: str, call: CallFile) -> CallFile:
    """Bring the operands to the kind of device that a named backend runs on; "auto" leaves them on the
    CPU.
    """
    status = warmattn.backends().get(backend)
    if status is None or not status.available or "cpu" in status.device_types:
        return call
    device, v, visible = status.device_types[0], call.v, call.visible
    if isinstance(v, CodedValues):
        v = replace(v, codes=v.codes.to(device), norms=v.norms.to(device), signs=None)
    else:
        v = v.to(device)
    if isinstance(visible, External):
        visible = External(visible.mask.to(device))
    return replace(call, q=call.q.to(device), k=call.k.to(device), v=v, visible=visible)


def _arguments(call: CallFile, rows: slice) -> dict[str, Any]:
    """`warmattn.attention`'s arguments for some query rows of the call."""
    return {
        "q": call.q[:, :, rows],
        "k": call.k,
        "v": call.v,
        "visible": _seen_by(call.visible, rows),
        "kv_len": call.kv_len,
        "scale": call.scale,
        "softcap": call.softcap,
    }


def _seen_by(visible: Visibility, rows: slice) -> Visibility:
    if isinstance(visible, External):
        mask = visible.mask[..., rows, :]
        return External(mask, warmattn.tile_map(mask))
    if isinstance(visible, (Causal, Window)):
        q_offset = 0 if visible.q_offset is None else visible.q_offset
        return replace(visible, q_offset=q_offset + rows.start)
    return visible


def _rows_per_step(rows: int, flops: int) -> int:
    """All rows at once for short work, else a multiple of the 32 rows that backends tile by."""
    if flops <= STEP_FLOPS:
        return rows
    return max(32, int(rows * STEP_FLOPS / flops) // 32 * 32)


def _with_progress(steps: Sequence[slice]) -> Iterator[slice]:
    """The steps, under a bar on stderr when there are several and someone is watching."""
    screen = stderr()
    columns = (TextColumn("attention"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
    progress = Progress(*columns, TimeRemainingColumn(), console=screen, transient=True)
    progress.disable = len(steps) == 1 or not screen.is_terminal
    with progress:
        task = progress.add_task("", total=steps[-1].stop)
        for step in steps:
            yield step
            progress.update(task, completed=step.stop)


def _shape(call: CallFile) -> dict[str, int | list[int]]:
    B, H, S, D = call.q.shape
    Hk, C = call.k.shape[1:3]
    T = C if call.kv_len is None else call.kv_len
    lengths = T.tolist() if isinstance(T, Tensor) else T
    return {"B": B, "H": H, "Hk": Hk, "S": S, "T": lengths, "C": C, "D": D}


def _value_form(v: Tensor | CodedValues) -> str:
    if isinstance(v, CodedValues):
        return f"codes{v.bits}"
    return {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[v.dtype]


def _digest(*tensors: Tensor) -> str:
    """SHA-256 of the tensors' bytes: two runs gave the same bits exactly when their digests agree."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _print_report(document: dict[str, Any]) -> None:
    seconds, flops = document["seconds"], document["flops"]
    shape = "  ".join(f"{axis} {size}" for axis, size in document["shape"].items())
    rows = {
        "pipeline": document["label"],
        "backend": document["backend"],
        "shape": shape,
        "V": document["values"] + (", unrotated" if document["unrotated"] else ""),
        "time": f"{duration(seconds)}, {quantity(flops / seconds, 'FLOP/s')}",
        "bits": f"sha256 {document['sha256'][:16]}",
        "written": document["out"],
    }
    console().print(facts(rows))
