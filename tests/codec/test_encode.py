"""encode_values: the bits, the boundary rule, scaling, and rows that have no norm."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import slow_codec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from warmattn.codec import turboquant
from warmattn.codec.codebook import Codebook
from warmattn.codec.rotation import default_signs, fwht
from warmattn.codec.turboquant import decode_values, encode_values
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput

BITS = (5, 6, 8)
HEAD_DIMS = (64, 128, 256, 512)
OPTIMUM = {5: 2.504668e-3, 6: 6.442397e-4, 8: 4.118508e-5}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(a: CodedValues, b: CodedValues) -> None:
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.norms.view(torch.int32), b.norms.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_bits_are_those_of_the_sequence(
    D: int, bits: int, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    codebook, signs = Codebook.lloyd_max(bits), default_signs(D).roll(1)
    x = (randn(4, D, seed=seed) * torch.tensor([[1e-3], [1.0], [37.0], [900.0]])).to(dtype)
    coded = encode_values(x.to(device), bits=bits, signs=signs.to(device), sf=0.7)
    for row, codes, norms in zip(x.float().numpy(), coded.codes.cpu(), coded.norms.cpu(), strict=True):
        slow = slow_codec.encode_row(row, signs.numpy(), codebook.centroids.numpy(), 0.7)
        assert np.array_equal(codes.numpy(), slow[0])
        assert np.array_equal(norms.numpy(), slow[1])
    assert coded.codes.dtype == torch.uint8
    assert (coded.codebook, coded.sf, coded.nonfinite_rows) == (codebook, 0.7, 0)
    assert coded.signs is not None
    assert torch.equal(coded.signs.cpu(), signs)


def test_tiny_rows_keep_the_sequence(device: torch.device, seed: int) -> None:
    """Squares that fall among the subnormals, or below them, still follow it."""
    x = randn(6, 512, seed=seed) * torch.tensor([1e-15, 1e-19, 1e-20, 3e-22, 1e-23, 1e-30])[:, None]
    coded = encode_values(x.to(device))
    for row, codes, norms in zip(x.numpy(), coded.codes.cpu(), coded.norms.cpu(), strict=True):
        slow = slow_codec.encode_row(row, default_signs(512).numpy(), coded.codebook.centroids.numpy(), 1.0)
        assert np.array_equal(codes.numpy(), slow[0])
        assert np.array_equal(norms.numpy(), slow[1])
    assert (coded.norms[-1] == 0).all()


def book_around(values: np.ndarray) -> Codebook:
    """256 centroids with boundaries at exactly as many of the values as fit, apart from each other."""
    step = np.float32(2**-11)
    table: list[np.float32] = []
    for value in np.sort(values):
        pair = value - step, value + step
        if len(table) < 254 and (not table or table[-1] < pair[0]) and (pair[0] + pair[1]) / 2 == value:
            table += pair
    table += list(table[-1] + np.arange(1, 257 - len(table), dtype=np.float32))
    return Codebook(torch.tensor(np.array(table)))


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_codes_hang_on_the_last_bit_of_u(D: int, seed: int, device: torch.device) -> None:
    """Boundaries on u, and one unit below it: a u that is off by a unit, either way, changes its code."""
    x, signs = randn(1, D, seed=seed), default_signs(D).numpy()
    _, u = slow_codec.normalise(x[0].numpy(), signs, 0.7)
    codes = []
    for values in (u, np.nextafter(u, np.float32(-np.inf))):
        codebook = book_around(values)
        assert np.isin(values, codebook.boundaries.numpy()).sum() > 20
        slow, _ = slow_codec.encode_row(x[0].numpy(), signs, codebook.centroids.numpy(), 0.7)
        codes.append(slow)
        assert encode_values(x.to(device), codebook=codebook, sf=0.7).codes[0].tolist() == slow.tolist()
    assert (codes[0] != codes[1]).any()


def test_roots_are_correctly_rounded(seed: int, device: torch.device) -> None:
    t = torch.exp(randn(100_000, seed=seed) * 20)
    squares = torch.arange(4096.0).square()
    t = torch.cat((t, squares, squares.nextafter(torch.tensor(torch.inf)), t * 1e-38))
    assert np.array_equal(turboquant._root(t.to(device)).cpu().numpy(), np.sqrt(t.numpy()))


@pytest.mark.parametrize("bits", BITS)
def test_counting_is_exact_at_every_boundary(bits: int, device: torch.device) -> None:
    codebook = Codebook.lloyd_max(bits)
    boundaries = codebook.boundaries
    infinity = torch.tensor(torch.inf)
    u = torch.cat(
        (
            boundaries,
            boundaries.nextafter(infinity),
            boundaries.nextafter(-infinity),
            torch.tensor([-0.0, 0.0, torch.inf, -torch.inf]),
        )
    )
    counted = turboquant._count_below(u.to(device), turboquant._search_tree(codebook.on(device))).cpu()
    assert np.array_equal(counted.numpy(), np.searchsorted(boundaries.numpy(), u.numpy(), side="left"))
    assert torch.equal(counted.int(), torch.bucketize(u, boundaries, out_int32=True))


@pytest.mark.parametrize(("D", "sf"), [(64, 1.0), (256, 1.0), (512, 1.0), (512, 2.0)])
def test_a_value_on_a_boundary_stays_below(D: int, sf: float) -> None:
    """A row whose every u is exactly ±sf, against a codebook with boundaries at exactly ±sf."""
    row = torch.zeros(D)
    row[0] = float(D)  # rotates to a constant
    codebook = Codebook(torch.arange(-16.0, 16.0) + sf + 0.5)
    up = encode_values(row * default_signs(D)[0], codebook=codebook, sf=sf)
    down = encode_values(-row * default_signs(D)[0], codebook=codebook, sf=sf)
    assert codebook.boundaries[15] == sf
    assert up.codes.tolist() == [15] * D
    assert codebook.centroids[15] < sf < codebook.centroids[16]
    assert down.codes.tolist() == [15 - int(2 * sf)] * D


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", [256, 512])
def test_distortion_is_the_optimum(D: int, bits: int, seed: int) -> None:
    x = randn(1024, D, seed=seed)
    coded = encode_values(x, bits=bits)
    y = fwht(x * default_signs(D)) / D**0.5
    error = (decode_values(coded) - y).square().mean() / y.square().mean()
    assert 0.95 < error.item() / OPTIMUM[bits] < 1.05


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", [256, 512])
def test_a_power_of_two_moves_only_the_norms(D: int, bits: int, seed: int) -> None:
    v = (randn(8, D, seed=seed) * 40 / D**0.5 * 16).round() / 16  # norm about 40, exact in f16 at every scale
    base = encode_values(v.half(), bits=bits)
    for factor in (4.0, 1 / 1024):
        scaled = (v * factor).half()
        assert torch.equal(scaled.float(), v * factor), "not exact in f16: the case is void"
        other = encode_values(scaled, bits=bits)
        assert torch.equal(other.codes, base.codes)
        assert torch.equal(other.norms, base.norms * factor)
        assert torch.equal(decode_values(other), decode_values(base) * factor)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_a_zero_row(D: int, bits: int) -> None:
    x = randn(3, D)
    x[1] = 0
    coded = encode_values(x, bits=bits)
    assert coded.codes[1].tolist() == [2 ** (bits - 1) - 1] * D  # u = 0 is the middle boundary: stays below
    assert (coded.norms[1] == 0).all()
    assert (decode_values(coded)[1] == 0).all()
    assert coded.nonfinite_rows == 0


def test_a_zero_block() -> None:
    y = randn(1, 512)
    y[:, 256:] = 0
    x = fwht(y.round()) * default_signs(512)  # integers: its rotation has an exactly zero second block
    coded = encode_values(x)
    assert coded.norms[0, 0] > 0
    assert coded.norms[0, 1] == 0
    assert (coded.codes[0, 256:] == 127).all()
    assert (decode_values(coded)[0, 256:] == 0).all()
    assert (decode_values(coded)[0, :256] != 0).any()


def poisoned(D: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Rows ``[3, 5, D]`` f32, four of them not finite or with a norm beyond F32, and where those are."""
    x = randn(3, 5, D)
    x[0, 3, 7] = torch.nan
    x[1, 0, D - 1] = torch.inf
    x[1, 4, 0] = -torch.inf
    x[2, 2, 5] = 1e20  # finite, but its square is not
    return x, [(0, 3), (1, 0), (1, 4), (2, 2)]


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_rows_that_are_not_finite_are_refused(D: int) -> None:
    x, _ = poisoned(D)
    with pytest.raises(
        InvalidInput, match=r"^encode_values: x: 4 of 15 rows are not finite, .* first \(0, 3\)$"
    ):
        encode_values(x)


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_rows_that_are_not_finite_become_zero_rows(D: int, device: torch.device) -> None:
    x, where = poisoned(D)
    coded = encode_values(x.to(device), nonfinite="zero")
    assert coded.nonfinite_rows == 4
    for row in where:
        x[row] = 0
    assert_same(coded, encode_values(x.to(device)))
    assert decode_values(coded).isfinite().all()


def test_one_block_that_overflows_makes_a_zero_row() -> None:
    y = torch.zeros(1, 512)
    y[:, 0] = 1e20
    y[:, 256:] = 1.0
    x = fwht(y) * default_signs(512)
    coded = encode_values(x, nonfinite="zero")
    assert coded.nonfinite_rows == 1
    assert coded.norms.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_largest_f16_rows_are_finite(dtype: torch.dtype) -> None:
    x = torch.full((1, 512), 65504.0).to(dtype)
    coded = encode_values(x)
    assert coded.norms.isfinite().all()
    assert coded.nonfinite_rows == 0


@settings(max_examples=40, deadline=None)
@given(
    lead=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    D=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    order=st.permutations(range(5)),
    seed=st.integers(0, 99),
)
def test_shape_and_strides_do_not_matter(
    lead: tuple[int, ...], D: int, dtype: torch.dtype, order: list[int], seed: int
) -> None:
    shape = (*lead, D)
    axes = [axis for axis in order if axis < len(shape)]
    stored = randn(*[2 * shape[axis] for axis in axes], seed=seed, dtype=dtype)
    x = stored[tuple(slice(1, None, 2) for _ in axes)].permute([axes.index(i) for i in range(len(axes))])
    assert x.shape == shape
    coded = encode_values(x)
    assert coded.codes.shape == shape
    assert coded.norms.shape == (*lead, max(1, D // 256))
    flat = encode_values(x.contiguous().view(-1, D))
    assert torch.equal(coded.codes.view(-1, D), flat.codes)
    assert torch.equal(coded.norms.reshape(flat.norms.shape), flat.norms)


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=4), rows=st.integers(1, 40))
def test_boxes_tile_the_rows_in_order(shape: list[int], rows: int) -> None:
    index = torch.arange(int(np.prod(shape))).reshape(shape)
    boxes = [index[box].flatten() for box in turboquant._boxes(shape, rows)]
    assert all(len(box) <= rows for box in boxes)
    assert torch.cat(boxes or [torch.empty(0)]).tolist() == list(range(index.numel()))


@pytest.mark.parametrize("D", [64, 512])
def test_neither_chunks_nor_threads_nor_neighbours_change_a_bit(
    D: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    x = randn(2, 3, 121, D, seed=seed)
    base = encode_values(x)
    unpacked = decode_values(base)
    threads = torch.get_num_threads()
    for chunk, count in itertools.product((D, 7 * D, 1 << 30), (1, 2)):
        monkeypatch.setattr(turboquant, "CHUNK_VALUES_CPU", chunk)
        torch.set_num_threads(count)
        try:
            again = encode_values(x[:, :, ::5])
            values = decode_values(
                CodedValues(base.codes[..., :90, :], base.norms[..., :90, :], base.codebook)
            )
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(again.codes, base.codes[:, :, ::5])
        assert torch.equal(again.norms, base.norms[:, :, ::5])
        assert torch.equal(values, unpacked[..., :90, :])
    assert_same(
        encode_values(x[1, 2, 77]), CodedValues(base.codes[1, 2, 77], base.norms[1, 2, 77], base.codebook)
    )


def test_torchs_defaults_do_not_matter() -> None:
    x = randn(3, 256)
    base = encode_values(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            again, values = encode_values(x), decode_values(base)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(again, base)
    assert torch.equal(values, decode_values(base))


def test_sf_plays_no_part_up_to_256() -> None:
    x = randn(5, 256)
    assert_same(encode_values(x, sf=float("nan")), encode_values(x))
    x = randn(5, 512)
    assert not torch.equal(encode_values(x, sf=0.5).codes, encode_values(x).codes)


def test_another_codebook() -> None:
    codebook = Codebook(torch.linspace(-4, 4, 64))
    coded = encode_values(randn(5, 128), codebook=codebook)
    assert coded.codebook is codebook
    assert coded.bits == 6
    assert coded.codes.max() < 64
