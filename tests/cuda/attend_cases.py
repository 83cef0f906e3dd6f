"""Both ``attend`` kernels compiled without a GPU: one case for each head dim, V form and visibility.

Not collected by itself: ``make compile-all`` runs all of them, `test_portable.py` a few.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attend_calls import Aligned, arguments, constants, form
from compiling import compiling_only, specialisations
from triton.compiler import CompiledKernel

from warmattn import Causal, External, Full, Window, tile_map
from warmattn.backend.cuda import hopper, portable
from warmattn.backend.cuda.tuning import HOPPER, HOPPER_SPLIT, PORTABLE, PORTABLE_SPLIT, hopper_variant
from warmattn.call import AttentionCall
from warmattn.testing import make_inputs
from warmattn.visibility import Visibility

FORMS = ("f16", "f32", "bf16", "codes8")
VISIBILITIES = ("causal", "window", "full", "mask", "map")
PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "mma.sync"}
"""The one family of matrix instructions that a device's results come from, whatever the call."""


class Case(NamedTuple):
    kernel: str
    capability: int
    D: int
    values: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kernel}-sm{self.capability}-{self.D}-{self.values}-{self.kind}"


CASES = [
    *(Case("hopper", 90, D, v, kind) for D in (256, 512) for v in FORMS for kind in VISIBILITIES),
    *(Case("portable", 90, D, v, kind) for D in (64, 128, 256, 512) for v in FORMS for kind in VISIBILITIES),
    *(
        Case("portable", capability, D, values, kind)
        for capability in (80, 89, 100)
        for D in (64, 128, 256, 512)
        for values, kind in (("f16", "causal"), ("f32", "window"), ("codes8", "map"))
    ),
]

FEW = [
    Case("hopper", 90, 256, "codes8", "causal"),
    Case("portable", 90, 128, "f16", "map"),
    Case("portable", 80, 64, "codes8", "window"),
    Case("portable", 89, 512, "f16", "causal"),
    Case("portable", 100, 128, "f32", "full"),
]
"""What the test suite compiles."""


def call_of(case: Case) -> AttentionCall:
    """Of everything that a kernel of this kind can be asked for besides, where the V form has codes: softcap,
    lengths on the device, bfloat16 queries.
    """
    S, T, B = 16, 160, 2
    more = case.values == "codes8"
    dtype = torch.bfloat16 if more else torch.float16
    inputs = make_inputs(0, B=B, S=S, T=T, C=T, D=case.D, values=case.values, dtype=dtype)
    mask = torch.zeros(S, T, dtype=torch.bool if more else torch.float16)
    visible: Visibility = {
        "causal": Causal(T - S),
        "window": Window(70, T - S),
        "full": Full(),
        "mask": External(mask),
        "map": External(mask, tile_map(mask)),
    }[case.kind]
    kv_len = torch.full((B,), T, dtype=torch.int32) if more else T
    softcap = 30.0 if more else None
    return AttentionCall.of(inputs.q, inputs.k, inputs.v, visible=visible, kv_len=kv_len, softcap=softcap)


def compiled(case: Case, folder: Path, *, walk: bool) -> CompiledKernel:
    call = call_of(case).rounded().check()
    out = torch.empty(call.q.shape)
    maxima, sums = torch.empty(2, *call.q.shape[:3])
    aligned = Aligned.of(call, out)
    assert all(aligned)
    kernel: Any
    options: dict[str, Any] = {"enable_fp_fusion": False}
    if case.kernel == "hopper":
        kernel, split = hopper.attend, HOPPER_SPLIT[case.D]
        bulk_v = form(call) == "f16" and call.mask is None
        config = HOPPER[case.D, hopper_variant(form(call), bulk=bulk_v)]
        options |= {"BULK_K": aligned.qk, "BULK_V": bulk_v, "num_warps": 4}
        names = ("K_STAGES", "V_SLOTS", "CONSUMER_REGISTERS", "LOADER_REGISTERS")
    else:
        kernel, split = portable.attend, PORTABLE_SPLIT[case.D]
        config = PORTABLE[case.capability, case.D]
        options |= {"QK_ALIGNED": aligned.qk}
        names = ("ROWS", "TILE", "COLUMNS", "num_warps", "num_stages")
    kernel.device_caches.clear()
    with compiling_only(folder, case.capability):
        kernel[(1,)](
            *arguments(call, aligned, out, maxima, sums, walk=walk),
            **constants(call, walk=walk, split=split),
            V_ALIGNED=aligned.v,
            OUT_ALIGNED=aligned.out,
            **dict(zip(names, config, strict=True)),
            **options,
        )
    (found,) = specialisations(kernel, case.capability)
    return found


def check(case: Case, folder: Path, *, walk: bool) -> None:
    """It compiles, within the shared memory of its device, to the products it is to have."""
    ptx = compiled(case, folder, walk=walk).asm["ptx"]
    products = re.findall(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", ptx)
    assert set(products) == {PRODUCTS[case.capability]}


@pytest.mark.parametrize("walk", [True, False], ids=["walk", "split"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: Case, walk: bool, tmp_path: Path) -> None:
    check(case, tmp_path, walk=walk)
