"""The README says what the code says: generated parts are current, commands and paths exist, code runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.cli import docs
from workbench.cli.main import COMMANDS, main
from workbench.core import catalog
from workbench.spec.errors import WorkbenchError

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_generated_parts_are_current() -> None:
    assert docs.rendered(README) == README, "run: python -m workbench.cli.docs"
    assert docs.main(["--check"]) == 0


def test_a_stale_part_is_noticed_and_a_lost_marker_refused() -> None:
    stale = README.replace("| `paged` |", "| `pagde` |", 1)
    assert stale != README and docs.rendered(stale) == README
    with pytest.raises(WorkbenchError, match="techniques"):
        docs.rendered(README.replace("<!-- begin techniques -->", ""))


@pytest.mark.parametrize("id", list(catalog.MODULES))
def test_every_technique_is_in_the_table(id: str) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| `{id}` |"))
    spec = catalog.get(id).spec
    assert spec.title in row and f"| {spec.kind} |" in row and f"`{spec.seam}`" in row


def test_make_targets_and_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE)) <= targets
    named = set(re.findall(r"\bworkbench ([a-z-]+)\b", "\n".join(fenced("")))) - {"import"}
    assert named and named <= set(COMMANDS)


def test_plan_lines_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in fenced("") for line in block.splitlines() if line.startswith("workbench plan")]
    assert lines
    for line in lines:
        assert main(shlex.split(line, comments=True)[1:]) in (0, 2)
        assert "No such option" not in capsys.readouterr().err


def test_paths_exist() -> None:
    """Everything in backticks that looks like a file of this repository."""
    suffixes = ("py", "toml", "json", "ipynb", "md")
    named = re.findall(
        rf"`((?:workbench|core|spec|engine|data|notebooks)/[\w./]+\.(?:{'|'.join(suffixes)}))`", README
    )
    assert named
    missing = [n for n in named if not (ROOT / n).exists() and not (ROOT / "workbench" / n).exists()]
    assert missing == []


def test_layout_names_every_package() -> None:
    folders = {p.parent.name for p in (ROOT / "workbench").glob("*/__init__.py") if not p.parent.is_symlink()}
    assert {f for f in folders if f"{f}/" not in README} == set()


def test_the_python_example_runs() -> None:
    (code,) = fenced("python")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "tests", timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
