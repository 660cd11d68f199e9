"""The radix tree in the engine: token-exact hits, copied heads, and which request goes first."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from workbench.engine import scheduler
from workbench.engine.params import SamplingParams
from workbench.engine.radix import RadixIndex
from workbench.engine.sequence import Request

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def engine4(lab: ModuleType):
    """Engines with pages of 4 slots."""

    def make(*uses: str, pages: int = 64, **kwargs):
        return lab.make_engine("paged", *uses, page_size=4, pool=pages * 4, **kwargs)

    return make


FIRST = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
# Prompt, tokens of FIRST's KV it can use: FIRST and its 4 output tokens fill three pages.
SECOND = [
    ([3, 1, 4, 1, 5, 9, 7, 7, 7], 6),
    ([3, 1, 4, 7], 3),
    (FIRST, 10),
    ([7, 1, 4, 1, 5], 0),
    ([*FIRST[:8], 7, 7], 8),
]


@pytest.mark.parametrize("codec", ["", "kv_fp8", "kv_int8"])
@pytest.mark.parametrize(("prompt", "cached"), SECOND)
def test_a_prompt_reuses_every_token_it_shares(lab, engine4, prompt, cached, codec):
    uses = ("radix_cache", codec) if codec else ("radix_cache",)
    engine = engine4(*uses)
    lab.run_engine(engine, [FIRST], max_tokens=4)
    held = engine.kv.stores[0].planes["k"].clone()
    second = lab.run_engine(engine, [prompt], max_tokens=6)
    cold = lab.run_engine(engine4(*uses), [prompt], max_tokens=6)
    assert second.cached() == cached
    assert second.ids() == cold.ids()
    assert second.steps[0].prefill + second.steps[0].decode == len(prompt) - cached
    engine.kv.check()
    # The first prompt's pages are as they were, though the second wrote behind a shared head.
    assert lab.run_engine(engine, [FIRST], max_tokens=4).cached() == len(FIRST) - 1
    for page in engine.kv.pools[0].cached_pages()[:3]:
        assert page < held.shape[1]


def test_the_page_a_head_was_copied_from_keeps_its_bytes(lab, engine4):
    engine = engine4("radix_cache")
    lab.run_engine(engine, [FIRST], max_tokens=4)
    pages = engine.kv.pools[0].cached_pages()
    before = {n: p[:, pages].clone() for n, p in engine.kv.stores[0].planes.items()}
    lab.run_engine(engine, [[3, 1, 7, 7, 7, 7]], max_tokens=4)
    for name, plane in engine.kv.stores[0].planes.items():
        assert torch.equal(plane[:, pages], before[name])


def test_a_head_is_copied_even_when_its_page_is_the_next_to_be_evicted(lab, engine4):
    """The page is held while the copy's own page is taken from the pool."""
    engine = engine4("radix_cache", pages=4)
    lab.run_engine(engine, [FIRST[:4]], max_tokens=1)  # one cached page, three clean ones
    prompt = [*FIRST[:3], 7, 7, 7, 7, 7, 7, 7, 7]
    second = lab.run_engine(engine, [prompt], max_tokens=1)
    assert second.ids() == lab.run_engine(engine4(), [prompt], max_tokens=1).ids()
    assert second.cached() == 3
    engine.kv.check()


def test_formats_that_code_whole_pages_share_full_pages_only(lab):
    engine = lab.make_engine("paged:page_size=32", "radix_cache", "kivi:residual=32,group=32", pool=512)
    prompt = lab.prompts_of(1, seed=3, low=70, high=71)[0]
    lab.run_engine(engine, [prompt], max_tokens=2)
    assert lab.run_engine(engine, [[*prompt[:45], 1, 2, 3]], max_tokens=2).cached() == 32


def test_a_salt_keeps_trees_apart(lab, engine4):
    engine = engine4("radix_cache")
    lab.run_engine(engine, [FIRST], max_tokens=4)
    engine.add(Request("r0", tuple(FIRST), SamplingParams(max_tokens=1), salt="mine"))
    sequence = engine.sequences("r0")[0]
    while engine.has_work:
        engine.step()
    assert sequence.cached_tokens == 0


def test_the_tree_never_finds_less_than_the_chain_and_less_than_a_page_more(lab, engine4):
    """A hundred prompts that diverge anywhere, one after the other."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3) for _ in range(12)]]
    while len(prompts) < 100:
        old = rng.choice(prompts)
        keep = rng.randrange(len(old) + 1)
        prompts.append((old[:keep] + [rng.randrange(3) for _ in range(12)])[:24])
    tree, chain = engine4("radix_cache", pages=900), engine4("prefix_cache", pages=900)
    more = 0
    for prompt in prompts:
        a = lab.run_engine(tree, [prompt], max_tokens=1)
        b = lab.run_engine(chain, [prompt], max_tokens=1)
        assert a.ids() == b.ids()
        assert 0 <= a.cached() - b.cached() < 4
        more += a.cached() - b.cached()
    assert more > 50


def test_drafted_and_rejected_tokens_never_get_into_the_tree(lab, engine4):
    engine = engine4("radix_cache", "ngram:k=4")
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    out = lab.run_engine(engine, [prompt], max_tokens=12)
    known = {tuple(prompt + out.ids())[: (n + 1) * 4] for n in range(5)}
    held = [page for node in engine.kv.index.nodes() for page in node.pages.values()]
    assert len(held) >= 4
    for page in held:
        spelled, link = (), page
        while link is not None:
            spelled, link = link.tokens + spelled, link.parent
        assert spelled in known


def admitted(engine, prompts):
    """The order in which requests get their first token, with room for one at a time."""
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"r{i}", tuple(prompt), SamplingParams(max_tokens=1)))
    order = []
    while engine.has_work:
        _, events = engine.step()
        order += [e.request_id for e in events if e.tokens and e.request_id not in order]
    return order


def test_the_longest_match_goes_first_and_equals_by_arrival(lab, engine4):
    prompts = [[7, 7, 7, 7, 7], [8, 8, 8, 8, 8], [*FIRST[:6], 7], [*FIRST, 7]]
    for uses, expected in (
        (("radix_cache",), ["r3", "r2", "r0", "r1"]),
        (("radix_cache:order=arrival",), ["r0", "r1", "r2", "r3"]),
        (("prefix_cache",), ["r0", "r1", "r2", "r3"]),
    ):
        engine = engine4(*uses, sequences=1)
        lab.run_engine(engine, [FIRST], max_tokens=4)
        assert admitted(engine, prompts) == expected, uses


def test_a_request_is_not_overtaken_for_ever(lab, engine4, monkeypatch):
    monkeypatch.setattr(scheduler, "PATIENCE", 3)
    engine = engine4("radix_cache", sequences=1, pages=128)
    lab.run_engine(engine, [FIRST], max_tokens=4)
    order = admitted(engine, [[7, 7, 7, 7], *([*FIRST[:9], 8, i] for i in range(8))])
    assert order.index("r0") == 3


def test_a_namespace_without_pages_leaves_no_tree():
    index = RadixIndex(4)
    kept, _ = index.publish(None, (1, 2, 3, 4), b"kept", (1,))
    for i in range(20):
        index.publish(None, (1, 2, 3, 4), b"salt %d" % i, (2,))
        index.drop_page(0, 2)
    assert [node.start for node in index.nodes()] == [0, 0]  # the root of one tree and its leaf
    assert index.match((1, 2, 3, 4, 5), b"kept", 4).full == [kept]
    index.drop_page(0, 1)
    assert list(index.nodes()) == [] and len(index) == 0
    again, _ = index.publish(kept, (5, 6, 7, 8), b"kept", (3,))  # a sequence may hold the dropped page
    assert again.parent is kept
