"""Which model a cache was filled by: K and V mean nothing to another."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["model_identity"]

_SAMPLES = 64
"""Elements looked at in each weight: a fine-tuned model differs in nearly all of them."""


def model_identity(model: PreTrainedModel) -> str:
    """A digest of the text configuration, and of every parameter's name, shape, dtype and a sample of its
    elements. The attention implementation, names and paths have no part in it.
    """
    general = PreTrainedConfig().to_dict().keys() - {"model_type"}
    config = model.config.get_text_config(decoder=True).to_dict()
    specific = {name: value for name, value in config.items() if name not in general}
    digest = hashlib.sha256(json.dumps(specific, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().flatten()
        digest.update(flat[:: max(1, len(flat) // _SAMPLES)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
