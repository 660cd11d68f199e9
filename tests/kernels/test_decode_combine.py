"""Merging partial attention: splits against the whole, empty parts, shared prefixes."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels.attention.decode_combine import cascade, decode_combine, reference
from workbench.kernels.attention.paged_decode import paged_decode
from workbench.kernels.attention.paged_decode import reference as attention
from workbench.kernels.layouts import kv_plain
from workbench.spec.errors import UnsupportedInput

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("parts", "dim"), [(1, 64), (3, 128), (16, 80), (130, 64)])
def test_parts_merge_to_the_whole(parts: int, dim: int, generator: torch.Generator, device: str) -> None:
    outs = torch.randn(5, 3, parts, dim, generator=generator)
    lses = torch.randn(5, 3, parts, generator=generator) * 20
    exact, total = reference(outs, lses)
    out, lse = decode_combine(outs.to(device), lses.to(device))
    torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), total, rtol=1e-6, atol=1e-5)


def test_the_definition_is_softmax_over_the_union(generator: torch.Generator) -> None:
    s = torch.randn(4, 3, 7, generator=generator).double() * 5
    v = torch.randn(3, 7, 8, generator=generator).double()
    outs = torch.einsum("rpn,pnd->rpd", s.softmax(-1), v)
    merged, lse = reference(outs, s.logsumexp(-1))
    whole = torch.einsum("rn,nd->rd", s.flatten(1).softmax(-1), v.flatten(0, 1))
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse, s.flatten(1).logsumexp(-1))


def test_att_03_empty_parts_weigh_nothing_and_empty_rows_are_zero(
    generator: torch.Generator, device: str
) -> None:
    outs = torch.randn(3, 4, 64, generator=generator)
    lses = torch.randn(3, 4, generator=generator)
    lses[0, 1:] = -torch.inf
    lses[1] = -torch.inf
    outs[lses == -torch.inf] = torch.nan
    out, lse = decode_combine(outs.to(device), lses.to(device))
    torch.testing.assert_close(out[0].cpu(), outs[0, 0])
    assert torch.equal(out[1].cpu(), torch.zeros(64))
    assert lse[1].item() == -torch.inf
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_part_that_is_no_number_is_passed_on(generator: torch.Generator, device: str, place: int) -> None:
    outs = torch.randn(3, 4, 64, generator=generator)
    lses = torch.randn(3, 4, generator=generator)
    lses[1, place] = torch.nan
    lses[2] = torch.nan
    exact, total = reference(outs, lses)
    out, lse = decode_combine(outs.to(device), lses.to(device))
    for found in (exact, out.cpu(), total, lse.cpu()):
        assert bool(found[0].isfinite().all()) and bool(found[1:].isnan().all())


def test_a_shared_prefix_is_attended_once(generator: torch.Generator, device: str) -> None:
    """Three sequences share 40 tokens: one pass over the prefix for all their queries, then own suffixes."""
    batch, heads, kv_heads, dim, page, prefix = 3, 4, 2, 64, 16, 48
    lengths = torch.tensor([50, 81, 49], dtype=torch.int32)
    table = torch.tensor([[1, 2, 3, 4, 0, 0], [1, 2, 3, 5, 6, 7], [1, 2, 3, 8, 0, 0]], dtype=torch.int32)
    layout = kv_plain.layout(page, kv_heads, dim)
    k, v = (torch.randn(9, kv_heads, page, dim, generator=generator).bfloat16() for _ in range(2))
    q = torch.randn(batch, heads, dim, generator=generator).bfloat16()
    planes = {"k": k.to(device), "v": v.to(device)}
    # All queries of the group become the query heads of one sequence: [1, kv head, (sequence, member), D].
    group = heads // kv_heads
    packed = q.view(batch, kv_heads, group, dim).transpose(0, 1).reshape(1, -1, dim).to(device)
    shared = paged_decode(
        packed, planes, layout, table[:1, :3].to(device), torch.tensor([prefix]).int().to(device)
    )

    def unpacked(x: torch.Tensor) -> torch.Tensor:
        return x.view(kv_heads, batch, group, -1).transpose(0, 1).reshape(batch, heads, -1)

    own = paged_decode(
        q.to(device), planes, layout, table[:, 3:].contiguous().to(device), (lengths - prefix).to(device)
    )
    front = unpacked(shared.out[0]).float(), unpacked(shared.lse[0, :, None])[..., 0]
    out, lse = cascade(front, (own.out, own.lse), torch.bfloat16)
    exact, total = attention(q, k, v, table, lengths)
    assert (out.cpu().double() - exact).norm() / exact.norm() < 1e-2
    torch.testing.assert_close(lse.cpu().double(), total, rtol=0, atol=1e-3)


def test_what_cannot_be_merged_is_refused(device: str) -> None:
    outs, lses = torch.zeros(2, 3, 64, device=device), torch.zeros(2, 3, device=device)
    for bad in (
        lambda: decode_combine(outs.double(), lses),
        lambda: decode_combine(outs, lses.half()),
        lambda: decode_combine(outs, lses[:1]),
        lambda: decode_combine(outs.transpose(0, 1), lses.T),
        lambda: decode_combine(torch.zeros(1, 2000, 8, device=device), torch.zeros(1, 2000, device=device)),
    ):
        with pytest.raises(UnsupportedInput):
            bad()
