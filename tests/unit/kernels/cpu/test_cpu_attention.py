"""Compiled attention against the definition in float64, in the vector and the portable form."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch

from workbench.attention.compiled import CompiledPages
from workbench.attention.pages import TorchPages
from workbench.attention.reference import ReferenceAttention, attention_mask
from workbench.engine.seams import AttentionShape, AttentionSpan, PageGeometry
from workbench.kv.plain import PlainCodec

TREE = (-1, 0, 0, 1, -1, 4)
BATCH = ((150, 1, None), (0, 1, None), (63, 5, None), (100, 6, TREE), (211, 1, None), (40, 16, None))
SHAPES = {
    "gqa-64": AttentionShape(9, 3, 64, 64),
    "window": AttentionShape(9, 3, 64, 16, window=24),
    "cap-window-128": AttentionShape(8, 2, 128, 32, window=70, soft_cap=20.0),
    "mha-256": AttentionShape(4, 4, 256, 32),
    "mqa-odd": AttentionShape(5, 1, 22, 8, window=9, soft_cap=2.0),
}


def spans_of(shape: AttentionShape, batch: tuple, seed: int) -> tuple[list[AttentionSpan], int]:
    """Spans with scattered pages; page 0 belongs to nobody."""
    page = shape.page_size
    counts = [-(-(start + n) // page) for start, n, _ in batch]
    order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    spans = []
    for (start, n, parents), count in zip(batch, counts, strict=True):
        positions: list[int] = []
        for i in range(n):
            parent = i - 1 if parents is None else parents[i]
            positions.append(start if parent < 0 else positions[parent] + 1)
        table, order = tuple(order[:count]), order[count:]
        spans.append(AttentionSpan(n, start, table, tuple(positions), parents))
    return spans, sum(counts) + 1


def poison(pool: torch.Tensor, spans: list[AttentionSpan], shape: AttentionShape) -> None:
    """NaN wherever no row of any span may look."""
    page = shape.page_size
    unseen = torch.ones(pool.shape[0], page, dtype=torch.bool)
    for span in spans:
        for slot in attention_mask(span, shape).any(0).nonzero()[:, 0].tolist():
            unseen[span.table[slot // page], slot % page] = False
    pool.permute(0, 2, 1, 3)[unseen] = float("nan")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_ragged_batch_equals_the_definition(compiled_kernels: CDLL, name: str, threads: int) -> None:
    """Errors stay below the torch form's own; whatever lies in other slots does not matter."""
    shape = SHAPES[name]
    spans, pages = spans_of(shape, BATCH, threads)
    gen = torch.Generator().manual_seed(threads)
    k, v = (
        torch.randn(pages, shape.kv_heads, shape.page_size, shape.head_dim, generator=gen).bfloat16()
        for _ in range(2)
    )
    rows = sum(s.n_new for s in spans)
    q = torch.randn(rows, shape.heads, shape.head_dim, generator=gen) / shape.head_dim**0.5
    fused = torch.cat((q, torch.full_like(q[:, :1], float("nan"))), 1)[:, :-1]  # as a view of fused rows
    oracle = ReferenceAttention()
    expected = oracle.run(oracle.prepare(spans, shape), q.double(), k, v)
    torch_form = TorchPages()
    usual = torch_form.run(torch_form.prepare(spans, shape), q, k.clone(), v.clone())
    for pool in (k, v):
        poison(pool, spans, shape)
    op = CompiledPages(compiled_kernels)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = op.run(op.prepare(spans, shape), fused, k, v)
    finally:
        torch.set_num_threads(before)
    assert got.dtype is torch.float32 and got.shape == (rows, shape.heads * shape.head_dim)
    error, allowed = (got - expected).abs().max(), (usual - expected).abs().max()
    assert error <= 2 * allowed + 1e-6
    # Behind the rounding of q nothing is rounded before the last sum.
    exact = oracle.run(oracle.prepare(spans, shape), q.bfloat16().double(), k, v)
    assert (got - exact).abs().max() < 1e-5


def test_rows_of_kv_are_written_as_torch_writes_them(compiled_kernels: CDLL) -> None:
    """Byte for byte: from views of fused rows, of one head, and from tensors of another layout or dtype."""
    geometry = PageGeometry(layers=1, kv_heads=3, head_dim=22, page_size=8, pages=6, dtype=torch.bfloat16)
    gen = torch.Generator().manual_seed(0)
    fused = torch.randn(5, 8, 22, generator=gen) * 10.0 ** torch.arange(-4, 4)[None, :, None]
    fused[1, 4, 1], fused[2, 5, 2], fused[3, 6, 3] = float("inf"), -0.0, 3.4e38
    where = torch.tensor([40, 3, 8, 47, 21])
    apart = fused.transpose(0, 1).contiguous().transpose(0, 1)
    for k, v in (
        (fused[:, 2:5], fused[:, 5:8]),
        (apart[:, 2:5], apart[:, 5:8]),
        (fused[:, 2:5].bfloat16(), fused[:, 5:8]),
    ):
        written = []
        for codec in (PlainCodec(torch.bfloat16), PlainCodec(torch.bfloat16, kernels=compiled_kernels)):
            planes = {p.name: torch.full((6, *p.shape), 7.0, dtype=p.dtype) for p in codec.planes(geometry)}
            codec.encode(planes, where, k, v)
            written.append([planes[name].view(torch.int16) for name in "kv"])
        assert all(torch.equal(a, b) for a, b in zip(*written, strict=True))


CHUNKS = ((0, 17, None), (211, 90, None), (63, 1, None), (30, 300, None), (8, 20, tuple(range(-1, 19))))


@pytest.mark.parametrize("name", SHAPES)
def test_long_chunks_equal_the_definition(compiled_kernels: CDLL, name: str) -> None:
    """Errors stay below twice the torch form's; whatever lies in other slots does not matter."""
    shape = SHAPES[name]
    spans, pages = spans_of(shape, CHUNKS, 3)
    gen = torch.Generator().manual_seed(1)
    k, v = (
        torch.randn(pages, shape.kv_heads, shape.page_size, shape.head_dim, generator=gen).bfloat16()
        for _ in range(2)
    )
    rows = sum(s.n_new for s in spans)
    q = torch.randn(rows, shape.heads, shape.head_dim, generator=gen) / shape.head_dim**0.5
    oracle, torch_form = ReferenceAttention(), TorchPages()
    expected = oracle.run(oracle.prepare(spans, shape), q.double(), k, v)
    usual = torch_form.run(torch_form.prepare(spans, shape), q, k.clone(), v.clone())
    for pool in (k, v):
        poison(pool, spans, shape)
    op = CompiledPages(compiled_kernels)
    plan = op.prepare(spans, shape)
    assert len(plan.chunks) == 4 and not plan.dense
    got = op.run(plan, q, k, v)
    error, allowed = (got - expected).abs(), (usual - expected).abs()
    assert error.max() <= 2 * allowed.max() + 1e-6
    assert error.square().mean() <= 2 * allowed.square().mean()


def test_a_long_tree_is_left_to_torch(compiled_kernels: CDLL) -> None:
    shape = SHAPES["gqa-64"]
    parents = (-1, *(i // 2 for i in range(19)))
    spans, pages = spans_of(shape, ((40, 20, parents), (9, 1, None)), 3)
    gen = torch.Generator().manual_seed(1)
    k, v = (torch.randn(pages, 3, 64, 64, generator=gen).bfloat16() for _ in range(2))
    q = torch.randn(21, 9, 64, generator=gen) / 8
    oracle, op = ReferenceAttention(), CompiledPages(compiled_kernels)
    plan = op.prepare(spans, shape)
    assert len(plan.dense) == 1 and not plan.chunks
    expected = oracle.run(oracle.prepare(spans, shape), q.double(), k, v)
    assert (op.run(plan, q, k, v) - expected).abs().max() < 0.02


def test_chunks_decodes_and_drafts_share_a_step(compiled_kernels: CDLL) -> None:
    shape = SHAPES["gqa-64"]
    batch = ((90, 1, None), (10, 40, None), (20, 6, TREE), (0, 17, None), (300, 1, None))
    spans, pages = spans_of(shape, batch, 1)
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(pages, 3, 64, 64, generator=gen).bfloat16() for _ in range(2))
    q = torch.randn(sum(s.n_new for s in spans), 9, 64, generator=gen) / 8
    oracle, op = ReferenceAttention(), CompiledPages(compiled_kernels)
    expected = oracle.run(oracle.prepare(spans, shape), q.double(), k, v)
    got = op.run(op.prepare(spans, shape), q, k, v)
    assert (got - expected).abs().max() < 0.02
    assert torch.equal(got, op.run(op.prepare(spans, shape), q, k, v))


def test_other_planes_go_to_the_torch_form(compiled_kernels: CDLL) -> None:
    """Float32 pages, and pages that are a view of something larger."""
    shape = SHAPES["gqa-64"]
    spans, pages = spans_of(shape, BATCH, 1)
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(pages, 3, 64, 64, generator=gen) for _ in range(2))
    q = torch.randn(sum(s.n_new for s in spans), 9, 64, generator=gen) / 8
    oracle, op = ReferenceAttention(), CompiledPages(compiled_kernels)
    plan = op.prepare(spans, shape)
    expected = oracle.run(oracle.prepare(spans, shape), q.double(), k, v)
    assert (op.run(plan, q, k, v) - expected).abs().max() < 1e-4
    wide_k, wide_v = (torch.cat((t, t), 3).bfloat16()[..., :64] for t in (k, v))
    assert (op.run(plan, q, wide_k, wide_v) - expected).abs().max() < 0.05


def test_a_nan_that_is_seen_reaches_its_own_sequence_only(compiled_kernels: CDLL) -> None:
    shape = SHAPES["gqa-64"]
    spans, pages = spans_of(shape, ((100, 1, None), (30, 1, None)), 1)
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(pages, 3, 64, 64, generator=gen).bfloat16() for _ in range(2))
    q = torch.randn(2, 9, 64, generator=gen)
    v[spans[0].table[0], :, 3] = float("nan")
    op = CompiledPages(compiled_kernels)
    got = op.run(op.prepare(spans, shape), q, k, v)
    assert got[0].isnan().all() and got[1].isfinite().all()
    k[spans[0].table[0], :, 3] = float("nan")
    assert op.run(op.prepare(spans, shape), q, k, v)[0].isnan().all()
