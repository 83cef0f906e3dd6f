"""Transformers' attention, mask and cache interfaces over warmattn; `warmattn.hf` for users."""

from warmattn.errors import Unsupported
from warmattn.integrations.arguments import MISSING

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise Unsupported(MISSING, op="warmattn.hf") from error

from warmattn.integrations.transformers.attention import attend
from warmattn.integrations.transformers.cache import WarmCache
from warmattn.integrations.transformers.masks import make_mask

__all__ = ["WarmCache", "register"]


def register() -> None:
    """Make the attention implementation "warmattn" known to Transformers, for every model of the process:
    the attention function and its mask function. May be called often.
    """
    AttentionInterface.register("warmattn", attend)
    AttentionMaskInterface.register("warmattn", make_mask)
