"""A thinned-out cache inside the engine, against the definition; freed memory, drafts, forks, preemption."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from workbench.core import catalog
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.engine.snapshot import kept_snapshot
from workbench.spec.errors import RequestError
from workbench.spec.technique import TechniqueSpec

pytestmark = pytest.mark.usefixtures("inference")

PAGE = 4


@dataclass(frozen=True)
class _Config:
    """No options: the selector is made by the test."""


@pytest.fixture
def engine_with(lab: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """An engine whose recipe names a scripted selector."""

    def make(selector, *uses: str, **kwargs):
        module = ModuleType("scripted_technique")
        module.Config, module.bind = _Config, lambda config, context: selector  # type: ignore[attr-defined]
        module.SPEC = TechniqueSpec(  # type: ignore[attr-defined]
            "scripted", "Scripted", "kv", "kv_selector", "lossy", "-", "-", claims_slot=("kv_selection",)
        )
        monkeypatch.setitem(sys.modules, "scripted_technique", module)
        monkeypatch.setitem(catalog.MODULES, "scripted", "scripted_technique")
        catalog.get.cache_clear()
        try:
            return lab.make_engine("paged", "scripted", *uses, page_size=PAGE, **kwargs)
        finally:
            catalog.get.cache_clear()

    return make


def generate(engine, prompts, *, context=None, max_tokens=12, **params):
    """Output ids by request and sample."""
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        engine.add(Request(f"r{i}", tuple(prompt), sampling, context=context))
    out: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        _, events = engine.step()
        engine.kv.check()
        for e in events:
            out.setdefault((e.request_id, e.sample), []).extend(t.id for t in e.tokens)
    assert [pool.used for pool in engine.kv.pools] == [0] * len(engine.kv.pools)
    return out


@pytest.mark.parametrize(
    "uses", [(), ("chunked_prefill:budget=16",), ("ngram:k=4",), ("prefix_cache",)], ids=str
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interval": 5},
        {"per_head": True},
        {"rerotates": True, "interval": 4},
        {"history": 3},
        {"aware": False},
    ],
    ids=str,
)
def test_output_is_that_of_a_model_that_forgets(lab, scripted_selection, engine_with, uses, options):
    selector = scripted_selection.Scripted(**options)
    engine = engine_with(selector, *uses)
    prompts = lab.prompts_of(3, seed=3, low=17, high=40)
    context = 11
    found = generate(engine, prompts, context=context)
    again = generate(engine, prompts, context=context)  # now with whatever a prefix index kept
    assert again == found
    for i, prompt in enumerate(prompts):
        expected = scripted_selection.thinned(engine.executor.decoder, prompt, 12, selector, context)
        assert found[f"r{i}", 0] == expected


def test_sliding_layers_are_left_alone(lab, scripted_selection, engine_with):
    selector = scripted_selection.Scripted(interval=6)
    engine = engine_with(selector, family="gemma3")
    prompts = lab.prompts_of(2, seed=5, low=40, high=60)
    found = generate(engine, prompts)
    for i, prompt in enumerate(prompts):
        expected = scripted_selection.thinned(engine.executor.decoder, prompt, 12, selector, len(prompt))
        assert found[f"r{i}", 0] == expected


@pytest.mark.parametrize("codec", ["kv_int8", "kv_fp8:scale=token", "kv_fp4"])
def test_coded_rows_move_as_they_are(lab, scripted_selection, engine_with, codec):
    """All layers and heads keep the same: then the run equals the plain format's, read through a mask."""
    prompt = lab.prompts_of(1, seed=7, low=30, high=31)[0]
    engine = engine_with(scripted_selection.Scripted(), codec)
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=6, ignore_eos=True)))
    plain = lab.make_engine("paged", codec, page_size=PAGE)
    plain.add(Request("a", tuple(prompt), SamplingParams(max_tokens=6, ignore_eos=True)))
    engine.step()
    plain.step()
    (seq,), (full,) = engine.sequences("a"), plain.sequences("a")
    store, whole = engine.kv.stores[0], plain.kv.stores[0]
    for name, plane in store.planes.items():
        spec = next(s for s in store.specs if s.name == name)
        head, slot = 2 + spec.axes.index("head"), 2 + spec.axes.index("slot")
        moved, original = (
            p.view(torch.uint8) if p.dtype.itemsize == 1 else p for p in (plane, whole.planes[name])
        )
        moved, original = (p.movedim((head, 1, slot), (1, 2, 3)) for p in (moved, original))
        mine, theirs = moved[:, :, seq.tables[0]].flatten(2, 3), original[:, :, full.tables[0]].flatten(2, 3)
        for layer, heads in seq.kept.items():
            for h, tokens in enumerate(heads):
                assert torch.equal(mine[layer, h, : len(tokens)], theirs[layer, h, tokens.long()])
    while engine.has_work:
        engine.step()


def test_what_was_kept_can_be_shown(lab, scripted_selection, engine_with):
    engine = engine_with(scripted_selection.Scripted(share=0.25))
    prompt = lab.prompts_of(1, seed=1, low=64, high=65)[0]
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=8, ignore_eos=True)))
    assert kept_snapshot(engine) == ()
    engine.step()
    engine.step()
    (shown,) = kept_snapshot(engine)
    assert (shown.request_id, shown.computed, shown.since) == ("a", 65, 64)
    assert [len(heads) for heads in shown.layers.values()] == [2, 2]
    assert all(len(tokens) == 16 and max(tokens) < 64 for heads in shown.layers.values() for tokens in heads)


def test_freed_memory_is_real(lab, scripted_selection, engine_with):
    engine = engine_with(scripted_selection.Scripted(share=0.25))
    prompt = lab.prompts_of(1, seed=1, low=64, high=65)[0]
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=8, ignore_eos=True)))
    engine.step()
    (seq,) = engine.sequences("a")
    assert engine.kv.pools[0].used == len(seq.tables[0]) == 64 // 4 // PAGE
    assert seq.used(0) == 16 and seq.computed == 64
    assert all(len(t) == 16 for heads in seq.kept.values() for t in heads)


def test_the_peak_of_a_step_is_before_rows_go(lab, scripted_selection, engine_with):
    engine = engine_with(scripted_selection.Scripted(share=0.25))
    prompt = lab.prompts_of(1, seed=1, low=64, high=65)[0]
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=8, ignore_eos=True)))
    step, _ = engine.step()
    assert step.peak["kv_payload"] == 4 * step.bytes["kv_payload"] > 0
    step, _ = engine.step()
    assert not step.peak


def test_ragged_heads_hold_pages_of_their_own(lab, scripted_selection, engine_with):
    engine = engine_with(scripted_selection.Scripted(share=0.25, per_head=True))
    prompt = lab.prompts_of(1, seed=1, low=64, high=65)[0]
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=8, ignore_eos=True)))
    engine.step()
    (seq,) = engine.sequences("a")
    config = engine.executor.decoder.config
    assert len(engine.kv.pools) == config.num_layers * config.num_kv_heads
    lengths = [seq.used(g) for g in range(len(engine.kv.pools))]
    assert lengths == [16, 17] * config.num_layers
    pools = enumerate(engine.kv.pools)
    assert [pool.used_by(g) for g, pool in pools] == [-(-n // PAGE) for n in lengths]


@pytest.mark.parametrize("history", [0, 3, None])
def test_a_selector_sees_committed_tokens_once(lab, scripted_selection, engine_with, history):
    """Drafts that were rejected, chunks and preempted runs leave no trace in what it is shown."""
    prompt = lab.prompts_of(1, seed=9, low=20, high=21)[0]
    plain = scripted_selection.Scripted(history=history, interval=5)
    generate(engine_with(plain), [prompt], max_tokens=18)
    drafted = scripted_selection.Scripted(history=history, interval=5)
    generate(engine_with(drafted, "ngram:k=4", "chunked_prefill:budget=16"), [prompt], max_tokens=18)
    (one,), (two,) = plain.states, drafted.states
    for layer, tokens in one.seen.items():  # the block that ends a request is not shown any more
        n = min(len(tokens), len(two.seen[layer]))
        assert tokens[:n] == two.seen[layer][:n] and n >= len(tokens) - 5
    if history == 0:
        assert not one.seen
    elif history is None:
        assert one.seen[0] == list(range(len(one.seen[0])))
    else:
        assert {20 - 1, 20 - 3, 25 - 1, 25 - 3} <= set(one.seen[0]) and 20 - 4 not in one.seen[0]
    for key in one.queries.keys() & two.queries.keys():
        query = one.queries[key]
        assert torch.equal(query, two.queries[key]) and torch.equal(one.keys[key], two.keys[key])


def test_samples_share_what_was_kept(lab, scripted_selection, engine_with):
    prompt = lab.prompts_of(1, seed=2, low=30, high=31)[0]
    selector = scripted_selection.Scripted(interval=4)
    engine = engine_with(selector)
    together = generate(engine, [prompt], n=3, temperature=2.0, seed=5)
    assert engine.kv.copies  # shared pages were copied when their owners went apart
    for sample in range(3):
        apart = engine_with(scripted_selection.Scripted(interval=4))
        found = generate(apart, [prompt], n=3, temperature=2.0, seed=5)
        assert found["r0", sample] == together["r0", sample]


def test_a_preempted_sequence_forgets_the_same_again(lab, scripted_selection, engine_with):
    prompts = lab.prompts_of(4, seed=6, low=24, high=30)
    roomy = generate(engine_with(scripted_selection.Scripted(interval=6)), prompts, max_tokens=30)
    tight = engine_with(scripted_selection.Scripted(interval=6), pool=18 * PAGE)
    steps = generate(tight, prompts, max_tokens=30)
    assert steps == roomy


def test_pages_after_a_selection_are_never_shared(lab, scripted_selection, engine_with):
    """What was computed on a thinned-out cache is no prefix for anybody."""
    prompt = lab.prompts_of(1, seed=8, low=24, high=25)[0]
    engine = engine_with(scripted_selection.Scripted(), "prefix_cache")
    first = generate(engine, [prompt], max_tokens=16)["r0", 0]
    engine.add(Request("b", (*prompt, *first), SamplingParams(max_tokens=1)))
    (seq,) = engine.sequences("b")
    engine.step()
    assert seq.cached_tokens == 24


def test_nothing_dropped_changes_nothing(lab, scripted_selection, engine_with):
    prompts = lab.prompts_of(2, seed=4, low=20, high=30)
    plain = lab.make_engine("paged", page_size=PAGE)
    assert generate(engine_with(scripted_selection.Scripted(share=1.0)), prompts) == generate(plain, prompts)


@pytest.mark.parametrize("context", [0, -1, 99])
def test_a_context_that_is_no_part_of_the_prompt_is_refused(lab, scripted_selection, engine_with, context):
    engine = engine_with(scripted_selection.Scripted())
    with pytest.raises(RequestError, match="context"):
        engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=1), context=context))


def test_an_error_in_a_selection_ends_its_request_only(lab, scripted_selection, engine_with, monkeypatch):
    def fails(self, layer, cached):
        if cached.positions.shape[1] == 21:
            raise RequestError(f"Layer {layer} holds a key that is no number.")
        return [torch.arange(5)] * len(cached.positions)

    monkeypatch.setattr(scripted_selection.ScriptedState, "keep", fails)
    engine = engine_with(scripted_selection.Scripted())
    good, bad = lab.prompts_of(1, seed=1, low=20, high=21)[0], lab.prompts_of(1, seed=2, low=21, high=22)[0]
    found = generate(engine, [good, bad])
    assert len(found["r0", 0]) == 12 and not found.get(("r1", 0))
