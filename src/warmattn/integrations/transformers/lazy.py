"""Tensors that go through a model unread, and compute their elements only for who does not know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from warmattn.errors import Unsupported

__all__ = ["LazyTensor", "untraced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """For what makes or takes lazy tensors: `torch.compile` cannot trace them, and breaks its graph there."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


class LazyTensor(Tensor):
    """A tensor with shape, dtype and device, but no memory: `elements` computes what it stands for.

    warmattn's own functions read what a subclass carries. Any other operation gets the elements, so that
    Transformers' own attention functions work on it too; it cannot be written to.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def standing_for(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """Of a subclass, which adds what its elements come from."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def elements(self) -> Tensor:
        """An ordinary tensor of this shape, dtype and device."""
        raise NotImplementedError

    def data_ptr(self) -> int:
        """There is none, and what PyTorch says instead, 0, is a crash in whoever reads from there."""
        raise Unsupported(f"{type(self).__name__} has no memory: clone() has its elements", op="warmattn.hf")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        parameters = func._schema.arguments
        given = dict(zip((p.name for p in parameters), args, strict=False)) | (kwargs or {})
        written = tree_leaves([given.get(p.name) for p in parameters if p.is_write])
        if any(isinstance(operand, LazyTensor) for operand in written):
            raise Unsupported(f"{cls.__name__} cannot be written to ({func.name()})", op="warmattn.hf")
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy.elements(), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))
