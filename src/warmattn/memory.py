"""Which bytes a strided tensor occupies: the questions behind "an output overlaps an input"."""

from __future__ import annotations

import numpy as np
from torch import Tensor

__all__ = ["overlap", "repeats_memory"]


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte. Exact: interleaved views of one buffer do not overlap."""
    (a_start, a_end), (b_start, b_end) = _storage(a), _storage(b)
    if a_end <= b_start or b_end <= a_start:  # nearly always, and an eighth of the cost
        return False
    return np.shares_memory(_addresses(a), _addresses(b))


def repeats_memory(tensor: Tensor) -> bool:
    """Whether two indices may name one element: an axis steps less than what the finer axes span."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Start and end of the memory that the tensor is a view of."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


class _AddressRange:
    """A tensor's addresses as NumPy describes an array; nothing is read, so any device will do."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def _addresses(tensor: Tensor) -> np.ndarray:
    return np.asarray(_AddressRange(tensor))
