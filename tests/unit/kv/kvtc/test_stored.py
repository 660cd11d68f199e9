"""An opened payload of a bfloat16 cache is multiplied in bfloat16, and loses nothing that coding did not."""

from __future__ import annotations

import torch

from workbench.kv.cached import CachedRows


def error(a: CachedRows, b: CachedRows) -> float:
    return sum(
        float((x.float() - y.float()).square().sum()) for x, y in zip((*a.k, *a.v), (*b.k, *b.v), strict=True)
    )


def test_the_bfloat16_product_adds_next_to_nothing(make_rows, make_codec, joint):
    rows = make_rows(joint, 200)
    rows = CachedRows(
        tuple(x.bfloat16() for x in rows.k), tuple(x.bfloat16() for x in rows.v), rows.positions
    )
    codec = make_codec(8)
    stored = codec.open(codec.encode(rows))
    fast = stored.rows()
    assert stored.factors[0].dtype == torch.bfloat16 and fast.k[0].dtype == torch.bfloat16
    exact = codec.open(codec.encode(rows))
    exact.__dict__["factors"] = exact.coefficients
    reference = exact.rows()
    coding = error(reference, rows)
    assert coding > 0 and error(fast, rows) < 1.02 * coding
    for a, b in zip((*fast.k, *fast.v), (*reference.k, *reference.v), strict=True):
        assert float((a.float() - b.float()).abs().max()) <= 2**-6 * float(b.float().abs().max())
