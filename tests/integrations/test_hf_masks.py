"""The mask function sees what Transformers' own sees, and builds cells only where numbers do not say it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from warmattn import Unsupported
from warmattn.integrations.transformers.masks import PositionMask, make_mask

B, S, T = 3, 4, 11


def arguments(
    S: int = S,
    T: int = T,
    window: int | None = None,
    kv_offset: int = 0,
    q_offset: Any = None,
    **changed: Any,
) -> dict[str, Any]:
    """What the mask function of a causal or sliding layer is called with, for the last S rows of T keys."""
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    given = {
        "batch_size": B,
        "q_length": S,
        "kv_length": T,
        "q_offset": kv_offset + T - S if q_offset is None else q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": None,
        "allow_is_causal_skip": True,
        "dtype": torch.float32,
        "config": SimpleNamespace(),
        "use_vmap": False,
        "device": "cpu",
        **changed,
    }
    return given if window is None else {**given, "local_size": window}


def stock(given: dict[str, Any]) -> Tensor:
    """Transformers' own cells."""
    mask = sdpa_mask(**{**given, "allow_is_causal_skip": False})
    assert mask is not None
    return mask


def left_padding(starts: list[int], keys: int) -> Tensor:
    return torch.arange(keys) >= torch.tensor(starts)[:, None]


@pytest.mark.parametrize("S", [1, S, T])
def test_last_rows_of_a_causal_layer_need_no_mask(S: int):
    assert make_mask(**arguments(S)) is None
    assert make_mask(**arguments(S, attention_mask=torch.ones(B, T, dtype=torch.bool))) is None


@given(st.data())
def test_position_masks_have_the_cells_of_transformers(data: st.DataObject):
    keys = data.draw(st.integers(1, 12))
    rows = data.draw(st.integers(1, keys))
    window = data.draw(st.none() | st.integers(1, 14))
    kv_offset = data.draw(st.integers(0, 5))
    spare = data.draw(st.integers(0, 3))  # rows of a static cache that are not written yet
    starts = data.draw(st.none() | st.lists(st.integers(0, keys + kv_offset), min_size=B, max_size=B))
    padding = None if starts is None else left_padding(starts, keys + kv_offset)
    given = arguments(
        rows,
        keys + spare,
        window,
        kv_offset,
        q_offset=kv_offset + keys - rows,
        attention_mask=padding,
    )
    mask = make_mask(**given)
    if mask is None:
        assert window is None
        assert spare == 0
        assert padding is None or bool(padding[:, kv_offset:].all())
        return
    assert isinstance(mask, PositionMask)
    assert torch.equal(mask.elements(), stock(given))
    assert torch.equal(mask & True, stock(given)), "other operations get the cells"


@pytest.mark.parametrize("kept", [1, 2, S, S + 3])
@pytest.mark.parametrize("window", [None, 3])
def test_last_rows_of_a_position_mask_are_one(kept: int, window: int | None):
    """Gemma 4 cuts its masks so, under `torch.inference_mode` too."""
    given = arguments(window=window, attention_mask=left_padding([0, 6, 11], T))
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            mask = make_mask(**given)
            assert isinstance(mask, PositionMask)
            last = mask[:, :, slice(-kept, None), :]
            assert isinstance(last, PositionMask)
            assert last.shape == (B, 1, min(kept, S), T)
            assert torch.equal(last.elements(), stock(given)[:, :, -kept:])


def test_other_slices_of_a_position_mask_are_cells():
    given = arguments(window=3)
    mask, cells = make_mask(**given), stock(arguments(window=3))
    assert mask is not None
    for index in (slice(None), slice(0, 2), slice(1, 3)):
        assert torch.equal(mask[:, :, index], cells[:, :, index])
        assert torch.equal(mask[..., index], cells[..., index])
    assert torch.equal(mask[:, :, :, -5:], cells[..., -5:])
    assert torch.equal(mask[:, :, ::2], cells[:, :, ::2])


def test_length_of_a_static_cache_may_be_a_tensor():
    given = arguments(S, T + 5, q_offset=torch.tensor(T - S))
    mask = make_mask(**given)
    assert isinstance(mask, PositionMask)
    assert torch.equal(mask.elements(), stock(given))


PADDING = left_padding([0, 2, 5], T)
HOLE = PADDING.clone()
HOLE[1, 7] = False


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(arguments(attention_mask=PADDING.flip(1)), id="right padding"),
        pytest.param(arguments(attention_mask=HOLE), id="a hole"),
        pytest.param(arguments(attention_mask=PADDING[:, : T - 2]), id="short"),
        pytest.param(arguments(allow_is_causal_skip=False), id="cells asked for"),
        pytest.param(
            arguments(
                T,
                mask_function=and_masks(
                    causal_mask_function,
                    packed_sequence_mask_function(torch.arange(T).expand(B, T) // 4),
                ),
                allow_is_causal_skip=False,
            ),
            id="packed",
        ),
        pytest.param(
            arguments(
                window=4,
                mask_function=chunked_causal_mask_function(4, torch.tensor([0, 2, 5])),
                attention_mask=PADDING,
                config=SimpleNamespace(attention_chunk_size=4),
            ),
            id="chunked",
        ),
        pytest.param(
            arguments(allow_is_causal_skip=False, allow_is_bidirectional_skip=True), id="bidirectional"
        ),
    ],
)
def test_what_numbers_do_not_say_is_a_mask(given: dict[str, Any]):
    mask = make_mask(**given)
    assert type(mask) is Tensor
    assert torch.equal(mask, stock({**given, "allow_is_bidirectional_skip": False}))


def test_position_mask_cannot_be_written_to():
    mask = make_mask(**arguments(window=3))
    assert mask is not None
    with pytest.raises(Unsupported, match="PositionMask cannot be written to"):
        mask.fill_(True)
    assert repr(mask) == f"PositionMask([{B}, 1, {S}, {T}], torch.bool, device=cpu)"
