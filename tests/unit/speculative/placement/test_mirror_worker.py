"""Mirror's two sides over their messages: exact output, right branches, nothing made for a stale base."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from workbench.engine.engine import Engine
from workbench.engine.split_runner import SplitRunner
from workbench.speculative.draft_model import cut_out
from workbench.speculative.placement.here import HereLink
from workbench.speculative.placement.messages import Candidates, Close, DraftSync, TailStream, VerifyCommit
from workbench.speculative.placement.mirror_target import MirrorTarget
from workbench.speculative.placement.mirror_worker import MirrorWorker, Windows
from workbench.speculative.placement.placed import Place
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.speculative.verify import ExactVerify

pytestmark = pytest.mark.usefixtures("inference")
VOCAB = 61


def run(
    lab: ModuleType,
    prompts: list[list[int]],
    *,
    windows: Windows,
    peek: int = 1,
    layers: tuple[int, ...] = (0,),
    early: int = -1,
    **params: object,
) -> tuple[MirrorTarget, list[list[int]], list[tuple[int, ...]], HereLink]:
    """``early``: batches that the drafter gets done before a verdict comes (-1: all there are)."""
    base = lab.make_engine("paged", page_size=4)
    target = MirrorTarget(
        "mirror_sd", Place(layers, windows, "here"), windows, peek_layers=peek, patience=5.0
    )
    target.attach_target(base.executor.decoder)
    link = target._link
    assert isinstance(link, HereLink)
    if early >= 0:
        send, commit = link.send, target.commit

        def late(message: object) -> None:
            send(message)  # type: ignore[arg-type]
            if isinstance(message, Candidates):
                for _ in range(early):
                    assert link.worker.work()[0] is None  # a branch is no window yet

        def deaf(seq: int, tokens: list[int]) -> None:
            receive, target._receive = target._receive, lambda wait: False  # type: ignore[method-assign]
            commit(seq, tokens)
            target._receive = receive  # type: ignore[method-assign]

        link.send, target.commit = late, deaf  # type: ignore[method-assign, assignment]
    engine = Engine(
        base.executor,
        base.kv,
        base.scheduler,
        context=256,
        drafter=target,
        runner=SplitRunner(base.executor, target),
        verify=ExactVerify(),
    )
    ran = lab.run_engine(engine, prompts, **params)
    ids = [ran.ids(f"r{i}") for i in range(len(prompts))]
    drafts = [d.tokens for step in ran.steps for d in step.drafts]
    assert link.worker.kv.used == 0
    return target, ids, drafts, link


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("early", [-1, 0, 1, 3])
@pytest.mark.parametrize("kappa", [1, 3])
def test_output_is_the_plain_runs_however_far_the_branches_came(
    lab: ModuleType, params: dict[str, object], early: int, kappa: int
) -> None:
    prompts = lab.prompts_of(2, seed=4, low=4, high=20)
    params = {"max_tokens": 18, "ignore_eos": True, **params}
    ran = lab.run_engine(lab.make_engine("paged"), prompts, **params)
    target, ids, drafts, _ = run(lab, prompts, windows=Windows(3, kappa), early=early, **params)
    assert ids == [ran.ids("r0"), ran.ids("r1")]
    # What was made ahead is what would have been drafted afresh: reuse changes no window.
    assert drafts == run(lab, prompts, windows=Windows(3, 1), early=0, **params)[2]
    assert target.windows and (target.reused == 0) == (early == 0)


def test_a_proxy_that_knows_every_token_foresees_every_verdict(lab: ModuleType) -> None:
    prompts = lab.prompts_of(1, seed=8, low=6, high=12)
    target, *_ = run(lab, prompts, windows=Windows(1, VOCAB), max_tokens=16, ignore_eos=True)
    assert target.reuse_rate == 1.0 and target.reused == target.windows - 1


def test_more_candidates_foresee_more(lab: ModuleType) -> None:
    prompts = lab.prompts_of(2, seed=8, low=6, high=12)
    settings = {"max_tokens": 24, "ignore_eos": True}
    few, some, more = (
        run(lab, prompts, windows=Windows(2, kappa), **settings)[0].reuse_rate for kappa in (1, 8, 40)
    )
    assert few is not None and some is not None and more is not None
    assert few <= some <= more and few < more


def sides(lab: ModuleType, windows: Windows) -> MirrorWorker:
    target = lab.make_engine("paged").executor.decoder
    return MirrorWorker(TreeKV(cut_out(target, (0,))), windows)


def window_of(worker: MirrorWorker) -> TailStream:
    while True:
        tail, _ = worker.work()
        if tail is not None:
            return tail


def test_a_random_interleaving_makes_nothing_for_a_stale_base(lab: ModuleType) -> None:
    worker = sides(lab, Windows(2, 2))
    draw = random.Random(5)
    tokens = [5, 9, 40]
    worker.handle(DraftSync(1, tuple(tokens)))
    stale: list[Candidates] = []
    for _ in range(60):
        tail = window_of(worker)
        assert tail.base_len == len(tokens) and len(tail.nodes) == 2
        assert [n.pos for n in tail.nodes] == [len(tokens), len(tokens) + 1]
        window = [n.token for n in tail.nodes]
        places = tuple(tuple((draw.randrange(VOCAB), -1.0) for _ in range(3)) for _ in range(3))
        told = Candidates(1, len(tokens), places)
        for old in draw.sample(stale, min(2, len(stale))):
            worker.handle(old)
            assert not worker.has_work  # nobody asked for these branches
        if draw.random() < 0.8:
            worker.handle(told)
            for _ in range(draw.randrange(4)):
                if worker.has_work:
                    worker.work()
        stale.append(told)
        accepted = draw.randrange(3)
        own = draw.choice([places[accepted][0][0], draw.randrange(VOCAB)])
        verdict = (*window[:accepted], own)
        answer = worker.handle(VerifyCommit(1, len(tokens), verdict))
        tokens += verdict
        if answer is not None:
            assert answer.reused and answer.base_len == len(tokens)
            # What was made ahead equals what a fresh drafter makes of the committed ids.
            fresh = sides(lab, Windows(2, 2))
            fresh.handle(DraftSync(1, tuple(tokens)))
            assert [n.token for n in window_of(fresh).nodes] == [n.token for n in answer.nodes]
            worker.handle(Close(1))
            worker.handle(DraftSync(1, tuple(tokens)))
        if len(tokens) > 100:
            break
    worker.handle(Close())
    assert worker.closed and worker.kv.used == 0 and worker.out_of_step == 0


def test_a_verdict_out_of_step_ends_the_stream(lab: ModuleType) -> None:
    worker = sides(lab, Windows(2, 2))
    worker.handle(DraftSync(1, (5, 9)))
    assert worker.handle(VerifyCommit(1, 7, (3,))) is None
    assert worker.out_of_step == 1 and not worker.has_work and worker.kv.used == 0
    assert worker.handle(VerifyCommit(1, 2, (3,))) is None


def test_where_positions_end_an_empty_window_says_so(lab: ModuleType) -> None:
    worker = sides(lab, Windows(2, 2))
    limit = worker.kv.limit
    worker.handle(DraftSync(1, tuple([5] * (limit - 3))))
    assert worker.work()[0] == TailStream(1, limit - 3, ())
    assert not worker.has_work
