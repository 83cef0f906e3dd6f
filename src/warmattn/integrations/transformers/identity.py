"""Which model a cache was filled by: K and V mean nothing to another."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["model_identity"]

_NO_PART_IN_K_AND_V = {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}
"""Fields of the configuration that steer `generate`; users set them on a loaded model."""

_SAMPLES = 64
"""Elements looked at in each weight: a fine-tuned model differs in nearly all of them."""


def model_identity(model: PreTrainedModel) -> str:
    """A digest of the text configuration, and of the name, shape, dtype and a sample of the elements of
    everything that a checkpoint holds: Gemma 4's scalars of layers too, which are no parameters. The
    attention implementation, names, paths and what only `generate` reads have no part in it.
    """
    general = PreTrainedConfig().to_dict().keys() - {"model_type"} | _NO_PART_IN_K_AND_V
    config = model.config.get_text_config(decoder=True).to_dict()
    specific = {name: value for name, value in config.items() if name not in general}
    digest = hashlib.sha256(json.dumps(specific, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().flatten()
        digest.update(flat[:: max(1, len(flat) // _SAMPLES)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
