"""How a call whose operands are DTensors is shared out: by heads, as tensor-parallel models hold them.

`warmattn.ops` imports this, which takes a while, when the first such call comes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

__all__ = ["attend"]

_HEADS = Shard(1)

_Ways = list[tuple[list[Placement], list[Placement | None]]]


def attend(q: DTensor, *others: Any) -> tuple[Tensor, Tensor]:
    """``warmattn::attend`` on DTensors of one mesh. Plain tensors among them (a codebook, a mask, lengths)
    are taken to be the same on every rank.
    """
    mesh = q.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    arguments = (
        DTensor.from_local(other, mesh, everywhere, run_check=False) if type(other) is Tensor else other
        for other in others
    )
    return torch.ops.warmattn.attend.default(q, *arguments)


def _share_out(q: Any, k: Any, v: Any, *others: Any) -> _Ways:
    """Placements of (outputs, arguments) over one axis of the mesh.

    Query heads are sharded with their KV heads, or around a single KV head that every rank has. Where Hk is
    no multiple of the ranks, every rank computes all heads: a share of them would not find its KV head.
    """
    norms, mask = others[0], others[5]
    arguments = (q, k, v, *others)
    replicated = [Replicate() if hasattr(argument, "placements") else None for argument in arguments]
    ways: _Ways = [([Replicate(), Replicate()], [*replicated])]
    ranks, H, Hk = q.mesh.size(), q.shape[1], k.shape[1]
    same_for_all_heads = mask is None or len(mask.shape) == 2 or mask.shape[1] == 1
    if same_for_all_heads and H % ranks == 0 and (Hk % ranks == 0 or Hk == 1):
        with_heads = [q] if Hk % ranks else [q, k, v, norms]
        by_heads = [
            _HEADS if any(argument is tensor for tensor in with_heads if tensor is not None) else placement
            for argument, placement in zip(arguments, replicated, strict=True)
        ]
        ways.append(([_HEADS, _HEADS], by_heads))
    return ways


register_sharding(torch.ops.warmattn.attend.default)(_share_out)  # type: ignore[arg-type]
