"""How V lies in a cache: dense rows, or codes and norms. Allocates, converts rows, shows what is stored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warmattn.codec.codebook import Codebook
from warmattn.codec.rotation import check_signs, default_signs
from warmattn.codec.turboquant import encode_rows
from warmattn.codec.values import CodedValues, check_sf, norm_blocks
from warmattn.errors import InvalidInput

__all__ = ["FORMS", "Coded", "Dense", "Stores", "all_finite", "allocate", "value_form"]

Stores = dict[str, Tensor]
"""Tensors ``[B, Hk, rows, ...]`` by name: rows lie along axis 2 of every one."""

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_BITS = {"codes5": 5, "codes6": 6, "codes8": 8}
_ENCODABLE = (torch.float32, torch.float16, torch.bfloat16)
FORMS = (*_DTYPES, *_BITS)


class Dense(NamedTuple):
    """V as rows of one dtype."""

    dtype: torch.dtype

    def allocate(self, shape: Sequence[int], device: torch.device) -> Stores:
        """Room for rows ``[B, Hk, C, D]``, not written."""
        return {"v": allocate(shape, self.dtype, device)}

    def convert(self, v: Tensor) -> tuple[Stores, Tensor]:
        """Rows as they are stored, and whether all of them are finite: a bool scalar on their device."""
        rows = v.to(self.dtype)
        return {"v": rows}, all_finite(rows)

    def view(self, stores: Stores) -> Tensor:
        """V as `warmattn.attention` takes it."""
        return stores["v"]

    def tables(self) -> dict[str, Tensor]:
        """What a reader of the rows needs beside them."""
        return {}

    def names(self) -> dict[str, Any]:
        """What tells this form's tables and numbers from others."""
        return {}


class Coded(NamedTuple):
    """V as codes and norms, in the rotated domain."""

    codebook: Codebook
    signs: Tensor
    sf: float

    def allocate(self, shape: Sequence[int], device: torch.device) -> Stores:
        """Room for rows ``[B, Hk, C, D]``, not written."""
        norms = (*shape[:3], norm_blocks(shape[3]))
        return {
            "codes": allocate(shape, torch.uint8, device),
            "norms": allocate(norms, torch.float32, device),
        }

    def convert(self, v: Tensor) -> tuple[Stores, Tensor]:
        """Rows as they are stored, and whether all of them are finite: a bool scalar on their device."""
        x = v if v.dtype in _ENCODABLE else v.float()
        codes, norms, broken = encode_rows(x, self.codebook, self.signs, self.sf)
        return {"codes": codes, "norms": norms}, ~broken.any()

    def view(self, stores: Stores) -> CodedValues:
        """V as `warmattn.attention` takes it."""
        return CodedValues(stores["codes"], stores["norms"], self.codebook, self.sf, self.signs)

    def tables(self) -> dict[str, Tensor]:
        """What a reader of the rows needs beside them, float32."""
        return {"codebook": self.codebook.centroids, "signs": self.signs}

    def names(self) -> dict[str, Any]:
        """What tells this form's tables and numbers from others."""
        signs = hashlib.sha256(self.signs.cpu().numpy().astype("<f4").tobytes()).hexdigest()[:16]
        return {"codebook": self.codebook.identity, "signs": signs, "sf": self.sf}


def value_form(
    name: str,
    head_dim: int,
    device: torch.device,
    *,
    codebook: Codebook | None,
    signs: Tensor | None,
    sf: float,
) -> Dense | Coded:
    """The form called ``name``, one of `FORMS`, with the tables of its codec on ``device``.

    Raises:
        InvalidInput: an unknown form, a table that does not fit it, or a table for dense values.
    """
    op = "KVCache"
    if name not in FORMS:
        raise InvalidInput("values", expected=f"one of {', '.join(FORMS)}", got=repr(name), op=op)
    if name in _DTYPES:
        for operand, table in (("codebook", codebook), ("signs", signs)):
            if table is not None:
                raise InvalidInput(operand, expected=f"None with values={name!r}", got="one", op=op)
        return Dense(_DTYPES[name])
    if codebook is None:
        codebook = Codebook.lloyd_max(_BITS[name])
    elif not isinstance(codebook, Codebook):
        raise InvalidInput("codebook", expected="a Codebook", got=type(codebook).__name__, op=op)
    if codebook.bits != _BITS[name]:
        expected = f"{_BITS[name]} bits with values={name!r}"
        raise InvalidInput("codebook", expected=expected, got=codebook.bits, op=op)
    codebook.on(device)  # copied there now, not at the first append
    if signs is None:
        signs = default_signs(head_dim, device)
    else:
        if isinstance(signs, Tensor):
            signs = signs.detach().to(device, copy=True)  # the rows depend on it: no one else writes to it
        check_signs(signs, head_dim, device, op=op)
    check_sf(sf, "sf", head_dim, op=op)
    return Coded(codebook, signs, float(sf))


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of no particular content, to be written in and out of inference mode alike."""
    with torch.inference_mode(mode=False):
        return torch.empty(shape, dtype=dtype, device=device)


def all_finite(rows: Tensor) -> Tensor:
    """Whether every element is finite, a bool scalar on the rows' device.

    The least and the greatest tell, since NaN is both: one pass, where ``isfinite`` makes five.
    """
    least, greatest = rows.aminmax()
    return (least > -torch.inf) & (greatest < torch.inf)
