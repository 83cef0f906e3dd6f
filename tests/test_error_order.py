"""A call with two faults tells the one that comes first in the contract."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from warmattn.call import LARGEST_POSITION, AttentionCall
from warmattn.errors import InvalidInput, Unsupported
from warmattn.visibility import Causal, Window

B, H, C = 2, 4, 8
META = torch.device("meta")

# One fault at each step of the contract's list, as changes to one specification, so that any two combine.
FAULTS: dict[str, dict[str, Any]] = {
    "head dim": {"D": 96},
    "empty axis": {"S": 0},
    "q: expected H a multiple": {"Hk": 3},
    "scale: ": {"scale": 0.0},
    "kv_len: T (9) > C (8)": {"kv_len": C + 1},
    "k: expected q's dtype": {"k_dtype": torch.bfloat16},
    "v: expected float32": {"v_dtype": torch.float64},
    "mask: expected float16": {"mask_dtype": torch.float32},
    "tile_map: expected uint8": {"map_dtype": torch.int32},
    "window: ": {"window": 0},
    "q_offset: expected >= 0": {"q_offset": -1},
    "kv_start: expected in": {"kv_start": -1},
    "softcap: ": {"softcap": 0.0},
    "key_offset: expected <=": {"key_offset": LARGEST_POSITION + 1},
    "mask: expected on q's device": {"mask_device": META},
    "k: expected the last axis": {"k_step": 2},
    "out: expected memory of its own": {"out_on_q": True},
}


def specified(
    *,
    D: int = 256,
    S: int = 3,
    Hk: int = 2,
    kv_len: int = C,
    scale: float = 1.0,
    k_dtype: torch.dtype = torch.float16,
    v_dtype: torch.dtype = torch.float32,
    mask_dtype: torch.dtype = torch.float16,
    map_dtype: torch.dtype = torch.uint8,
    window: int = 2,
    q_offset: int = 0,
    kv_start: int = 0,
    softcap: float = 1.0,
    key_offset: int = 0,
    mask_device: str | torch.device = "cpu",
    k_step: int = 1,
    out_on_q: bool = False,
) -> AttentionCall:
    """A call with a mask, a map and a window at once, which only the op itself can express."""
    buffer = torch.zeros(B * H * S * D)
    call = AttentionCall.of(
        buffer.view(torch.float16)[: B * H * S * D].view(B, H, S, D),
        torch.zeros(B, Hk, C, D * k_step, dtype=k_dtype)[..., ::k_step],
        torch.zeros(B, Hk, C, D, dtype=v_dtype),
        visible=Window(window, q_offset),
        kv_len=kv_len,
        kv_start=kv_start,
        key_offset=key_offset,
        scale=scale,
        softcap=softcap,
        out=buffer.view(B, H, S, D) if out_on_q else torch.zeros(B, H, S, D),
    )
    mask = torch.zeros(S, kv_len, dtype=mask_dtype, device=mask_device)
    return call._replace(mask=mask, tile_map=torch.ones(1, 1, dtype=map_dtype))


def test_the_specification_without_a_fault_is_a_good_call() -> None:
    specified().check()


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(FAULTS, 2)])
def test_of_two_faults_the_earlier_in_the_contract_is_told(first: str, second: str) -> None:
    call = specified(**{**FAULTS[second], **FAULTS[first]})
    with pytest.raises((InvalidInput, Unsupported)) as raised:
        call.check()
    assert first in str(raised.value)


def test_partial_results_may_lie_past_the_keys_but_keep_every_other_check() -> None:
    q, k = torch.zeros(1, 1, 3, 256).half(), torch.zeros(1, 1, C, 256).half()
    call = AttentionCall.of(q, k, k, visible=Causal(C))
    assert call.check(offsets=False) is call
    with pytest.raises(InvalidInput, match="q_offset: expected >= 0"):
        call._replace(q_offset=-1).check(offsets=False)
