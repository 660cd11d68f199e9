"""Bit equality of the pinned form, whatever surrounds a sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.attention.pinned import PinnedAttention
from workbench.attention.tile_groups import one_thread
from workbench.attention.tiles import paths
from workbench.engine.seams import AttentionShape, AttentionSpan

SHAPES = st.builds(
    lambda kv, group, dim, page, window, cap: AttentionShape(kv * group, kv, dim, page, window, cap),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3, 4, 8]),
    st.sampled_from([40, 63, 64, 128]),
    st.sampled_from([4, 16, 64, 128]),
    st.sampled_from([None, None, 7, 70]),
    st.sampled_from([None, 3.0]),
)
DTYPES = st.sampled_from([torch.float64, torch.float32])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Sequence:
    """The rows of one sequence, laid out on any pages."""

    def __init__(self, seed: int, length: int, shape: AttentionShape, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(seed)
        self.shape, self.length = shape, length
        q = torch.randn(length, shape.heads, shape.head_dim, generator=g) / shape.head_dim**0.5
        k, v = torch.randn(2, length, shape.kv_heads, shape.head_dim, generator=g)
        self.q, self.k, self.v = q.to(dtype), k.to(dtype), v.to(dtype)

    def lay_out(self, r: random.Random, k: Tensor, v: Tensor, ids: list[int]) -> list[int]:
        page = k.shape[2]
        table = [ids.pop(r.randrange(len(ids))) for _ in range(-(-self.length // page))]
        for s in range(self.length):
            k[table[s // page], :, s % page], v[table[s // page], :, s % page] = self.k[s], self.v[s]
        return table


def pool(pages: int, shape: AttentionShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k, v = torch.full((2, pages, shape.kv_heads, shape.page_size, shape.head_dim), float("nan"), dtype=dtype)
    return k, v


def chain(start: int, n: int, table: list[int]) -> AttentionSpan:
    return AttentionSpan(n, start, table, range(start, start + n))


def run(shape: AttentionShape, spans: list[AttentionSpan], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    op = PinnedAttention()
    return op.run(op.prepare(spans, shape), q, k, v)


def alone(seq: Sequence) -> Tensor:
    """The sequence in one chunk, on pages of 32 slots, a size that no other layout here has."""
    shape = replace(seq.shape, page_size=32)
    pages = -(-seq.length // 32)
    k, v = pool(pages, shape, seq.q.dtype)
    table = seq.lay_out(random.Random(0), k, v, list(range(pages)))
    return run(shape, [chain(0, seq.length, table)], seq.q, k, v)


@settings(max_examples=settings().max_examples // 2)
@example(  # one tile alone and one among others: strides of the query tile must not differ
    seed=0, shape=AttentionShape(2, 2, 63, 4), dtype=torch.float64, length=65, chunk=1, threads=1
)
@given(
    seed=st.integers(0, 10**6),
    shape=SHAPES,
    dtype=DTYPES,
    length=st.integers(2, 150),
    chunk=st.sampled_from([1, 7, 64, 1000]),
    threads=st.sampled_from([1, 2, 3]),
)
def test_chunks_pages_and_threads_do_not_move_a_bit(seed, shape, dtype, length, chunk, threads):
    seq = Sequence(seed, length, shape, dtype)
    want = alone(seq)
    pages = -(-length // shape.page_size) + 5
    k, v = pool(pages, shape, dtype)
    table = seq.lay_out(random.Random(seed), k, v, list(range(pages)))
    torch.set_num_threads(threads)
    for start in range(0, length, chunk):
        n = min(chunk, length - start)
        got = run(shape, [chain(start, n, table)], seq.q[start : start + n], k, v)
        assert torch.equal(got, want[start : start + n])
    assert torch.get_num_threads() == threads


@settings(max_examples=settings().max_examples // 2)
@given(
    seed=st.integers(0, 10**6),
    shape=SHAPES,
    dtype=DTYPES,
    lengths=st.lists(st.integers(1, 140), min_size=2, max_size=5),
    threads=st.sampled_from([1, 2]),
)
def test_a_batch_of_chunks_and_decodes_gives_each_its_own_bits(seed, shape, dtype, lengths, threads):
    r = random.Random(seed)
    seqs = [Sequence(seed + i, n, shape, dtype) for i, n in enumerate(lengths)]
    pages = sum(-(-n // shape.page_size) for n in lengths) + 3
    k, v = pool(pages, shape, dtype)
    ids = list(range(pages))
    tables = [s.lay_out(r, k, v, ids) for s in seqs]
    starts = [r.choice([0, n - 1, r.randrange(n)]) for n in lengths]
    torch.set_num_threads(threads)
    spans = [chain(a, n - a, t) for a, n, t in zip(starts, lengths, tables, strict=True)]
    got = run(shape, spans, torch.cat([s.q[a:] for s, a in zip(seqs, starts, strict=True)]), k, v)
    want = torch.cat([alone(s)[a:] for s, a in zip(seqs, starts, strict=True)])
    assert torch.equal(got, want)


@settings(max_examples=settings().max_examples // 2)
@given(
    seed=st.integers(0, 10**6),
    shape=SHAPES,
    dtype=DTYPES,
    start=st.integers(0, 130),
    nodes=st.integers(1, 12),
)
def test_every_node_of_a_draft_tree_has_the_bits_of_its_chain(depths_of, seed, shape, dtype, start, nodes):
    r = random.Random(seed)
    parents = [r.randint(-1, i - 1) for i in range(nodes)]
    seq = Sequence(seed, start + nodes, shape, dtype)  # its last rows are the nodes
    pages = -(-seq.length // shape.page_size) + 2
    k, v = pool(pages, shape, dtype)
    table = seq.lay_out(r, k, v, list(range(pages)))
    span = AttentionSpan(nodes, start, table, depths_of(start, parents), parents)
    got = run(shape, [span], seq.q[start:], k, v)
    for node in range(nodes):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        keep = [*range(start), *(start + p for p in path)]
        line = Sequence(0, len(keep), shape, dtype)
        line.q, line.k, line.v = seq.q[keep], seq.k[keep], seq.v[keep]
        assert torch.equal(got[node], alone(line)[-1])


@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 10**6), shape=SHAPES, length=st.integers(60, 150), shared=st.integers(1, 40))
def test_a_shared_prefix_gives_what_own_copies_give(seed, shape, length, shared):
    page = shape.page_size
    a, b = Sequence(seed, length, shape, torch.float64), Sequence(seed + 1, length, shape, torch.float64)
    common = min(shared * page, length // page * page)
    b.k[:common], b.v[:common] = a.k[:common], a.v[:common]
    ids = list(range(2 * -(-length // page) + 1))
    k, v = pool(len(ids), shape, torch.float64)
    r = random.Random(seed)
    first, second = a.lay_out(r, k, v, ids), b.lay_out(r, k, v, ids)
    second = first[: common // page] + second[common // page :]
    start = min(common, length - 1)
    spans = [chain(start, length - start, first), chain(start, length - start, second)]
    got = run(shape, spans, torch.cat([a.q[start:], b.q[start:]]), k, v)
    assert torch.equal(got, torch.cat([alone(a)[start:], alone(b)[start:]]))


def test_the_bits_would_move_without_the_fixed_order():
    """Negative control: plain float32 attention of one row and of many does not agree to the bit."""
    seq = Sequence(0, 20, AttentionShape(8, 1, 63, 16), torch.float32)
    x, y = seq.q.flatten(1), seq.k.flatten(1).repeat(1, 8).T
    whole, rows = x @ y, torch.cat([x[i : i + 1] @ y for i in range(20)])
    assert not torch.equal(whole, rows)


@settings(max_examples=settings().max_examples // 2)
@given(
    seed=st.integers(0, 10**6),
    kinds=st.lists(st.sampled_from(["decode", "tree", "chunk"]), min_size=1, max_size=3),
    page=st.sampled_from([4, 16, 64]),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 5, 33]),
    soft_cap=st.sampled_from([None, 2.0]),
    shared=st.integers(0, 2),
)
def test_pinned_equals_the_oracle(make_case, seed, kinds, **options):
    case = make_case(seed, kinds, **options).to(torch.float64)
    assert (case.run(PinnedAttention()) - case.oracle()).abs().max() <= 1e-12


def test_att_04_unused_slots_never_reach_an_output_pinned():
    shape, span = AttentionShape(3, 1, 8, 4), chain(4, 1, [2, 0])
    q, k, v = torch.randn(1, 3, 8), *torch.randn(2, 3, 1, 4, 8)
    outs = []
    for fill in (float("nan"), float("inf"), 0.0):
        for t in (k, v):
            t[0, :, 1:], t[1] = fill, fill
        outs.append(run(shape, [span], q, k, v))
    assert outs[0].isfinite().all() and torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_is_no_number_and_is_seen_reaches_its_own_sequence(which: str, bad: float):
    """An answer of zeros would hide that the model broke."""
    shape = AttentionShape(4, 2, 40, 16)
    k, v = torch.ones(2, 5, 2, 16, 40, dtype=torch.float32)
    (k if which == "k" else v)[1, :, 3] = bad
    spans = [chain(20, 2, [1, 2]), chain(9, 1, [3])]
    q = torch.ones(3, 4, 40, dtype=torch.float32)
    got = run(shape, spans, q, k, v)
    assert not got[:2].isfinite().any() and got[2].isfinite().all()


def test_paths_hold_every_row_once():
    span = AttentionSpan(6, 0, [0], [0, 1, 1, 2, 2, 0], parents=[-1, 0, 0, 2, 2, -1])
    assert paths(span) == [([0, 1], [0, 1]), ([0, 2, 3], [1, 2]), ([0, 2, 4], [2]), ([5], [0])]


def test_one_thread_gives_the_threads_back_after_an_error():
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="x"), one_thread():
        assert torch.get_num_threads() == 1
        raise ValueError("x")
    assert torch.get_num_threads() == 2
