"""The codec's sequence once more, one NumPy float32 scalar at a time, sharing nothing with the package."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

F32 = np.float32


def rotate(row: np.ndarray, signs: np.ndarray) -> list[np.float32]:
    return scale(butterfly([F32(a) * F32(s) for a, s in zip(row, signs, strict=True)]))


def unrotate(row: np.ndarray, signs: np.ndarray) -> list[np.float32]:
    return [a * F32(s) for a, s in zip(scale(butterfly([F32(a) for a in row])), signs, strict=True)]


def butterfly(y: list[np.float32]) -> list[np.float32]:
    h = 1
    while h < len(y):
        for j in range(len(y)):
            if not j & h:
                y[j], y[j + h] = y[j] + y[j + h], y[j] - y[j + h]
        h *= 2
    return y


def scale(y: list[np.float32]) -> list[np.float32]:
    factor = F32(1 / math.sqrt(len(y)))
    return [a * factor for a in y]


def tree_sum(t: list[np.float32]) -> np.float32:
    while len(t) > 1:
        half = len(t) // 2
        t = [t[j] + t[j + half] for j in range(half)]
    return t[0]


def normalise(row: np.ndarray, signs: np.ndarray, sf: float) -> tuple[np.ndarray, np.ndarray]:
    """float32 norms ``[n]`` and u ``[D]`` of one finite row ``[D]``."""
    y = rotate(row, signs)
    D, width = len(y), min(len(y), 256)
    norms, u = [], []
    for start in range(0, D, width):
        block = y[start : start + width]
        total = tree_sum([a * a for a in block])
        norm = np.sqrt(total) if D <= 256 else np.sqrt(total / F32(256))
        factor = F32(math.sqrt(D)) if D <= 256 else F32(sf)
        u += [(a * factor) / norm if norm else F32(0) for a in block]
        norms.append(norm)
    return np.array(norms, dtype=np.float32), np.array(u, dtype=np.float32)


def encode_row(
    row: np.ndarray, signs: np.ndarray, centroids: np.ndarray, sf: float
) -> tuple[np.ndarray, np.ndarray]:
    """uint8 codes ``[D]`` and float32 norms ``[n]`` of one finite row ``[D]``."""
    boundaries = np.array([(a + b) / F32(2) for a, b in pairwise(centroids)])
    norms, u = normalise(row, signs, sf)
    return np.searchsorted(boundaries, u, side="left").astype(np.uint8), norms


def decode_row(codes: np.ndarray, norms: np.ndarray, centroids: np.ndarray, sf: float) -> np.ndarray:
    """float32 values ``[D]`` of one row of codes."""
    D = len(codes)
    weights = [norm * F32(1 / math.sqrt(D)) if D <= 256 else norm / F32(sf) for norm in norms]
    return np.array(
        [centroids[int(code) % len(centroids)] * weights[j // 256] for j, code in enumerate(codes)]
    )
