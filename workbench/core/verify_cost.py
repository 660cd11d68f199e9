"""What a target forward of T rows costs: v(T), measured with drafts that are there for their rows alone.

A drafter that repeats the last token makes every step as long as asked for, whatever the model says, so the
curve does not depend on how well anything is drafted. Lengths take turns, step by step: a machine that slows
down slows all of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.core import catalog
from workbench.core.benchmark_engine import random_prompts
from workbench.core.build import standalone_engine
from workbench.core.plan import plan, require
from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import InvariantError, OptionError
from workbench.spec.events import StepEvent
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe
from workbench.speculative.round_costs import RoundCosts, round_costs
from workbench.speculative.step_cost import Curve

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
ANY_DRAFTER = "ngram"  # gives the plan its verification; what drafts is the padding below


class Padding:
    """Drafts ``length`` copies of the last token: rows without any chance of sense."""

    name = "padding"
    max_draft = max(LENGTHS)

    def __init__(self) -> None:
        self.length = 0

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """Nothing to begin."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """A chain of the current length, for every sequence that has the room."""
        return [
            DraftTree.chain([c.tokens[-1]] * self.length, self.name)
            if self.length and c.room >= self.length
            else None
            for c in contexts
        ]

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Nothing to remember."""

    def forget(self, seq: int) -> None:
        """Nothing to forget."""

    def nbytes(self) -> int:
        """It holds nothing."""
        return 0


def padded_steps(
    session: Session,
    *,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 1,
    context: int = 128,
    rounds: int = 8,
    seed: int = 0,
) -> list[StepEvent]:
    """``rounds`` decode steps of every length of the session's model, under its recipe without drafting.

    ``lengths`` are drafted tokens per sequence, 0 among them; T = ``batch`` (length + 1). Raises
    :class:`OptionError` for lengths without 0, or longer than 16, and for a context the model lacks.
    """
    if 0 not in lengths or not all(0 <= n <= Padding.max_draft for n in lengths) or rounds < 1 or batch < 1:
        raise OptionError(
            f"lengths = {tuple(lengths)} cannot be measured.",
            hint=f"Give 0, which all others are compared with, and lengths up to {Padding.max_draft}.",
        )
    where = session.plan
    slots, limits = padded_room(lengths, batch, context, rounds, where.page_size)
    kept = (u for u in session.recipe if u.id not in drafting(session))
    made = plan(
        Recipe((*kept, *Recipe.of(ANY_DRAFTER))), session.facts, dtype=where.dtype,
        numerics=where.numerics, device=where.device, limits=limits,
    )  # fmt: skip
    checked = require(made)

    def work(job: Job, _: Engine) -> Generator[None, None, list[StepEvent]]:
        decoder = session.decoder(checked, lambda f, what: job.progress(f, 1.0, "", what), job.token)
        engine = standalone_engine(checked, decoder)
        steps: list[StepEvent] = []
        for turn, found in enumerate(padded_turns(engine, lengths, batch, context, slots, rounds, seed)):
            steps += found
            job.progress(turn, rounds, "turns", f"T up to {batch * (max(lengths) + 1)}")
            yield
        return steps

    found: list[StepEvent] = session.task(f"cost of {batch} × {len(lengths)} lengths", work).result()
    return found


def padded_room(
    lengths: Sequence[int], batch: int, context: int, rounds: int, page_size: int
) -> tuple[int, EngineLimits]:
    """Slots of a sequence whose every draft is accepted, and limits of an engine that has them for all."""
    most = max(lengths) + 1
    slots = context + (rounds + 1) * len(lengths) * most + most + batch + 2
    held = -(-(slots + most) // page_size) * page_size  # whole pages, for every sequence
    return slots, EngineLimits(kv_pool_tokens=held * batch, max_sequences=batch, max_context=slots)


def padded_turns(
    engine: Engine, lengths: Sequence[int], batch: int, context: int, slots: int, rounds: int, seed: int
) -> Iterator[list[StepEvent]]:
    """A step of every length in each turn; the first turn warms up and gives none.

    ``engine`` has a drafter, which is replaced, and the room that :func:`padded_room` says.
    """
    padding = Padding()
    engine.drafting.drafter = padding
    params = SamplingParams(max_tokens=slots - context - max(lengths) - 1, ignore_eos=True)
    for i, ids in enumerate(random_prompts(engine.vocab_size, batch, context, seed)):
        engine.add(Request(f"v{i}", tuple(ids), params))
    for _warm_up in range(2 + batch):  # all prompts are read, and a step is decoded
        _step(engine)
    if len(engine.scheduler.running) < batch:
        raise InvariantError(f"{len(engine.scheduler.running)} of {batch} sequences found room.")
    for turn in range(rounds + 1):
        steps: list[StepEvent] = []
        for padding.length in lengths:
            event = _step(engine)
            steps += [event] if turn else []
        yield steps
    engine.reset()


def measure_verify_cost(session: Session, **settings: Any) -> RoundCosts:
    """v(T) of the session's model; keywords and errors are those of :func:`padded_steps`."""
    return round_costs(padded_steps(session, **settings))


def measure_step_curve(
    session: Session, batches: Sequence[int], gamma: int, **settings: Any
) -> tuple[Curve, Curve]:
    """Milliseconds of a whole step by rows, of several batch sizes with and without ``gamma`` drafts each.

    Two curves: plain steps, and steps that verify. What a step costs besides its rows differs between them.
    """
    steps = [
        step
        for batch in batches
        for step in padded_steps(session, lengths=(0, gamma), batch=batch, **settings)
    ]
    samples: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for step in steps:
        samples[bool(step.draft)].append((step.rows, step.total_ms - step.phase_ms.get("draft", 0.0)))
    return Curve.of(samples[0]), Curve.of(samples[1])


def drafting(session: Session) -> set[str]:
    """Techniques of a session's recipe that draft, verify, or control drafts."""
    seams = ("drafter", "verify", "control")
    return {u.id for u in session.recipe if catalog.get(u.id).spec.seam in seams}


def _step(engine: Engine) -> StepEvent:
    with torch.inference_mode():
        return engine.step()[0]
