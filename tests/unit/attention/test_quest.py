"""Quest against its definition: bounds that hold, pages chosen per KV head, and nothing else left out."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.attention.pages import TorchPages
from workbench.attention.pinned import PinnedAttention
from workbench.attention.quest import Config, QuestAttention, best_pages, page_bounds
from workbench.engine.bounds import LayerBounds
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.seams import AttentionShape, AttentionSpan
from workbench.engine.sequence import Request
from workbench.spec.errors import InvariantError

pytestmark = pytest.mark.usefixtures("inference")

PAGE, HEADS, KV, DIM = 16, 4, 2, 8
SHAPE = AttentionShape(HEADS, KV, DIM, PAGE)
CPU = torch.device("cpu")


def quest(budget: int = 48, dense_layers: int = 0, pinned: bool = True) -> QuestAttention:
    dense: Any = PinnedAttention() if pinned else TorchPages()
    return QuestAttention(Config(budget, dense_layers), dense, CPU, pinned)


def pool(pages: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(pages, KV, PAGE, DIM, generator=gen, dtype=torch.float64) for _ in "kv")
    return k * 2, v


def bounds_of(k: torch.Tensor, layer: int = 0) -> LayerBounds:
    return LayerBounds(layer, k.amin(2), k.amax(2))


def definition(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, table: list[int], own: list[int], count: int
) -> np.ndarray:
    """One token's output [Hq, D]: ``own`` are the slots it sees of the last page; loops and sums only."""
    out = np.zeros((HEADS, DIM))
    for h in range(KV):
        heads = range(h * HEADS // KV, (h + 1) * HEADS // KV)
        bound = [
            max(
                sum(max(q[x, d] * k[p, h, :, d].min(), q[x, d] * k[p, h, :, d].max()) for d in range(DIM))
                for x in heads
            )
            for p in table[:-1]
        ]
        best = sorted(sorted(range(len(bound)), key=lambda i: -bound[i])[:count])
        seen = [(table[i], s) for i in best for s in range(PAGE)] + [(table[-1], s) for s in own]
        for x in heads:
            logits = np.array([float(q[x] @ k[p, h, s]) for p, s in seen])
            e = np.exp(logits - logits.max())
            out[x] = sum(w * v[p, h, s] for w, (p, s) in zip(e / e.sum(), seen, strict=True))
    return out


@given(seed=st.integers(0, 999), pages=st.integers(1, 9), group=st.integers(1, 4))
def test_no_logit_of_a_page_is_above_its_bound(seed: int, pages: int, group: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    k = torch.randn(pages, KV, PAGE, DIM, generator=gen, dtype=torch.float64)
    q = torch.randn(KV, group, DIM, generator=gen, dtype=torch.float64)
    found = page_bounds(q, k.amin(2), k.amax(2))
    logits = torch.einsum("hgd,nhpd->hngp", q, k)
    assert bool((found[..., None, None] >= logits - 1e-12).all())
    channel = torch.maximum(
        q[:, :, None] * k.amin(2).transpose(0, 1)[:, None], q[:, :, None] * k.amax(2).transpose(0, 1)[:, None]
    )
    torch.testing.assert_close(found, channel.sum(-1).amax(1))


def test_equal_bounds_keep_the_older_page() -> None:
    assert best_pages(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]]), 3).tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("start", [48, 63, 100, 111])
def test_a_decode_reads_the_pages_of_the_definition(start: int, pinned: bool) -> None:
    k, v = pool(12, seed=start)
    table = [7, 2, 9, 4, 11, 1, 5, 3][: start // PAGE + 1]
    v[table[-1], :, start % PAGE + 1 :] = float("nan")
    k[table[-1], :, start % PAGE + 1 :] = float("nan")
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    op = quest(pinned=pinned)
    plan = op.prepare([AttentionSpan(1, start, table, [start], decodes=True)], SHAPE)
    got = op.run(plan, q, k, v, bounds_of(k)).view(HEADS, DIM)
    expected = definition(q[0].numpy(), k.numpy(), v.numpy(), table, list(range(start % PAGE + 1)), 2)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)


def test_rows_of_a_draft_tree_choose_for_themselves_and_see_their_lineage() -> None:
    k, v = pool(9, seed=5)
    table, start = [8, 1, 6, 3, 2], 66
    parents = [-1, 0, 0, 2]
    q = torch.randn(4, HEADS, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    op = quest()
    plan = op.prepare([AttentionSpan(4, start, table, [66, 67, 67, 68], parents, decodes=True)], SHAPE)
    got = op.run(plan, q, k, v, bounds_of(k)).view(4, HEADS, DIM)
    for i, lineage in enumerate(([0], [0, 1], [0, 2], [0, 2, 3])):
        own = [0, 1, *(2 + j for j in lineage)]
        np.testing.assert_allclose(
            got[i].numpy(), definition(q[i].numpy(), k.numpy(), v.numpy(), table, own, 2), atol=1e-12
        )


@pytest.mark.parametrize("pinned", [True, False])
def test_prompts_short_sequences_and_first_layers_are_dense_bit_for_bit(pinned: bool) -> None:
    k, v = pool(12)
    op, dense = quest(dense_layers=2, pinned=pinned), quest(budget=4096, pinned=pinned)
    spans = [
        AttentionSpan(20, 40, [1, 2, 3, 4], list(range(40, 60))),
        AttentionSpan(1, 30, [5, 6], [30], decodes=True),
        AttentionSpan(1, 90, [7, 8, 9, 10, 11, 0], [90], decodes=True),
    ]
    q = torch.randn(22, HEADS, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    full = dense.run(dense.prepare(spans, SHAPE), q, k.clone(), v.clone(), bounds_of(k, 5))
    plan = op.prepare(spans, SHAPE)
    for layer in (0, 1):
        assert torch.equal(op.run(plan, q, k.clone(), v.clone(), bounds_of(k, layer)), full)
    sparse = op.run(plan, q, k.clone(), v.clone(), bounds_of(k, 2))
    torch.testing.assert_close(sparse[:21], full[:21], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(sparse[21], full[21], atol=1e-3)
    if pinned:
        assert torch.equal(sparse[:21], full[:21])


def test_a_block_that_leaves_its_page_is_refused() -> None:
    span = AttentionSpan(4, 62, [1, 2, 3, 4, 5], list(range(62, 66)), decodes=True)
    with pytest.raises(InvariantError, match="Cut blocks"):
        quest(budget=32).prepare([span], SHAPE)


# -- in an engine ----------------------------------------------------------------------------------------


SMALL = 4
USE = "quest:budget=32,dense_layers=0"  # eight pages of four


def engine(lab: ModuleType, *uses: str, **kwargs: Any) -> Engine:
    return lab.make_engine("paged", *uses, page_size=kwargs.pop("page_size", SMALL), **kwargs)


def said(made: Engine, prompts: Any, **params: Any) -> dict[Any, list[Any]]:
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "logprobs": 0, **params})
        made.add(Request(f"r{i}", tuple(prompt), sampling))
    out: dict[Any, list[Any]] = {}
    while made.has_work:
        _, events = made.step()
        made.kv.check()
        for e in events:
            out.setdefault((e.request_id, e.sample), []).extend((t.id, t.logprob) for t in e.tokens)
    return out


def repeating(lab: ModuleType) -> list[tuple[int, ...]]:
    piece = lab.prompts_of(1, seed=5, low=19, high=20)[0]
    return [(*piece, *piece, *piece), tuple(piece), (*piece, *piece)]


@pytest.mark.parametrize("numerics", ["pinned", "fast"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_budget_that_covers_everything_is_the_plain_run(
    lab: ModuleType, family: str, numerics: str
) -> None:
    prompts = repeating(lab)
    made = engine(lab, "quest:budget=256,dense_layers=0", family=family, numerics=numerics)
    assert said(made, prompts) == said(engine(lab, family=family, numerics=numerics), prompts)
    few = engine(lab, USE, family=family, numerics=numerics)
    assert said(few, prompts) != said(engine(lab, family=family, numerics=numerics), prompts)


@pytest.mark.parametrize(
    "beside",
    [
        ("chunked_prefill:budget=16",),
        ("ngram:k=6",),
        ("prefix_cache",),
        ("radix_cache",),
        ("ngram:k=6", "chunked_prefill:budget=16", "prefix_cache"),
    ],
    ids=str,
)
def test_chunks_drafts_and_prefixes_change_nothing(lab: ModuleType, beside: tuple[str, ...]) -> None:
    prompts = repeating(lab)
    expected = said(engine(lab, USE), prompts, max_tokens=30)
    made = engine(lab, USE, *beside)
    assert said(made, prompts, max_tokens=30) == expected
    assert said(made, prompts, max_tokens=30) == expected


def test_what_was_generated_is_no_prefix_of_a_prompt(lab: ModuleType) -> None:
    """Its keys were computed by queries that read a part: a prompt with the same text reads everything."""
    prompt = repeating(lab)[0]
    made = engine(lab, USE, "prefix_cache")
    first = said(made, [prompt], max_tokens=16)["r0", 0]
    longer = (*prompt, *(i for i, _ in first))
    assert said(made, [longer]) == said(engine(lab, USE), [longer])


def test_a_preempted_sequence_reads_the_same_again(lab: ModuleType) -> None:
    prompts = lab.prompts_of(4, seed=6, low=40, high=44)
    roomy = said(engine(lab, USE), prompts, max_tokens=24)
    tight = engine(lab, USE, pool=36 * SMALL)
    assert said(tight, prompts, max_tokens=24) == roomy


@pytest.mark.parametrize("codec", ["kv_int8", "kv_fp8:scale=token", "kivi:bits=4,group=32,residual=32"])
def test_bounds_are_those_of_the_keys_that_are_read(lab: ModuleType, codec: str) -> None:
    size = 32 if codec.startswith("kivi") else SMALL
    uses = (f"quest:budget={2 * size if size > 16 else 32},dense_layers=0", codec)
    made = engine(lab, *uses, page_size=size)
    prompt = lab.prompts_of(1, seed=2, low=140, high=141)[0]
    made.add(Request("a", tuple(prompt), SamplingParams(max_tokens=6, ignore_eos=True)))
    (seq,) = made.sequences("a")
    while seq.n_generated < 2:
        made.step()
    store = made.kv.stores[0]
    assert store.bounds is not None
    full = seq.tables[0][: 140 // size]
    read = store.plan_read(full)
    rows = torch.tensor(full if read.compact is None else [read.compact[p] for p in full])
    for layer in range(store.geometry.layers):
        keys = store.read(layer, read)[0].index_select(0, rows)
        assert torch.equal(store.bounds.low[layer, full], keys.amin(2))
        assert torch.equal(store.bounds.high[layer, full], keys.amax(2))
    expected = said(engine(lab, *uses, page_size=size), [prompt])
    assert said(engine(lab, *uses, "ngram:k=3", page_size=size), [prompt]) == expected


def test_a_page_that_changes_hands_forgets_its_bounds(lab: ModuleType) -> None:
    """A pool so small that every request gets the pages of the one before."""
    prompts = lab.prompts_of(3, seed=9, low=60, high=61)
    made = engine(lab, USE, pool=80)
    for prompt in prompts:
        assert said(made, [prompt]) == said(engine(lab, USE), [prompt])


def test_bounds_count_as_metadata(lab: ModuleType) -> None:
    made, plain = engine(lab, USE), engine(lab)
    store = made.kv.stores[0]
    assert store.bounds is not None
    geometry = store.geometry
    extra = 2 * geometry.layers * (geometry.pages + 1) * geometry.kv_heads * geometry.head_dim * 8
    assert store.nbytes()["kv_meta"] - plain.kv.stores[0].nbytes()["kv_meta"] == extra == store.bounds.nbytes
    assert store.nbytes()["kv_payload"] == plain.kv.stores[0].nbytes()["kv_payload"]
    windowed = engine(lab, USE, family="gemma3")
    assert [s.bounds is not None for s in windowed.kv.stores] == [
        g.window is None for g in windowed.executor.groups
    ]


def test_decoding_follows_the_definition_through_a_whole_model(lab: ModuleType) -> None:
    """A model that decodes with attention written out: pages of the first layers whole, then chosen."""
    made = engine(lab, "quest:budget=32,dense_layers=1")
    decoder = made.executor.decoder
    config = decoder.config
    prompt = lab.prompts_of(1, seed=4, low=61, high=62)[0]
    group = config.num_heads // config.num_kv_heads
    k: list[list[torch.Tensor]] = [[] for _ in range(config.num_layers)]
    v: list[list[torch.Tensor]] = [[] for _ in range(config.num_layers)]

    def attend(layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        k[layer].append(key[0])
        v[layer].append(value[0])
        keys, values, n = torch.stack(k[layer]), torch.stack(v[layer]), len(k[layer])
        out = []
        for h in range(config.num_kv_heads):
            own = q[0, h * group : (h + 1) * group]
            seen = list(range(n))
            pages = (n - 1) // SMALL
            if n > len(prompt) and layer >= 1 and pages + 1 > 8:
                bound = []
                for p in range(pages):
                    part = keys[p * SMALL : (p + 1) * SMALL, h]
                    low, high = part.amin(0), part.amax(0)
                    bound.append(max(float(torch.maximum(x * low, x * high).sum()) for x in own))
                best = sorted(range(pages), key=lambda p: -bound[p])[:7]
                seen = [t for t in range(n) if t // SMALL in best or t // SMALL == pages]
            weights = (own @ keys[seen, h].T).softmax(-1)
            out.append(weights @ values[seen, h])
        return torch.cat(out).reshape(1, -1)

    tokens, expected = list(prompt), []
    for index in range(len(prompt) + 11):
        logits = decoder.forward(torch.tensor([tokens[index]]), torch.tensor([index]), attend).logits
        if index >= len(prompt) - 1:
            law = logits[-1].log_softmax(-1)
            tokens.append(int(law.argmax()))
            expected.append((tokens[-1], float(law.max())))
    got = said(made, [prompt])["r0", 0]
    assert [i for i, _ in got] == [i for i, _ in expected]
    assert [p for _, p in got] == pytest.approx([p for _, p in expected], abs=1e-9)
