"""One piece of working memory per device and stream."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["Workspace"]

_SMALLEST = 1 << 20


class Workspace:
    """Bytes that consecutive calls on one stream share: a call's kernels run after the last call's.

    It grows outside graph capture only. A graph keeps the addresses it was captured with, so a buffer that
    a capture has seen is never given back.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held from `take` until the last kernel that uses the memory is launched."""
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._captured: dict[int, Tensor] = {}

    def take(self, size: int, device: torch.device, stream: int) -> Tensor:
        """uint8 ``[>= size]``, aligned to 512 bytes, uninitialised. ``device`` is the current one, ``stream``
        its current stream.
        """
        key = (device.index, stream)
        buffer = self._buffers.get(key)
        capturing = torch.cuda.is_current_stream_capturing()
        if buffer is None or buffer.numel() < size:
            if capturing:
                return torch.empty(size, dtype=torch.uint8, device=device)
            buffer = torch.empty(max(_SMALLEST, size), dtype=torch.uint8, device=device)
            self._buffers[key] = buffer
        if capturing:
            self._captured[buffer.data_ptr()] = buffer
        return buffer
