"""Pipelines: which specialised kernel a call is, by its exact label, and what has been built in this process.

A pipeline is an entry point and its boolean constants, labelled ``name|index:bN|...``. The label is the
same in profilers, logs, errors and ``warmattn info``.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from warmattn.call import AttentionCall
from warmattn.errors import InvalidInput

__all__ = [
    "PRECISE_D256_BK",
    "PRECISE_D256_BQ",
    "PRECISE_D256_KERNEL_NAMES",
    "PRECISE_D512_KERNEL_NAMES",
    "REGISTRY",
    "PipelineKey",
    "Registry",
    "identity",
    "prewarm_keys",
]

PRECISE_D256_BQ = 32
PRECISE_D256_BK = 16
_PREFIX = "flash_attn_prefill_precise"
PRECISE_D256_KERNEL_NAMES = tuple(f"{_PREFIX}_d256_{form}" for form in ("v32", "v16", "vcodes"))
PRECISE_D512_KERNEL_NAMES = tuple(f"{_PREFIX}_d512_{form}" for form in ("vcodes", "v16", "v32"))

_ALIGNMENT = {64: (32, 16), 128: (32, 16), 256: (PRECISE_D256_BQ, PRECISE_D256_BK), 512: (8, 64)}
"""Rows and keys whose multiples set align_Q and align_K, by head dim."""

_FORMS = {"f32": "v32", "f16": "v16", "codes": "vcodes"}
_KINDS = ("external", "external+map", "window", "causal")
_ROUTES = tuple(itertools.product(_FORMS, _KINDS))

_EXTRAS = {
    "window": 310,  # at D = 512, where it is not one of the constants
    "softcap": 320,
    "kv_start": 321,
    "bf16_scores": 322,
    "bf16_values": 323,
    "lse": 324,
    "tensor_lengths": 325,
}


@dataclass(frozen=True, slots=True)
class PipelineKey:
    """Entry point and constants of one pipeline.

    Attributes:
        name: the entry point, ``flash_attn_prefill_precise_d256_v16`` for instance.
        constants: ``(index, on)`` pairs in label order; the optional ones are present only when on.
    """

    name: str
    constants: tuple[tuple[int, bool], ...]

    @classmethod
    def of(cls, call: AttentionCall) -> PipelineKey:
        """The pipeline that a checked call resolves to."""
        align_rows, align_keys = _ALIGNMENT[call.D]
        form = "vcodes" if call.coded else "v32" if call.v.dtype == torch.float32 else "v16"
        return cls.make(
            call.D,
            form,
            align_q=call.S % align_rows == 0,
            align_k=not isinstance(call.kv_len, Tensor) and call.kv_len % align_keys == 0,
            has_mask=call.mask is not None,
            do_causal=call.causal,
            has_map=call.tile_map is not None,
            has_window=call.window is not None,
            extras=tuple(
                name
                for name, on in (
                    ("softcap", call.softcap is not None),
                    ("kv_start", isinstance(call.kv_start, Tensor) or call.kv_start != 0),
                    ("bf16_scores", call.q.dtype == torch.bfloat16),
                    ("bf16_values", call.v.dtype == torch.bfloat16),
                    ("lse", call.lse is not None),
                    (
                        "tensor_lengths",
                        any(isinstance(n, Tensor) for n in (call.q_offset, call.kv_len, call.kv_start)),
                    ),
                )
                if on
            ),
        )

    @classmethod
    def make(
        cls,
        head_dim: int,
        form: str,
        *,
        align_q: bool,
        align_k: bool,
        has_mask: bool = False,
        do_causal: bool = False,
        has_map: bool = False,
        has_window: bool = False,
        extras: tuple[str, ...] = (),
    ) -> PipelineKey:
        constants = [
            (200, align_q),
            (201, align_k),
            (300, has_mask),
            (301, do_causal),
            (303, has_map),
        ]
        if head_dim != 512:
            constants.append((310, has_window))
        elif has_window:
            extras = ("window", *extras)
        constants += [(_EXTRAS[name], True) for name in extras]
        return cls(f"{_PREFIX}_d{head_dim}_{form}", tuple(constants))

    @property
    def head_dim(self) -> int:
        return int(self.name.rsplit("_", 2)[1][1:])

    @property
    def form(self) -> str:
        """``v32``, ``v16`` or ``vcodes``."""
        return self.name.rsplit("_", 1)[1]

    def on(self, index: int) -> bool:
        """Whether the constant of that index is on."""
        return (index, True) in self.constants

    @property
    def label(self) -> str:
        return "|".join([self.name, *(f"{index}:b{int(on)}" for index, on in self.constants)])


def prewarm_keys(sliding: tuple[str, str] | None, global_: str | None) -> list[PipelineKey]:
    """Every pipeline that a model's route can issue: four alignments, the D = 256 key before the D = 512 one.

    Raises:
        InvalidInput: an unknown form or kind.
    """
    if sliding is not None and sliding not in _ROUTES:
        expected = f"(form, kind) of {(*_FORMS,)} and {_KINDS}"
        raise InvalidInput("sliding", expected=expected, got=repr(sliding), op="prewarm")
    if global_ is not None and global_ not in tuple(_FORMS):
        raise InvalidInput("global_", expected=f"one of {(*_FORMS,)}", got=repr(global_), op="prewarm")
    keys = []
    for align_q in (False, True):
        for align_k in (False, True):
            if sliding is not None:
                form, kind = sliding
                keys.append(
                    PipelineKey.make(
                        256,
                        _FORMS[form],
                        align_q=align_q,
                        align_k=align_k,
                        has_mask=kind.startswith("external"),
                        do_causal=kind in ("window", "causal"),
                        has_map=kind == "external+map",
                        has_window=kind == "window",
                    )
                )
            if global_ is not None:
                keys.append(
                    PipelineKey.make(512, _FORMS[global_], align_q=align_q, align_k=align_k, do_causal=True)
                )
    return keys


def identity(labels: Iterable[str], *, backend: str) -> str:
    """A short hash of labels, backend and warmattn's version, for a server to log and compare."""
    from warmattn import __version__

    text = "\n".join([__version__, backend, *labels])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Status = Literal["building", "ready", "failed"]


class Registry:
    """Built pipelines by (backend, device, label). Different pipelines build side by side, the same one
    once.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[tuple[str, str, PipelineKey], threading.Lock] = {}
        self._built: dict[tuple[str, str, PipelineKey], Any] = {}
        self._status: dict[tuple[str, str, PipelineKey], Status] = {}

    def get_or_build(
        self, backend: str, device: torch.device, key: PipelineKey, build: Callable[[PipelineKey], Any]
    ) -> Any:
        """The built pipeline; builds it on first use. A failed build raises and is tried anew on the next
        call.
        """
        entry = (backend, str(device), key)
        built = self._built.get(entry)
        if built is not None:
            return built
        with self._guard:
            lock = self._locks.setdefault(entry, threading.Lock())
        with lock:
            if entry not in self._built:
                self._note(entry, "building")
                try:
                    self._built[entry] = build(key)
                except BaseException:
                    self._note(entry, "failed")
                    raise
                self._note(entry, "ready")
            return self._built[entry]

    def _note(self, entry: tuple[str, str, PipelineKey], status: Status) -> None:
        with self._guard:  # or `status` would find its dictionary changed under it
            self._status[entry] = status

    def status(self) -> dict[tuple[str, str, str], Status]:
        """``{(backend, device, label): "building" | "ready" | "failed"}``."""
        with self._guard:
            return {(backend, device, key.label): s for (backend, device, key), s in self._status.items()}


REGISTRY = Registry()
