"""Prompts that drafters are compared on: the shipped sets, or a file; in two halves that share no prompt.

What one half teaches is used to predict the other. Kinds of prompts take turns, so that every half, and
every group of prompts, has some of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from workbench.models.datadir import data_dir
from workbench.models.tokenizer import Tokenizer
from workbench.spec.errors import OptionError, WorkbenchError

SHIPPED = ("mixed", "chat", "copy_heavy")
_HINT = "Give a shipped set or a file with a JSON object a line, which has turns, messages or prompt."


@dataclass(frozen=True)
class Prompt:
    """Token ids, and what kind of prompt they are."""

    ids: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class PromptSet:
    """A named set of prompts in two ``halves``; no prompt is in both. ``too_long`` and ``too_short`` (of one
    token or none) were left out."""

    name: str
    halves: tuple[tuple[Prompt, ...], tuple[Prompt, ...]]
    too_long: int = 0
    too_short: int = 0

    def group(self, number: int, size: int) -> tuple[Prompt, ...]:
        """Prompts of turn ``number``, which are of half ``number % 2``; from the first again at its end."""
        half = self.halves[number % 2]
        first = number // 2 * size
        return tuple(half[i % len(half)] for i in range(first, first + size))


def set_name(source: str) -> str:
    """A set's name in cells and tables: its own, or its file's without folder and ending."""
    return source if source in SHIPPED else Path(source).stem


def read_prompts(source: str, tokenizer: Tokenizer, longest: int) -> PromptSet:
    """The set ``source``: a name of :data:`SHIPPED` or a file; prompts above ``longest`` tokens, and of fewer
    than two, are left out.

    A line has ``turns`` (the first one is asked), ``messages`` (through the chat template) or ``prompt`` (fed
    as it is), and may name its ``category`` or ``kind``. Raises :class:`OptionError` for what cannot be read.
    """
    path = data_dir() / "prompts" / f"{source}.jsonl" if source in SHIPPED else Path(source)
    kinds: dict[str, list[Prompt]] = {}
    known: set[tuple[int, ...]] = set()
    too_long = too_short = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
            ids = tuple(_ids(row, tokenizer))
        except (ValueError, TypeError, LookupError, AttributeError, WorkbenchError) as error:
            raise OptionError(f"{path}, line {number} is no prompt: {error}.", hint=_HINT) from None
        if ids in known:
            continue  # twice in a file would be once in each half
        known.add(ids)
        if not 1 < len(ids) <= longest:
            too_short += len(ids) < 2
            too_long += len(ids) > longest
            continue
        kind = str(row.get("category", row.get("kind", "")))
        kinds.setdefault(kind, []).append(Prompt(ids, kind))
    halves = _halves(list(kinds.values()))
    if not all(halves):
        raise OptionError(
            f"{path} has fewer than two prompts of 2 to {longest} tokens.",
            hint="Two are needed: one to learn from, one to predict.",
        )
    return PromptSet(set_name(source), halves, too_long, too_short)


def _halves(kinds: Sequence[Sequence[Prompt]]) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Every other prompt of each kind; an odd one goes to the smaller half."""
    out: tuple[list[list[Prompt]], list[list[Prompt]]] = ([], [])
    sizes = [0, 0]
    for prompts in kinds:
        first = int(sizes[1] < sizes[0])
        for half in (0, 1):
            out[half].append(list(prompts[(half - first) % 2 :: 2]))
            sizes[half] += len(out[half][-1])
    return _mixed(out[0]), _mixed(out[1])


def _mixed(kinds: Sequence[Sequence[Prompt]]) -> tuple[Prompt, ...]:
    """One of each kind in turn."""
    return tuple(p for together in zip_longest(*kinds) for p in together if p is not None)


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"Prompts cannot be read: {error}.", hint=f"{_HINT} Sets are {', '.join(SHIPPED)}."
        ) from None


def _ids(row: Mapping[str, Any], tokenizer: Tokenizer) -> Sequence[int]:
    if "turns" in row:
        return tokenizer.chat([{"role": "user", "content": row["turns"][0]}]).ids
    if "messages" in row:
        return tokenizer.chat(row["messages"]).ids
    return tokenizer.encode(row["prompt"])
