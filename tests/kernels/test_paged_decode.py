"""Paged decode against its definition: formats, page sizes, ragged lengths, windows, splits, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.kernels.attention.kv_tiles import page_rows
from workbench.kernels.attention.paged_decode import OpenPages, paged_decode, reference
from workbench.kernels.attention.splits import chunk_tokens, split_count
from workbench.kernels.layouts import kv_fp4, kv_fp8, kv_int8, kv_kivi, kv_plain
from workbench.kernels.layouts.pages import PageLayout
from workbench.spec.errors import UnsupportedInput

pytestmark = pytest.mark.usefixtures("poisoned")

SCALES = (0.37, 1.9)
LENGTHS = (1, 0, 130, 64, 63, 65, 300)


@dataclass
class Case:
    """A filled cache: planes with every unused slot poisoned, and what they decode to."""

    layout: PageLayout
    planes: dict[str, Tensor]
    table: Tensor
    lengths: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    def run(self, q: Tensor, **options: Any) -> Any:
        return paged_decode(q, self.planes, self.layout, self.table, self.lengths, **self.options, **options)


def write_nvfp4(planes: Any, slots: Tensor, k: Tensor, v: Tensor) -> None:
    kv_fp4.write(planes, slots, k, v, scales=SCALES)


def read_nvfp4(planes: Any, pages: Tensor) -> tuple[Tensor, Tensor]:
    return kv_fp4.read(planes, pages, scales=SCALES)


FORMATS: dict[str, tuple[Callable[..., PageLayout], Callable[..., None], Callable[..., Any]]] = {
    "plain": (kv_plain.layout, kv_plain.write, kv_plain.read),
    "fp8": (kv_fp8.layout, kv_fp8.write, kv_fp8.read),
    "int8": (kv_int8.layout, kv_int8.write, kv_int8.read),
    "nvfp4": (kv_fp4.layout, write_nvfp4, read_nvfp4),
}


def poison(planes: dict[str, Tensor]) -> None:
    """NaN wherever a format can hold one, the largest bytes elsewhere."""
    for plane in planes.values():
        plane.view(torch.uint8).fill_(0x7F) if plane.dtype.itemsize == 1 else plane.fill_(float("nan"))


def tables(lengths: Sequence[int], page: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Scattered pages for all sequences, and the size of the pool; the table's unused entries are page 0."""
    width = max(1, -(-max(lengths) // page))
    pool = len(lengths) * width + 3
    table = 1 + torch.randperm(pool - 1, generator=generator)[: len(lengths) * width].view(-1, width)
    for b, n in enumerate(lengths):
        table[b, -(-n // page) :] = 0
    return table.int(), pool


def filled(
    format: str, page: int, generator: torch.Generator, device: str, *,
    lengths: Sequence[int] = LENGTHS, heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16,
) -> Case:  # fmt: skip
    table, pool = tables(lengths, page, generator)
    token = torch.cat([torch.arange(n) for n in lengths])
    owner = torch.cat([torch.full((n,), b) for b, n in enumerate(lengths)])
    slots = table[owner, token // page].long() * page + token % page
    k, v = (torch.randn(len(slots), heads, dim, generator=generator).to(dtype) for _ in range(2))
    make, write, read = FORMATS[format]
    layout = make(page, heads, dim, dtype) if format == "plain" else make(page, heads, dim)
    planes = layout.allocate(pool)
    poison(planes)
    write(planes, slots, k, v)
    whole = read(planes, torch.arange(pool))
    moved = {n: p.to(device) for n, p in planes.items()}
    options = {"tensor_scales": SCALES} if format == "nvfp4" else {}
    return Case(
        layout,
        moved,
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        *whole,
        options,
    )


def torch_path(case: Case, q: Tensor, window: int | None, soft_cap: float | None) -> Tensor:
    """The same attention in plain torch operations of the query's dtype: the yardstick of errors."""
    out = torch.zeros_like(q).cpu()
    q, page, group = q.cpu(), case.layout.page, q.shape[1] // case.layout.heads
    for b, n in enumerate(case.lengths.tolist()):
        seen = torch.arange(max(0, n - window) if window is not None else 0, n)
        pages = case.table[b].cpu().long()[seen // page]
        k, v = (x[pages, :, seen % page].to(q.dtype).repeat_interleave(group, 1) for x in (case.k, case.v))
        s = (q[b].unsqueeze(1) @ k.permute(1, 2, 0))[:, 0] * q.shape[-1] ** -0.5
        if soft_cap is not None:
            s = soft_cap * torch.tanh(s / soft_cap)
        if n:
            out[b] = (s.softmax(-1).unsqueeze(1) @ v.transpose(0, 1))[:, 0]
    return out


def agrees(
    case: Case, q: Tensor, *, window: int | None = None, soft_cap: float | None = None, **options: Any
) -> Any:
    """Run, compare with the definition in float64, and return what the kernel returned."""
    done = case.run(q, window=window, soft_cap=soft_cap, **options)
    exact, lse = reference(
        q.cpu(), case.k, case.v, case.table.cpu(), case.lengths.cpu(), window=window, soft_cap=soft_cap
    )
    limit = 2 * (torch_path(case, q, window, soft_cap).double() - exact).norm() + 1e-6
    assert (done.out.cpu().double() - exact).norm() <= limit
    empty = case.lengths.cpu() == 0
    assert torch.equal(done.out.cpu()[empty], torch.zeros_like(done.out.cpu()[empty]))
    assert bool((done.lse.cpu()[empty] == -torch.inf).all())
    torch.testing.assert_close(done.lse.cpu()[~empty].double(), lse[~empty], rtol=0, atol=5e-3)
    return done


def queries(
    case: Case, group: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    heads = group * case.layout.heads
    q = torch.randn(len(case.lengths), heads, case.layout.dim, generator=generator)
    return q.to(dtype).to(case.table.device)


@pytest.mark.parametrize(("format", "page"), [(f, p) for f in FORMATS for p in (16, 64)] + [("plain", 128)])
def test_every_format_matches_the_definition(
    format: str, page: int, generator: torch.Generator, device: str
) -> None:
    case = filled(format, page, generator, device)
    done = agrees(case, queries(case, 4, generator))
    assert ("TMA" in done.path) == (page >= 64 and format != "nvfp4")
    agrees(case, queries(case, 4, generator), window=70, soft_cap=5.0, chunk=128)


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_groups_and_dtypes(group: int, dtype: torch.dtype, generator: torch.Generator, device: str) -> None:
    case = filled("plain", 16, generator, device, lengths=(77, 16, 1), dtype=dtype)
    agrees(case, queries(case, group, generator, dtype))


def test_more_than_sixteen_heads_per_kv_head(generator: torch.Generator, device: str) -> None:
    case = filled("plain", 64, generator, device, lengths=(70, 3), heads=1)
    agrees(case, queries(case, 20, generator))


@pytest.mark.parametrize("dim", [40, 63, 80, 96])
def test_att_07_head_sizes_that_are_no_power_of_two(
    dim: int, generator: torch.Generator, device: str
) -> None:
    case = filled("plain", 16, generator, device, lengths=(65, 17, 1), dim=dim)
    agrees(case, queries(case, 2, generator))


@pytest.mark.parametrize("format", ["fp8", "int8", "nvfp4"])
def test_coded_pages_at_head_size_128(format: str, generator: torch.Generator, device: str) -> None:
    case = filled(format, 64, generator, device, lengths=(129, 64), dim=128)
    agrees(case, queries(case, 2, generator))


@pytest.mark.parametrize(
    ("bits", "page", "group"), [(4, 128, 32), (2, 128, 32), (4, 32, 32), (2, 64, 64), (4, 64, 16)]
)
def test_kivi_pages_and_the_open_page(
    bits: int, page: int, group: int, generator: torch.Generator, device: str
) -> None:
    lengths, heads, dim = (1, 0, 130, 128, 127, 300), 2, 64
    table, pool = tables(lengths, page, generator)
    layout = kv_kivi.layout(page, heads, dim, bits=bits, group=group)
    planes = layout.allocate(pool)
    k, v = (torch.randn(pool, heads, page, dim, generator=generator).bfloat16() for _ in range(2))
    kv_kivi.write(planes, torch.arange(pool), k, v)
    whole_k, whole_v = kv_kivi.read(planes, torch.arange(pool))
    coded = [n // page * page for n in lengths]
    coded[3] -= page  # a page that is full but not encoded yet
    row = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].int()
    open_k = torch.full((len(lengths) + 2, heads, page, dim), torch.nan).bfloat16()
    open_v = open_k.clone()
    for b, n in enumerate(lengths):
        if rest := n - coded[b]:
            p = int(table[b, coded[b] // page])
            for pages, newest, whole in ((k, open_k, whole_k), (v, open_v, whole_v)):
                newest[row[b], :, :rest] = pages[p, :, :rest]
                whole[p] = pages[p].float()
    newest = OpenPages(*(x.to(device) for x in (open_k, open_v, torch.tensor(coded, dtype=torch.int32), row)))
    moved = {n: p.to(device) for n, p in planes.items()}
    where = table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
    case = Case(layout, moved, *where, whole_k, whole_v, {"open_pages": newest})
    q = queries(case, 4, generator)
    agrees(case, q, chunk=page)
    agrees(case, q, window=50)


def test_att_04_slots_no_token_owns_never_reach_the_output(generator: torch.Generator, device: str) -> None:
    case = filled("plain", 16, generator, device, lengths=(5, 33))
    q, outs = queries(case, 2, generator), []
    owned = torch.zeros(case.planes["k"].shape[0], 16, dtype=torch.bool)
    for b, n in enumerate(case.lengths.tolist()):
        at = torch.arange(n)
        owned[case.table[b].cpu().long()[at // 16], at % 16] = True
    for filler in (torch.nan, torch.inf, 0.0):
        for plane in case.planes.values():
            plane.masked_fill_(~owned[:, None, :, None].to(device), filler)
        outs.append(case.run(q).out.clone())
    assert bool(outs[0].isfinite().all())
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("format", ["plain", "fp8"])
def test_slots_behind_the_window_never_reach_the_output(
    format: str, generator: torch.Generator, device: str
) -> None:
    case = filled(format, 64, generator, device, lengths=(150, 33))
    q = queries(case, 2, generator)
    clean = case.run(q, window=20).out
    for b, n in enumerate(case.lengths.tolist()):
        behind = torch.arange(n - 20)
        for name, plane in case.planes.items():
            bits = plane.view(torch.uint8 if plane.dtype.itemsize == 1 else torch.int16)
            pages = case.table[b].cpu().long()[behind // 64].to(device)
            slots = (behind % 64).to(device)
            nan = 0x7F if plane.dtype.itemsize == 1 else 0x7FFF
            if name == "v" and format == "fp8":
                bits[pages, :, :, slots] = nan
            else:
                bits[pages, :, slots] = nan
    assert torch.equal(case.run(q, window=20).out, clean)


def test_a_fixed_chunk_makes_a_sequence_independent_of_its_batch(
    generator: torch.Generator, device: str
) -> None:
    case = filled("plain", 64, generator, device, lengths=(400, 65))
    q = queries(case, 4, generator)
    both = case.run(q, chunk=128)
    alone = Case(
        case.layout, case.planes, case.table[1:], case.lengths[1:], case.k, case.v, case.options
    ).run(q[1:], chunk=128)
    assert torch.equal(both.out[1:], alone.out)
    assert torch.equal(both.out, case.run(q, chunk=128).out)


def test_tma_and_pointers_give_the_same_numbers(generator: torch.Generator, device: str) -> None:
    case = filled("plain", 64, generator, device, lengths=(200, 64))
    q = queries(case, 4, generator)
    torch.testing.assert_close(case.run(q, tma=True).out, case.run(q, tma=False).out, rtol=0, atol=1e-2)


def test_att_06_views_and_misfits_are_refused(generator: torch.Generator, device: str) -> None:
    case = filled("plain", 16, generator, device, lengths=(20, 5))
    q = queries(case, 2, generator)
    fused = torch.randn(2, 3 * 4, 64, generator=generator).bfloat16().to(device)
    assert case.run(fused[:, 4:8]).out.shape == (2, 4, 64)  # a slice of a fused buffer is fine
    torch.testing.assert_close(case.run(fused[:, 4:8]).out, case.run(fused[:, 4:8].contiguous()).out)
    for bad in (
        lambda: case.run(q.transpose(0, 1).contiguous().transpose(0, 1)),
        lambda: case.run(q.float()),
        lambda: case.run(q[:, :3]),
        lambda: case.run(q[..., :32]),
        lambda: case.run(q, window=0),
        lambda: case.run(q, soft_cap=0.0),
        lambda: case.run(q, chunk=24),
        lambda: case.run(q, tma=True),
        lambda: case.run(q, longest=1000),
        lambda: paged_decode(q, case.planes, case.layout, case.table.long(), case.lengths),
        lambda: paged_decode(q, {"k": case.planes["k"]}, case.layout, case.table, case.lengths),
        lambda: paged_decode(
            q,
            {n: p.mT.contiguous().mT for n, p in case.planes.items()},
            case.layout,
            case.table,
            case.lengths,
        ),
    ):
        with pytest.raises(UnsupportedInput):
            bad()
    small = kv_kivi.layout(32, 2, 64, group=8)
    pool = torch.zeros(1, 2, 32, 64, dtype=torch.bfloat16, device=device)
    newest = OpenPages(pool, pool, case.lengths * 0, case.lengths * 0)
    for extra in ({}, {"open_pages": newest}):
        with pytest.raises(UnsupportedInput, match=r"open|Groups"):
            paged_decode(q, small.allocate(4, device), small, case.table, case.lengths, **extra)
    permuted = kv_fp8.layout(16, 2, 64, permuted=True)
    with pytest.raises(UnsupportedInput, match="permuted"):
        paged_decode(q, permuted.allocate(4, device), permuted, case.table, case.lengths)


@triton.jit
def _row_offsets(out, table, KVH, P: tl.constexpr, D: tl.constexpr):
    t = tl.arange(0, 16)
    tl.store(out + t, page_rows(table, t, t >= 0, 7, KVH, P) * D)


def test_att_05_offsets_are_64_bit(device: str) -> None:
    """Page 131,072 of 8 heads, 16 tokens and 128 dims: an element offset of 2^31 and more."""
    out = torch.empty(16, dtype=torch.int64, device=device)
    table = torch.tensor([131072], dtype=torch.int32, device=device)
    _row_offsets[(1,)](out, table, 8, P=16, D=128)
    assert out.tolist() == [((131072 * 8 + 7) * 16 + t) * 128 for t in range(16)]
    assert out[0].item() > 2**31


def test_no_sequences_at_all(device: str) -> None:
    layout = kv_plain.layout(16, 2, 64)
    q = torch.empty(0, 4, 64, dtype=torch.bfloat16, device=device)
    none = torch.empty(0, 1, dtype=torch.int32, device=device)
    assert paged_decode(q, layout.allocate(1, device), layout, none, none[:, 0]).out.shape == (0, 4, 64)


def test_split_counts() -> None:
    assert split_count(200, 100) == 1  # the multiprocessors are full
    assert split_count(8, 4) == 1  # too little to split
    assert split_count(8, 500) == 15  # 8 x 33 fills two waves of 132; 8 x 15 is the first within 85 % of that
    assert split_count(200, 100, head_bytes=200 * 2**20) == 4  # each piece fits L2
    assert chunk_tokens(1000, 3, 64) == 384
    assert chunk_tokens(0, 1, 64) == 64
