"""Which bytes a strided tensor occupies: the questions behind "an output overlaps an input"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

__all__ = ["lie_apart", "overlap", "repeats_memory", "span"]


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


def span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def lie_apart(tensors: Sequence[Tensor | None], spans: Sequence[int], *, last: int) -> bool:
    """Whether the addresses that the last few tensors span are theirs alone. Quicker than `overlap`, and no
    more than a hint when it says no: interleaved views do not lie apart.
    """
    starts = [None if t is None else t.data_ptr() for t in tensors]
    for i in range(len(tensors) - last, len(tensors)):
        start = starts[i]
        if start is None:
            continue
        end = start + spans[i]
        for other, size in zip(starts[:i], spans[:i], strict=True):
            if other is not None and other < end and start < other + size:
                return False
    return True


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
