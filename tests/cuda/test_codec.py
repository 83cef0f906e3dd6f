"""The Triton kernels of the codec: their bits on Triton's interpreter, and their code for sm90."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compiling import compiling_only, resources, specialisations

from warmattn.backend.cuda import codec
from warmattn.codec.codebook import Codebook
from warmattn.codec.rotation import default_signs

HEAD_DIMS = (64, 128, 256, 512)


@pytest.mark.parametrize("where", ["interpreter", *(["gpu"] if torch.cuda.is_available() else [])])
def test_bits(where: str, request: pytest.FixtureRequest) -> None:
    """`codec_cases.py`, in its own process: its import decides if Triton compiles or interprets."""
    cases = Path(__file__).with_name("codec_cases.py")
    seed = f"--seed={request.config.getoption('--seed')}"
    environment = {**os.environ, "TRITON_INTERPRET": "1" if where == "interpreter" else "0"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", seed, str(cases)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def launch_everything(D: int, *lead: int, transposed: bool, offset: int) -> None:
    """Encode, decode and unrotate rows whose sizes, strides and addresses depend on the arguments."""
    book, signs = Codebook.lloyd_max(8), default_signs(D)
    shape = (*lead, D)

    def rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        memory = torch.zeros(torch.Size(shape).numel() + offset, dtype=dtype)[offset:].view(shape)
        return memory.transpose(0, 1) if transposed else memory

    x, codes = rows(torch.float16, *shape), rows(torch.uint8, *shape)
    norms = rows(torch.float32, *lead, max(1, D // 256))
    new = [torch.empty(x.shape, dtype=dtype) for dtype in (torch.uint8, torch.float32, torch.float32)]
    broken = torch.empty(x.shape[:-1], dtype=torch.bool)
    codec.encode(x, signs, book.centroids, 1.0, new[0], torch.empty(norms.shape), broken)
    codec.decode(codes, norms, book.centroids, 1.0, new[1])
    codec.unrotate(rows(torch.float32, *shape), signs, new[2])


@pytest.fixture
def kernels() -> list[Any]:
    """The three kernels, with nothing compiled."""
    kernels = [codec.encode_kernel, codec.decode_kernel, codec.unrotate_kernel]
    for kernel in kernels:
        kernel.device_caches.clear()
    return kernels


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_compiled_code(D: int, kernels: list[Any], tmp_path: Path) -> None:
    with compiling_only(tmp_path):
        launch_everything(D, 3, 5, transposed=False, offset=0)
        launch_everything(D, 16, 32, transposed=True, offset=16)
        launch_everything(D, 1, 1, transposed=True, offset=1)
    for kernel in kernels:
        # One whatever the sizes, strides and addresses.
        (compiled,) = specialisations(kernel)
        used = resources(compiled, tmp_path)
        assert used.stack == 0, f"{used}: registers are spilled"
        # Not one rounding for two operations, none that is only nearly right, no subnormal flushed.
        ptx = compiled.asm["ptx"]
        assert not re.findall(r"\b(?:fma|mad)\.\w+\.f\d+|\.(?:approx|full|ftz)\b", ptx)
        # Rows move 16 bytes at a time.
        assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", ptx)


def test_after_build_nothing_is_compiled(kernels: list[Any], tmp_path: Path) -> None:
    with compiling_only(tmp_path):
        codec.build(128, torch.device("cpu"))
        built = [len(specialisations(kernel)) for kernel in kernels]
        launch_everything(128, 16, 32, transposed=True, offset=16)
    assert built == [9, 3, 1]
    assert [len(specialisations(kernel)) for kernel in kernels] == built


def test_rows_are_read_in_place() -> None:
    """A copy only where the memory does not suit the vector loads or the three axes of a launch."""
    cache = torch.zeros(2, 40, 3, 256, dtype=torch.float16).transpose(1, 2)[:, :, 8:31]
    norms = torch.zeros(2, 3, 40, 1)[:, :, 8:31]
    views = codec.row_views(cache, norms)
    for view, tensor in zip(views, (cache, norms), strict=True):
        assert view.shape == (2, 3, 23, tensor.shape[-1])
        assert view.data_ptr() == tensor.data_ptr()
    assert codec.row_views(cache.contiguous())[0].shape == (1, 1, 2 * 3 * 23, 256)
    for unsuited in (
        torch.zeros(3 * 256 + 1, dtype=torch.float16)[1:].view(3, 256),
        torch.zeros(3, 257, dtype=torch.float16)[:, :256],
        torch.zeros(3, 256, 2)[..., 0],
        torch.zeros(2, 3, 4, 5, 64).permute(3, 0, 2, 1, 4),
    ):
        (view,) = codec.row_views(unsuited)
        assert view.data_ptr() != unsuited.data_ptr()
        assert view.is_contiguous()
        assert view.shape == (1, 1, unsuited.numel() // unsuited.shape[-1], unsuited.shape[-1])
