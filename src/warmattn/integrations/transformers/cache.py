"""`WarmCache`: a Transformers cache over one `warmattn.KVCache` per layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs

from warmattn.cache import file
from warmattn.cache.checks import check_count
from warmattn.cache.kv import KVCache
from warmattn.cache.values import FORMS
from warmattn.errors import InvalidInput, Unsupported
from warmattn.integrations.transformers.cached import CachedKeys, CachedValues
from warmattn.integrations.transformers.identity import model_identity
from warmattn.integrations.transformers.lazy import untraced

__all__ = ["WarmCache", "WarmLayer"]

_KEYS = {"f16": torch.float16, "bf16": torch.bfloat16}
_FILE_FORMAT = "warmattn.warm_cache"
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers that keep K and V of every token; what a row sees of them is the attention function's."""


class WarmLayer(CacheLayerMixin):
    """One layer's part of a `WarmCache`; Transformers calls its methods.

    A sliding layer too keeps every token, and the kernel applies the window: so it can be cropped to any
    length.

    Attributes:
        kv: the layer's cache; ``None`` before the first update, which tells B, Hk, D and the device.
        is_sliding: whether the model gives this layer a window.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, max_length: int, values: str, keys: torch.dtype, *, is_sliding: bool) -> None:
        # Not the base class's, which would assign what are properties here.
        self.kv: KVCache | None = None
        self.is_sliding = is_sliding
        self._max_length, self._values, self._keys = max_length, values, keys

    @property
    def is_initialized(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kv is not None

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """K ``[B, Hk, length, D]``, in the cache's dtype."""
        return None if self.kv is None else CachedKeys.of(self.kv, self.kv.k.dtype)

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """V ``[B, Hk, length, D]``, float32, decoded when it is read."""
        return None if self.kv is None else CachedValues.of(self.kv, torch.float32)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for rows like these, ``[B, Hk, S, D]``.

        Raises:
            Unsupported: head dim; K and V of different head dims.
        """
        B, Hk, _, D = key_states.shape
        if value_states.shape[-1] != D:
            reason = f"K has head dim {D}, V {value_states.shape[-1]}: a cache needs them equal"
            raise Unsupported(reason, op="WarmCache")
        self.kv = KVCache(
            B, Hk, self._max_length, D, values=self._values, keys=self._keys, device=key_states.device
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append S rows; return all T as tensors that warmattn's attention function reads in place."""
        if self.kv is None or (self.kv.length == 0 and self.kv.k.shape[0] != key_states.shape[0]):
            self.lazy_initialization(key_states, value_states)
        assert self.kv is not None
        self.kv.append(key_states, value_states)
        return CachedKeys.of(self.kv, key_states.dtype), CachedValues.of(self.kv, value_states.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.kv is None else self.kv.length

    def get_max_length(self) -> int:
        return self._max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, at most all: `WarmCache.crop`."""
        if self.kv is not None:
            self.kv.crop(max(0, self.kv.length + tokens_to_remove))

    def reset(self) -> None:
        if self.kv is not None:
            self.kv.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.kv is not None:
            self.kv.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv is not None:
            self.kv.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kv is not None:
            self.kv.select(indices)

    def offload(self) -> None:
        raise Unsupported("a layer stays on its device", op="WarmCache")

    prefetch = offload

    def clone(self, length: int, capacity: int) -> WarmLayer:
        """A layer with the first ``length`` tokens in memory of its own."""
        other = copy.copy(self)
        other.kv = None if self.kv is None else self.kv.clone(length, capacity=capacity)
        return other


class WarmCache(Cache):
    """K and V of a model's layers, allocated once and read in place by the attention function that
    `warmattn.hf.register` registers; every other attention function gets them decoded.

    Layers that read another layer's K and V (Gemma 4) hold none. For one run of sequences at a time; with
    ``model.generate(..., cache=cache)`` or ``model(..., cache=cache)`` it goes on where it stands.

    Attributes:
        max_length: tokens that fit.
    """

    def __init__(
        self, config: PreTrainedConfig, max_length: int, *, values: str = "f16", keys: str = "f16"
    ) -> None:
        """Describe the cache; each layer allocates at its first update.

        Args:
            config: the model's.
            max_length: tokens per sequence; one more is refused before anything is written.
            values: form of V: "f32", "f16", "bf16", "codes5", "codes6" or "codes8".
            keys: dtype of K, "f16" or "bf16". Queries are taken in it too.

        Raises:
            InvalidInput: max_length, values or keys.
            Unsupported: a layer that is not attention over the keys of all tokens.
        """
        check_count("max_length", max_length, op="WarmCache")
        for name, given, known in (("values", values, FORMS), ("keys", keys, _KEYS)):
            if given not in known:
                expected = f"one of {', '.join(known)}"
                raise InvalidInput(name, expected=expected, got=given, op="WarmCache")
        self.max_length, self._values, self._keys = max_length, values, keys
        layers: list[Any] = []
        for index, kind in enumerate(get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]):
            if kind == "dummy":
                layers.append(DummyLayer())
                continue
            if kind not in _LAYER_TYPES:
                raise Unsupported(f"layer {index} is of the kind {kind!r}", op="WarmCache")
            is_sliding = kind != "full_attention"
            layers.append(WarmLayer(max_length, values, _KEYS[keys], is_sliding=is_sliding))
        if not any(isinstance(layer, WarmLayer) for layer in layers):
            raise Unsupported("no layer of this model holds K and V of its own", op="WarmCache")
        super().__init__(layers=layers)

    def __repr__(self) -> str:
        return f"WarmCache(length={self.length}, max_length={self.max_length}, layers={len(self.layers)})"

    @property
    def own_layers(self) -> list[WarmLayer]:
        """The layers that hold K and V."""
        return [layer for layer in self.layers if isinstance(layer, WarmLayer)]

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        return min(layer.get_seq_length() for layer in self.own_layers)

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far, used or not."""
        return sum(kv.nbytes for kv in self._kvs())

    @property
    def batch_size(self) -> int:
        """B; −1 before the first update."""
        return next((kv.k.shape[0] for kv in self._kvs()), -1)

    @untraced
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append S rows ``[B, Hk, S, D]`` to a layer, and return all T.

        Raises:
            Unsupported: head dim; rows that require grad while grad is on.
            InvalidInput: a layer that the cache's model does not have; more than ``max_length`` tokens, rows
                of another shape or on another device, values that are not finite in the cache's dtype.
                Nothing has been written to the layer then.
            RuntimeError: an earlier forward pass broke off between two layers: ``crop(0)`` takes back what it
                left, ``reset()`` everything.
        """
        if layer_idx >= len(self.layers):
            expected = f"< {len(self.layers)}, the layers of the model that the cache was made for"
            raise InvalidInput("layer_idx", expected=expected, got=layer_idx, op="WarmCache.update")
        layer, first = self.layers[layer_idx], self.own_layers[0]
        if isinstance(layer, WarmLayer) and layer is not first:
            length, reached = layer.get_seq_length() + key_states.shape[-2], first.get_seq_length()
            if length != reached:
                raise _broken_off(layer_idx, length, reached)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens in every layer, sliding ones too; at most all.

        ``crop(0)`` forgets what a forward pass that broke off has left in some layers.

        Raises:
            InvalidInput: ``tokens_to_remove > 0``.
        """
        if tokens_to_remove > 0:
            expected = "<= 0: minus the number of tokens to forget"
            raise InvalidInput(
                "tokens_to_remove", expected=expected, got=tokens_to_remove, op="WarmCache.crop"
            )
        length = max(0, self.length + tokens_to_remove)
        for layer in self.own_layers:
            layer.crop(length - layer.get_seq_length())

    def check(self) -> None:
        """Raise `InvalidInput` when K or V that are not finite were appended: on a GPU nothing else tells."""
        for kv in self._kvs():
            kv.check()

    def clone(self, length: int | None = None) -> WarmCache:
        """A cache of its own with the first ``length`` tokens (``None``: all) and room for `max_length`. Only
        those rows are copied.

        Raises:
            InvalidInput: length outside ``[0, self.length]``.
        """
        return self._copied(length, self.max_length)

    def snapshot(self, length: int | None = None) -> WarmCache:
        """A clone without room for more, to be kept and cloned from (`warmattn.PrefixCache` does).

        Raises:
            InvalidInput: length outside ``[0, self.length]``.
        """
        return self._copied(length, max(1, self.length if length is None else length))

    def __deepcopy__(self, memo: dict[int, Any]) -> WarmCache:
        return self.clone()

    def save(self, path: str | Path, model: PreTrainedModel) -> None:
        """Write the tokens' K and V as one safetensors file, which appears whole or not at all.

        Args:
            path: of the file; one that is there is replaced.
            model: whose cache it is; the file says so.

        Raises:
            InvalidInput: as `check`.
            RuntimeError: as `update`.
            OSError: the file cannot be written; the old one is whole.
        """
        tensors, layers = {}, {}
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, WarmLayer) or layer.kv is None:
                continue
            if layer.kv.length != self.length:
                raise _broken_off(index, layer.kv.length, self.length)
            rows, layers[str(index)] = layer.kv.state()
            # Layers share the tables of their codec; safetensors takes no tensor twice.
            tensors |= {f"{index}.{name}": t.clone() if t.ndim == 1 else t for name, t in rows.items()}
        fields = {
            "model": model_identity(model),
            "max_length": self.max_length,
            "values": self._values,
            "keys": self._keys,
            "layers": layers,
        }
        file.write(path, tensors, fields, format=_FILE_FORMAT)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        *,
        max_length: int | None = None,
        device: str | torch.device | None = None,
    ) -> WarmCache:
        """The cache that `save` wrote.

        Args:
            path: of the file; it is mapped, and its rows are copied straight to their places.
            model: must be the one that `save` was given: the same configuration, weights and dtype.
            max_length: tokens that shall fit; ``None``: as before.
            device: ``None``: the model's.

        Raises:
            InvalidInput: another model's file, another version, a truncated or damaged file, or a max_length
                that does not hold its tokens.
            FileNotFoundError: no file.
        """
        fields, tensors = file.read(path, format=_FILE_FORMAT, op="WarmCache.load")
        identity = model_identity(model)
        if fields["model"] != identity:
            expected, got = f"a cache of this model ({identity})", f"one of {fields['model']} in {path}"
            raise InvalidInput("path", expected=expected, got=got, op="WarmCache.load")
        capacity = int(fields["max_length"]) if max_length is None else max_length
        cache = cls(model.config, capacity, values=fields["values"], keys=fields["keys"])
        for index, layer in enumerate(cache.layers):
            state = fields["layers"].get(str(index))
            if state is None or not isinstance(layer, WarmLayer):
                continue
            prefix = f"{index}."
            rows = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            layer.kv = KVCache.from_state(
                rows,
                state,
                device=model.device if device is None else device,
                capacity=capacity,
                op="WarmCache.load",
            )
        return cache

    def _copied(self, length: int | None, capacity: int) -> WarmCache:
        length = self.length if length is None else length
        other = copy.copy(self)
        other.layers = [
            layer.clone(length, capacity) if isinstance(layer, WarmLayer) else layer for layer in self.layers
        ]
        return other

    def _kvs(self) -> Iterator[KVCache]:
        return (layer.kv for layer in self.own_layers if layer.kv is not None)


def _broken_off(layer: int, length: int, expected: int) -> RuntimeError:
    return RuntimeError(
        f"WarmCache: layer {layer} is at {length} tokens, others at {expected}: an earlier forward pass "
        "broke off between two layers; crop(0) takes back what it left"
    )
