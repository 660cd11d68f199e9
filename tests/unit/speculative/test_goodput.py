"""Goodput control on a simulated clock: real decisions, known costs and acceptances."""

import random

import numpy as np
import pytest
import torch

from workbench.engine.draft_seams import DraftTree
from workbench.spec.events import StepEvent
from workbench.speculative.goodput import SPEC, Config, bind, choose
from workbench.speculative.hit_rates import HitRates
from workbench.speculative.step_cost import DraftCost, StepCost, rising


def cost_of(points):
    cost = StepCost()
    for rows, ms in sorted(points * 3):
        cost.add(rows, ms)
    return cost


class Clock:
    """A machine whose steps cost ``ms(rows)``, and chains that are accepted with a chance per token."""

    def __init__(self, ms, chance, draft_ms=0.0, seed=0, noise=0.0, k=8):
        self.ms, self.chance, self.draft_ms, self.k = ms, chance, draft_ms, k
        self.rng, self.noise = random.Random(seed), noise
        self.control = bind(Config())
        self.time = self.tokens = 0.0
        self.lengths = []

    def step(self, batch, fixed=None):
        """One step of ``batch`` sequences; a fixed length instead of the control's."""
        asks = [(seq, self.k) for seq in range(batch)]
        rooms = self.control.rooms(asks, batch, batch) if fixed is None else [fixed] * batch
        rows = batch + sum(rooms)
        drafting = self.draft_ms * max(rooms)
        ms = self.ms(rows) * (1 + self.noise * self.rng.expovariate(1))
        self.time += ms + drafting
        self.tokens += batch
        self.lengths.append(sum(rooms) / batch)
        for seq, n in enumerate(rooms):
            kept = 0
            while kept < n and self.rng.random() < self.chance(seq, kept):
                kept += 1
            # Counted as expected, decided by what happened: less noise for the same decisions.
            self.tokens += sum(np.cumprod([self.chance(seq, i) for i in range(n)]))
            if fixed is None and n:
                self.control.judged(seq, DraftTree.chain([0] * n, "toy"), tuple(range(kept)))
        if fixed is None:
            phases = {"draft": drafting, "forward": ms}
            self.control.observe(StepEvent(0, 0.0, rows, 0, batch, sum(rooms), batch, 0, phases, 0, 0, 0, {}))

    def run(self, batch, steps, fixed=None):
        """Tokens per millisecond of this part of the run."""
        time, tokens = self.time, self.tokens
        for _ in range(steps):
            self.step(batch, fixed)
        return (self.tokens - tokens) / (self.time - time)


def roofline(rows):
    """Flat while the machine waits for weights, then a row costs what it computes."""
    return 10.0 + 0.1 * rows + max(0, rows - 24) * 0.6


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
def test_it_is_never_far_below_the_best_fixed_length_over_a_batch_ramp(chance, noise):
    """Against the better of plain decoding and the best fixed k at every batch; its trials count.

    At B = 16 it may do better than any of them: sequences get different lengths.
    """
    ratios = []
    clock = Clock(roofline, lambda seq, i: chance, noise=noise, seed=1)
    for batch in (1, 4, 16, 64, 8):
        clock.run(batch, 60)
        got = clock.run(batch, 300)
        tokens = np.cumsum([1.0, *np.cumprod([chance] * 8)]) * batch
        fixed = [n / (roofline(batch * (1 + k)) * (1 + noise)) for k, n in enumerate(tokens)]
        ratios.append(got / max(fixed))
    assert min(ratios) > 0.9 and np.mean(ratios) > 0.95, ratios


def test_drafts_end_by_themselves_where_the_batch_fills_the_machine():
    clock = Clock(roofline, lambda seq, i: 0.6)
    means = []
    for batch in (1, 4, 16, 64):
        clock.run(batch, 200)
        means.append(float(np.mean(clock.lengths[-50:])))
    assert min(means[:2]) > 3 > 1 > means[2] > means[3]
    assert means[3] < 0.1  # but for its rare trials


def test_off_is_a_choice_when_acceptance_is_bad_and_it_recovers():
    chance = {"now": 0.02}
    clock = Clock(lambda rows: 10 + rows, lambda seq, i: chance["now"])
    clock.run(1, 300)
    assert np.mean(clock.lengths[-100:]) < 0.5  # its trials
    chance["now"] = 0.9
    clock.run(1, 400)
    assert np.mean(clock.lengths[-50:]) > 3
    chance["now"] = 0.02
    clock.run(1, 300)
    assert np.mean(clock.lengths[-100:]) < 0.8


def test_sequences_are_judged_by_their_own_acceptance():
    """Two of eight sequences repeat themselves: they get the rows."""
    clock = Clock(lambda rows: 10 + 0.5 * rows, lambda seq, i: 0.95 if seq < 2 else 0.05)
    clock.run(8, 300)
    rooms = clock.control.rooms([(seq, 8) for seq in range(8)], 8, 8)
    assert min(rooms[:2]) >= 5 and np.mean(rooms[2:]) < 2


def test_a_slow_drafter_shortens_drafts():
    lengths = []
    for draft_ms in (0.0, 2.0, 12.0):
        clock = Clock(lambda rows: 10 + 0.05 * rows, lambda seq, i: 0.8, draft_ms=draft_ms)
        clock.run(1, 300)
        lengths.append(np.mean(clock.lengths[-100:]))
    assert lengths[0] > lengths[1] > lengths[2]
    assert lengths[0] > 6 and lengths[2] < 0.5


def test_a_machine_that_becomes_slower_as_a_whole_changes_nothing():
    slow = {"by": 1.0}
    clock = Clock(lambda rows: slow["by"] * (10 + 0.3 * rows), lambda seq, i: 0.7)
    clock.run(1, 200)
    before = np.mean(clock.lengths[-100:])
    slow["by"] = 3.0
    clock.run(1, 300)
    assert abs(np.mean(clock.lengths[-100:]) - before) < 1.5
    assert clock.control.step_cost(np.array([1]))[0] == pytest.approx(3 * 10.3, rel=0.25)
    slow["by"] = 0.5
    clock.run(1, 400)
    assert abs(np.mean(clock.lengths[-100:]) - before) < 1.5


@pytest.mark.parametrize("mean", [10, 30])
def test_runs_that_are_copied_are_drafted_longer_than_the_text_between(mean):
    """Acceptance that comes in runs: better than any fixed length, since lengths follow the runs."""

    def speed(fixed):
        rng, clock, left, time, tokens = random.Random(1), Clock(None, None, k=10), 0, 0.0, 0
        for _ in range(1500):
            if left <= 0 and rng.random() < 0.05:
                left = 1 + int(rng.expovariate(1 / mean))
            n = clock.control.rooms([(0, 10)], 1, 1)[0] if fixed is None else fixed
            kept = max(0, min(n, left))
            left -= kept + 1
            ms = 16.0 + 0.7 * n
            time, tokens = time + ms, tokens + kept + 1
            if n:
                clock.control.judged(0, DraftTree.chain([0] * n, "toy"), tuple(range(kept)))
            clock.control.observe(StepEvent(0, 0.0, 1 + n, 0, 1, n, 1, 0, {"forward": ms}, 0, 0, 0, {}))
        return tokens / time

    assert speed(None) > max(speed(k) for k in range(11))


def test_choose_takes_the_prefix_with_the_largest_goodput():
    step, draft = cost_of([(1, 10.0), (9, 14.0)]), DraftCost()
    rates = [0.8 ** np.arange(1, 9)]
    choice = choose(rates, 1, 1, step, draft)
    want = max(range(9), key=lambda k: (1 + sum(rates[0][:k])) / (10 + 0.5 * k))
    assert choice.rooms == (want,)
    assert choice.plain == pytest.approx(1 / 10, rel=0.01)
    assert choice.goodput == pytest.approx((1 + sum(rates[0][:want])) / (10 + 0.5 * want), rel=0.01)
    assert choose(rates, 1, 1, step, draft, margin=9.0).rooms == (0,)
    assert choose([np.zeros(0), rates[0]], 2, 2, step, draft).rooms[0] == 0


def test_the_cost_curve_is_measured_pooled_and_interpolated():
    cost = cost_of([(1, 10.0), (3, 9.0), (8, 20.0), (16, 36.0)])
    points = dict(cost.points())
    assert points[1] == points[3] == pytest.approx(9.5, rel=0.05)  # more rows are never cheaper
    rows = np.array([1, 5, 12, 32])
    assert cost(rows) == pytest.approx([points[1], *np.interp([5, 12], list(points), list(points.values())),
                                        points[16] + 2 * (points[16] - points[8])])  # fmt: skip
    assert rising([(1, 1), (5, 1), (2, 3), (7, 1)]) == [1, 2.75, 2.75, 7]


def test_one_slow_step_is_not_believed():
    cost = StepCost()
    for _ in range(4):
        cost.add(1, 10.0)
    cost.add(9, 500.0)
    assert cost(np.array([9]))[0] == pytest.approx(10.0, rel=0.01)
    for _ in range(8):
        cost.add(9, 15.0)
    assert cost(np.array([9]))[0] == pytest.approx(15.0, rel=0.05)


def test_the_cost_of_drafts_is_a_line():
    draft = DraftCost()
    assert draft(np.array([0, 4])).tolist() == [0, 0]
    draft.add(4, 6.0)
    assert draft(np.array([0, 2])) == pytest.approx([0, 3.0])
    for n in (1, 8, 4, 2):
        draft.add(n, 2.0 + n)
    assert draft(np.array([0, 3, 6])) == pytest.approx([0, 5.0, 8.0])


def test_hit_rates_follow_and_extrapolate():
    rates = HitRates(memory=20, weight=1.0)
    assert rates.rates(3).tolist() == [0.5, 0.25, 0.125]
    for _ in range(200):
        rates.add(2, (0, 1))
    assert (rates.rates(6) > 0.95**6).all()
    for _ in range(100):
        rates.add(4, (0,))
    assert rates.rates(4)[0] > 0.9 and rates.rates(4)[1] < 0.1
    own = HitRates(memory=20, weight=2.0)
    assert own.rates(4, rates.rates(4)) == pytest.approx(rates.rates(4), abs=1e-3)
    sure = HitRates(memory=20, weight=1.0)
    for _ in range(60):
        sure.add(1, ())
        sure.add(6, range(6))
    assert sure.rates(6)[0] == pytest.approx(sure.rates(6)[5]) and sure.rates(6)[0] > 0.8
    tree = HitRates(memory=20, weight=1.0)
    for _ in range(100):
        tree.add(5, (1, 4))
    assert (np.diff(tree.rates(5)) <= 0).all()


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "suffix:tree=true"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_engine_output_does_not_depend_on_it(lab, drafter, temperature):
    prompts = [(p * 6)[:40] for p in lab.prompts_of(5, seed=8, low=4, high=9)]
    params = {"max_tokens": 48, "temperature": temperature, "seed": 3}
    with torch.inference_mode():
        plain = lab.run_engine(lab.make_engine("paged", pool=4096), prompts, **params)
        engine = lab.make_engine("paged", drafter, "goodput:probe=2", pool=4096)
        ran = lab.run_engine(engine, prompts, **params)
    assert [ran.ids(f"r{i}") for i in range(5)] == [plain.ids(f"r{i}") for i in range(5)]
    assert sum(len(s.drafts) for s in ran.steps) > 0
    control = engine.controlling.control
    assert control.step_cost.known and control.last is not None
    assert control._own == {} and control._idle == {}
    assert engine.memory()["draft"] >= control.nbytes() > 0
    assert SPEC.kind == "exact" and SPEC.seam == "control"


def test_prompts_in_a_step_teach_nothing_about_decoding():
    control = bind(Config())
    event = StepEvent(0, 0.0, 70, 69, 1, 0, 2, 0, {"forward": 99.0}, 0, 0, 0, {})
    control.observe(event)
    assert not control.step_cost.known
    assert control.rooms([(1, 5), (2, 3)], 2, 2) == [5, 3]
