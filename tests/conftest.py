"""One seed for the whole run: printed first, and by every test that fails; ``--seed N`` repeats a run.

``--device cuda`` runs, on a GPU, every test that asks for the ``device`` fixture, and no other.
"""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import settings

settings.register_profile("warmattn", deadline=None, print_blob=True)
settings.load_profile("warmattn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of every random input, hypothesis included")
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="of the operands")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Before hypothesis reads its own option, so that one number repeats everything.
    config.option.hypothesis_seed = str(config.getoption("--seed"))
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no CUDA device")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (repeat with --seed), device: {config.getoption('--device')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What no device has a part in is left to the run on the CPU."""
    if config.getoption("--device") == "cpu":
        return
    asking = [item for item in items if "device" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own, from ``--seed`` and its name; printed where the test fails."""
    seed = zlib.crc32(f"{request.config.getoption('--seed')} {request.node.nodeid}".encode())
    print(f"seed of this test: {seed}")
    return seed


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the operands of a test lie, which also chooses the backend that runs it."""
    device = torch.device(str(request.config.getoption("--device")))
    torch.empty(1, device=device)  # a GPU takes its time to start, which hypothesis would put down to a draw
    return device
