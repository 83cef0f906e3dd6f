"""``warmattn prewarm``: the labels of the contract, and the identity of what was built."""

from __future__ import annotations

import json

import pytest
from cli_helpers import Invoke, assert_refused

import warmattn
from warmattn.backend import load
from warmattn.pipelines import REGISTRY, identity


def test_prints_labels_and_identity(invoke: Invoke):
    result = invoke("prewarm", "--sliding", "codes:window", "--global", "codes")
    labels = warmattn.prewarm(sliding=("codes", "window"), global_="codes")
    *lines, summary = result.stdout.splitlines()
    assert lines == labels
    assert len(labels) == 8
    assert summary.startswith("8 pipelines ready on cpu (cpu) in ")
    assert summary.endswith(f"identity {identity(labels, backend='cpu')}")


def test_json_is_one_document(invoke: Invoke):
    result = invoke("prewarm", "--global", "f16", "--device", "cpu", "--backend", "cpu", "--json")
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["labels"] == warmattn.prewarm(global_="f16")
    assert document["identity"] == identity(document["labels"], backend="cpu")
    assert (document["backend"], document["device"]) == ("cpu", "cpu")


def test_bad_requests_are_refused(invoke: Invoke):
    assert_refused(invoke("prewarm"), 2, "--sliding FORM:KIND, --global FORM, or both")
    assert_refused(invoke("prewarm", "--sliding", "codes"), 2, "FORM:KIND, as codes:window, got codes")
    assert_refused(invoke("prewarm", "--sliding", "codes:door"), 2, "'window'", "door")
    assert_refused(invoke("prewarm", "--global", "f64"), 2, "global_", "f64")
    assert_refused(invoke("prewarm", "--global", "f32", "--backend", "abacus"), 3, "'abacus' does not exist")
    assert_refused(invoke("prewarm", "--global", "f32", "--device", "meta"), 3, "no backend for meta")


def test_device_that_does_not_exist_is_bad_input(invoke: Invoke):
    assert_refused(invoke("prewarm", "--global", "f32", "--device", "toaster"), 2, "device", "toaster")


def test_build_failure_prints_the_label_and_no_list(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    def fail(key: object, device: object) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(load("cpu"), "build", fail)
    monkeypatch.setattr(REGISTRY, "_built", {})
    monkeypatch.setattr(REGISTRY, "_status", {})
    label = "flash_attn_prefill_precise_d512_v32|200:b0|201:b0|300:b0|301:b1|303:b0"
    assert_refused(invoke("prewarm", "--global", "f32"), 3, f"{label}: could not be built: no compiler")
