"""Selectors at work in an engine: what they keep is what a plain forward says, and what they drop is gone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core import catalog
from workbench.core.session import Session
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

pytestmark = pytest.mark.usefixtures("inference")

PAGE = 4
IDS = [i for i in catalog.MODULES if catalog.get(i).spec.seam == "kv_selector"]
each = pytest.mark.parametrize("id", IDS)
# Prompts of a test are short: a window of 64 would be all of them.
SMALL = {"snapkv": "recent=8", "expected_attention": "future=16", "h2o": "interval=3"}


def use(id: str, **options: Any) -> str:
    given = dict(part.split("=") for part in SMALL.get(id, "").split(",") if part) | options
    return f"{id}:" + ",".join(f"{k}={v}" for k, v in given.items()) if given else id


def engine(lab: ModuleType, *uses: str, **kwargs: Any) -> Engine:
    return lab.make_engine("paged", *uses, page_size=PAGE, **kwargs)


def said(made: Engine, prompts: Any, context: int | None = None, **params: Any) -> dict[Any, list[Any]]:
    """Ids and log-probabilities by request and sample: ids alone of a random model tell little."""
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "logprobs": 0, **params})
        made.add(Request(f"r{i}", tuple(prompt), sampling, context=context))
    out: dict[Any, list[Any]] = {}
    while made.has_work:
        _, events = made.step()
        made.kv.check()
        for e in events:
            out.setdefault((e.request_id, e.sample), []).extend((t.id, t.logprob) for t in e.tokens)
    assert [pool.used for pool in made.kv.pools] == [0] * len(made.kv.pools)
    return out


def plain_forward(lab: ModuleType, made: Engine, prompt: Any) -> dict[int, tuple[torch.Tensor, ...]]:
    """Queries, keys and values of each layer from the decoder alone, attention written out."""
    seen: dict[int, tuple[torch.Tensor, ...]] = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen[layer] = (q.clone(), k.transpose(0, 1).clone(), v.transpose(0, 1).clone())
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2)
        scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
        return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)

    tokens = torch.tensor(prompt)
    made.executor.decoder.forward(tokens, torch.arange(len(tokens)), attend)
    return seen


@each
def test_the_engine_keeps_what_a_plain_forward_says(
    lab: ModuleType, make_tokens: Callable[..., Any], id: str
) -> None:
    from workbench.engine.selection import CachedLayer

    prompt = lab.prompts_of(1, seed=3, low=44, high=45)[0]
    made = engine(lab, use(id, keep=0.5), "chunked_prefill:budget=16")
    made.add(Request("a", tuple(prompt), SamplingParams(max_tokens=3, ignore_eos=True)))
    while not made.sequences("a")[0].kept:
        made.step()
    (seq,) = made.sequences("a")
    selector = made.selecting.selector
    assert selector is not None
    selection = selector.begin(44, 44)
    for layer, (q, k, v) in plain_forward(lab, made, prompt).items():
        positions = torch.arange(44)
        cached = CachedLayer(k, v, positions.expand(len(k), -1))
        seen = 44 if selector.history is None else selector.history
        if seen:
            selection.observe(layer, q[44 - seen :], positions[44 - seen :], lambda cached=cached: cached)
        wanted = [s.tolist() for s in selection.keep(layer, cached)]
        assert [s.tolist() for s in seq.kept[layer]] == wanted


@each
def test_kvc_15_pages_of_what_is_dropped_are_free_and_lengths_are_told_apart(
    lab: ModuleType, id: str
) -> None:
    made = engine(lab, use(id, keep=0.25), pool=512)
    prompt = lab.prompts_of(1, seed=1, low=100, high=101)[0]
    made.add(Request("a", tuple(prompt), SamplingParams(max_tokens=11, ignore_eos=True)))
    made.step()
    (seq,) = made.sequences("a")
    groups = range(len(made.kv.pools))
    heads = made.executor.decoder.config.num_kv_heads
    if len(groups) == 1:
        assert seq.computed == 100 and seq.used(0) == 25
    else:
        for layer in range(made.executor.decoder.config.num_layers):
            assert sum(seq.used(layer * heads + h) for h in range(heads)) == 25 * heads
    assert [made.kv.pools[g].used_by(g) for g in groups] == [-(-seq.used(g) // PAGE) for g in groups]
    last = 0
    while made.has_work and seq.state != "finished":
        last = seq.used(0)
        made.step()
    if id != "h2o":  # which goes on dropping
        assert last == seq.prompt_len + 9 - 75 if len(groups) == 1 else last


@each
def test_keeping_everything_is_the_plain_run(lab: ModuleType, id: str) -> None:
    prompts = lab.prompts_of(3, seed=4, low=12, high=40)
    options = {"interval": 0} if id == "h2o" else {}
    made = engine(lab, use(id, keep=1.0, **options))
    assert said(made, prompts) == said(engine(lab), prompts)
    if id == "h2o":  # with an interval the budget is that of the prompt, so text that follows replaces it
        assert said(engine(lab, use(id, keep=1.0)), prompts) != said(engine(lab), prompts)


def positions_run(made: Engine, prompt: Any, n: int) -> list[int]:
    """Positions of the single rows that decode."""
    seen: list[int] = []
    forward = made.executor.forward
    prepare = made.executor.prepare

    def spy(step: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(p for span in step.spans if span.n_new == 1 for p in span.positions)
        return prepare(step, *args, **kwargs)

    made.executor.prepare = spy  # type: ignore[method-assign]
    said(made, [prompt], max_tokens=n)
    assert forward == made.executor.forward
    return seen


def test_kvc_01_positions_go_on_behind_the_prompt_or_behind_what_is_kept(lab: ModuleType) -> None:
    prompt = lab.prompts_of(1, seed=2, low=12, high=13)[0]
    for id in IDS:
        got = positions_run(engine(lab, use(id, keep=0.5)), prompt, 4)
        assert got == [12, 13, 14]
    turned = engine(lab, "streaming_llm:keep=0.5,rerotate=true")
    assert positions_run(turned, prompt, 4) == [6, 7, 8]


@each
@pytest.mark.parametrize("beside", ["chunked_prefill:budget=16", "ngram:k=4"])
def test_chunks_and_drafts_do_not_change_what_is_kept(lab: ModuleType, id: str, beside: str) -> None:
    piece = lab.prompts_of(1, seed=5, low=19, high=20)[0]
    prompts = [(*piece, *piece, *piece), piece]
    expected = said(engine(lab, use(id)), prompts, max_tokens=20)
    assert said(engine(lab, use(id), beside), prompts, max_tokens=20) == expected


@each
def test_agnostic_selection_has_not_seen_the_question(lab: ModuleType, id: str) -> None:
    context = lab.prompts_of(1, seed=6, low=40, high=41)[0]
    kept = []
    for question in ([1, 2, 3], [9, 8, 7]):
        made = engine(lab, use(id, keep=0.3, protocol="agnostic", **({"interval": 0} if id == "h2o" else {})))
        made.add(Request("a", (*context, *question), SamplingParams(max_tokens=2), context=40))
        while not made.sequences("a")[0].kept:
            made.step()
        (seq,) = made.sequences("a")
        kept.append([[s.tolist() for s in heads] for _, heads in sorted(seq.kept.items())])
        assert all(max(s) < 40 for heads in kept[-1] for s in heads)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("id", ["h2o", "streaming_llm"])
@pytest.mark.parametrize("interval", [1, 5])
def test_an_interval_bounds_the_cache(lab: ModuleType, id: str, interval: int) -> None:
    made = engine(lab, f"{id}:keep=0.5,interval={interval}")
    prompt = lab.prompts_of(1, seed=7, low=24, high=25)[0]
    made.add(Request("a", tuple(prompt), SamplingParams(max_tokens=40, ignore_eos=True)))
    (seq,) = made.sequences("a")
    used = []
    while made.has_work:
        made.step()
        if seq.state != "finished":
            used.append(seq.used(0))
    assert len(used) > 30 and max(used) == 12 + interval - 1 and min(used) == 12


@pytest.mark.parametrize("id", ["h2o", "snapkv", "expected_attention"])
def test_samples_of_a_prompt_equal_samples_alone(lab: ModuleType, id: str) -> None:
    prompt = lab.prompts_of(1, seed=8, low=30, high=31)[0]
    options: dict[str, Any] = {"n": 3, "temperature": 2.0, "seed": 5}
    together = said(engine(lab, use(id)), [prompt], **options)
    tight = said(engine(lab, use(id), sequences=3, pool=96), [prompt], **options)
    assert together == tight and len({tuple(v) for v in together.values()}) == 3


def test_statistics_count_as_kv_metadata_and_go_with_the_sequence(lab: ModuleType) -> None:
    prompt = lab.prompts_of(1, seed=1, low=50, high=51)[0]
    held = {}
    for name in ("h2o:interval=0", "knorm"):
        made = engine(lab, name)
        before = made.memory()["kv_meta"]
        made.add(Request("a", tuple(prompt), SamplingParams(max_tokens=4, ignore_eos=True)))
        made.step()
        held[name] = made.memory()["kv_meta"] - before
        while made.has_work:
            made.step()
        assert made.memory()["kv_meta"] == before
    config = made.executor.decoder.config
    kept = config.num_layers * config.num_kv_heads * 25
    assert held["knorm"] >= kept * 4  # which tokens they are
    assert held["h2o:interval=0"] - held["knorm"] == kept * 8


def test_the_shipped_model_answers_on_half_of_its_cache() -> None:
    limits = EngineLimits(kv_pool_tokens=512, max_context=256)
    text = "def area(width, height):\n    return width * height\n\n\n" * 4
    with Session("tiny", limits=limits) as session:
        plain = session.generate(text, max_tokens=4)
        for id in IDS:
            session.apply(Recipe.of("paged", f"{id}:keep=0.5")).result(timeout=120)
            run = session.generate(text, max_tokens=4)
            assert run.state == "done" and len(run.token_ids) == len(plain.token_ids)
            assert any(part.startswith(f"select:{id}/") for part in run.path)
