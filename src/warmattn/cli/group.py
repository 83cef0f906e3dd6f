"""How every command ends: one exit code, and one line on stderr when something is wrong."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from warmattn.errors import InvalidInput, Unsupported

__all__ = ["ExitCode", "Group"]

# typer exports only this class's child: old releases take both from click, new ones have their own.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FELL_SHORT = 1
    """A check of `verify` or `demo` fell short."""
    BAD_INPUT = 2
    """Bad usage, an unreadable file, or operands that do not fit the contract."""
    UNSUPPORTED = 3
    """Valid, but this machine, installation or backend cannot do it."""
    INTERNAL = 4
    """A fault in warmattn itself."""
    INTERRUPTED = 130
    """Stopped from the keyboard."""


class Group(TyperGroup):
    """A command group whose errors are one line on stderr, never a traceback (unless ``--traceback``)."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> NoReturn:
        """Run, and leave the process with an `ExitCode`."""
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except _UsageError as error:
            code = _refuse(error)
        except typer.Abort:
            code = ExitCode.INTERRUPTED
        sys.exit(code or ExitCode.OK)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _UsageError, BrokenPipeError):
            raise  # typer's own ways to end a command
        except Exception as error:
            if ctx.params["traceback"]:
                raise
            code, message = _classify(error)
            _print_line(message)
            raise typer.Exit(code) from None


def _classify(error: Exception) -> tuple[ExitCode, str]:
    if isinstance(error, Unsupported):
        return ExitCode.UNSUPPORTED, str(error)
    if isinstance(error, InvalidInput):
        return ExitCode.BAD_INPUT, str(error)
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return ExitCode.BAD_INPUT, f"{place}{error.strerror or error}"
    hint = "a fault in warmattn; `warmattn --traceback ...` shows where"
    return ExitCode.INTERNAL, f"{type(error).__name__}: {error} ({hint})"


def _refuse(error: Any) -> int:
    """Print a usage error; a bare ``warmattn`` is one too, and its message is the whole help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return ExitCode.BAD_INPUT
    command = error.ctx.command_path if error.ctx is not None else "warmattn"
    message = error.format_message().rstrip(".")
    _print_line(f"{message} (see `{command} --help`)")
    return ExitCode.BAD_INPUT


def _print_line(message: str) -> None:
    print("warmattn:", " ".join(message.split()), file=sys.stderr)
