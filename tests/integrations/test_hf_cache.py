"""`WarmCache` by itself: what it holds, gives back, forgets, refuses, and keeps in a file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FORMS, gemma2, gemma3, gemma4, tokens
from torch import Tensor
from transformers import Gemma3TextConfig, MambaConfig, PreTrainedModel
from transformers.cache_utils import DummyLayer

import warmattn
from warmattn import InvalidInput, Unsupported
from warmattn.hf import WarmCache
from warmattn.integrations.transformers.attention import attend
from warmattn.integrations.transformers.cache import WarmLayer
from warmattn.integrations.transformers.cached import CachedKeys, CachedValues
from warmattn.testing import assert_same_bits, relative_error

B, Hk, D, CAPACITY = 2, 1, 64, 16


def config(layers: int = 2, **changed: Any) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        num_hidden_layers=layers,
        layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
        sliding_window=4,
        **changed,
    )


def rows(n: int, seed: int = 0, batch: int = B) -> tuple[Tensor, Tensor]:
    """k and v ``[B, Hk, n, D]``."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, Hk, n, D, generator=generator)
    return k, v


def filled(n: int = 5, **arguments: Any) -> WarmCache:
    cache = WarmCache(config(), CAPACITY, **arguments)
    for index in range(2):
        cache.update(*rows(n, index), index)
    return cache


def held(cache: WarmCache) -> list[Tensor]:
    """K and V of every layer, as another library sees them."""
    return [
        part.clone() for layer in cache.own_layers for part in (layer.keys, layer.values) if part is not None
    ]


def mean(k: Tensor, v: Tensor) -> Tensor:
    """What a query of zeros gets, ``[B, D]``: the mean of V."""
    return attend(torch.nn.Module(), torch.zeros(len(k), 1, 1, k.shape[3]), k, v, None)[0][:, 0, 0]


@pytest.mark.parametrize("keys", ["f16", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_update_returns_all_rows_in_place(form: str, keys: str):
    cache = WarmCache(config(), CAPACITY, values=form, keys=keys)
    k, v = rows(9)
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        key, value = cache.update(k[:, :, part], v[:, :, part], 0)
    assert isinstance(key, CachedKeys)
    assert isinstance(value, CachedValues)
    assert key.shape == value.shape == (B, Hk, 9, D)
    assert key.dtype == value.dtype == k.dtype
    kv = cache.own_layers[0].kv
    assert kv is not None
    assert key.kv is value.kv is kv, "no copy on the way"
    assert torch.equal(key + 0, k.to(kv.k.dtype).float())
    bound = {"f32": 0, "f16": 1e-3, "codes8": 0.02, "codes6": 0.06, "codes5": 0.1}[form]
    assert relative_error(value + 0, v) <= bound, "decoded, and in the model's own domain"
    assert value.half().dtype == torch.float16


def test_tensors_of_the_cache_cannot_be_written_to():
    cache = filled()
    for part in cache.update(*rows(1), 0):
        with pytest.raises(Unsupported, match="cannot be written to"):
            part.add_(1)


@pytest.mark.parametrize("form", ["f32", "codes8"])
def test_tensors_of_the_cache_are_read_or_refuse_but_never_crash(form: str):
    """Into another tensor they are copied; who asks for their address, as native code does, is told."""
    key, value = filled(values=form).update(*rows(1), 0)
    for part in (key, value):
        assert torch.equal(torch.empty(part.shape, dtype=part.dtype).copy_(part), part.clone())
    dense, coded = (warmattn.KVCache(B, Hk, CAPACITY, D, values=other) for other in ("f32", "codes8"))
    dense.append(key, value)
    assert isinstance(dense.v, Tensor)
    assert torch.equal(dense.v[:, :, :6], value.clone())
    operands = torch.zeros(B, 1, 1, D, dtype=torch.float16), key.half()
    out = warmattn.attention(*operands, value, visible=warmattn.Full())
    assert_same_bits(out, warmattn.attention(*operands, value.clone(), visible=warmattn.Full()))
    for reads_memory in (lambda: coded.append(key, value), lambda: warmattn.encode_values(value)):
        with pytest.raises(Unsupported, match=r"CachedValues has no memory: clone\(\)"):
            reads_memory()


def test_compiled_code_reads_the_cache():
    """With a break of the graph around the update and the attention."""

    def step(cache: WarmCache, k: Tensor, v: Tensor) -> Tensor:
        return attend(torch.nn.Module(), 2 * k, *cache.update(k, v, 0), None)[0] + 1

    compiled = torch.compile(step, backend="eager")
    caches = [WarmCache(config(1), CAPACITY, values="codes8") for _ in range(2)]
    for n in (5, 2):
        k, v = rows(n)
        assert torch.equal(compiled(caches[0], k, v), step(caches[1], k, v))


def test_what_transformers_asks():
    cache = WarmCache(config(3), CAPACITY)
    assert (cache.get_seq_length(), cache.length, cache.batch_size, cache.nbytes) == (0, 0, -1, 0)
    assert not cache.is_initialized
    for index in range(3):
        cache.update(*rows(5), index)
    assert (cache.get_seq_length(), cache.length, cache.batch_size) == (5, 5, B)
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    assert cache.get_mask_sizes(3, 2) == (8, 0)
    assert cache.get_max_length() == cache.max_length == CAPACITY
    assert cache.is_sliding == [True, True, False]
    assert cache.is_initialized
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.nbytes == 3 * B * Hk * CAPACITY * D * (2 + 2)
    assert repr(cache) == "WarmCache(length=5, max_length=16, layers=3)"


def test_early_initialization_allocates():
    cache = WarmCache(config(), CAPACITY)
    cache.early_initialization(B, Hk, D, torch.float32, torch.device("cpu"))
    assert cache.nbytes > 0
    assert cache.length == 0


def test_layers_that_share_hold_nothing():
    model = gemma4()
    cache = WarmCache(model.config, CAPACITY)
    assert [isinstance(layer, DummyLayer) for layer in cache.layers] == [False] * 4 + [True] * 2
    with torch.no_grad():
        model(tokens(1, 5, 64), cache=cache)
    shapes = [tuple(layer.kv.k.shape) for layer in cache.own_layers if layer.kv is not None]
    assert shapes == [(1, 2, CAPACITY, 256)] * 2 + [(1, 1, CAPACITY, 512), (1, 2, CAPACITY, 256)]


@pytest.mark.parametrize(
    ("arguments", "operand"),
    [
        ({"max_length": 0}, "max_length"),
        ({"max_length": 2.0}, "max_length"),
        ({"max_length": 2**31}, "max_length"),
        ({"values": "codes7"}, "values"),
        ({"keys": "f32"}, "keys"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], operand: str):
    with pytest.raises(InvalidInput, match=f"WarmCache: {operand}: expected"):
        WarmCache(config(), **{"max_length": 8, **arguments})


def test_models_that_keep_something_else_are_refused():
    with pytest.raises(Unsupported, match="WarmCache: layer 0"):
        WarmCache(MambaConfig(num_hidden_layers=1), 8)
    shared = gemma4().config
    shared.num_kv_shared_layers = shared.num_hidden_layers
    with pytest.raises(Unsupported, match="no layer of this model holds K and V"):
        WarmCache(shared, 8)


@pytest.mark.parametrize(("D_k", "D_v", "reason"), [(96, 96, "head dim 96"), (64, 128, "V 128")])
def test_other_head_dims_are_refused(D_k: int, D_v: int, reason: str):
    cache = WarmCache(config(), CAPACITY)
    with pytest.raises(Unsupported, match=reason):
        cache.update(torch.zeros(1, 1, 2, D_k), torch.zeros(1, 1, 2, D_v), 0)
    assert cache.length == 0


def test_layers_that_the_model_does_not_have_are_refused():
    cache = filled()
    with pytest.raises(InvalidInput, match=r"layer_idx: expected < 2, .*, got 2"):
        cache.update(*rows(5), 2)


def test_overflow_is_refused_before_anything_is_written():
    """By the first layer, so that no layer holds rows of a pass that could not end."""
    model = gemma4()
    cache = WarmCache(model.config, 9)
    ids = tokens(B, 12, 64)
    with torch.no_grad():
        model(ids[:, :6], cache=cache)
        before = held(cache)
        with pytest.raises(InvalidInput, match=r"length \(6\) \+ n \(4\) > capacity \(9\)"):
            model(ids[:, 6:10], cache=cache)
        assert all(layer.get_seq_length() == 6 for layer in cache.own_layers)
        assert all(torch.equal(a, b) for a, b in zip(held(cache), before, strict=True))
        model(ids[:, 6:9], cache=cache)
    assert cache.length == 9


def test_a_pass_that_breaks_off_is_noticed_and_taken_back():
    cache = filled()
    before = held(cache)
    cache.update(*rows(3, 7), 0)
    k, v = rows(3, 8)
    k[0, 0, 1, 2] = torch.nan
    with pytest.raises(InvalidInput, match="k"):
        cache.update(k, v, 1)
    cache.update(*rows(2, 9), 0)
    with pytest.raises(RuntimeError, match=r"layer 1 is at 7 tokens, others at 10.*crop\(0\)"):
        cache.update(*rows(2, 9), 1)
    cache.crop(0)
    assert cache.length == 5
    assert all(torch.equal(a, b) for a, b in zip(held(cache), before, strict=True))
    cache.update(*rows(2, 9), 0)
    cache.update(*rows(2, 9), 1)
    assert cache.length == 7


@pytest.mark.parametrize(("argument", "kept"), [(0, 3), (-1, 2), (-3, 0), (-5, 0)])
def test_b52_crop_removes_that_many(argument: int, kept: int):
    """Of three rows with V = 1, 2, 3; then a row with V = 9 comes."""
    cache = WarmCache(config(), CAPACITY, values="f32")
    for index in range(2):
        cache.update(torch.zeros(1, 1, 3, D), torch.tensor([1.0, 2, 3])[:, None].expand(1, 1, 3, D), index)
    cache.crop(argument)
    assert cache.get_seq_length() == cache.length == kept
    for index in range(2):
        out = mean(*cache.update(torch.zeros(1, 1, 1, D), torch.full((1, 1, 1, D), 9.0), index))
        assert torch.allclose(out, torch.tensor((sum([1.0, 2, 3][:kept]) + 9) / (kept + 1)), rtol=1e-6)


@pytest.mark.parametrize("argument", [1, 2, 3, 7])
def test_b52_crop_to_a_length_is_refused(argument: int):
    cache = filled(3)
    with pytest.raises(InvalidInput, match="tokens_to_remove: expected <= 0"):
        cache.crop(argument)
    assert cache.length == 3


def test_reset_forgets_and_takes_another_batch():
    cache = filled()
    nbytes = cache.nbytes
    cache.reset()
    assert cache.length == 0
    k, v = rows(2, 3)
    key, value = cache.update(k, v, 0)
    assert torch.equal(value.half(), v.half())
    assert cache.nbytes == nbytes
    cache.reset()
    key, _ = cache.update(*rows(2, 3, batch=5), 0)
    assert key.shape[0] == 5


@pytest.mark.parametrize(
    ("change", "index"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda cache: cache.batch_repeat_interleave(3), [0, 0, 0, 1, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ],
    ids=["reorder", "reorder to one", "repeat", "select"],
)
@pytest.mark.parametrize("form", ["f16", "codes8"])
def test_sequences_change_places(change: Any, index: list[int], form: str):
    cache = filled(values=form)
    before = held(cache)
    change(cache)
    assert cache.batch_size == len(index)
    assert all(torch.equal(a, b[index]) for a, b in zip(held(cache), before, strict=True))
    change(WarmCache(config(), CAPACITY))  # nothing to do yet


@pytest.mark.parametrize("length", [None, 5, 3, 0])
def test_clones_and_snapshots_share_no_memory(length: int | None):
    cache = filled(values="codes8")
    first = [part[:, :, :length] for part in held(cache)]
    kept = cache.snapshot(length)
    if length:
        assert kept.nbytes * CAPACITY == cache.nbytes * length
    clones = [cache.clone(length), kept.clone()] + [copy.deepcopy(cache)] * (length is None)
    cache.crop(-5)
    for layer in (0, 1):
        cache.update(*rows(5, 11), layer)
    for clone in clones:
        assert clone.length == (5 if length is None else length)
        assert all(torch.equal(a, b) for a, b in zip(held(clone), first, strict=True))
        assert clone.nbytes == cache.nbytes
    with pytest.raises(InvalidInput, match="length"):
        cache.clone(6)


def test_prefix_cache_keeps_warm_caches():
    model = gemma3()
    prefixes = warmattn.PrefixCache(max_bytes=10**7)
    ids = tokens(1, 10, 64)
    cache = WarmCache(model.config, CAPACITY)
    with torch.no_grad():
        whole = model(ids, cache=cache).logits
        prefixes.insert(ids[0], cache)
        assert prefixes.nbytes * CAPACITY == cache.nbytes * 10
        hit = prefixes.find(ids[0, :7])
        assert hit is not None
        rest = model(ids[:, hit.length :], cache=hit.cache).logits
    assert hit.length == hit.cache.length - 3 == 7
    assert torch.allclose(rest, whole[:, 7:], atol=1e-3)


# Files


def resumed(model: PreTrainedModel, cache: WarmCache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, cache=cache).logits  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [gemma2, gemma4])
def test_a_saved_cache_resumes_with_the_same_bits(make: Any, form: str, tmp_path: Path):
    model, ids = make(), tokens(B, 12, 64)
    cache = WarmCache(model.config, CAPACITY, values=form, keys="bf16")
    resumed(model, cache, ids[:, :8])
    cache.save(tmp_path / "cache", model)
    loaded = WarmCache.load(tmp_path / "cache", make(), max_length=12)
    assert (loaded.length, loaded.max_length) == (8, 12)
    assert all(torch.equal(a, b) for a, b in zip(held(cache), held(loaded), strict=True))
    assert torch.equal(resumed(model, loaded, ids[:, 8:]), resumed(model, cache, ids[:, 8:]))
    assert WarmCache.load(tmp_path / "cache", model).max_length == CAPACITY


def test_another_model_s_file_is_refused(tmp_path: Path):
    model = gemma3()
    cache = WarmCache(model.config, CAPACITY)
    resumed(model, cache, tokens(1, 4, 64))
    path = tmp_path / "cache"
    cache.save(path, model)
    model.set_attn_implementation("warmattn")
    model.config.pad_token_id, model.config.use_cache = 3, False
    WarmCache.load(path, model)

    tuned, windowed = gemma3(), gemma3()
    for weight in tuned.parameters():
        weight.data *= 1.001
    windowed.config.sliding_window = 13
    for other in (tuned, windowed, gemma3().half(), gemma2()):
        with pytest.raises(InvalidInput, match="expected a cache of this model"):
            WarmCache.load(path, other)
    with pytest.raises(InvalidInput, match="capacity"):
        WarmCache.load(path, model, max_length=3)


def test_scalars_that_are_no_parameters_tell_models_apart(tmp_path: Path):
    model = gemma4()
    WarmCache(model.config, CAPACITY).save(tmp_path / "cache", model)
    dict(model.named_buffers())["model.layers.1.layer_scalar"].mul_(2)
    with pytest.raises(InvalidInput, match="expected a cache of this model"):
        WarmCache.load(tmp_path / "cache", model)


def test_files_that_are_not_whole_are_refused(tmp_path: Path):
    model = gemma3()
    cache = WarmCache(model.config, CAPACITY, values="codes8")
    resumed(model, cache, tokens(1, 4, 64))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    cache.save(whole, model)
    content = whole.read_bytes()
    for length in range(0, len(content), len(content) // 50):
        cut.write_bytes(content[:length])
        with pytest.raises(InvalidInput):
            WarmCache.load(cut, model)
    kv = cache.own_layers[0].kv
    assert kv is not None
    kv.save(whole)
    with pytest.raises(InvalidInput, match=r"format 'warmattn.warm_cache', got 'warmattn.kv_cache'"):
        WarmCache.load(whole, model)


def test_saving_replaces_whole_files_and_never_half_a_pass(tmp_path: Path):
    model = gemma3()
    cache = WarmCache(model.config, CAPACITY)
    path = tmp_path / "cache"
    cache.save(path, model)
    assert WarmCache.load(path, model).length == 0
    resumed(model, cache, tokens(1, 4, 64))
    cache.save(path, model)
    assert WarmCache.load(path, model).length == 4
    first = cache.own_layers[0]
    assert isinstance(first, WarmLayer)
    assert first.kv is not None
    first.kv.append(*(torch.zeros(1, 2, 1, 256),) * 2)
    with pytest.raises(RuntimeError, match=r"crop\(0\)"):
        cache.save(path, model)
    assert WarmCache.load(path, model).length == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]
