"""Attention of fixed shapes against the ragged form: the same rows, whatever pads them."""

from __future__ import annotations

import pytest
import torch

from workbench.attention.pages import TorchPages
from workbench.attention.pinned import PinnedAttention
from workbench.engine.seams import AttentionShape, AttentionSpan


def pool(shape: AttentionShape, pages: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    size = (pages, shape.kv_heads, shape.page_size, shape.head_dim)
    return tuple(torch.randn(size, generator=gen, dtype=torch.float64).to(dtype) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rows", [1, 5, 9])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("numerics", ["pinned", "fast"])
def test_rows_are_those_of_the_ragged_form(numerics, page, rows, window):
    """Pinned bit for bit, fast within rounding; what no row may see is NaN here and never comes out."""
    shape = AttentionShape(heads=4, kv_heads=2, head_dim=32, page_size=page, window=window)
    dtype = torch.float64 if numerics == "pinned" else torch.float32
    op = PinnedAttention() if numerics == "pinned" else TorchPages()
    starts, pages = [3, 70, 121], 192 // page
    tables = (1 + torch.randperm(3 * pages, generator=torch.Generator().manual_seed(2))).view(3, pages)
    k, v = pool(shape, 3 * pages + 1, dtype)
    for table, start in zip(tables, starts, strict=True):
        for slot in range(start + rows, 192):
            k[table[slot // page], :, slot % page] = torch.nan
            v[table[slot // page], :, slot % page] = torch.nan
    q = torch.randn(3 * rows, 4, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(
        dtype
    )
    spans = [
        AttentionSpan(rows, start, table.tolist(), range(start, start + rows))
        for start, table in zip(starts, tables, strict=True)
    ]
    wanted = op.run(op.prepare(spans, shape), q, k.clone(), v.clone())
    got = op.fixed(tables, torch.tensor(starts), rows, shape)(q, k, v)
    assert bool(got.isfinite().all())
    if numerics == "pinned":
        assert torch.equal(got, wanted)
    else:
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
