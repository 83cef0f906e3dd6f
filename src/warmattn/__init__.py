"""Precise tiled warm attention: F32-accurate, K and V read in place, a warm resume equal to the cold run
bit for bit.

The public names are resolved on first use: importing warmattn loads no kernel library and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "attention": "warmattn.api",
    "explain": "warmattn.api",
    "backends": "warmattn.backend",
    "KVCache": "warmattn.cache.kv",
    "PrefixCache": "warmattn.cache.prefix",
    "Codebook": "warmattn.codec.codebook",
    "decode_values": "warmattn.codec.turboquant",
    "encode_values": "warmattn.codec.turboquant",
    "unrotate": "warmattn.codec.turboquant",
    "CodedValues": "warmattn.codec.values",
    "InvalidInput": "warmattn.errors",
    "Unsupported": "warmattn.errors",
    "merge_partials": "warmattn.partials",
    "PRECISE_D256_BK": "warmattn.pipelines",
    "PRECISE_D256_BQ": "warmattn.pipelines",
    "PRECISE_D256_KERNEL_NAMES": "warmattn.pipelines",
    "PRECISE_D512_KERNEL_NAMES": "warmattn.pipelines",
    "prewarm": "warmattn.api",
    "Causal": "warmattn.visibility",
    "External": "warmattn.visibility",
    "Full": "warmattn.visibility",
    "Window": "warmattn.visibility",
    "tile_map": "warmattn.visibility",
}

_MODULES = ("distributed", "hf")
"""Not in ``__all__``, which every install can import whole: hf needs an extra, distributed a torch built
with it.
"""

if TYPE_CHECKING:
    from warmattn import distributed as distributed  # not in __all__
    from warmattn import hf as hf
    from warmattn.api import attention, explain, prewarm
    from warmattn.backend import backends
    from warmattn.cache.kv import KVCache
    from warmattn.cache.prefix import PrefixCache
    from warmattn.codec.codebook import Codebook
    from warmattn.codec.turboquant import decode_values, encode_values, unrotate
    from warmattn.codec.values import CodedValues
    from warmattn.errors import InvalidInput, Unsupported
    from warmattn.partials import merge_partials
    from warmattn.pipelines import (
        PRECISE_D256_BK,
        PRECISE_D256_BQ,
        PRECISE_D256_KERNEL_NAMES,
        PRECISE_D512_KERNEL_NAMES,
    )
    from warmattn.visibility import Causal, External, Full, Window, tile_map

__all__ = [
    "PRECISE_D256_BK",
    "PRECISE_D256_BQ",
    "PRECISE_D256_KERNEL_NAMES",
    "PRECISE_D512_KERNEL_NAMES",
    "Causal",
    "Codebook",
    "CodedValues",
    "External",
    "Full",
    "InvalidInput",
    "KVCache",
    "PrefixCache",
    "Unsupported",
    "Window",
    "attention",
    "backends",
    "decode_values",
    "encode_values",
    "explain",
    "merge_partials",
    "prewarm",
    "tile_map",
    "unrotate",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = importlib.import_module(f"warmattn.{name}")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'warmattn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
