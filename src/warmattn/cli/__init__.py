"""The ``warmattn`` command line: run, demo, verify, info, prewarm. Documented in docs/cli.md."""

from __future__ import annotations

from warmattn.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the ``warmattn`` command; leaves with one of the codes in `warmattn.cli.group`."""
    app(prog_name="warmattn")
