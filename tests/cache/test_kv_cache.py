"""KVCache: what each operation does to rows, and what it refuses without touching a byte."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cache_helpers import (
    HK,
    B,
    D,
    H,
    all_bytes,
    assert_same_contents,
    contents,
    filled,
    make_rows,
    new_cache,
    normal,
    poison,
    stores,
)
from torch.utils._python_dispatch import TorchDispatchMode

import warmattn
from warmattn import Causal, Codebook, CodedValues, InvalidInput, KVCache, Unsupported, Window
from warmattn.codec.rotation import default_signs
from warmattn.testing import VALUE_FORMS, assert_same_bits, relative_error

BYTES_AT_D256 = {"f32": 1536, "f16": 1024, "bf16": 1024, "codes5": 772, "codes6": 772, "codes8": 772}


def refused(match: str, operation: Any, cache: KVCache, *, error: type[Exception] = InvalidInput) -> None:
    """The operation raises as said, and neither a byte nor a number of the cache changes."""
    before = all_bytes(cache)
    with pytest.raises(error, match=match) as caught:
        operation()
    assert str(caught.value).startswith("KVCache")
    assert all_bytes(cache) == before


@pytest.mark.parametrize("values", VALUE_FORMS)
def test_append_lays_rows_behind_the_old_ones(values: str, seed: int, device: torch.device):
    """K rounded, V rounded or coded, for any strides; every byte past the rows stays as it was."""
    cache = new_cache(values=values, keys=torch.bfloat16, device=device)
    _, k, v = make_rows(seed, 23, device=device)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # as models hand them over
    for start, end in ((0, 7), (7, 8), (8, 8), (8, 23)):
        cache.append(k[:, :, start:end], v[:, :, start:end])
    assert (cache.length, cache.kv_len, cache.key_offset) == (23, 23, 0)
    assert torch.equal(cache.k[:, :, :23], k.bfloat16())
    if isinstance(cache.v, CodedValues):
        coded = warmattn.encode_values(v, bits=int(values.removeprefix("codes")))
        expected = {"codes": coded.codes, "norms": coded.norms}
    else:
        expected = {"v": v.to(cache.v.dtype)}
    for name, rows in expected.items():
        assert torch.equal(stores(cache)[name][:, :, :23], rows)
    for store in stores(cache).values():
        behind = store[:, :, 23:]
        assert (behind == 255).all() if store.dtype == torch.uint8 else behind.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("values", ["f16", "codes8"])
def test_append_takes_any_float_dtype(values: str, dtype: torch.dtype, seed: int):
    _, k, v = make_rows(seed, 5)
    k, v = k.to(dtype), v.to(dtype)
    cache, expected = new_cache(values=values), new_cache(values=values)
    cache.append(k, v)
    expected.append(k.float(), v.float())
    assert_same_contents(cache, expected)


@pytest.mark.parametrize("values", VALUE_FORMS)
def test_attention_reads_the_cache_in_place(values: str, seed: int, device: torch.device):
    """The result is the op's over the cache's own operands, out of the rotated domain."""
    cache = filled(seed, 33, values=values, device=device)
    q = make_rows(seed, 9, device=device)[0]
    for window in (None, 5):
        visible = Causal(24) if window is None else Window(window, 24)
        options: dict[str, Any] = {"scale": 0.3, "softcap": 20.0, "kv_start": 2}
        out = warmattn.attention(q, cache.k, cache.v, visible=visible, kv_len=33, **options)
        if isinstance(cache.v, CodedValues):
            out = warmattn.unrotate(out, signs=cache.v.signs)
        assert_same_bits(cache.attention(q, window=window, **options), out)
    assert out.isfinite().all()


def test_coded_attention_is_close_to_dense(seed: int):
    """Which it is only in V's own domain."""
    q = make_rows(seed, 9)[0]
    dense, coded = (filled(seed, 33, values=values).attention(q) for values in ("f32", "codes8"))
    assert (coded - dense).norm() < 0.02 * dense.norm()


@pytest.mark.parametrize("values", VALUE_FORMS)
def test_bytes_of_a_token(values: str):
    cache = KVCache(3, 2, 50, 256, values=values)
    assert cache.nbytes == BYTES_AT_D256[values] * 3 * 2 * 50
    assert cache.nbytes == sum(store.nbytes for store in stores(cache).values())


@pytest.mark.parametrize("values", ["f16", "codes6"])
def test_crop_and_reset_forget(values: str, seed: int, device: torch.device):
    cache = filled(seed, 30, values=values, device=device)
    q, k, v = make_rows(seed, 30, device=device)
    whole = cache.attention(q)
    addresses = [store.data_ptr() for store in stores(cache).values()]
    cache.crop(30)
    assert cache.length == 30
    cache.crop(11)
    poison(cache)
    assert_same_bits(cache.attention(q[:, :, 2:11]), whole[:, :, 2:11])
    cache.append(k[:, :, 11:], v[:, :, 11:])
    assert_same_bits(cache.attention(q), whole)
    cache.reset()
    assert cache.length == 0
    poison(cache).append(k, v)
    assert_same_bits(cache.attention(q), whole)
    assert [store.data_ptr() for store in stores(cache).values()] == addresses


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that operations which copy write."""

    COPIES = ("aten::copy_", "aten::clone", "aten::index_select", "aten::_to_copy", "aten::cat")

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().split(".")[0] in self.COPIES:
            self.total += result.nbytes
        return result


@pytest.mark.parametrize("values", ["f32", "codes8"])
@pytest.mark.parametrize("length", [1, 17, 300])
def test_clone_copies_live_rows_and_nothing_else(values: str, length: int, seed: int):
    cache = filled(seed, 300, 400, values=values)
    with CopiedBytes() as copied:
        clone = cache.clone(length)
    rows = cache.nbytes // 400 * length
    assert rows <= copied.total <= rows + 2  # and the two flags
    assert (clone.length, clone.capacity, clone.nbytes) == (length, 400, cache.nbytes)
    cache.crop(length)
    assert_same_contents(clone, cache)


@pytest.mark.parametrize("values", ["f16", "codes5"])
def test_clones_are_independent(values: str, seed: int, device: torch.device):
    cache = filled(seed, 20, values=values, device=device)
    q, k, v = make_rows(seed + 7, 10, device=device)
    clone, grown = cache.clone(15), cache.clone(capacity=300)
    before = all_bytes(cache)
    clone.append(k, v)
    grown.append(k, v)
    clone.crop(3)
    assert all_bytes(cache) == before
    assert grown.capacity == 300
    cache.append(k, v)
    assert_same_contents(grown, cache)
    assert_same_bits(grown.attention(q), cache.attention(q))


def test_snapshot_holds_live_rows_only(seed: int):
    cache = filled(seed, 20, 4000, values="codes8")
    snapshot = cache.snapshot(12)
    assert (snapshot.length, snapshot.nbytes) == (12, cache.nbytes // 4000 * 12)
    clone = snapshot.clone(9)
    assert clone.capacity == 4000
    assert_same_contents(clone, cache.clone(9))
    assert_same_contents(snapshot.clone(), cache.clone(12))
    assert KVCache(1, 1, 10, 64).snapshot().clone().length == 0


@pytest.mark.parametrize("values", ["f16", "codes8"])
def test_reorder_gathers_live_rows_in_place(values: str, seed: int, device: torch.device):
    cache = filled(seed, 20, values=values, device=device)
    rows, addresses = contents(cache), [store.data_ptr() for store in stores(cache).values()]
    with CopiedBytes() as copied:
        cache.reorder(torch.tensor([1, 1], device=device))
    assert copied.total == 2 * cache.nbytes // 40 * 20  # gathered, then put back
    assert [store.data_ptr() for store in stores(cache).values()] == addresses
    for name, held in contents(cache).items():
        assert torch.equal(held, rows[name][[1, 1]])
    for store in stores(cache).values():
        behind = store[:, :, 20:]
        assert (behind == 255).all() if store.dtype == torch.uint8 else behind.isnan().all()


@pytest.mark.parametrize("values", ["f32", "codes8"])
@pytest.mark.parametrize("index", [[1], [0, 1], [1, 0, 0, 1, 1]])
def test_select_changes_the_batch(values: str, index: list[int], seed: int, device: torch.device):
    cache = filled(seed, 20, values=values, device=device)
    rows, per_sequence = contents(cache), cache.nbytes // B
    cache.select(torch.tensor(index, dtype=torch.int32, device=device))
    assert (cache.length, cache.capacity, cache.nbytes) == (20, 40, per_sequence * len(index))
    for name, held in contents(cache).items():
        assert torch.equal(held, rows[name][index])
    q, k, v = make_rows(seed, 3, batch=len(index), device=device)
    cache.append(k, v)
    assert cache.attention(q).shape == (len(index), H, 3, D)


def test_repeat_makes_neighbours(seed: int):
    cache = filled(seed, 20)
    rows = contents(cache)
    cache.repeat(3)
    for name, held in contents(cache).items():
        assert torch.equal(held, rows[name].repeat_interleave(3, dim=0))


def test_tables_of_other_software(seed: int):
    """Another codebook, signs and sf, at D = 512, where all three count."""
    book, signs = Codebook(Codebook.lloyd_max(6).centroids * 1.5), -default_signs(512).roll(3)
    cache = KVCache(1, 1, 10, 512, values="codes6", codebook=book, signs=signs, sf=1.5)
    signs_before, v = signs.clone(), normal(seed, 1, 1, 6, 512)
    signs.fill_(1.0)  # the cache has its own
    cache.append(v, v)
    expected = warmattn.encode_values(v, codebook=book, signs=signs_before, sf=1.5)
    assert isinstance(cache.v, CodedValues)
    assert torch.equal(cache.v.codes[:, :, :6], expected.codes)
    assert torch.equal(cache.v.norms[:, :, :6], expected.norms)
    assert cache.v.sf == 1.5
    q = normal(seed + 1, 1, 2, 1, 512).half()
    out = warmattn.attention(q, v.half(), expected, visible=Causal(5))
    assert_same_bits(cache.attention(q), warmattn.unrotate(out, signs=signs_before))


def test_refused_construction():
    def wrong(match: str, **changed: Any) -> None:
        options = {"batch": 1, "kv_heads": 2, "capacity": 8, "head_dim": 64, **changed}
        with pytest.raises((InvalidInput, Unsupported), match=match):
            KVCache(**options)

    for name in ("batch", "kv_heads", "capacity"):
        for size in (0, -1, 1.0, True, 2**31):
            wrong(rf"KVCache: {name}: expected an int in \[1, 2147483647\], got {size}", **{name: size})
    wrong("head dim 96; supported are 64", head_dim=96)
    wrong("keys: expected float16 or bfloat16, got torch.float32", keys=torch.float32)
    wrong("values: expected one of f32, f16, bf16, codes5, codes6, codes8, got 'f8'", values="f8")
    wrong(r"values: expected one of .*, got \['f16'\]", values=["f16"])
    wrong("codebook: expected None with values='f16'", codebook=Codebook.lloyd_max(8))
    wrong("signs: expected None with values='f16'", signs=default_signs(64))
    wrong("codebook: expected a Codebook, got Tensor", values="codes8", codebook=torch.zeros(256))
    wrong(
        "codebook: expected 5 bits with values='codes5', got 8",
        values="codes5",
        codebook=Codebook.lloyd_max(8),
    )
    wrong("signs: expected a tensor, got list", values="codes8", signs=[1.0] * 64)
    wrong(r"signs: expected shape \[64\], got \[128\]", values="codes8", signs=default_signs(128))
    wrong("signs: expected only 1 and -1", values="codes8", signs=default_signs(64) * 2)
    wrong("sf: expected a number finite and > 0", values="codes8", head_dim=512, sf=0.0)
    wrong("window: expected an int in", window=0)


@pytest.mark.parametrize("values", ["f16", "codes8"])
def test_refused_append(values: str, seed: int):
    cache = filled(seed, 30, values=values)
    _, k, v = make_rows(seed, 11)
    ok = k[:, :, :4]

    def append(k: Any = ok, v: Any = ok) -> Any:
        return lambda: cache.append(k, v)

    refused(r"k: length \(30\) \+ n \(11\) > capacity \(40\)", append(k, v), cache)
    refused("k: expected a tensor, got list", append(k=[1.0]), cache)
    refused(rf"k: expected \[{B}, {HK}, n, {D}\], got \[2, 4, 64\]", append(k=ok[0]), cache)
    for wrong in (ok[:1], ok[:, :1], ok[..., :32]):
        refused(r"k: expected \[2, 2, n, 64\], got \[", append(k=wrong), cache)
        refused(r"v: expected \[2, 2, n, 64\], got \[", append(v=wrong), cache)
    refused("v: expected k's 4 rows, got 3", append(v=ok[:, :, :3]), cache)
    refused("k: expected a float dtype, got torch.int32", append(k=ok.int()), cache)
    refused("v: expected on the cache's device cpu, got meta", append(v=ok.to("meta")), cache)
    refused("k requires grad", append(k=ok.clone().requires_grad_()), cache, error=Unsupported)
    with torch.no_grad():
        cache.append(ok.clone().requires_grad_(), ok)
    assert not cache.k.requires_grad


@pytest.mark.parametrize("values", VALUE_FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e5, 1e39])
def test_rows_not_finite_in_the_store_are_refused(values: str, bad: float, seed: int, device: torch.device):
    """1e5 is finite in bfloat16, but not as a float16 key; nor is a float64 of 1e39 in anything narrower."""
    cache = filled(seed, 30, values=values, device=device)
    _, k, v = (rows.double() for rows in make_rows(seed, 5, device=device))
    broken = k.clone()
    broken[1, 0, 3, 17] = bad
    refused(
        "KVCache.append: k: expected values that are finite",
        lambda: cache.append(broken, v, check=True),
        cache,
    )
    if bad == 1e5 and values != "f16":
        cache.append(k, broken, check=True)
        assert cache.length == 35
    else:
        refused(
            "KVCache.append: v: expected values that are", lambda: cache.append(k, broken, check=True), cache
        )


def test_a_bfloat16_cache_takes_large_keys(seed: int):
    cache = filled(seed, 30, keys=torch.bfloat16)
    _, k, v = make_rows(seed, 2)
    cache.append(k * 1e5, v)
    refused("k: expected values that are finite", lambda: cache.append(k * 1e39, v), cache)


@pytest.mark.parametrize("values", ["f16", "codes8"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_a_gpu_notes(
    values: str, name: str, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """There an append does not wait to look: it writes, and `check` tells, until a reset."""
    # Also where there is none: what the cache takes for its device is all that decides.
    monkeypatch.setattr(KVCache, "device", property(lambda self: torch.device("cuda", 0)))
    cache = filled(seed, 30, values=values, device=device)
    _, k, v = make_rows(seed, 5, device=device)
    cache.append(k, v)
    cache.check()
    rows = {"k": k, "v": v}
    rows[name] = rows[name].clone()
    rows[name][1, 1, 4, 63] = math.nan
    refused(
        f"KVCache.append: {name}: expected", lambda: cache.append(rows["k"], rows["v"], check=True), cache
    )
    clean = cache.clone()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        cache.append(rows["k"], rows["v"])
        cache.append(k[:, :, :0], v[:, :, :0])
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert cache.length == 40
    for told in (cache, cache.clone()):
        with pytest.raises(InvalidInput, match=f"KVCache.check: {name}: expected values that are finite"):
            told.check()
    clean.check()
    cache.reset()
    cache.check()


def test_refused_lengths(seed: int):
    cache = filled(seed, 30)
    wrong: tuple[Any, ...] = (-1, 31, 2.0, "7", True)
    for length in wrong:
        match = rf"length: expected an int in \[0, 30\], got {length!r}"
        refused(f"KVCache.crop: {match}", lambda n=length: cache.crop(n), cache)
        refused(f"KVCache.clone: {match}", lambda n=length: cache.clone(n), cache)
        refused(f"KVCache.snapshot: {match}", lambda n=length: cache.snapshot(n), cache)
    refused(r"capacity: expected an int in \[8, ", lambda: cache.clone(8, capacity=7), cache)


def test_refused_indices(seed: int):
    cache = filled(seed, 30)
    for operation, op in ((cache.reorder, "reorder"), (cache.select, "select")):
        for index, match in (
            ([0, 1], "expected a tensor, got list"),
            (torch.tensor([0.0, 1.0]), "expected int64 or int32"),
            (torch.tensor([True, False]), "expected int64 or int32"),
            (torch.zeros(2, 1, dtype=torch.int64), "expected int64 or int32"),
            (torch.zeros(0, dtype=torch.int64), "expected int64 or int32"),
            (torch.tensor([0, 2]), r"expected values in \[0, 2\), got \[0, 2\]"),
            (torch.tensor([-1, 0]), r"expected values in \[0, 2\), got \[-1, 0\]"),
        ):
            refused(f"KVCache.{op}: index: {match}", lambda o=operation, i=index: o(i), cache)
    refused(r"index: expected \[B\] = \[2\], got \[1\]", lambda: cache.reorder(torch.tensor([0])), cache)
    refused("KVCache.repeat: n: expected an int", lambda: cache.repeat(0), cache)


def test_refused_queries(seed: int):
    cache = filled(seed, 3)
    q = make_rows(seed, 4)[0]
    refused(r"KVCache.attention: q: S \(4\) > length \(3\)", lambda: cache.attention(q), cache)
    with pytest.raises(InvalidInput, match="k: expected q's dtype"):
        cache.attention(q[:, :, :1].bfloat16())
    with pytest.raises(InvalidInput, match="q: expected rank 4"):
        cache.attention(q[0])


@pytest.mark.parametrize("values", ["f16", "codes8"])
def test_made_in_inference_mode_used_outside(values: str, seed: int):
    """And the other way about: `generate` may run in it, a server's own code not."""
    q, k, v = make_rows(seed, 10)
    with torch.inference_mode():
        cache = KVCache(B, HK, 40, D, values=values)
        cache.append(k, v)
    for used in (cache, cache.clone(), cache.snapshot().clone()):
        used.append(k, v)
        used.reset()
        used.append(k, v)
        with torch.inference_mode():
            used.append(k, v)
            clone = used.clone()
        clone.append(k, v)
        assert clone.attention(q).isfinite().all()


def test_repr_tells_shape_and_length(seed: int):
    assert repr(filled(seed, 30, values="codes8")) == (
        "KVCache(2, 2, 40, 64, values='codes8', keys=torch.float16, device='cpu'; length 30)"
    )


@pytest.mark.parametrize("values", VALUE_FORMS)
def test_b52_crop_edges(values: str):
    """Three tokens whose V is 1, 2 and 3, cropped to every length and past them; then one whose V is 9."""

    def token(value: float) -> torch.Tensor:
        return torch.full((1, 1, 1, D), float(value))

    for length in (3, 2, 1, 0, -1, -3, -5, 7):
        cache = KVCache(1, 1, 5, D, values=values)
        for value in (1, 2, 3):
            cache.append(token(0), token(value))
        if 0 <= length <= 3:
            cache.crop(length)
            kept = [1, 2, 3][:length]
        else:
            refused(r"length: expected an int in \[0, 3\]", lambda n=length, c=cache: c.crop(n), cache)
            kept = [1, 2, 3]
        assert cache.length == len(kept)
        cache.append(token(0), token(9))
        mean = sum((*kept, 9)) / (len(kept) + 1)
        expected = torch.full((1, 1, 1, D), mean)
        out = cache.attention(token(0).half())
        assert relative_error(out, expected) < (0.06 if values.startswith("codes") else 1e-6)
