"""The command line as a whole: help, version, exit codes, one line for an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cli_helpers import Invoke, assert_refused

import warmattn
from warmattn.cli import info
from warmattn.errors import InvalidInput, Unsupported

COMMANDS = ("run", "demo", "verify", "info", "prewarm")


def warmattn_process(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m warmattn`` in a process of its own, with ``path`` first on the module path."""
    source = Path(warmattn.__file__).parents[1]
    search = [str(entry) for entry in (path, source) if entry is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "COLUMNS": "80"}
    command = [sys.executable, "-m", "warmattn", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_module_runs_as_a_command():
    result = warmattn_process("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"warmattn {warmattn.__version__}\n", "")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, typer.Abort])
def test_interrupt_ends_quietly(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
):
    def interrupted(as_json: bool) -> None:
        raise interrupt

    monkeypatch.setattr(info, "info", interrupted)
    result = invoke("info")
    assert (result.exit_code, result.output.strip()) == (130, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_exit_codes(invoke: Invoke, command: str):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Exit codes:" in result.stdout
    assert "--json" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_no_command_shows_the_help(invoke: Invoke):
    result = invoke()
    assert result.exit_code == 2
    for command in COMMANDS:
        assert command in result.output


def test_bad_usage_is_one_line(invoke: Invoke):
    assert_refused(invoke("rum"), 2, "No such command 'rum'", "`warmattn --help`")
    assert_refused(invoke("run"), 2, "Missing argument", "`warmattn run --help`")
    assert_refused(invoke("run", "--sideways"), 2, "No such option", "--sideways")
    assert_refused(invoke("--sideways"), 2, "No such option", "--sideways")
    assert_refused(invoke("demo", "--tokens", "many"), 2, "--tokens")


ERRORS = (
    (InvalidInput("q", expected="a cat", got="a dog"), 2, "attention: q: expected a cat, got a dog"),
    (Unsupported("on Mondays"), 3, "attention: on Mondays"),
    (PermissionError(13, "Permission denied", "secret"), 2, "secret: Permission denied"),
    (
        RuntimeError("two\nlines"),
        4,
        "RuntimeError: two lines (a fault in warmattn; `warmattn --traceback ...`",
    ),
)


@pytest.mark.parametrize(("error", "code", "text"), ERRORS, ids=lambda value: type(value).__name__)
def test_error_is_one_line_and_its_code(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str
):
    def fail(as_json: bool) -> None:
        raise error

    monkeypatch.setattr(info, "info", fail)
    assert_refused(invoke("info"), code, text)
    assert invoke("--traceback", "info").exception is error


@pytest.mark.parametrize("error", ["ImportError('no libtorch')", "OSError('bad ELF')", "SystemError('odd')"])
def test_without_torch_commands_say_so(tmp_path: Path, error: str):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}\n")
    result = warmattn_process("verify", path=tmp_path)
    assert result.returncode == 3
    assert result.stdout == ""
    name, message = error.rstrip(")'").split("('")
    assert f"torch cannot be imported ({name}: {message}); see `warmattn info`" in result.stderr
    assert result.stderr.count("\n") == 1
    assert warmattn_process("--help", path=tmp_path).returncode == 0
