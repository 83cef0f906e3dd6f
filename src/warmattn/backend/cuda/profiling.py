"""What profilers learn of a launch: the pipeline's label, its floating-point operations and bytes."""

from __future__ import annotations

import threading
from typing import Any

from warmattn.call import AttentionCall
from warmattn.cost import flops, least_bytes
from warmattn.pipelines import PipelineKey

__all__ = ["launching", "metadata"]

_THREAD = threading.local()


def launching(call: AttentionCall) -> None:
    """Say which call this thread's next kernels belong to."""
    _THREAD.call = call


def metadata(grid: Any, kernel: Any, arguments: Any) -> dict[str, Any]:
    """Triton's ``launch_metadata``; asked for only while a profiler listens."""
    call: AttentionCall = _THREAD.call
    return {"name": PipelineKey.of(call).label, "flops": flops(call), "bytes": least_bytes(call)}
