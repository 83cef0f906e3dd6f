"""``warmattn verify``: hold every backend present to the contract."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import typer
from rich.table import Table

import warmattn
from warmattn.backend import BackendStatus
from warmattn.cli.console import console, duration, mark, print_json, stderr, table
from warmattn.cli.group import ExitCode
from warmattn.errors import Unsupported
from warmattn.verification import Check, Target, run_checks

__all__ = ["verify"]


def verify(long: bool, backend: str | None, as_json: bool) -> None:
    """Run the checks on every backend that this machine has, or on the named one, and print them.

    Raises:
        Unsupported: the named backend does not exist or cannot run here.
        typer.Exit: with 1, when a check fell short.
    """
    start = time.perf_counter()
    statuses = _chosen(backend)
    measured = {name: _measure(name, status, long) for name, status in statuses.items()}
    seconds = time.perf_counter() - start

    checks = [check for backend_checks in measured.values() for check in backend_checks]
    passed = all(check.passed for check in checks)
    if as_json:
        backends = [_as_json(name, statuses[name], measured[name]) for name in statuses]
        print_json(
            "verify",
            {
                "long": long,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "seconds": seconds,
                "passed": passed,
                "backends": backends,
            },
        )
    else:
        out = console()
        for name, status in statuses.items():
            if status.available:
                out.print(
                    _table(f"The contract on backend {name}, device {status.device_types[0]}", measured[name])
                )
            else:
                out.print(f"{name}: not checked, {status.reason}")
        good = sum(check.passed for check in checks)
        out.print(mark(passed), f"{good} of {len(checks)} checks hold, in {duration(seconds)}")
    if not passed:
        raise typer.Exit(ExitCode.FELL_SHORT)


def _chosen(backend: str | None) -> dict[str, BackendStatus]:
    statuses = warmattn.backends()
    if backend is None:
        return statuses
    if backend not in statuses:
        raise Unsupported(f"backend {backend!r}: expected one of {', '.join(statuses)}", op="verify")
    if not statuses[backend].available:
        raise Unsupported(f"backend {backend!r}: {statuses[backend].reason}", op="verify")
    return {backend: statuses[backend]}


def _measure(name: str, status: BackendStatus, long: bool) -> list[Check]:
    if not status.available:
        return []
    target = Target(name, status.device_types[0], long)
    screen = stderr()
    with screen.status(f"{name}: starting", spinner="dots") as spinner:
        return list(_announced(target, spinner.update))


def _announced(target: Target, announce: Any) -> Iterator[Check]:
    for count, check in enumerate(run_checks(target), start=1):
        announce(f"{target.backend}: {count} checks done, last: {check.item}, {check.case}")
        yield check


def _as_json(name: str, status: BackendStatus, checks: list[Check]) -> dict[str, Any]:
    return {
        "name": name,
        "available": status.available,
        "reason": status.reason,
        "device": status.device_types[0] if status.available else None,
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
    }


def _table(title: str, checks: list[Check]) -> Table:
    grid = table(title)
    for heading in ("promise", "case"):
        grid.add_column(heading)
    for heading in ("measured", "at most"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("", justify="center")
    promises: dict[str, list[Check]] = {}
    for check in checks:
        promises.setdefault(check.item, []).append(check)
    for promise, rows in promises.items():
        for index, row in enumerate(rows):
            name = promise if index == 0 else ""
            grid.add_row(name, row.case, _figure(row.figure), _figure(row.bound), mark(row.passed))
        grid.add_section()
    return grid


def _figure(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:.2e}"
