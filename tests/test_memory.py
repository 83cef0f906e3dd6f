"""Which bytes a strided tensor occupies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warmattn.memory import lie_apart, overlap, repeats_memory, span

strided = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3)


def addresses(tensor: torch.Tensor) -> list[int]:
    """Every byte a tensor names, in the order of its indices, repeats included."""
    size = tensor.element_size()
    offsets = [tensor.data_ptr()]
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = [offset + i * stride * size for offset in offsets for i in range(extent)]
    return [offset + byte for offset in offsets for byte in range(size)]


@given(a=strided, b=strided, a_offset=st.integers(0, 50), b_offset=st.integers(0, 25))
def test_overlap_is_exact(
    a: list[tuple[int, int]], b: list[tuple[int, int]], a_offset: int, b_offset: int
) -> None:
    buffer = torch.zeros(200, dtype=torch.uint8)
    left = buffer.as_strided([n for n, _ in a], [s for _, s in a], a_offset)
    right = buffer.view(torch.int16).as_strided([n for n, _ in b], [s for _, s in b], b_offset)
    assert overlap(left, right) == bool(set(addresses(left)) & set(addresses(right)))


@pytest.mark.parametrize(
    ("shape", "stride", "repeats"),
    [
        ((4, 8), (8, 1), False),
        ((4, 8), (1, 4), False),
        ((4, 8), (100, 2), False),
        ((4, 8), (0, 1), True),
        ((4, 8), (7, 1), True),
        ((1, 8), (0, 1), False),
        ((), (), False),
    ],
)
def test_repeats_memory(shape: tuple[int, ...], stride: tuple[int, ...], repeats: bool) -> None:
    assert repeats_memory(torch.zeros(500).as_strided(shape, stride)) is repeats


@given(axes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), max_size=3))
def test_memory_that_repeats_is_always_seen(axes: list[tuple[int, int]]) -> None:
    tensor = torch.zeros(300).as_strided([n for n, _ in axes], [s for _, s in axes])
    named = addresses(tensor)
    if len(set(named)) < len(named):
        assert repeats_memory(tensor)


def test_what_lies_apart_does_not_overlap() -> None:
    """Two views at every pair of places in a buffer; interleaved ones neither lie apart nor overlap."""
    buffer = torch.zeros(24)
    views = [buffer[start : start + 5 * step : step] for start in range(10) for step in (1, 2)]
    apart = 0
    for a in views:
        assert span(a) == 4 * (4 * a.stride(0) + 1)
        for b in views:
            if lie_apart((None, a, b), (0, span(a), span(b)), last=1):
                apart += 1
                assert not overlap(a, b)
    assert apart > 0
    even, odd = buffer[0:10:2], buffer[1:10:2]
    assert not overlap(even, odd)
    assert not lie_apart((even, odd), (span(even), span(odd)), last=1)
    assert lie_apart((even, None), (span(even), 0), last=1)
