"""Prompts to start from: a few short ones of each file in ``data/prompts``, one kind after the other.

``chat`` asks questions, ``copy_heavy`` wants most of the prompt back, ``mixed`` holds raw text to continue.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from workbench.models.datadir import data_dir

FILES = {"chat": "chat", "copy_heavy": "copy heavy", "mixed": "text to continue"}
_EACH = 4  # prompts of a file
_LONGEST = 240  # characters


@dataclass(frozen=True)
class Example:
    """A shipped prompt; ``chat``: it is a message, else text to continue."""

    name: str
    group: str
    text: str
    chat: bool

    @property
    def label(self) -> str:
        """One line for a menu."""
        line = " ".join(self.text.split())
        return line if len(line) <= 56 else f"{line[:55].rstrip()}…"


@cache
def examples() -> dict[str, Example]:
    """Prompts by name, in the order of the menu."""
    out: dict[str, Example] = {}
    for file, group in FILES.items():
        path = data_dir() / "prompts" / f"{file}.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found: dict[str, Example] = {}  # the first of each kind
        for row in rows:
            messages = row.get("messages")
            chat = messages is not None
            if chat and (len(messages) > 1 or file == "mixed"):
                continue
            text = messages[0]["content"] if chat else row["prompt"]
            if len(text) <= _LONGEST and row["kind"] not in found:
                found[row["kind"]] = Example(row["id"], group, text, chat)
        out |= {e.name: e for e in list(found.values())[:_EACH]}
    return out
