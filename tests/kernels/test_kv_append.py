"""Writing to pages: the same bytes as the torch codecs, for every format, with and without RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.kernels.attention.kv_append import kivi_encode, kv_append, reference
from workbench.kernels.layouts import kv_fp4, kv_fp8, kv_int8, kv_kivi, kv_plain
from workbench.kv.kivi import KiviCodec
from workbench.models.rope import RopeTable, apply_rope
from workbench.models.rope_spec import RopeSpec
from workbench.spec.errors import UnsupportedInput

pytestmark = pytest.mark.usefixtures("poisoned")

LAYOUTS: dict[str, Any] = {
    "bf16": lambda page, heads, dim: kv_plain.layout(page, heads, dim),
    "fp16": lambda page, heads, dim: kv_plain.layout(page, heads, dim, torch.float16),
    "fp8": kv_fp8.layout,
    "int8": kv_int8.layout,
    "nvfp4": kv_fp4.layout,
}


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name].cpu().view(torch.uint8), b[name].cpu().view(torch.uint8)), name


def turns(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    table = RopeTable(RopeSpec(theta=10000.0), dim, 4096, torch.float32)
    cos, sin = table.gather(positions, int(positions.max()))
    return cos.contiguous(), sin.contiguous()


def rows(n: int, heads: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ordinary rows, a large channel, a tiny row, a zero row, a row at the end of what is finite."""
    k, v = (torch.randn(n, heads, dim, generator=generator) for _ in range(2))
    k[..., 3] *= 30
    k[1] *= 1e-4
    v[2] = 0
    v[3] = 60000 * torch.rand(heads, dim, generator=generator).sub(0.5).sign()
    return k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize("format", list(LAYOUTS))
@pytest.mark.parametrize(("page", "dim", "rope"), [(16, 64, False), (64, 128, True)])
def test_bytes_equal_the_torch_codecs(
    format: str, page: int, dim: int, rope: bool, generator: torch.Generator, device: str
) -> None:
    layout = LAYOUTS[format](page, 2, dim)
    k, v = rows(9, 2, dim, generator)
    slots = torch.randperm(4 * page, generator=generator)[:9]
    slots[5] = -1
    cos, sin = turns(torch.randint(0, 4000, (9,), generator=generator), dim) if rope else (None, None)
    scales = (0.01, 3.0) if format == "nvfp4" else (1.0, 1.0)
    mine, theirs = layout.allocate(4, device), layout.allocate(4)
    kv_append(
        k.to(device), v.to(device), mine, layout, slots.to(device),
        cos if cos is None else cos.to(device), sin if sin is None else sin.to(device), scales,
    )  # fmt: skip
    reference(k, v, theirs, layout, slots, cos, sin, scales)
    same_bytes(mine, theirs)


def test_the_rotation_is_the_engines(generator: torch.Generator, device: str) -> None:
    k, v = (torch.randn(5, 2, 64, generator=generator) for _ in range(2))
    cos, sin = turns(torch.tensor([0, 1, 77, 4000, 9]), 64)
    layout = kv_plain.layout(16, 2, 64, torch.float32)
    planes = layout.allocate(1, device)
    slots = torch.arange(5)
    kv_append(*(x.to(device) for x in (k, v)), planes, layout, *(x.to(device) for x in (slots, cos, sin)))
    expected = apply_rope(k, cos[:, None], sin[:, None])
    assert torch.equal(planes["k"][0].cpu()[:, :5], expected.transpose(0, 1))
    assert torch.equal(planes["v"][0].cpu()[:, :5], v.transpose(0, 1))


def test_att_14_rows_with_a_large_stride_land_where_they_belong(
    generator: torch.Generator, device: str
) -> None:
    """Writes to rows 1..4 of a cache; row 0 stays as it was. Inputs are slices of one fused buffer."""
    layout = kv_plain.layout(16, 2, 64)
    planes = layout.allocate(5, device)
    for plane in planes.values():
        plane.fill_(7.0)
    fused = torch.randn(4, 3 * 2, 64, generator=generator).bfloat16().to(device)
    kv_append(fused[:, 2:4], fused[:, 4:6], planes, layout, 16 * torch.arange(1, 5, device=device) + 3)
    assert bool((planes["k"][0] == 7).all() and (planes["v"][0] == 7).all())
    assert torch.equal(planes["k"][1:, :, 3], fused[:, 2:4])
    assert torch.equal(planes["v"][1:, :, 3], fused[:, 4:6])
    assert bool((planes["k"][1:, :, 4:] == 7).all())


@pytest.mark.parametrize(("bits", "page", "group"), [(4, 128, 32), (2, 128, 32), (4, 32, 16), (2, 32, 32)])
def test_full_pages_become_the_engines_kivi_codes(
    bits: int, page: int, group: int, generator: torch.Generator, device: str
) -> None:
    layout = kv_kivi.layout(page, 2, 64, bits=bits, group=group)
    k, v = (torch.randn(4, 2, page, 64, generator=generator).bfloat16() for _ in range(2))
    k[..., 5] = k[..., 5] * 40 + 100
    k[2], v[2] = 0, 0
    v[3, :, 0] = 60000
    v[3, :, 1] *= 1e-6
    pages, source = torch.tensor([5, 1, 3]), torch.tensor([3, 0, 2])
    mine, theirs = layout.allocate(6, device), layout.allocate(6)
    kivi_encode(mine, layout, pages.to(device), k.to(device), v.to(device), source.to(device))
    KiviCodec(bits, group, page).encode(theirs, pages, k[source], v[source])
    same_bytes(mine, theirs)


def test_what_cannot_be_written_is_refused(device: str) -> None:
    layout = kv_plain.layout(16, 2, 64)
    planes = layout.allocate(2, device)
    k = torch.zeros(3, 2, 64, dtype=torch.bfloat16, device=device)
    slots = torch.arange(3, device=device)
    turn = torch.zeros(3, 64, device=device)
    kivi = kv_kivi.layout(128, 2, 64)
    for bad in (
        lambda: kv_append(k.double(), k.double(), planes, layout, slots),
        lambda: kv_append(k, k.float(), planes, layout, slots),
        lambda: kv_append(k[:, :1], k, planes, layout, slots),
        lambda: kv_append(k.transpose(0, 1).contiguous().transpose(0, 1), k, planes, layout, slots),
        lambda: kv_append(k, k, planes, layout, slots.int()),
        lambda: kv_append(k, k, planes, layout, slots, turn),
        lambda: kv_append(k, k, planes, layout, slots, turn.half(), turn.half()),
        lambda: kv_append(k, k, kivi.allocate(1, device), kivi, slots),
        lambda: kivi_encode(planes, layout, slots, k, k, slots),
    ):
        with pytest.raises(UnsupportedInput):
            bad()
    kv_append(k[:0], k[:0], planes, layout, slots[:0])
