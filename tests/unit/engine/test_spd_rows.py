"""Speculation through the engine: failures other projects had, as tests."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import workbench.engine.choose as choose
from workbench.engine.draft_seams import DraftTree
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import InvariantError
from workbench.speculative.stats import acceptance

pytestmark = pytest.mark.usefixtures("inference")

EOS = 2


@pytest.fixture
def engine4(lab):
    """Engines with pages of 4 slots and a drafter's place, in float32."""

    def make(*uses: str, pages: int = 64, **kwargs):
        kwargs.setdefault("dtype", "float32")
        return lab.make_engine("paged", "ngram", *uses, page_size=4, pool=pages * 4, **kwargs)

    return make


@pytest.fixture(scope="module")
def plain(lab):
    """Twenty prompts and their plain greedy outputs in float32."""
    prompts = lab.prompts_of(20, seed=11, low=3, high=24)
    with torch.inference_mode():
        ran = lab.run_engine(lab.make_engine("paged", dtype="float32", pool=4096), prompts, max_tokens=64)
    return prompts, [ran.ids(f"r{i}") for i in range(20)]


def scripted_engine(scripted, engine, text, k=4, **kw):
    """An engine that says ``text`` after its prompt, and a drafter that knows it."""
    scripted.attach(engine, scripted.Replay([text], k, **kw))
    return scripted.say(engine, lambda seq, position: text[position + 1] if position + 1 < len(text) else 0)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_spd_01_greedy_output_does_not_depend_on_a_drafter(lab, scripted, plain, k):
    prompts, outputs = plain
    engines = [lab.make_engine("paged", f"ngram:k={k}", dtype="float32", pool=4096)]
    known = [p + o for p, o in zip(prompts, outputs, strict=True)]
    replay = scripted.Replay(known, k, right=lambda seq, round: (seq + round) % (k + 1), trees=k == 8)
    engines.append(scripted.attach(lab.make_engine("paged", "ngram", dtype="float32", pool=4096), replay))
    for engine in engines:
        ran = lab.run_engine(engine, prompts, max_tokens=64)
        assert [ran.ids(f"r{i}") for i in range(20)] == outputs
        a = acceptance([d for s in ran.steps for d in s.drafts])
        assert a.accepted > 0
        assert a.accepted < a.drafted  # both outcomes happened
    assert sorted(replay.begun) == sorted(replay.forgotten)
    assert replay.seen == {}


def test_spd_04_an_end_token_inside_a_block_ends_the_request(lab, scripted, engine4):
    prompt = [9, 8, 7, 6, 1]
    text = [*prompt, 3, 5, 6, EOS, 7, 8, 7, 8]
    engine = engine4("prefix_cache", eos_ids=(EOS,))
    pieces = {i: f"<{i}>" for i in range(61)}
    engine.make_stream = scripted.stream_of(pieces)
    undo = scripted_engine(scripted, engine, text)
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=20)))
    seq = engine.sequences("a")[0]
    ran = lab.run_engine(engine)
    assert ran.ids("a") == [3, 5, 6, EOS]
    assert ran.finish("a") == "stop"
    assert ran.text("a") == "<3><5><6><2>"
    draft = next(d for s in ran.steps for d in s.drafts)
    assert draft.tokens == (5, 6, EOS)  # the fourth, behind it, could never be said: it is not run
    assert draft.emitted == 3  # nor is the model's own token behind it
    assert seq.tokens == [*prompt, 3, 5, 6, EOS]
    assert engine.kv.pools[0].used == 0
    past = engine.kv.index.lookup(text, engine.kv.namespace, len(text))
    assert 4 * len(past) <= len(prompt) + 4  # no page holds anything behind the end token
    undo()
    follow = [*prompt, 3, 5, 6, EOS, 4, 4, 9]
    cold = lab.run_engine(engine4(), [follow], max_tokens=6, logprobs=0)
    warm = lab.run_engine(engine, [follow], max_tokens=6, logprobs=0)
    assert warm.cached() > 0
    assert warm.ids() == cold.ids()
    assert warm.logprobs() == cold.logprobs()


def test_a_record_says_what_the_tree_hangs_below_and_what_the_model_said_itself(lab, scripted, engine4):
    text = [9, 8, 3, 5, 6, 4, 7, 11]
    engine = engine4()
    scripted_engine(scripted, engine, text, k=3, right=lambda seq, round: 1)
    ran = lab.run_engine(engine, [[9, 8]], max_tokens=5)
    assert ran.ids() == [3, 5, 6, 4, 7]
    first, second = (d for s in ran.steps for d in s.drafts)
    assert (first.root, first.tokens[0], first.own) == (3, 5, 6)
    assert (second.root, second.tokens[0], second.own) == (6, 4, 7)
    assert first.chances == ()  # a drafter that copies says nothing of chances


def test_a_record_holds_the_chance_of_every_drawn_token(lab):
    engine = lab.make_engine("paged", "draft_model:k=3", dtype="float32", pool=512)
    ran = lab.run_engine(engine, [[3, 4, 5, 6]], max_tokens=12, temperature=1.0, seed=5)
    drafts = [d for s in ran.steps for d in s.drafts]
    assert drafts and all(len(d.chances) == len(d.tokens) for d in drafts)
    assert all(0 < c <= 1 for d in drafts for c in d.chances)
    assert len({c for d in drafts for c in d.chances}) > 3


def test_spd_04_ignored_end_tokens_do_not_end_it(lab, scripted, engine4):
    text = [9, 8, 3, 5, EOS, 7, 8]
    engine = engine4(eos_ids=(EOS,))
    scripted_engine(scripted, engine, text)
    ran = lab.run_engine(engine, [[9, 8]], max_tokens=5, ignore_eos=True)
    assert ran.ids() == [3, 5, EOS, 7, 8]
    assert ran.finish() == "length"


def test_spd_06_accepted_length_ends_at_the_end_token(lab, scripted, engine4):
    """What was drafted behind it is not even verified: three of three, where five would be three of five."""
    text = [9, 8, 3, 5, 6, EOS, 11, 12, 13]
    engine = engine4(eos_ids=(EOS,))
    scripted_engine(scripted, engine, text, k=5)
    ran = lab.run_engine(engine, [[9, 8]], max_tokens=20)
    a = acceptance([d for s in ran.steps for d in s.drafts])
    assert (a.steps, a.emitted, a.accepted, a.drafted) == (1, 3, 3, 3)
    assert a.tau == 3.0
    assert a.rate == 1.0
    assert max(s.rows for s in ran.steps if not s.prefill) == 4


def test_spd_06_accepted_length_ends_at_a_stop_string_that_nobody_foresees(lab, scripted, engine4):
    """d1, d2, stop, d4, d5 all match: three tokens are emitted, three of five accepted."""
    text = [9, 8, 3, 5, 6, EOS, 11, 12, 13]
    engine = engine4(eos_ids=())
    engine.make_stream = scripted.stream_of({i: "end" if i == EOS else "." for i in range(61)})
    scripted_engine(scripted, engine, text, k=5)
    ran = lab.run_engine(engine, [[9, 8]], max_tokens=20, stop=("end",))
    a = acceptance([d for s in ran.steps for d in s.drafts])
    assert (a.steps, a.emitted, a.accepted, a.drafted, a.expected_n) == (1, 3, 3, 5, 3)
    assert (a.tau, a.rate) == (3.0, 3 / 5)


def test_an_end_token_that_is_ignored_cuts_no_draft(lab, scripted, engine4):
    text = [9, 8, 3, 5, 6, EOS, 11, 12, 13]
    engine = engine4(eos_ids=(EOS,))
    scripted_engine(scripted, engine, text, k=5)
    ran = lab.run_engine(engine, [[9, 8]], max_tokens=7, ignore_eos=True)
    assert [len(d.tokens) for s in ran.steps for d in s.drafts] == [5]


@pytest.mark.parametrize("drafter", ["draft_model:k=5", "layerskip:k=5", "ngram:k=5"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_hangs_below_an_end_token_and_the_output_is_the_plain_runs(lab, drafter, temperature):
    prompts = [[3, 6, 5, 3, 6, 5, 3, 6, 5, 3], list(range(61)), [20, 21, 22]]
    sampling = {"max_tokens": 24, "temperature": temperature, "seed": 3}
    ends = tuple(range(0, 61, 6))  # often drafted, and to be copied from the prompts
    plain = lab.run_engine(lab.make_engine("paged", dtype="float32", eos_ids=ends), prompts, **sampling)
    engine = lab.make_engine("paged", drafter, "verify:rule=r4", dtype="float32", eos_ids=ends)
    ran = lab.run_engine(engine, prompts, **sampling)
    drafts = [d for s in ran.steps for d in s.drafts]
    assert not any(p >= 0 and d.tokens[p] in ends for d in drafts for p in d.parents)
    for r in ("r0", "r1", "r2"):
        assert ran.ids(r) == plain.ids(r)
    sampled = lab.run_engine(engine, prompts, max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    drafts = [d for s in sampled.steps for d in s.drafts]
    assert any(p >= 0 and d.tokens[p] in ends for d in drafts for p in d.parents)


@pytest.mark.parametrize("budget", [1, 2, 5])
@pytest.mark.parametrize("trees", [False, True])
def test_spd_07_a_block_never_crosses_the_token_budget(lab, scripted, engine4, budget, trees):
    text = [9, 8, *range(20, 40)]
    engine = engine4()
    scripted_engine(scripted, engine, text, trees=trees)
    spans = []
    prepare = engine.executor.prepare
    engine.executor.prepare = lambda plan: (spans.extend(plan.spans), prepare(plan))[1]
    ran = lab.run_engine(engine, [[9, 8]], max_tokens=budget)
    assert ran.ids() == text[2 : 2 + budget]
    assert max(p for s in spans for p in s.positions) <= budget  # the last token is never run
    assert ran.finish() == "length"
    assert [t.position for e in ran.events for t in e.tokens] == list(range(2, 2 + budget))
    a = acceptance(
        [d for s in ran.steps for d in s.drafts],
        sum(t.source == "plain" for e in ran.events for t in e.tokens),
    )
    assert a.emitted + a.plain == budget


def test_spd_07_a_pool_that_just_fits_needs_no_room_for_drafts(lab, scripted, engine4):
    text = [9, 8, 7, *range(20, 40)]
    engine = engine4(pages=4)
    scripted_engine(scripted, engine, text, k=8)
    ran = lab.run_engine(engine, [[9, 8, 7]], max_tokens=14)
    assert ran.ids() == text[3:17]
    assert not any(s.preempted for s in ran.steps)


STOP_TEXT = {10: "ab", 11: "cST", 12: "OPde", 13: "zz"}


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize(
    ("ids", "sampling", "text", "finish", "kept"),
    [
        ([10, 11, 12, 13], {}, "abc", "stop", 3),
        ([10, 11, 12, 13], {"include_stop": True}, "abcSTOP", "stop", 3),
        ([10, 11], {"max_tokens": 2}, "abcST", "length", 2),
    ],
)
def test_spd_09_stop_strings_straddle_tokens(lab, scripted, engine4, k, ids, sampling, text, finish, kept):
    prompt = [9, 8]
    engine = engine4()
    engine.make_stream = scripted.stream_of(STOP_TEXT)
    scripted_engine(scripted, engine, [*prompt, *ids], k=max(k, 1))
    if not k:
        engine.drafting.drafter = None
    ran = lab.run_engine(engine, [prompt], **{"max_tokens": 12, **sampling}, stop=("STOP",))
    assert ran.text() == text
    assert ran.finish() == finish
    assert len(ran.ids()) == kept
    sofar = ""
    for event in ran.events:
        sofar += event.text
        assert text.startswith(sofar)  # nothing beyond it is ever streamed


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_spd_11_penalties_count_committed_tokens_only(lab, scripted, monkeypatch, temperature, trees):
    prompts = lab.prompts_of(3, seed=4, low=4, high=12)
    kw = {
        "max_tokens": 64,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "temperature": temperature,
        "seed": 5,
    }
    off = lab.run_engine(lab.make_engine("paged", dtype="float32"), prompts, **kw)
    outputs = [off.ids(f"r{i}") for i in range(3)]
    known = [p + o for p, o in zip(prompts, outputs, strict=True)]
    engine = lab.make_engine("paged", "ngram", dtype="float32")
    scripted.attach(engine, scripted.Replay(known, 4, right=lambda s, r: (s + r) % 5, trees=trees))
    told: list[Counter] = []
    real = choose.scores

    def spy(rows, params, generated, paths, prompt, masks):
        told.append(Counter(generated))
        return real(rows, params, generated, paths, prompt, masks)

    monkeypatch.setattr(choose, "scores", spy)
    delivered: dict[str, Counter] = {f"r{i}": Counter() for i in range(3)}
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"r{i}", tuple(prompt), SamplingParams(**kw)))
    got: dict[str, list[int]] = {f"r{i}": [] for i in range(3)}
    while engine.has_work:
        told.clear()
        expected = [delivered[r].copy() for r in engine.alive()]
        _, events = engine.step()
        assert sorted(told, key=str) == sorted(expected, key=str)
        for event in events:
            delivered[event.request_id].update(t.id for t in event.tokens)
            got[event.request_id] += [t.id for t in event.tokens]
    assert [got[f"r{i}"] for i in range(3)] == outputs


def test_spd_13_rejected_drafts_leave_lengths_and_content_of_a_fresh_run(lab, scripted, engine4):
    prompt = [5, 1, 4]
    plain = lab.run_engine(engine4(), [prompt], max_tokens=9).ids()
    engine = engine4()
    drafter = scripted.Replay([prompt + plain], 5, right=lambda seq, round: 0)  # five are removed each time
    scripted.attach(engine, drafter)
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=9)))
    seq = engine.sequences("a")[0]
    engine.step()
    assert seq.computed == 3
    for n in range(4, 9):
        engine.step()
        assert seq.computed == n == len(seq.tokens) - 1
        fresh = engine4()
        fresh.add(Request("b", tuple(seq.tokens[:-1]), SamplingParams(max_tokens=2)))
        twin = fresh.sequences("b")[0]
        fresh.step()
        assert twin.computed == n
        a, b = scripted.stored(engine, seq), scripted.stored(fresh, twin)
        assert a.keys() == b.keys()
        for name in a:
            assert torch.allclose(a[name].double(), b[name].double(), atol=1e-5)
        assert a["0.positions"].tolist() == list(range(n))
    engine.abort("a")  # keep nothing
    assert (seq.computed, seq.tables) == (0, [])
    engine.kv.check()


@pytest.mark.parametrize("trees", [False, True])
def test_spd_15_rows_of_a_batch_accept_their_own_number(lab, scripted, engine4, trees):
    prompts = [[5, 1, 4], [9, 9, 2, 6, 3], [30, 31, 32, 33]]
    lengths = [9, 24, 20]  # the first row ends early
    solo = [lab.run_engine(engine4(), [p], max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    outputs = [s.ids() for s in solo]
    engine = engine4()
    rates = {0: 0, 1: 2, 2: 4}
    known = [p + o for p, o in zip(prompts, outputs, strict=True)]
    drafter = scripted.Replay(
        known, 8 if trees else 4, right=lambda seq, round: rates[(seq - 1) % 3], trees=trees
    )
    scripted.attach(engine, drafter)
    params = [SamplingParams(max_tokens=n) for n in lengths]
    ran = lab.run_engine(engine, prompts, params=params)
    assert [ran.ids(f"r{i}") for i in range(3)] == outputs
    full = {
        f"r{i}": max(len(d.accepted) for s in ran.steps for d in s.drafts if d.request_id == f"r{i}")
        for i in range(3)
    }
    assert full == {"r0": 0, "r1": 2, "r2": 4}
    assert engine.kv.pools[0].used == 0


def test_spd_16_the_targets_own_choices_are_always_accepted(lab, scripted, engine4):
    prompt = [3, 1, 4, 1, 5, 9, 2]
    k, n = 4, 26
    plain = lab.run_engine(engine4(), [prompt], max_tokens=n).ids()
    engine = engine4()
    scripted.attach(engine, scripted.Replay([prompt + plain], k))
    spans = []
    prepare = engine.executor.prepare
    engine.executor.prepare = lambda plan: (spans.extend(plan.spans), prepare(plan))[1]
    ran = lab.run_engine(engine, [prompt], max_tokens=n)
    assert ran.ids() == plain
    drafts = [d for s in ran.steps for d in s.drafts]
    assert all(len(d.accepted) == len(d.tokens) == k for d in drafts)
    assert all(d.emitted == k + 1 for d in drafts)
    assert acceptance(drafts).rate == 1.0
    assert len(drafts) == (n - 1) // (k + 1)
    # The prompt is at 0 … 6; the first draft follows the token at 7.
    assert spans[0].positions == tuple(range(7))
    assert spans[1].positions == (7, 8, 9, 10, 11)
    assert [t.position for e in ran.events for t in e.tokens] == list(range(7, 7 + n))


def test_spd_16_siblings_share_a_position(lab, scripted, engine4):
    prompt = [3, 1, 4, 1, 5, 9, 2]
    plain = lab.run_engine(engine4(), [prompt], max_tokens=12).ids()
    engine = engine4()
    scripted.attach(engine, scripted.Replay([prompt + plain], 6, trees=True))
    spans = []
    prepare = engine.executor.prepare
    engine.executor.prepare = lambda plan: (spans.extend(plan.spans), prepare(plan))[1]
    ran = lab.run_engine(engine, [prompt], max_tokens=12)
    assert ran.ids() == plain
    assert spans[1].positions == (7, 8, 8, 9, 9, 10, 10)
    assert spans[1].parents == (-1, 0, 0, 2, 2, 4, 4)
    first = next(d for s in ran.steps for d in s.drafts)
    assert first.accepted == (1, 3, 5)


def test_a_draft_longer_than_asked_for_is_an_error_and_the_engine_goes_on(lab, scripted, engine4):
    class Greedy(scripted.Replay):
        def propose(self, contexts):
            return [DraftTree.chain([5] * (c.room + 1), self.name) for c in contexts]

    engine = engine4()
    scripted.attach(engine, Greedy([], 4))
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=9)))
    engine.step()
    with pytest.raises(InvariantError, match="replay drafted 5 tokens where 4"):
        engine.step()
    assert [e.finish for e in engine.reset()] == ["error"]
    engine.kv.check()
    assert engine.kv.pools[0].used == 0
    engine.drafting.drafter = None
    assert len(lab.run_engine(engine, [[1, 2, 3]], max_tokens=4).ids()) == 4


@pytest.mark.parametrize("token", [-1, 61, 1 << 40])
def test_spd_10_a_drafted_id_that_the_target_lacks_is_named_and_the_engine_goes_on(
    lab, scripted, engine4, token
):
    class Wrong(scripted.Replay):
        def propose(self, contexts):
            return [DraftTree.chain([5, token], "wrong") for c in contexts]

    engine = engine4()
    scripted.attach(engine, Wrong([], 4))
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=9)))
    said = engine.step()[1]
    with pytest.raises(InvariantError, match=f"wrong drafted token {token}; the target has 61"):
        engine.step()
    assert engine.sequences("a")[0].generated == [t.id for e in said for t in e.tokens]
    assert [e.finish for e in engine.reset()] == ["error"]
    engine.kv.check()
    engine.drafting.drafter = None
    assert len(lab.run_engine(engine, [[1, 2, 3]], max_tokens=4).ids()) == 4


def test_a_preempted_sequence_begins_anew_with_its_drafter(lab, scripted, engine4):
    prompts = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], [11, 3, 11, 3, 11, 3]]
    outputs = [lab.run_engine(engine4(), [p], max_tokens=16).ids() for p in prompts]
    engine = engine4(pages=9)
    known = [p + o for p, o in zip(prompts, outputs, strict=True)]
    drafter = scripted.Replay(known, 3, right=lambda seq, round: round % 3)
    scripted.attach(engine, drafter)
    ran = lab.run_engine(engine, prompts, max_tokens=16)
    preempted = sum(len(s.preempted) for s in ran.steps)
    assert preempted >= 1
    assert [ran.ids(f"r{i}") for i in range(3)] == outputs
    assert len(drafter.begun) > 3
    assert drafter.seen == {}
