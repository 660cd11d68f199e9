"""Two places on a virtual clock: latencies change no output, closed forms are limits, logs replay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import pytest

from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import OptionError
from workbench.speculative import predict
from workbench.speculative.draft_model import cut_out
from workbench.speculative.placement.remote import RemoteDrafter
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.speculative.placement.virtual import Latencies, Simulated, VirtualLink, simulate
from workbench.speculative.placement.worker import DraftWorker, Growth
from workbench.speculative.verify import ExactVerify

pytestmark = pytest.mark.usefixtures("inference")

STEP = 0.010


def plain(lab: ModuleType, prompts: list[list[int]], **params: object) -> list[list[int]]:
    ran = lab.run_engine(lab.make_engine("paged"), prompts, **params)
    return [ran.ids(f"r{i}") for i in range(len(prompts))]


def run(
    lab: ModuleType,
    prompts: list[list[int]],
    latencies: Latencies,
    *,
    layers: tuple[int, ...] = (0,),
    budget: int = 6,
    patience: float = 0.0,
    growth: Growth | None = None,
    pool: int = 1024,
    **params: object,
) -> tuple[Simulated, DraftWorker, RemoteDrafter, list[list[int]]]:
    base = lab.make_engine("paged", page_size=4, pool=pool)
    target = base.executor.decoder
    model = target if len(layers) == target.config.num_layers else cut_out(target, layers)
    worker = DraftWorker(TreeKV(model), growth or Growth(width=3, top=3, max_nodes=24, max_depth=8))
    made: list[RemoteDrafter] = []

    def make(link: VirtualLink) -> Engine:
        made.append(RemoteDrafter(link, budget=budget, patience=patience, vocab=61))
        engine = Engine(
            base.executor, base.kv, base.scheduler, context=256, drafter=made[0], verify=ExactVerify()
        )
        for i, prompt in enumerate(prompts):
            engine.add(Request(f"r{i}", tuple(prompt), SamplingParams(**params)))  # type: ignore[arg-type]
        return engine

    out = simulate(make, worker, latencies)
    ids: list[list[int]] = [[] for _ in prompts]
    for event in out.events:
        ids[int(event.request_id[1:])] += [t.id for t in event.tokens]
    assert not any(pool.used for pool in base.kv.pools)
    return out, worker, made[0], ids


def flat(seconds: float) -> Callable[[int], float]:
    return lambda rows: seconds


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("link", [0.0, 0.004, 0.05, 1e9])
def test_output_is_the_plain_runs_whatever_the_latencies(
    lab: ModuleType, params: dict[str, object], link: float
) -> None:
    prompts = lab.prompts_of(2, seed=5, low=4, high=20)
    params = {"max_tokens": 24, "ignore_eos": True, **params}
    latencies = Latencies(lambda rows: STEP + rows * 1e-4, lambda rows: 0.001 * rows, link)
    _, worker, remote, ids = run(lab, prompts, latencies, **params)
    assert ids == plain(lab, prompts, **params)
    assert not remote.books and worker.kv.used == 0


def test_a_sequence_that_starts_over_is_another_stream(lab: ModuleType) -> None:
    prompts = lab.prompts_of(3, seed=9, low=10, high=20)
    params: dict[str, object] = {"max_tokens": 24, "ignore_eos": True}
    latencies = Latencies(flat(STEP), lambda rows: 0.0005 * rows, 0.002)
    out, worker, remote, ids = run(lab, prompts, latencies, pool=80, **params)
    assert any(step.preempted for step in out.steps)
    assert ids == plain(lab, prompts, **params)
    assert not remote.books and worker.kv.used == 0 and len(worker.stats) > len(prompts)


def test_logs_replay(lab: ModuleType) -> None:
    prompts = lab.prompts_of(2, seed=1, low=4, high=20)
    latencies = Latencies(flat(STEP), lambda rows: 0.002 + 1e-4 * rows, 0.003)
    first, again = (
        run(lab, prompts, latencies, max_tokens=20, ignore_eos=True, patience=0.004)[0] for _ in range(2)
    )
    assert first.busy == again.busy and first.wall == again.wall and first.waited == again.waited
    assert first.kind == "simulated"
    sides = {side: [b for b in first.busy if b.side == side] for side in ("target", "draft")}
    for spans in sides.values():  # one thing at a time on each side
        assert spans and all(a.end <= b.start + 1e-12 for a, b in pairwise(spans))
    assert 0 < first.hidden() <= 1 and 0 < first.utilisation("target") <= 1  # type: ignore[operator]


def test_a_link_that_never_delivers_is_plain_decoding(lab: ModuleType) -> None:
    prompts = lab.prompts_of(1, seed=2, low=8, high=12)
    out, _, remote, ids = run(
        lab, prompts, Latencies(flat(STEP), flat(0.001), 1e9), max_tokens=16, ignore_eos=True
    )
    assert out.wall == pytest.approx(STEP * len(ids[0]))
    assert remote.empty == len(ids[0]) - 2 and not any(s.draft for s in out.steps)


@pytest.mark.parametrize("cost", [1e-6, 0.1, 0.2, 0.5, 1.0])
def test_a_perfect_drafter_on_no_link_costs_the_longer_side(lab: ModuleType, cost: float) -> None:
    gamma, tokens = 4, 101
    prompts = lab.prompts_of(1, seed=3, low=8, high=12)
    out, worker, _, ids = run(
        lab,
        prompts,
        Latencies(flat(STEP), flat(STEP * cost), 0.0),
        layers=(0, 1),
        budget=gamma,
        patience=1.0,
        growth=Growth(width=1, top=1, max_nodes=32, max_depth=24),
        max_tokens=tokens,
        ignore_eos=True,
    )
    gain = STEP * (tokens - 1) / (out.wall - STEP)  # behind the prompt's own step
    # A round takes γ drafts and the token behind them, all of which the drafter made: γ + 1 levels.
    expected = predict.parallel(gamma + 1, gamma + 1, 1.0, cost)
    assert gain == pytest.approx(expected, rel=0.08)
    assert gain <= expected * 1.02
    # The last token has no room for a draft: the target may be there first.
    assert worker.stats[0].rounds - worker.stats[0].hits <= 1 and len(ids[0]) == tokens


def test_a_negative_latency_is_refused() -> None:
    with pytest.raises(OptionError):
        Latencies(flat(1.0), flat(1.0), -1.0)
