"""Nothing outside an operand is touched, nor a row from T on: the page behind them allows no access."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from warmattn import Causal, CodedValues, External, Window, attention, tile_map
from warmattn.testing import VALUE_FORMS, assert_same_bits, make_inputs
from warmattn.visibility import Visibility

NO_ACCESS = 0
"""PROT_NONE of mprotect(2)."""


def guarded(tensor: Tensor, more_rows: int = 0) -> Tensor:
    """A copy that ends where a page without access begins. ``more_rows`` on axis 2 lie in that page."""
    size, page = tensor.nbytes, mmap.PAGESIZE
    pages = -(-size // page)
    region = mmap.mmap(-1, (pages + 1) * page)
    shape = list(tensor.shape)
    if more_rows:
        shape[2] += more_rows
    flat = torch.frombuffer(
        region, dtype=tensor.dtype, count=torch.Size(shape).numel(), offset=pages * page - size
    )
    flat[: tensor.numel()] = tensor.flatten()
    guard = ctypes.addressof(ctypes.c_char.from_buffer(region)) + pages * page
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), NO_ACCESS) == 0
    return flat.view(shape)


def guarded_values(v: Tensor | CodedValues, T: int) -> Tensor | CodedValues:
    """V's first T rows, one more in the page without access."""
    if isinstance(v, Tensor):
        return guarded(v[:, :, :T], more_rows=1)
    codes, norms = guarded(v.codes[:, :, :T], more_rows=1), guarded(v.norms[:, :, :T], more_rows=1)
    return CodedValues(codes, norms, v.codebook)


def attend_next_to_guards(D: int) -> None:
    """Every form and kind of visibility at odd sizes; a touch of a guard ends the process."""
    for T, S, values in itertools.product((1, 17, 129, 300), (1, 5, 33), VALUE_FORMS):
        S = min(S, T)
        inputs = make_inputs(T, S=S, T=T, D=D, H=3, Hk=1, values=values)
        q, k, v = guarded(inputs.q), guarded(inputs.k[:, :, :T], more_rows=1), guarded_values(inputs.v, T)
        mask = torch.rand(S, T, generator=torch.Generator().manual_seed(T)) < 0.5
        additive = torch.zeros(S, T).masked_fill(~mask, -torch.inf).half()
        kinds: list[tuple[Visibility, Visibility]] = [
            (Causal(T - S), Causal(T - S)),
            (Window(40, T - S), Window(40, T - S)),
            (External(mask), External(guarded(mask))),
            (External(additive), External(guarded(additive), guarded(tile_map(additive)))),
        ]
        for visible, visible_next_to_guards in kinds:
            out = guarded(torch.full(q.shape, torch.nan))
            attention(q, k, v, visible=visible_next_to_guards, kv_len=T, out=out)
            assert_same_bits(out, attention(inputs.q, inputs.k, inputs.v, visible=visible, kv_len=T))


@pytest.mark.parametrize("D", [64, 128, 256, 512])
def test_no_access_behind_an_operand_or_behind_its_last_key(D: int) -> None:
    """In a process of its own, which a wrong access kills."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(attend_next_to_guards, D).result()
