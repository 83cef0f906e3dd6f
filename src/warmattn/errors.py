"""The two errors a call can raise. Both say which operand, what was expected and what came."""

from __future__ import annotations

from functools import partial

__all__ = ["InvalidInput", "Unsupported"]


class InvalidInput(ValueError):
    """An operand that does not fit the contract: wrong shape, dtype, value, device or overlap.

    Attributes:
        operand: name of the operand at fault, as the caller knows it (``"q"``, ``"kv_len"``).
        expected: what the contract asks for.
        got: what came.
        reason: the whole sentence when the three parts alone would not read well, else ``None``.
    """

    def __init__(
        self,
        operand: str,
        *,
        expected: str,
        got: object,
        op: str = "attention",
        reason: str | None = None,
    ) -> None:
        self.operand, self.expected, self.got, self.op, self.reason = (
            operand,
            expected,
            got,
            op,
            reason,
        )
        self.args = (f"{op}: {operand}: {reason or f'expected {expected}, got {got}'}",)

    def __reduce__(self) -> tuple[partial, tuple[str]]:
        """Errors cross process borders; the default would call the class with its message alone."""
        rest = {"expected": self.expected, "got": self.got, "op": self.op, "reason": self.reason}
        return partial(type(self), **rest), (self.operand,)


class Unsupported(NotImplementedError):
    """A valid request that this build, device or backend cannot serve.

    Attributes:
        reason: why not, in one sentence (for several backends: one reason each).
    """

    def __init__(self, reason: str, *, op: str = "attention") -> None:
        self.reason, self.op = reason, op
        self.args = (f"{op}: {reason}",)

    def __reduce__(self) -> tuple[partial, tuple[str]]:
        return partial(type(self), op=self.op), (self.reason,)
