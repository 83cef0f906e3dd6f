"""``warmattn info``: what there is to know when something does not work, above all when torch does not."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import warmattn
from warmattn.cli.console import console, facts, print_json, quantity

__all__ = ["info"]

_PACKAGES = ("torch", "numpy", "safetensors", "typer", "rich", "transformers", "triton", "matplotlib")

_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "avx512_vnni"),
    *("amx_tile", "amx_bf16", "amx_fp16", "amx_int8"),
    *("asimd", "asimdhp", "fphp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
"""CPU flags, as Linux spells them, that decide which kernels run and how fast."""


def info(as_json: bool) -> None:
    """Print versions, CPU, devices, backends with reasons, and the registry. Never fails: what cannot be
    found out is a line that says why.
    """
    document: dict[str, Any] = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: _installed(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "torch": _or_error(_torch),
        "backends": _or_error(_backends),
        "cpu_kernels": _or_error(_cpu_kernels),
        "pipelines": _or_error(_pipelines),
    }
    if as_json:
        print_json("info", document)
    else:
        console().print(facts(_lines(document)))


def _or_error(section: Callable[[], Any]) -> Any:
    """A section, or the reason why there is none: a broken torch can raise anything when it is imported."""
    try:
        return section()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    found: dict[str, str] = dict.fromkeys(("model name", "flags", "Features"), "")
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in found:
                found[key.strip()] = value.strip()
    flags = {*found["flags"].split(), *found["Features"].split()}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": found["model name"] or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable": usable,
        "flags": [flag for flag in _FLAGS if flag in flags],
    }


def _torch() -> dict[str, Any]:
    import torch

    devices = [{"device": "cpu", "name": torch.backends.cpu.get_cpu_capability(), "memory": None}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        name = f"{properties.name} (sm_{properties.major}{properties.minor})"
        devices.append({"device": f"cuda:{index}", "name": name, "memory": properties.total_memory})
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Metal", "memory": None})
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "devices": devices,
    }


def _backends() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "available": status.available,
            "reason": status.reason,
            "devices": list(status.device_types),
        }
        for name, status in warmattn.backends().items()
    ]


def _cpu_kernels() -> dict[str, Any]:
    """The compiled kernels: which run, which was asked for, and what keeps others from running here."""
    from warmattn.backend.cpu import native

    selected = native.selected_isa()
    return {
        "selected": None if selected is None else selected.name,
        "forced": os.environ.get(native.ISA_VARIABLE),
        "missing": {isa.name: isa.missing for isa in native.isas()},
    }


def _pipelines() -> list[dict[str, Any]]:
    from warmattn.pipelines import REGISTRY

    return [
        {"backend": backend, "device": device, "label": label, "status": status}
        for (backend, device, label), status in REGISTRY.status().items()
    ]


def _lines(document: dict[str, Any]) -> dict[str, str]:
    cpu, torch, packages = document["cpu"], document["torch"], document["packages"]
    lines = {
        "warmattn": f"{warmattn.__version__} in {Path(warmattn.__file__).parent}",
        "python": f"{document['python']} at {document['executable']}",
        "platform": document["platform"],
        "cpu": f"{cpu['model']}, {cpu['usable']} of {cpu['cores']} cores",
        "cpu flags": " ".join(cpu["flags"]) or "none that matter here",
        **{name: installed or "not installed" for name, installed in packages.items()},
    }
    if "error" in torch:
        lines["torch"] += f", cannot be used: {torch['error']}"
    else:
        lines["torch"] = f"{torch['version']}, {torch['threads']} threads"
        for device in torch["devices"]:
            memory = f", {quantity(device['memory'], 'B')}" if device["memory"] else ""
            lines[f"device {device['device']}"] = device["name"] + memory
    return {
        **lines,
        **_backend_lines(document["backends"]),
        **_kernel_lines(document["cpu_kernels"]),
        **_pipeline_lines(document["pipelines"]),
    }


def _backend_lines(backends: Any) -> dict[str, str]:
    if "error" in backends:
        return {"backends": f"cannot be listed: {backends['error']}"}
    return {
        f"backend {status['name']}": f"available on {', '.join(status['devices'])}"
        if status["available"]
        else f"not available: {status['reason']}"
        for status in backends
    }


def _kernel_lines(kernels: Any) -> dict[str, str]:
    if "error" in kernels:
        return {"cpu kernels": kernels["error"]}
    if kernels["selected"] is None:
        return {"cpu kernels": "not built: torch operations serve"}
    why = "as WARMATTN_CPU_ISA says" if kernels["forced"] else "the fastest that runs here"
    lines = {"cpu kernels": f"{kernels['selected']}, {why}"}
    for name, missing in kernels["missing"].items():
        if missing is not None:
            lines[f"cpu kernels {name}"] = f"cannot run: {missing}"
    return lines


def _pipeline_lines(pipelines: Any) -> dict[str, str]:
    if "error" in pipelines:
        return {"pipelines": f"cannot be listed: {pipelines['error']}"}
    if not pipelines:
        return {"pipelines": "none built in this process"}
    return {entry["label"]: f"{entry['status']} on {entry['device']}" for entry in pipelines}
