"""Needles: a sentence with a number hidden in filler text, and the question that asks for it.

The sentence and the question say the same words, "The pass key of KEY is", so that even a small model
recalls by copying; what is measured is whether the cache still holds the sentence, not whether the model can
reason. Tokens are joined from parts that are encoded alone, so that every part has the same ids in all
prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.spec.errors import OptionError, RequestError

_BEFORE, _AFTER, _ASKED = "\nThe pass key of {key} is", ".\n", "\n\nThe pass key of {key} is"
_WORDS = (
    *("amber", "basil", "cedar", "delta", "ember", "fjord", "hazel", "indigo", "juniper", "kestrel"),
    *("lotus", "maple", "nectar", "onyx", "pepper", "quartz", "raven", "saffron", "tulip", "zephyr"),
)
MAX_NEEDLES = 10_000
"""In all: each is a forward over its whole context, and all are made before the first is asked for."""
VALID = 0.9
"""The plain model must recall this share, or nothing can be said of what a method loses."""


@dataclass(frozen=True)
class NeedleSettings:
    """How many needles, and where. ``context`` tokens before the question, sentence included.

    ``trials`` needles at each of ``depths`` depths, evenly from the first to the last tokens. ``aware``: the
    question is there when the cache is coded or thinned out; else it is not known. Out of range raises
    :class:`OptionError`.
    """

    context: int = 1024
    depths: int = 5
    trials: int = 2
    aware: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("context", 48), ("depths", 1), ("trials", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise OptionError(
                    f"{name} = {value!r} cannot be used.", hint=f"It is a whole number from {low}."
                )
        if self.depths > self.context:
            raise OptionError(
                f"depths = {self.depths} cannot be told apart in a context of {self.context} tokens.",
                hint="Choose fewer depths, or more trials at each.",
            )
        if self.count > MAX_NEEDLES:
            raise OptionError(
                f"depths = {self.depths} and trials = {self.trials} make {self.count:,} needles.",
                hint=f"Choose at most {MAX_NEEDLES:,} in all: trials up to {MAX_NEEDLES // self.depths:,}."
                if self.depths <= MAX_NEEDLES
                else f"Choose at most {MAX_NEEDLES:,} in all.",
            )

    @property
    def count(self) -> int:
        """Needles in all."""
        return self.depths * self.trials


@dataclass(frozen=True)
class Needle:
    """Ids of the ``context``, the ``question`` and the ``answer``; ``depth`` from 0 (first tokens) to 1."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    depth: float

    @property
    def prompt(self) -> tuple[int, ...]:
        """Context and question."""
        return self.context + self.question

    @property
    def ids(self) -> tuple[int, ...]:
        """All of it."""
        return self.prompt + self.answer


def needles(
    encode: Callable[[str], list[int]], filler: Sequence[int], settings: NeedleSettings
) -> list[Needle]:
    """The needles of these settings, always the same ones; ``filler`` are ids of a text.

    Raises :class:`RequestError` when the filler is too short.
    """
    draw = random.Random(settings.seed)
    out = []
    for i in range(settings.count):
        depth = i // settings.trials / max(settings.depths - 1, 1)
        key = f"{draw.choice(_WORDS)}-{draw.choice(_WORDS)}"
        answer = tuple(encode(f" {draw.randrange(10_000, 100_000)}"))
        sentence = (*encode(_BEFORE.format(key=key)), *answer, *encode(_AFTER))
        rest = settings.context - len(sentence)
        if len(filler) < rest or rest < 0:
            raise RequestError(
                f"A context of {settings.context} tokens needs {rest} of filler; the text has {len(filler)}.",
                hint="Give a longer text or a smaller context.",
            )
        start = draw.randrange(len(filler) - rest + 1)
        hay = tuple(filler[start : start + rest])
        at = round(depth * rest)
        context = hay[:at] + sentence + hay[at:]
        out.append(Needle(context, tuple(encode(_ASKED.format(key=key))), answer, depth))
    return out
