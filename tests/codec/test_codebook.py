"""Codebooks: the computed optimum, and tables that come from files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from warmattn.codec.codebook import Codebook
from warmattn.errors import InvalidInput

BITS = (5, 6, 8)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(20)


def integrate(cells: np.ndarray, power: int, about: np.ndarray) -> np.ndarray:
    """∫ (x − about)^power φ(x) dx over each cell, float64 Gauss-Legendre."""
    middle, half = (cells[1:] + cells[:-1]) / 2, (cells[1:] - cells[:-1]) / 2
    x = middle[:, None] + half[:, None] * NODES
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return ((x - about[:, None]) ** power * density * WEIGHTS).sum(1) * half


def cells_of(codebook: Codebook) -> np.ndarray:
    return np.concatenate(([-12.0], codebook.boundaries.numpy().astype(np.float64), [12.0]))


@pytest.mark.parametrize(
    ("bits", "distortion", "outermost"),
    [(5, "2.504668e-03", "3.260732"), (6, "6.442397e-04", "3.744101"), (8, "4.118508e-05", "4.603536")],
)
def test_lloyd_max_is_the_optimum(bits: int, distortion: str, outermost: str) -> None:
    codebook = Codebook.lloyd_max(bits)
    centroids = codebook.centroids.double().numpy()
    assert f"{integrate(cells_of(codebook), 2, centroids).sum():.6e}" == distortion
    assert f"{centroids[-1]:.6f}" == outermost


@pytest.mark.parametrize("bits", BITS)
def test_lloyd_max_meets_both_conditions(bits: int) -> None:
    codebook = Codebook.lloyd_max(bits)
    centroids = codebook.centroids.double().numpy()
    cells, origin = cells_of(codebook), np.zeros(2**bits)
    means = integrate(cells, 1, origin) / integrate(cells, 0, origin)
    assert np.abs(means - centroids).max() < 5e-7  # F32 rounding of centroids and boundaries near 4
    a, b = codebook.centroids[:-1].numpy(), codebook.centroids[1:].numpy()
    assert np.array_equal(codebook.boundaries.numpy(), (a + b) / np.float32(2))


@pytest.mark.parametrize(
    ("bits", "identity"), [(5, "16851bdc66b791c3"), (6, "b75352a8e0edee8f"), (8, "6df0d73ad7970e11")]
)
def test_lloyd_max_is_fixed_to_the_last_bit(bits: int, identity: str) -> None:
    codebook = Codebook.lloyd_max(bits)
    assert codebook.identity == identity
    assert codebook is Codebook.lloyd_max(bits)
    assert codebook.bits == bits
    assert codebook.centroids.dtype == codebook.boundaries.dtype == torch.float32
    assert torch.equal(codebook.centroids, -codebook.centroids.flip(0))
    assert repr(codebook) == f"Codebook(bits={bits}, identity='{identity}')"


@pytest.mark.parametrize("bits", [4, 7, 0, None])
def test_lloyd_max_of_other_bits(bits: int) -> None:
    with pytest.raises(InvalidInput, match=f"^Codebook.lloyd_max: bits: expected 5, 6 or 8, got {bits}$"):
        Codebook.lloyd_max(bits)


def test_a_codebook_owns_its_table() -> None:
    source = torch.arange(32.0)
    codebook = Codebook(source)
    source.zero_()
    assert codebook.centroids.tolist() == list(range(32))
    assert codebook.identity == Codebook(list(range(32))).identity
    assert codebook.identity != Codebook(torch.arange(32.0) + 1).identity


def test_copies_on_a_device_are_kept() -> None:
    codebook = Codebook(torch.arange(64.0))
    assert codebook.on(torch.device("cpu")) is codebook.centroids
    meta = torch.device("meta")
    assert codebook.on(meta).device == meta
    assert codebook.on(meta) is codebook.on(meta)


def test_torchs_defaults_do_not_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            codebook = Codebook([float(i) for i in range(32)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert codebook.centroids.device.type == "cpu"
    assert codebook.centroids.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0,), (31,), (33,), (128,), (32, 1), (1, 32), ()])
def test_a_table_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"centroids: expected shape \[32\], \[64\] or \[256\], got"):
        Codebook(torch.zeros(shape))


@given(
    bits=st.sampled_from(BITS),
    at=st.integers(0, 255),
    bad=st.sampled_from([math.nan, math.inf, -math.inf, 1e39]),
)
def test_a_table_that_is_not_finite(bits: int, at: int, bad: float) -> None:
    table = torch.arange(2**bits, dtype=torch.float64)
    table[at % 2**bits] = bad
    with pytest.raises(InvalidInput, match=r"finite F32 values, got (nan|inf|-inf)"):
        Codebook(table)


@given(bits=st.sampled_from(BITS), at=st.integers(0, 254), step=st.sampled_from([0.0, -1.0, 1e-12]))
def test_a_table_that_does_not_increase(bits: int, at: int, step: float) -> None:
    at %= 2**bits - 1
    table = torch.arange(1, 2**bits + 1, dtype=torch.float64)
    table[at + 1] = table[at] + step  # 1e-12 vanishes in F32
    with pytest.raises(InvalidInput, match=f"strictly increasing F32 values, got .* at {at}$"):
        Codebook(table)


def write_json(path: Path, tables: dict[str, Tensor]) -> Path:
    path.write_text(json.dumps({"codebooks": {key: table.tolist() for key, table in tables.items()}}))
    return path


def test_load_reads_what_save_wrote(tmp_path: Path) -> None:
    path = tmp_path / "book.safetensors"
    codebook = Codebook(torch.randn(64, generator=torch.Generator().manual_seed(0)).sort().values)
    codebook.save(path)
    assert torch.equal(Codebook.load(path).centroids, codebook.centroids)
    assert Codebook.load(str(path), bits=6).identity == codebook.identity
    with pytest.raises(InvalidInput, match=r"Codebook.load: bits: expected the file's 6, got 8"):
        Codebook.load(path, bits=8)


def test_load_reads_json(tmp_path: Path) -> None:
    tables = {"5": torch.arange(32.0), "8": torch.arange(256.0) / 8}
    path = write_json(tmp_path / "tables.json", tables)
    assert torch.equal(Codebook.load(path, bits=8).centroids, tables["8"])
    with pytest.raises(InvalidInput, match=r"bits: expected one of \['5', '8'\], got 6"):
        Codebook.load(path, bits=6)
    with pytest.raises(InvalidInput, match=r"bits: expected one of \['5', '8'\], got None"):
        Codebook.load(path)
    single = write_json(tmp_path / "single.json", {"5": tables["5"]})
    assert Codebook.load(single).bits == 5
    mislabelled = write_json(tmp_path / "mislabelled.json", {"6": tables["5"]})
    with pytest.raises(InvalidInput, match="expected the file's 5, got 6"):
        Codebook.load(mislabelled, bits=6)


def test_load_refuses_files_without_a_table(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"weights": torch.zeros(32)}, other)
    with pytest.raises(InvalidInput, match=r"Codebook.load: path: .*'centroids', got \['weights'\]"):
        Codebook.load(other)
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(InvalidInput, match=r"Codebook.load: path: .*'codebooks'"):
        Codebook.load(other, bits=8)
