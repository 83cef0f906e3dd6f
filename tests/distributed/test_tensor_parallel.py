"""Operands sharded by heads, as tensor-parallel models hold them: the bits of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

import warmattn
from warmattn import Causal, CodedValues, External
from warmattn.testing import assert_same_bits, make_inputs

HEADS = ((8, 4), (8, 1), (8, 2), (3, 1))
"""H and Hk: with two and four ranks KV heads are shared out, single, too few, or neither divides."""


def attend_sharded(seed: int) -> list[str]:
    """Where the result lies, for each call; all are held to one process's bits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = []

    def by_heads(tensor: Tensor) -> Tensor:
        even = tensor.shape[1] % dist.get_world_size() == 0
        return distribute_tensor(tensor, mesh, [Shard(1) if even else Replicate()])

    for number, (H, Hk) in enumerate(HEADS):
        for values in ("f16", "codes8"):
            x = make_inputs(seed + number, S=5, T=90, D=64, H=H, Hk=Hk, values=values)
            v: Any = x.v
            if isinstance(v, CodedValues):
                sharded_v: Any = replace(v, codes=by_heads(v.codes), norms=by_heads(v.norms))
            else:
                sharded_v = by_heads(v)
            whole = warmattn.attention(x.q, x.k, v, visible=Causal(85), kv_len=90, return_lse=True)
            found = warmattn.attention(
                by_heads(x.q), by_heads(x.k), sharded_v, visible=Causal(85), kv_len=90, return_lse=True
            )
            for actual, expected in zip(found, whole, strict=True):
                assert isinstance(actual, DTensor)
                assert_same_bits(actual.full_tensor(), expected)
            assert isinstance(found[0], DTensor)
            placements.append(str(found[0].placements))

    # Into an output that lies otherwise than the op would place it.
    x = make_inputs(seed, S=5, T=90, D=64, H=8, Hk=4, values="f32")
    assert isinstance(x.v, Tensor)
    mask = torch.rand(5, 90, generator=torch.Generator().manual_seed(seed)) < 0.5
    out = distribute_tensor(torch.full((1, 8, 5, 64), torch.nan), mesh, [Replicate()])
    sharded = (by_heads(x.q), by_heads(x.k), by_heads(x.v))
    warmattn.attention(*sharded, visible=External(mask), kv_len=90, out=out)
    whole = warmattn.attention(x.q, x.k, x.v, visible=External(mask), kv_len=90)
    assert_same_bits(out.full_tensor(), whole)
    return placements


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_over_ranks_give_the_bits_of_one_process(ranks: int, seed: int, tmp_path: Path) -> None:
    for outcome in run_ranks(ranks, tmp_path, attend_sharded, seed):
        assert outcome.error is None, outcome.traceback
        assert len(outcome.value) == 2 * len(HEADS)
        assert all("Shard" in placed for placed in outcome.value[:4])
