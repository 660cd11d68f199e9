"""Learning where to leave a model and how far to draft: a toy whose best policy is known, and the parts."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch

from workbench.spec.errors import OptionError
from workbench.speculative.lede.choice import Guard, Watch, best_static, fared
from workbench.speculative.lede.q_learning import Learning, QNetwork, greedy, learn, targets
from workbench.speculative.lede.replay import Replay, held_out
from workbench.speculative.lede.rounds import Costs, Round, Transition, play, rate, static
from workbench.speculative.lede.state import FEATURES, GO_ON, STOP, Limits, Reading, State, moved, read
from workbench.speculative.lede.walks import Chain, explored, walk
from workbench.speculative.lede.walks import Place as Logged

LIMITS = Limits(layers=4, longest=4)
COSTS = Costs(layers=4)
SURE, FAIR, UNSURE = Reading(0.9, 0.1, 0.2), Reading(0.6, 0.3, 0.5), Reading(0.1, 0.8, 0.95)


@dataclass(frozen=True)
class Place:
    """A place in a text: layers from ``depth`` on are sure and right about the next ``run`` tokens."""

    depth: int
    run: int

    def reading(self, draft: int, layer: int) -> Reading:
        if layer < self.depth or draft >= self.run:
            return UNSURE
        return SURE if self.depth == 1 else FAIR

    def accepted(self, exit: int, drafted: int) -> int:
        return min(drafted, self.run) if exit >= self.depth else 0


# Runs that any layer knows, of 1 to 3 tokens; one token that two layers know; and what none of them knows.
TEXT = (*(Place(1, n) for n in (1, 2, 3)), *(Place(2, 1),) * 2, Place(9, 0))


def best(state: State) -> int:
    """The best policy, by hand: leave where a layer knows, run on to the end of the model where none does;
    then draft while it is sure, at a layer that knows runs and no further than runs go."""
    if not state.chosen:
        return GO_ON if state.reading == UNSURE else STOP
    return GO_ON if state.reading == SURE and state.layer == 1 and state.drafted < 3 else STOP


def worth(policy) -> float:
    return sum(play(place, policy, LIMITS, COSTS, 0.5).reward for place in TEXT)


def optimum(places: list[Place], layer: int = 1, drafted: int = 0) -> float:
    """The most that any policy gets of places that look alike so far, whatever it remembers."""

    def split(costs: float, layer: int, drafted: int) -> float:
        draft = max(drafted - 1, 0)
        groups = [[p for p in places if p.reading(draft, layer) == seen] for seen in (SURE, FAIR, UNSURE)]
        return sum(optimum(g, layer, drafted) for g in groups if g) - costs * len(places)

    state = State(SURE, layer, drafted, 0.5)
    if not drafted:
        leave, deeper = optimum(places, layer, 1), LIMITS.deeper(layer)
        on = split(0.25, deeper, 0) if deeper else -COSTS.finished(layer) * len(places)
        return max(leave, on)
    stop = sum(p.accepted(layer, drafted) for p in places) - COSTS.verify * len(places)
    return max(stop, split(layer / 4, layer, drafted + 1)) if state.may_go_on(LIMITS) else stop


def first_look() -> float:
    groups = [[p for p in TEXT if p.reading(0, 1) == seen] for seen in (SURE, FAIR, UNSURE)]
    return sum(optimum(g) for g in groups) - 0.25 * len(TEXT)


def logged(rounds: int, seed: int = 0):
    """Rounds of a policy that decides by tossing a coin."""
    toss = random.Random(seed)
    return [
        play(toss.choice(TEXT), lambda state: toss.randrange(2), LIMITS, COSTS, toss.random())
        for _ in range(rounds)
    ]


def test_the_policy_by_hand_is_the_best_there_is():
    assert worth(best) == pytest.approx(first_look())


def test_learning_offline_finds_the_best_policy():
    network = learn(Replay.of(logged(1200), LIMITS), Learning(steps=3000, batch=128, seed=1))
    policy = greedy(network.values(), LIMITS)
    assert worth(policy) == pytest.approx(first_look())
    for place in TEXT:
        steps = play(place, policy, LIMITS, COSTS, 0.5).steps
        assert [s.action for s in steps] == [s.action for s in play(place, best, LIMITS, COSTS, 0.5).steps]


def test_no_fixed_choice_is_as_good():
    def played(policy, limits=LIMITS):
        return [play(place, policy, limits, COSTS, 0.5) for place in TEXT]

    exit, drafts, found = best_static(played, LIMITS)
    assert found == pytest.approx(
        max(rate(played(static(e, d))) for e, d in itertools.product((1, 2, 3), range(1, 5)))
    )
    assert exit in (1, 2, 3) and drafts in range(1, 5)
    assert rate(played(best)) > 1.08 * found


def test_no_draft_is_a_fixed_choice_too():
    nothing = [Place(9, 0)] * 3
    found = best_static(lambda policy, limits: [play(p, policy, limits, COSTS, 0.5) for p in nothing], LIMITS)
    assert found == (0, 0, 1.0)


def test_a_fixed_choice_looks_at_its_own_layer_alone():
    costs = Costs(layers=4, head=0.1)
    seen = []

    def played(policy, limits):
        seen.append((limits.exits, [play(p, policy, limits, costs, 0.5) for p in TEXT]))
        return seen[-1][1]

    best_static(played, LIMITS)
    assert [exits for exits, _ in seen] == [(e,) for e in (1, 2, 3) for _ in range(4)]
    assert seen[-1][1][0].cost == pytest.approx(4 * (3 * 0.225 + 0.1) + 1)


@pytest.mark.parametrize("exit, drafts", [(1, 1), (2, 3), (3, 4)])
def test_a_fixed_choice_is_played_as_it_says(exit, drafts):
    for place in TEXT:
        played = play(place, static(exit, drafts), LIMITS, COSTS, 0.5)
        assert (played.exit, played.drafted) == (exit, drafts)
        assert played.accepted == place.accepted(exit, drafts)
        assert played.cost == pytest.approx(exit * drafts / 4 + 1)
        assert played.reward == pytest.approx(played.accepted - played.cost)


def test_heads_choices_and_the_price_count():
    costs = Costs(layers=4, head=0.1, choice=0.01, verify=0.8, price=2.0)
    played = play(Place(1, 3), static(2, 3), LIMITS, costs, 0.5)
    spent = 2 * (0.225 + 0.11) + 2 * (0.45 + 0.11) + 0.8  # a pass reads its own head too
    assert played.cost == pytest.approx(spent)
    assert played.reward == pytest.approx(3 - 2 * spent)
    assert rate([played]) == pytest.approx(4 / spent)


def test_a_round_ends_where_no_choice_is_left():
    """It drafts no more than may be drafted."""
    played = play(
        Place(9, 0), lambda state: GO_ON if state.layer < 3 or state.chosen else STOP, LIMITS, COSTS, 0.5
    )
    assert (played.exit, played.drafted, played.accepted) == (3, 4, 0)
    assert played.steps[-1].after is None and played.steps[-1].action == STOP
    assert all(a.after == b.state for a, b in itertools.pairwise(played.steps))


def test_without_a_draft_the_pass_goes_on_where_it_was_left():
    costs = Costs(layers=4, head=0.2, price=1.5)
    for exits in ((1, 2, 3), (2,)):
        played = play(Place(9, 0), lambda state: GO_ON, Limits(4, 4, exits), costs, 0.5)
        assert (played.exit, played.drafted, played.tokens) == (0, 0, 1)
        assert played.cost == pytest.approx(1 + 0.2 * len(exits))  # what was read beside the pass
        assert played.reward == pytest.approx(-1.5 * played.cost)
        assert played.steps[-1].after is None and played.steps[-1].action == GO_ON


def test_targets_take_the_best_action_that_there_is():
    """y = r + Q'(s', argmax Q(s')); no bootstrap behind the end, no going on where there is no room."""
    here = State(SURE, 1, 1, 0.5)
    full = State(SURE, 1, LIMITS.longest, 0.5)
    steps = (
        Transition(here, GO_ON, -0.25, State(SURE, 1, 2, 0.5)),
        Transition(here, GO_ON, -0.25, full),
        Transition(here, STOP, 1.0, None),
    )
    batch = Replay.of([Round(steps, 1, 1, 1, 1.0)], LIMITS)

    def online(states):
        return torch.tensor([[1.0, 5.0]]).repeat(len(states), 1)

    def frozen(states):
        return torch.tensor([[10.0, 20.0]]).repeat(len(states), 1)

    assert targets(online, frozen, batch).tolist() == [19.75, 9.75, 1.0]


def test_learning_is_the_same_for_the_same_seed():
    replay = Replay.of(logged(50), LIMITS)
    networks = [learn(replay, Learning(steps=5, seed=s)) for s in (3, 3, 4)]
    same, again, other = (torch.cat([p.flatten() for p in n.parameters()]) for n in networks)
    assert torch.equal(same, again) and not torch.equal(same, other)
    first = next(replay.batches(8, 1))
    assert torch.equal(first.states, next(replay.batches(8, 1)).states) and len(first) == 8


def test_nothing_logged_is_nothing_to_learn_from():
    with pytest.raises(OptionError, match="no rounds"):
        Replay.of([], LIMITS)
    for layers, exits in ((1, ()), (4, (4,)), (4, (2, 1)), (4, (0,))):
        with pytest.raises(OptionError, match=f"{layers} layers cannot be left"):
            Limits(layers, 4, exits)


def test_prompts_are_held_out_whole():
    by_prompt = {f"p{i}": logged(3, seed=i) for i in range(10)}
    learnt, judged = held_out(by_prompt, every=5)
    assert len(judged) == 6 and len(learnt) == 24
    assert judged == by_prompt["p4"] + by_prompt["p9"]


def test_a_reading_is_what_the_law_says():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    (reading,) = read(logits[None])
    assert reading.confidence == pytest.approx(0.5)
    assert reading.entropy == pytest.approx(1.75 / 2)
    assert reading.uncertainty == pytest.approx(0.75)
    even, odd = read(torch.stack([torch.zeros(16), torch.arange(16.0)]))
    assert even == pytest.approx((1 / 16, 1.0, 1.0)) and odd.confidence > 0.6
    (certain,) = read(torch.tensor([[0.0, -math.inf]]))
    assert certain == pytest.approx((1.0, 0.0, 0.0))


def test_a_state_is_eight_numbers_between_0_and_1():
    vector = State(SURE, 3, 4, 0.4, 0.5).vector(LIMITS)
    assert vector == (0.9, 0.1, 0.2, 0.75, 1.0, 1.0, 0.4, 0.5) and len(vector) == FEATURES
    network = QNetwork(8)
    assert network(torch.tensor([vector])).shape == (1, 2)
    assert network.values().operations == 8 * 8 + 8 * 8 + 8 * 2
    with torch.inference_mode():
        assert network.values()(vector) == pytest.approx(
            network(torch.tensor([vector]))[0].tolist(), abs=1e-6
        )


def test_recent_acceptance_forgets_slowly():
    assert moved(0.5, 0, 0) == 0.5
    assert moved(0.5, 4, 4) == pytest.approx(0.55)


def test_strange_text_falls_back_and_comes_back():
    watch = Watch(Guard(learnt=(0.8, 0.2), fixed=(0.5, 0.2), window=10))
    for _ in range(20):
        watch.judged(4, 5)
    assert not watch.safe
    for _ in range(10):
        watch.judged(1, 5)
    assert watch.safe
    for _ in range(10):
        watch.judged(0, 4)
    assert watch.safe
    for _ in range(10):
        watch.judged(2, 4)  # what the fixed choice is used to
    assert not watch.safe
    for _ in range(10):
        watch.judged(5, 5)  # better than expected is nothing to be afraid of
    assert not watch.safe


def test_chance_alone_is_not_strange():
    """Text as it was learnt from: no fall-back in 100 windows."""
    toss = random.Random(2)
    shares = [toss.choice((0.0, 0.25, 0.5, 1.0, 1.0, 1.0)) for _ in range(4800)]
    watch = Watch(Guard(fared([Round((), 1, 4, int(4 * s), 1.0) for s in shares]), (0.0, 0.0)))
    for share in shares:
        watch.judged(int(4 * share), 4)
        assert not watch.safe


def chain(right):
    return Chain((SURE,) * right + (UNSURE,) * (4 - right), right)


def test_a_walk_goes_on_behind_what_was_accepted():
    text = [Logged({1: chain(n), 2: chain(4), 3: chain(4)}) for n in (2, 9, 9, 0, 1, 9, 0)]
    rounds = walk(text, static(1, 3), LIMITS, COSTS, 0.5)
    assert [(r.accepted, r.tokens) for r in rounds] == [(2, 3), (0, 1), (1, 2), (0, 1)]
    assert sum(r.tokens for r in rounds) == len(text)
    assert [r.steps[0].state.recent for r in rounds][:2] == [0.5, moved(0.5, 2, 3)]
    assert [r.accepted for r in walk(text, static(1, 1), LIMITS, COSTS, 0.5)] == [1, 1, 1, 0]
    assert [r.tokens for r in walk(text, static(0, 1), LIMITS, COSTS, 0.5)] == [1] * 7


def test_exploring_meets_every_exit_and_length():
    text = [Logged({e: chain(e) for e in (1, 2, 3)})] * 40
    rounds = list(explored([text, text[:7]], LIMITS, COSTS, 0.5, times=8, seed=3))
    assert {r.exit for r in rounds} == {0, 1, 2, 3} and {r.drafted for r in rounds if r.exit} == {1, 2, 3, 4}
    assert rounds == list(explored([text, text[:7]], LIMITS, COSTS, 0.5, times=8, seed=3))
