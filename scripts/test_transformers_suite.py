"""Run Transformers' own model tests on a Gemma 4 whose attention is warmattn's, and again on stock "sdpa".

    make outside

Fails when a test fails that passes with "sdpa", or when one of the two attentions was never called. The tests
come from the source distribution of the Transformers that is installed; nothing of it is kept. It needs the
dependency group ``outside``, and a package registry. Left out are the tests of training, which warmattn
refuses, and of `generate` and export, which the source distribution lacks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import transformers

TESTER = Path(__file__).with_name("gemma4_tester.py")

ABSENT = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}
"""Modules that the suite imports and the source distribution lacks, and the class that it takes from each."""


class Outcome(NamedTuple):
    """Names of the tests that passed, failed, were skipped; how often the attention function was called."""

    passed: set[str]
    failed: set[str]
    skipped: set[str]
    calls: int


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        suite = unpack(Path(folder))
        outcomes = {attention: run(suite, attention) for attention in ("sdpa", "warmattn")}
    for attention, outcome in outcomes.items():
        counts = f"{len(outcome.passed)} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
        print(f"{attention:8}  {counts}, {outcome.calls} calls of attention")
    stock, ours = outcomes["sdpa"], outcomes["warmattn"]
    print("failed with both:", *sorted(stock.failed & ours.failed), sep="\n    ")
    lost = sorted(stock.passed - ours.passed)
    if lost:
        print("passed with sdpa alone:", *lost, sep="\n    ")
    if lost or not stock.passed or not stock.calls or not ours.calls:
        raise SystemExit(1)


def unpack(folder: Path) -> Path:
    """Download and lay out what the suite needs to be collected; returns the folder to run it in."""
    source = f"transformers=={transformers.__version__}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.check_call([*pip, "--no-deps", "--no-binary", "transformers", "--dest", folder, source])
    with tarfile.open(next(folder.glob("transformers-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    suite = next(folder.glob("transformers-*/tests")).rename(folder / "tests")
    for module, name in ABSENT.items():
        (suite / module).parent.mkdir()
        (suite / module).write_text(f"class {name}:\n    pass\n", encoding="utf-8")
    # The suite looks for the tester where Transformers keeps a model's tests.
    place = suite / "models" / "gemma4" / "test_modeling_gemma4.py"
    place.parent.mkdir(parents=True)
    shutil.copy(TESTER, place)
    return folder


def run(suite: Path, attention: str) -> Outcome:
    """Run the suite in a process of its own: the registries of attention functions are global."""
    report = suite / f"{attention}.xml"
    pytest = [sys.executable, "-m", "pytest", "tests/models", "-q", "--tb=short", "-p", "no:cacheprovider"]
    environment = {**os.environ, "ATTENTION": attention, "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(
        [*pytest, "--disable-warnings", f"--junitxml={report}"], cwd=suite, env=environment, check=False
    )
    return read(report)


def read(report: Path) -> Outcome:
    """A test that reports several times, as one with subtests does, fails when any of them fails."""
    root = ElementTree.parse(report).getroot()
    cases: dict[str, set[str]] = {}
    for case in root.iter("testcase"):
        cases.setdefault(case.attrib["name"], set()).update(child.tag for child in case)
    failed = {name for name, tags in cases.items() if tags & {"failure", "error"}}
    skipped = {name for name, tags in cases.items() if "skipped" in tags} - failed
    calls = next(item.attrib["value"] for item in root.iter("property") if item.attrib["name"] == "calls")
    return Outcome(cases.keys() - failed - skipped, failed, skipped, int(calls))


if __name__ == "__main__":
    main()
