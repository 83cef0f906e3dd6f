"""Signs and the fast Walsh-Hadamard transform."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import slow_codec
import torch
from safetensors.torch import save_file

from warmattn.codec import rotation
from warmattn.codec.rotation import default_signs, fwht, hadamard_matrix, load_signs, save_signs
from warmattn.errors import InvalidInput


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_matrix_is_sylvesters(n: int) -> None:
    expected = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    assert hadamard_matrix(n).tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 64, 128, 256, 512])
def test_transform_is_the_matrix(n: int, seed: int) -> None:
    x = torch.randint(-99, 100, (5, n), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(fwht(x), x @ hadamard_matrix(n))  # integers: exact in any order
    assert torch.equal(fwht(fwht(x)), x * n)


@pytest.mark.parametrize("n", [64, 512])
def test_transform_rounds_in_the_documented_order(n: int, seed: int) -> None:
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(seed))
    expected = [slow_codec.butterfly(list(row)) for row in x.numpy()]
    assert np.array_equal(fwht(x).numpy(), np.array(expected))


def test_transform_leaves_its_input_and_takes_any_strides() -> None:
    wide = torch.randn(256, 9, generator=torch.Generator().manual_seed(0))
    before = wide.clone()
    assert torch.equal(fwht(wide.t()), fwht(wide.t().contiguous()))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("n", [0, 3, 96])
def test_only_powers_of_two(n: int) -> None:
    with pytest.raises(InvalidInput, match="power of two"):
        hadamard_matrix(n)
    with pytest.raises(InvalidInput, match="power of two"):
        fwht(torch.zeros(1, n))


def splitmix64(seed: int) -> Iterator[int]:
    """The published generator, as a stream."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        yield z ^ z >> 31


@pytest.mark.parametrize("D", [64, 128, 256, 512])
def test_default_signs_follow_the_rule(D: int) -> None:
    stream = splitmix64(int.from_bytes(b"warmattn", "big"))
    assert default_signs(D).tolist() == [-1.0 if next(stream) >= 2**63 else 1.0 for _ in range(D)]
    assert default_signs(D).dtype == torch.float32


def test_default_signs_never_change() -> None:
    first = "".join("-" if s < 0 else "+" for s in default_signs(512)[:64])
    assert first == "--++--+----++++++++--++-+-+-++++--+++++++-+-++----+---+-+++++-++"
    assert int((default_signs(512) < 0).sum()) == 238


def test_default_signs_ignore_torchs_defaults() -> None:
    expected = default_signs(128)
    rotation._default_signs.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            made = default_signs(128)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.device.type == "cpu"
    assert made.dtype == torch.float32
    assert torch.equal(made, expected)


def test_signs_from_json(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    packed = [0b00000101, 0b10000000, *[0] * 6]
    path.write_text(json.dumps({"signs": {"64": packed, "128": [255] * 16}}))
    signs = load_signs(path, 64)
    assert (signs < 0).nonzero().flatten().tolist() == [0, 2, 15]
    assert signs.dtype == torch.float32
    assert load_signs(str(path), 128).tolist() == [-1.0] * 128


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({"signs": {"128": [0] * 16}}, r"head_dim: expected one of \['128'\], got 64"),
        ({"signs": {"64": [0] * 7}}, "expected 8 bytes"),
        ({"signs": {"64": [0] * 7 + [256]}}, "expected 8 bytes"),
        ({"signs": {"64": [0] * 7 + [0.5]}}, "expected 8 bytes"),
        ({"codebooks": {}}, "an object 'signs'"),
        ([1], "an object 'signs'"),
    ],
)
def test_bad_json_signs(tmp_path: Path, document: object, complaint: str) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=f"^load_signs: .*{complaint}"):
        load_signs(path, 64)


def test_signs_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "signs.safetensors"
    save_signs(-default_signs(256), path)
    assert torch.equal(load_signs(path, 256), -default_signs(256))
    with pytest.raises(InvalidInput, match=r"expected shape \[512\], got \[256\]"):
        load_signs(path, 512)


def test_bad_safetensors_signs(tmp_path: Path) -> None:
    path = tmp_path / "signs.safetensors"
    save_file({"signs": torch.full((64,), 0.5)}, path)
    with pytest.raises(InvalidInput, match=r"only 1 and -1, got 0.5"):
        load_signs(path, 64)
    save_file({"other": torch.ones(64)}, path)
    with pytest.raises(InvalidInput, match=r"tensor 'signs', got \['other'\]"):
        load_signs(path, 64)
    with pytest.raises(InvalidInput, match="save_signs: signs: expected only 1 and -1"):
        save_signs(torch.zeros(64), path)
