"""Scheduling and admission: failures other engines had, as tests."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import CapacityError, DuplicateRequest, EmptyPrompt, PromptTooLong

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def engine4(lab: ModuleType):
    """Engines with pages of 4 slots, in float32."""

    def make(*uses: str, pages: int = 64, **kwargs):
        kwargs.setdefault("dtype", "float32")
        return lab.make_engine("paged", *uses, page_size=4, pool=pages * 4, **kwargs)

    return make


def add(engine, name: str, prompt, **sampling) -> None:
    engine.add(Request(name, tuple(prompt), SamplingParams(**sampling)))


def drain(engine, max_steps: int = 500) -> dict[str, list[int]]:
    """Step until idle; ids by request."""
    out: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return out
        for event in engine.step()[1]:
            out.setdefault(event.request_id, []).extend(t.id for t in event.tokens)
    raise AssertionError(f"still busy after {max_steps} steps")


def test_srv_01_an_empty_prompt_ends_alone(lab, engine4):
    engine = engine4()
    add(engine, "a", [1, 2, 3], max_tokens=4)
    engine.step()
    with pytest.raises(EmptyPrompt):
        add(engine, "empty", [], max_tokens=4)
    assert engine.alive() == ["a"]
    got = drain(engine)
    assert len(got["a"]) == 3
    assert lab.run_engine(engine, [[1, 2, 3]], max_tokens=4).ids()[1:] == got["a"]


def test_srv_02_a_prompt_that_never_fits_is_refused_at_once(lab, engine4):
    engine = engine4(pages=4, context=64)
    with pytest.raises(CapacityError, match="5 pages of 4"):
        add(engine, "big", range(17), max_tokens=1)
    with pytest.raises(CapacityError):
        add(engine, "grows", range(14), max_tokens=10)
    ran = lab.run_engine(engine, [[1, 2, 3]], max_tokens=4)
    assert ran.finish() == "length"
    assert len(ran.ids()) == 4
    exact = lab.run_engine(engine, [list(range(14))], max_tokens=3)  # 16 slots: the last token has none
    assert len(exact.ids()) == 3


def test_more_samples_than_sequences_are_refused_at_once(lab, engine4):
    engine = engine4(sequences=2)
    with pytest.raises(CapacityError, match="3 samples"):
        add(engine, "a", [1, 2], n=3, max_tokens=2)
    assert not engine.has_work
    assert lab.run_engine(engine, [[1, 2]], n=2, max_tokens=2).finish("r0", 1) == "length"


def test_samples_that_wait_for_their_prompt_have_a_place(lab, engine4):
    engine = engine4("chunked_prefill:budget=4", sequences=3)
    for i in range(3):
        add(engine, f"a{i}", range(i, i + 9), n=2, temperature=1.0, max_tokens=6)
    most = 0
    for _ in range(200):
        if not engine.has_work:
            break
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert not engine.has_work
    assert most == 2  # a second pair would make four


def test_srv_04_the_context_limit_counts_prompt_and_output(lab, engine4):
    engine = engine4(context=16)
    ran = lab.run_engine(engine, [list(range(15))], max_tokens=5)
    assert (len(ran.ids()), ran.finish()) == (1, "length")
    for length in (16, 17):
        with pytest.raises(PromptTooLong):
            add(engine, "long", range(length), max_tokens=5)
    assert not engine.has_work
    add(engine, "score", range(16), max_tokens=0, prompt_logprobs=0)
    seq = engine.sequences("score")[0]
    assert drain(engine) == {"score": []}
    assert seq.finish == "length"
    assert sorted(seq.prompt_logprobs) == list(range(1, 16))
    with pytest.raises(PromptTooLong):
        add(engine, "score", range(17), max_tokens=0)


def test_scoring_with_several_samples_ends_them_all(lab, engine4):
    ran = lab.run_engine(engine4(), [[1, 2, 3, 4, 5]], n=3, max_tokens=0, max_steps=5)
    assert [ran.finish("r0", i) for i in range(3)] == ["length"] * 3


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 32, 33, 64])
def test_srv_05_chunked_prefill_samples_once_from_the_whole_prompt(lab, engine4, chunk):
    prompt = lab.prompts_of(1, seed=5, low=33, high=34)[0]
    runs = []
    for uses in ((), (f"chunked_prefill:budget={chunk}",)):
        sink: list = []
        engine = engine4(*uses)
        lab.record_logits(engine, sink)
        ran = lab.run_engine(engine, [prompt], max_tokens=1)
        runs.append((ran, sink))
    (plain, one), (cut, many) = runs
    assert [len(one), len(many)] == [1, 1]  # logits are asked for at the prompt's last token only
    assert many[0][1] == 32
    assert torch.allclose(one[0][2], many[0][2], atol=1e-5, rtol=0)
    assert sum(bool(e.tokens) for e in cut.events) == 1
    assert cut.ids() == plain.ids()
    assert sum(s.prefill + s.decode for s in cut.steps) == 33
    assert max(s.rows for s in cut.steps) == min(chunk, 33)
    assert len(cut.steps) == -(-33 // chunk)


def test_srv_07_new_prompts_never_stop_a_decode(lab):
    engine = lab.make_engine(
        "paged", "chunked_prefill:budget=17", dtype="float32", numerics="fast", pool=4096
    )
    add(engine, "live", [1, 2, 3], max_tokens=200, ignore_eos=True)
    engine.step()
    gap = longest = 0
    done = 0
    for i in range(199):
        add(engine, f"p{i}", [(i + j) % 61 for j in range(64)], max_tokens=1)
        step, events = engine.step()
        gap = 0 if any(e.request_id == "live" and e.tokens for e in events) else gap + 1
        longest = max(longest, gap)
        done += sum(e.finish is not None and e.request_id != "live" for e in events)
        assert step.rows <= 17
    assert longest == 0  # a decode gets a token in every step
    assert "live" not in engine.alive()
    assert done >= 199 * 16 // 64 - 1  # and prompts get all the rest


def test_srv_07_drafts_leave_prompts_half_of_a_budget(lab):
    """Room for a draft is kept before anything is drafted: it must not take all that prompts could have."""
    engine = lab.make_engine(
        "paged", "ngram:k=16", "chunked_prefill:budget=17", dtype="float32", numerics="fast", pool=4096
    )
    add(engine, "live", [1, 2, 3], max_tokens=200, ignore_eos=True)
    engine.step()
    add(engine, "waits", [j % 61 for j in range(64)], max_tokens=1)
    steps = 0
    while "waits" in engine.alive():
        assert engine.step()[0].rows <= 17
        steps += 1
    assert steps == 64 // 8
    assert "live" in engine.alive()


def test_srv_07_a_small_budget_serves_the_oldest_first_and_everybody_in_the_end(lab, engine4):
    prompts = lab.prompts_of(5, seed=2, low=3, high=8)
    engine = engine4("chunked_prefill:budget=2")
    ran = lab.run_engine(engine, prompts, max_tokens=6)
    assert all(s.rows <= 2 for s in ran.steps)
    wide = lab.run_engine(engine4(), prompts, max_tokens=6)
    assert [ran.ids(f"r{i}") for i in range(5)] == [wide.ids(f"r{i}") for i in range(5)]


def test_srv_09_a_long_request_is_not_evicted_for_ever(lab, engine4):
    """Bound: at most once for each page that older sequences still take."""
    old, long = [3, 1, 4, 1, 5, 9, 2, 6], list(range(20, 40))
    wide = [lab.run_engine(engine4(), [p], max_tokens=m).ids() for p, m in ((old, 20), (long, 4))]
    engine = engine4("chunked_prefill:budget=6", pages=8)
    add(engine, "old", old, max_tokens=20)
    engine.step()
    engine.step()
    add(engine, "long", long, max_tokens=4)
    seq = engine.sequences("long")[0]
    first = engine.sequences("old")[0].generated
    got = drain(engine, max_steps=40)
    assert 1 <= seq.preemptions <= 3
    assert first + got["old"] == wide[0]
    assert got["long"] == wide[1]
    engine.kv.check()


@pytest.mark.parametrize("seed", range(4))
def test_srv_09_evictions_are_bounded_by_the_pages_older_sequences_take(lab, seed):
    prompts = lab.prompts_of(5, seed=seed, low=3, high=12)
    engine = lab.make_engine(
        "paged", "chunked_prefill:budget=5", page_size=4, pool=9 * 4, dtype="float32", numerics="fast"
    )
    for i, prompt in enumerate(prompts):
        add(engine, f"r{i}", prompt, max_tokens=20)
    seqs = [engine.sequences(f"r{i}")[0] for i in range(5)]
    got = drain(engine, max_steps=1500)
    assert [len(got[f"r{i}"]) for i in range(5)] == [20] * 5
    assert seqs[0].preemptions == 0
    for i, seq in enumerate(seqs):
        assert seq.preemptions <= sum(engine.kv.pages_for(len(s.tokens)) for s in seqs[:i])


@pytest.mark.parametrize("state", ["waiting", "prefill", "running", "finished", "unknown"])
def test_srv_10_abort_is_safe_in_every_state(lab, engine4, state):
    other = [9, 8, 7, 6, 5]
    alone = lab.run_engine(engine4(), [other], max_tokens=8).ids()
    engine = engine4("chunked_prefill:budget=6", sequences=1 if state == "waiting" else 4)
    add(engine, "other", other, max_tokens=8)
    got = [t.id for e in engine.step()[1] for t in e.tokens]
    before = engine.kv.pools[0].used
    prompt = range(20, 33)
    if state != "unknown":
        add(engine, "x", prompt, max_tokens=1 if state == "finished" else 9)
    mine: list[int] = []
    for _ in range({"waiting": 2, "prefill": 1, "running": 5, "finished": 6, "unknown": 1}[state]):
        for e in engine.step()[1]:
            (got if e.request_id == "other" else mine).extend(t.id for t in e.tokens)
    if state in ("waiting", "prefill", "running"):
        with pytest.raises(DuplicateRequest):
            add(engine, "x", prompt, max_tokens=2)
        seq = engine.sequences("x")[0]
        assert seq.state == ("waiting" if state == "waiting" else "running")
        assert bool(mine) == (state == "running")
        assert [(e.request_id, e.finish) for e in engine.abort("x")] == [("x", "abort")]
        assert seq.tables == []
    assert engine.abort("x") == []  # a second time, or after it ended, or never alive
    engine.kv.check()
    if "other" in engine.alive():
        held = engine.kv.pages_for(engine.sequences("other")[0].computed)
        assert engine.kv.pools[0].used in (held, before)
    add(engine, "x", prompt, max_tokens=2)  # an id that ended may be reused
    rest = drain(engine)
    assert len(rest["x"]) == 2
    assert got + rest.get("other", []) == alone
    assert engine.kv.pools[0].used == 0


def test_srv_10_abort_ends_every_sample(lab, engine4):
    engine = engine4("chunked_prefill:budget=4")
    add(engine, "a", range(9), n=3, temperature=1.0, max_tokens=5)
    engine.step()
    assert [e.sample for e in engine.abort("a")] == [0, 1, 2]
    add(engine, "a", range(9), n=3, temperature=1.0, max_tokens=5)
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.running) == 3
    assert [e.sample for e in engine.abort("a")] == [0, 1, 2]
    assert not engine.has_work
    assert engine.kv.pools[0].used == 0
    engine.kv.check()


def test_srv_11_nothing_grows_over_hundreds_of_requests(lab):
    engine = lab.make_engine(
        "paged", "prefix_cache", "ngram", page_size=4, pool=16 * 4, dtype="float32", numerics="fast"
    )
    sizes = []
    for i in range(500):
        add(engine, f"q{i}", [(i * 7 + j) % 61 for j in range(5)], max_tokens=1 + (i % 10 == 9))
        if i % 10 == 5:
            engine.abort(f"q{i}")
        drain(engine, 20)
        pool = engine.kv.pools[0]
        assert pool.used == 0
        index = len(engine.kv.index)
        assert index == pool.cached
        if i in (249, 499):
            sizes.append(
                (pool.cached, index, len(pool._published), engine.drafting.nbytes(), engine.memory())
            )
    assert sizes[0] == sizes[1]
    assert not engine._requests
    assert not engine.drafting._known
    engine.kv.check()


def test_srv_13_a_large_head_is_never_overtaken(lab, engine4):
    """Strict order: the head runs as soon as its pages are free, and what is behind it waits."""
    engine = engine4(pages=12)
    add(engine, "running", range(30), max_tokens=3)  # 8 pages, 4 are free
    engine.step()
    add(engine, "head", range(38), max_tokens=2)  # 10 pages
    add(engine, "small", [1, 2], max_tokens=1)  # 1 page
    started: list[str] = []
    for _ in range(20):
        if not engine.has_work:
            break
        for e in engine.step()[1]:
            if e.tokens and e.request_id not in started:
                started.append(e.request_id)
            if e.request_id in ("head", "small"):
                assert "running" not in engine.alive()
    assert started == ["running", "head", "small"]


def test_ldr_07_an_end_token_inside_a_prompt_is_a_token_and_no_padding(lab, engine4):
    eos = 2
    prompts = [[5, 9, 7], [4, eos, 8, 3, 6]]
    kw = {"eos_ids": (eos,), "numerics": "pinned", "dtype": "float64"}
    solo = [lab.run_engine(engine4(**kw), [p], max_tokens=6, logprobs=0) for p in prompts]
    both = lab.run_engine(engine4(**kw), prompts, max_tokens=6, logprobs=0)
    for i, one in enumerate(solo):
        assert both.ids(f"r{i}") == one.ids()
        assert both.logprobs(f"r{i}") == one.logprobs()
    without = lab.run_engine(engine4(**kw), [[4, 8, 3, 6]], max_tokens=1, logprobs=0)
    assert without.logprobs()[0] != solo[1].logprobs()[0]  # it is attended
