"""Frozen kernel configurations, each chosen by the measurement that stands beside it in
``benchmarks/results``. Nothing is tuned at run time: another configuration could mean other bits.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HOPPER", "HOPPER_SPLIT", "HopperConfig"]

HOPPER_SPLIT = {256: 2048, 512: 4096}
"""Keys of a split by head dim."""


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
    # (head dim, "copied" in bulk, "loaded" as it is, or "converted"); shared memory is what bounds them
    (256, "copied"): HopperConfig(2, 8, 240, 24),
    (256, "loaded"): HopperConfig(2, 8, 208, 48),
    (256, "converted"): HopperConfig(1, 6, 192, 64),
    (512, "copied"): HopperConfig(1, 4, 240, 24),
    (512, "loaded"): HopperConfig(1, 4, 208, 48),
    (512, "converted"): HopperConfig(1, 2, 192, 64),
}
