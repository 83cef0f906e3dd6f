"""CodedValues: V as codes and norms, and what makes such a pair well formed."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from warmattn.codec.codebook import Codebook
from warmattn.errors import InvalidInput, Unsupported

__all__ = ["HEAD_DIMS", "CodedValues", "check_coded", "check_head_dim", "norm_blocks"]

HEAD_DIMS = (64, 128, 256, 512)

# fl32(x) is finite and > 0 exactly when x lies strictly between: half the least subnormal, and half a unit
# above the largest F32; both ends are ties that round to the even neighbour, 0 and infinity.
_F32_POSITIVE = (float.fromhex("0x1p-150"), float.fromhex("0x1.ffffffp127"))


@dataclass(frozen=True, eq=False)
class CodedValues:
    """V in the codec's form: value d of a row is centroid[code] times the weight of its block's norm.

    The values lie in the rotated domain, and attention is linear in V, so its output comes out rotated:
    ``unrotate(out, signs=coded.signs)`` brings it back. Building one checks only the types, so it is cheap
    on the path of a call; `attention`, `decode_values` and `encode_values` check the rest (`check_coded`).

    Attributes:
        codes: uint8 ``[..., D]``; with 5 or 6 bits only the low bits count. Last axis contiguous.
        norms: f32 ``[..., n]``, n = max(1, D div 256), any strides; ``[...]`` is accepted where n = 1.
        codebook: the table the codes index.
        sf: scale of the D = 512 form, finite and > 0 in F32; ignored for D ≤ 256.
        signs: f32 ``[D]`` of ±1 that the rotation used; ``None`` means ``default_signs(D)``.
        nonfinite_rows: rows that were not finite and were encoded as zero rows.
    """

    codes: Tensor
    norms: Tensor
    codebook: Codebook
    sf: float = 1.0
    signs: Tensor | None = None
    nonfinite_rows: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("codes", "norms", "signs"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and not (name == "signs" and value is None):
                raise InvalidInput(name, expected="a tensor", got=type(value).__name__, op="CodedValues")
        if not isinstance(self.codebook, Codebook):
            got = type(self.codebook).__name__
            raise InvalidInput("codebook", expected="a Codebook", got=got, op="CodedValues")

    @property
    def bits(self) -> int:
        """Bits per code: 5, 6 or 8."""
        return self.codebook.bits

    @property
    def head_dim(self) -> int:
        """D, the number of values in a row."""
        return self.codes.shape[-1]

    @property
    def block_norms(self) -> Tensor:
        """The norms as a view ``[..., n]``, whichever of the two accepted shapes they have."""
        return self.norms.unsqueeze(-1) if self.norms.ndim < self.codes.ndim else self.norms


def norm_blocks(head_dim: int) -> int:
    """n, the number of norms in a row of ``head_dim`` values: one for each 256, at least one."""
    return max(1, head_dim // 256)


def check_head_dim(head_dim: int, *, op: str) -> None:
    """Refuse a head dim the project does not serve.

    Raises:
        Unsupported: not 64, 128, 256 or 512.
    """
    if head_dim not in HEAD_DIMS:
        raise Unsupported(f"head dim {head_dim}; supported are {', '.join(map(str, HEAD_DIMS))}", op=op)


def check_coded(coded: CodedValues, name: str, *, op: str) -> None:
    """Refuse codes, norms or sf that do not make one coded V, the operand ``name``. Reads no tensor value.

    Neither the rows (norms may be allocated longer than codes), nor devices, nor strides are compared here:
    the caller knows how many rows it reads, and reports the rest in its own order.

    Raises:
        Unsupported: head dim.
        InvalidInput: dtype or rank of codes or norms, the norms' last axis, or (D = 512) sf.
    """
    codes, norms = coded.codes, coded.norms
    if codes.dtype != torch.uint8:
        raise InvalidInput(f"{name}.codes", expected="uint8", got=codes.dtype, op=op)
    if codes.ndim == 0:
        raise InvalidInput(f"{name}.codes", expected="shape [..., D]", got=[], op=op)
    check_head_dim(coded.head_dim, op=op)
    if norms.dtype != torch.float32:
        raise InvalidInput(f"{name}.norms", expected="float32", got=norms.dtype, op=op)
    n = norm_blocks(coded.head_dim)
    with_axis = norms.ndim == codes.ndim and norms.shape[-1] == n
    without_axis = norms.ndim == codes.ndim - 1 and n == 1
    if not (with_axis or without_axis):
        expected = f"shape [..., {n}]{' or [...]' if n == 1 else ''} beside codes {list(codes.shape)}"
        raise InvalidInput(f"{name}.norms", expected=expected, got=list(norms.shape), op=op)
    check_sf(coded.sf, f"{name}.sf", coded.head_dim, op=op)


def check_sf(sf: float, name: str, head_dim: int, *, op: str) -> None:
    """Refuse an sf that is not finite and > 0 once rounded to F32; only D = 512 uses and checks it.

    Raises:
        InvalidInput: not a number, or its F32 value is 0, negative, infinite or NaN.
    """
    if norm_blocks(head_dim) == 1:
        return
    if not isinstance(sf, Real) or not _F32_POSITIVE[0] < sf < _F32_POSITIVE[1]:
        raise InvalidInput(name, expected="a number finite and > 0 in F32", got=sf, op=op)
