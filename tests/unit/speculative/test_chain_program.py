"""A chain drafted in one call of the compiled kernels is the one that single steps draft, bit for bit."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core import catalog
from workbench.core.plan_machine import machine_conflicts
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.cache import cache_dir
from workbench.models.chain_program import ChainProgram
from workbench.spec.plan import EngineLimits
from workbench.speculative import feature_head
from workbench.training.heads.target import open_target

PAGE = 4
EAGLE3, EAGLE = "eagle3:depth=4", "eagle:tree=chain,depth=3"
FEATURES = {"eagle3": [0, 1, 2], "eagle": [2]}

pytestmark = pytest.mark.skipif(
    bool(machine_conflicts(catalog.get("compiled").spec, "bfloat16", "fast")),
    reason="needs 64-bit Linux and a C++ compiler",
)


@pytest.fixture(scope="module", autouse=True)
def heads(lab: ModuleType, random_heads: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    """Random heads where the techniques look for them; no gradients."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        folder, known = tmp_path_factory.mktemp("cache"), cache_dir() / "kernels"
        known.mkdir(parents=True, exist_ok=True)  # compiled once, for all tests
        (folder / "kernels").symlink_to(known)
        patch.setenv("WORKBENCH_CACHE", str(folder))
        for family in ("llama", "qwen3", "gemma3"):
            source = lab.random_source(family)
            for kind, features in FEATURES.items():
                tensors = getattr(random_heads, kind)(source.config)
                random_heads.put(
                    folder,
                    f"random-{family}",
                    kind,
                    source.fingerprint,
                    tensors,
                    features=features,
                    layers=1,
                )
        yield folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each call of a program drafted for."""
    seen: list[int] = []
    run = ChainProgram.__call__

    def counted(self: ChainProgram, batch: Any, k: Any, v: Any) -> Any:
        seen.append(len(batch.spans) // 4)
        return run(self, batch, k, v)

    monkeypatch.setattr(ChainProgram, "__call__", counted)
    return seen


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines made by it draft in single steps."""

    def made(make: Any, *args: Any, **kwargs: Any) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr(feature_head, "chain_program", lambda decoder, ids: None)
            engine: Engine = make(*args, **kwargs)
            return engine

    return made


def engine_of(lab: ModuleType, *uses: str, page_size: int = PAGE, **where: Any) -> Engine:
    return lab.make_engine(
        "paged", "compiled", *uses, page_size=page_size, dtype="bfloat16", numerics="fast", **where
    )


def told(ran: Any) -> list[tuple[Any, ...]]:
    """What was drafted, accepted and said in every step."""
    drafts = [(s.step, d.request_id, d.tokens, d.accepted) for s in ran.steps for d in s.drafts]
    return [*drafts, *((e.step, e.request_id, [t.id for t in e.tokens], e.finish) for e in ran.events)]


def same(lab: ModuleType, step_by_step: Any, uses: tuple[str, ...], prompts: Any, **how: Any) -> Any:
    """Run both; what they say and the pages they leave are equal. Gives the run in single calls."""
    where = {k: how.pop(k) for k in ("family", "context", "pool", "eos_ids", "sequences") if k in how}
    preempt = how.pop("preempt", None)
    both, pages = [], []
    for make in (engine_of, lambda *a, **k: step_by_step(engine_of, *a, **k)):
        engine = make(lab, *uses, **where)
        if preempt:
            lab.preempt_at(engine, preempt)
        both.append(lab.run_engine(engine, prompts, **{"max_tokens": 16, "ignore_eos": True, **how}))
        engine.kv.check()
        store = engine.drafting.runner._executor.stores[0]
        pages.append([store.planes[n][-1].clone() for n in ("k", "v")])
    assert told(both[0]) == told(both[1])
    for a, b in zip(*pages, strict=True):
        assert torch.equal(a[1:].view(torch.int16), b[1:].view(torch.int16))  # page 0 belongs to nobody
    return both[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "drafter",
    [
        EAGLE3,
        f"{EAGLE3},vocab=0",
        f"{EAGLE3},vocab=40,bits=4",
        f"{EAGLE3},bits=8,confidence=0.1",
        EAGLE,
        f"{EAGLE},vocab=40,bits=4,confidence=0.05",
    ],
)
def test_drafts_and_pages_are_those_of_single_steps(lab, step_by_step, calls, family, drafter) -> None:
    """A ragged batch: other lengths, other rooms at the end; every round but the first is one call."""
    prompts = lab.prompts_of(5, seed=2, low=5, high=40)
    ran = same(lab, step_by_step, (drafter,), prompts, family=family)
    assert sum(calls) > 20 and max(calls) == 5
    lengths = {len(d.tokens) for s in ran.steps for d in s.drafts}
    assert len(lengths) > 1 if "confidence" in drafter else max(lengths) > 2


@pytest.mark.parametrize(
    "model,drafter",
    [("tiny", "eagle3:depth=3,confidence=0.3"), ("tiny", EAGLE), ("tiny-mtp", "mtp:k=3")],
)
def test_trained_heads_get_the_same_accepted(step_by_step, calls, model, drafter) -> None:
    target = open_target(model)
    ids = target.tokenizer.encode("def area(width, height):\n    return")
    limits = EngineLimits(kv_pool_tokens=512, max_sequences=2, max_context=256)

    def drafted(engine: Engine) -> list[Any]:
        engine.add(Request("a", tuple(ids), SamplingParams(max_tokens=60)))
        out = []
        while engine.has_work:
            out += [(d.tokens, d.accepted) for d in engine.step()[0].drafts]
        return out

    with target.engine(drafter, limits=limits) as engine:
        fused = drafted(engine)
    made = step_by_step(lambda: target.engine(drafter, limits=limits).__enter__())
    assert fused == drafted(made) and sum(len(a) for _, a in fused) > 5
    assert len(calls) >= len(fused) - 1


def test_preemption_prefixes_and_chunks(lab, step_by_step, calls) -> None:
    prompts = lab.prompts_of(4, seed=5, low=20, high=60)
    for uses in (("prefix_cache",), ("chunked_prefill:budget=16",)):
        same(lab, step_by_step, (EAGLE3, *uses), prompts + prompts[:1], preempt={4, 7}.__contains__)
    assert calls


def test_a_text_ends_inside_a_draft(lab, step_by_step, calls) -> None:
    """At an end token, at its budget, and at the end of the context."""
    prompts = lab.prompts_of(6, seed=3, low=5, high=20)
    plain = lab.run_engine(engine_of(lab), prompts, max_tokens=16, ignore_eos=True)
    ends = tuple({plain.ids(f"r{i}")[9] for i in range(3)})
    ran = same(lab, step_by_step, (EAGLE3,), prompts, eos_ids=ends, ignore_eos=False)
    assert {ran.finish(f"r{i}") for i in range(6)} >= {"stop"}
    for n in (1, 2, 3, 5):
        same(lab, step_by_step, (EAGLE3,), prompts, max_tokens=n)
    same(lab, step_by_step, (EAGLE3,), prompts, context=24, max_tokens=64)
    assert calls


def test_more_than_a_call_feeds_goes_step_by_step(lab, calls) -> None:
    """Of a prompt that fills no page all rows are fed with the first draft; later rounds are calls."""
    long, short = list(range(1, 41)), list(range(1, 9))
    for prompt, steps in ((long, 1), (short, 0)):
        calls.clear()
        ran = lab.run_engine(engine_of(lab, EAGLE3, page_size=64), [prompt], max_tokens=16)
        drafted = sum(bool(s.drafts) for s in ran.steps)
        assert len(calls) == drafted - steps > 3


class Even:
    """A mask: even ids alone."""

    key = "even"

    def allowed(self, generated: Any, path: Any = ()) -> torch.Tensor:
        return torch.arange(61) % 2 == 0


@pytest.mark.parametrize(
    "how", [{"temperature": 0.8, "seed": 1}, {"presence_penalty": 0.5}, {"mask": Even()}], ids=str
)
def test_laws_are_asked_step_by_step(lab, calls, how) -> None:
    prompts = lab.prompts_of(2, seed=1, low=5, high=12)
    ran = lab.run_engine(engine_of(lab, EAGLE3), prompts, max_tokens=12, ignore_eos=True, **how)
    assert not calls and any(s.drafts for s in ran.steps)


def test_one_request_with_a_law_takes_the_batch_along(lab, calls) -> None:
    prompts = lab.prompts_of(2, seed=1, low=5, high=12)
    params = [SamplingParams(max_tokens=n, temperature=t, seed=1) for n, t in ((20, 0.0), (6, 0.9))]
    lab.run_engine(engine_of(lab, EAGLE3), prompts, params=params)
    assert calls and set(calls) == {1}


@pytest.mark.parametrize("drafter", [f"{EAGLE3},draws=false", f"{EAGLE},draws=false"])
def test_the_likeliest_tokens_are_one_call_at_any_temperature(lab, step_by_step, calls, drafter) -> None:
    prompts = lab.prompts_of(3, seed=1, low=5, high=12)
    same(lab, step_by_step, (drafter,), prompts, temperature=0.7, seed=4)
    assert calls


@pytest.mark.parametrize(
    "uses",
    [
        ("kv_int8", EAGLE3),
        ("kv_fp8", EAGLE3),
        ("kivi:residual=32", EAGLE3),
        ("sdpa", EAGLE3),
        ("reference", EAGLE3),
        ("eagle3:depth=3,width=4,nodes=8",),
        ("fasteagle:vocab=0",),
    ],
    ids=str,
)
def test_other_forms_draft_as_before(lab, random_heads, calls, uses) -> None:
    """Other pages, other attention, trees, and heads of another form have no program."""
    source = lab.random_source("llama")
    tensors = random_heads.fasteagle(source.config)
    random_heads.put(
        cache_dir(), "random-llama", "fasteagle", source.fingerprint, tensors, features=[0, 1, 2], layers=3
    )
    engine = lab.make_engine("paged", "compiled", *uses, dtype="bfloat16", numerics="fast")
    ran = lab.run_engine(engine, lab.prompts_of(2, low=5, high=12), max_tokens=12, ignore_eos=True)
    assert not calls and any(s.drafts for s in ran.steps)


def test_without_the_kernels_there_is_no_program(lab, calls) -> None:
    engine = lab.make_engine("paged", EAGLE3, dtype="bfloat16", numerics="fast")
    ran = lab.run_engine(engine, lab.prompts_of(2, low=5, high=12), max_tokens=12, ignore_eos=True)
    assert not calls and any(s.drafts for s in ran.steps)
