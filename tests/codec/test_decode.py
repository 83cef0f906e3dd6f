"""decode_values and unrotate: the bits, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import slow_codec
import torch
from torch import Tensor

from warmattn.codec.codebook import Codebook
from warmattn.codec.rotation import default_signs
from warmattn.codec.turboquant import decode_values, encode_values, unrotate
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported

BITS = (5, 6, 8)
HEAD_DIMS = (64, 128, 256, 512)
RELATIVE_RMS = {5: 0.050046, 6: 0.025382, 8: 0.0064176}  # the square roots of the optimal distortions


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_coded(D: int, bits: int, *lead: int, sf: float = 1.0, seed: int = 0) -> CodedValues:
    """Any bytes, also those beyond 2^bits, under norms of any size."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*lead, D), dtype=torch.uint8, generator=generator)
    norms = torch.rand(*lead, max(1, D // 256), generator=generator) * 50
    return CodedValues(codes, norms, Codebook.lloyd_max(bits), sf)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_bits_are_those_of_the_sequence(D: int, bits: int, device: torch.device, seed: int) -> None:
    coded = random_coded(D, bits, 5, sf=0.7, seed=seed)
    coded.norms[0] = 0
    coded.norms[1] = 1e-42  # subnormal
    coded.norms[2] = 3e38
    centroids = coded.codebook.centroids.numpy()
    there = CodedValues(coded.codes.to(device), coded.norms.to(device), coded.codebook, coded.sf)
    values = decode_values(there).cpu()
    assert values.dtype == torch.float32
    for codes, norms, decoded in zip(coded.codes.numpy(), coded.norms.numpy(), values.numpy(), strict=True):
        with np.errstate(over="ignore"):
            expected = slow_codec.decode_row(codes, norms, centroids, 0.7)
        assert np.array_equal(decoded.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("bits", [5, 6])
def test_only_the_low_bits_count(bits: int, seed: int) -> None:
    coded = random_coded(256, bits, 7, seed=seed)
    low = CodedValues(coded.codes & (2**bits - 1), coded.norms, coded.codebook)
    assert not torch.equal(low.codes, coded.codes)
    assert torch.equal(decode_values(low), decode_values(coded))


@pytest.mark.parametrize("D", [256, 512])
def test_strides_do_not_matter(D: int, seed: int) -> None:
    coded = random_coded(D, 8, 2, 3, 40, seed=seed)
    expected = decode_values(coded)
    codes = torch.zeros(2, 41, 3, D + 64, dtype=torch.uint8).transpose(1, 2)[:, :, 1:, :D]
    codes.copy_(coded.codes)
    norms = torch.zeros(coded.norms.shape[-1], 40, 3, 2).permute(3, 2, 1, 0)
    norms.copy_(coded.norms)
    assert not codes.is_contiguous()
    assert torch.equal(decode_values(CodedValues(codes, norms, coded.codebook)), expected)
    if D == 256:
        assert torch.equal(decode_values(CodedValues(codes, norms[..., 0], coded.codebook)), expected)


@pytest.mark.parametrize("D", [256, 512])
def test_twice_the_norms_is_twice_the_values(D: int, seed: int) -> None:
    coded = random_coded(D, 8, 9, seed=seed)
    doubled = CodedValues(coded.codes, coded.norms * 2, coded.codebook)
    assert torch.equal(decode_values(doubled), decode_values(coded) * 2)


def test_no_rows() -> None:
    assert decode_values(random_coded(256, 8, 2, 0)).shape == (2, 0, 256)
    assert unrotate(torch.zeros(2, 0, 256)).shape == (2, 0, 256)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_a_round_trip_keeps_the_row(D: int, bits: int, scale: float, seed: int) -> None:
    signs = default_signs(D).roll(3)
    x = randn(512, D, seed=seed) * scale
    coded = encode_values(x, bits=bits, signs=signs)
    back = unrotate(decode_values(coded), signs=coded.signs)
    error = ((back - x).norm() / x.norm()).item()
    assert 0.95 < error / RELATIVE_RMS[bits] < 1.05


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_unrotate_has_the_bits_of_the_sequence(D: int, device: torch.device, seed: int) -> None:
    o, signs = randn(3, D, seed=seed), default_signs(D)
    expected = np.array([slow_codec.unrotate(row, signs.numpy()) for row in o.numpy()])
    assert np.array_equal(unrotate(o.to(device)).cpu().numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_unrotate_inverts_the_rotation(D: int, seed: int) -> None:
    x, signs = randn(20, D, seed=seed), default_signs(D)
    rotated = torch.tensor(np.array([slow_codec.rotate(row, signs.numpy()) for row in x.numpy()]))
    assert (unrotate(rotated) - x).abs().max() < 2e-6
    assert torch.equal(unrotate(rotated, signs=-signs), -unrotate(rotated))


def test_unrotate_takes_any_strides_and_leaves_its_input() -> None:
    stored = randn(256, 5, 2, 3)
    o, before = stored.permute(3, 2, 1, 0), stored.clone()
    assert torch.equal(unrotate(o), unrotate(o.contiguous()))
    assert torch.equal(stored, before)


def refused(match: str, function: Any, *args: Any, **keywords: Any) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=f"^{function.__name__}: {match}"):
        function(*args, **keywords)


def test_decode_refuses() -> None:
    coded = random_coded(512, 8, 4)
    codes, norms, book = coded.codes, coded.norms, coded.codebook
    refused("coded: expected CodedValues, got Tensor", decode_values, codes)
    refused("coded.codes: expected uint8", decode_values, CodedValues(codes.int(), norms, book))
    refused("coded.norms: expected float32", decode_values, CodedValues(codes, norms.double(), book))
    refused(r"coded.norms: expected shape \[..., 2\]", decode_values, CodedValues(codes, norms[:, :1], book))
    refused(r"coded.norms: expected rows \[4\] as codes", decode_values, CodedValues(codes, norms[:3], book))
    refused("coded.norms: expected device cpu", decode_values, CodedValues(codes, norms.to("meta"), book))
    refused("coded.sf: expected .* got -1.0", decode_values, CodedValues(codes, norms, book, -1.0))
    refused("head dim 32", decode_values, CodedValues(codes[:, :32], norms, book))
    strided = CodedValues(codes.repeat(1, 2)[:, ::2], norms, book)
    refused("coded.codes: expected a contiguous last axis", decode_values, strided)
    refused("norms requires grad", decode_values, CodedValues(codes, norms.clone().requires_grad_(), book))


def test_unrotate_refuses() -> None:
    o, signs = randn(3, 256), default_signs(256)
    refused("o: expected a tensor, got float", unrotate, 1.0)
    refused("o: expected float32, got torch.float16", unrotate, o.half())
    refused("head dim 3;", unrotate, o[:, :3])
    refused("o requires grad: forward only", unrotate, o.clone().requires_grad_())
    refused(r"signs: expected shape \[256\]", unrotate, o, signs=default_signs(128))
    refused("signs: expected only 1 and -1, got -?2.0", unrotate, o, signs=signs * 2)
    refused("signs: expected float32", unrotate, o, signs=signs.double())
    with torch.no_grad():
        assert torch.equal(unrotate(o.clone().requires_grad_()), unrotate(o))


@pytest.mark.parametrize("function", [decode_values, unrotate])
def test_torch_compile_traces_it(function: Any) -> None:
    coded = random_coded(256, 6, 2, 3)
    argument = coded if function is decode_values else randn(2, 256)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert torch.equal(compiled(argument), function(argument))
