"""Conversations that a model makes up alone: it writes a user's turn, then answers it.

Xu et al., *Magpie* (arXiv 2406.08464): given its chat template up to where a user would begin, an instruction
model writes a plausible question. Each is answered greedily and once more at a moderate temperature, so that
a head sees what it will draft for. Every conversation is a pure function of the model, the settings and its
number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.progress import Cancel, check_cancel
from workbench.models.tokenizer import Tokenizer
from workbench.training.errors import TrainingError
from workbench.training.heads.loops import cut_loops

_MARK = "\x1bcontent\x1b"
SHORTEST_ANSWER = 8
"""Shorter answers hold next to nothing for a head that looks several tokens ahead."""


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
    """How conversations are made; lengths in tokens. ``salt`` is mixed into every seed."""

    question: int = 48
    answer: int = 128
    temperature: float = 0.7
    salt: int = 0


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
    begin = opening(tokenizer)
    seeds = [(making.salt << 32) + first + i for i in range(count)]
    asked = [SamplingParams(temperature=1.0, max_tokens=making.question, seed=s) for s in seeds]
    questions = continuations(engine, [begin] * count, asked, cancel)
    prompts: list[list[int]] = []
    settings: list[SamplingParams] = []
    for seed, ids in zip(seeds, questions, strict=True):
        text = tokenizer.decode(ids[: cut_loops(ids)]).split("\nAssistant:")[0].strip()
        if not text:
            continue
        prompt = list(tokenizer.chat([{"role": "user", "content": text}]).ids)
        for temperature in (0.0, making.temperature):
            prompts.append(prompt)
            settings.append(SamplingParams(temperature=temperature, max_tokens=making.answer, seed=seed))
    answers = continuations(engine, prompts, settings, cancel)
    out = []
    for prompt, said, params in zip(prompts, answers, settings, strict=True):
        kept = said[: cut_loops(said)]
        if len(kept) >= SHORTEST_ANSWER:
            out.append(Conversation((*prompt, *kept), len(prompt), params.greedy))
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
