"""G4 beyond float64: where a drafted greedy run parts from the plain one, the two tokens were all but equal.

Kernels are chosen by row count, and sum in another order: that alone may part the runs, and only at a tie.
Where one kernel serves all row counts, a run of the same shapes whose drafts are all wrong gives every token
that the drafted run gives, with the same log-probability to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from workbench.core.build import standalone_engine
from workbench.core.build_weights import build_weights
from workbench.core.drafters.prompt_sets import read_prompts
from workbench.core.plan import ModelFacts, plan, require
from workbench.engine.engine import Engine
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source, resolve
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import ModelNotFound
from workbench.spec.plan import EngineLimits, Numerics
from workbench.spec.recipe import Recipe

K = 4
TIE = 1e-3
"""Largest margin, in logits, of two tokens that count as equal in float32."""
SIZES = {"tiny": (16, 48), "smollm2-135m": (16, 48)}
"""Prompts, and tokens of each answer."""
Said = tuple[int, float]
Opened = tuple[str, list[list[int]], Callable[[Numerics], Engine]]


@pytest.fixture(
    scope="module",
    params=["tiny", pytest.param("smollm2-135m", marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])],
)
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """A model in float32 with kernels by row count: its name, prompts, and idle engines of it."""
    model: str = request.param
    try:
        resolve(model)
    except ModelNotFound as err:
        pytest.skip(err.hint or str(err))
    source, tokenizer = open_source(model), load_tokenizer(model)
    facts, limits = ModelFacts(model, source.config, source.fingerprint), EngineLimits(2048, 0, 1, 1024)
    decoders: dict[Numerics, Decoder] = {}

    def engine(numerics: Numerics) -> Engine:
        recipe = Recipe.of("paged", "ngram")
        made = require(plan(recipe, facts, dtype="float32", numerics=numerics, limits=limits))
        with torch.inference_mode():
            if numerics not in decoders:
                decoders.clear()
                decoders[numerics] = Decoder(source.config, build_weights(made, source))
            return standalone_engine(made, decoders[numerics])

    count = SIZES[model][0]
    halves = read_prompts("mixed", tokenizer, longest=400).halves
    ids = [list(p.ids) for half in halves for p in half][:count]
    assert len(ids) == count
    yield model, ids, engine


def answers(lab: ModuleType, engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[Said]]:
    """Greedy ids and their log-probabilities behind each prompt, one after the other."""
    out = []
    for ids in prompts:
        ran = lab.run_engine(engine, [ids], max_tokens=tokens, ignore_eos=True, logprobs=0)
        out.append(list(zip(ran.ids(), ran.logprobs(), strict=True)))
    return out


def drafting(scripted: ModuleType, engine: Engine, texts: list[list[int]], *, wrong: bool = False) -> Engine:
    """Drafts of K tokens a round, of which none to all are right in turn, or always none."""
    right = (lambda seq, round: 0) if wrong else (lambda seq, round: (seq + round) % (K + 1))
    made: Engine = scripted.attach(engine, scripted.Replay(texts, K, right=right, vocab=1000))
    return made


def plainly(engine: Engine) -> Engine:
    """Without its drafter."""
    engine.drafting.drafter = None
    return engine


def texts_of(prompts: list[list[int]], said: list[list[Said]]) -> list[list[int]]:
    """Prompts and their answers."""
    return [ids + [t for t, _ in answer] for ids, answer in zip(prompts, said, strict=True)]


def test_drafted_runs_part_from_plain_ones_at_ties_only(
    lab: ModuleType, scripted: ModuleType, opened: Opened
) -> None:
    model, prompts, engine = opened
    tokens, undrafted = SIZES[model][1], plainly(engine("fast"))
    plain = answers(lab, undrafted, prompts, tokens)
    drafter = drafting(scripted, engine("fast"), texts_of(prompts, plain))
    drafted = answers(lab, drafter, prompts, tokens)
    assert len(prompts) * tokens > 1.8 * drafter.steps
    parted = []
    for ids, a, b in zip(prompts, plain, drafted, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x[0] != y[0]), None)
        if at is not None:
            before = [*ids, *(t for t, _ in a[:at])]
            parted.append((margin(lab, undrafted, before, a[at][0], b[at][0]), ids, at))
    assert all(m < TIE for m, _, _ in parted), parted
    assert len(parted) <= max(1, len(prompts) // 100)


def test_a_run_of_the_same_shapes_gives_the_same_bits(
    lab: ModuleType, scripted: ModuleType, opened: Opened
) -> None:
    model, prompts, engine = opened
    some, tokens = prompts[:6], SIZES[model][1]
    plain = answers(lab, plainly(engine("pinned")), some, tokens)
    texts = texts_of(some, plain)
    drafter, shaped = (drafting(scripted, engine("pinned"), texts, wrong=wrong) for wrong in (False, True))
    drafted = answers(lab, drafter, some, tokens)
    assert len(some) * tokens > 1.8 * drafter.steps
    assert answers(lab, shaped, some, tokens) == drafted == plain
    assert shaped.steps >= len(some) * (tokens - 1)


def margin(lab: ModuleType, engine: Engine, ids: list[int], one: int, other: int) -> float:
    """By how much the plain run prefers ``one`` to ``other`` behind ``ids``."""
    rows: list[tuple[int, int, torch.Tensor]] = []
    lab.record_logits(engine, rows)
    lab.run_engine(engine, [ids], prefix="margin", max_tokens=1)
    logits = rows[-1][2]
    return abs(float(logits[one] - logits[other]))


def test_the_margin_tells_a_tie_from_what_is_none(lab: ModuleType, opened: Opened) -> None:
    """The control: between a token and another that follows less well, it is far beyond a tie."""
    _, prompts, engine = opened
    made = plainly(engine("fast"))
    ((best, _),) = answers(lab, made, prompts[:1], 1)[0]
    other = 7 if best != 7 else 8
    assert margin(lab, made, prompts[0], best, other) > 100 * TIE
