"""The compiled kernels under test: every instruction set that this machine can run, one parameter each."""

from __future__ import annotations

import pytest

from warmattn.backend.cpu import native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        usable = [isa for isa in native.isas() if isa.missing is None]
        metafunc.parametrize("isa", usable, ids=[isa.name for isa in usable])


@pytest.fixture(autouse=True)
def _built() -> None:
    """These tests are about the library: without one they have nothing to say."""
    assert native.load_library() is not None, "the CPU kernels were not built"
