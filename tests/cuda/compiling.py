"""Compile for a GPU what host code would launch, without one.

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

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that a program may use, by compute capability."""


def _device(capability: int) -> int:
    """A device of no machine: Triton keeps compiled kernels by device, and these must never be launched."""
    return (1 << 16) + capability


class CompilingDriver:
    """What Triton asks of a driver between binding the arguments and launching."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[capability]},
            load_binary=lambda name, binary, shared, device: (object(), object(), 0, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return _device(self.capability)

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None


@contextmanager
def compiling_only(cache: Path, capability: int = 90) -> Iterator[None]:
    """Launches compile and do nothing else; binaries go to the folder ``cache``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", CompilingDriver(capability))
        patch.setattr(knobs.cache, "dir", str(cache))
        yield


def specialisations(kernel: Any, capability: int = 90) -> list[CompiledKernel]:
    """What the launches of a ``@triton.jit`` function in `compiling_only` have compiled so far."""
    return list(kernel.device_caches[_device(capability)][0].values())


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
