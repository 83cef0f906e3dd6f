"""Real attention operands: what a Transformers model hands to its attention layers in one forward pass.

The demo and ``warmattn run`` read them. The model to take them from ships with the package: a byte-level
language model of the Gemma 4 architecture, described in ``demo_model/README.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from warmattn.errors import InvalidInput, Unsupported
from warmattn.integrations.arguments import INEXPRESSIBLE, require_transformers
from warmattn.visibility import Causal, Window

if TYPE_CHECKING:
    from transformers import Gemma4ForCausalLM, PreTrainedModel

__all__ = ["CapturedLayer", "capture", "load_demo_model", "load_demo_text", "save_capture"]

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"

_NAME = "warmattn_capture"
"""Of the recording attention function, in Transformers' two registries."""


@dataclass(frozen=True, slots=True)
class CapturedLayer:
    """What one attention layer computed with: the operands of a cold `warmattn.attention` call, B = 1, S = T.

    Attributes:
        q: float16 ``[1, H, S, D]``, after the norm and the rotary embedding.
        k: float16 ``[1, Hk, S, D]``, likewise.
        v: float32 ``[1, Hk, S, D]``.
        scale: factor of the scores.
        window: keys that a row sees, itself included; ``None`` is causal.
        layer: index in the model.
        model: name of the model.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None
    layer: int
    model: str

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def visible(self) -> Causal | Window:
        return Causal(0) if self.window is None else Window(self.window, 0)


def load_demo_model() -> Gemma4ForCausalLM:
    """The model that ships with the package, in float32 on the CPU; its tokens are bytes.

    Raises:
        Unsupported: Transformers is not installed.
    """
    require_transformers("load_demo_model")
    from transformers import Gemma4ForCausalLM

    with no_progress_bar():
        return Gemma4ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def load_demo_text() -> bytes:
    """The text that ships with the model: ASCII, a little over 8,192 bytes."""
    return (DEMO_MODEL / "text.txt").read_bytes()


def capture(
    model: PreTrainedModel, token_ids: Tensor | Sequence[int], layers: Collection[int] | None = None
) -> list[CapturedLayer]:
    """Run ``model`` over a text once, without a cache, and return what its attention layers were given.

    The model computes what it would with Transformers' own "sdpa"; its attention implementation is put back
    afterwards. The mask that the model built is compared with the visibility that is recorded, cell by cell.

    Args:
        model: a decoder whose layers go through Transformers' ``AttentionInterface``.
        token_ids: ints ``[S]``; for a byte-level model, ``bytes`` will do.
        layers: indices of the layers to return, default all.

    Returns:
        The layers in ascending order, on the model's device.

    Raises:
        InvalidInput: token ids or layer indices outside the model's.
        Unsupported: Transformers is not installed; or a layer attends in a way that `CapturedLayer` cannot
            say (another mask, a softcap, sinks, a position bias, dropout, K or Q past the range of float16).
    """
    require_transformers("capture")
    config = model.config.get_text_config()
    wanted = range(config.num_hidden_layers) if layers is None else layers
    if not set(wanted) <= set(range(config.num_hidden_layers)):
        _refuse("layers", f"indices in [0, {config.num_hidden_layers})", sorted(wanted))
    ids = _checked_ids(token_ids, config.vocab_size).to(model.device)

    recorder = _Recorder(frozenset(wanted), Path(model.name_or_path or type(model).__name__).name)
    with torch.no_grad(), _recording(config, recorder):
        model.base_model(input_ids=ids, use_cache=False)  # without the head: its logits may be huge
    if len(recorder.captured) != len(recorder.wanted):
        missing = sorted(recorder.wanted - recorder.captured.keys())
        raise Unsupported(f"layers {missing} do not go through AttentionInterface", op="capture")
    return [recorder.captured[layer] for layer in sorted(recorder.captured)]


def save_capture(path: Path, layer: CapturedLayer) -> None:
    """Write a layer as a call file, which ``warmattn run`` reads (docs/cli.md has the format).

    Raises:
        OSError: the file cannot be written.
    """
    metadata = {
        "format": "warmattn-attention",
        "version": "1",
        "visible": "causal" if layer.window is None else "window",
        "q_offset": "0",
        "kv_len": str(layer.k.shape[2]),
        "scale": repr(layer.scale),
        "layer": str(layer.layer),
        "model": layer.model,
    }
    if layer.window is not None:
        metadata["window"] = str(layer.window)
    save_file({"q": layer.q, "k": layer.k, "v": layer.v}, path, metadata=metadata)


@dataclass(slots=True)
class _Recorder:
    """What one `capture` wants, and has so far."""

    wanted: frozenset[int]
    model: str
    captured: dict[int, CapturedLayer] = field(default_factory=dict)

    def record(
        self,
        module: torch.nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> None:
        """Keep the operands if the layer is wanted and `CapturedLayer` can say all it does."""
        layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        if layer not in self.wanted:
            return
        for name in ("softcap", *INEXPRESSIBLE):
            if arguments.get(name) is not None:
                raise Unsupported(f"layer {layer} attends with {name}", op="capture")
        if arguments.get("dropout"):
            raise Unsupported(f"layer {layer} attends with dropout: call model.eval() first", op="capture")
        scale, window = arguments.get("scaling"), arguments.get("sliding_window")
        causal = arguments.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        S, T = q.shape[2], k.shape[2]
        if S != T or not torch.equal(_seen_by_model(mask, S, causal), _seen(S, window)):
            kind = "causal" if window is None else f"window of {window}"
            raise Unsupported(f"the model's mask for layer {layer} is not the {kind} one", op="capture")
        self.captured[layer] = CapturedLayer(
            q=_narrowed(q, layer, "Q"),
            k=_narrowed(k, layer, "K"),
            v=_copied(v, torch.float32),
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            window=window,
            layer=layer,
            model=self.model,
        )


_recorder: ContextVar[_Recorder] = ContextVar(_NAME)
"""The recorder of the running `capture`: the registries are global and keep what they are given."""


@contextmanager
def _recording(config: Any, recorder: _Recorder) -> Iterator[None]:
    """Inside, the decoder that ``config`` describes records into ``recorder``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    previous, token = config._attn_implementation, _recorder.set(recorder)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = previous
        _recorder.reset(token)


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Transformers' "sdpa", with its operands recorded."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _recorder.get().record(module, query, key, value, mask, arguments)
    return sdpa_attention_forward(module, query, key, value, mask, **arguments)


def _seen_by_model(mask: Tensor | None, S: int, causal: bool) -> Tensor:
    """bool ``[S, S]``: the keys each row sees in Transformers' "sdpa"; without a mask, by the causal flag."""
    if mask is not None:
        return mask[0, 0].cpu()
    seen = torch.ones(S, S, dtype=torch.bool)
    return seen.tril() if causal else seen


def _seen(S: int, window: int | None) -> Tensor:
    """bool ``[S, S]``: ``k <= p``, and ``p - k < window`` where there is one."""
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    return seen if window is None else seen.triu(1 - window)


def _narrowed(rows: Tensor, layer: int, name: str) -> Tensor:
    narrow = _copied(rows, torch.float16)
    if not narrow.isfinite().all():
        raise Unsupported(f"{name} of layer {layer} is past the range of float16", op="capture")
    return narrow


def _copied(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _checked_ids(token_ids: Tensor | Sequence[int], vocabulary: int) -> Tensor:
    """int64 ``[1, S]``."""
    expected = f"at least one int in [0, {vocabulary}), in one dimension"
    ids = token_ids if isinstance(token_ids, Tensor) else torch.tensor(list(token_ids))
    if ids.ndim != 1 or ids.numel() == 0 or ids.is_floating_point():
        _refuse("token_ids", expected, f"{ids.dtype} {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        _refuse("token_ids", expected, f"{int(ids.min())} ... {int(ids.max())}")
    return ids.to(torch.int64)[None]


def _refuse(operand: str, expected: str, got: object) -> None:
    raise InvalidInput(operand, expected=expected, got=got, op="capture")


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Inside, Transformers loads in silence: four megabytes are no progress to watch."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
