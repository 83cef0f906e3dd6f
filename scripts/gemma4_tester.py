"""A Gemma 4 decoder for Transformers' own model tests, run by `test_transformers_suite.py`, which copies this
file in among them: small, with the head dims of the real ones and a window that its sequences outgrow.

With ``ATTENTION=warmattn`` in the environment, warmattn's attention and masks stand in for "sdpa": the suite
builds nearly all of its models with "sdpa" and compares some of them with "eager".
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.test_modeling_common import (  # pyright: ignore[reportMissingImports]
    ModelTesterMixin,
    ids_tensor,
)
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4TextModel,
)

import warmattn

_attentions, _masks = AttentionInterface(), AttentionMaskInterface()
_calls = 0


def _counted(attend: Any) -> Any:
    def counting(*operands: Any, **arguments: Any) -> Any:
        global _calls
        _calls += 1
        # A few tests ask for attention weights in passing. "sdpa" warns and returns none, warmattn refuses.
        arguments.pop("output_attentions", None)
        return attend(*operands, **arguments)

    return counting


if os.environ["ATTENTION"] == "warmattn":
    warmattn.hf.register()
AttentionMaskInterface.register("sdpa", _masks[os.environ["ATTENTION"]])
AttentionInterface.register("sdpa", _counted(_attentions[os.environ["ATTENTION"]]))


@pytest.fixture(scope="session", autouse=True)
def _report_calls(record_testsuite_property: Any) -> Iterator[None]:
    yield
    record_testsuite_property("calls", _calls)


class Gemma4TextTester:
    """What the suite asks of a model: a configuration, and inputs."""

    is_training = False  # warmattn has no backward pass, and says so
    batch_size, seq_length, vocab_size = 3, 7, 99
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 2

    def get_config(self) -> Gemma4TextConfig:
        return Gemma4TextConfig(
            vocab_size=self.vocab_size,
            vocab_size_per_layer_input=self.vocab_size,
            hidden_size=self.hidden_size,
            hidden_size_per_layer_input=16,
            intermediate_size=64,
            num_hidden_layers=self.num_hidden_layers,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=4,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=1,
            head_dim=256,
            global_head_dim=512,  # pyright: ignore[reportCallIssue]
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Gemma4TextConfig, dict[str, torch.Tensor]]:
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Gemma4TextTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (Gemma4TextModel, Gemma4ForCausalLM)

    def setUp(self) -> None:
        self.enterContext(torch.no_grad())  # the suite leaves gradients on where it needs none
        self.model_tester = Gemma4TextTester()
