"""The models that demo, examples and benchmarks run, and linear layers that compute row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from warmattn.errors import InvalidInput
from warmattn.integrations.linears import linears_by_row
from warmattn.integrations.text_models import load_text_model
from warmattn.testing import assert_same_bits


def test_tokens_of_the_demo_model_are_bytes():
    text_model = load_text_model()
    assert text_model.encode("süß".encode()) == [115, 195, 188, 195, 159]
    assert text_model.decode([115, 195, 188, 195]) == "sü\N{REPLACEMENT CHARACTER}"
    assert text_model.start == []
    assert text_model.model.dtype == torch.float32


def test_another_model_is_refused():
    with pytest.raises(InvalidInput, match="model: expected one of demo, gemma3-270m, got gpt"):
        load_text_model("gpt")


def test_rows_of_linear_layers_do_not_depend_on_each_other(seed: int):
    generator = torch.Generator().manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(96, 257), torch.nn.Linear(257, 33, bias=False))
    rows = torch.randn(2, 37, 96, generator=generator)

    def run(rows: Tensor) -> Tensor:
        with torch.no_grad(), linears_by_row(layers):
            return layers(rows)

    whole = run(rows)
    assert whole.shape == (2, 37, 33)
    for size in (1, 7, 36):
        assert_same_bits(torch.cat([run(part) for part in rows.split(size, dim=1)], dim=1), whole)
    assert all("forward" not in vars(layer) for layer in layers)
    torch.testing.assert_close(whole, layers(rows).detach())


def test_linear_layers_are_put_back_after_an_error():
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(RuntimeError), linears_by_row(layer):
        layer(torch.ones(3, 5))
    assert "forward" not in vars(layer)
