"""The benchmarks of whole models, on the one that ships: what they compare, and what they count."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from warmattn.integrations import gemma3_270m
from warmattn.integrations.capture import load_demo_model, load_demo_text

FORMS = ("f32", "f16", "codes8", "codes6", "codes5")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module


def test_divergence_grows_as_v_gets_coarser(bench: Callable[[str], ModuleType]) -> None:
    module = bench("transformers_quality")
    ids = torch.tensor(list(load_demo_text()[:300]))
    figures = module.measure(load_demo_model(), ids)
    mean = {name.split(" ")[-1]: figure["kl_mean"] for name, figure in figures.items()}
    assert list(mean) == ["sdpa", *FORMS]
    assert 0 <= mean["f32"] < 1e-6
    assert 0 <= mean["f16"] < 1e-6
    assert 1e-7 < mean["codes8"] < mean["codes6"] < mean["codes5"] < 1e-3
    assert 1e-5 < mean["sdpa"] < 1e-2
    for figure in figures.values():
        assert figure["kl_mean"] < figure["kl_99th_percentile"]
        assert 0.95 < figure["same_first_choice"] <= 1


def test_a_resume_is_timed_and_weighed(bench: Callable[[str], ModuleType]) -> None:
    module = bench("time_to_first_token")
    ids = torch.tensor(list(load_demo_text()[:200]))
    figures = module.measure(load_demo_model(), ids, 190, rounds=2)
    assert [*figures] == ["sdpa, DynamicCache", *(f"warmattn, V {form}" for form in FORMS)]
    for row in figures.values():
        assert row["speedup"] > 1
        assert row["same_token"]
    # Two KV heads; layers 0 and 1 slide over 128 tokens, layer 2 has D 512.
    sizes = {"f32": (6, 0), "f16": (4, 0), **dict.fromkeys(FORMS[2:], (3, 4))}
    for form, (of_value, of_block) in sizes.items():
        row = figures[f"warmattn, V {form}"]
        one, other = (2 * (D * of_value + D // 256 * of_block) for D in (512, 256))
        assert row["bytes_per_token_and_full_layer"] == one
        assert row["bytes"] == 200 * (one + 2 * other)
    stock = figures["sdpa, DynamicCache"]
    assert stock["bytes_per_token_and_full_layer"] == 2 * 512 * 8
    assert stock["bytes"] == 2 * (200 * 512 + 2 * 127 * 256) * 8


@pytest.mark.parametrize("name", ["transformers_quality", "time_to_first_token"])
def test_without_the_model_nothing_is_measured(
    bench: Callable[[str], ModuleType],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where a converted model might be
    monkeypatch.setattr(gemma3_270m, "NEEDED", ("weights_of_nobody",))
    bench(name).main(as_json=True)
    assert capsys.readouterr().out.endswith(": nothing measured\n")
