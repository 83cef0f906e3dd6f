"""The named shapes that tests, ``warmattn verify`` and the benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass

from warmattn.visibility import Causal, Visibility, Window

__all__ = ["CPU_WORKLOADS", "H200_WORKLOADS", "Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """One attention shape, batch 1.

    Attributes:
        name: short name in tables.
        head_dim, heads, kv_heads: D, H, Hk.
        rows: S, the last rows of the sequence.
        keys: T.
        window: ``None`` is causal.
    """

    name: str
    head_dim: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    window: int | None = None

    @property
    def q_offset(self) -> int:
        return self.keys - self.rows

    @property
    def first_key(self) -> int:
        """The first key that some row sees."""
        return 0 if self.window is None else max(0, self.q_offset - self.window + 1)

    @property
    def visible(self) -> Visibility:
        if self.window is None:
            return Causal(self.q_offset)
        return Window(self.window, self.q_offset)


CPU_WORKLOADS = (
    Workload("A cold 2048, D256", 256, 8, 4, 2048, 2048),
    Workload("B window 512, 512 x 8192, D256", 256, 8, 4, 512, 8192, 512),
    Workload("C resume 64 x 8192, D256", 256, 8, 4, 64, 8192),
    Workload("D cold 1024, D512", 512, 8, 2, 1024, 1024),
    Workload("E resume 64 x 8192, D512", 512, 8, 2, 64, 8192),
    Workload("F decode 1 x 8192, D512", 512, 8, 2, 1, 8192),
)
"""Cold prefills, warm resumes and a decode step of Gemma-like layers, sized for a few CPU cores."""

H200_WORKLOADS = (
    Workload("L", 256, 16, 8, 16, 64),
    Workload("S1", 256, 16, 8, 4096, 4096),
    Workload("S2", 256, 16, 8, 2048, 32768, 1024),
    Workload("S3", 256, 16, 8, 512, 32768),
    Workload("S8", 256, 16, 8, 16, 32768),
    Workload("S4", 512, 16, 2, 4096, 4096),
    Workload("S5", 512, 16, 2, 512, 32768),
    Workload("S6", 512, 16, 2, 16, 131072),
    Workload("S7", 512, 16, 2, 2048, 65536),
)
"""Cold prefills and warm resumes of Gemma-like layers, sized for one data-centre GPU. L is so small that the
launch is all it takes.
"""
