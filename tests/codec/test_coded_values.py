"""CodedValues and the checks that make one well formed."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from warmattn.codec.codebook import Codebook
from warmattn.codec.values import CodedValues, check_coded, check_sf
from warmattn.errors import InvalidInput, Unsupported

BOOK = Codebook.lloyd_max(6)


def coded(shape: tuple[int, ...] = (2, 3, 5, 256), norms: tuple[int, ...] = (2, 3, 5, 1)) -> CodedValues:
    return CodedValues(torch.zeros(shape, dtype=torch.uint8), torch.ones(norms), BOOK)


def test_attributes() -> None:
    signs = torch.ones(256)
    value = coded()
    full = CodedValues(value.codes, value.norms, BOOK, 0.5, signs, nonfinite_rows=3)
    assert (full.codes, full.norms, full.codebook, full.signs) == (value.codes, value.norms, BOOK, signs)
    assert (full.sf, full.bits, full.head_dim, full.nonfinite_rows) == (0.5, 6, 256, 3)
    assert (value.sf, value.signs, value.nonfinite_rows) == (1.0, None, 0)
    assert torch.equal(copy.deepcopy(full).norms, full.norms)


def test_norms_with_and_without_their_axis() -> None:
    assert coded(norms=(2, 3, 5, 1)).block_norms.shape == (2, 3, 5, 1)
    short = coded(norms=(2, 3, 5))
    assert short.block_norms.shape == (2, 3, 5, 1)
    assert short.block_norms.data_ptr() == short.norms.data_ptr()


@pytest.mark.parametrize(
    ("codes", "norms"),
    [
        ((2, 3, 5, 64), (2, 3, 5)),
        ((2, 3, 5, 128), (2, 3, 5, 1)),
        ((2, 3, 5, 512), (2, 3, 5, 2)),
        ((2, 3, 5, 256), (2, 3, 9, 1)),  # more rows of norms than of codes: the caller's to judge
        ((256,), ()),
        ((512,), (2,)),
    ],
)
def test_well_formed(codes: tuple[int, ...], norms: tuple[int, ...]) -> None:
    check_coded(coded(codes, norms), "v", op="attention")


@pytest.mark.parametrize(
    ("codes", "norms"),
    [
        ((2, 3, 5, 256), (2, 3, 5, 2)),
        ((2, 3, 5, 256), (2, 3)),
        ((2, 3, 5, 256), (2, 3, 5, 1, 1)),
        ((2, 3, 5, 512), (2, 3, 5, 1)),
        ((2, 3, 5, 512), (2, 3, 5)),
        ((256,), (2,)),
    ],
)
def test_norms_of_a_wrong_shape(codes: tuple[int, ...], norms: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"^attention: v.norms: expected shape") as error:
        check_coded(coded(codes, norms), "v", op="attention")
    assert error.value.got == list(norms)


def test_wrong_dtypes_and_ranks() -> None:
    value = coded()
    with pytest.raises(InvalidInput, match=r"v.codes: expected uint8, got torch.int8"):
        check_coded(CodedValues(value.codes.to(torch.int8), value.norms, BOOK), "v", op="attention")
    with pytest.raises(InvalidInput, match=r"v.norms: expected float32, got torch.float16"):
        check_coded(CodedValues(value.codes, value.norms.half(), BOOK), "v", op="attention")
    with pytest.raises(InvalidInput, match=r"v.codes: expected shape \[..., D\]"):
        check_coded(CodedValues(value.codes[0, 0, 0, 0], value.norms, BOOK), "v", op="attention")
    with pytest.raises(Unsupported, match="attention: head dim 96; supported are 64, 128, 256, 512"):
        check_coded(coded((1, 96), (1, 1)), "v", op="attention")


def test_wrong_types() -> None:
    value = coded()
    with pytest.raises(InvalidInput, match="CodedValues: codes: expected a tensor, got ndarray"):
        CodedValues(value.codes.numpy(), value.norms, BOOK)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInput, match="norms: expected a tensor, got NoneType"):
        CodedValues(value.codes, None, BOOK)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInput, match="codebook: expected a Codebook, got Tensor"):
        CodedValues(value.codes, value.norms, BOOK.centroids)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInput, match="signs: expected a tensor, got list"):
        CodedValues(value.codes, value.norms, BOOK, signs=[1.0])  # pyright: ignore[reportArgumentType]


@given(st.floats())
@example(2.0**-150)
@example(math.nextafter(2.0**-150, 1))
@example(float.fromhex("0x1.ffffffp127"))
@example(math.nextafter(float.fromhex("0x1.ffffffp127"), 0))
def test_sf_is_judged_by_its_f32_value(sf: float) -> None:
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(sf)
    if np.isfinite(rounded) and rounded > 0:
        check_sf(sf, "sf", 512, op="attention")
    else:
        with pytest.raises(InvalidInput, match="attention: sf: expected a number finite and > 0 in F32"):
            check_sf(sf, "sf", 512, op="attention")
    check_sf(sf, "sf", 256, op="attention")


def test_sf_must_be_a_number() -> None:
    with pytest.raises(InvalidInput, match=r"attention: v.sf: .* got 1"):
        check_coded(
            CodedValues(torch.zeros(1, 512, dtype=torch.uint8), torch.ones(1, 2), BOOK, sf="1"),  # pyright: ignore[reportArgumentType]
            "v",
            op="attention",
        )


def test_one_can_be_built_inside_torch_compile() -> None:
    def weight(codes: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        value = CodedValues(codes, norms, BOOK, 2.0)
        return value.codebook.on(codes.device)[value.codes.int()] * value.block_norms * value.sf * value.bits

    value = coded(norms=(2, 3, 5))
    torch._dynamo.reset()
    compiled = torch.compile(weight, backend="eager", fullgraph=True)
    assert torch.equal(compiled(value.codes, value.norms), weight(value.codes, value.norms))
