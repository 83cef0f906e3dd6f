"""The two errors a call can raise. Both say which operand, what was expected and what came."""

from __future__ import annotations

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
        super().__init__(f"{op}: {operand}: {reason or f'expected {expected}, got {got}'}")


class Unsupported(NotImplementedError):
    """A valid request that this build, device or backend cannot serve.

    Attributes:
        reason: why not, in one sentence (for several backends: one reason each).
    """

    def __init__(self, reason: str, *, op: str = "attention") -> None:
        self.reason, self.op = reason, op
        super().__init__(f"{op}: {reason}")
