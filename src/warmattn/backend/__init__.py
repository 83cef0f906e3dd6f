"""The backend protocol, the ordered table, and the choice among them. Imports no backend until one is asked
for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch

from warmattn.call import AttentionCall
from warmattn.errors import InvalidInput, Unsupported
from warmattn.partials import Exponential, Partials
from warmattn.pipelines import PipelineKey

__all__ = ["Backend", "BackendStatus", "SplitPartials", "Tiling", "backends", "load", "select"]


class Tiling(NamedTuple):
    """How a backend cuts a call. Tiles and splits lie at absolute key rows, so none of these depends on S
    or T.

    Attributes:
        rows: GQA-packed query rows of one tile.
        keys: keys of one tile.
        split: keys of one split; partial results meet at its multiples.
    """

    rows: int
    keys: int
    split: int


class SplitPartials(NamedTuple):
    """Partial results of consecutive splits.

    Attributes:
        first: index of the first split: its keys start at row ``first * split`` of K.
        partials: stacked over N splits in key order: ``[N, B, H, S]`` and ``[N, B, H, S, D]``, contiguous
            float32.
        exponential: what weighs them: the units of their maxima are the backend's own.
    """

    first: int
    partials: Partials
    exponential: Exponential


class Backend(Protocol):
    """What a backend provides. A call that arrives here has passed `AttentionCall.check`."""

    name: str
    device_types: tuple[str, ...]

    def unavailable(self) -> str | None:
        """Why this machine cannot run the backend at all; ``None`` when it can."""
        ...

    def supports(self, call: AttentionCall) -> str | None:
        """Why this backend cannot run this call; ``None`` when it can."""
        ...

    def tiling(self, head_dim: int) -> Tiling: ...

    def exponential(self, call: AttentionCall) -> Exponential:
        """What weighs the partial results of this call, as `SplitPartials` has it."""
        ...

    def prepare(self, keys: Sequence[PipelineKey], device: torch.device) -> None:
        """Do beforehand what makes building these pipelines quick; raise nothing that `build` would name."""
        ...

    def build(self, key: PipelineKey, device: torch.device) -> None:
        """Build what the pipeline needs, so that a later call compiles nothing."""
        ...

    def run(self, call: AttentionCall) -> None:
        """Write ``call.out``, and ``call.lse`` unless it is ``None``."""
        ...

    def run_partials(self, call: AttentionCall) -> SplitPartials:
        """Partial results per fixed split. Merged in order and finished, they are `run`'s result bit for bit.

        The call may violate ``q_offset + S <= key_offset + T``: its keys may be an earlier range of a
        longer sequence.
        """
        ...


class BackendStatus(NamedTuple):
    """One row of `backends`: whether this machine can run a backend, and if not, why."""

    available: bool
    reason: str | None
    device_types: tuple[str, ...]


_TABLE = {"cuda": "warmattn.backend.cuda", "cpu": "warmattn.backend.cpu"}
"""Modules by backend name, in the order "auto" tries them; each holds its backend as ``BACKEND``."""


def load(name: str, *, op: str = "attention") -> Backend:
    """The backend of that name.

    Raises:
        Unsupported: there is no such backend.
        InvalidInput: the name is no string.
    """
    if not isinstance(name, str):
        raise InvalidInput("backend", expected="a str", got=name, op=op)
    if name not in _TABLE:
        known = ", ".join(_TABLE)
        raise Unsupported(f"backend {name!r} does not exist: expected 'auto' or one of {known}", op=op)
    return _load(name)


@cache
def _load(name: str) -> Backend:
    return importlib.import_module(_TABLE[name]).BACKEND


def backends() -> dict[str, BackendStatus]:
    """Every backend in the order that ``backend="auto"`` tries them, with the reason where one cannot run
    here.
    """
    return {
        name: BackendStatus(reason is None, reason, load(name).device_types)
        for name in _TABLE
        for reason in [load(name).unavailable()]
    }


def select(call: AttentionCall, name: str = "auto") -> Backend:
    """The backend that runs a checked call. A named backend never falls back to another.

    Raises:
        Unsupported: the named backend cannot, or none can (each one's reason is listed).
    """
    if name != "auto":
        backend = load(name)
        reason = backend.unavailable() or backend.supports(call)
        if reason is not None:
            raise Unsupported(f"backend {name!r}: {reason}")
        return backend
    reasons = []
    for candidate in _TABLE:
        backend = _load(candidate)
        reason = backend.unavailable() or backend.supports(call)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise Unsupported(f"no backend fits: {'; '.join(reasons)}")
