"""How a user's turn may begin: kinds of request that a model seldom makes up by itself.

Left alone, an instruction model asks short general questions. Given the first words of another request it
goes on with that one: a sum in words, a passage to be summed up, a sentence to be translated. All but these
first words is the model's own (Xu et al., *Magpie*, arXiv 2406.08464, §2.3, steers it in the same way).
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Opening:
    """``text`` is forced, then the model writes at most ``tokens``; with ``closing`` it is asked for
    ``closing_tokens`` more behind that text."""

    text: str
    tokens: int
    closing: str = ""
    closing_tokens: int = 32

    @property
    def longest(self) -> int:
        """Tokens of the turn at most, with generous room for what is forced."""
        return self.tokens + (self.closing_tokens if self.closing else 0) + 64


_QUESTION = "\n\nQuestion:"

KINDS: dict[str, tuple[Opening, ...]] = {
    "fact": tuple(
        Opening(text, 24)
        for text in (
            "Who was",
            "When did",
            "Where is",
            "What year",
            "Which country",
            "What is the name of",
            "How",
        )
    ),
    "sum": tuple(
        Opening(text, 80)
        for text in (
            "A farmer has",
            "Anna buys",
            "A train leaves",
            "There are",
            "If a box holds",
            "Tom saves",
        )
    ),
    "code": tuple(
        Opening(text, 64)
        for text in ("Write a Python function", "Write a program in C++ that", "Fix this code:\n")
    ),
    "writing": tuple(
        Opening(text, 64)
        for text in (
            "Write a letter",
            "Write a blog post",
            "Compose an email",
            "Describe",
            "Pretend you are",
            "Imagine",
        )
    ),
    "thinking": tuple(
        Opening(text, 72)
        for text in ("Explain why", "Compare", "What are the advantages", "Is it true that", "Suppose")
    ),
    "translation": tuple(
        Opening(f"{task}{first}", 40)
        for task, first in (
            ("Put this German sentence into English: ", "Die"),
            ("Put this German sentence into English: ", "Ein"),
            ("Put this German sentence into English: ", "Wir"),
            ("What does this German sentence mean in English?\n\n", "Der"),
            ("What does this German sentence mean in English?\n\n", "In"),
            ("Put this French sentence into English: ", "Le"),
        )
    ),
    "extraction": tuple(
        Opening(text, 220)
        for text in (
            "List all names and dates in this text:\n\n",
            "Turn the facts of this review into JSON:\n\n",
        )
    ),
    "summary": tuple(
        Opening(text, 520)
        for text in (
            "Sum up this news report:\n\n",
            "Give the main points of this article:\n\n",
            "Write a short summary of the text below.\n\n",
        )
    ),
    "passages": tuple(
        Opening(text, 600, _QUESTION)
        for text in (
            "Read these passages, then answer the question.\n\n1.",
            "Answer from the documents below.\n\nDocument 1:",
        )
    ),
}
"""The kinds."""

WEIGHTS = {"extraction": 2, "summary": 3, "passages": 3}
"""How often a kind comes, 1 where it is not named: a head learns least of long prompts, which end early."""

LONGEST = max(o.longest for kind in KINDS.values() for o in kind)
"""Tokens of a turn that begins with any of them, at most."""


def opening_of(seed: int, share: float) -> Opening | None:
    """How the question of a seed begins; None: as the model likes, which is so for all but ``share``."""
    rng = random.Random(seed)
    if rng.random() >= share:
        return None
    kinds = sorted(KINDS)
    (kind,) = rng.choices(kinds, [WEIGHTS.get(name, 1) for name in kinds])
    return rng.choice(KINDS[kind])
