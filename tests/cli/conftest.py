"""Running the command line in this process."""

from __future__ import annotations

import pytest
import torch
from cli_helpers import Invoke
from typer.testing import CliRunner, Result

from warmattn.cli import app


@pytest.fixture
def invoke() -> Invoke:
    """Run ``warmattn`` with arguments; 80 columns unless told otherwise."""

    def run(*arguments: object, columns: int = 80) -> Result:
        runner = CliRunner(env={"COLUMNS": str(columns)})
        return runner.invoke(app, [str(argument) for argument in arguments], prog_name="warmattn")

    return run


@pytest.fixture(autouse=True)
def same_threads():
    """No command leaves another thread count behind."""
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before
