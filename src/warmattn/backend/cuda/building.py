"""Compile pipelines side by side: one process each, run as ``python -m warmattn.backend.cuda.building``.

Compiled kernels go to Triton's cache on disk, whose keys hold the sources, the versions and the device; the
process that asked then finds them there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from warmattn.pipelines import PipelineKey

__all__ = ["build_side_by_side"]


def build_side_by_side(keys: Sequence[PipelineKey], device: str) -> None:
    """Compile what the keys need in as many processes as there are processors. A failure is left for the
    caller's own build to meet, which can name the pipeline.
    """
    processes: list[subprocess.Popen[bytes]] = []
    shares = min(len(keys), os.cpu_count() or 1)
    for share in range(shares):
        task = json.dumps([device, [[key.name, key.constants] for key in keys[share::shares]]])
        command = [sys.executable, "-m", "warmattn.backend.cuda.building"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write(task.encode())
        process.stdin.close()
        processes.append(process)
    for process in processes:
        process.wait()


def main() -> None:
    import torch

    from warmattn.backend.cuda import BACKEND

    device, keys = json.load(sys.stdin)
    for name, constants in keys:
        key = PipelineKey(name, tuple((index, on) for index, on in constants))
        BACKEND.build(key, torch.device(device))


if __name__ == "__main__":
    main()
