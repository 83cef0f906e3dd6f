"""encode_values into a cache that exists already, and every call it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from warmattn.codec.codebook import Codebook
from warmattn.codec.rotation import default_signs
from warmattn.codec.turboquant import decode_values, encode_values
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported

BOOK = Codebook.lloyd_max(8)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def empty_cache(*shape: int) -> CodedValues:
    """Poisoned memory: code 255 and NaN norms."""
    codes = torch.full(shape, 255, dtype=torch.uint8)
    return CodedValues(codes, torch.full((*shape[:-1], max(1, shape[-1] // 256)), torch.nan), BOOK)


def rows_of(cache: CodedValues, start: int, stop: int) -> CodedValues:
    return CodedValues(cache.codes[..., start:stop, :], cache.norms[..., start:stop, :], cache.codebook)


@settings(max_examples=25, deadline=None)
@given(
    D=st.sampled_from([64, 128, 256, 512]),
    heads_outer=st.booleans(),
    start=st.integers(0, 20),
    count=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_only_the_rows_are_written(D: int, heads_outer: bool, start: int, count: int, seed: int) -> None:
    cache = empty_cache(2, 3, 29, D) if heads_outer else empty_cache(2, 29, 3, D)
    if not heads_outer:  # rows of one head lie 3·D apart
        cache = CodedValues(cache.codes.transpose(1, 2), cache.norms.transpose(1, 2), BOOK)
    x = randn(2, 3, count, D, seed=seed).half()
    target = rows_of(cache, start, start + count)
    coded = encode_values(x, out=target)

    fresh = encode_values(x)
    assert coded.codes is target.codes
    assert coded.norms is target.norms
    assert torch.equal(target.codes, fresh.codes)
    assert torch.equal(target.norms, fresh.norms)
    assert coded.signs is default_signs(D)
    untouched = torch.ones(29, dtype=torch.bool)
    untouched[start : start + count] = False
    assert (cache.codes[:, :, untouched] == 255).all()
    assert cache.norms[:, :, untouched].isnan().all()


def test_norms_without_their_axis() -> None:
    x = randn(2, 3, 4, 256)
    out = CodedValues(torch.zeros(x.shape, dtype=torch.uint8), torch.zeros(4, 2, 3).permute(1, 2, 0), BOOK)
    coded = encode_values(x, out=out)
    assert coded.norms is out.norms
    assert torch.equal(out.norms, encode_values(x).norms[..., 0])
    assert torch.equal(decode_values(coded), decode_values(encode_values(x)))


def test_interleaved_memory_is_no_overlap() -> None:
    """x, codes and norms may share one buffer, row after row, as long as no byte is shared."""
    buffer = torch.zeros(6, 256 * 3 + 4, dtype=torch.uint8)
    x = buffer[:, : 256 * 2].view(torch.float16)
    x.copy_(randn(6, 256))
    out = CodedValues(buffer[:, 256 * 2 : 256 * 3], buffer[:, 256 * 3 :].view(torch.float32), BOOK)
    expected = encode_values(x.clone())
    encode_values(x, out=out)
    assert torch.equal(out.codes, expected.codes)
    assert torch.equal(out.norms, expected.norms)


def test_nonfinite_rows_are_counted_in_place() -> None:
    x = randn(4, 512)
    x[2, 0] = torch.inf
    out = empty_cache(4, 512)
    coded = encode_values(x, out=out, nonfinite="zero")
    assert coded.nonfinite_rows == 1
    assert out.norms[2].tolist() == [0.0, 0.0]


def content(out: CodedValues | None) -> list[bytes]:
    tensors = () if out is None else (out.codes, out.norms)
    return [tensor.detach().numpy().tobytes() for tensor in tensors if tensor.device.type == "cpu"]


def refused(match: str, x: Any, out: CodedValues | None = None, **keywords: Any) -> None:
    """The call raises as said, and no byte of out changes."""
    before = content(out)
    with pytest.raises((InvalidInput, Unsupported), match=match) as error:
        encode_values(x, out=out, **keywords)
    assert str(error.value).startswith("encode_values: ")
    assert content(out) == before


def test_refused_x() -> None:
    refused("x: expected a tensor, got list", [1.0])
    refused(r"x: expected shape \[..., D\], got \[\]", torch.tensor(1.0))
    refused("head dim 100; supported are 64, 128, 256, 512", randn(3, 100))
    refused("head dim 0;", randn(3, 0))
    refused("x: expected .*float32, got torch.float64", randn(3, 256).double())
    refused("x requires grad: forward only, use torch.no_grad", randn(3, 256).requires_grad_())
    with torch.no_grad():
        assert encode_values(randn(3, 256).requires_grad_()).codes.shape == (3, 256)


def test_refused_settings() -> None:
    x = randn(3, 512)
    refused("bits: expected 5, 6 or 8, got 7", x, bits=7)
    refused("codebook: expected a Codebook, got Tensor", x, codebook=BOOK.centroids)
    refused("sf: .* got 0.0", x, sf=0.0)
    refused("sf: .* got nan", x, sf=float("nan"))
    refused("sf: .* got 1e-46", x, sf=1e-46)
    refused("sf: .* got inf", x, sf=float("inf"))
    refused("nonfinite: expected 'refuse' or 'zero', got 'skip'", x, nonfinite="skip")


def test_refused_signs() -> None:
    x, signs = randn(3, 256), default_signs(256).clone()
    refused("signs: expected a tensor, got list", x, signs=signs.tolist())
    refused("signs: expected float32, got torch.int8", x, signs=signs.to(torch.int8))
    refused(r"signs: expected shape \[256\], got \[128\]", x, signs=signs[:128])
    refused("signs: expected device cpu, got meta", x, signs=signs.to("meta"))
    refused("signs requires grad", x, signs=signs.clone().requires_grad_())
    for wrong in (0.0, 0.5, float("nan"), float("inf")):
        signs[17] = wrong
        refused(f"signs: expected only 1 and -1, got {wrong}", x, signs=signs)


def test_refused_out() -> None:
    x, out = randn(4, 256), empty_cache(4, 256)
    codes, norms = out.codes, out.norms
    signs = -default_signs(256)
    with pytest.raises(InvalidInput, match="encode_values: out: expected CodedValues, got Tensor"):
        encode_values(x, out=codes)  # pyright: ignore[reportArgumentType]
    refused(r"out.codes: expected x's shape \[3, 256\], got \[4, 256\]", x[:3], out)
    refused("out.codes: expected uint8", x, CodedValues(codes.to(torch.int8), norms, BOOK))
    refused("out.norms: expected float32", x, CodedValues(codes, norms.double(), BOOK))
    refused(r"out.norms: expected rows \[4\]", x, CodedValues(codes, torch.zeros(5, 1), BOOK))
    refused(r"out.norms: expected shape", x, CodedValues(codes, torch.zeros(4, 2), BOOK))
    refused(
        "codes: expected a contiguous last axis", x, CodedValues(codes.new_zeros(256, 4).t(), norms, BOOK)
    )
    refused(
        "out.norms: expected device cpu as codes, got meta", x, CodedValues(codes, norms.to("meta"), BOOK)
    )
    refused("out.codebook: expected .*bits=5.*got .*bits=8", x, out, bits=5)
    refused("out.codebook: expected .*bits=8.*got .*bits=8", x, out, codebook=Codebook(BOOK.centroids * 2))
    refused("out.signs: expected this call's signs", x, out, signs=signs)
    refused("out.signs: expected this call's signs", x, CodedValues(codes, norms, BOOK, signs=signs))
    refused("norms requires grad", x, CodedValues(codes, norms.clone().requires_grad_(), BOOK))
    refused("out.codes: expected one address", x, CodedValues(codes[:1].expand(4, -1), norms, BOOK))
    refused("out.norms: expected one address", x, CodedValues(codes, norms[:1].expand(4, -1), BOOK))


def test_refused_sf_of_out() -> None:
    x, out = randn(4, 512), empty_cache(4, 512)
    refused("out.sf: expected this call's 2.0, got 1.0", x, out, sf=2.0)
    same_in_f32 = CodedValues(out.codes, out.norms, BOOK, 1.0 + 1e-12)
    encode_values(x, out=same_in_f32)


def test_refused_rows_leave_out_alone() -> None:
    x, out = randn(4, 256), empty_cache(4, 256)
    x[3, 5] = torch.nan
    refused(r"1 of 4 rows are not finite, .* first \(3,\)", x, out)


def test_refused_overlap() -> None:
    buffer = torch.zeros(4, 1024, dtype=torch.uint8)
    x = buffer.view(torch.float32)
    apart = empty_cache(4, 256)
    refused("out.codes: expected memory apart from x", x, CodedValues(buffer[:, 256:512], apart.norms, BOOK))
    refused("out.norms: expected memory apart from x", x, CodedValues(apart.codes, x[:, 3:4], BOOK))
    both = torch.zeros(4, 512, dtype=torch.uint8)
    norms = both.view(torch.float32)[:, 60:61]
    refused("out: expected codes and norms apart", randn(4, 256), CodedValues(both[:, :256], norms, BOOK))
