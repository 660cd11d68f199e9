"""Pinned runs in float64: whatever is switched on, every output token has the same logits, bit for bit.

The reference is one prompt at a time on a contiguous cache, prefilled in one piece, without drafts. Lossy KV
formats are compared with the same format run plainly (law 3). A token's logits row is carried as a digest.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import workbench.engine.choose as choose
from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.engine.params import SamplingParams
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.spec.errors import ModelNotFound
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

TOKENS = 8
SEEDED = {"temperature": 3.0, "top_p": 0.95, "seed": 42}


class Case(NamedTuple):
    """One combination; the first value of every field is the reference's."""

    family: str = "llama"
    pages: int = 0  # 0: contiguous
    chunk: int = 0
    reuse: str = "cold"
    batch: int = 1
    draft: str = ""
    seeded: bool = False
    samples: int = 1
    codec: str = ""
    select: str = ""


SELECTORS = {
    "streaming": "streaming_llm:keep=0.5,interval=4",
    "rerotated": "streaming_llm:keep=0.5,interval=3,rerotate=true",
    "snapkv": "snapkv:keep=0.5,recent=8",
    "h2o": "h2o:keep=0.5,interval=4",
    "expected": "expected_attention:keep=0.5",
    "knorm": "knorm:keep=0.5",
    "curdkv": "curdkv:keep=0.5",
    "ada": "adacurdkv:keep=0.5",
}
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "family": ("llama", "qwen2", "qwen3", "gemma3"),
    "pages": (0, 16, 32, 64, 128),
    "chunk": (0, 1, 7, 64),
    "reuse": ("cold", "warm", "radix", "evicted", "preempted"),
    "batch": (1, 5, 16),
    "draft": ("", "ngram", "suffix", "chain", "tree"),
    "seeded": (False, True),
    "samples": (1, 3),
    "codec": ("", "kv_fp8", "kv_int8", "kv_fp4", "kivi", "xquant"),
    "select": ("", *SELECTORS),
}


# Formats that code whole pages, and what else is said of them: every layer that can shares another's codes.
PAGED = {"kivi": "", "xquant": ",schedule=paper,km=1,vm=1"}


def possible(case: Case) -> bool:
    """What fits together."""
    if case.reuse != "cold" and not case.pages:
        return False
    if case.codec in PAGED and case.pages == 16:
        return False  # its groups are of 32 tokens
    if case.select and (not case.pages or case.codec in PAGED):
        return False  # its pages are coded whole
    if case.select == "rerotated" and (case.codec or case.family == "gemma3"):
        return False
    if case.select == "ada" and case.codec in ("kv_fp8", "kv_fp4"):
        return False  # calibrated per head
    # A batch of 16 would say no more than one of 5 there, in three times the steps.
    return not (case.chunk == 1 and case.batch == 16)


def pairwise() -> list[Case]:
    """Few cases in which every possible pair of values of two dimensions occurs."""
    rng = random.Random(0)
    names = list(DIMENSIONS)

    def pairs(case: Case) -> set[tuple[Any, ...]]:
        return {(a, getattr(case, a), b, getattr(case, b)) for a, b in itertools.combinations(names, 2)}

    pool = [Case(*(rng.choice(DIMENSIONS[n]) for n in names)) for _ in range(4000)]
    pool = [c for c in pool if possible(c)]
    left = set().union(*map(pairs, pool))
    out = []
    while left:
        best = max(pool, key=lambda c: len(pairs(c) & left))
        out.append(best)
        left -= pairs(best)
    return out


def singles() -> list[Case]:
    """Every value of every dimension alone, with the pages it needs."""
    out = []
    for name, values in DIMENSIONS.items():
        for value in values[1:]:
            case = Case()._replace(**{name: value})
            if name == "select":
                case = case._replace(pages=16)
            if name == "reuse":
                case = case._replace(pages=16, batch=5)
            out.append(case)
    return out


@pytest.fixture(autouse=True)
def _digests(monkeypatch: pytest.MonkeyPatch):
    """The log-probabilities of a token become a digest of the logits row it was chosen from."""

    def digests(
        rows: torch.Tensor, ids: Any, top: int = 0
    ) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        raw = rows.detach().contiguous().view(torch.uint8).numpy()
        return [(0.0, ((int(hashlib.sha1(r.tobytes()).hexdigest()[:12], 16), 0.0),)) for r in raw]  # noqa: S324

    monkeypatch.setattr(choose, "logprobs", digests)
    with torch.inference_mode():
        yield


@cache
def tiny() -> Decoder:
    """The trained model that ships with the workbench, in float64."""
    source = open_source("tiny")
    made = require(plan(Recipe(), ModelFacts("tiny", source.config), dtype="float64", numerics="pinned"))
    return Decoder(source.config, build_weights(made, source))


def recipe_of(case: Case) -> list[str]:
    uses = []
    if case.pages:
        uses.append(f"paged:page_size={case.pages}")
    if case.chunk:
        uses.append(f"chunked_prefill:budget={case.chunk}")
    if case.reuse in ("warm", "evicted"):
        uses.append("prefix_cache")
    if case.reuse == "radix":
        uses.append("radix_cache")
    if case.draft == "suffix":
        uses += ["suffix:k=6,offset=2,tree=true", "goodput:probe=2"]
    elif case.draft:
        uses.append("ngram:k=4")
    if case.codec in PAGED:
        page = case.pages or 64
        uses.append(f"{case.codec}:residual={page},group={min(page, 32)}{PAGED[case.codec]}")
    elif case.codec:
        uses.append(case.codec)
    if case.select:
        uses.append(SELECTORS[case.select])
    return uses


def make(lab: ModuleType, case: Case, prompts: list[list[int]]) -> Any:
    longest = max(map(len, prompts)) + TOKENS
    pool = 8192
    if case.reuse == "preempted":  # the longest fits, and hardly anything beside it
        pool = case.pages * -(-longest // case.pages)
    elif case.reuse == "evicted":  # cached pages are taken by the next prompts
        pool = case.pages * (-(-longest // case.pages) * case.samples + 3)
    limits = {"pool": pool, "context": 128, "sequences": max(case.batch, case.samples)}
    if case.family != "tiny":
        return lab.make_engine(*recipe_of(case), family=case.family, **limits)
    facts = ModelFacts("tiny", tiny().config)
    made = require(
        plan(
            Recipe.of(*recipe_of(case)),
            facts,
            dtype="float64",
            numerics="pinned",
            limits=EngineLimits(pool, 0, limits["sequences"], 128),
        )
    )
    return build_engine(made, tiny(), build_kv(made, tiny()), None, ())


Outputs = list[list[tuple[int, int]]]


def preempt_now_and_then(lab: ModuleType, engine: Any) -> None:
    """The youngest sequence loses its pages before steps 2, 4, 8, 16 … whatever the pool says."""
    lab.preempt_at(engine, lambda steps: steps > 0 and (steps + 1).bit_count() == 1)


def run(
    lab: ModuleType, engine: Any, case: Case, prompts: list[list[int]], seeds: list[int]
) -> tuple[Outputs, Any]:
    sampling = {"max_tokens": TOKENS, "n": case.samples, "logprobs": 0, "ignore_eos": True}
    params = [SamplingParams(**sampling, **({**SEEDED, "seed": s} if case.seeded else {})) for s in seeds]
    ran = lab.run_engine(engine, prompts, params=params, max_steps=20000)
    out = []
    for i in range(len(prompts)):
        for sample in range(case.samples):
            tokens = [t for e in ran._of(f"r{i}", sample) for t in e.tokens]
            out.append([(t.id, t.top_logprobs[0][0]) for t in tokens])
    engine.kv.check()
    assert not any(pool.used for pool in engine.kv.pools)
    return out, ran


_references: dict[Any, list[list[tuple[int, int]]]] = {}


def reference(lab: ModuleType, case: Case, prompts: list[list[int]], seeds: list[int]) -> Outputs:
    plain = Case(family=case.family, seeded=case.seeded, samples=case.samples, codec=case.codec)
    if case.codec in PAGED:
        plain = plain._replace(pages=case.pages)  # its groups are part of what it is
    if case.select:
        plain = plain._replace(pages=16, select=case.select)
    out: Outputs = []
    engine = None
    for prompt, seed in zip(prompts, seeds, strict=True):
        key = (plain, tuple(prompt), seed)
        if key not in _references:
            engine = engine or make(lab, plain, prompts)
            _references[key] = run(lab, engine, plain, [prompt], [seed])[0]
        out += _references[key]
    return out


def check(lab: ModuleType, scripted: ModuleType, case: Case, prompts: list[list[int]], first: int = 0) -> Any:
    """Run a case and compare; returns what it did."""
    seeds = [first + i for i in range(len(prompts))]
    expected = reference(lab, case, prompts, seeds)
    engine = make(lab, case, prompts)
    if case.draft in ("chain", "tree"):
        texts = [
            prompts[i] + [t for t, _ in expected[i * case.samples + s]]
            for i in range(len(prompts))
            for s in range(case.samples)
        ]
        vocab = engine.vocab_size
        right = lambda seq, round: (seq + round) % 4  # noqa: E731
        scripted.attach(
            engine, scripted.Replay(texts, 6, right=right, trees=case.draft == "tree", vocab=vocab)
        )
    if case.reuse == "preempted":
        preempt_now_and_then(lab, engine)
    got, ran = run(lab, engine, case, prompts, seeds)
    assert case.reuse != "preempted" or engine.forced >= 2
    if case.reuse in ("warm", "radix", "evicted"):
        assert got == expected
        got, ran = run(lab, engine, case, prompts, seeds)
    assert [[t for t, _ in o] for o in got] == [[t for t, _ in o] for o in expected]
    assert got == expected
    return ran


def prompts_for(lab: ModuleType, n: int, start: int = 0, vocab: int | None = None) -> list[list[int]]:
    """Ragged prompts; half of them share a beginning with another one."""
    made = lab.prompts_of(200, seed=1, low=3, high=70)
    for i in range(1, 200, 4):
        made[i] = (made[i - 1] + made[i])[:70]
    return [made[(start + i) % 200] for i in range(n)]


def count(case: Case) -> int:
    return 16 if case.batch == 16 else 5


@pytest.mark.parametrize("case", pairwise(), ids=lambda c: "-".join(str(v) for v in c if v != ""))
def test_pairs_of_everything_are_exact(lab, scripted, case):
    start = sum(map(ord, "".join(map(str, case)))) % 20
    check(lab, scripted, case, prompts_for(lab, count(case), start), start)


@pytest.mark.parametrize("family", DIMENSIONS["family"])
def test_preemption_prefixes_chunks_and_drafts_really_happen(lab, scripted, family):
    """The mechanisms are exercised, not merely switched on."""
    prompts = prompts_for(lab, 8)
    base = Case(family=family, pages=16, batch=8)
    check(lab, scripted, base._replace(reuse="preempted"), prompts)  # counts them itself
    ran = check(lab, scripted, base._replace(reuse="warm"), prompts)
    pages = sum(ran.cached(f"r{i}") or 0 for i in range(8))
    assert pages >= 64
    ran = check(lab, scripted, base._replace(reuse="radix"), prompts)
    assert sum(ran.cached(f"r{i}") or 0 for i in range(8)) > pages
    ran = check(lab, scripted, base._replace(chunk=7), prompts)
    assert max(s.rows for s in ran.steps) <= 7
    ran = check(lab, scripted, base, prompts)
    assert max(s.running for s in ran.steps) == 8


@pytest.mark.parametrize("family", DIMENSIONS["family"])
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("codec", DIMENSIONS["codec"])
def test_tree_drafts_equal_the_plain_run(lab, scripted, family, seeded, codec):
    """Branching trees whose accepted paths are scattered over the tree, so that rows have to be moved."""
    pages = 32 if codec in PAGED else 16
    case = Case(family=family, pages=pages, batch=5, draft="tree", seeded=seeded, codec=codec)
    ran = check(lab, scripted, case, prompts_for(lab, 5, 3), 3)
    drafts = [d for s in ran.steps for d in s.drafts]
    assert any(d.accepted and d.accepted != tuple(range(len(d.accepted))) for d in drafts)
    assert any(not d.accepted for d in drafts)
    assert any(len(d.accepted) >= 2 for d in drafts)


@pytest.mark.parametrize("select", SELECTORS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_is_kept_depends_on_nothing_but_the_text(lab, scripted, select, family):
    """Chunks, batches, cached prefixes, preemption and trees of drafts keep the same tokens."""
    case = Case(family=family, pages=16, batch=5, draft="tree", select=select)
    if not possible(case):
        pytest.skip("keys of sliding layers stay at their own positions")
    for each in (case, case._replace(chunk=7), case._replace(reuse="warm"), case._replace(reuse="preempted")):
        check(lab, scripted, each, prompts_for(lab, 5, 3), 3)


@pytest.mark.parametrize("batch", range(1, 17, 3))
def test_any_batch_is_exact(lab, scripted, batch):
    case = Case(pages=16, batch=batch, seeded=True)
    check(lab, scripted, case, prompts_for(lab, 17, batch), batch)


TINY = [
    Case("tiny", pages=16, chunk=7, batch=5),
    Case("tiny", pages=64, reuse="warm", draft="ngram", batch=5, seeded=True),
    Case("tiny", pages=32, reuse="preempted", draft="tree", batch=5),
    Case("tiny", pages=128, samples=3, seeded=True, batch=5, codec="kv_int8", draft="chain"),
    Case("tiny", pages=32, chunk=64, batch=5, codec="kivi", draft="tree"),
]


@pytest.mark.parametrize("case", TINY, ids=lambda c: "-".join(str(v) for v in c if v != ""))
def test_the_shipped_model_is_exact(lab, scripted, case):
    try:
        tiny()
    except ModelNotFound as err:
        pytest.skip(str(err))
    check(lab, scripted, case, prompts_for(lab, 5))


FAMILIES = [*DIMENSIONS["family"], "tiny"]


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", [c for c in singles() if possible(c) and c.family == "llama"], ids=str)
def test_two_hundred_prompts_with_each_thing_alone(lab, scripted, case, family):
    check(lab, scripted, case._replace(family=family), prompts_for(lab, 200))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", range(20))
def test_two_hundred_prompts_through_everything(lab, scripted, family, part):
    prompts = prompts_for(lab, 200)
    rng = random.Random(f"{family}/{part}")
    drawn = [Case(*(rng.choice(values) for values in DIMENSIONS.values())) for _ in range(20)]
    for case in filter(possible, drawn):
        check(lab, scripted, case._replace(family=family), prompts)
