"""Numbers of two places beside one: hand-counted from turns that are made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from workbench.core.placed_bench import contestants
from workbench.core.placed_numbers import BASE, STREAMED, Turned, numbers, turned
from workbench.core.placed_run import TwoPlaces
from workbench.spec.events import DraftRecord, RequestEvent, StepEvent, TokenInfo
from workbench.speculative.placement.messages import Worked
from workbench.speculative.placement.remote import Told

SIZES = {"k": 2, "kappa": 3, "width": 3, "top": 2, "window": 2}
PLAIN = Turned((1, 2, 3), 10, 1.0, 0, 0, 0, ((1, 50.0), (1, 60.0), (1, 70.0)), ())
INLINE = Turned((1, 2, 3), 10, 0.8, 5, 10, 5, ((3, 90.0), (3, 110.0), (1, 60.0)), (30.0, 30.0))
SWIFT = replace(
    INLINE, seconds=0.5, hidden=0.75, busy_target=1.0, busy_draft=0.5, made=25, hits=2, told=4,
    forward=((3, 120.0), (3, 120.0)), draft=(),
)  # fmt: skip


def test_ratios_are_taken_within_a_turn_and_shares_are_medians() -> None:
    turn = {
        BASE: INLINE, "plain_1": PLAIN, "swiftspec": SWIFT, "mirror_sd": replace(SWIFT, ids=(9,)),
        "inline_2": INLINE, "plain_2": PLAIN,
    }  # fmt: skip
    slow = {n: replace(t, seconds=t.seconds * 2) for n, t in turn.items()}
    found = {m.name: m for m in numbers("c", [turn, slow], 2, 2)}
    assert found["c:swiftspec/inline_1"].value == pytest.approx(1.6)
    assert found["c:swiftspec/inline_1"].spread == pytest.approx((1.6, 1.6))
    assert found["c:plain_1"].spread == (5.0, 10.0) and found["c:plain_1"].value == 7.5
    assert found["c:swiftspec:tau"].value == 2.0 and "c:plain_1:tau" not in found
    assert found["c:g_c"].value == 0.5 and found["c:v"].value == pytest.approx(100 / 60)
    assert found["c:bound"].value == pytest.approx((100 / 60 + 0.5) / (100 / 60))
    assert found["c:bound"].tag == "predicted"
    assert found["c:swiftspec:hidden"].value == 0.75 and found["c:swiftspec:busy_draft"].value == 0.5
    assert found["c:swiftspec:wasted"].value == (50 - 10) / 20
    assert found["c:swiftspec:foreseen"].value == 0.5 and found["c:swiftspec:foreseen"].n == 8
    assert found["c:swiftspec:co_run"].value == 1.2
    assert found["c:swiftspec:same_output"].value == 1.0 and found["c:mirror_sd:same_output"].value == 0.0
    assert numbers("c", [], 2, 2) == ()


def test_a_turn_survives_being_kept() -> None:
    assert Turned.from_dict(json.loads(json.dumps(SWIFT.to_dict()))) == SWIFT


def test_one_thread_that_does_both_is_what_others_are_compared_with() -> None:
    racers = contestants("source=cut,layers=2", SIZES)
    assert racers[0].name == BASE and racers[0].threads == 1
    assert {r.name for r in racers} == {
        "inline_1",
        "inline_2",
        "plain_1",
        "plain_2",
        "swiftspec",
        "mirror_sd",
    }
    assert {r.threads for r in racers if r.name in ("swiftspec", "mirror_sd")} == {1}
    (more,) = set(contestants("source=trained", SIZES, 2)) - set(contestants("source=trained", SIZES))
    assert more.name == STREAMED and dict(more.recipe.uses[0].options)["streams"] == 2


def step(number: int, prefill: int, *drafts: DraftRecord) -> StepEvent:
    n = sum(len(d.tokens) for d in drafts)
    decode = int(not prefill)
    ms = {"forward": 10.0, "draft": 2.0}
    return StepEvent(number, 0.0, prefill + decode + n, prefill, decode, n, 1, 0, ms, 0, 0, 0, {}, drafts)


def said(number: int, *ids: int) -> RequestEvent:
    infos = tuple(TokenInfo(i, 0, "plain", number) for i in ids)
    return RequestEvent("r", number, 0.0, infos)


def test_a_record_is_counted_behind_its_prompt() -> None:
    draft = DraftRecord("r", (4, 5), (-1, 0), (0,), 2, "s", "r1")
    done = TwoPlaces(
        (step(1, 7), step(2, 0, draft), step(3, 0)),
        (said(1, 3), said(2, 4, 6), said(3, 7)),
        (Worked(0.0, 1.0, 7, 0), Worked(1.0, 1.5, 3, 2), Worked(1.5, 2.0, 1, 0)),
        (Worked(0.5, 1.25, 3, 4), Worked(1.75, 2.25, 2, 1)),
        1.0,
        2.5,
        (Told(True, 3),),
        ((0.9, "DraftSync"), (1.2, "Candidates"), (1.5, "VerifyCommit"), (1.9, "TailStream")),
    )
    trace = done.trace("two places")
    target = [s for s in trace.spans if s.side == "target"]
    assert [s.work for s in target] == ["early", "late", "plain"]
    assert [s.end for s in target] == pytest.approx([0.2, 0.5, 1.0])
    assert [s.what for s in trace.sent] == ["candidates", "verdict", "drafts"]
    assert [(s.to) for s in trace.sent] == ["draft", "draft", "target"]
    assert trace.emitted == 3 and trace.plain == 1 and trace.hit_rate == 1.0 and trace.ages == (3,)
    assert trace.wasted == pytest.approx((5 - 1) / 3)
    assert trace.wall == 1.0 and trace.hidden() == 1.0 and trace.busy("draft") == pytest.approx(0.5)
    assert trace.waits("draft") == [pytest.approx((0.25, 0.75))] and trace.waits("target") == []
    counted = turned(done, [4, 6, 7])
    assert (counted.tokens, counted.seconds, counted.rounds, counted.told) == (3, 1.0, 1, 1)
    assert counted.forward == ((3, 10.0), (1, 10.0)) and counted.draft == (2.0,)
