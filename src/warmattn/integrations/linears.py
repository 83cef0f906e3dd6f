"""Linear layers with independent rows: to see what attention alone does to a model's bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["linears_by_row"]


@contextmanager
def linears_by_row(model: torch.nn.Module) -> Iterator[None]:
    """Inside, every `torch.nn.Linear` of ``model`` computes one row at a time.

    The bits of a matrix product depend on how many rows it has: BLAS cuts it up accordingly. So a prompt read
    in two parts differs from the same prompt read at once, whatever the attention does. Row by row is slow,
    but free of that.
    """
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for layer in layers:
        vars(layer)["forward"] = partial(_by_row, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _by_row(layer: torch.nn.Linear, rows: Tensor) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    products = [linear(row, layer.weight, layer.bias) for row in flat]
    return torch.stack(products).unflatten(0, rows.shape[:-1])
