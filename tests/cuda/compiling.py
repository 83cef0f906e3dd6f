"""Compile for sm90 what host code would launch, without a GPU.

In `compiling_only` Triton has a driver that knows the target and launches nothing. Host code runs as it is,
on CPU tensors, through Triton's own binding and specialisation; `specialisations` then are the kernels it
needed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

DEVICE = 1 << 16
"""A device of no machine: Triton keeps compiled kernels by device, and these must never be launched."""


class CompilingDriver:
    """What Triton asks of a driver between binding the arguments and launching."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232_448},
        load_binary=lambda name, binary, shared, device: (object(), object(), 0, 0, 1024),
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None


@contextmanager
def compiling_only(cache: Path) -> Iterator[None]:
    """Launches compile and do nothing else; binaries go to the folder ``cache``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", CompilingDriver())
        patch.setattr(knobs.cache, "dir", str(cache))
        yield


def specialisations(kernel: Any) -> list[CompiledKernel]:
    """What the launches of a ``@triton.jit`` function in `compiling_only` have compiled so far."""
    return list(kernel.device_caches[DEVICE][0].values())


class Resources(NamedTuple):
    """Of one thread: 32-bit registers, and bytes of stack, which hold spilled registers."""

    registers: int
    stack: int


def resources(compiled: CompiledKernel, folder: Path) -> Resources:
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    report = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return Resources(int(found[1]), int(found[2]))
