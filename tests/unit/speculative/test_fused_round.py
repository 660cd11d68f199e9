"""Rounds that are one program say what the step-by-step path says, in fixed shapes, with one wait each."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.core.session import Session
from workbench.engine.draft_runner import DraftRunner
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.rounds import Rounds
from workbench.engine.sequence import Request
from workbench.kernels.cpu import compiler
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.spec.plan import EngineLimits, Plan
from workbench.spec.recipe import Recipe
from workbench.speculative.fused.accept import SENTINEL
from workbench.speculative.fused.program import FusedRound

pytestmark = pytest.mark.usefixtures("inference")

EAGLE, MTP = ("tiny", "eagle3:depth=3"), ("tiny-mtp", "mtp:k=3")
MODEL, LIKELIEST = ("tiny", "draft_model:k=3,layers=2"), ("tiny", "eagle3:depth=4,draws=false,vocab=0")
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}
PROMPTS = [[(7 * i * i + 3 * i * j + j) % 500 + 5 for i in range(4 + 11 * j)] for j in range(5)]


@cache
def decoder(model: str) -> Decoder:
    source = open_source(model)
    facts = ModelFacts(model, source.config, source.fingerprint)
    return Decoder(
        source.config,
        build_weights(require(plan(Recipe(), facts, dtype="float64", numerics="pinned")), source),
    )


def make(model: str, *uses: str, pool: int = 4096, context: int = 256, eos: tuple[int, ...] = ()) -> Engine:
    """A trained model in float64, pinned."""
    target = decoder(model)
    facts = ModelFacts(model, target.config, target.weights.fingerprint)
    limits = EngineLimits(pool, 0, 16, context)
    made = require(plan(Recipe.of(*uses), facts, dtype="float64", numerics="pinned", limits=limits))
    return build_engine(made, target, build_kv(made, target), None, eos)


def outcome(lab: ModuleType, engine: Engine, prompts: list[list[int]] = PROMPTS, **sampling: Any) -> Any:
    """Ids and log-probabilities of all samples, why they ended, and what was drafted and judged."""
    settings = {"max_tokens": 14, "logprobs": 0, **sampling}
    ran = lab.run_engine(engine, prompts, **settings)
    engine.kv.check()
    assert not any(pool.used for pool in engine.kv.pools)
    samples = [(f"r{i}", s) for i in range(len(prompts)) for s in range(settings.get("n", 1))]
    said = [(ran.ids(*x), ran.logprobs(*x), ran.finish(*x)) for x in samples]
    drafts = [(d.request_id, d.tokens, d.accepted, d.emitted, d.rule) for s in ran.steps for d in s.drafts]
    return said, drafts


@cache
def stepwise(lab: ModuleType, model: str, *uses: str, **sampling: Any) -> Any:
    """The outcome of a new engine that goes step by step."""
    return outcome(lab, make(model, *uses), **sampling)


def fused_steps(engine: Engine) -> list[int]:
    """From now on: how many sequences each step's round served."""
    seen: list[int] = []
    run = engine.rounds.run

    def spy(*args: Any) -> Any:
        out = run(*args)
        seen.append(len(out))
        return out

    engine.rounds.run = spy  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", [EAGLE, MTP, MODEL, LIKELIEST], ids=lambda d: d[1])
def test_equals_the_step_by_step_path_token_for_token(lab, drafter, sampling):
    """A ragged batch of five: the same drafts, verdicts, tokens, and logits bit for bit."""
    model, uses = drafter
    engine = make(model, uses, "fused_round")
    seen = fused_steps(engine)
    got = outcome(lab, engine, **sampling)
    assert got == stepwise(lab, model, uses, **sampling)
    assert max(seen) == 5
    assert any(accepted for _, _, accepted, _, _ in got[1])
    assert any(len(accepted) < len(tokens) for _, tokens, accepted, _, _ in got[1])


@pytest.mark.parametrize(
    "uses",
    [
        ("paged:page_size=16",),
        ("paged", "prefix_cache"),
        ("paged:page_size=32", "radix_cache"),
        ("paged:page_size=16", "chunked_prefill:budget=16"),
    ],
    ids=lambda u: " ".join(u),
)
def test_pages_prefixes_and_chunks_change_nothing(lab, uses):
    """Also the second time, when prompts are found in the cache."""
    got = make("tiny", EAGLE[1], *uses, "fused_round")
    for _ in range(2):
        assert outcome(lab, got)[0] == stepwise(lab, *EAGLE)[0]


def test_sliding_windows(lab):
    uses = ("paged:page_size=16", "draft_model:k=3,layers=1")
    got = lab.make_engine(*uses, "fused_round", family="gemma3")
    wanted = lab.make_engine(*uses, family="gemma3")
    prompts = lab.prompts_of(5, seed=4)
    assert outcome(lab, got, prompts) == outcome(lab, wanted, prompts)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_end_token_inside_a_block_ends_there(lab, sampling):
    """What was done behind it is left out, and the row leaves the batch while others go on."""
    _, drafts = outcome(lab, make(*EAGLE), **sampling, max_tokens=24)
    ends = tuple({tokens[0] for _, tokens, accepted, *_ in drafts if len(accepted) >= 2})
    got = outcome(lab, make(*EAGLE, "fused_round", eos=ends), **sampling, max_tokens=24)
    assert got == outcome(lab, make(*EAGLE, eos=ends), **sampling, max_tokens=24)
    assert any(finish == "stop" for _, _, finish in got[0])
    assert any(emitted == len(accepted) == len(tokens) for _, tokens, accepted, emitted, _ in got[1])
    assert not any(t in ends for _, tokens, *_ in got[1] for t in tokens[:-1])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_end_of_the_context(lab, sampling):
    """The last rounds have room for fewer drafts, the very last for none."""
    prompts = [p[: 2 + i] for i, p in enumerate(PROMPTS[:3])]
    got = outcome(lab, make(*EAGLE, "fused_round", context=40), prompts, **sampling, max_tokens=500)
    assert got == outcome(lab, make(*EAGLE, context=40), prompts, **sampling, max_tokens=500)
    assert [len(ids) for ids, _, _ in got[0]] == [40 - len(p) for p in prompts]
    assert min(len(tokens) for _, tokens, *_ in got[1]) < 3


def test_requests_that_a_program_cannot_serve_go_step_by_step_in_the_same_step(lab):
    """Wide laws and penalties beside greedy and narrow ones; nobody says anything else than alone."""
    params = [
        SamplingParams(max_tokens=12, **settings)
        for settings in (
            GREEDY,
            SAMPLED,
            {"temperature": 1.0, "seed": 2},
            {"temperature": 1.0, "seed": 2, "top_k": 65},
            {"repetition_penalty": 1.3},
        )
    ]
    engine = make(*EAGLE, "paged", "fused_round")
    seen = fused_steps(engine)
    ran = lab.run_engine(engine, PROMPTS, params=params)
    plain = lab.run_engine(make(*EAGLE, "paged"), PROMPTS, params=params)
    assert [ran.ids(f"r{i}") for i in range(5)] == [plain.ids(f"r{i}") for i in range(5)]
    assert max(seen) == 2
    drafted = {d.request_id for s in ran.steps for d in s.drafts}
    assert drafted == {f"r{i}" for i in range(5)}
    served = outcome(lab, make(*EAGLE, "fused_round:top=0"), temperature=1.0, seed=2)
    assert served == outcome(lab, make(*EAGLE), temperature=1.0, seed=2)


def test_samples_and_preemption(lab):
    uses = ("paged:page_size=16", EAGLE[1])
    wanted = stepwise(lab, "tiny", *uses, n=3, **SAMPLED)[0]
    assert outcome(lab, make("tiny", *uses, "fused_round"), n=3, **SAMPLED)[0] == wanted
    engine = make("tiny", *uses, "fused_round")
    lab.preempt_at(engine, lambda steps: steps > 0 and (steps + 1).bit_count() == 1)
    assert outcome(lab, engine)[0] == stepwise(lab, "tiny", *uses)[0]
    assert engine.forced >= 2
    short = make("tiny", *uses, "fused_round", pool=112)  # hardly more than one sequence fits
    assert outcome(lab, short)[0] == stepwise(lab, "tiny", *uses)[0]


def test_kv_of_both_models_is_that_of_a_fresh_pass(lab):
    """After rounds with and without rejections, row by row: nothing of a draft or a sentinel is left."""
    engine = make(*EAGLE, "paged:page_size=16", "fused_round")
    fresh = make(*EAGLE, "paged:page_size=16")
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine.add(Request("r0", tuple(PROMPTS[2]), params))
    for _ in range(14):
        engine.step()
    (seq,) = engine.sequences("r0")
    known = seq.computed
    fresh.add(Request("r0", tuple(seq.tokens[: known + 1]), params))
    fresh.step()
    (other,) = fresh.sequences("r0")
    fresh.drafting.runner.behind([other.id], 1)
    layers = decoder("tiny").config.num_layers
    fed = engine.drafting.runner.behind([seq.id], 1)[0]
    for layer in range(layers + 1):
        count = known if layer < layers else min(fed, known)
        for name in ("k", "v"):
            rows = [
                e.kv.stores[0].planes[name][layer][s.tables[0]].transpose(1, 2).flatten(0, 1)[:count]
                for e, s in ((engine, seq), (fresh, other))
            ]
            assert torch.equal(*rows), (layer, name)
    store = engine.kv.stores[0]
    noted = store.positions.view(-1, 16)[seq.tables[0]].flatten()[:known]
    assert noted.tolist() == list(range(known))
    assert bool((store.positions[:16] == -1).all())  # of the null page
    assert SENTINEL not in seq.tokens


def with_program(engine: Engine, backend: Any) -> Engine:
    """The same rounds with a program of another backend."""
    runner, old = engine.drafting.runner, engine.rounds
    assert isinstance(runner, DraftRunner) and isinstance(old, Rounds)
    old.program = FusedRound(
        engine.drafting.drafter.fused_chain(),
        engine.executor,
        runner.executor,
        home=0,
        context=engine.context,
        top=64,
        backend=backend,
    )
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_compiler_takes_the_whole_round_and_is_asked_once_per_shape(lab, sampling):
    """``fullgraph=True`` would raise at a break or at a branch on a number; later rounds compile nothing."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    uses = ("tiny", "eagle3:depth=2")
    engine = with_program(make(*uses, "fused_round"), backend)
    first = outcome(lab, engine, PROMPTS[:2], **sampling)
    shapes = len(graphs)
    assert 1 <= shapes <= 2  # two sequences, then perhaps one
    assert outcome(lab, engine, PROMPTS[:2], **sampling) == first
    assert len(graphs) == shapes
    ids = [said[0] for said in first[0]]
    assert ids == [said[0] for said in outcome(lab, make(*uses), PROMPTS[:2], **sampling)[0]]


@pytest.mark.slow
def test_a_compiler_that_makes_programs_free_of_side_effects_says_the_same(lab):
    uses = ("tiny", "eagle3:depth=2")
    got = outcome(lab, make(*uses, "fused_round:graph=aot_eager", pool=256, context=64), PROMPTS[:1])
    wanted = outcome(lab, make(*uses, pool=256, context=64), PROMPTS[:1])
    assert got[1] == wanted[1] and got[0][0][0] == wanted[0][0][0]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_host_waits_once_per_round(lab, monkeypatch, sampling):
    """Every way of reading a tensor is counted while rounds run, but when a sequence begins."""
    engine = make(*EAGLE, "fused_round")
    reads: list[str] = []
    counting = False
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        real = getattr(torch.Tensor, name)

        def count(self: Any, *a: Any, real: Any = real, name: str = name, **k: Any) -> Any:
            if counting:
                reads.append(name)
            return real(self, *a, **k)

        monkeypatch.setattr(torch.Tensor, name, count)

    def counted(on: bool, function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal counting
            before, counting = counting, on
            out = function(*args)
            counting = before
            return out

        return call

    seen = fused_steps(engine)
    monkeypatch.setattr(engine.rounds, "run", counted(True, engine.rounds.run))
    monkeypatch.setattr(engine.drafting.runner, "behind", counted(False, engine.drafting.runner.behind))
    lab.run_engine(engine, PROMPTS[:3], max_tokens=12, **sampling)
    rounds = sum(map(bool, seen))
    assert rounds > 3
    assert reads == ["tolist"] * rounds


def test_logits_that_are_not_finite_end_their_request_alone(lab):
    engine = make(*EAGLE, "fused_round")
    program = engine.rounds.program
    calls = 0

    def broken(inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        out = program(inputs)
        if calls == 2:
            out.read[0, 2 * program.length + 2] = 0.0  # what the flag says
        return out

    broken.length, broken.top, broken.name, broken.rule = (  # type: ignore[attr-defined]
        program.length,
        program.top,
        program.name,
        program.rule,
    )
    engine.rounds.program = broken
    ran = lab.run_engine(engine, PROMPTS[:3], max_tokens=10, ignore_eos=True)
    assert [ran.finish(f"r{i}") for i in range(3)] == ["error", "length", "length"]


@pytest.mark.parametrize(
    ("uses", "says"),
    [
        (("eagle3:width=4",), "width"),
        (("eagle3:confidence=0.3",), "confidence"),
        (("draft_model:model=tiny-mtp",), "second model"),
        (("ngram",), "chains of one length"),
        (("eagle3", "kv_int8"), "KV format"),
        (("eagle3", "paged", "snapkv"), "KV selection"),
        (("eagle3", "paged", "quest"), "plain torch"),
        (("eagle3", "compiled", "fused_round:graph=eager"), "graph to off"),
        (("eagle3", "verify"), "one verification rule"),
        (("eagle3", "goodput"), "one control"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(uses, says):
    config = decoder("tiny").config
    facts = ModelFacts("tiny", config, decoder("tiny").weights.fingerprint)
    recipe = Recipe.of(*uses) if uses[-1].startswith("fused_round") else Recipe.of(*uses, "fused_round")
    made = plan(recipe, facts)
    assert not isinstance(made, Plan)
    assert any(says in str(c) and "fused_round" in (c.first, c.second) for c in made)


def test_layers_may_be_compiled():
    """In 16 bits, where another order of sums may decide between near equals: the first tokens agree."""
    if not compiler.supported() or compiler.find() is None:
        pytest.skip("needs a C++ compiler")
    ask = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    with Session("tiny") as session:
        runs = []
        for uses in ((), ("fused_round",)):
            session.apply(Recipe.of("paged", "compiled", "eagle3:depth=3", *uses)).result()
            runs.append(session.generate("def area(width, height):", **ask))
    plain, fused = runs
    assert "round:fused_round" in fused.path and "round:fused_round" not in plain.path
    assert fused.acceptance["steps"] > 0
    assert fused.token_ids[:3] == plain.token_ids[:3]
