"""The rotation of the codec: a fixed ±1 vector, then the Walsh-Hadamard transform.

The transform is the butterfly network of Fino & Algazi, "Unified Matrix Treatment of the Fast
Walsh-Hadamard Transform", IEEE Trans. Computers C-25(11), 1976, in natural (Sylvester) order. A random
rotation makes the coordinates of any row close to independent normals, which is what lets one scalar
codebook serve all of them (Zandieh et al., "TurboQuant", arXiv:2504.19874, 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from warmattn.codec.tables import is_json, read_json_section, read_tensor
from warmattn.errors import InvalidInput

__all__ = ["check_signs", "default_signs", "fwht", "hadamard_matrix", "load_signs", "save_signs"]

SIGN_SEED = 0x7761726D6174746E  # "warmattn" in ASCII; part of the format, never to change
_MASK64 = (1 << 64) - 1


def _require_power_of_two(n: int, op: str) -> None:
    if n < 1 or n & (n - 1):
        raise InvalidInput("n", expected="a power of two", got=n, op=op)


def hadamard_matrix(n: int) -> Tensor:
    """The Sylvester matrix H, f32 ``[n, n]`` of ±1, symmetric, with H·H = n·I: what `fwht` multiplies by.

    Raises:
        InvalidInput: n is not a power of two.
    """
    _require_power_of_two(n, "hadamard_matrix")
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def fwht(x: Tensor) -> Tensor:
    """H·x for each row of ``x``, unnormalised: f32 ``[N, n]`` of any strides -> a new contiguous ``[N, n]``.

    The order is part of the format, so that any kernel can reproduce the bits: for h = 1, 2, 4, ..., n/2,
    every pair (j, j + h) with bit h of j clear becomes (x[j] + x[j + h], x[j] − x[j + h]), one F32 rounding
    each. Applied twice it multiplies by n.

    Raises:
        InvalidInput: n is not a power of two.
    """
    n = x.shape[-1]
    _require_power_of_two(n, "fwht")
    y = x.clone(memory_format=torch.contiguous_format)
    h = 1
    while h < n:
        low, high = y.view(-1, n // (2 * h), 2, h).unbind(2)
        difference = low - high
        low += high
        high.copy_(difference)
        h *= 2
    return y


def default_signs(head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """The sign vector used when none is given: f32 ``[head_dim]`` of ±1, fixed forever.

    Sign j is minus when the top bit of output j of SplitMix64 (Steele, Lea & Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014) seeded with `SIGN_SEED` is set; a shorter vector is a
    prefix of a longer one. The tensor is cached and shared: do not write to it.
    """
    if torch.compiler.is_compiling():  # a graph holds signs of its own: it cannot trace the cache
        return _signs_from_bits(_SIGN_BITS[:head_dim]).to(device)
    return _default_signs(head_dim, torch.device(device))


@cache
def _default_signs(head_dim: int, device: torch.device) -> Tensor:
    return _signs_from_bits(_SIGN_BITS[:head_dim]).to(device)


def _signs_from_bits(bits: Sequence[int]) -> Tensor:
    """f32 ±1 on the CPU, minus where a bit is set, whatever torch's default dtype and device are."""
    return torch.tensor([-1.0 if bit else 1.0 for bit in bits], dtype=torch.float32, device="cpu")


def _splitmix64(index: int) -> int:
    z = (SIGN_SEED + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


_SIGN_BITS = [_splitmix64(j) >> 63 for j in range(512)]  # for the largest head dim


def check_signs(signs: Tensor, head_dim: int, device: torch.device, *, op: str) -> None:
    """Refuse a sign vector that is not f32 ``[head_dim]`` of exactly ±1 on ``device``.

    The values of a vector on a GPU are not read by the host; there ±1 is the caller's promise.

    Raises:
        InvalidInput: dtype, shape, device or (on the CPU) a value is wrong.
    """
    if not isinstance(signs, Tensor):
        raise InvalidInput("signs", expected="a tensor", got=type(signs).__name__, op=op)
    if signs.dtype != torch.float32:
        raise InvalidInput("signs", expected="float32", got=signs.dtype, op=op)
    if tuple(signs.shape) != (head_dim,):
        raise InvalidInput("signs", expected=f"shape [{head_dim}]", got=list(signs.shape), op=op)
    if signs.device != device:
        raise InvalidInput("signs", expected=f"device {device}", got=signs.device, op=op)
    if device.type == "cpu":
        wrong = signs[signs.abs() != 1]
        if wrong.numel():
            raise InvalidInput("signs", expected="only 1 and -1", got=wrong[0].item(), op=op)


def load_signs(path: str | Path, head_dim: int) -> Tensor:
    """The sign vector for ``head_dim`` stored at ``path``, f32 ``[head_dim]`` of ±1 on the CPU.

    Two forms are read. A safetensors file holds one tensor ``signs``, as `save_signs` writes it. A ``.json``
    file holds ``{"signs": {"256": [byte, ...]}}``: sign j is bit j mod 8, least significant first, of byte
    j div 8, and a set bit means minus.

    Raises:
        InvalidInput: no vector for this head dim, or not one of ±1.
    """
    op = "load_signs"
    signs = _signs_from_json(path, head_dim) if is_json(path) else read_tensor(path, "signs", op=op)
    check_signs(signs, head_dim, torch.device("cpu"), op=op)
    return signs


def _signs_from_json(path: str | Path, head_dim: int) -> Tensor:
    vectors = read_json_section(path, "signs", op="load_signs")
    packed = vectors.get(str(head_dim))
    if packed is None:
        raise InvalidInput("head_dim", expected=f"one of {sorted(vectors)}", got=head_dim, op="load_signs")
    if len(packed) * 8 != head_dim or not all(isinstance(byte, int) and 0 <= byte <= 255 for byte in packed):
        raise InvalidInput("signs", expected=f"{head_dim // 8} bytes", got=packed, op="load_signs")
    return _signs_from_bits([packed[j // 8] >> (j % 8) & 1 for j in range(head_dim)])


def save_signs(signs: Tensor, path: str | Path) -> None:
    """Write a ±1 vector, f32 ``[head_dim]``, in the safetensors form that `load_signs` reads."""
    check_signs(signs, signs.numel(), signs.device, op="save_signs")
    save_file({"signs": signs.contiguous()}, path, metadata={"format": "warmattn.signs"})
