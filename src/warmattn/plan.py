"""What a call costs: the data behind `warmattn.explain`."""

from __future__ import annotations

from dataclasses import dataclass

from warmattn.backend import Backend, Tiling
from warmattn.call import AttentionCall
from warmattn.cost import flops, host_length, least_bytes, visible_pairs
from warmattn.pipelines import PipelineKey

__all__ = ["Explanation", "explain_call"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one call resolves to.

    Attributes:
        label: the pipeline's label.
        backend: name of the backend.
        tiling: rows and keys of a tile, keys of a split.
        splits: fixed splits of the keys ``[0, T)``; a multiple of ``tiling.split`` is a ``key_offset`` that
            keeps the bits.
        pairs: visible (row, key) pairs over all sequences and heads; with lengths that lie on a GPU, an
            upper bound.
        flops: ``4 * pairs * D``: one multiplication and one addition per pair and element, for Q·K and for
            P·V.
        bytes: least memory traffic: q, the mask and every row of k and v that some row sees read once, each
            output written once; with lengths that lie on a GPU, an upper bound.
    """

    label: str
    backend: str
    tiling: Tiling
    splits: int
    pairs: int
    flops: int
    bytes: int


def explain_call(call: AttentionCall, backend: Backend) -> Explanation:
    """Describe a checked call on the backend that will run it."""
    tiling = backend.tiling(call.D)
    kv_lens = [host_length(call.kv_len, b, call.C) for b in range(call.B)]
    return Explanation(
        label=PipelineKey.of(call).label,
        backend=backend.name,
        tiling=tiling,
        splits=-(-max(kv_lens) // tiling.split),
        pairs=visible_pairs(call),
        flops=flops(call),
        bytes=least_bytes(call),
    )
