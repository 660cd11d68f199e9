"""The shipped prompts: made from held-out documents only, each with its source and terms.

Three files: ``chat`` (questions, some of several turns), ``copy_heavy`` (the answer is
mostly in the prompt: repeat, replace, rename), ``mixed`` (raw continuations of prose,
verse, reStructuredText and code beside chat). ``messages`` go through the chat template;
``prompt`` is fed as it is. ``reference`` is what the source says, not a required answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from workbench.training.corpus.chat import Exchange, cut_passages, exchanges, functions
from workbench.training.corpus.sources import Document

LICENCES = {"docs": "PSF-2.0", "stdlib": "PSF-2.0", "plays": "public domain", "jargon": "public domain"}
COPYING = frozenset({"repeat", "replace", "rename"})
PER_FILE = 80

T = TypeVar("T")


def write_prompts(folder: Path, documents: list[Document], seed: int) -> dict[str, int]:
    """Write the three files; returns how many prompts each holds."""
    rng = random.Random(seed)
    held = [document for document in documents if document.held_out]
    pool = [exchange for document in held for exchange in exchanges(document, rng)]
    rng.shuffle(pool)
    copying = _even([e for e in pool if e.kind in COPYING], lambda e: e.kind, PER_FILE)
    asking = _even([e for e in pool if e.kind not in COPYING], lambda e: e.kind, 2 * PER_FILE)
    rng.shuffle(asking)
    raw = [row for document in held for row in _raw(document, rng)]
    rng.shuffle(raw)
    files = {
        "chat": [*_chats(asking[:PER_FILE], turns=1), *_chats(asking[PER_FILE : PER_FILE + 30], turns=2)],
        "copy_heavy": _chats(copying, turns=1),
        "mixed": [*_even(raw, lambda row: row["kind"], 50), *_chats(asking[PER_FILE + 30 :], turns=1)[:30]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        numbered = [{"id": f"{name}-{i:03d}", **row} for i, row in enumerate(rows)]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in numbered)
        (folder / f"{name}.jsonl").write_text(lines, "utf-8")
    return {name: len(rows) for name, rows in files.items()}


def _chats(pool: list[Exchange], turns: int) -> list[dict[str, Any]]:
    rows = []
    for i in range(0, len(pool) - turns + 1, turns):
        *earlier, last = pool[i : i + turns]
        turns_so_far = [turn for e in earlier for turn in (("user", e.user), ("assistant", e.assistant))]
        messages = [{"role": role, "content": text} for role, text in [*turns_so_far, ("user", last.user)]]
        used = sorted({e.source for e in pool[i : i + turns]})
        rows.append({"kind": last.kind, "messages": messages, "reference": last.assistant, **_terms(used)})
    return rows


def _raw(document: Document, rng: random.Random) -> Iterator[dict[str, Any]]:
    kind = {"docs": "rst", "stdlib": "code", "plays": "verse", "jargon": "prose"}[document.source]
    if kind == "code":
        for _, code in functions(document.text):
            lines = code.splitlines(keepends=True)
            half = max(1, len(lines) // 2)
            prompt, rest = "".join(lines[:half]), "".join(lines[half:])
            yield {"kind": kind, "prompt": prompt, "reference": rest, **_terms([document.name])}
    else:
        for passage, following in cut_passages(document.text, rng, every=2500):
            prompt = passage + "\n\n"
            yield {"kind": kind, "prompt": prompt, "reference": following, **_terms([document.name])}


def _terms(names: list[str]) -> dict[str, Any]:
    licences = sorted({LICENCES[name.split("/", 1)[0]] for name in names})
    return {"source": names, "licence": " and ".join(licences)}


def _even(pool: list[T], kind: Callable[[T], str], count: int) -> list[T]:
    """``count`` items in turn from each kind, as far as each kind goes."""
    kinds: dict[str, list[T]] = {}
    for item in pool:
        kinds.setdefault(kind(item), []).append(item)
    chosen: list[T] = []
    while len(chosen) < count and any(kinds.values()):
        for name in sorted(kinds):
            if kinds[name] and len(chosen) < count:
                chosen.append(kinds[name].pop(0))
    return chosen
