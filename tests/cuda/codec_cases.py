"""The codec's kernels against its torch operations, bit for bit, through the public functions.

Not collected by itself: `test_codec.py` runs it on Triton's interpreter with CPU tensors, and on a GPU. The
bits of the torch operations are held to the format by `tests/codec`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from warmattn import Codebook, CodedValues, InvalidInput, decode_values, encode_values, unrotate
from warmattn.codec import kernels
from warmattn.codec.rotation import default_signs, fwht

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")
KERNELS = "warmattn.backend.cuda.codec"

HEAD_DIMS = (64, 128, 256, 512)
BITS = (5, 6, 8)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def _numpy_is_quiet() -> Iterator[None]:
    """The interpreter computes in NumPy, which warns of the infinities and NaN that these rows are about."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Run a function with the kernels, then with torch operations; both on `DEVICE`."""

    def run(function: Callable, *arguments: object, **keywords: object) -> tuple:
        results = []
        for homes in ({DEVICE.type: KERNELS}, {}):
            monkeypatch.setattr(kernels, "HOMES", homes)
            results.append(function(*arguments, **keywords))
        return tuple(results)

    monkeypatch.setattr(kernels, "HOMES", {DEVICE.type: KERNELS})
    assert kernels.row_kernels(DEVICE) is importlib.import_module(KERNELS)
    return run


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same(results: tuple[CodedValues, CodedValues]) -> CodedValues:
    ours, theirs = results
    assert torch.equal(ours.codes, theirs.codes)
    assert same(ours.norms, theirs.norms)
    assert ours.nonfinite_rows == theirs.nonfinite_rows
    return theirs


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_rows_of_every_size(D: int, bits: int, both: Callable, seed: int) -> None:
    """Of every magnitude, down to squares that vanish; a zero row; rows that are not finite."""
    dtype = DTYPES[(BITS.index(bits) + HEAD_DIMS.index(D)) % 3]
    sizes = torch.tensor([1.0, 1e-3, 37.0, 900.0, 1e-15, 1e-19, 1e-20, 3e-22, 0.0, 1.0, 1.0, 1.0, 1.0])
    x = (randn(13, D, seed=seed) * sizes[:, None].to(DEVICE)).to(dtype)
    x[9, 7], x[10, D - 1], x[11, 0] = torch.nan, torch.inf, -torch.inf
    x[12, 5] = 6e4 if dtype == torch.float16 else 1e20  # finite, but its square is not
    signs = default_signs(D, DEVICE).roll(1)
    coded = assert_same(both(encode_values, x, bits=bits, signs=signs, sf=0.7, nonfinite="zero"))
    assert coded.nonfinite_rows == (3 if dtype == torch.float16 else 4)

    # Any byte is a code; norms from subnormal to the largest, where products overflow.
    norms = coded.norms.clone()
    norms[:3] = torch.tensor([1e-42, 3e38, torch.inf])[:, None]
    spoiled = replace(coded, codes=coded.codes ^ 0xE0, norms=norms)
    assert same(*both(decode_values, spoiled))
    assert same(*both(unrotate, randn(13, D, seed=seed) * sizes[:, None].to(DEVICE), signs=signs))


def book_around(values: Tensor, bits: int) -> Codebook:
    """Clusters of two centroids, 2^-10 apart, with boundaries at exactly as many of the values as fit."""
    table: list[float] = []
    for value in values.flatten().unique().tolist():
        pair = [value - 2**-11, value + 2**-11]
        exact = all(np.float32(centroid) == centroid for centroid in pair)
        if exact and len(table) < 2**bits and (not table or table[-1] < pair[0]):
            table += pair
    return Codebook(table + [table[-1] + 1 + i for i in range(2**bits - len(table))])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", [128, 512])
def test_codes_hang_on_the_last_bit_of_u(D: int, bits: int, both: Callable, seed: int) -> None:
    """Boundaries on u, and one unit below it: a u that is off by a unit, either way, changes its code."""
    x = randn(3, D, seed=seed)
    (coded, _), n = both(encode_values, x, sf=0.7), max(1, D // 256)
    y = fwht(x * default_signs(D, DEVICE)) * torch.tensor(D**-0.5, device=DEVICE)
    factor = torch.tensor(0.7 if D == 512 else D**0.5, device=DEVICE)
    u = (y * factor).view(3, n, -1) / coded.norms[..., None]
    for boundaries in (u, u.nextafter(torch.tensor(-torch.inf, device=DEVICE))):
        codebook = book_around(boundaries, bits)
        assert torch.isin(boundaries.cpu(), codebook.boundaries).sum() >= min(2**bits // 2, 20)
        assert_same(both(encode_values, x, codebook=codebook, sf=0.7))


@pytest.mark.parametrize(("D", "sf"), [(64, 1.0), (512, 2.0)])
def test_a_value_on_a_boundary_stays_below(D: int, sf: float, both: Callable) -> None:
    """Rows whose every u is exactly ±sf, with boundaries at exactly ±sf."""
    x = torch.zeros(2, D, device=DEVICE)
    x[:, 0] = torch.tensor([float(D), -float(D)])
    codebook = Codebook(torch.arange(-16.0, 16.0) + sf + 0.5)
    coded = assert_same(both(encode_values, x * default_signs(D)[0].item(), codebook=codebook, sf=sf))
    assert coded.codes[:, 0].tolist() == [15, 15 - int(2 * sf)]


def test_blocks_of_a_row(both: Callable) -> None:
    """A zero block beside another; one block that overflows takes its whole row."""
    y = torch.zeros(2, 512, device=DEVICE)
    y[0, :256] = torch.arange(256.0)
    y[1, 0], y[1, 256:] = 1e20, 1e15
    x = fwht(y) * default_signs(512, DEVICE)
    coded = assert_same(both(encode_values, x, nonfinite="zero"))
    assert (coded.norms != 0).tolist() == [[True, False], [False, False]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "rows apart": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "every other element": lambda t: torch.stack((t, t), -1)[..., 0],
    "off by one element": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
    "one row repeated": lambda t: t[:, :1].expand(t.shape),
    "axes reversed": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "four axes": lambda t: torch.stack((t, t)).permute(3, 1, 0, 2, 4),
    "one row": lambda t: t[1, 2, 3],
    "no row": lambda t: t[:, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, both: Callable, seed: int) -> None:
    arrange = LAYOUTS[layout]
    x = arrange(randn(2, 4, 7, 512, seed=seed, dtype=torch.float16))
    coded = assert_same(both(encode_values, x))
    assert same(*both(unrotate, arrange(randn(2, 4, 7, 512, seed=seed))))
    if x.stride(-1) == 1:
        codes = arrange(torch.randint(0, 256, (2, 4, 7, 512), dtype=torch.uint8).to(DEVICE))
        norms = arrange(randn(2, 4, 7, 4, seed=seed)[..., :2])
        assert same(*both(decode_values, replace(coded, codes=codes, norms=norms)))


def test_norms_of_other_strides_than_codes(both: Callable, seed: int) -> None:
    coded = encode_values(randn(3, 4, 5, 256, seed=seed))
    norms = coded.norms[..., 0].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert same(*both(decode_values, replace(coded, norms=norms)))
    assert same(*both(decode_values, replace(coded, norms=norms[:1].expand(3, -1, -1))))


def test_into_a_cache(both: Callable, seed: int) -> None:
    def written(x: Tensor) -> CodedValues:
        codes = torch.full((2, 9, 3, 128), 255, dtype=torch.uint8, device=DEVICE).transpose(1, 2)
        norms = torch.full((2, 3, 9), torch.nan, device=DEVICE)
        rows = slice(4, 4 + x.shape[2])
        encode_values(x, out=CodedValues(codes[:, :, rows], norms[:, :, rows], Codebook.lloyd_max(8)))
        return CodedValues(codes, norms, Codebook.lloyd_max(8))

    coded = assert_same(both(written, randn(2, 3, 4, 128, seed=seed, dtype=torch.bfloat16)))
    assert coded.norms.isnan().sum() == 2 * 3 * 5


def test_refused_rows_leave_out_alone(both: Callable, seed: int) -> None:
    x = randn(3, 5, 256, seed=seed)
    x[1, 2, 3], x[2, 0, 0] = torch.nan, torch.inf
    out = encode_values(torch.ones_like(x))
    before = out.codes.clone(), out.norms.clone()

    def refused() -> str:
        with pytest.raises(InvalidInput) as error:
            encode_values(x, out=out)
        assert torch.equal(out.codes, before[0])
        assert torch.equal(out.norms, before[1])
        return str(error.value)

    ours, theirs = both(refused)
    assert ours == theirs
    assert "2 of 15 rows are not finite" in ours
    assert "first (1, 2)" in ours


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies whole storages, and these take 9 GB")
def test_addresses_past_32_bits(both: Callable, seed: int) -> None:
    far = 2**32 + 4096
    memory = torch.full((far + 512,), 255, dtype=torch.uint8, device=DEVICE)
    codes = memory.as_strided((2, 256), (far, 1))
    codes.copy_(torch.randint(0, 256, (2, 256), dtype=torch.uint8))
    norms = randn(2, 1, seed=seed)
    assert same(*both(decode_values, CodedValues(codes, norms, Codebook.lloyd_max(8))))
    x = memory.view(torch.float16)[: far // 2 + 256].as_strided((2, 256), (far // 2, 1))
    x.copy_(randn(2, 256, seed=seed))
    assert_same(both(encode_values, x))
