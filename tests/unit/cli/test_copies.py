"""Copies of the notebooks: made once, edits are never lost, updates arrive."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from workbench.cli.copies import cells_hash, refresh


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The shipped notebooks, and where copies go."""
    (tmp_path / "notebooks").mkdir()
    return tmp_path / "notebooks", tmp_path / "lab"


def book(path: Path, *sources: str, ran: bool = False) -> None:
    """A notebook of code cells; with outputs and counters when it ``ran``."""
    more = {"outputs": [{"output_type": "stream"}], "execution_count": 3} if ran else {"outputs": []}
    cells = [{"cell_type": "code", "source": [s], "metadata": {}, **more} for s in sources]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))


def source(path: Path) -> str:
    return "".join("".join(c["source"]) for c in json.loads(path.read_text())["cells"])


def test_a_copy_is_made_once_and_edits_stay(folders: tuple[Path, Path]) -> None:
    shipped, own = folders
    book(shipped / "00.ipynb", "one")
    assert refresh(shipped, own) == []
    assert (own / "00.ipynb").read_text() == (shipped / "00.ipynb").read_text()
    book(own / "00.ipynb", "mine")
    assert refresh(shipped, own) == []
    assert source(own / "00.ipynb") == "mine" and source(shipped / "00.ipynb") == "one"
    (own / "00.ipynb").unlink()
    refresh(shipped, own)
    assert source(own / "00.ipynb") == "one"  # whoever deletes a copy gets a fresh one


def test_an_update_replaces_a_copy_that_was_only_run(folders: tuple[Path, Path]) -> None:
    shipped, own = folders
    book(shipped / "00.ipynb", "one")
    refresh(shipped, own)
    book(own / "00.ipynb", "one", ran=True)
    book(shipped / "00.ipynb", "two")
    assert refresh(shipped, own) == ["00.ipynb was updated"]
    assert source(own / "00.ipynb") == "two"
    assert refresh(shipped, own) == []


def test_an_update_keeps_what_was_edited_beside_the_new_one(folders: tuple[Path, Path]) -> None:
    shipped, own = folders
    book(shipped / "00.ipynb", "one")
    refresh(shipped, own)
    today = date.today().isoformat()
    for n, kept in ((1, f"00 (edited, {today}).ipynb"), (2, f"00 (edited, {today} 2).ipynb")):
        book(own / "00.ipynb", f"mine {n}")
        book(shipped / "00.ipynb", f"new {n}")
        (told,) = refresh(shipped, own)
        assert kept in told
        assert source(own / "00.ipynb") == f"new {n}" and source(own / kept) == f"mine {n}"
    assert refresh(shipped, own) == []
    assert len(list(own.glob("*.ipynb"))) == 3


@pytest.mark.parametrize("content", ["not json", "[]", "{}", '{"cells": [1]}'])
def test_a_copy_that_cannot_be_read_and_a_lost_record_count_as_edited(
    folders: tuple[Path, Path], content: str
) -> None:
    shipped, own = folders
    book(shipped / "00.ipynb", "one")
    refresh(shipped, own)
    (own / "00.ipynb").write_text(content)
    (own / ".shipped.json").write_text(content)
    assert cells_hash(own / "00.ipynb") == ""
    (told,) = refresh(shipped, own)
    (kept,) = own.glob("00 (edited*")
    assert kept.name in told and kept.read_text() == content and source(own / "00.ipynb") == "one"


def test_a_copy_that_already_says_what_is_shipped_is_left(folders: tuple[Path, Path]) -> None:
    shipped, own = folders
    book(shipped / "00.ipynb", "one")
    refresh(shipped, own)
    book(own / "00.ipynb", "two", ran=True)
    book(shipped / "00.ipynb", "two")
    before = (own / "00.ipynb").read_text()
    assert refresh(shipped, own) == []
    assert (own / "00.ipynb").read_text() == before
