"""Streams, threads, graphs, allocation: how calls are launched on a GPU (contract, section 9)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from warmattn import Causal, CodedValues, External, attention, tile_map
from warmattn.testing import Inputs, assert_same_bits, make_inputs

SLEEP = 800_000_000
"""Cycles, about two fifths of a second."""
ROUNDS = 50

Result = tuple[Tensor, Tensor]

each_head_dim = pytest.mark.parametrize("D", [256, 512])
each_form = pytest.mark.parametrize("values", ["f16", "f32", "codes8"])


def same_bits(actual: Result, expected: Result) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


def split_inputs(seed: int, device: torch.device, D: int, values: str) -> Inputs:
    """Few rows over several splits: partial results wait in the workspace for a second kernel."""
    return make_inputs(seed, device=device, S=20, T=9000, D=D, H=4, Hk=2, values=values)


def attend(x: Inputs, **arguments: Any) -> Result:
    visible = Causal(x.kv_len - x.q.shape[2])
    operands = {"visible": visible, "kv_len": x.kv_len} | arguments
    return attention(x.q, x.k, x.v, return_lse=True, **operands)


def like(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Operands of the same shapes."""
    if isinstance(x.v, CodedValues):
        v: Tensor | CodedValues = replace(x.v, codes=change(x.v.codes), norms=change(x.v.norms))
    else:
        v = change(x.v)
    return Inputs(change(x.q), change(x.k), v, x.kv_len)


def copy_into(x: Inputs, y: Inputs) -> None:
    """Write ``y``'s operands where ``x``'s lie."""
    x.q.copy_(y.q)
    x.k.copy_(y.k)
    if isinstance(x.v, CodedValues):
        assert isinstance(y.v, CodedValues)
        x.v.codes.copy_(y.v.codes)
        x.v.norms.copy_(y.v.norms)
    else:
        assert isinstance(y.v, Tensor)
        x.v.copy_(y.v)


# Streams.


@each_form
@each_head_dim
def test_the_current_stream_orders_the_call(seed: int, device: torch.device, D: int, values: str) -> None:
    """Operands that appear late on a side stream are waited for, and the host waits for nothing."""
    x = split_inputs(seed, device, D, values)
    expected = attend(x)
    late = like(x, torch.zeros_like)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(x)  # the stream's workspace
        torch.cuda._sleep(SLEEP)
        copy_into(late, x)
        result = attend(late)
        assert not stream.query(), "the call waited for the stream"
    torch.cuda.synchronize()
    same_bits(result, expected)


@each_form
def test_two_streams_at_once(seed: int, device: torch.device, values: str) -> None:
    """Each stream has operands and results of its own, and must have a workspace of its own."""
    inputs = [split_inputs(seed + i, device, 256, values) for i in range(2)]
    expected = [attend(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[Result]] = [[] for _ in inputs]
    for _ in range(ROUNDS):
        for x, stream, into in zip(inputs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(attend(x))
    torch.cuda.synchronize()
    for into, wanted in zip(results, expected, strict=True):
        for result in into:
            same_bits(result, wanted)


@contextmanager
def eager_switching() -> Iterator[None]:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
@pytest.mark.parametrize("values", ["f16", "codes8"])
def test_threads_at_once(seed: int, device: torch.device, values: str, streams: str) -> None:
    """Several kernels make a call: those of two threads must not meet in one workspace."""
    count = 4
    inputs = [split_inputs(seed + i, device, 256, values) for i in range(count)]
    expected = [attend(x) for x in inputs]
    shared = torch.cuda.Stream()
    torch.cuda.synchronize()

    def worker(i: int) -> list[Result]:
        stream = shared if streams == "one stream" else torch.cuda.Stream()
        with torch.cuda.stream(stream):
            return [attend(inputs[i]) for _ in range(ROUNDS)]

    with eager_switching(), ThreadPoolExecutor(count) as pool:
        results = list(pool.map(worker, range(count)))
    torch.cuda.synchronize()
    for of_thread, wanted in zip(results, expected, strict=True):
        for result in of_thread:
            same_bits(result, wanted)


def test_the_device_of_the_operands(seed: int, device: torch.device) -> None:
    """Whatever device is current."""
    x = split_inputs(seed, device, 256, "f16")
    expected = attend(x)
    for index in range(torch.cuda.device_count()):
        there = torch.device("cuda", index)
        result = attend(like(x, lambda tensor, there=there: tensor.to(there)))
        assert result[0].device == there
        same_bits((result[0].to(device), result[1].to(device)), expected)


# What a call takes from the host.


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # a prototype, says torch
@pytest.mark.parametrize("lengths", ["ints", "tensors"])
@each_form
@each_head_dim
def test_no_allocation_and_no_synchronisation(
    seed: int, device: torch.device, D: int, values: str, lengths: str
) -> None:
    """When ``out`` is given and the workspace has grown."""
    x = split_inputs(seed, device, D, values)
    q_offset: int | Tensor = x.kv_len - 20
    kv_len: int | Tensor = x.kv_len
    if lengths == "tensors":
        q_offset, kv_len = (
            torch.tensor([number], dtype=torch.int32, device=device) for number in (q_offset, kv_len)
        )
    out = torch.empty(x.q.shape, device=device)

    def call() -> None:
        attention(x.q, x.k, x.v, visible=Causal(q_offset), kv_len=kv_len, out=out)

    def allocations() -> int:
        return torch.cuda.memory_stats(device)["allocation.all.allocated"]

    call()
    torch.cuda.synchronize()
    expected = out.clone()
    before = allocations()
    with no_synchronisation():
        for _ in range(3):
            out.fill_(math.nan)
            call()
    assert allocations() == before
    assert_same_bits(out, expected)


@pytest.mark.parametrize("values", ["f16", "f32", "codes8"])
def test_the_workspace_holds_no_head(device: torch.device, values: str) -> None:
    """A decoded or widened head of this cache takes 128 MiB, and S · T numbers more."""
    S, T, D = 4096, 131_072, 512
    q = torch.zeros(1, 4, S, D, dtype=torch.float16, device=device)
    k = torch.zeros(1, 1, T, D, dtype=torch.float16, device=device)
    if values == "codes8":
        small = make_inputs(0, device=device, S=1, T=1, C=1, D=D, values="codes8").v
        assert isinstance(small, CodedValues)
        v: Tensor | CodedValues = replace(
            small, codes=small.codes.repeat(1, 1, T, 1), norms=small.norms.repeat(1, 1, T, 1)
        )
    else:
        v = torch.ones(1, 1, T, D, dtype=torch.float16 if values == "f16" else torch.float32, device=device)
    out = torch.empty(q.shape, device=device)
    attention(q[:, :, :1], k, v, visible=Causal(0), out=out[:, :, :1])  # loads code
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    attention(q, k, v, visible=Causal(T - S), out=out)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated(device) - before < 64 * 2**20


@each_form
@each_head_dim
def test_nothing_is_read_before_it_is_written(seed: int, device: torch.device, D: int, values: str) -> None:
    """The workspace and the outputs hold NaN of an earlier call, and lie where torch poisons new memory."""
    x = split_inputs(seed, device, D, values)
    expected = attend(x)
    nan = torch.full((1, 4, 300, D), math.nan, dtype=torch.float16, device=device)
    out = torch.full(x.q.shape, math.nan, device=device)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    try:
        attend(replace(x, q=nan))
        result = attend(x, out=out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert result[0] is out
    same_bits(result, expected)


# Graphs.


@pytest.mark.parametrize("stream", ["torch's stream", "a warm stream"])
@each_form
@each_head_dim
def test_a_replay_has_the_bits_of_eager_calls(
    seed: int, device: torch.device, D: int, values: str, stream: str
) -> None:
    """Two calls in a graph, with growing lengths and other operands at every replay. Meanwhile a larger call
    on the same stream makes its workspace grow; the graph keeps the one it was captured with.
    """
    x = split_inputs(seed, device, D, values)
    static = like(x, torch.clone)
    q_offset, kv_len = torch.tensor([[4000], [4020]], dtype=torch.int32, device=device)
    side = torch.cuda.Stream() if stream == "a warm stream" else None

    def both(x: Inputs) -> list[Result]:
        lengths = {"visible": Causal(q_offset), "kv_len": kv_len}
        return [attend(x, **lengths), attend(x)]

    both(static)
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = both(static)

    larger = make_inputs(seed, device=device, S=100, T=9000, D=D, H=4, Hk=2, values=values)
    newcomers = []
    for i in range(3):
        fresh = split_inputs(seed + i, device, D, values)
        copy_into(static, fresh)
        q_offset.fill_(4000 + 1000 * i)
        kv_len.fill_(4020 + 1000 * i)
        with torch.cuda.stream(side):
            attend(larger)
            newcomers += [torch.full((2**18,), math.nan, device=device) for _ in range(4)]
        torch.cuda.synchronize()
        for result in results:
            for tensor in result:
                tensor.fill_(math.nan)
        graph.replay()
        expected = both(fresh)
        torch.cuda.synchronize()
        for result, wanted in zip(results, expected, strict=True):
            same_bits(result, wanted)
    assert all(bool(tensor.isnan().all()) for tensor in newcomers), "the graph wrote to memory given back"


def test_a_replay_with_another_mask(seed: int, device: torch.device) -> None:
    """The map is made inside the graph, from the mask as it is at the replay."""
    S, T = 70, 500
    x = make_inputs(seed, device=device, S=S, T=T, D=256, H=4, Hk=2, values="f16")
    generator = torch.Generator().manual_seed(seed)
    masks = [(torch.rand(S, T, generator=generator) < share).to(device) for share in (0.0, 0.5, 1.0)]
    static = masks[0].clone()

    def call(mask: Tensor) -> Result:
        return attend(x, visible=External(mask, tile_map(mask)))

    call(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(static)
    for mask in masks:
        static.copy_(mask)
        graph.replay()
        same_bits(result, call(mask))


# torch.compile.


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("values", ["f16", "codes8"])
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_a_full_graph_of_the_compiler_has_the_bits_of_eager(
    seed: int, device: torch.device, values: str, compiler: str
) -> None:
    x = split_inputs(seed, device, 256, values)
    visible = Causal(x.kv_len - 20)

    def halved(q: Tensor, out: Tensor | None) -> Result:
        return attention(q / 2, x.k, x.v, visible=visible, kv_len=x.kv_len, out=out, return_lse=True)

    torch._dynamo.reset()
    run = torch.compile(halved, backend=compiler, fullgraph=True)
    expected = halved(x.q, None)
    out = torch.full(x.q.shape, math.nan, device=device)
    same_bits(run(x.q, None), expected)
    result = run(x.q, out)
    assert result[0] is out
    same_bits(result, expected)
    torch._dynamo.reset()
