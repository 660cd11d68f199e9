"""Mirror rounds: exact output, reuse that is right, and the closed forms of its clock."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import pytest

from workbench.engine.engine import Engine
from workbench.spec.errors import OptionError
from workbench.speculative import predict
from workbench.speculative.draft_model import cut_out
from workbench.speculative.placement.mirror import MirrorDrafter, Proxy
from workbench.speculative.placement.timeline import MirrorRound, MirrorTimes, mirror_timeline
from workbench.speculative.placement.trace import of_mirror
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.speculative.verify import ExactVerify

pytestmark = pytest.mark.usefixtures("inference")


def run(
    lab: ModuleType,
    prompts: list[list[int]],
    *,
    layers: tuple[int, ...] = (0,),
    kappa: int = 3,
    gamma: int = 3,
    proxy: Proxy | None = None,
    **params: object,
) -> tuple[MirrorDrafter, list[list[int]], list[tuple[int, ...]]]:
    base = lab.make_engine("paged", page_size=4)
    target = base.executor.decoder
    kv = TreeKV(target if len(layers) == target.config.num_layers else cut_out(target, layers))
    drafter = MirrorDrafter(kv, gamma=gamma, kappa=kappa, proxy=proxy)
    engine = Engine(
        base.executor, base.kv, base.scheduler, context=256, drafter=drafter, verify=ExactVerify()
    )
    ran = lab.run_engine(engine, prompts, **params)
    ids = [ran.ids(f"r{i}") for i in range(len(prompts))]
    windows = [d.tokens for step in ran.steps for d in step.drafts]
    assert kv.used == 0
    return drafter, ids, windows


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kappa", [1, 3, 61])
def test_output_is_the_plain_runs(lab: ModuleType, params: dict[str, object], kappa: int) -> None:
    prompts = lab.prompts_of(2, seed=4, low=4, high=20)
    params = {"max_tokens": 18, "ignore_eos": True, **params}
    ran = lab.run_engine(lab.make_engine("paged"), prompts, **params)
    gamma = 1 if kappa == 61 else 3
    drafter, ids, windows = run(lab, prompts, kappa=kappa, gamma=gamma, **params)
    assert ids == [ran.ids("r0"), ran.ids("r1")]
    # What was made ahead is what would have been drafted afresh: reuse changes no window.
    assert windows == run(lab, prompts, kappa=1, gamma=gamma, **params)[2]
    if kappa == 61:  # every end is foreseen
        assert drafter.stats.reuse_rate == 1.0
    else:
        assert drafter.stats.branches <= len(drafter.log) * (gamma + 1) * kappa


def test_reuse_is_told_apart_by_accepted_length_and_paid_for(lab: ModuleType) -> None:
    prompts = lab.prompts_of(2, seed=6, low=4, high=20)
    drafter, ids, _ = run(lab, prompts, kappa=4, temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    stats, log = drafter.stats, drafter.log
    assert sum(stats.tries.values()) == len(log) and set(stats.hits) == set(stats.tries)
    assert 0 < stats.reuse_rate < 1 and stats.wasted > 1  # type: ignore[operator]
    assert stats.emitted == sum(step.emitted for step in log) <= sum(len(i) for i in ids) - 2
    for seq in (1, 2):
        own = [s for s in log if s.seq == seq]
        assert not own[0].reused and all(b.reused == a.foreseen for a, b in pairwise(own))
        assert all((s.fresh_levels == 0) == s.reused for s in own)


def test_a_proxy_decides_what_is_made_ahead_and_nothing_else(lab: ModuleType) -> None:
    prompts = lab.prompts_of(1, seed=6, low=4, high=20)
    asked: list[tuple[int, ...]] = []

    def blind(tokens: object, path: tuple[int, ...]) -> list[int]:
        asked.append(path)
        return [0, 1]

    settings = {"max_tokens": 20, "ignore_eos": True}
    drafter, ids, windows = run(lab, prompts, kappa=2, proxy=blind, **settings)
    other, same, windows_too = run(lab, prompts, kappa=2, **settings)
    assert ids == same and windows == windows_too
    assert {len(p) for p in asked} == {0, 1, 2, 3}
    assert all(any(p == w[: len(p)] for w in windows) for p in asked)
    assert drafter.stats.reuse_rate < other.stats.reuse_rate  # type: ignore[operator]


def rounds_of(lab: ModuleType) -> list[tuple[bool, int]]:
    drafter, _, _ = run(
        lab,
        lab.prompts_of(1, seed=6, low=4, high=20),
        kappa=4,
        temperature=1.0,
        seed=1,
        max_tokens=60,
        ignore_eos=True,
    )
    rounds = [(s.foreseen, s.emitted) for s in drafter.log]
    assert {hit for hit, _ in rounds} == {True, False}
    return rounds


def gain(rounds: list[MirrorRound], times: MirrorTimes) -> float:
    return of_mirror(rounds, times, "Mirror").speedup(1.0)


def test_the_clock_has_its_closed_forms(lab: ModuleType) -> None:
    rounds = rounds_of(lab)
    hits = [n for hit, n in rounds if hit]
    misses = [n for hit, n in rounds if not hit]
    rate = len(hits) / len(rounds)
    for branches in (0.0, 0.4, 1.0, 1.7):  # no link, all of the target beside the drafter
        times = MirrorTimes(early=0.0, late=1.0, branches=branches, fresh=0.3)
        expected = predict.asynchronous(
            rate, sum(hits) / len(hits), sum(misses) / len(misses), 1.0, branches, 0.3
        )
        assert gain(mirror_timeline(rounds, times), times) == pytest.approx(expected)
    foreseen = [(True, n) for _, n in rounds]
    tokens = sum(n for _, n in rounds) / len(rounds)
    for early, link, branches in ((0.6, 0.0, 0.2), (0.6, 0.05, 0.2), (0.6, 0.05, 0.9)):
        times = MirrorTimes(early, 1.0 - early, branches, fresh=0.3, link=link)
        made = mirror_timeline(foreseen, times)
        each = early + link + max(1.0 - early, branches) + link
        assert made[-1].end == pytest.approx(each * len(made))
        assert gain(made, times) == pytest.approx(tokens / each)
    free = MirrorTimes(0.0, 1.0, 0.0, 0.0)  # c -> 0: the longer side is the target
    assert gain(mirror_timeline(foreseen, free), free) == pytest.approx(predict.parallel(tokens, 3, 1.0, 0.0))


def test_a_slow_link_leaves_nothing_of_the_overlap(lab: ModuleType) -> None:
    rounds = rounds_of(lab)

    def share(link: float) -> float:
        times = MirrorTimes(0.5, 0.5, branches=0.4, fresh=0.4, link=link)
        serial = len(rounds) * (1.0 + 0.4 + 2 * link)
        return mirror_timeline(rounds, times)[-1].end / serial

    assert share(0.0) < share(1.0) < share(100.0) < 1.0
    assert share(1e6) == pytest.approx(1.0, abs=1e-6)


def test_branches_that_are_not_given_up_delay_the_fresh_draft() -> None:
    stops = mirror_timeline([(False, 1)], MirrorTimes(0.2, 0.8, branches=3.0, fresh=0.5))
    ends = mirror_timeline([(False, 1)], MirrorTimes(0.2, 0.8, branches=3.0, fresh=0.5, stops=False))
    assert stops[0].end == pytest.approx(1.5) and ends[0].end == pytest.approx(3.7)
    assert ends[0].idle_target == pytest.approx(2.7)
    with pytest.raises(OptionError):
        MirrorTimes(-1.0, 1.0, 1.0, 1.0)
    with pytest.raises(OptionError):
        gain([], MirrorTimes(0.5, 0.5, 0.4, 0.4))
