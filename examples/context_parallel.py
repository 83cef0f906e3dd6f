"""Keys over many processes, the result of one: bit for bit.

    torchrun --standalone --nproc-per-node 4 examples/context_parallel.py

A long prefix lies in pieces, one for each rank. The last rows of it are attended twice: with the queries on
every rank, as for decoding, where partial results travel; and with rows of its own on every rank, as for a
long prefill, where the keys do.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

import warmattn
from warmattn import Causal, CodedValues, distributed
from warmattn.testing import make_inputs

KEYS, ROWS, SPLIT = 30_000, 64, 4096


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # Every rank makes the whole sequence, to have something to compare with, and keeps its own piece.
    x = make_inputs(0, S=ROWS, T=KEYS, D=256, H=8, Hk=4, values="codes8")
    assert isinstance(x.v, CodedValues)
    whole = warmattn.attention(x.q, x.k, x.v, visible=Causal(KEYS - ROWS), kv_len=KEYS)
    splits = -(-KEYS // SPLIT)
    start, end = (min(splits * r // ranks * SPLIT, KEYS) for r in (rank, rank + 1))
    k = x.k[:, :, start:end]
    v = replace(x.v, codes=x.v.codes[:, :, start:end], norms=x.v.norms[:, :, start:end])

    with distributed.traffic() as partials:
        out = distributed.attention(x.q, k, v, key_range=(start, end), visible=Causal(KEYS - ROWS))
    differing = int((out.view(torch.int32) != whole.view(torch.int32)).sum())

    first, last = ROWS * rank // ranks, ROWS * (rank + 1) // ranks
    with distributed.traffic() as keys:
        out = distributed.attention(
            x.q[:, :, first:last],
            k,
            v,
            key_range=(start, end),
            visible=Causal(KEYS - ROWS + first),
            queries="sharded",
        )
    differing += int((out.view(torch.int32) != whole[:, :, first:last].view(torch.int32)).sum())

    line = (
        f"rank {rank}: keys {start} to {end}; sent {partials.sent / 1e6:.2f} MB of partial results, "
        f"{keys.sent / 1e6:.2f} MB of keys and codes"
    )
    lines: list[str] = [""] * ranks
    dist.all_gather_object(lines, line)
    wrong = torch.tensor(differing)
    dist.all_reduce(wrong)
    if rank == 0:
        print(*lines, sep="\n")
        print(f"{int(wrong)} of {(ranks + 1) * whole.numel()} elements differ from one process")
    dist.destroy_process_group()
    raise SystemExit(int(wrong) > 0)


if __name__ == "__main__":
    main()
