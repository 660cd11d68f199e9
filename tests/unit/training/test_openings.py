"""Questions whose first words are given: which ones, how they go on, how often they are answered."""

from __future__ import annotations

from collections import Counter

import pytest

from workbench.spec.errors import OptionError
from workbench.training.heads.conversations import Making, converse
from workbench.training.heads.openings import KINDS, LONGEST, WEIGHTS, opening_of
from workbench.training.heads.target import Target, open_target

SHORT = Making(question=8, answer=12, opened=0.5)


@pytest.fixture(scope="module")
def target() -> Target:
    return open_target("tiny", dtype="float32")


@pytest.fixture(scope="module")
def made(target):
    with target.engine(limits=target.plan.limits) as engine:
        return converse(engine, target.tokenizer, 0, 12, SHORT), converse(
            engine, target.tokenizer, 0, 12, SHORT
        )


def _question(target: Target, ids: tuple[int, ...]) -> str:
    return target.tokenizer.decode(ids).strip()


def test_a_seed_chooses_its_opening_and_the_share_is_kept():
    chosen = [opening_of(seed, 0.6) for seed in range(2000)]
    assert chosen == [opening_of(seed, 0.6) for seed in range(2000)]
    opened = [o for o in chosen if o is not None]
    assert 0.55 < len(opened) / len(chosen) < 0.65
    kind_of = {o.text: kind for kind, openings in KINDS.items() for o in openings}
    counts = Counter(kind_of[o.text] for o in opened)
    per_weight = {kind: counts[kind] / WEIGHTS.get(kind, 1) for kind in KINDS}
    assert min(per_weight.values()) > 0.6 * max(per_weight.values())
    assert {opening_of(seed, 0.0) for seed in range(50)} == {None}


def test_conversations_with_openings_are_a_function_of_their_numbers(made):
    assert made[0] == made[1]


def test_an_opened_question_begins_as_given_and_is_answered_once(target, made):
    asked: dict[tuple[int, ...], list[bool]] = {}
    for conversation in made[0]:
        asked.setdefault(conversation.prompt, []).append(conversation.greedy)
    begun: Counter[bool] = Counter()
    for prompt, greedy in asked.items():
        text = _question(target, prompt)
        found = [o for kind in KINDS.values() for o in kind if o.text.strip() in text]
        begun[bool(found)] += 1
        assert len(greedy) == (1 if found else 2)
        if found and found[0].closing:
            assert found[0].closing.strip() in text.split(found[0].text.strip())[1]
    assert begun[True] and begun[False]


def test_room_is_made_for_the_longest_question(target):
    assert SHORT.longest_question == LONGEST > Making().longest_question
    for kind in KINDS.values():
        for o in kind:
            forced = len(target.tokenizer.encode(o.text + o.closing, add_special=False))
            assert forced <= 64 and o.longest <= LONGEST


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(OptionError, match="opened"):
        Making(opened=share)
