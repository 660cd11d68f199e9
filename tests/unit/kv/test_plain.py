"""The uncompressed KV format, and bytes derived from planes."""

from __future__ import annotations

import pytest
import torch

from workbench.engine.seams import PageGeometry
from workbench.kv.bytes import bytes_per_token, compression_ratio
from workbench.kv.plain import PlainCodec
from workbench.spec.errors import OptionError


def geometry(dtype: torch.dtype = torch.float32, **over: int) -> PageGeometry:
    sizes = {"layers": 2, "kv_heads": 3, "head_dim": 8, "page_size": 4, "pages": 5} | over
    return PageGeometry(dtype=dtype, **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_come_back_from_their_slots_and_nothing_else_moves(dtype: torch.dtype) -> None:
    g = geometry(dtype)
    codec = PlainCodec(dtype)
    planes = {p.name: torch.full((g.pages, *p.shape), 7.0, dtype=p.dtype) for p in codec.planes(g)}
    where = torch.tensor([18, 1, 5])
    k, v = torch.randn(3, 3, 8, dtype=dtype), torch.randn(3, 3, 8, dtype=dtype)
    codec.encode(planes, where, k, v)
    out_k, out_v = torch.empty(2, 5, 3, 4, 8, dtype=dtype)
    codec.decode(planes, torch.arange(5), out_k, out_v)
    for row, slot in enumerate(where.tolist()):
        assert torch.equal(out_k[slot // 4, :, slot % 4], k[row])
        assert torch.equal(out_v[slot // 4, :, slot % 4], v[row])
    assert int((out_k != 7).any(-1).sum()) == 3 * 3


def test_decode_keeps_the_order_of_the_pages_asked_for() -> None:
    g = geometry()
    codec = PlainCodec(torch.float32)
    planes = {p.name: torch.randn(g.pages, *p.shape) for p in codec.planes(g)}
    k, v = torch.empty(2, 3, 3, 4, 8)
    codec.decode(planes, torch.tensor([4, 0, 4]), k, v)
    assert torch.equal(k, planes["k"][[4, 0, 4]]) and torch.equal(v, planes["v"][[4, 0, 4]])


def test_another_dtype_than_attentions_is_refused() -> None:
    with pytest.raises(OptionError, match="bfloat16"):
        PlainCodec(torch.bfloat16).planes(geometry(torch.float32))


def test_kvc_16_bytes_multiply_by_the_number_of_kv_heads() -> None:
    g = PageGeometry(layers=32, kv_heads=8, head_dim=128, page_size=16, pages=256, dtype=torch.float16)
    codec = PlainCodec(torch.float16)
    assert 4096 * bytes_per_token(codec, g) == 536_870_912
    assert compression_ratio(codec, g) == 1.0
