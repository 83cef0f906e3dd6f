"""Where there is no GPU, the tests that need one are skipped."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU, whatever ``--device`` says."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return torch.device("cuda")
