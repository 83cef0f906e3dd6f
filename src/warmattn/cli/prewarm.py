"""``warmattn prewarm``: build every pipeline a model can issue, and print what was built."""

from __future__ import annotations

import time

from warmattn.cli.console import console, duration, print_json
from warmattn.errors import InvalidInput, Unsupported

__all__ = ["prewarm"]


def prewarm(sliding: str | None, global_: str | None, device: str, backend: str, as_json: bool) -> None:
    """Build the pipelines and print their labels and the identity to log and compare.

    Raises:
        InvalidInput: nothing to build, or a form, kind or device that does not exist.
        Unsupported: no backend for the device, or a pipeline could not be built.
    """
    import warmattn
    from warmattn.pipelines import identity

    if sliding is None and global_ is None:
        expected = "--sliding FORM:KIND, --global FORM, or both"
        raise InvalidInput("layers", expected=expected, got="neither", op="prewarm")
    layers = None
    if sliding is not None:
        form, colon, kind = sliding.partition(":")
        if not colon:
            raise InvalidInput("--sliding", expected="FORM:KIND, as codes:window", got=sliding, op="prewarm")
        layers = (form, kind)
    name = _resolve(backend, device)
    start = time.perf_counter()
    try:
        labels = warmattn.prewarm(sliding=layers, global_=global_, device=device, backend=name)
    except Unsupported:
        raise
    except RuntimeError as error:  # `warmattn.prewarm` fails closed, with the label that could not be built
        raise Unsupported(str(error), op="prewarm") from error
    seconds = time.perf_counter() - start

    digest = identity(labels, backend=name)
    if as_json:
        document = {
            "backend": name,
            "device": device,
            "identity": digest,
            "seconds": seconds,
            "labels": labels,
        }
        print_json("prewarm", document)
        return
    out = console()
    for label in labels:
        out.print(label, soft_wrap=True)
    summary = f"{len(labels)} pipelines ready on {device} ({name}) in {duration(seconds)}, identity "
    out.print(summary, f"[bold]{digest}[/]", sep="", soft_wrap=True)


def _resolve(backend: str, device: str) -> str:
    """The backend that "auto" stands for: the identity names it, so it has to be known."""
    import warmattn

    if backend != "auto":
        return backend
    kind = device.split(":")[0]
    fitting = (n for n, s in warmattn.backends().items() if s.available and kind in s.device_types)
    return next(fitting, backend)
