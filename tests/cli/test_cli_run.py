"""``warmattn run``: the bits of `warmattn.attention`, from a file to a file, all or nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import HEADER, Invoke, assert_refused, write_call
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import warmattn
from warmattn.cli import files, run
from warmattn.testing import assert_same_bits, make_inputs

S, T = 70, 200


@pytest.mark.parametrize("values", ["f32", "f16", "codes8", "codes5"])
@pytest.mark.parametrize("D", [256, 512])
def test_result_has_the_bits_of_the_call(invoke: Invoke, tmp_path: Path, seed: int, D: int, values: str):
    x = make_inputs(seed, S=S, T=T, D=D, H=4, Hk=2, values=values)
    file = write_call(tmp_path / "call.safetensors", x, {"scale": 0.07, "softcap": 9.0})
    result = invoke("run", file)
    assert result.exit_code == 0, result.output
    out, lse = warmattn.attention(
        x.q, x.k, x.v, visible=warmattn.Causal(T - S), kv_len=T, scale=0.07, softcap=9.0, return_lse=True
    )
    written = load_file(tmp_path / "call.out.safetensors")
    assert written.keys() == {"out", "lse"}
    assert_same_bits(written["out"], out)
    assert_same_bits(written["lse"], lse)


@pytest.mark.parametrize("kind", ["causal", "window", "full", "external", "external, bool"])
def test_steps_change_no_bit(invoke: Invoke, tmp_path: Path, seed: int, kind: str):
    x = make_inputs(seed, S=S, T=T, D=256, B=2)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 1, S, T, generator=generator) < 0.7
    mask[:, :, :40, 64:160] = False
    tensors, metadata = {}, {"visible": kind.split(",")[0]}
    visible: warmattn.External | warmattn.Window | warmattn.Full | warmattn.Causal = warmattn.Causal(T - S)
    if kind == "window":
        metadata["window"], visible = "50", warmattn.Window(50, T - S)
    elif kind == "full":
        visible = warmattn.Full()
    elif kind.startswith("external"):
        additive = torch.zeros(mask.shape, dtype=torch.float16).masked_fill_(~mask, -torch.inf)
        tensors["mask"] = mask if kind.endswith("bool") else additive
        visible = warmattn.External(tensors["mask"])
    file = write_call(tmp_path / "call.safetensors", x, metadata, **tensors)
    out, lse = warmattn.attention(x.q, x.k, x.v, visible=visible, kv_len=T, return_lse=True)
    for chunk in (1, 7, 64, S):
        target = tmp_path / f"{chunk}.safetensors"
        result = invoke("run", file, "--chunk", chunk, "--out", target)
        assert result.exit_code == 0, result.output
        written = load_file(target)
        assert_same_bits(written["out"], out)
        assert_same_bits(written["lse"], lse)


def test_long_work_goes_in_steps(invoke: Invoke, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch):
    x = make_inputs(seed, S=S, T=T, D=256)
    file = write_call(tmp_path / "call.safetensors", x)
    whole = json.loads(invoke("run", file, "--json").stdout)
    monkeypatch.setattr(run, "STEP_FLOPS", whole["flops"] / 2)
    steps = json.loads(invoke("run", file, "--json").stdout)
    assert (whole["rows_per_step"], steps["rows_per_step"]) == (S, 32)
    assert whole["sha256"] == steps["sha256"]


def test_lengths_of_a_batch(invoke: Invoke, tmp_path: Path, seed: int):
    x = make_inputs(seed, S=5, T=40, D=256, B=2)
    lengths = torch.tensor([40, 30], dtype=torch.int32)
    metadata = {"kv_len": None, "q_offset": 25}
    file = write_call(tmp_path / "call.safetensors", x, metadata, kv_lens=lengths)
    result = invoke("run", file, "--json")
    assert json.loads(result.stdout)["shape"]["T"] == [40, 30]
    expected = warmattn.attention(x.q, x.k, x.v, visible=warmattn.Causal(25), kv_len=lengths)
    assert_same_bits(load_file(tmp_path / "call.out.safetensors")["out"], expected)


def test_softcap_option_wins_over_the_file(invoke: Invoke, tmp_path: Path, seed: int):
    x = make_inputs(seed, S=5, T=40, D=256)
    file = write_call(tmp_path / "call.safetensors", x, {"softcap": 30})
    assert invoke("run", file, "--softcap", 0.5).exit_code == 0
    visible = warmattn.Causal(35)
    expected = warmattn.attention(x.q, x.k, x.v, visible=visible, kv_len=40, softcap=0.5)
    assert_same_bits(load_file(tmp_path / "call.out.safetensors")["out"], expected)


@pytest.mark.parametrize("D", [256, 512])
def test_unrotate_uses_the_signs_of_the_file(invoke: Invoke, tmp_path: Path, seed: int, D: int):
    signs = torch.randn(D, generator=torch.Generator().manual_seed(seed)).sign()
    rows = torch.randn(1, 1, 60, D, generator=torch.Generator().manual_seed(seed))
    x = make_inputs(seed, S=9, T=60, C=60, D=D, values="codes8")
    v = warmattn.encode_values(rows, signs=signs, sf=3.0)
    x = type(x)(x.q, x.k, v, 60)
    file = write_call(tmp_path / "call.safetensors", x, {"sf": 3.0}, signs=signs)
    result = invoke("run", file, "--unrotate", "--chunk", 4)
    assert result.exit_code == 0, result.output
    rotated = warmattn.attention(x.q, x.k, v, visible=warmattn.Causal(51))
    target = tmp_path / "call.out.safetensors"
    assert_same_bits(load_file(target)["out"], warmattn.unrotate(rotated, signs=signs))
    with safe_open(target, framework="pt") as file:
        assert file.metadata()["unrotated"] == "true"


def test_operands_are_mapped_not_read(tmp_path: Path, seed: int):
    x = make_inputs(seed, S=5, T=40, D=256, C=40)
    path = write_call(tmp_path / "call.safetensors", x)
    call = files.read_call(path)
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")  # past the header
        file.seek(start)
        file.write(bytes(path.stat().st_size - start))
    assert not call.q.any()


def test_json_is_one_document(invoke: Invoke, tmp_path: Path, seed: int):
    x = make_inputs(seed, S=5, T=40, D=512, H=4, Hk=2, values="codes6")
    file = write_call(tmp_path / "call.safetensors", x)
    result = invoke("run", file, "--json", "--out", tmp_path / "result.safetensors")
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["command"] == "run"
    assert document["shape"] == {"B": 1, "H": 4, "Hk": 2, "S": 5, "T": 40, "C": 45, "D": 512}
    assert document["values"] == "codes6"
    assert document["label"].startswith("flash_attn_prefill_precise_d512_vcodes|200:b0")
    assert document["out"] == str(tmp_path / "result.safetensors")


@pytest.mark.parametrize("columns", [80, 120])
def test_report_fits_the_screen(invoke: Invoke, tmp_path: Path, seed: int, columns: int):
    file = write_call(tmp_path / "call.safetensors", make_inputs(seed, S=5, T=40, D=256))
    result = invoke("run", file, columns=columns)
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "sha256" in result.stdout
    assert "…" not in result.stdout


BAD_FILES: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...] = (
    ("another format", {"format": "pt"}, {}, "format: expected 'warmattn-attention'"),
    ("no format", {"format": None}, {}, "got None"),
    ("another version", {"version": "2"}, {}, "version: expected '1' in the file's metadata, got '2'"),
    ("no visible", {"visible": None}, {}, "visible: expected 'causal'"),
    ("unknown visible", {"visible": "some"}, {}, "'some'"),
    ("window without size", {"visible": "window"}, {}, "window"),
    ("size without window", {"window": 5}, {}, "window"),
    ("window not a number", {"visible": "window", "window": "wide"}, {}, "expected an int"),
    ("scale not a number", {"scale": "1/16"}, {}, "scale: expected a number"),
    ("external without mask", {"visible": "external"}, {}, "mask"),
    ("mask without external", {}, {"mask": torch.zeros(5, 40, dtype=torch.float16)}, "mask"),
    ("no q", {}, {"q": None}, "none named q"),
    ("no v", {}, {"v": None}, "none named v"),
    ("codes and v", {}, {"codes": torch.zeros(1, dtype=torch.uint8)}, "none named centroids, norms"),
    ("signs without codes", {}, {"signs": torch.ones(256)}, "signs"),
    ("unknown tensor", {}, {"kv_length": torch.ones(1)}, "kv_length"),
    ("two lengths", {}, {"kv_lens": torch.tensor([40], dtype=torch.int32)}, "not both"),
    ("K of another dtype", {}, {"k": torch.zeros(1, 1, 45, 256)}, "k: expected q's dtype"),
    ("offset past T", {"q_offset": 36}, {}, "q_offset (36) + S (5) > T (40)"),
    ("T > C", {"kv_len": 46}, {}, "T (46) > C (45)"),
)


@pytest.mark.parametrize(
    ("metadata", "tensors", "text"), [c[1:] for c in BAD_FILES], ids=[c[0] for c in BAD_FILES]
)
def test_bad_file_is_refused(
    invoke: Invoke, tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], text: str
):
    x = make_inputs(0, S=5, T=40, D=256)
    assert isinstance(x.v, torch.Tensor)
    operands = {"q": x.q, "k": x.k, "v": x.v, **tensors}
    header: dict[str, Any] = {**HEADER, "visible": "causal", "q_offset": 35, "kv_len": 40, **metadata}
    file = tmp_path / "call.safetensors"
    save_file(
        {name: tensor for name, tensor in operands.items() if tensor is not None},
        file,
        metadata={key: str(value) for key, value in header.items() if value is not None},
    )
    assert_refused(invoke("run", file, "--json"), 2, text)
    assert list(tmp_path.iterdir()) == [file]


def test_unreadable_file_is_refused(invoke: Invoke, tmp_path: Path):
    garbage, whole = tmp_path / "garbage", write_call(tmp_path / "whole", make_inputs(0, S=5, T=40, D=256))
    garbage.write_bytes(b"not a safetensors file at all")
    cut = tmp_path / "cut"
    cut.write_bytes(whole.read_bytes()[:-100])
    assert_refused(invoke("run", garbage), 2, "expected a safetensors file", str(garbage))
    assert_refused(invoke("run", cut), 2, "expected a safetensors file", str(cut))
    assert_refused(invoke("run", tmp_path / "none"), 2, f"{tmp_path / 'none'}: No such file")
    assert_refused(invoke("run", tmp_path), 2, "directory")


def test_what_no_backend_can_do_is_unsupported(invoke: Invoke, tmp_path: Path):
    x = make_inputs(0, S=5, T=40, D=256)
    file = write_call(tmp_path / "call.safetensors", x)
    assert_refused(invoke("run", file, "--backend", "abacus"), 3, "backend 'abacus' does not exist")
    assert isinstance(x.v, torch.Tensor)
    narrow = type(x)(x.q[..., :192], x.k[..., :192], x.v[..., :192], 40)
    file = write_call(tmp_path / "narrow.safetensors", narrow)
    assert_refused(invoke("run", file), 3, "head dim 192")


def test_bad_options_are_refused(invoke: Invoke, tmp_path: Path):
    file = write_call(tmp_path / "call.safetensors", make_inputs(0, S=5, T=40, D=256))
    before = file.read_bytes()
    assert_refused(invoke("run", file, "--out", file), 2, "another file than FILE")
    assert_refused(invoke("run", file, "--out", tmp_path), 2, "--out", "directory")
    assert_refused(invoke("run", file, "--out", tmp_path / "no" / "where"), 2, "a directory to write to")
    assert_refused(invoke("run", file, "--unrotate"), 2, "--unrotate: expected coded V")
    assert_refused(invoke("run", file, "--chunk", 0), 2, "--chunk")
    assert_refused(invoke("run", file, "--softcap", 0), 2, "softcap: expected finite and > 0")
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_failed_write_leaves_the_old_result(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_call(tmp_path / "call.safetensors", make_inputs(0, S=5, T=40, D=256))
    target = tmp_path / "result"
    target.write_text("the old result")

    def full_disk(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "save_file", full_disk)
    assert_refused(invoke("run", file, "--out", target), 2, "No space left on device")
    assert target.read_text() == "the old result"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["call.safetensors", "result"]
