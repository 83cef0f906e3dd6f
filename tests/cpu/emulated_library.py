"""Stands in for the compiled library with a build of it for another processor, run by an emulator.

A pytest plugin: with ``-p emulated_library``, and the command of ``emulated_server.cpp`` in the environment,
all tests of the process run the kernels there, on copies of their operands.
"""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from warmattn.backend.cpu import codec, native

__all__ = ["COMMAND_VARIABLE", "EmulatedLibrary", "emulated", "host_library"]

COMMAND_VARIABLE = "EMULATED_LIBRARY"
_ITEM_BYTES = {code: dtype.itemsize for dtype, code in native.DTYPES.items()}
host_library = native.load_library
"""The library of this machine, as without the plugin."""


class Region(NamedTuple):
    """Memory that a call points to: the pointer's offset in the call, and what is behind it."""

    offset: int
    address: int
    size: int
    written: bool = False


class EmulatedLibrary:
    """What `warmattn.backend.cpu.native` uses of ``ctypes.CDLL``."""

    def __init__(self, command: Sequence[str]) -> None:
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._to, self._from = self._server.stdin, self._server.stdout
        call_bytes, self._rows_bytes, count = (int(word) for word in self._from.readline().split())
        assert call_bytes == ctypes.sizeof(native._Call)
        lines = [self._from.readline().rstrip(b"\n") for _ in range(2 * count)]
        self._names, self._missing = lines[::2], lines[1::2]

    def warmattn_rows_bytes(self) -> int:
        return self._rows_bytes

    def warmattn_isa_count(self) -> int:
        return len(self._names)

    def warmattn_isa_name(self, isa: int) -> bytes:
        return self._names[isa]

    def warmattn_isa_missing(self, isa: int) -> bytes | None:
        return self._missing[isa] or None

    def warmattn_attend(self, isa: int, reference: Any) -> int:
        return self._send(0, isa, reference._obj, _regions_of_call(reference._obj))

    def warmattn_rows(self, isa: int, reference: Any) -> None:
        self._send(1, isa, reference._obj, _regions_of_rows(reference._obj))

    def _send(self, function: int, isa: int, call: ctypes.Structure, reached: Iterator[Region]) -> int:
        regions = list(reached)
        self._to.write(struct.pack("4q", function, isa, ctypes.sizeof(call), len(regions)) + bytes(call))
        for region in regions:
            self._to.write(struct.pack("3q", region.offset, region.size, region.written))
            self._to.write(ctypes.string_at(region.address, region.size))
        self._to.flush()
        (result,) = struct.unpack("q", self._receive(8))
        for region in regions:
            if region.written:
                ctypes.memmove(region.address, self._receive(region.size), region.size)
        return result

    def _receive(self, size: int) -> bytes:
        data = self._from.read(size)
        assert len(data) == size, f"the emulator ended: {self._server.wait()}"
        return data

    def close(self) -> None:
        self._to.close()
        self._server.wait()
        self._from.close()


@cache
def emulated() -> EmulatedLibrary:
    """The library behind the command in ``EMULATED_LIBRARY``."""
    return EmulatedLibrary(shlex.split(os.environ[COMMAND_VARIABLE]))


def pytest_configure() -> None:
    native.load_library = emulated


def pytest_unconfigure() -> None:
    if emulated.cache_info().currsize:
        emulated().close()


def _strided(
    call: ctypes.Structure,
    field: str,
    address: int | None,
    axes: Iterable[tuple[int, int]],
    item: int,
    *,
    written: bool = False,
) -> Iterator[Region]:
    """What ``axes``, pairs of size and stride, reach from ``address`` on; nothing behind null."""
    if address is None:
        return
    axes = list(axes)
    elements = 1 + sum((size - 1) * stride for size, stride in axes)
    size = elements * item if all(size > 0 for size, _ in axes) else 0
    yield Region(getattr(type(call), field).offset, address, size, written)


def _array(
    call: ctypes.Structure, field: str, size: int, item: int, *, written: bool = False
) -> Iterator[Region]:
    return _strided(call, field, getattr(call, field), [(size, 1)], item, written=written)


def _int64(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def _regions_of_call(call: native._Call) -> Iterator[Region]:
    """Every operand of attention, K and V up to the last key that any sequence has."""
    keys = max(_int64(call.kv_len, call.B))

    def operand(field: str, sizes: tuple[int, int, int, int], item: int) -> Iterator[Region]:
        at = getattr(call, field)
        strides = (at.batch, at.head, at.row, at.last)
        return _strided(call, field, at.data, zip(sizes, strides, strict=True), item)

    yield from operand("q", (call.B, call.H, call.S, call.D), 2)
    yield from operand("k", (call.B, call.Hk, keys, call.D), 2)
    yield from operand("v", (call.B, call.Hk, keys, call.D), _ITEM_BYTES[call.v_form])
    yield from operand("norms", (call.B, call.Hk, keys, -(-call.D // 256)), 4)
    yield from operand("mask", (call.B, call.H, call.S, keys), _ITEM_BYTES[call.mask_dtype])
    yield from _array(call, "tile_map", -(-call.S // 32) * call.map_columns, 1)
    yield from _array(call, "centroids", 256, 4)
    for lengths in ("q_offset", "kv_len", "kv_start"):
        yield from _array(call, lengths, call.B, 8)
    out = [(call.B, call.out_batch), (call.H, call.out_head), (call.S, call.out_row), (call.D, 1)]
    yield from _strided(call, "out", call.out, out, 4, written=True)
    rows = call.B * call.H * call.S * (call.splits if call.accumulator else 1)
    yield from _array(call, "maximum", rows, 4, written=True)
    yield from _array(call, "sum", rows, 4, written=True)
    yield from _array(call, "accumulator", rows * call.D, 4, written=True)


def _regions_of_rows(rows: codec._Rows) -> Iterator[Region]:
    """What the codec reads and writes."""
    decodes = rows.task == codec._DECODE
    sizes = _int64(rows.sizes, rows.rank)
    count, blocks = math.prod(sizes), -(-rows.D // 256)

    def strided(field: str, address: int | None, strides: int, last: tuple[int, int]) -> Iterator[Region]:
        axes = [*zip(sizes, _int64(strides, rows.rank), strict=True), last]
        return _strided(rows, field, address, axes, _ITEM_BYTES[rows.dtype] if field == "source" else 4)

    yield from _array(rows, "sizes", rows.rank, 8)
    yield from _array(rows, "strides", rows.rank, 8)
    yield from strided("source", rows.source, rows.strides, (rows.D, rows.last))
    if decodes:
        yield from strided("norms", rows.norms, rows.norm_strides, (blocks, rows.norm_last))
        yield from _array(rows, "norm_strides", rows.rank, 8)
    yield from _array(rows, "signs", rows.D, 4)
    yield from _array(rows, "table", 256 if decodes else 1 << rows.bits, 4)
    yield from _array(rows, "target", count * rows.D, 1 if rows.task == codec._ENCODE else 4, written=True)
    yield from _array(rows, "norms_out", count * blocks, 4, written=True)
    yield from _array(rows, "broken", count, 1, written=True)
