"""Files of caches: exact, whole or refused, and never half written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_helpers import HK, B, assert_same_contents, filled, make_rows, new_cache, normal
from safetensors import safe_open
from safetensors.torch import save_file

from warmattn import Codebook, InvalidInput, KVCache
from warmattn.cache import file
from warmattn.cache.kv import DROPPED_ROWS
from warmattn.codec.rotation import default_signs
from warmattn.testing import VALUE_FORMS, assert_same_bits

FORMAT = "warmattn.kv_cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


def open_file(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors, by the safetensors library alone."""
    with safe_open(path, framework="pt") as opened:
        return opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("length", [0, 1, 30])
def test_comes_back_exactly(values: str, length: int, seed: int, path: Path, device: torch.device):
    cache = filled(seed, length, values=values, keys=torch.bfloat16, device=device)
    cache.save(path)
    loaded = KVCache.load(path, device)
    assert repr(loaded) == repr(cache)
    assert loaded.device == cache.device
    assert_same_contents(loaded, cache)
    q, k, v = make_rows(seed + 5, 10, device=device)
    cache.append(k, v)
    loaded.append(k, v)
    assert_same_bits(loaded.attention(q.bfloat16()), cache.attention(q.bfloat16()))


def test_holds_live_rows_and_tables(seed: int, path: Path):
    filled(seed, 7, 4000, values="codes6").save(path)
    metadata, tensors = open_file(path)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    rows = {"k": [B, HK, 7, 64], "codes": [B, HK, 7, 64], "norms": [B, HK, 7, 1]}
    assert shapes == {**rows, "codebook": [64], "signs": [64]}
    fields = json.loads(metadata["cache"])
    assert (metadata["format"], metadata["version"]) == (FORMAT, "1")
    assert (fields["values"], fields["length"], fields["capacity"]) == ("codes6", 7, 4000)
    assert fields["codebook"] == Codebook.lloyd_max(6).identity


def test_tables_come_along(seed: int, path: Path):
    book, signs = Codebook(Codebook.lloyd_max(8).centroids * 1.25), -default_signs(512)
    cache = KVCache(1, 1, 9, 512, values="codes8", codebook=book, signs=signs, sf=0.75)
    v = normal(seed, 1, 1, 5, 512)
    cache.append(v, v)
    cache.save(path)
    loaded = KVCache.load(path)
    assert_same_contents(loaded, cache)
    q = v[:, :, -1:].half()
    assert_same_bits(loaded.attention(q), cache.attention(q))
    loaded.append(v[:, :, :4], v[:, :, :4])
    cache.append(v[:, :, :4], v[:, :, :4])
    assert_same_contents(loaded, cache)


def test_capacity_may_change(seed: int, path: Path):
    cache = filled(seed, 30)
    cache.save(path)
    assert KVCache.load(path).capacity == 40
    for capacity in (30, 500):
        loaded = KVCache.load(path, capacity=capacity)
        assert loaded.capacity == capacity
        assert_same_contents(loaded, cache)
    with pytest.raises(InvalidInput, match=r"KVCache.load: capacity: expected an int in \[30, .*got 29"):
        KVCache.load(path, capacity=29)


def test_bounded_caches_keep_their_place(seed: int, path: Path):
    cache = new_cache(160 + DROPPED_ROWS, window=100)
    q, k, v = make_rows(seed, DROPPED_ROWS + 162)
    for start, end in ((0, DROPPED_ROWS + 110), (DROPPED_ROWS + 110, DROPPED_ROWS + 162)):
        cache.append(k[:, :, start:end], v[:, :, start:end])
    assert cache.key_offset == DROPPED_ROWS
    cache.save(path)
    loaded = KVCache.load(path)
    assert_same_contents(loaded, cache)
    assert (loaded.window, loaded.rewind_limit) == (100, cache.rewind_limit)
    assert_same_bits(loaded.attention(q[:, :, -5:]), cache.attention(q[:, :, -5:]))


def test_every_truncation_is_refused(seed: int, path: Path):
    cache = KVCache(1, 1, 4, 64, values="codes5")
    cache.append(normal(seed, 1, 1, 2, 64), normal(seed + 1, 1, 1, 2, 64))
    cache.save(path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidInput, match=f"KVCache.load: path: .*{path}"):
            KVCache.load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(InvalidInput, match=f"path: .*{path}"):
        KVCache.load(path)


def test_every_flipped_bit_is_refused(seed: int, path: Path):
    """In the header's lengths, in its text, in rows and in tables."""
    cache = KVCache(1, 1, 4, 64, values="codes5")
    cache.append(normal(seed, 1, 1, 2, 64), normal(seed + 1, 1, 1, 2, 64))
    cache.save(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(InvalidInput, match=f"path: .*{path}"):
            KVCache.load(path)


CHANGES: dict[str, Any] = {
    "values": "codes6",
    "length": 6,
    "key_offset": 4096,
    "capacity": 41,
    "window": 3,
    "sf": 2.0,
    "codebook": "0" * 16,
    "signs": "0" * 16,
}


def test_every_changed_field_is_refused(seed: int, path: Path):
    filled(seed, 7, values="codes8").save(path)
    metadata, tensors = open_file(path)
    fields = json.loads(metadata["cache"])
    assert fields.keys() == CHANGES.keys()
    others = [{**metadata, name: metadata[name] + " "} for name in ("cache", "crc32", "seal")]
    others += [{**metadata, "cache": json.dumps({**fields, name: other})} for name, other in CHANGES.items()]
    others += [{key: metadata[key] for key in metadata if key != "seal"}, {**metadata, "more": ""}]
    for other in others:
        save_file(tensors, path, other)
        with pytest.raises(InvalidInput, match=f"path: expected metadata as it was written, got .*{path}"):
            KVCache.load(path)
    save_file({**tensors, "k": tensors["k"].view(torch.bfloat16)}, path, metadata)
    with pytest.raises(InvalidInput, match="metadata as it was written"):
        KVCache.load(path)
    save_file({**tensors, "codes": tensors["codes"].flip(2)}, path, metadata)
    with pytest.raises(InvalidInput, match=f"data as it was written, got other bytes of codes in {path}"):
        KVCache.load(path)


@pytest.mark.parametrize("name", ["codebook", "signs", "sf", "length"])
def test_sealed_but_of_two_minds(name: str, seed: int, path: Path):
    """A writer that put tables or numbers beside each other that do not belong together."""
    filled(seed, 7, values="codes8").save(path)
    fields, tensors = file.read(path, format=FORMAT, op="test")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if name == "codebook":
        tensors[name] *= 2
    elif name == "signs":
        tensors[name] *= -1
    else:
        fields[name] = {"sf": "1.0", "length": 8}[name]
    file.write(path, tensors, fields, format=FORMAT)
    with pytest.raises(InvalidInput, match="KVCache"):
        KVCache.load(path)


def test_other_formats_and_versions_are_refused(seed: int, path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(FileNotFoundError):
        KVCache.load(path)
    Codebook.lloyd_max(8).save(path)
    with pytest.raises(
        InvalidInput, match=f"expected format 'warmattn.kv_cache', got 'warmattn.codebook' in {path}"
    ):
        KVCache.load(path)
    save_file({"k": torch.zeros(1)}, path)
    with pytest.raises(InvalidInput, match=f"expected format 'warmattn.kv_cache', got None in {path}"):
        KVCache.load(path)
    with monkeypatch.context() as patch:
        patch.setattr(file, "VERSION", "2")
        filled(seed, 7).save(path)
    with pytest.raises(InvalidInput, match=f"path: expected version '1', got '2' in {path}"):
        KVCache.load(path)


def test_what_is_not_finite_is_not_saved(seed: int, path: Path):
    cache = filled(seed, 7)
    cache._finite[1] = False  # as an append on a GPU notes it
    with pytest.raises(InvalidInput, match="v: expected values that are finite"):
        cache.save(path)
    assert not path.exists()


def test_what_the_system_refuses_names_the_path(seed: int, path: Path):
    """Whether PyTorch, Python or safetensors meets it."""
    cache, nowhere = filled(seed, 7), path / "cache"
    with pytest.raises(OSError, match=f"{nowhere}: .*No such file"):
        cache.save(nowhere)
    with pytest.raises(FileNotFoundError, match=str(nowhere)):
        KVCache.load(nowhere)
    path.mkdir()
    for operation in (cache.save, KVCache.load):
        with pytest.raises(IsADirectoryError, match=str(path)):
            operation(path)
    assert list(path.parent.rglob("*")) == [path]


def test_a_failed_save_leaves_nothing_behind(seed: int, path: Path, monkeypatch: pytest.MonkeyPatch):
    old = filled(seed, 7)
    old.save(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        filled(seed + 1, 9).save(path)
    assert_same_contents(KVCache.load(path), old)
    assert list(path.parent.iterdir()) == [path]


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from warmattn import KVCache
from warmattn.cache import file

path = Path(sys.argv[1])
torch.set_num_threads(1)  # threads do not come along when a process forks

def cache(n):
    rows = torch.randn(1, 1, n, 64, generator=torch.Generator().manual_seed(n))
    made = KVCache(1, 1, 50_000, 64)
    made.append(rows, rows)
    return made

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def half(tensors, target, metadata):
    save_file(tensors, target, metadata)
    os.truncate(target, target.stat().st_size // 2)
    die()

old, new, save_file, fsync, replace = cache(20), cache(50_000), file.save_file, os.fsync, os.replace
flushes = []

def second_flush(descriptor):  # that of the directory, after the name has changed
    flushes.append(descriptor)
    die() if len(flushes) == 2 else fsync(descriptor)

MOMENTS = {
    "before the file": lambda: setattr(file, "save_file", die),
    "within the file": lambda: setattr(file, "save_file", half),
    "before the flush": lambda: setattr(os, "fsync", die),
    "before the name": lambda: setattr(os, "replace", die),
    "after the name": lambda: setattr(os, "fsync", second_flush),
    **{f"{ms} ms on": ms / 1000 for ms in (2, 10, 25, 40, 60)},  # wherever the child is then
}
for moment, arm in MOMENTS.items():
    old.save(path)
    child = os.fork()
    if child == 0:
        if callable(arm):
            arm()
        while True:
            new.save(path)
            old.save(path)
    if not callable(arm):
        time.sleep(arm)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, moment
    held = KVCache.load(path)
    expected = {20: old, 50_000: new}[held.length]
    assert torch.equal(held.k[:, :, : held.length], expected.k[:, :, : held.length]), moment
    print(f"{moment}: {held.length}")
"""


def test_a_killed_save_leaves_the_old_file_whole(path: Path):
    """The process is killed at each step of a save, and at moments that fall where they may."""
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    held = dict(line.split(": ") for line in result.stdout.splitlines())
    assert len(held) == 10
    steps = ["before the file", "within the file", "before the flush", "before the name"]
    assert [held[step] for step in steps] == ["20"] * 4
    assert held["after the name"] == "50000"
