"""``warmattn demo``: a real model's attention, cold in one call and warm in chunks, in every V form; then the
text that the model writes with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import torch
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

import warmattn
from warmattn import reference
from warmattn.cli.console import console, duration, facts, print_json, stderr, table
from warmattn.cli.generation import generations, legend_of, table_of
from warmattn.cli.group import ExitCode
from warmattn.cli.pictures import save_chart, save_svg
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput
from warmattn.integrations.capture import CapturedLayer, capture, load_demo_text, save_capture
from warmattn.integrations.text_models import load_text_model
from warmattn.testing import make_values, relative_error

__all__ = ["Row", "demo"]

FORMS = ("f32", "f16", "codes8", "codes6", "codes5")
CHUNKS = (1, 7, 64, 512)
SPARE = 64
"""Rows that a cache holds beyond the text; like every row not yet written, they are poison."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured for one layer and V form.

    Attributes:
        layer, head_dim, window: of the model; window ``None`` is causal.
        values: form of V in the cache.
        seconds_cold, seconds_warm: cache writes and attention, in one call and in chunks.
        chunks: number of warm calls.
        cache_bytes_per_token: of K and V of this layer.
        error: relative error against float64 attention over the values as they are in the cache.
        error_true: the same after `warmattn.unrotate`, against float64 attention over the model's own V.
        elements: of the output and the log-sum-exp.
        differing: elements whose bits differ between warm and cold.
    """

    layer: int
    head_dim: int
    window: int | None
    values: str
    seconds_cold: float
    seconds_warm: float
    chunks: int
    cache_bytes_per_token: float
    error: float
    error_true: float
    elements: int
    differing: int

    @property
    def bits_equal(self) -> bool:
        return self.differing == 0

    @property
    def kind(self) -> str:
        return "causal" if self.window is None else f"window {self.window}"


def demo(text_file: Path | None, out: Path, tokens: int, model: str, save_calls: bool, as_json: bool) -> None:
    """Run the demo, print its tables and save its pictures.

    Raises:
        OSError: the text cannot be read or a picture not be written.
        InvalidInput: the text is empty, or the model not one of `MODELS`.
        Unsupported: Transformers or the model is not installed.
        typer.Exit: with 1, when any bit differs between warm and cold.
    """
    text = load_demo_text() if text_file is None else text_file.read_bytes()
    if not text:
        raise InvalidInput("text_file", expected="at least one byte", got=f"{text_file}, empty", op="demo")
    start = time.perf_counter()
    with stderr().status("loading the model") as spinner:
        loaded = load_text_model(model)
        out.mkdir(parents=True, exist_ok=True)
        some = text[: 64 * tokens]  # of a long file, no more than is needed: tokens are far shorter
        ids = [*loaded.start, *loaded.encode(some)][:tokens]
        layers = _one_of_each_kind(capture(loaded.model, ids))
        rows = []
        for layer in layers:
            true = _oracle(layer, layer.v)
            for form in FORMS:
                spinner.update(f"layer {layer.layer}, head dim {layer.head_dim}, V {form}")
                rows.append(_measure(layer, form, true))
        spinner.update("the model writes")
        written = generations(loaded, ids, FORMS)
    seconds = time.perf_counter() - start

    source = "the demo text" if text_file is None else text_file.name
    title = f"Warm against cold: {len(ids):,} tokens of {source}"
    picture = Group(_table(title, rows), _legend(rows), "", table_of(written), legend_of(written))
    saved = [save_svg(picture, out / "demo.svg")]
    chart = save_chart(rows, title, out / "demo.png")
    saved += [] if chart is None else [chart]
    if save_calls:
        for layer in layers:
            saved.append(out / f"layer-{layer.layer}.safetensors")
            save_capture(saved[-1], layer)
    passed = all(row.bits_equal for row in (*rows, *written))
    if as_json:
        print_json(
            "demo",
            {
                "model": model,
                "text": source,
                "tokens": len(ids),
                "chunks": list(CHUNKS),
                "seconds": seconds,
                "passed": passed,
                "saved": [str(path) for path in saved],
                "rows": [{**asdict(row), "bits_equal": row.bits_equal} for row in rows],
                "generations": [{**asdict(row), "bits_equal": row.bits_equal} for row in written],
            },
        )
    else:
        screen = console()
        screen.print(picture)
        if chart is None:
            screen.print('No chart: it needs matplotlib, pip install "warmattn\\[plot]".')
        screen.print(f"Saved {', '.join(map(str, saved))} in {duration(seconds)}.", soft_wrap=True)
    if not passed:
        raise typer.Exit(ExitCode.FELL_SHORT)


def _one_of_each_kind(layers: list[CapturedLayer]) -> list[CapturedLayer]:
    """The first layer of each head dim and visibility."""
    kinds: dict[tuple[int, int | None], CapturedLayer] = {}
    for layer in layers:
        kinds.setdefault((layer.head_dim, layer.window), layer)
    return list(kinds.values())


class _Cache:
    """A preallocated cache of one layer: rows that have not been written are poison.

    Attributes:
        k: float16 ``[1, Hk, C, D]``.
        v: values of the form, with the same rows.
        length: rows written.
    """

    def __init__(self, layer: CapturedLayer, form: str) -> None:
        B, Hk, S, D = layer.k.shape
        capacity = S + SPARE
        self.k = torch.full((B, Hk, capacity, D), torch.nan, dtype=layer.k.dtype)
        self.v = make_values(torch.empty(B, Hk, 0, D), capacity, form)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        rows = slice(self.length, self.length + k.shape[2])
        self.k[:, :, rows] = k
        if isinstance(self.v, CodedValues):
            codes, norms = self.v.codes[:, :, rows], self.v.norms[:, :, rows]
            room = CodedValues(codes, norms, self.v.codebook, self.v.sf, self.v.signs)
            warmattn.encode_values(v, codebook=self.v.codebook, out=room)
        else:
            self.v[:, :, rows] = v
        self.length = rows.stop

    @property
    def bytes_per_token(self) -> float:
        tensors = (self.v.codes, self.v.norms) if isinstance(self.v, CodedValues) else (self.v,)
        return sum(tensor.nbytes for tensor in (self.k, *tensors)) / self.k.shape[2]


def _measure(layer: CapturedLayer, form: str, true: Tensor) -> Row:
    """``true`` is the layer's output by the oracle."""
    S = layer.q.shape[2]
    _extend(_Cache(layer, form), layer, slice(0, 1))  # what only a first call pays: imports, the codebook
    start = time.perf_counter()
    cold_cache = _Cache(layer, form)
    cold = _extend(cold_cache, layer, slice(0, S))
    seconds_cold = time.perf_counter() - start

    start = time.perf_counter()
    cache = _Cache(layer, form)
    parts = [_extend(cache, layer, rows) for rows in _chunks(S)]
    seconds_warm = time.perf_counter() - start

    warm = [torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True)]
    out = cold[0]
    plain = warmattn.unrotate(out) if isinstance(cache.v, CodedValues) else out
    return Row(
        layer=layer.layer,
        head_dim=layer.head_dim,
        window=layer.window,
        values=form,
        seconds_cold=seconds_cold,
        seconds_warm=seconds_warm,
        chunks=len(parts),
        cache_bytes_per_token=cache.bytes_per_token,
        error=relative_error(out, _oracle(layer, cold_cache.v)),
        error_true=relative_error(plain, true),
        elements=sum(tensor.numel() for tensor in cold),
        differing=sum(
            int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in zip(warm, cold, strict=True)
        ),
    )


def _extend(cache: _Cache, layer: CapturedLayer, rows: slice) -> tuple[Tensor, Tensor]:
    """Write the rows into the cache, then attend from them over all it holds, as a server does."""
    cache.append(layer.k[:, :, rows], layer.v[:, :, rows])
    return warmattn.attention(
        layer.q[:, :, rows],
        cache.k,
        cache.v,
        visible=_visible_from(layer, rows.start),
        kv_len=cache.length,
        scale=layer.scale,
        return_lse=True,
    )


def _visible_from(layer: CapturedLayer, q_offset: int) -> warmattn.Causal | warmattn.Window:
    if layer.window is None:
        return warmattn.Causal(q_offset)
    return warmattn.Window(layer.window, q_offset)


def _oracle(layer: CapturedLayer, v: Tensor | CodedValues) -> Tensor:
    """Attention over the first S rows of ``v`` in float64."""
    out, _ = reference.attention(layer.q, layer.k, v, visible=layer.visible, scale=layer.scale)
    return out


def _chunks(rows: int) -> Iterator[slice]:
    """Slices of the sizes `CHUNKS`, over and over, up to ``rows``."""
    start = 0
    for size in cycle(CHUNKS):
        if start >= rows:
            return
        yield slice(start, min(start + size, rows))
        start += size


def _table(title: str, rows: list[Row]) -> Table:
    grid = table(title)
    grid.add_column("layer")
    grid.add_column("V")
    for heading in ("cold", "warm", "B/token", "error", "true V"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("equal", justify="center")
    for index, row in enumerate(rows):
        place = [r.layer for r in rows[:index]].count(row.layer)
        if place == 0 and index > 0:
            grid.add_section()
        grid.add_row(
            (f"{row.layer}: D {row.head_dim}", row.kind, "")[min(place, 2)],
            row.values,
            duration(row.seconds_cold),
            duration(row.seconds_warm),
            f"{row.cache_bytes_per_token:,.0f}",
            f"{row.error:.1e}",
            f"{row.error_true:.1e}",
            _yes_or_no(row.bits_equal),
        )
    return grid


def _yes_or_no(good: bool) -> Text:
    return Text("yes", style="bold green") if good else Text("no", style="bold red")


def _legend(rows: list[Row]) -> Table:
    differing, elements = sum(row.differing for row in rows), sum(row.elements for row in rows)
    sizes = ", ".join(map(str, CHUNKS))
    return facts(
        {
            "cold, warm": "time of cache writes and attention: in one call, and in "
            f"{rows[0].chunks} chunks of {sizes} rows in turn",
            "B/token": "bytes of the layer's K and V in the cache; a code takes one at any bit rate",
            "error": "of the output, relative, against float64 over V as it is cached",
            "true V": "the same over the model's own V, with coded V rotated back",
            "equal": f"{differing:,} of {elements:,} elements differ in any bit between cold and warm",
        }
    )
