"""A model's first layers draft for it: exact output, no KV but the target's, no row run twice below."""

from __future__ import annotations

import pytest
import torch

import workbench.speculative.layerskip as layerskip
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import OptionError, PlanError

pytestmark = pytest.mark.usefixtures("inference")
PAGE = 4
SKIP = "layerskip:k=3,exit=1"
AGAIN = SKIP + ",reuse=false"


@pytest.mark.parametrize(
    "uses",
    [(), ("chunked_prefill:budget=16",), ("prefix_cache",), ("radix_cache",), ("kv_int8",), ("kv_fp4",)],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_output_is_the_targets_to_the_bit(lab, uses, family, outcome):
    """Pinned rows have the same bits in a draft's pass, behind the exit layer, and in a plain decode."""
    prompts = lab.prompts_of(4, seed=2, low=5, high=40)
    expected, _ = outcome(lab.make_engine("paged", *uses, page_size=PAGE, family=family), prompts)
    skip = SKIP if family == "llama" else "layerskip:k=3,exit=2"
    for drafter in (skip, skip + ",reuse=false"):
        drafted = lab.make_engine("paged", drafter, *uses, page_size=PAGE, family=family)
        for _ in range(2):  # the second time with whatever a prefix index kept
            found, drafts = outcome(drafted, prompts)
            assert found == expected
            assert any(d.accepted for d in drafts)
            assert family == "gemma3" or any(len(d.accepted) < len(d.tokens) for d in drafts)


@pytest.mark.parametrize(
    "uses", [("kivi:residual=32",), ("quest:budget=128,dense_layers=0",), ("snapkv",), ("streaming_llm",)]
)
def test_what_the_target_attends_to_is_what_the_draft_attends_to(lab, uses, outcome):
    """Pages coded whole, pages chosen by their bounds, tokens that were dropped."""
    prompts = lab.prompts_of(2, seed=3, low=100, high=180)
    expected, _ = outcome(lab.make_engine("paged", *uses), prompts)
    found, drafts = outcome(lab.make_engine("paged", *uses, SKIP), prompts)
    assert found == expected and drafts


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 4}, {"temperature": 0.8, "top_k": 7}])
@pytest.mark.parametrize("uses", [(), ("kv_int8",), ("prefix_cache",)], ids=str)
def test_all_layers_of_the_target_are_always_right(lab, monkeypatch, uses, sampling, outcome):
    """Every draft is accepted whole under R1 and R2: what is drafted from is what it is judged by."""
    monkeypatch.setattr(layerskip, "exit_layers", lambda target, asked: target)
    engine = lab.make_engine("paged", AGAIN, *uses, page_size=PAGE)
    for _ in range(2):
        _, drafts = outcome(engine, lab.prompts_of(3, seed=6, low=10, high=30), **sampling)
        assert drafts and all(len(d.accepted) == len(d.tokens) for d in drafts)
        assert {d.rule for d in drafts} == ({"r2"} if sampling else {"r1"})


def test_drawn_drafts_are_judged_alike_wherever_the_pass_begins(lab, outcome):
    prompts = lab.prompts_of(3, seed=6, low=10, high=30)
    one, again = (lab.make_engine("paged", use, page_size=PAGE) for use in (SKIP, AGAIN))
    kept, drafts = outcome(one, prompts, temperature=0.9, seed=5)
    assert (kept, drafts) == outcome(again, prompts, temperature=0.9, seed=5)
    assert {d.rule for d in drafts} == {"r2"}
    likeliest = lab.make_engine("paged", SKIP + ",draws=false", page_size=PAGE)
    assert {d.rule for d in outcome(likeliest, prompts, temperature=1.0, seed=1)[1]} == {"r3"}


def test_no_row_runs_twice_below_the_exit(lab, monkeypatch):
    """Root and drafts run there once each: all but the last token in the draft, the last one behind it."""
    engine = lab.make_engine("paged", SKIP, page_size=PAGE)
    engine.add(Request("a", tuple(range(9)), SamplingParams(max_tokens=40, ignore_eos=True)))
    engine.step()
    below: list[int] = []
    behind: list[tuple[range | None, int]] = []
    runner, forward = engine.drafting.runner, engine.executor.forward
    run = runner._run

    def counted(spans):
        below.extend(span.n_new for span in spans)
        return run(spans)

    def seen(step, *args, **kwargs):
        behind.append((kwargs["layers"], len(step.ids)))
        return forward(step, *args, **kwargs)

    monkeypatch.setattr(runner, "_run", counted)
    monkeypatch.setattr(engine.executor, "forward", seen)
    engine.step()
    assert below == [1, 1, 1, 1]  # root, two drafts that something followed, the last draft
    assert behind == [(range(1, 2), 4)]
    below.clear()
    engine.add(Request("b", tuple(range(7)), SamplingParams(max_tokens=4)))
    engine.step()  # a prompt in the same step goes through all layers
    assert sorted(below) == [1, 1, 1, 1, 7]
    engine.reset()


def test_it_keeps_nothing_of_its_own(lab):
    plain, engine = lab.make_engine("paged"), lab.make_engine("paged", SKIP)
    assert engine.memory() == plain.memory()
    assert engine.drafting.runner._executor.decoder is engine.executor.decoder
    assert engine.drafting.runner._executor.stores is engine.kv.stores


def test_rows_of_every_layer_equal_those_of_a_fresh_prefill(lab):
    """After accepted and rejected drafts."""
    engine = lab.make_engine("paged", SKIP, page_size=PAGE)
    engine.add(Request("a", tuple(range(20)), SamplingParams(max_tokens=90, ignore_eos=True)))
    (seq,) = engine.sequences("a")
    for _ in range(15):
        engine.step()

    def rows(engine, seq, n):
        planes = engine.kv.stores[0].planes
        return [planes[x][:, seq.tables[0]].transpose(2, 3).flatten(1, 2)[:, :n].clone() for x in "kv"]

    n, text = seq.computed, tuple(seq.tokens)
    mine = rows(engine, seq, n)
    other = lab.make_engine("paged", page_size=PAGE)
    other.add(Request("a", text, SamplingParams(max_tokens=30, ignore_eos=True)))
    (fresh,) = other.sequences("a")
    other.step()
    assert n >= 35
    for a, b in zip(mine, rows(other, fresh, n), strict=True):
        assert torch.equal(a, b)


def test_samples_and_preemption(lab, outcome):
    prompts = lab.prompts_of(3, seed=5, low=10, high=30)
    plain, _ = outcome(lab.make_engine("paged", page_size=PAGE), prompts)
    engine = lab.make_engine("paged", SKIP, page_size=PAGE)
    lab.preempt_at(engine, {3, 6, 7}.__contains__)
    found, _ = outcome(engine, prompts)
    assert found == plain
    ran = lab.run_engine(engine, prompts[:1], n=3, temperature=1.0, seed=3, max_tokens=9)
    assert all(ran.ids(sample=i) for i in range(3)) and any(s.drafts for s in ran.steps)


def test_a_full_pool_preempts_between_draft_and_verdict(lab, outcome):
    """Pages run out while drafts ask for room: sequences are thrown out and come back, output is the same."""
    prompts = lab.prompts_of(4, seed=8, low=20, high=30)
    plain, _ = outcome(lab.make_engine("paged", page_size=PAGE), prompts, max_tokens=40)
    engine = lab.make_engine("paged", SKIP, page_size=PAGE, pool=128)
    found, drafts = outcome(engine, prompts, max_tokens=40)
    assert found == plain and drafts


@pytest.mark.parametrize("layers", [2, 40])
def test_as_many_layers_as_the_target_are_a_conflict(lab, layers):
    with pytest.raises(PlanError, match="the target has 2"):
        lab.make_engine("paged", f"layerskip:exit={layers}")


@pytest.mark.parametrize("target, asked, layers", [(30, 0, 10), (2, 0, 1), (5, 3, 3), (2, 1, 1)])
def test_a_third_of_the_layers_drafts(target, asked, layers):
    assert layerskip.exit_layers(target, asked) == layers


def test_one_layer_cannot_be_left_early():
    with pytest.raises(OptionError, match="another drafter"):
        layerskip.exit_layers(1, 0)
