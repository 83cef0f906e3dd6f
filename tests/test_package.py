"""The package's outside: its public names, what importing it costs, and which way its imports flow."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import warmattn

SOURCE = Path(warmattn.__file__).parent

PUBLIC_NAMES = (
    "attention",
    "Causal",
    "Window",
    "External",
    "Full",
    "tile_map",
    "merge_partials",
    "CodedValues",
    "Codebook",
    "encode_values",
    "decode_values",
    "unrotate",
    "prewarm",
    "explain",
    "backends",
    "KVCache",
    "PrefixCache",
    "InvalidInput",
    "Unsupported",
    "PRECISE_D256_KERNEL_NAMES",
    "PRECISE_D512_KERNEL_NAMES",
    "PRECISE_D256_BQ",
    "PRECISE_D256_BK",
)

LAYERS = (
    ("errors", "elementary"),
    ("memory",),
    ("visibility", "codec"),
    ("call",),
    ("cost", "partials", "reference", "pipelines"),
    ("backend",),
    ("sharding",),
    ("plan", "ops"),
    ("api",),
    ("cache", "testing", "workloads"),
    ("verification", "integrations", "model", "distributed"),
    ("hf",),
    ("cli",),
    ("__main__",),
)
"""Top-level modules and packages; each may import only from layers above its own line, and from itself."""

RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}
PUBLIC_FACE = RANK["api"]
"""Only what lies above this rank may use the names of `warmattn` itself, which come from everywhere below."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package but its root, by dotted name without ``warmattn.``."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:
            yield ".".join(parts), path


def imports_of(path: Path) -> Iterator[str]:
    """What a file imports of the package: ``call.AttentionCall``, or ``""`` for the package itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (".".join(name.split(".")[1:]) for name in names if name.split(".")[0] == "warmattn")


def upward_edges(module: str, path: Path) -> list[str]:
    unit = module.split(".")[0]
    rank = RANK[unit]
    edges = []
    for name in imports_of(path):
        target = name.split(".")[0]
        if target in RANK:
            allowed = target == unit or RANK[target] < rank
        else:
            allowed = name == "__version__" or rank > PUBLIC_FACE
        if not allowed:
            edges.append(f"{module} imports {name}")
    return edges


def backend_edges(module: str, path: Path) -> list[str]:
    """A backend imports the protocol and itself, no other backend; the protocol imports none."""
    own = ".".join(module.split(".")[:2])
    names = [name.split(".") for name in imports_of(path)]
    others = {f"backend.{name[1]}" for name in names if name[0] == "backend" and len(name) > 1}
    packages = {f"backend.{child.name}" for child in (SOURCE / "backend").iterdir() if child.is_dir()}
    return [f"{module} imports {other}" for other in sorted(others & packages - {own})]


def loaded_by(statements: str) -> set[str]:
    """Names of the modules that a fresh process has loaded after running the statements."""
    program = f"import sys\n{statements}\nprint(*sys.modules, sep='\\n')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_public_names_are_those_of_the_contract():
    assert sorted(warmattn.__all__) == sorted(PUBLIC_NAMES)
    assert set(PUBLIC_NAMES) <= set(dir(warmattn))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_resolves(name: str):
    value = getattr(warmattn, name)
    assert name.startswith("PRECISE_") or value.__doc__, f"{name} has no docstring"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        warmattn.flash  # noqa: B018


def test_distributed_is_resolved_when_it_is_asked_for():
    assert "distributed" in dir(warmattn)
    assert "torch.distributed.tensor" not in loaded_by("import warmattn; warmattn.distributed.attention")


def test_hf_is_resolved_when_it_is_asked_for():
    assert "hf" in dir(warmattn)
    assert "hf" not in warmattn.__all__, "it needs an extra"
    loaded_by("import warmattn; warmattn.hf.register()\nfrom warmattn.hf import WarmCache")


def test_hf_names_its_extra():
    loaded_by(
        """
import sys
sys.modules["transformers"] = None  # as if it were not installed
import warmattn
try:
    warmattn.hf
except warmattn.Unsupported as error:
    assert str(error) == 'warmattn.hf: needs Transformers: pip install "warmattn[hf]"', error
else:
    raise AssertionError("no error")
"""
    )


def test_importing_the_package_loads_nothing_else():
    loaded = loaded_by("import warmattn")
    assert {name for name in loaded if name.startswith("warmattn")} == {"warmattn"}
    assert not loaded & {"torch", "numpy", "triton", "transformers", "typer", "rich"}


def test_using_every_public_name_loads_no_compiler_and_no_backend():
    loaded = loaded_by("import warmattn\nfor name in warmattn.__all__: getattr(warmattn, name)")
    assert "torch" in loaded
    assert not loaded & {"torch._dynamo", "torch._inductor", "triton", "transformers", "typer", "matplotlib"}
    assert not {name for name in loaded if name.startswith("warmattn.backend.")}


def test_importing_the_command_line_loads_no_torch():
    assert not loaded_by("import warmattn.cli") & {"torch", "transformers", "matplotlib"}


@pytest.mark.parametrize(("module", "path"), [pytest.param(*entry, id=entry[0]) for entry in modules()])
def test_imports_flow_one_way(module: str, path: Path):
    assert module.split(".")[0] in RANK, f"{module}: say in LAYERS where it belongs"
    assert upward_edges(module, path) == []
    if module.split(".")[0] == "backend":
        assert backend_edges(module, path) == []


def test_base_install_needs_only_what_is_declared():
    """What a module imports at its top is a dependency of the base install; extras are reached lazily, and
    what is imported when first needed, as a backend's kernels are, may import its own.
    """
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    declared = {requirement.split(">=")[0] for requirement in pyproject["project"]["dependencies"]}
    for module, path in modules():
        imported = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
        own = {"backend.cuda.": {"triton"}, "integrations.transformers": {"transformers"}}
        allowed = declared.union(*(names for place, names in own.items() if module.startswith(place)))
        assert imported - sys.stdlib_module_names - {"warmattn"} <= allowed, module
