"""The drafter's tree with its KV: what survives a verdict equals what would be computed afresh."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from workbench.models.decoder import Decoder
from workbench.speculative.placement.draft_stream import DraftStream
from workbench.speculative.placement.messages import ROOT, Close, DraftSync, TailStream, VerifyCommit
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.speculative.placement.worker import DraftWorker, Growth

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def model(lab: ModuleType) -> Decoder:
    decoder: Decoder = lab.make_engine("paged").executor.decoder
    return decoder


def fresh(model: Decoder, context: list[int], top: int) -> dict[int, float]:
    """The likeliest tokens behind a context and their chances, computed from nothing."""
    kv = TreeKV(model)
    slots = kv.take(len(context))
    sees = [slots[: i + 1] for i in range(len(context))]
    row = kv.feed(context, range(len(context)), slots, sees, 1).logits[0].log_softmax(-1)
    values, ids = row.topk(top)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def plain_logits(lab: ModuleType, context: list[int], family: str) -> torch.Tensor:
    """What the engine computes behind a context."""
    rows: list[tuple[int, int, torch.Tensor]] = []
    engine = lab.make_engine("paged", family=family)
    lab.record_logits(engine, rows)
    lab.run_engine(engine, [context], max_tokens=1)
    return rows[-1][2]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_context_in_slots_gives_the_engines_logits(lab: ModuleType, family: str) -> None:
    model = lab.make_engine("paged", family=family).executor.decoder
    (context,) = lab.prompts_of(1, seed=3, low=40, high=60)
    kv = TreeKV(model)
    slots = kv.take(len(context))
    random.Random(0).shuffle(slots)
    sees = [slots[: i + 1] for i in range(len(context))]
    own = kv.feed(context, range(len(context)), slots, sees, 1).logits[0]
    torch.testing.assert_close(own, plain_logits(lab, context, family), rtol=1e-9, atol=1e-9)


def test_survivors_equal_a_fresh_computation(model: Decoder) -> None:
    draw = random.Random(1)
    kv = TreeKV(model)
    stream = DraftStream(kv, [3, 1, 4, 1, 5], top=3, max_nodes=14, max_depth=5)
    hits = evicted = 0
    for _ in range(40):
        for _ in range(draw.randint(0, 4)):
            stream.grow(draw.randint(1, 3))
            stream.check()
        for node in draw.sample(list(stream.tree.nodes), min(2, len(stream.tree))):
            at = stream.tree.nodes[node]
            known = fresh(model, [*stream.tokens, *stream.tree.tokens(node)[:-1]], 3)
            assert at.chance == pytest.approx(known[at.token], abs=1e-9)
        chosen = stream.tree.best(6)
        tokens = stream.tree.tokens(draw.choice(chosen)) if chosen and draw.random() < 0.8 else []
        tokens = tokens if tokens and draw.random() < 0.7 else [*tokens, draw.randint(0, 60)]
        hits += stream.commit(tokens).hit
        stream.check()
    evicted = stream.tree.stats.evicted
    assert hits > 5 and evicted > 5 and stream.tree.stats.hits == hits
    stream.close()
    assert kv.used == 0


def test_what_was_foreseen_is_not_computed_again(model: Decoder) -> None:
    stream = DraftStream(TreeKV(model), [3, 1, 4], top=1, max_nodes=8, max_depth=8)
    _, rows = stream.grow(1)
    assert rows == 3  # the prompt
    for _ in range(3):
        assert stream.grow(1)[1] == 1
    best = stream.tree.best(3)
    done = stream.commit([stream.tree.nodes[n].token for n in best])
    assert done.hit and done.kept == 1
    assert stream.grow(1)[1] == 1  # the next leaf, nothing of the accepted path
    miss = (stream.tree.nodes[stream.tree.below[0]].token + 1) % 61
    stream.commit([miss])
    assert stream.batch(4) == [ROOT] and stream.grow(1)[1] == 1


def test_a_worker_serves_its_streams_in_turn_and_ends_them(model: Decoder) -> None:
    kv = TreeKV(model)
    worker = DraftWorker(kv, Growth(width=2, top=2, max_nodes=6, max_depth=3))
    assert not worker.has_work and worker.work() == (None, 0)
    for number in (1, 2):
        assert worker.handle(DraftSync(number, (5, 6, number))) is None
    tails = [worker.work()[0] for _ in range(4)]
    assert [t.stream for t in tails if t] == [1, 2, 1, 2]
    while worker.has_work:
        worker.work()
    told = worker.handle(VerifyCommit(1, 3, (tails[0].nodes[0].token,)))  # type: ignore[union-attr]
    assert isinstance(told, TailStream) and told.base_len == 4 and told.nodes
    assert worker.handle(VerifyCommit(2, 9, (1,))) is None and worker.out_of_step == 1
    assert worker.handle(VerifyCommit(7, 1, (1,))) is None  # a stream nobody knows
    assert list(worker.streams) == [1] and not worker.closed
    worker.handle(Close())
    assert worker.closed and kv.used == 0 and len(worker.stats) == 2
