"""Documents, chat samples, evaluation text and prompts."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from workbench.training.corpus import Document, fetch, read_documents
from workbench.training.corpus.chat import chat_texts, chatml, exchanges
from workbench.training.corpus.held_out_text import write_eval_text
from workbench.training.corpus.sources import HELD_OUT
from workbench.training.errors import MissingSource

DATA = Path(__file__).resolve().parents[3] / "data"
RNG = random.Random(0)

PAGE = """:mod:`!heap` --- Heap queue algorithm
=====================================

.. function:: push(heap, item)

   Push *item* onto the :func:`heap <heapq.heappush>`, using ``<`` alone.

   More text.
"""

FAQ = """Questions
=========

Why is it slow?
---------------

Because it does the work twice.


Next one?
---------

Yes.
"""

CODE = '''
def grow(amount, step=1):
    """Return the amount that is larger by one step."""
    if amount < 0:
        raise ValueError("a negative amount cannot grow")
    return amount + step
'''


def made(name: str, text: str) -> dict[str, tuple[str, str]]:
    """The samples of one document, by kind."""
    return {e.kind: (e.user, e.assistant) for e in exchanges(Document(name, text), RNG)}


def test_documentation_gives_questions_without_markup() -> None:
    samples = made("docs/library/heap", PAGE)
    assert samples["module"] == ("What is the module heap for?", "Heap queue algorithm.")
    assert samples["function"] == (
        "What does push(heap, item) do?",
        "Push *item* onto the heap, using `<` alone.",
    )


def test_faq_headings_become_questions() -> None:
    samples = exchanges(Document("docs/faq/x", FAQ), RNG)
    found = [(e.user, e.assistant) for e in samples if e.kind == "faq"]
    assert found == [("Why is it slow?", "Because it does the work twice."), ("Next one?", "Yes.")]


def test_code_gives_a_task_and_a_consistent_renaming() -> None:
    samples = made("stdlib/grow.py", CODE)
    summary = "Return the amount that is larger by one step."
    assert samples["write"][0] == f"Write the Python function grow: {summary}"
    renamed = samples["rename"][1]
    assert "amount_2 + step" in renamed
    named = samples["rename"][0].count("amount") - 2  # the instruction itself names it twice
    assert renamed.count("amount_2") == named


def test_code_that_does_not_parse_gives_no_samples_of_code() -> None:
    assert not {"write", "rename"} & set(made("stdlib/broken.py", "def f(:\n  print 'x'\n"))


def test_chat_texts_are_reproducible_and_differ_by_seed() -> None:
    texts = {"docs/faq/x": FAQ, "stdlib/grow.py": CODE, "docs/library/heap": PAGE}
    documents = [Document(name, text) for name, text in texts.items()]
    first, again, other = (list(chat_texts(documents, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_eval_text_parts_are_where_the_manifest_says(tmp_path: Path) -> None:
    documents = [
        Document("docs/library/heapq", "Überschrift\n\nabc\n"),
        Document("stdlib/heapq.py", "x = 1\n"),
        Document("docs/library/os", "training text\n"),
    ]
    write_eval_text(tmp_path, documents, ())
    raw = (tmp_path / "eval.txt").read_bytes()
    manifest = json.loads((tmp_path / "MANIFEST.json").read_text())
    parts = {p["document"]: raw[p["start"] : p["start"] + p["bytes"]].decode() for p in manifest["parts"]}
    assert parts == {"docs/library/heapq": "Überschrift\n\nabc\n\n", "stdlib/heapq.py": "x = 1\n\n"}


def test_shipped_eval_text_matches_its_manifest() -> None:
    raw = (DATA / "text/eval.txt").read_bytes()
    manifest = json.loads((DATA / "text/MANIFEST.json").read_text())
    assert hashlib.sha256(raw).hexdigest() == manifest["sha256"]
    assert len(raw) == manifest["bytes"] <= 300_000
    assert sum(part["bytes"] for part in manifest["parts"]) == len(raw)
    assert {part["document"] for part in manifest["parts"]} <= HELD_OUT


@pytest.mark.parametrize(("name", "least"), [("chat", 80), ("copy_heavy", 60), ("mixed", 60)])
def test_shipped_prompts_are_held_out_and_licensed(name: str, least: int) -> None:
    rows = [json.loads(line) for line in (DATA / f"prompts/{name}.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) >= least
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row["source"]) <= HELD_OUT
        assert row["licence"]
        assert ("prompt" in row) != ("messages" in row)
        if "messages" in row:
            assert [m["role"] for m in row["messages"]][-1] == "user"
            assert len(row["messages"]) % 2 == 1


def test_missing_packages_say_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(MissingSource, match="--fetch"):
        read_documents(tmp_path)


def test_fetch_without_its_tools_names_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingSource, match="apt-get"):
        fetch(tmp_path / "sources")


def test_chatml_closes_every_turn() -> None:
    text = chatml([("user", "a"), ("assistant", "b")])
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
