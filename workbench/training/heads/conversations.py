"""Conversations that a model makes up alone: it writes a user's turn, then answers it.

Xu et al., *Magpie* (arXiv 2406.08464): given its chat template up to where a user would begin, an instruction
model writes a plausible question. Each is answered greedily and once more at a moderate temperature, so that
a head sees what it will draft for; questions with a prescribed opening, which can be long, are answered once.
Every conversation is a pure function of the model, the settings and its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.progress import Cancel, check_cancel
from workbench.models.tokenizer import Tokenizer
from workbench.spec.errors import OptionError
from workbench.training.errors import TrainingError
from workbench.training.heads.loops import cut_loops
from workbench.training.heads.openings import LONGEST, opening_of

_MARK = "\x1bcontent\x1b"
SHORTEST_ANSWER = 8
"""Shorter answers hold next to nothing for a head that looks several tokens ahead."""

FREE: dict[str, float] = {"temperature": 1.0}
STEADY: dict[str, float] = {"temperature": 0.8, "top_p": 0.9}
"""How users' turns are drawn: freely, or where an opening sees to variety, so that a long text stays one."""


@dataclass(frozen=True)
class Conversation:
    """Token ids of a prompt and its answer, which starts at ``answer``; ``greedy``: how it was answered."""

    ids: tuple[int, ...]
    answer: int
    greedy: bool

    @property
    def prompt(self) -> tuple[int, ...]:
        """What was answered."""
        return self.ids[: self.answer]


@dataclass(frozen=True)
class Making:
    """How conversations are made; lengths in tokens. ``salt`` is mixed into every seed.

    ``opened``: share of the questions that begin in a prescribed way.
    """

    question: int = 48
    answer: int = 128
    temperature: float = 0.7
    salt: int = 0
    opened: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.opened <= 1.0:
            raise OptionError(f"opened = {self.opened!r} is no share.", hint="Choose a number from 0 to 1.")

    @property
    def longest_question(self) -> int:
        """Tokens of a question at most, with room for what its text becomes when it is encoded again."""
        return max(64 + 2 * self.question, LONGEST if self.opened else 0)


def opening(tokenizer: Tokenizer) -> list[int]:
    """Ids of the model's chat prompt up to where the user's words begin.

    Raises :class:`TrainingError` for a template that does not put them in as they are.
    """
    text = tokenizer.chat([{"role": "user", "content": _MARK}]).text
    before, mark, _ = text.partition(_MARK)
    ids = tokenizer.encode(before, add_special=tokenizer.chat_template is None)
    if not mark or not ids:
        raise TrainingError(
            "The model's chat template does not show where a user's turn begins.",
            hint="Train on a model with an ordinary template, such as ChatML.",
        )
    return ids


def converse(
    engine: Engine,
    tokenizer: Tokenizer,
    first: int,
    count: int,
    making: Making,
    cancel: Cancel | None = None,
) -> list[Conversation]:
    """Questions ``first … first + count - 1`` and their answers, all in one batch; at most two per question.

    ``cancel`` is asked at every step of the engine; raises ``Cancelled``.
    """
    seeds = [(making.salt << 32) + first + i for i in range(count)]
    prompts: list[list[int]] = []
    settings: list[SamplingParams] = []
    for seed, (text, opened) in zip(seeds, _questions(engine, tokenizer, seeds, making, cancel), strict=True):
        if not text:
            continue
        prompt = list(tokenizer.chat([{"role": "user", "content": text}]).ids)
        temperatures = (0.0, making.temperature)
        for temperature in (temperatures[seed % 2],) if opened else temperatures:
            prompts.append(prompt)
            settings.append(SamplingParams(temperature=temperature, max_tokens=making.answer, seed=seed))
    answers = continuations(engine, prompts, settings, cancel)
    out = []
    for prompt, said, params in zip(prompts, answers, settings, strict=True):
        kept = said[: cut_loops(said)]
        if len(kept) >= SHORTEST_ANSWER:
            out.append(Conversation((*prompt, *kept), len(prompt), params.greedy))
    return out


def _questions(
    engine: Engine, tokenizer: Tokenizer, seeds: Sequence[int], making: Making, cancel: Cancel | None
) -> list[tuple[str, bool]]:
    """The text of each question, perhaps empty, and whether its opening was prescribed."""
    begin = opening(tokenizer)
    openings = [opening_of(seed, making.opened) for seed in seeds]
    given = ["" if o is None else o.text for o in openings]
    lengths = [making.question if o is None else o.tokens for o in openings]
    written = _written(engine, tokenizer, begin, given, lengths, seeds, cancel)
    asked = [i for i, o in enumerate(openings) if o is not None and o.closing]
    if asked:
        ends = [openings[i] for i in asked]
        closing = [written[i] + e.closing for i, e in zip(asked, ends, strict=True) if e is not None]
        room = [e.closing_tokens for e in ends if e is not None]
        closed = _written(engine, tokenizer, begin, closing, room, [seeds[i] for i in asked], cancel)
        for i, text in zip(asked, closed, strict=True):
            written[i] = text
    return [(text, o is not None) for text, o in zip(written, openings, strict=True)]


def _written(
    engine: Engine,
    tokenizer: Tokenizer,
    begin: list[int],
    given: Sequence[str],
    lengths: Sequence[int],
    seeds: Sequence[int],
    cancel: Cancel | None,
) -> list[str]:
    """Users' turns that begin as ``given``, with what the model adds up to its first loop."""
    asked = [
        SamplingParams(max_tokens=n, seed=s, **(STEADY if text else FREE))
        for text, n, s in zip(given, lengths, seeds, strict=True)
    ]
    prompts = [[*begin, *tokenizer.encode(text, add_special=False)] for text in given]
    out = []
    for text, ids in zip(given, continuations(engine, prompts, asked, cancel), strict=True):
        added = tokenizer.decode(ids[: cut_loops(ids)]).split("\nAssistant:")[0]
        out.append((text + added).strip())
    return out


def continuations(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    cancel: Cancel | None = None,
) -> list[list[int]]:
    """What an engine says behind each prompt, its end token included; ``Cancelled`` leaves it empty.

    Raises :class:`TrainingError` when not one prompt could be continued, with what stood against the first.
    """
    out: dict[str, list[int]] = {}
    failed: dict[str, Mapping[str, str]] = {}
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Request(f"c{i}", tuple(prompt), p))
        out[f"c{i}"] = []
    try:
        while engine.has_work:
            check_cancel(cancel, "Making conversations")
            for event in engine.step()[1]:
                out[event.request_id].extend(t.id for t in event.tokens)
                if event.error is not None:
                    failed[event.request_id] = event.error
    finally:
        engine.reset()
    if failed and len(failed) == len(out):
        first = next(iter(failed.values()))
        raise TrainingError(
            f"Nothing can be learnt from this model: {first.get('message', '')}",
            hint="Check its weights: `workbench run` on it fails in the same way.",
        )
    return list(out.values())
