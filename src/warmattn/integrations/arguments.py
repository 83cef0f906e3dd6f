"""What more than one integration must know of Transformers, without importing it."""

from __future__ import annotations

import importlib.util

from warmattn.errors import Unsupported

__all__ = ["INEXPRESSIBLE", "MISSING", "require_transformers"]

MISSING = 'needs Transformers: pip install "warmattn[hf]"'
"""The reason of `Unsupported` where Transformers is not installed."""

INEXPRESSIBLE = ("position_bias", "s_aux", "sinks")
"""Arguments of an attention function that change its result and that `warmattn.attention` cannot say."""


def require_transformers(op: str) -> None:
    """Raise `Unsupported` where Transformers is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise Unsupported(MISSING, op=op)
