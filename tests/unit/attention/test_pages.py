"""The fast form against the oracle: ragged batches on permuted pages whose unused slots are poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.attention.pages import TorchPages
from workbench.attention.reference import ReferenceAttention, attend
from workbench.engine.seams import AttentionShape, AttentionSpan

KINDS = st.lists(st.sampled_from(["decode", "chain", "tree", "chunk"]), min_size=1, max_size=4)
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-5}


@settings(max_examples=settings().max_examples // 2)
@given(
    seed=st.integers(0, 10**6),
    kinds=KINDS,
    page=st.sampled_from([4, 16, 64]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 8]),
    head_dim=st.sampled_from([40, 63, 64, 80, 96, 128]),
    window=st.sampled_from([None, None, 1, 5, 33]),
    soft_cap=st.sampled_from([None, 2.0]),
    shared=st.integers(0, 2),
    scatter=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    poison=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
)
def test_ragged_batches_equal_the_oracle(make_case, dtype, seed, kinds, **options):
    case = make_case(seed, kinds, **options).to(dtype)
    out, want = case.run(TorchPages()), case.oracle()
    assert out.dtype == dtype and (out.double() - want).abs().max() <= LIMIT[dtype]


@pytest.mark.parametrize("kind", ["decode", "chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_att_04_unused_slots_never_reach_an_output(kind, dtype):
    torch.manual_seed(0)
    n = 1 if kind == "decode" else 5
    span, shape = AttentionSpan(n, 5 - n, [2, 0], range(5 - n, 5)), AttentionShape(3, 1, 8, 4)
    q, k, v = torch.randn(n, 3, 8), torch.randn(3, 1, 4, 8), torch.randn(3, 1, 4, 8)
    outs = []
    for fill in (float("nan"), float("inf"), 0.0):
        for t in (k, v):
            t[0, :, 1:], t[1] = fill, fill
        op = TorchPages()
        outs.append(op.run(op.prepare([span], shape), q, k.to(dtype), v.to(dtype)))
    assert outs[0].isfinite().all() and torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("kinds", [["decode", "tree"], ["chunk"]])
def test_att_06_views_give_what_contiguous_copies_give(make_case, kinds):
    case = make_case(3, kinds, page=4, kv_heads=2, group=2, head_dim=16, poison=0.0)
    rows, pages = case.q.shape[0], case.k.shape[0]
    fused = torch.zeros(rows, 12, 16)  # q, k and v projections of one buffer
    fused[:, 2:6] = case.q
    pool = torch.zeros(pages, 4, 2, 2, 16)  # token-major, K and V interleaved
    pool[:, :, 0] = case.k.transpose(1, 2)
    strided = torch.zeros(16, *case.v.shape[:3])  # last stride is not 1
    strided[:] = case.v.permute(3, 0, 1, 2)
    q, k, v = fused[:, 2:6], pool[:, :, 0].transpose(1, 2), strided.permute(1, 2, 3, 0)
    assert v.stride(-1) != 1 and not k.is_contiguous() and not q.is_contiguous()
    before = (fused.clone(), pool.clone(), strided.clone())
    op = TorchPages()
    out = op.run(op.prepare(case.spans, case.shape), q, k, v)
    torch.testing.assert_close(out, case.run(TorchPages()), atol=1e-6, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(before, (fused, pool, strided), strict=True))


@pytest.mark.parametrize("head_dim", [40, 63, 80, 96, 128])
@pytest.mark.parametrize("length", [1, 17, 63, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_att_07_any_head_size_and_length(head_dim, length, dtype):
    torch.manual_seed(length)
    shape, pages = AttentionShape(2, 1, head_dim, 16), -(-length // 16)
    table = torch.randperm(pages).tolist()
    q = (torch.randn(length, 2, head_dim) * head_dim**-0.5).to(dtype).float()
    k, v = torch.randn(2, pages, 1, 16, head_dim).to(dtype)
    chunk = AttentionSpan(length, 0, table, range(length))
    last = AttentionSpan(1, length - 1, table, [length - 1])
    op, oracle = TorchPages(), ReferenceAttention()
    want = oracle.run(oracle.prepare([chunk], shape), q, k, v)
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    assert (op.run(op.prepare([chunk], shape), q, k, v) - want).abs().max() <= limit
    assert (op.run(op.prepare([last], shape), q[-1:], k, v) - want[-1:]).abs().max() <= limit


def naive(q, k, v, mask):
    """The textbook form in the inputs' dtype: every intermediate is rounded to it."""
    s = torch.einsum("thd,nhd->htn", q, k).masked_fill(~mask, float("-inf"))
    return torch.einsum("htn,nhd->thd", s.softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("rows", [256, 16, 1])
def test_att_08_error_is_at_most_twice_that_of_the_naive_form(dtype, page, rows):
    torch.manual_seed(page)
    n, dim, heads = 256, 64, 3
    q = (torch.randn(n, heads, dim) * dim**-0.5).to(dtype)
    k, v = torch.randn(n, heads, dim).to(dtype), torch.randn(n, heads, dim).to(dtype)
    mask = torch.ones(n, n).tril().bool()
    want = attend(q.double(), k.double(), v.double(), mask).flatten(1)[-rows:]
    allowed = 2 * (naive(q, k, v, mask).flatten(1)[-rows:].double() - want).abs().max() + 1e-5
    pool_k, pool_v = (t.view(n // page, page, heads, dim).transpose(1, 2).contiguous() for t in (k, v))
    op = TorchPages()
    spans = [AttentionSpan(rows, n - rows, range(n // page), range(n - rows, n))]
    plan = op.prepare(spans, AttentionShape(heads, heads, dim, page))
    out = op.run(plan, q[-rows:].float(), pool_k, pool_v)
    assert (out.double() - want).abs().max() <= allowed


@pytest.mark.parametrize("window", [None, 6])
def test_a_reused_plan_gives_what_a_fresh_one_gives(window):
    torch.manual_seed(0)
    page, parents = 8, [[-1, 0, 0], [-1, -1, 1]]
    shape = AttentionShape(6, 2, 16, page, window)
    tables = [[5, 2, 9], [5, 7, 1], [0, 8]]
    k, v = torch.full((2, 10, 2, page, 16), float("nan"))
    for table, start in zip(tables, (19, 17, 9), strict=True):
        for s in range(start):
            k[table[s // page], :, s % page], v[table[s // page], :, s % page] = torch.randn(2, 2, 16)
    op, plan, reused = TorchPages(), None, 0
    for step in range(5):
        chain, tree = range(19 + step, 20 + step), parents[step % 2]
        deep = [17 + step, 18 + step, 18 + step] if step % 2 == 0 else [17 + step, 17 + step, 18 + step]
        spans = [
            AttentionSpan(1, 19 + step, tables[0], chain),
            AttentionSpan(3, 17 + step, tables[1], deep, tree),
            AttentionSpan(2, 9 + step, tables[2], [9 + step, 10 + step]),
        ]
        for span in spans:
            for s in range(span.start, span.start + span.n_new):
                at = (span.table[s // page], slice(None), s % page)
                k[at], v[at] = torch.randn(2, 2, 16)
        q = torch.randn(6, 6, 16)
        before = plan
        plan = op.prepare(spans, shape, plan)
        reused += before is not None and plan.short is before.short
        out, oracle = op.run(plan, q, k, v), ReferenceAttention()
        want = oracle.run(oracle.prepare(spans, shape), q.double(), k.double(), v.double())
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
    assert reused >= (1 if window else 2)


def test_reuse_before_the_first_run_still_zeroes_unused_slots():
    op, shape = TorchPages(), AttentionShape(1, 1, 4, 4)
    plan = op.prepare([AttentionSpan(1, 0, [0], [0])], shape)
    plan = op.prepare([AttentionSpan(1, 1, [0], [1])], shape, plan)
    k, v = torch.full((2, 1, 1, 4, 4), float("nan"))
    k[:, :, :2], v[:, :, :2] = 1.0, 2.0
    assert torch.equal(op.run(plan, torch.ones(1, 1, 4), k, v), torch.full((1, 4), 2.0))


def test_shared_pages_are_read_once_and_pages_behind_the_window_not_at_all():
    op, prefix = TorchPages(), [0, 1, 2]
    spans = [AttentionSpan(1, 15, [*prefix, 3 + i], [15]) for i in range(4)]
    plan = op.prepare(spans, AttentionShape(6, 2, 8, 4)).short
    assert sorted(p for run in plan.runs for p in run.pages) == [0, 1, 2, 3, 4, 5, 6]
    plan = op.prepare(spans, AttentionShape(6, 2, 8, 4, window=8)).short
    assert sorted(p for run in plan.runs for p in run.pages) == [2, 3, 4, 5, 6]


def test_nothing_but_unused_slots_of_the_pool_is_written(make_case):
    case = make_case(5, ["decode", "tree", "decode"], page=16, shared=1, window=9)
    k, v = case.k.clone(), case.v.clone()
    op = TorchPages()
    op.run(op.prepare(case.spans, case.shape), case.q, k, v)
    for new, old in ((k, case.k), (v, case.v)):
        assert torch.equal(new[old.isfinite()], old[old.isfinite()])


def test_buffers_are_counted():
    op = TorchPages()
    assert op.nbytes() == 0
    plan = op.prepare([AttentionSpan(1, 0, [0], [0])], AttentionShape(1, 1, 8, 4))
    op.run(plan, torch.zeros(1, 1, 8), *torch.zeros(2, 1, 1, 4, 8))
    assert op.nbytes() == 4 * (2 * 4 + 2 * 8)
