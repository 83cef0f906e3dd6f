"""Frozen kernel configurations. Nothing is tuned at run time: another configuration could mean other bits."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "HOPPER",
    "HOPPER_SPLIT",
    "PORTABLE",
    "PORTABLE_SPLIT",
    "HopperConfig",
    "PortableConfig",
    "hopper_variant",
    "portable_family",
]

HOPPER_SPLIT = {256: 2048, 512: 4096}
"""Keys of a split by head dim. On an H200, 16 rows over 32,768 keys at D = 256 took 0.091 ms with splits of
2048 keys and 0.154 ms with splits of 4096, which leave half of its processors idle.
"""


class HopperConfig(NamedTuple):
    """Sizes of one variant of the Hopper kernel. None of them changes bits.

    Attributes:
        k_stages: key tiles in flight.
        v_slots: chunks of 64 columns of V in flight.
        consumer_registers, loader_registers: of a thread of either role.
    """

    k_stages: int
    v_slots: int
    consumer_registers: int
    loader_registers: int


HOPPER = {
    # (head dim, how V comes: "copied" in bulk, "loaded" as it is, "converted" or "decoded"). Shared memory
    # bounds the slots. With 216 registers the consumers of decoded values spill none: 4096 x 4096 rows took
    # 0.597 ms on an H200, with 192 of them 0.616 ms; the loaders of float32 then spill: 0.983 for 0.757 ms.
    (256, "copied"): HopperConfig(2, 8, 240, 24),
    (256, "loaded"): HopperConfig(2, 8, 192, 64),
    (256, "converted"): HopperConfig(1, 6, 192, 64),
    (256, "decoded"): HopperConfig(1, 6, 216, 40),
    (512, "copied"): HopperConfig(1, 4, 240, 24),
    (512, "loaded"): HopperConfig(1, 4, 192, 64),
    (512, "converted"): HopperConfig(1, 2, 192, 64),
    (512, "decoded"): HopperConfig(1, 2, 216, 40),
}


def hopper_variant(form: str, *, bulk: bool) -> str:
    """How V of a form (``f16``, ``f32`` for bfloat16 too, ``codes``) comes, in `HOPPER`'s words."""
    return "copied" if bulk else {"f16": "loaded", "f32": "converted", "codes": "decoded"}[form]


PORTABLE_SPLIT = {64: 2048, 128: 2048, 256: 2048, 512: 4096}
"""Keys of a split by head dim, of the portable kernel."""


class PortableConfig(NamedTuple):
    """Sizes of the portable kernel. They hold for every call of a device and head dim, whatever its S: other
    sizes may mean other instructions, and other bits.

    Attributes:
        rows: packed query rows of a program.
        tile: keys of a tile.
        columns: columns of V of a program.
        warps: of a program.
        stages: tiles of K and V in flight.
    """

    rows: int
    tile: int
    columns: int
    warps: int
    stages: int


PORTABLE = {
    # (compute capability, head dim), chosen by the registers that the compiled code spills inside the loop
    # over tiles: none or few where there is no mask.
    (80, 64): PortableConfig(64, 64, 64, 4, 1),
    (80, 128): PortableConfig(64, 64, 128, 8, 1),
    (80, 256): PortableConfig(32, 64, 256, 8, 1),
    (80, 512): PortableConfig(32, 64, 256, 8, 1),
    # As sm80, in the 99 KiB of shared memory that there are.
    (89, 64): PortableConfig(64, 64, 64, 4, 1),
    (89, 128): PortableConfig(64, 64, 128, 8, 1),
    (89, 256): PortableConfig(32, 64, 256, 8, 1),
    (89, 512): PortableConfig(32, 64, 256, 8, 1),
    # 64 rows for each of two warpgroups: wgmma. Head dims 256 and 512 have a kernel of their own there.
    (90, 64): PortableConfig(128, 64, 64, 8, 2),
    (90, 128): PortableConfig(128, 64, 128, 8, 2),
    (90, 256): PortableConfig(128, 64, 256, 8, 1),
    (90, 512): PortableConfig(128, 64, 256, 8, 1),
    # With 32 rows Triton takes mma.sync, as before Hopper. From 64 rows on it takes tcgen05, and Triton 3.6
    # then fails, or makes an empty program of this kernel.
    (100, 64): PortableConfig(32, 64, 64, 4, 1),
    (100, 128): PortableConfig(32, 64, 128, 4, 1),
    (100, 256): PortableConfig(32, 64, 256, 8, 1),
    (100, 512): PortableConfig(32, 64, 256, 8, 1),
}
"""None has been timed. Those of sm80, sm89 and sm100 have been compiled and never run: there the kernel is
held to the oracle by Triton's interpreter alone.
"""


def portable_family(capability: tuple[int, int], *, is_amd: bool) -> int:
    """The row of `PORTABLE` for a device: the newest that is not newer, or that has no more shared memory."""
    if is_amd:
        return 80
    major, minor = capability
    if (major, minor) in ((8, 0), (8, 7)):
        return 80
    if major in (8, 12):  # 99 KiB of shared memory
        return 89
    return 90 if major == 9 else 100
