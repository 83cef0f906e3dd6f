"""What a call allocates beyond its operands: some tiles, whatever S and T are."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from warmattn import Causal, Codebook, CodedValues, Window, attention
from warmattn.visibility import Visibility

MIB = 2**20
D = 512
LIMIT = 256 * MIB
"""The promise for S = 4096 over T = 131,072."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Of this process alone: getrusage's figure begins with the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def values_of(form: str, T: int) -> torch.Tensor | CodedValues:
    """V, every page of it written."""
    if form == "codes":
        return CodedValues(
            torch.full((1, 1, T, D), 200, dtype=torch.uint8), torch.ones(1, 1, T, 2), Codebook.lloyd_max(8)
        )
    return torch.full((1, 1, T, D), 0.5, dtype=torch.float16 if form == "f16" else torch.float32)


def extra_bytes(S: int, T: int, window: int | None, form: str) -> int:
    """Peak of resident memory during a call, less what was resident before; in a process of its own.

    An earlier peak, if one was higher, can only make the answer larger.
    """
    q = torch.full((1, 1, S, D), 0.01, dtype=torch.float16)
    k = torch.full((1, 1, T, D), 0.01, dtype=torch.float16)
    v = values_of(form, T)
    out = torch.zeros(1, 1, S, D)
    visible: Visibility = Causal(T - S) if window is None else Window(window, T - S)
    attention(q[:, :, :1], k, v, visible=Window(1, 0), out=out[:, :, :1])  # loads code, starts threads
    before = resident_bytes()
    attention(q, k, v, visible=visible, out=out, return_lse=True)
    return peak_resident_bytes() - before


def measured(*arguments: object) -> int:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(extra_bytes, *arguments).result()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("form", ["f32", "codes"])
def test_every_row_and_every_key_of_the_promise(form: str) -> None:
    """S = 4096 and T = 131,072 as promised, each row over a window, so that it takes seconds.

    Fails for anything of size S · T (2 GiB in float32), and for a widened or decoded head (256 MiB).
    """
    assert measured(4096, 131_072, 200, form) < LIMIT // 4


@pytest.mark.parametrize("form", ["f32", "f16", "codes"])
def test_rows_that_see_every_key(form: str) -> None:
    """A few rows over a long cache: fails for scores of size S · T, even in half precision (16 MiB)."""
    assert measured(128, 65_536, None, form) < 16 * MIB


def test_rows_times_keys() -> None:
    """A cold prefill of 4096 rows: fails for anything of size S · T, even in half precision (32 MiB)."""
    assert measured(4096, 4096, None, "f32") < 24 * MIB
