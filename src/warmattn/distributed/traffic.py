"""What this rank sends and receives, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["Traffic", "count", "traffic", "waiting_for"]


@dataclass
class Traffic:
    """Bytes of K, V, partial results and results that went from this rank to others, and came from them."""

    sent: int = 0
    received: int = 0


_COUNTED: ContextVar[Traffic | None] = ContextVar("_COUNTED", default=None)


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what the calls inside move: ``with traffic() as moved: ...``."""
    counted = Traffic()
    token = _COUNTED.set(counted)
    try:
        yield counted
    finally:
        _COUNTED.reset(token)


def count(*, sent: int = 0, received: int = 0) -> None:
    """Add bytes to what `traffic` counts."""
    counted = _COUNTED.get()
    if counted is not None:
        counted.sent += sent
        counted.received += received


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Say what a collective call waited for when it fails: a rank that died, or the group's timeout.

    Raises:
        RuntimeError: in place of torch.distributed's own.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"warmattn.distributed gave up waiting for {what}: {error}") from error
