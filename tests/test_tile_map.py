"""The tile map of a mask: the classifier against a plain loop, and O with the map equal to O without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import warmattn
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput
from warmattn.testing import VALUE_FORMS, assert_same_bits, make_inputs
from warmattn.visibility import External, Full

HEAD_DIMS = (256, 512)
CELLS = (0.0, -0.0, -math.inf, -65504.0, -1.0, 6e-8, math.nan)
"""What a cell may hold; −65504, the least finite f16, does not hide."""


def classify(mask: Tensor) -> list[list[int]]:
    """The contract, cell by cell: 0 all hidden, 2 all exactly 0 (or True), else 1; over all planes."""
    rows, keys = mask.shape[-2:]
    grid = []
    for row in range(0, rows, 32):
        grid.append([])
        for key in range(0, keys, 16):
            cells = mask[..., row : row + 32, key : key + 16].flatten().tolist()
            if mask.dtype == torch.bool:
                cells = [0.0 if visible else -math.inf for visible in cells]
            hidden, is_open = (all(c <= -1e30 for c in cells), all(c == 0 for c in cells))
            grid[-1].append(0 if hidden else 2 if is_open else 1)
    return grid


def make_mask(seed: int, shape: tuple[int, ...], cells: tuple[float, ...] = CELLS) -> Tensor:
    """An f16 mask of hidden tiles, open tiles, tiles of any cells, and tiles that one cell makes mixed. In
    half of them, all planes of a tile are of one kind.
    """
    generator = torch.Generator().manual_seed(seed)
    *planes, S, T = shape
    grid = (-(-S // 32), -(-T // 16))

    def spread(tiles: Tensor) -> Tensor:
        return tiles.repeat_interleave(32, -2).repeat_interleave(16, -1)[..., :S, :T]

    kinds = torch.randint(0, 5, (*planes, *grid), generator=generator)
    common = torch.randint(0, 5, grid, generator=generator)
    kinds = spread(torch.where(torch.rand(grid, generator=generator) < 0.5, common, kinds))
    anything = torch.tensor(cells)[torch.randint(0, len(cells), shape, generator=generator)]
    uniform = torch.where(kinds % 2 == 0, 0.0, -math.inf)  # 0 and 2 open, 1 and 3 hidden
    row, key = (torch.randint(0, n, (*planes, *grid), generator=generator) for n in (32, 16))
    chosen = (spread(row) == torch.arange(S)[:, None] % 32) & (spread(key) == torch.arange(T) % 16)
    return torch.where((kinds == 4) | ((kinds >= 2) & chosen), anything, uniform).half()


def strided(mask: Tensor, layout: str) -> Tensor:
    """The same cells in another layout, with NaN (True) wherever the mask is not."""
    if layout == "keys first":
        return mask.mT.contiguous().mT
    if layout == "inside":
        *planes, S, T = mask.shape
        around = torch.full((*planes, S + 3, 2 * T + 5), math.nan).to(mask)
        around[..., 2 : S + 2, 4 : 2 * T + 4 : 2] = mask
        return around[..., 2 : S + 2, 4 : 2 * T + 4 : 2]
    return mask


shapes = st.tuples(st.integers(1, 100), st.integers(1, 100)) | st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70)
)
layouts = st.sampled_from(["plain", "keys first", "inside"])


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), shape=shapes, layout=layouts, as_bool=st.booleans())
def test_classifier_is_the_plain_loop(
    device: torch.device, seed: int, shape: tuple[int, ...], layout: str, as_bool: bool
) -> None:
    mask = make_mask(seed, shape).to(device)
    mask = strided(mask == 0 if as_bool else mask, layout)
    tiles = warmattn.tile_map(mask)
    assert tiles.dtype == torch.uint8
    assert tiles.is_contiguous()
    assert tiles.tolist() == classify(mask)
    assert tiles.untyped_storage().nbytes() == math.ceil(tiles.numel() / 32) * 32


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("background", [0.0, -math.inf])
@pytest.mark.parametrize("shape", [(32, 16), (33, 17), (1, 1), (2, 2, 31, 15)])
def test_one_cell_decides_its_tile(shape: tuple[int, ...], background: float, cell: float) -> None:
    """The first and the last cell of the mask, each in turn."""
    for place in (0, -1):
        mask = torch.full(shape, background, dtype=torch.float16)
        mask.view(-1)[place] = cell
        assert warmattn.tile_map(mask).tolist() == classify(mask)


def test_expanded_masks_have_the_map_of_their_one_plane(seed: int) -> None:
    mask = make_mask(seed, (1, 1, 70, 40))
    expected = warmattn.tile_map(mask[0, 0])
    assert set(expected.flatten().tolist()) == {0, 1, 2}
    assert torch.equal(warmattn.tile_map(mask.expand(3, 4, 70, 40)), expected)
    row = make_mask(seed, (1, 40))
    assert torch.equal(warmattn.tile_map(row.expand(70, 40)), warmattn.tile_map(row).expand(3, 3))


def test_rank_4_is_hidden_or_open_only_where_every_plane_is() -> None:
    mask = torch.zeros(2, 3, 32, 48, dtype=torch.float16)
    mask[..., :16] = -math.inf
    mask[1, 2, :, 16:32] = -math.inf
    assert warmattn.tile_map(mask).tolist() == [[0, 1, 2]]
    mask[0, 1, 5, 7] = 0.0
    mask[1, 0, 31, 47] = -1.0
    assert warmattn.tile_map(mask).tolist() == [[1, 1, 1]]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    S=st.integers(1, 70),
    T=st.integers(1, 300),
    planes=st.sampled_from([(), (1, 1), (2, 1), (1, 4), (2, 4)]),
    layout=layouts,
    as_bool=st.booleans(),
    D=st.sampled_from(HEAD_DIMS),
    form=st.sampled_from(VALUE_FORMS),
)
def test_map_on_is_map_off(
    device: torch.device,
    seed: int,
    S: int,
    T: int,
    planes: tuple[int, ...],
    layout: str,
    as_bool: bool,
    D: int,
    form: str,
) -> None:
    case = make_inputs(seed, device=device, S=S, T=T, D=D, B=2, H=4, Hk=2, values=form)
    mask = make_mask(seed, (*planes, S, T), cells=(0.0, -0.0, -math.inf, -3.0, 0.5)).to(device)
    mask = strided(mask == 0 if as_bool else mask, layout)
    results = [
        warmattn.attention(case.q, case.k, case.v, visible=External(mask, tiles), kv_len=T, return_lse=True)
        for tiles in (None, warmattn.tile_map(mask), torch.ones_like(warmattn.tile_map(mask)))
    ]
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])


@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("form", VALUE_FORMS)
def test_hidden_tiles_may_hold_nan_and_inf(form: str, D: int, seed: int, device: torch.device) -> None:
    """16 keys that no row sees, first, in the middle and last; with the map and without."""
    S, T = 40, 150
    case = make_inputs(seed, device=device, S=S, T=T, D=D, values=form)
    mask = make_mask(seed, (S, T), cells=(0.0, -math.inf)).to(device)
    hidden = [slice(0, 16), slice(64, 80), slice(144, 150)]
    for keys in hidden:
        mask[:, keys] = -math.inf
    tiles = warmattn.tile_map(mask)
    assert {0, 1, 2} <= set(tiles.flatten().tolist())
    expected = warmattn.attention(case.q, case.k, case.v, visible=External(mask), kv_len=T)

    values = case.v.norms if isinstance(case.v, CodedValues) else case.v
    for poison in (math.nan, math.inf, -math.inf):
        for keys in hidden:
            case.k[:, :, keys], values[:, :, keys] = poison, poison
        for tile_map in (None, tiles):
            out = warmattn.attention(case.q, case.k, case.v, visible=External(mask, tile_map), kv_len=T)
            assert_same_bits(out, expected)


@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("with_map", [False, True])
def test_a_non_finite_value_touches_only_the_rows_that_see_it(with_map: bool, D: int, seed: int) -> None:
    """The CPU backend promises it; docs/cuda.md says what the CUDA backend does."""
    S, T = 40, 150
    case = make_inputs(seed, S=S, T=T, D=D)
    assert isinstance(case.v, Tensor)
    mask = torch.zeros(S, T, dtype=torch.float16)
    mask[:32, 64:80] = -math.inf  # a hidden tile of the first rows only
    visible = External(mask, warmattn.tile_map(mask) if with_map else None)
    expected = warmattn.attention(case.q, case.k, case.v, visible=visible, kv_len=T)
    case.v[:, :, 70] = math.nan
    out = warmattn.attention(case.q, case.k, case.v, visible=visible, kv_len=T)
    assert_same_bits(out[:, :, :32], expected[:, :, :32])
    assert bool(out[:, :, 32:].isnan().all())


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_hidden_tiles_are_skipped_and_open_tiles_do_not_read_the_mask(
    D: int, seed: int, device: torch.device
) -> None:
    """Maps that do not belong to their mask, to see that the mask is not looked at."""
    S, T = 40, 150
    case = make_inputs(seed, device=device, S=S, T=T, D=D)
    garbage = torch.full((S, T), math.nan, dtype=torch.float16, device=device)

    def attend(byte: int) -> Tensor:
        tiles = torch.full((2, 10), byte, dtype=torch.uint8, device=device)
        return warmattn.attention(case.q, case.k, case.v, visible=External(garbage, tiles), kv_len=T)

    assert_same_bits(attend(0), torch.zeros_like(case.q, dtype=torch.float32))
    assert_same_bits(attend(2), warmattn.attention(case.q, case.k, case.v, visible=Full(), kv_len=T))


def test_any_contiguous_map_of_the_right_shape_is_accepted(seed: int, device: torch.device) -> None:
    case = make_inputs(seed, device=device, S=40, T=33, D=256)
    mask = make_mask(seed, (40, 33), cells=(0.0, -math.inf)).to(device)
    expected = warmattn.attention(case.q, case.k, case.v, visible=External(mask), kv_len=33)
    odd_place = torch.zeros(7, dtype=torch.uint8, device=device)[1:].view(2, 3).copy_(warmattn.tile_map(mask))
    for tiles in (torch.tensor(classify(mask), dtype=torch.uint8, device=device), odd_place):
        out = warmattn.attention(case.q, case.k, case.v, visible=External(mask, tiles), kv_len=33)
        assert_same_bits(out, expected)


@settings(max_examples=50)
@given(S=st.integers(1, 100), T=st.integers(1, 100), shape=st.lists(st.integers(0, 8), max_size=4).map(tuple))
def test_a_map_of_any_other_shape_is_refused(S: int, T: int, shape: tuple[int, ...]) -> None:
    grid = (math.ceil(S / 32), math.ceil(T / 16))
    if shape == grid:
        shape = (*shape, 1)
    case = make_inputs(0, S=S, T=T, D=64)
    visible = External(torch.zeros(S, T).half(), torch.ones(shape, dtype=torch.uint8))
    with pytest.raises(InvalidInput) as raised:
        warmattn.attention(case.q, case.k, case.v, visible=visible, kv_len=T)
    for text in ("tile_map", str(list(grid)), "32 x 16", f"got {list(shape)}"):
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("expected", "mask"),
    [
        ("float16 or bool, got torch.float32", torch.zeros(3, 8)),
        ("float16 or bool, got torch.uint8", torch.zeros(3, 8, dtype=torch.uint8)),
        ("float16 or bool, got list", [[0.0]]),
        ("float16 or bool, got NoneType", None),
        ("got []", torch.zeros(()).half()),
        ("got [8]", torch.zeros(8).half()),
        ("got [1, 3, 8]", torch.zeros(1, 3, 8).half()),
        ("no axis empty, got [0, 8]", torch.zeros(0, 8).half()),
        ("no axis empty, got [3, 0]", torch.zeros(3, 0).half()),
        ("no axis empty, got [1, 0, 3, 8]", torch.zeros(1, 0, 3, 8).half()),
    ],
)
def test_what_is_not_a_mask_is_refused(expected: str, mask: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        warmattn.tile_map(mask)
    assert str(raised.value).startswith("tile_map: mask: expected ")
    assert expected in str(raised.value)
