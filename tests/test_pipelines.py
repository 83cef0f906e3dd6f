"""Pipelines: exact labels, prewarm, the registry, the identity, and what explain counts."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import warmattn
from warmattn import api
from warmattn.backend.cpu import CpuBackend
from warmattn.codec.codebook import Codebook
from warmattn.codec.values import CodedValues
from warmattn.errors import InvalidInput, Unsupported
from warmattn.pipelines import PipelineKey, Registry, identity
from warmattn.plan import Explanation
from warmattn.visibility import Causal, External, Full, Window

CPU = torch.device("cpu")
FORMS = {"f32": "v32", "f16": "v16", "codes": "vcodes"}
KINDS = {
    "causal": (0, 1, 0, 0),
    "window": (0, 1, 0, 1),
    "external": (1, 0, 0, 0),
    "external+map": (1, 0, 1, 0),
    "full": (0, 0, 0, 0),
}
"""has_mask, do_causal, has_blk, has_window of each kind of visibility."""
ALIGNMENTS = ((0, 0), (0, 1), (1, 0), (1, 1))


def label_of(D: int, form: str, kind: str, align_q: int, align_k: int) -> str:
    """The label of one of the original's calls, spelled out."""
    mask, causal, blk, window = KINDS[kind]
    label = (
        f"flash_attn_prefill_precise_d{D}_{FORMS[form]}"
        f"|200:b{align_q}|201:b{align_k}|300:b{mask}|301:b{causal}|303:b{blk}"
    )
    return label if D == 512 else f"{label}|310:b{window}"


def explain(
    D: int,
    form: str,
    kind: str,
    S: int,
    T: int,
    *,
    scores: torch.dtype = torch.float16,
    q_offset: Any = 0,
    **options: Any,
) -> Explanation:
    """Explain a call of one head and one sequence. Zeros do: nothing runs."""
    q, k = torch.zeros(1, 1, S, D, dtype=scores), torch.zeros(1, 1, T, D, dtype=scores)
    v: torch.Tensor | CodedValues
    if form == "codes":
        codes = torch.zeros(1, 1, T, D, dtype=torch.uint8)
        v = CodedValues(codes, torch.ones(1, 1, T, max(1, D // 256)), Codebook.lloyd_max(8))
    else:
        v = torch.zeros(
            1, 1, T, D, dtype={"f32": torch.float32, "f16": torch.float16}.get(form, torch.bfloat16)
        )
    mask = torch.zeros(S, T, dtype=torch.float16)
    visible = {
        "causal": Causal(q_offset),
        "window": Window(5, q_offset),
        "external": External(mask),
        "external+map": External(mask, warmattn.tile_map(mask)),
        "full": Full(),
    }[kind]
    return warmattn.explain(q, k, v, visible=visible, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("D", "kind"), [*itertools.product((256,), KINDS), (512, "causal"), (512, "external"), (512, "full")]
)
def test_labels_of_the_originals_calls(D: int, kind: str, form: str) -> None:
    rows, keys = {256: (32, 16), 512: (8, 64)}[D]
    for S, T in itertools.product(
        (1, rows - 1, rows, rows + 1, 2 * rows), (66, keys * 3 // 2, 3 * keys, 192)
    ):
        align_q, align_k = int(S in (rows, 2 * rows)), int(T % keys == 0)
        if S <= T:
            assert explain(D, form, kind, S, T).label == label_of(D, form, kind, align_q, align_k)


def test_labels_that_the_contract_spells_out() -> None:
    assert explain(256, "codes", "window", 3, 5).label == (
        "flash_attn_prefill_precise_d256_vcodes|200:b0|201:b0|300:b0|301:b1|303:b0|310:b1"
    )
    assert explain(512, "codes", "causal", 3, 5).label == (
        "flash_attn_prefill_precise_d512_vcodes|200:b0|201:b0|300:b0|301:b1|303:b0"
    )


LENGTHS = torch.tensor([16], dtype=torch.int32)
ZEROS = torch.tensor([0], dtype=torch.int32)
BEYOND = {
    "softcap": ("|320:b1", {"softcap": 5.0}),
    "kv_start": ("|321:b1", {"kv_start": 2}),
    "bf16 scores": ("|322:b1", {"scores": torch.bfloat16}),
    "bf16 values": ("|323:b1", {"form": "bf16"}),
    "lse": ("|324:b1", {"return_lse": True}),
    "tensor q_offset": ("|325:b1", {"q_offset": ZEROS}),
}
"""Disjoint additions in label order, and what turns each on."""


@pytest.mark.parametrize("D", [256, 512])
def test_every_subset_of_additions_appends_in_order(D: int) -> None:
    for on in itertools.product((False, True), repeat=len(BEYOND)):
        chosen = list(itertools.compress(BEYOND.values(), on))
        options: dict[str, Any] = {"form": "f16"}
        for _, change in chosen:
            options |= change
        form = options.pop("form")
        expected = label_of(D, "f16", "causal", 0, 1) + "".join(suffix for suffix, _ in chosen)
        assert explain(D, form, "causal", 3, 64, **options).label == expected


def test_a_window_at_d_512_comes_first_of_the_additions() -> None:
    options: dict[str, Any] = {
        "softcap": 5.0,
        "kv_start": ZEROS,
        "scores": torch.bfloat16,
        "return_lse": True,
    }
    assert explain(512, "bf16", "window", 8, 64, **options).label == (
        "flash_attn_prefill_precise_d512_v16|200:b1|201:b1|300:b0|301:b1|303:b0"
        "|310:b1|320:b1|321:b1|322:b1|323:b1|324:b1|325:b1"
    )
    assert explain(512, "f32", "window", 8, 64).label == label_of(512, "f32", "causal", 1, 1) + "|310:b1"


def test_masks_and_maps_at_d_512() -> None:
    assert explain(512, "f16", "external+map", 8, 64).label == label_of(512, "f16", "external+map", 1, 1)


def test_tensor_lengths() -> None:
    """A tensor kv_len is never aligned; a tensor kv_start is on whatever it holds, an int 0 is off."""
    plain = label_of(256, "f32", "causal", 0, 1)
    assert explain(256, "f32", "causal", 3, 16, kv_start=0).label == plain
    assert explain(256, "f32", "causal", 3, 16, kv_start=ZEROS).label == f"{plain}|321:b1|325:b1"
    assert explain(256, "f32", "causal", 3, 16, kv_len=LENGTHS).label == (
        label_of(256, "f32", "causal", 0, 0) + "|325:b1"
    )


def test_small_head_dims_follow_the_pattern_of_d_256() -> None:
    for D, form, kind in itertools.product((64, 128), FORMS, KINDS):
        assert explain(D, form, kind, 32, 48).label == label_of(D, form, kind, 1, 1)
        assert explain(D, form, kind, 31, 47).label == label_of(D, form, kind, 0, 0)


def test_run_time_values_are_not_in_the_label() -> None:
    """Bits, sf, window, scale and GQA ratio."""
    q, k = torch.zeros(1, 4, 3, 512).half(), torch.zeros(1, 2, 5, 512).half()
    codes, norms = torch.zeros(1, 2, 5, 512, dtype=torch.uint8), torch.ones(1, 2, 5, 2)
    labels = {
        warmattn.explain(q, k, values, visible=Causal(offset), scale=scale).label
        for bits, sf in ((5, 1.0), (8, 3.0))
        for values in (CodedValues(codes, norms, Codebook.lloyd_max(bits), sf),)
        for offset, scale in ((1, None), (2, 3.0))
    }
    assert labels == {label_of(512, "codes", "causal", 0, 0)}
    assert len({explain(256, "f16", "window", S, 64).label for S in (1, 2, 3)}) == 1


def test_public_names() -> None:
    prefix = "flash_attn_prefill_precise"
    d256, d512 = warmattn.PRECISE_D256_KERNEL_NAMES, warmattn.PRECISE_D512_KERNEL_NAMES
    assert d256 == tuple(f"{prefix}_d256_{form}" for form in ("v32", "v16", "vcodes"))
    assert d512 == tuple(f"{prefix}_d512_{form}" for form in ("vcodes", "v16", "v32"))
    assert (warmattn.PRECISE_D256_BQ, warmattn.PRECISE_D256_BK) == (32, 16)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of the test's own behind `prewarm`."""
    registry = Registry()
    monkeypatch.setattr(api, "REGISTRY", registry)
    return registry


SLIDING = [None, *itertools.product(FORMS, ("external", "external+map", "window", "causal"))]


@pytest.mark.parametrize("global_", [None, *FORMS])
def test_prewarm_builds_and_lists_every_pipeline_in_order(global_: str | None, registry: Registry) -> None:
    for sliding in SLIDING:
        expected = []
        for alignment in ALIGNMENTS:
            if sliding is not None:
                expected.append(label_of(256, sliding[0], sliding[1], *alignment))
            if global_ is not None:
                expected.append(label_of(512, global_, "causal", *alignment))
        labels = warmattn.prewarm(sliding=sliding, global_=global_)
        assert labels == expected
        assert len(labels) == 4 * ((sliding is not None) + (global_ is not None))
        status = registry.status()
        assert [status["cpu", "cpu", label] for label in labels] == ["ready"] * len(labels)


def test_prewarm_covers_every_call_of_its_route(registry: Registry) -> None:
    for sliding, global_ in ((("codes", "window"), "codes"), (("f16", "external+map"), "f32")):
        labels = warmattn.prewarm(sliding=sliding, global_=global_, device="cpu", backend="cpu")
        for S, T in itertools.product((1, 7, 8, 32), (33, 64, 80)):
            assert explain(256, sliding[0], sliding[1], S, T).label in labels
            assert explain(512, global_, "causal", S, T).label in labels


@pytest.mark.parametrize("broken", range(8))
def test_prewarm_fails_closed(broken: int, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [
        label
        for alignment in ALIGNMENTS
        for label in (
            label_of(256, "f16", "window", *alignment),
            label_of(512, "codes", "causal", *alignment),
        )
    ]
    built: list[str] = []

    def build(self: CpuBackend, key: PipelineKey, device: torch.device) -> None:
        if key.label == expected[broken] and not repaired:
            raise OSError("no compiler")
        built.append(key.label)

    repaired = False
    monkeypatch.setattr(CpuBackend, "build", build)
    with pytest.raises(RuntimeError) as raised:
        warmattn.prewarm(sliding=("f16", "window"), global_="codes")
    assert str(raised.value).startswith(expected[broken])
    assert "no compiler" in str(raised.value)
    assert isinstance(raised.value.__cause__, OSError)
    assert built == expected[:broken]
    assert registry.status() == {
        **{("cpu", "cpu", label): "ready" for label in expected[:broken]},
        ("cpu", "cpu", expected[broken]): "failed",
    }

    repaired = True
    assert warmattn.prewarm(sliding=("f16", "window"), global_="codes") == expected
    assert built == expected
    assert set(registry.status().values()) == {"ready"}


@pytest.mark.parametrize(
    ("error", "fragments", "arguments"),
    [
        (InvalidInput, ("sliding", "'f64'", "f32", "f16", "codes"), {"sliding": ("f64", "causal")}),
        (InvalidInput, ("sliding", "'full'", "external+map", "window"), {"sliding": ("f32", "full")}),
        (InvalidInput, ("sliding", "('f32',)"), {"sliding": ("f32",)}),
        (InvalidInput, ("sliding", "'extra'"), {"sliding": ("f32", "window", "extra")}),
        (InvalidInput, ("sliding", "codes"), {"sliding": "codes"}),
        (InvalidInput, ("sliding", "5"), {"sliding": 5}),
        (InvalidInput, ("sliding", "[['f32'], 'window']"), {"sliding": [["f32"], "window"]}),
        (InvalidInput, ("global_", "'bf16'", "f32", "f16", "codes"), {"global_": "bf16"}),
        (InvalidInput, ("global_", "causal"), {"global_": ("f32", "causal")}),
        (InvalidInput, ("global_", "['f32']"), {"global_": ["f32"]}),
        (InvalidInput, ("device", "tpu"), {"global_": "f32", "device": "tpu"}),
        (Unsupported, ("no backend for meta", "cpu: "), {"global_": "f32", "device": "meta"}),
        (Unsupported, ("'cpu'", "meta"), {"global_": "f32", "device": "meta", "backend": "cpu"}),
        (Unsupported, ("'nope'", "does not exist", "cpu"), {"global_": "f32", "backend": "nope"}),
    ],
)
def test_prewarm_refuses(
    error: type[Exception], fragments: tuple[str, ...], arguments: dict[str, Any], registry: Registry
) -> None:
    with pytest.raises(error) as raised:
        warmattn.prewarm(**arguments)
    assert type(raised.value) is error
    assert str(raised.value).startswith("prewarm: ")
    assert [text for text in fragments if text not in str(raised.value)] == []
    assert registry.status() == {}


def test_prewarm_on_a_machine_that_cannot_run_the_backend(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "unavailable", lambda self: "no vector unit")
    for backend in ("auto", "cpu"):
        with pytest.raises(Unsupported, match=r"cpu.*no vector unit"):
            warmattn.prewarm(global_="f32", backend=backend)
    assert registry.status() == {}


def keys(count: int) -> list[PipelineKey]:
    return [PipelineKey(f"kernel_{n}", ((200, True),)) for n in range(count)]


@pytest.mark.parametrize("result", [None, "built"])
def test_registry_builds_once_under_many_threads(result: str | None) -> None:
    registry, (key,), builds = Registry(), keys(1), []
    start = threading.Barrier(16)

    def build(key: PipelineKey) -> str | None:
        builds.append(key)
        threading.Event().wait(0.02)  # long enough for every thread to arrive
        assert registry.status() == {("cpu", "cpu", key.label): "building"}
        return result

    def ask() -> str | None:
        start.wait(10)
        return registry.get_or_build("cpu", CPU, key, build)

    with ThreadPoolExecutor(16) as pool:
        answers = [future.result() for future in [pool.submit(ask) for _ in range(16)]]
    assert answers == [result] * 16
    assert builds == [key]
    assert registry.get_or_build("cpu", CPU, key, build) == result
    assert builds == [key]
    assert registry.status() == {("cpu", "cpu", key.label): "ready"}


def test_registry_builds_different_pipelines_side_by_side() -> None:
    registry = Registry()
    both = threading.Barrier(2)  # a build that waited for the other to end would break it
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(registry.get_or_build, "cpu", CPU, key, lambda _: both.wait(10)) for key in keys(2)
        ]
        assert sorted(future.result() for future in futures) == [0, 1]


def test_registry_tells_backends_and_devices_apart() -> None:
    registry, (key,) = Registry(), keys(1)
    for backend, device in (("cpu", CPU), ("other", CPU), ("cpu", torch.device("meta"))):
        assert registry.get_or_build(backend, device, key, lambda _: (backend, device)) == (backend, device)  # noqa: B023
    assert len(registry.status()) == 3


def test_registry_tries_a_failed_build_anew() -> None:
    registry, (key,), attempts = Registry(), keys(1), []

    def build(key: PipelineKey) -> int:
        attempts.append(key)
        if len(attempts) < 3:
            raise OSError(f"attempt {len(attempts)}")
        return len(attempts)

    for attempt in (1, 2):
        with pytest.raises(OSError, match=f"attempt {attempt}"):
            registry.get_or_build("cpu", CPU, key, build)
        assert registry.status() == {("cpu", "cpu", key.label): "failed"}
    assert registry.get_or_build("cpu", CPU, key, build) == 3
    assert registry.status() == {("cpu", "cpu", key.label): "ready"}


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_threads")
def test_registry_status_can_be_read_while_others_build() -> None:
    """A race: one of ten rounds is enough to find a dictionary that changes while it is read."""
    for _ in range(10):
        registry = Registry()

        def build_all(keys: list[PipelineKey], registry: Registry = registry) -> None:
            for key in keys:
                registry.get_or_build("cpu", CPU, key, lambda key: key.label)

        every = keys(4000)
        threads = [threading.Thread(target=build_all, args=(every[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert set(registry.status().values()) <= {"building", "ready"}
        assert list(registry.status().values()) == ["ready"] * len(every)


def test_identity_is_fixed_and_depends_on_labels_backend_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = warmattn.prewarm(sliding=("codes", "window"), global_="codes")
    monkeypatch.setattr(warmattn, "__version__", "1.2.3")
    known = identity(labels, backend="cpu")
    assert known == "69d7bc43eae09f0b"
    assert identity(iter(labels), backend="cpu") == known
    others = [
        identity(labels, backend="cuda"),
        identity(labels[:-1], backend="cpu"),
        identity(labels[::-1], backend="cpu"),
        identity([*labels[:-1], labels[-1].replace("b0", "b1")], backend="cpu"),
        identity([], backend="cpu"),
    ]
    monkeypatch.setattr(warmattn, "__version__", "1.2.4")
    others.append(identity(labels, backend="cpu"))
    assert len({known, *others}) == 1 + len(others)


@st.composite
def explained_calls(draw: st.DrawFn) -> dict[str, Any]:
    B, Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    C = draw(st.integers(1, 60))
    S = draw(st.integers(1, min(C, 12)))
    kv_len = draw(st.lists(st.integers(S, C), min_size=B, max_size=B))
    return {
        "shape": (B, Hk * group, Hk, S, C, draw(st.sampled_from([64, 256, 512]))),
        "form": draw(st.sampled_from(["f32", "f16", "codes"])),
        "kind": draw(st.sampled_from(["causal", "window", "external", "bool", "full"])),
        "planes": (draw(st.sampled_from([1, B])), draw(st.sampled_from([1, Hk * group]))),
        "window": draw(st.integers(1, 70)),
        "kv_len": kv_len,
        "kv_start": [draw(st.integers(0, n)) for n in kv_len],
        "first_row": [draw(st.integers(0, n - S)) for n in kv_len],
        "key_offset": draw(st.sampled_from([0, 4096])),
        "return_lse": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@settings(max_examples=150)
@given(call=explained_calls())
def test_explain_counts_what_a_plain_loop_counts(call: dict[str, Any]) -> None:
    B, H, Hk, S, C, D = call["shape"]
    kind, kv_len, kv_start, first_row = (call[name] for name in ("kind", "kv_len", "kv_start", "first_row"))
    T, key_offset = max(kv_len), call["key_offset"]
    generator = torch.Generator().manual_seed(call["seed"])
    shown = torch.rand(*call["planes"], S, T, generator=generator) < 0.3
    cells = torch.where(shown, torch.rand(shown.shape, generator=generator) * 2 - 1, -math.inf).half()

    pairs, key_rows = 0, set()
    for b, h, i in itertools.product(range(B), range(H), range(S)):
        p = key_offset + first_row[b] + i
        for row in range(kv_start[b], kv_len[b]):
            k = key_offset + row
            if kind == "full":
                visible = True
            elif kind in ("causal", "window"):
                visible = k <= p and (kind == "causal" or p - k < call["window"])
            else:
                visible = bool(shown[b % shown.shape[0], h % shown.shape[1], i, row])
            pairs += visible
            if visible:
                key_rows.add((b, h // (H // Hk), row))

    offsets = torch.tensor([key_offset + n for n in first_row], dtype=torch.int32)
    q, k = torch.zeros(B, H, S, D).half(), torch.zeros(B, Hk, C, D).half()
    value_bytes = {"f32": 4 * D, "f16": 2 * D, "codes": D + 4 * max(1, D // 256)}[call["form"]]
    if call["form"] == "codes":
        codes, norms = torch.zeros(B, Hk, C, D, dtype=torch.uint8), torch.ones(B, Hk, C, max(1, D // 256))
        v = CodedValues(codes, norms, Codebook.lloyd_max(8))
    else:
        v = torch.zeros(B, Hk, C, D, dtype={"f32": torch.float32, "f16": torch.float16}[call["form"]])
    explanation = warmattn.explain(
        q,
        k,
        v,
        visible={
            "causal": Causal(offsets),
            "window": Window(call["window"], offsets),
            "external": External(cells),
            "bool": External(shown),
            "full": Full(),
        }[kind],
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        kv_start=torch.tensor(kv_start, dtype=torch.int32),
        key_offset=key_offset,
        return_lse=call["return_lse"],
    )
    assert explanation.pairs == pairs
    assert explanation.flops == 4 * pairs * D
    mask_bytes = {"external": 2 * cells.numel(), "bool": shown.numel()}.get(kind, 0)
    outputs = B * H * S * (4 * D + 4 * call["return_lse"])
    assert explanation.bytes == len(key_rows) * (2 * D + value_bytes) + 2 * q.numel() + outputs + mask_bytes


def test_explain_names_backend_tiles_and_splits_and_runs_nothing() -> None:
    q, k, v = (
        torch.zeros(1, 1, 1, 64).half(),
        torch.zeros(1, 1, 1, 64).half(),
        torch.zeros(1, 1, 1, 64).half(),
    )
    long_k, long_v = (tensor.expand(1, 1, 9000, 64) for tensor in (k, v))
    out = torch.full((1, 1, 1, 64), -7.0)
    for T, splits in ((1, 1), (4096, 1), (4097, 2), (9000, 3)):
        explanation = warmattn.explain(q, long_k, long_v, visible=Full(), kv_len=T, out=out)
        assert explanation.backend == "cpu"
        assert explanation.tiling == CpuBackend().tiling(64)
        assert explanation.splits == math.ceil(T / explanation.tiling.split) == splits
    assert bool((out == -7.0).all())
