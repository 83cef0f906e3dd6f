"""The docs tell the truth: their Python runs, what they name exists, and the page of places is complete."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import runpy
from functools import reduce
from pathlib import Path

import pytest

import warmattn
from warmattn.pipelines import PRECISE_D256_KERNEL_NAMES, PRECISE_D512_KERNEL_NAMES
from warmattn.testing import VALUE_FORMS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
WHERE = ROOT / "docs" / "where.md"

BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The page's fenced blocks of a language, each with the number of the line it begins on."""
    text = page.read_text(encoding="utf-8")
    found = [match for match in BLOCK.finditer(text) if match[1] == language]
    return [(text.count("\n", 0, match.start(2)) + 1, match[2]) for match in found]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In order and in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, source in blocks(page, "python"):
        tree = ast.increment_lineno(ast.parse(source), line - 1)
        exec(compile(tree, name(page), "exec"), namespace)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "<!-- table: " in page.read_text("utf-8")], ids=name
)
def test_tables_of_the_page_are_those_of_the_results(page: Path):
    tables = runpy.run_path(str(ROOT / "scripts" / "docs_tables.py"))
    text = page.read_text(encoding="utf-8")
    assert len(tables["MARKED"].findall(text)) == text.count("<!-- table: ")
    assert text == tables["filled"](text)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_of_the_page_exist(page: Path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_the_page_lead_somewhere(page: Path):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = [resolve(name) for name in re.findall(r"^::: (warmattn\.\S+)$", page, re.MULTILINE)]
    public = {name: getattr(warmattn, name) for name in warmattn.__all__}
    missing = [name for name, value in public.items() if not any(value is other for other in documented)]
    assert not missing, f"docs/api.md does not have {missing}"


def places() -> set[str]:
    """Every name in backticks on the page of places."""
    return set(re.findall(r"`([^`\n]+)`", WHERE.read_text(encoding="utf-8")))


def resolve(dotted: str) -> object:
    """What a dotted name means: the longest prefix that is a module, then attributes."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not dotted.startswith(str(error.name)):
                raise
            continue
        return reduce(getattr, parts[end:], module)
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("place", sorted(filter(re.compile(r"warmattn(\.\w+)+").fullmatch, places())))
def test_symbol_on_the_page_of_places_exists(place: str):
    resolve(place)


@pytest.mark.parametrize("place", sorted(place for place in places() if "/" in place))
def test_file_on_the_page_of_places_exists(place: str):
    file, _, test = place.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8") if test else (ROOT / file).exists()
    assert text
    assert not test or f"def {test}(" in str(text), f"{file} has no {test}"


def test_every_environment_variable_is_on_the_page_of_places():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    variables = {variable for source in sources for variable in re.findall(r"\bWARMATTN_[A-Z_]+", source)}
    assert variables <= places()


def test_page_of_places_is_complete():
    public = {f"warmattn.{name}" for name in warmattn.__all__}
    modules = {
        module.name
        for module in pkgutil.walk_packages(warmattn.__path__, "warmattn.")
        if module.name.count(".") == 1 or module.name.startswith("warmattn.backend.")
        if "._" not in module.name
    }
    expected = {*PRECISE_D256_KERNEL_NAMES, *PRECISE_D512_KERNEL_NAMES, *VALUE_FORMS, *public, *modules}
    missing = expected - places()
    assert not missing, f"{name(WHERE)} does not name {sorted(missing)}"
