"""One seed for the whole run: printed first, and by every test that fails; ``--seed N`` repeats a run."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import settings

settings.register_profile("warmattn", deadline=None, print_blob=True)
settings.load_profile("warmattn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of every random input, hypothesis included")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Before hypothesis reads its own option, so that one number repeats everything.
    config.option.hypothesis_seed = str(config.getoption("--seed"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (repeat with --seed)"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own, from ``--seed`` and its name; printed where the test fails."""
    seed = zlib.crc32(f"{request.config.getoption('--seed')} {request.node.nodeid}".encode())
    print(f"seed of this test: {seed}")
    return seed
