"""Same rows in, same bytes out: KV encoding does not depend on how tokens were batched or written."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.engine.seams import KVCodec, PageGeometry
from workbench.kv.kivi import KiviCodec
from workbench.kv.kv_fp4 import Fp4Codec
from workbench.kv.kv_fp8 import Fp8Codec
from workbench.kv.kv_int8 import Int8Codec
from workbench.kv.plain import PlainCodec
from workbench.kv.ranges import VARIANTS, KVRanges
from workbench.kv.xquant.codec import XQuantCodec
from workbench.kv.xquant.schedule import Schedule, Side
from workbench.numerics.packing import pack, packed_size, unpack

HEADS, DIM, SIZE, PAGES = 2, 64, 32, 3
RANGES = KVRanges(
    torch.linspace(-0.2, 0.2, 2 * HEADS * DIM).view(2, 1, HEADS, DIM),
    dict.fromkeys(VARIANTS, torch.full((2, 1, HEADS), 4.0)),
    "test",
    1,
)
TOKEN = [
    PlainCodec(torch.bfloat16),
    PlainCodec(torch.float32),
    Int8Codec(),
    Fp8Codec(),
    Fp8Codec("unit"),
    Fp8Codec("head", RANGES).at(0),
    Fp4Codec(ranges=RANGES).at(0),
    Fp4Codec(rotate=True, affine=True, ranges=RANGES).at(0),
    Fp4Codec("mxfp4"),
]
WIDTHS = Schedule((Side(1), Side(2)), (Side(2), Side(1)))
PAGE: list[KVCodec] = [KiviCodec(4, 16, 32), KiviCodec(2, 16, 32), KiviCodec(2, 8, 32)]
PAGE += [XQuantCodec(WIDTHS, WIDTHS, group=16, residual=32).at(i) for i in range(2)]


def planes_of(codec: KVCodec, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    dtype = getattr(codec, "dtype", dtype)
    g = PageGeometry(layers=1, kv_heads=HEADS, head_dim=DIM, page_size=SIZE, pages=PAGES, dtype=dtype)
    return {p.name: torch.zeros(PAGES, *p.shape, dtype=p.dtype) for p in codec.planes(g)}


def same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


@st.composite
def chunkings(draw: st.DrawFn, total: int) -> list[int]:
    cuts = draw(st.sets(st.integers(1, total - 1), max_size=12))
    edges = [0, *sorted(cuts), total]
    return [b - a for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("codec", TOKEN, ids=lambda c: c.key)
@given(seed=st.integers(0, 2**16), sizes=chunkings(40), magnitude=st.sampled_from([1e-6, 1e-2, 1.0, 300.0]))
def test_token_codecs_write_the_same_bytes_in_any_chunking(
    codec: KVCodec, seed: int, sizes: list[int], magnitude: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 40, HEADS, DIM, generator=draw) * magnitude).unbind()
    slots = torch.randperm(PAGES * SIZE, generator=draw)[:40]
    whole, parts = planes_of(codec), planes_of(codec)
    codec.encode(whole, slots, k, v)
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        codec.encode(parts, slots[rows], k[rows], v[rows])
        start += size
    assert same_bytes(whole, parts)


@pytest.mark.parametrize("codec", TOKEN, ids=lambda c: c.key)
@given(seed=st.integers(0, 2**16), lost=st.integers(1, 30))
def test_rewriting_rejected_drafts_leaves_no_trace(codec: KVCodec, seed: int, lost: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, 40, HEADS, DIM, generator=draw)
    clean, drafted, slots = planes_of(codec), planes_of(codec), torch.arange(40)
    codec.encode(clean, slots, rows[0], rows[1])
    codec.encode(drafted, slots[:lost], rows[2, :lost], rows[3, :lost])
    codec.encode(drafted, slots, rows[0], rows[1])
    assert same_bytes(clean, drafted)


@pytest.mark.parametrize("codec", PAGE, ids=lambda c: c.key)
@given(seed=st.integers(0, 2**16), sizes=chunkings(PAGES), offset=st.sampled_from([0.0, -40.0]))
def test_page_codecs_write_the_same_bytes_in_any_order(
    codec: KVCodec, seed: int, sizes: list[int], offset: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, PAGES, HEADS, SIZE, DIM, generator=draw) + offset).unbind()
    pages = torch.randperm(PAGES, generator=draw)
    whole, parts = planes_of(codec), planes_of(codec)
    codec.encode(whole, pages, k, v)
    start = PAGES
    for size in sizes:  # last pages first
        rows = slice(start - size, start)
        codec.encode(parts, pages[rows], k[rows], v[rows])
        start -= size
    assert same_bytes(whole, parts)


@pytest.mark.parametrize("codec", TOKEN + PAGE, ids=lambda c: c.key)
@given(seed=st.integers(0, 2**16), n=st.integers(1, PAGES))
def test_a_page_decodes_the_same_whatever_is_decoded_with_it(codec: KVCodec, seed: int, n: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    planes = planes_of(codec)
    if codec.grain == "page":
        codec.encode(planes, torch.arange(PAGES), *torch.randn(2, PAGES, HEADS, SIZE, DIM, generator=draw))
    else:
        slots = torch.arange(PAGES * SIZE)
        codec.encode(planes, slots, *torch.randn(2, PAGES * SIZE, HEADS, DIM, generator=draw))
    pages = torch.randperm(PAGES, generator=draw)[:n]
    together = torch.empty(2, n, HEADS, SIZE, DIM)
    codec.decode(planes, pages, together[0], together[1])
    for i, page in enumerate(pages):
        alone = torch.empty(2, 1, HEADS, SIZE, DIM)
        codec.decode(planes, page[None], alone[0], alone[1])
        assert torch.equal(alone[:, 0], together[:, i])


@given(bits=st.integers(1, 8), n=st.integers(0, 70), m=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_packing_is_a_bijection_onto_its_bytes(bits: int, n: int, m: int, seed: int) -> None:
    codes = torch.randint(
        0, 2**bits, (m, n), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    packed = pack(codes, bits)
    assert packed.shape == (m, packed_size(n, bits)) and packed.shape[1] >= -(-n * bits // 8)
    assert torch.equal(unpack(packed, bits, n), codes)
