"""The devices whose bits are held to the sequence: the CPU, and a CUDA device where there is one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
