"""The compiled codec has the bits of the torch operations, on every instruction set and for any strides."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from warmattn import decode_values, encode_values, unrotate
from warmattn.backend.cpu import native
from warmattn.backend.cpu.native import Isa
from warmattn.codec import kernels

SEED = 31
HEAD_DIMS = (64, 128, 256, 512)


@pytest.fixture
def both(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Call a function with the kernels of ``isa``, then with torch operations."""
    monkeypatch.setattr(native, "selected_isa", lambda: isa)
    kernels._load.cache_clear()
    homes = dict(kernels.HOMES)

    def run(function: Callable, *arguments: object, **keywords: object) -> list:
        results = []
        for served in (homes, {}):
            monkeypatch.setattr(kernels, "HOMES", served)
            results.append(function(*arguments, **keywords))
        return results

    return run


def rows(D: int, dtype: torch.dtype) -> Tensor:
    """``[2, 3, 9, D]``: normal rows, zero rows and blocks, tiny, huge, NaN, inf, norms that overflow."""
    x = torch.randn(2, 3, 9, D, generator=torch.Generator().manual_seed(SEED))
    flat = x.view(-1, D)
    flat[0] = 0
    flat[1, : D // 2] = 0
    flat[2] *= 1e-6
    flat[3] *= 1e4
    flat[4, 7] = math.nan
    flat[5, 3] = -math.inf
    x = x.to(dtype)
    if dtype != torch.float16:
        x.view(-1, D)[6] *= 1e30
        x.view(-1, D)[7] *= 1e-40
    return x


def views(x: Tensor) -> list[Tensor]:
    """The tensor, its axes exchanged, and every other value of wider rows."""
    return [x, x.transpose(0, 2), x.repeat_interleave(2, dim=-1)[..., ::2]]


def assert_same(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), f"seed {SEED}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_encode_and_decode(both: Callable, D: int, dtype: torch.dtype) -> None:
    for bits in (5, 6, 8):
        for x in views(rows(D, dtype)):
            compiled, expected = both(encode_values, x, bits=bits, sf=1.3, nonfinite="zero")
            assert_same(compiled.codes, expected.codes)
            assert_same(compiled.norms, expected.norms)
            assert compiled.nonfinite_rows == expected.nonfinite_rows > 0
            assert_same(*both(decode_values, expected))


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_unrotate(both: Callable, D: int) -> None:
    o = rows(D, torch.float32)
    o[~o.isfinite()] = 0
    signs = torch.tensor([1.0, 9.0, -1.0, 9.0]).repeat(D // 2)[::2]
    for view in views(o):
        assert_same(*both(unrotate, view))
        assert_same(*both(unrotate, view, signs=signs))


def test_decode_reads_rows_and_norms_where_they_lie(both: Callable) -> None:
    coded = encode_values(rows(512, torch.float16), nonfinite="zero")
    norms = coded.norms.repeat_interleave(3, dim=-1)[..., ::3]
    scattered = type(coded)(coded.codes.transpose(0, 1), norms.transpose(0, 1), coded.codebook, coded.sf)
    assert_same(*both(decode_values, scattered))


def test_a_single_row_and_many_threads(both: Callable) -> None:
    threads = torch.get_num_threads()
    many = torch.randn(600, 256, generator=torch.Generator().manual_seed(SEED))
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for x in (many[0], many):
                compiled, expected = both(encode_values, x)
                assert_same(compiled.codes, expected.codes)
                assert_same(compiled.norms, expected.norms)
    finally:
        torch.set_num_threads(threads)
