"""warmattn in Hugging Face Transformers: an attention implementation and a cache (docs/transformers.md).

warmattn.hf.register()
model.set_attn_implementation("warmattn")
cache = warmattn.hf.WarmCache(model.config, max_length=8192, values="codes8")
model.generate(**inputs, cache=cache)
"""

from warmattn.integrations.transformers import WarmCache, register

__all__ = ["WarmCache", "register"]
