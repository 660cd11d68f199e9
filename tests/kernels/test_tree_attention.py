"""Tree attention against its definition, against decoding each path alone, and as half of a cascade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.attention.reference import ReferenceAttention
from workbench.engine.seams import AttentionShape, AttentionSpan
from workbench.kernels.attention.decode_combine import cascade
from workbench.kernels.attention.paged_decode import paged_decode
from workbench.kernels.attention.paged_decode import reference as decode_reference
from workbench.kernels.attention.tree_attention import reference, tree_attention
from workbench.kernels.layouts import kv_fp8, kv_int8, kv_plain
from workbench.kernels.layouts.tree import TreeRows, chain, looking_back, tree_rows, unpack
from workbench.spec.errors import UnsupportedInput

pytestmark = pytest.mark.usefixtures("poisoned")

BUSHY = (-1, 0, 0, 1, 1, 2, 3, 3, 5, 0)
FORMATS: dict[str, Any] = {"plain": kv_plain, "fp8": kv_fp8, "int8": kv_int8}


class Cache:
    """Random pages for sequences of given lengths; slots that no token owns hold NaN where they can."""

    def __init__(
        self, lengths: Sequence[int], generator: torch.Generator, device: str, *, format: str = "plain",
        page: int = 16, heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        width = max(1, -(-max(lengths) // page))
        pool = len(lengths) * width + 2
        table = 1 + torch.randperm(pool - 1, generator=generator)[: len(lengths) * width].view(-1, width)
        token = torch.cat([torch.arange(n) for n in lengths])
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        slots = table[owner, token // page] * page + token % page
        k, v = (torch.randn(len(slots), heads, dim, generator=generator).to(dtype) for _ in range(2))
        kind = FORMATS[format]
        self.layout = (
            kind.layout(page, heads, dim, dtype) if format == "plain" else kind.layout(page, heads, dim)
        )
        planes = self.layout.allocate(pool)
        for plane in planes.values():
            plane.view(torch.uint8).fill_(0x7F) if plane.dtype.itemsize == 1 else plane.fill_(torch.nan)
        kind.write(planes, slots, k, v)
        self.k, self.v = kind.read(planes, torch.arange(pool))
        self.planes = {n: p.to(device) for n, p in planes.items()}
        self.table = table.int().to(device)


def ints(values: Sequence[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def torch_error(q: Tensor, exact: Tensor, args: Any, **options: Any) -> float:
    """Error of the same attention with every operand and result rounded to the query's dtype."""
    k, v, table, starts, rows = args
    rounded = reference(q, k.to(q.dtype), v.to(q.dtype), table, starts, rows, **options)[0].to(q.dtype)
    unit = torch.finfo(q.dtype).eps
    return float((rounded.double() - exact).norm() + unit * exact.norm())


def agrees(cache: Cache, q: Tensor, starts: Sequence[int], rows: TreeRows, **options: Any) -> Any:
    device = str(cache.table.device)
    extra = {n: options.pop(n) for n in ("chunk", "tma") if n in options}
    done = tree_attention(
        q.to(device),
        cache.planes,
        cache.layout,
        cache.table,
        ints(starts, device),
        rows.to(device),
        **options,
        **extra,
    )
    args = (cache.k, cache.v, cache.table.cpu(), ints(starts, "cpu"), rows)
    exact, lse = reference(q.cpu(), *args, **options)
    assert (done.out.cpu().double() - exact).norm() <= 2 * torch_error(q, exact, args, **options)
    seen = lse > -torch.inf
    assert torch.equal(done.lse.cpu() > -torch.inf, seen)
    assert torch.equal(done.out.cpu()[~seen], torch.zeros_like(done.out.cpu()[~seen]))
    torch.testing.assert_close(done.lse.cpu()[seen].double(), lse[seen], rtol=0, atol=5e-3)
    return done


@pytest.mark.parametrize(("format", "page"), [("plain", 16), ("plain", 64), ("fp8", 64), ("int8", 16)])
@pytest.mark.parametrize("group", [1, 4])
def test_trees_match_the_definition(
    format: str, page: int, group: int, generator: torch.Generator, device: str
) -> None:
    starts, trees = (70, 0, 16, 63), (BUSHY, chain(5), (-1,), (-1, -1, 0, 1))
    rows = tree_rows(trees)
    cache = Cache(
        [s + len(t) for s, t in zip(starts, trees, strict=True)], generator, device, format=format, page=page
    )
    q = torch.randn(sum(map(len, trees)), 2 * group, 64, generator=generator).bfloat16()
    done = agrees(cache, q, starts, rows)
    assert ("TMA" in done.path) == (page == 64)
    agrees(cache, q, starts, tree_rows(trees, window=20), window=20, soft_cap=4.0, chunk=64)


def test_more_rows_than_a_tile_and_than_a_word(generator: torch.Generator, device: str) -> None:
    tree = (-1, *(max(0, i // 2) for i in range(69)))
    cache = Cache([20 + len(tree)], generator, device, heads=1)
    q = torch.randn(len(tree), 3, 64, generator=generator).bfloat16()
    agrees(cache, q, (20,), tree_rows([tree]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_and_odd_heads(dtype: torch.dtype, generator: torch.Generator, device: str) -> None:
    cache = Cache([25], generator, device, dim=80, dtype=dtype)
    agrees(cache, torch.randn(10, 6, 80, generator=generator).to(dtype), (15,), tree_rows([BUSHY]))


def test_every_path_of_a_tree_equals_decoding_it_alone(generator: torch.Generator, device: str) -> None:
    """G5: a node's row equals the last row of its own path, laid out as a chain in a cache of its own."""
    start, dim = 21, 64
    cache = Cache([start + len(BUSHY)], generator, device)
    q = torch.randn(len(BUSHY), 4, dim, generator=generator).bfloat16()
    whole = agrees(cache, q, (start,), tree_rows([BUSHY]))
    table = cache.table[0].cpu().long()
    for node in range(len(BUSHY)):
        path = [node]
        while BUSHY[path[0]] >= 0:
            path.insert(0, BUSHY[path[0]])
        tokens = torch.tensor([*range(start), *(start + i for i in path)])
        k, v = (x[table[tokens // 16], :, tokens % 16].bfloat16() for x in (cache.k, cache.v))
        alone = cache.layout.allocate(4)
        kv_plain.write(alone, 16 + torch.arange(len(tokens)), k, v)
        moved = {n: p.to(device) for n, p in alone.items()}
        one = paged_decode(
            q[node : node + 1].to(device),
            moved,
            cache.layout,
            ints([1, 2, 3], device)[None],
            ints([len(tokens)], device),
        )
        torch.testing.assert_close(whole.out[node], one.out[0], rtol=0, atol=2e-2)


def test_att_01_a_chain_is_aligned_at_the_bottom_right(device: str) -> None:
    """2 queries of zeros after 3 cached tokens: each row averages what it may see of the values 1 .. 5."""
    layout = kv_plain.layout(16, 1, 64, torch.float32)
    planes = layout.allocate(1)
    kv_plain.write(
        planes, torch.arange(5), torch.zeros(5, 1, 64), torch.arange(1.0, 6)[:, None, None].expand(5, 1, 64)
    )
    rows = tree_rows([chain(2)]).to(device)
    moved = {n: p.to(device) for n, p in planes.items()}
    q = torch.zeros(2, 1, 64, device=device)
    out = tree_attention(q, moved, layout, ints([0], device)[None], ints([3], device), rows).out
    torch.testing.assert_close(out[:, 0, 0].cpu(), torch.tensor([2.5, 3.0]))


@pytest.mark.parametrize("window", [None, 6])
def test_it_does_what_the_engines_own_reference_does(
    window: int | None, generator: torch.Generator, device: str
) -> None:
    starts, trees = (19, 4), (BUSHY, (-1, 0, 0))
    cache = Cache([s + len(t) for s, t in zip(starts, trees, strict=True)], generator, device)
    q = torch.randn(13, 4, 64, generator=generator).bfloat16()
    spans, rows = [], tree_rows(trees, window=window)
    for b, (start, tree) in enumerate(zip(starts, trees, strict=True)):
        depth = rows.depth[int(rows.first[b]) : int(rows.first[b + 1])].tolist()
        positions = [start + d for d in depth]
        spans.append(AttentionSpan(len(tree), start, cache.table[b].tolist(), positions, tree))
    engine = ReferenceAttention()
    plan = engine.prepare(spans, AttentionShape(4, 2, 64, 16, window))
    expected = engine.run(plan, q.double() * 64**-0.5, cache.k.double(), cache.v.double()).view(13, 4, 64)
    done = tree_attention(
        q.to(device),
        cache.planes,
        cache.layout,
        cache.table,
        ints(starts, device),
        rows.to(device),
        window=window,
    )
    assert (done.out.cpu().double() - expected).norm() / expected.norm() < 6e-3


def test_a_shared_prefix_is_read_once_for_all_rows_that_look_back(
    generator: torch.Generator, device: str
) -> None:
    lengths, prefix = (50, 81, 49), 48
    cache = Cache(lengths, generator, device)
    table = cache.table.clone()
    table[1:, :3] = table[0, :3]
    q = torch.randn(3, 4, 64, generator=generator).bfloat16()
    front = tree_attention(
        q.to(device), cache.planes, cache.layout, table[:1, :3].contiguous(), ints([prefix], device),
        looking_back([3]).to(device),
    )  # fmt: skip
    own = paged_decode(
        q.to(device), cache.planes, cache.layout, table[:, 3:].contiguous(),
        ints([n - prefix for n in lengths], device),
    )  # fmt: skip
    out, lse = cascade((front.out, front.lse), (own.out, own.lse))
    exact, total = decode_reference(q, cache.k, cache.v, table.cpu(), ints(lengths, "cpu"))
    assert (out.cpu().double() - exact).norm() / exact.norm() < 1e-2
    torch.testing.assert_close(lse.cpu().double(), total, rtol=0, atol=1e-3)


@pytest.mark.parametrize("page", [16, 64])
def test_slots_behind_every_window_never_reach_the_output(
    page: int, generator: torch.Generator, device: str
) -> None:
    starts, trees = (150, 20), (BUSHY, chain(3))
    cache = Cache([s + len(t) for s, t in zip(starts, trees, strict=True)], generator, device, page=page)
    q = torch.randn(13, 4, 64, generator=generator).bfloat16()
    rows = tree_rows(trees, window=12)
    clean = agrees(cache, q, starts, rows, window=12)
    for b, start in enumerate(starts):
        behind = torch.arange(start - 12 + 1)
        at = cache.table[b].long().cpu()[behind // page].to(device), slice(None), (behind % page).to(device)
        for plane in cache.planes.values():
            plane[at] = torch.nan
    where = cache.table, ints(starts, device), rows.to(device)
    again = tree_attention(q.to(device), cache.planes, cache.layout, *where, window=12)
    assert torch.equal(clean.out, again.out)


def test_att_03_rows_that_see_nothing_are_zero(generator: torch.Generator, device: str) -> None:
    cache = Cache([40, 1], generator, device)
    q = torch.randn(5, 4, 64, generator=generator).bfloat16()
    done = agrees(cache, q, (40, 0), looking_back([2, 3]))
    assert bool((done.lse[2:] == -torch.inf).all())


def test_misfits_are_refused(generator: torch.Generator, device: str) -> None:
    cache, rows = Cache([20], generator, device), tree_rows([chain(4)]).to(device)
    q = torch.randn(4, 4, 64, generator=generator).bfloat16().to(device)
    start = ints([16], device)
    args = (cache.planes, cache.layout, cache.table)
    assert tree_attention(q, *args, start, rows).out.shape == (4, 4, 64)
    for bad in (
        lambda: tree_attention(q[:3], *args, start, rows),
        lambda: tree_attention(q, *args, start.repeat(2), rows),
        lambda: tree_attention(q, *args, ints([100], device), rows),
        lambda: tree_attention(q, *args, start.long(), rows),
        lambda: tree_attention(q, *args, start, rows, chunk=8),
        lambda: tree_attention(q, *args, start, rows, tma=True),
        lambda: tree_rows([(0,)]),
    ):
        with pytest.raises(UnsupportedInput):
            bad()


def test_words_say_who_descends_from_whom() -> None:
    rows = tree_rows([BUSHY, chain(40)], window=None)
    assert rows.depth[:10].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 1]
    assert unpack(rows.words[8:9], 10)[0].nonzero()[:, 0].tolist() == [0, 2, 5, 8]
    assert torch.equal(unpack(rows.words[10:], 40), torch.ones(40, 40, dtype=torch.bool).tril())
    assert unpack(tree_rows([chain(5)], window=2).words[4:], 5)[0].nonzero()[:, 0].tolist() == [3, 4]
