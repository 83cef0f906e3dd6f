"""Codebooks: the Lloyd-Max quantiser of the normal distribution, computed, or any table a user loads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from warmattn.codec.tables import is_json, read_json_section, read_tensor
from warmattn.errors import InvalidInput

__all__ = ["BITS", "Codebook", "midpoints"]

BITS = (5, 6, 8)


class Codebook:
    """2^bits reproduction values for unit-variance data, and the boundaries between them.

    Attributes:
        centroids: f32 ``[2^bits]`` on the CPU, finite, strictly increasing; do not write to it.
        boundaries: f32 ``[2^bits − 1]`` on the CPU, the `midpoints` of the centroids.
        bits: 5, 6 or 8.
        identity: 16 hex digits that name the table: equal exactly when the centroids are equal bit for bit.
    """

    def __init__(self, centroids: Tensor | Sequence[float]) -> None:
        """Take any table of 32, 64 or 256 values; they are rounded to F32 and copied.

        Raises:
            InvalidInput: another count, a value not finite, or values not strictly increasing in F32.
        """
        table = torch.as_tensor(centroids, dtype=torch.float32, device="cpu").detach().clone()
        if table.ndim != 1 or table.numel() not in [2**bits for bits in BITS]:
            raise InvalidInput(
                "centroids", expected="shape [32], [64] or [256]", got=list(table.shape), op="Codebook"
            )
        if not table.isfinite().all():
            worst = table[~table.isfinite()][0].item()
            raise InvalidInput("centroids", expected="finite F32 values", got=worst, op="Codebook")
        falls = (table[1:] <= table[:-1]).nonzero()
        if falls.numel():
            i = int(falls[0])
            pair = f"{table[i].item()} then {table[i + 1].item()} at {i}"
            raise InvalidInput(
                "centroids", expected="strictly increasing F32 values", got=pair, op="Codebook"
            )
        self.centroids = table
        self.boundaries = midpoints(table)
        self.bits = table.numel().bit_length() - 1
        self.identity = hashlib.sha256(table.numpy().astype("<f4").tobytes()).hexdigest()[:16]
        self._copies = {table.device: table}

    def __repr__(self) -> str:
        return f"Codebook(bits={self.bits}, identity={self.identity!r})"

    def on(self, device: torch.device) -> Tensor:
        """The centroids on ``device``, f32 ``[2^bits]``: copied once, then the same tensor at every call."""
        if device not in self._copies:
            self._copies[device] = self.centroids.to(device)
        return self._copies[device]

    @staticmethod
    def lloyd_max(bits: int) -> Codebook:
        """The optimal quantiser of N(0, 1) with 2^bits levels, converged in float64; one object per bits.

        Mean squared error 2.504668e-3 (5 bits), 6.442397e-4 (6), 4.118508e-5 (8).

        Raises:
            InvalidInput: bits is not 5, 6 or 8.
        """
        if bits not in BITS:
            raise InvalidInput("bits", expected="5, 6 or 8", got=bits, op="Codebook.lloyd_max")
        return _lloyd_max(bits)

    @classmethod
    def load(cls, path: str | Path, bits: int | None = None) -> Codebook:
        """Read a table written by `save`, or by other software as JSON.

        A safetensors file holds one tensor ``centroids``. A ``.json`` file holds
        ``{"codebooks": {"5": [...], "6": [...], "8": [...]}}``; ``bits`` says which, and may be left out
        when there is only one.

        Raises:
            InvalidInput: no such table, not the bits asked for, or not a codebook.
        """
        if is_json(path):
            tables = read_json_section(path, "codebooks", op="Codebook.load")
            key = next(iter(tables)) if bits is None and len(tables) == 1 else str(bits)
            if key not in tables:
                raise InvalidInput("bits", expected=f"one of {sorted(tables)}", got=bits, op="Codebook.load")
            codebook = cls(tables[key])
        else:
            codebook = cls(read_tensor(path, "centroids", op="Codebook.load"))
        if bits not in (None, codebook.bits):
            raise InvalidInput("bits", expected=f"the file's {codebook.bits}", got=bits, op="Codebook.load")
        return codebook

    def save(self, path: str | Path) -> None:
        """Write the centroids as a safetensors file that `load` reads back bit for bit."""
        save_file({"centroids": self.centroids}, path, metadata={"format": "warmattn.codebook"})


def midpoints(centroids: Tensor) -> Tensor:
    """The boundary between each two neighbours, fl32(fl32(a + b) / 2): f32 ``[N]`` -> f32 ``[N − 1]``."""
    return (centroids[:-1] + centroids[1:]) * 0.5


@cache
def _lloyd_max(bits: int) -> Codebook:
    half = _positive_centroids(2 ** (bits - 1))
    return Codebook(torch.from_numpy(np.concatenate((-half[::-1], half))))


def _positive_centroids(levels: int) -> np.ndarray:
    """The positive half of the Lloyd-Max quantiser of N(0, 1) with 2·levels values, float64.

    Lloyd (1957; IEEE Trans. Inf. Theory 28(2), 1982) and Max (IRE Trans. Inf. Theory 6(1), 1960): each
    centroid is the mean of its cell and each boundary the midpoint of its neighbours. The normal density is
    log-concave, so there is one solution (Fleischer, 1964). Their alternation needs of the order of levels²
    steps; the same equations are solved here by Newton's method, whose Jacobian is tridiagonal, from the
    asymptotically optimal levels of Panter & Dite (Proc. IRE 39(1), 1951), so in about five steps.
    """
    quantile = (np.arange(levels) + 0.5) / levels
    c = np.array([math.sqrt(3) * NormalDist().inv_cdf(0.5 + q / 2) for q in quantile])
    while True:
        edges = np.concatenate(([0.0], (c[:-1] + c[1:]) / 2, [math.inf]))
        density = np.array([math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in edges])
        tail = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in edges])
        mass = tail[:-1] - tail[1:]
        mean = (density[:-1] - density[1:]) / mass
        # d mean / d edge = density · |edge − mean| / mass, and an edge moves half as far as either neighbour.
        lower = density[1:-1] * (mean[1:] - edges[1:-1]) / mass[1:] / 2
        upper = density[1:-1] * (edges[1:-1] - mean[:-1]) / mass[:-1] / 2
        slope = (
            np.diag(np.append(0.0, lower) + np.append(upper, 0.0)) + np.diag(lower, -1) + np.diag(upper, 1)
        )
        step = np.linalg.solve(np.eye(levels) - slope, mean - c)
        c = c + step
        # Quadratic convergence: past 1e-9 the next error is at the noise of float64.
        if np.abs(step).max() < 1e-9:
            return c
