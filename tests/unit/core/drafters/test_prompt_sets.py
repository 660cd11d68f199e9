"""Prompts: what a line may be, what is refused, and halves that share nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.core.drafters.prompt_sets import SHIPPED, read_prompts
from workbench.models.tokenizer import Tokenizer, load_tokenizer
from workbench.spec.errors import OptionError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny")


def written(folder: Path, *rows: Any) -> str:
    path = folder / "asked.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sets_have_two_halves_of_every_kind(name: str, tokenizer: Tokenizer) -> None:
    found = read_prompts(name, tokenizer, 4096)
    first, second = found.halves
    assert abs(len(first) - len(second)) <= 1 and len(first) > 30
    assert not {p.ids for p in first} & {p.ids for p in second}
    counts = [[sum(p.kind == k for p in half) for half in found.halves] for k in {p.kind for p in first}]
    assert all(abs(a - b) <= 1 for a, b in counts)
    assert len({p.kind for p in first[: len(counts)]}) == len(counts)  # kinds take turns


def test_a_line_has_turns_or_messages_or_a_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = "What is a fox?"
    path = written(
        tmp_path,
        {"turns": [asked, "And then?"], "category": "qa"},
        {"messages": [{"role": "user", "content": asked}], "kind": "twice"},
        {"prompt": asked},
        {"prompt": "word " * 200},
        {"prompt": "a"},
        {"prompt": ""},
    )
    assert len(tokenizer.encode("a")) == 1
    found = read_prompts(path, tokenizer, 100)
    chat = tuple(tokenizer.chat([{"role": "user", "content": asked}]).ids)
    assert {(p.ids, p.kind) for half in found.halves for p in half} == {
        (chat, "qa"),
        (tuple(tokenizer.encode(asked)), ""),
    }
    assert (found.name, found.too_long, found.too_short) == ("asked", 1, 2)


def test_turns_take_prompts_of_their_half_and_begin_again_at_its_end(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = written(tmp_path, *({"prompt": f"number {i} of them"} for i in range(7)))
    found = read_prompts(path, tokenizer, 100)
    for n in range(8):
        assert set(found.group(n, 2)) <= set(found.halves[n % 2])
    seen = [p for n in (0, 2, 4) for p in found.group(n, 2)]
    assert seen[:4] == list(found.halves[0][:4]) and seen[len(found.halves[0])] == found.halves[0][0]


@pytest.mark.parametrize(
    "rows", [[{"question": "?"}], [{"turns": []}], [["a"]], [{"prompt": 3}], [{"prompt": "only one"}]]
)
def test_what_is_no_prompt_is_named(tokenizer: Tokenizer, tmp_path: Path, rows: list[Any]) -> None:
    with pytest.raises(OptionError, match="asked"):
        read_prompts(written(tmp_path, *rows), tokenizer, 100)


def test_a_file_that_is_not_there_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(OptionError, match="nowhere") as caught:
        read_prompts("nowhere.jsonl", tokenizer, 100)
    assert "copy_heavy" in caught.value.hint
