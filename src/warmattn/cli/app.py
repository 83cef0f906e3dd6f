"""The commands and their options. What a command does is in the module of its name, imported when it runs:
``--help``, ``--version`` and ``info`` must work without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warmattn import __version__
from warmattn.cli.group import Group
from warmattn.errors import Unsupported

__all__ = ["app"]

EXIT_CODES = (
    "Exit codes: 0 done; 1 a check of verify or demo fell short; 2 bad usage or bad input; "
    "3 not supported here; 4 a fault in warmattn; 130 interrupted."
)

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"warmattn {__version__}")
        raise typer.Exit


@app.callback()
def warmattn(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """Precise tiled warm attention: F32-accurate, K and V read in place, warm equals cold bit for bit."""


@app.command(epilog=EXIT_CODES)
def run(
    file: Annotated[Path, typer.Argument(help="Safetensors file with q, k, v (or codes) and metadata.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Result file.", show_default="FILE with the suffix .out.safetensors"
        ),
    ] = None,
    backend: Annotated[str, typer.Option(help="A backend by name, which never falls back.")] = "auto",
    softcap: Annotated[
        float | None,
        typer.Option(help="c: a scaled score s becomes c·tanh(s/c).", show_default="as in the file"),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1, help="Query rows per step; changes no bit.", show_default="about a second's work"
        ),
    ] = None,
    unrotate: Annotated[
        bool, typer.Option("--unrotate", help="Coded V: rotate the output back to V's own domain.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the attention call in FILE; write `out` and `lse` (float32), all or nothing.

    The file is mapped, not read, and docs/cli.md describes it. Long work goes in steps of query rows.

    The steps change no bit: a warm resume equals the cold run bit for bit.
    """
    _require_torch()
    from warmattn.cli import run as command

    command.run(file, out, backend, softcap, chunk, unrotate, as_json)


@app.command(epilog=EXIT_CODES)
def demo(
    text_file: Annotated[
        Path | None, typer.Argument(help="Any file with text.", show_default="a text of our own")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where pictures go.")] = Path(
        "demo-out"
    ),
    tokens: Annotated[int, typer.Option(min=1, max=8192, help="Tokens of the text, at most.")] = 2048,
    model: Annotated[
        str, typer.Option(help="demo: ships with warmattn; gemma3-270m: the real one, an extra.")
    ] = "demo",
    save_calls: Annotated[
        bool, typer.Option("--save-calls", help="Also save each layer as a FILE for `run`.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Resume a model's attention in chunks and hold it to the cold run, in every V form; then let it write.

    Saves the tables as SVG and, with matplotlib, a chart as PNG. Exits with 1 if any bit differs.
    """
    _require_torch()
    from warmattn.cli import demo as command

    command.demo(text_file, out, tokens, model, save_calls, as_json)


@app.command(epilog=EXIT_CODES)
def verify(
    long: Annotated[bool, typer.Option("--long", help="Accuracy up to T = 131,072, not 32,768.")] = False,
    backend: Annotated[
        str | None, typer.Option(help="Only this backend.", show_default="every one present")
    ] = None,
    as_json: Json = False,
) -> None:
    """Hold this machine to the contract: a table of figures, bounds and verdicts.

    Exits with 1 if one falls short.
    """
    _require_torch()
    from warmattn.cli import verify as command

    command.verify(long, backend, as_json)


@app.command(epilog=EXIT_CODES)
def info(as_json: Json = False) -> None:
    """Show versions, CPU, devices, backends with reasons, and built pipelines. Works when torch does not."""
    from warmattn.cli import info as command

    command.info(as_json)


@app.command(epilog=EXIT_CODES)
def prewarm(
    sliding: Annotated[
        str | None,
        typer.Option(
            metavar="FORM:KIND",
            help="D 256 layers. FORM of V: f32, f16, codes. KIND: external, external+map, window, causal.",
        ),
    ] = None,
    global_: Annotated[
        str | None, typer.Option("--global", metavar="FORM", help="D 512 layers, always causal.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the layers run.")] = "cpu",
    backend: Annotated[str, typer.Option(help="A backend by name, which never falls back.")] = "auto",
    as_json: Json = False,
) -> None:
    """Build every pipeline a model's layers can issue; print the labels and their identity hash.

    For example: warmattn prewarm --sliding codes:window --global codes
    """
    _require_torch()
    from warmattn.cli import prewarm as command

    command.prewarm(sliding, global_, device, backend, as_json)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except Exception as error:  # a broken build can raise anything
        reason = f"torch cannot be imported ({type(error).__name__}: {error}); see `warmattn info`"
        raise Unsupported(reason, op="warmattn") from error
