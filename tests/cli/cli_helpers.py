"""What the tests of the command line share: files to run on, and the one way to be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from typer.testing import Result

from warmattn.codec.values import CodedValues
from warmattn.testing import Inputs

Invoke = Callable[..., Result]
HEADER = {"format": "warmattn-attention", "version": "1"}


def assert_refused(result: Result, code: int, *texts: str) -> None:
    """The exit code, nothing on stdout, and one line on stderr that holds every text."""
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("warmattn: ")
    for text in texts:
        assert text in result.stderr


def write_call(path: Path, x: Inputs, metadata: dict[str, Any] | None = None, **tensors: Tensor) -> Path:
    """Save operands as a call file: causal over the last rows, unless the metadata say otherwise."""
    operands = {"q": x.q, "k": x.k, **tensors}
    if isinstance(x.v, CodedValues):
        operands |= {"codes": x.v.codes, "norms": x.v.norms, "centroids": x.v.codebook.centroids}
    else:
        operands["v"] = x.v
    header = {**HEADER, "visible": "causal", "q_offset": x.kv_len - x.q.shape[2], "kv_len": x.kv_len}
    header = {key: str(value) for key, value in {**header, **(metadata or {})}.items() if value is not None}
    contiguous = {name: tensor.contiguous() for name, tensor in operands.items()}
    save_file(contiguous, path, metadata=header)
    return path
