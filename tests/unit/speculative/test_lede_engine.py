"""LEDE in the engine: whatever it chooses the output is the model's, and it chooses as it was told to."""

from __future__ import annotations

import zlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import InvariantError
from workbench.speculative.lede.choice import Guard
from workbench.speculative.lede.control import LedeControl
from workbench.speculative.lede.learnt import Learnt, Way
from workbench.speculative.lede.state import Limits

pytestmark = pytest.mark.usefixtures("inference")
PAGE = 4
GUARD = Guard((0.5, 0.3), (0.5, 0.3))


class Toss:
    """A network that decides by the digits of what it is shown: as often one way as the other."""

    def __init__(self, often: int = 2) -> None:
        self.often = often

    def __call__(self, vector: Any) -> tuple[float, float]:
        return 0.0, (-1.0 if zlib.crc32(repr(vector).encode()) % self.often == 0 else 1.0)

    def nbytes(self) -> int:
        return 0


class Always:
    """A network that wants one thing."""

    def __init__(self, *, go_on: bool) -> None:
        self.worth = (0.0, 1.0) if go_on else (1.0, 0.0)

    def __call__(self, vector: Any) -> tuple[float, float]:
        return self.worth

    def nbytes(self) -> int:
        return 0


def control_of(values: Any, layers: int, fixed=(1, 2), learnt=True, guard=GUARD, longest=5, **options: Any):
    way = Way(values, Limits(layers, longest), fixed, learnt, guard)
    return LedeControl(Learnt({"greedy": way, "sampled": way}), **options)


def steered(
    lab: ModuleType, control: LedeControl, *uses: str, skip: str = "layerskip", **where: Any
) -> Engine:
    """An engine whose drafts a control steers."""
    engine = lab.make_engine("paged", skip, *uses, **where)
    engine.controlling.control = control
    engine.drafting.drafter.steer(control)
    return engine


LAYERS = {"llama": 2, "gemma3": 4}


@pytest.mark.parametrize(
    "uses",
    [(), ("chunked_prefill:budget=16",), ("prefix_cache",), ("radix_cache",), ("kv_int8",), ("kv_fp4",)],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_output_is_the_targets_to_the_bit_wherever_it_is_left(lab, uses, family, outcome):
    prompts = lab.prompts_of(4, seed=2, low=5, high=40)
    expected, _ = outcome(lab.make_engine("paged", *uses, page_size=PAGE, family=family), prompts)
    for skip in ("layerskip", "layerskip:reuse=false"):
        control = control_of(Toss(), LAYERS[family])
        engine = steered(lab, control, *uses, skip=skip, page_size=PAGE, family=family)
        for _ in range(2):  # the second time with whatever a prefix index kept
            found, drafts = outcome(engine, prompts)
            assert found == expected
            assert len({d.exit for d in drafts}) >= (1 if family == "llama" else 2)
            assert len({len(d.tokens) for d in drafts}) > 1


@pytest.mark.parametrize(
    "uses",
    [
        ("kivi:residual=32",),
        ("xquant:residual=64,group=32,schedule=paper,km=1,vm=1",),
        ("quest:budget=128,dense_layers=0",),
        ("snapkv",),
        ("h2o",),
        ("expected_attention",),
        ("streaming_llm", "kv_int8", "prefix_cache"),
    ],
    ids=str,
)
def test_coded_pages_and_dropped_tokens_are_seen_alike(lab, uses, outcome):
    prompts = lab.prompts_of(2, seed=3, low=100, high=180)
    expected, _ = outcome(lab.make_engine("paged", *uses), prompts)
    found, drafts = outcome(steered(lab, control_of(Toss(3), 2), *uses), prompts)
    assert found == expected and drafts


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafts_that_are_not_drawn_leave_a_seeded_run_as_it_was(lab, family, outcome):
    prompts = lab.prompts_of(3, seed=6, low=10, high=30)
    sampling = {"temperature": 1.2, "seed": 4, "top_k": 20}
    plain, _ = outcome(lab.make_engine("paged", page_size=PAGE, family=family), prompts, **sampling)
    control = control_of(Toss(), LAYERS[family])
    engine = steered(lab, control, skip="layerskip:draws=false", page_size=PAGE, family=family)
    found, drafts = outcome(engine, prompts, **sampling)
    assert found == plain and {d.rule for d in drafts} == {"r3"}


def test_drawn_drafts_are_judged_by_the_law_they_were_drawn_from(lab, outcome):
    """Wherever the pass of the target begins, and again with the same seed."""
    prompts = lab.prompts_of(3, seed=6, low=10, high=30)
    outcomes = []
    for skip in ("layerskip", "layerskip:reuse=false", "layerskip"):
        engine = steered(lab, control_of(Toss(), 4), skip=skip, page_size=PAGE, family="gemma3")
        outcomes.append(outcome(engine, prompts, temperature=0.9, seed=5))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert {d.rule for d in outcomes[0][1]} == {"r2"}


def test_rows_of_every_layer_equal_those_of_a_fresh_prefill(lab):
    engine = steered(lab, control_of(Toss(), 4), page_size=PAGE, family="gemma3")
    engine.add(Request("a", tuple(range(20)), SamplingParams(max_tokens=60, ignore_eos=True)))
    (seq,) = engine.sequences("a")
    for _ in range(15):
        engine.step()

    def rows(engine, seq, n):  # the newest: sliding layers have no others
        stores = zip(engine.kv.stores, seq.tables, strict=True)
        return [
            s.planes[x][:, t].transpose(2, 3).flatten(1, 2)[:, n - 20 : n].clone()
            for s, t in stores
            for x in "kv"
        ]

    n, text = seq.computed, tuple(seq.tokens)
    mine = rows(engine, seq, n)
    other = lab.make_engine("paged", page_size=PAGE, family="gemma3")
    other.add(Request("a", text, SamplingParams(max_tokens=5, ignore_eos=True)))
    (fresh,) = other.sequences("a")
    other.step()
    assert n >= 35
    for a, b in zip(mine, rows(other, fresh, n), strict=True):
        assert torch.equal(a, b)


def test_samples_preemption_and_a_full_pool(lab, outcome):
    prompts = lab.prompts_of(3, seed=5, low=10, high=30)
    plain, _ = outcome(lab.make_engine("paged", page_size=PAGE), prompts)
    engine = steered(lab, control_of(Toss(), 2), page_size=PAGE)
    lab.preempt_at(engine, {3, 6, 7}.__contains__)
    assert outcome(engine, prompts)[0] == plain
    ran = lab.run_engine(engine, prompts[:1], n=3, temperature=1.0, seed=3, max_tokens=9)
    assert all(ran.ids(sample=i) for i in range(3)) and any(s.drafts for s in ran.steps)
    small = steered(lab, control_of(Toss(), 2), page_size=PAGE, pool=128)
    many = lab.prompts_of(4, seed=8, low=20, high=30)
    plain, _ = outcome(lab.make_engine("paged", page_size=PAGE), many, max_tokens=40)
    assert outcome(small, many, max_tokens=40)[0] == plain


def passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[range | None, int]]:
    """Layers and rows of every pass of the target's own executor, from now on."""
    seen: list[tuple[range | None, int]] = []
    forward = engine.executor.forward

    def watched(step, *args, **kwargs):
        seen.append((kwargs["layers"], len(step.ids)))
        return forward(step, *args, **kwargs)

    monkeypatch.setattr(engine.executor, "forward", watched)
    return seen


def test_without_a_draft_the_pass_goes_on_where_it_was_left(lab, monkeypatch):
    """Going on behind every exit: all of them are looked at, nothing is drafted, no layer runs twice."""
    engine = steered(lab, control_of(Always(go_on=True), 4), page_size=PAGE, family="gemma3")
    engine.add(Request("a", tuple(range(9)), SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    seen = passes(engine, monkeypatch)
    event, _ = engine.step()
    assert seen == [(range(3, 4), 1)] and not event.drafts and event.rows == 1
    engine.reset()


def test_leaving_at_once_drafts_behind_the_first_layer(lab, monkeypatch):
    engine = steered(lab, control_of(Always(go_on=False), 4), page_size=PAGE, family="gemma3")
    engine.add(Request("a", tuple(range(9)), SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    seen = passes(engine, monkeypatch)
    event, _ = engine.step()
    (draft,) = event.drafts
    assert seen == [(range(1, 4), 2)] and draft.exit == 1 and len(draft.tokens) == 1
    engine.reset()


@pytest.mark.parametrize("policy, fixed", [("off", (1, 2)), ("fixed", (0, 0)), ("auto", (0, 0))])
def test_no_drafts_is_a_choice_that_costs_nothing(lab, monkeypatch, policy, fixed):
    control = control_of(Toss(), 4, fixed=fixed, learnt=False, policy=policy)
    engine = steered(lab, control, page_size=PAGE, family="gemma3")
    engine.add(Request("a", tuple(range(9)), SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    seen = passes(engine, monkeypatch)
    assert not any(engine.step()[0].drafts for _ in range(5))
    assert seen == [(None, 1)] * 5
    engine.reset()


@pytest.mark.parametrize("policy, learnt", [("fixed", True), ("auto", False)])
def test_the_fixed_choice_is_exit_and_length(lab, policy, learnt, outcome):
    control = control_of(Always(go_on=True), 4, fixed=(2, 3), learnt=learnt, policy=policy)
    _, drafts = outcome(steered(lab, control, family="gemma3"), lab.prompts_of(2, seed=1, low=9, high=30))
    full = [d for d in drafts if d.emitted < 14 and d.exit]
    assert {d.exit for d in full} == {2} and max(len(d.tokens) for d in full) == 3


def test_it_drafts_no_further_than_it_may(lab, outcome):
    for options, most in (({"longest": 3}, 3), ({}, 5)):
        control = control_of(Toss(1 << 30), 4, **{"fixed": (1, 12), "policy": "fixed", **options})
        engine = steered(lab, control, family="gemma3")
        _, drafts = outcome(engine, lab.prompts_of(2, seed=1, low=9, high=30), max_tokens=24)
        assert max(len(d.tokens) for d in drafts) == most == engine.drafting.max_draft


def judge(control: LedeControl, accepted: int, drafted: int, times: int, seq: int = 7) -> None:
    context = SimpleNamespace(seq=seq, greedy=True, room=9)
    for _ in range(times):
        control.exits([context])
        control.judged(seq, SimpleNamespace(tokens=[0] * drafted), range(accepted))


def test_it_falls_back_on_strange_text_and_tries_now_and_then():
    control = control_of(Toss(), 4, fixed=(0, 0), guard=Guard((0.8, 0.1), (0.8, 0.1), window=10), probe=5)
    context = SimpleNamespace(seq=7, greedy=True, room=9)
    assert control.exits([context]) == ([0], [1, 2, 3])
    judge(control, 0, 4, 10)
    asked = [bool(control.exits([context])[0]) for _ in range(20)]
    assert sum(asked) == 4  # every fifth round is a try
    for _ in range(10):
        control.judged(7, SimpleNamespace(tokens=[0] * 4), range(4))
    assert all(control.exits([context])[0] for _ in range(20))
    judge(control, 0, 4, 10)
    control.forget(7)
    assert control.exits([SimpleNamespace(seq=8, greedy=True, room=9)]) == ([], [])


def test_sequences_of_a_step_leave_together_and_stop_alone(lab):
    engine = steered(lab, control_of(Toss(), 4), page_size=PAGE, family="gemma3")
    ran = lab.run_engine(engine, lab.prompts_of(4, seed=2, low=5, high=40), max_tokens=20, ignore_eos=True)
    rounds = [step.drafts for step in ran.steps if len(step.drafts) > 1]
    assert rounds and all(len({d.exit for d in drafts}) == 1 for drafts in rounds)
    assert any(len({len(d.tokens) for d in drafts}) > 1 for drafts in rounds)


def test_only_what_was_fed_at_once_can_be_taken_deeper(lab):
    engine = lab.make_engine("paged", "layerskip:exit=2", page_size=PAGE, family="gemma3")
    runner = engine.drafting.runner
    with pytest.raises(InvariantError, match="to 3"):
        runner.deeper(3)
    engine.add(Request("a", tuple(range(9)), SamplingParams(max_tokens=20)))
    engine.step()
    (seq,) = engine.sequences("a")
    runner.begin(seq)
    assert engine.kv.extend(seq, seq.computed + 4)
    runner.feed([(seq.id, ())])
    with pytest.raises(InvariantError, match="to 2"):
        runner.deeper(2)
    at_three = runner.deeper(3)
    runner.layers = 2
    runner.forget(seq.id)
    runner.begin(seq)
    runner.layers = 3
    assert torch.equal(at_three, runner.feed([(seq.id, ())]))
    runner.feed([(seq.id, (5,))])
    with pytest.raises(InvariantError, match="cannot be taken"):
        runner.deeper(4)
    engine.reset()
