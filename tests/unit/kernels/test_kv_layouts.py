"""KV page layouts: what is written comes back within the format's own error, wherever and however often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.engine.seams import PageGeometry
from workbench.kernels.layouts import kv_fp4, kv_fp8, kv_int8, kv_kivi, kv_plain, permute
from workbench.kernels.layouts.pages import PageLayout
from workbench.kv import kivi, plain
from workbench.kv import kv_int8 as engine_int8
from workbench.spec.errors import UnsupportedInput

PAGES, PAGE, HEADS, DIM = 5, 32, 3, 64

TOKENWISE: dict[str, tuple[PageLayout, Any, dict[str, Any]]] = {
    "bf16": (kv_plain.layout(PAGE, HEADS, DIM), kv_plain, {}),
    "fp8": (kv_fp8.layout(PAGE, HEADS, DIM), kv_fp8, {}),
    "fp8 permuted": (kv_fp8.layout(PAGE, HEADS, DIM, permuted=True), kv_fp8, {"permuted": True}),
    "int8": (kv_int8.layout(PAGE, HEADS, DIM), kv_int8, {}),
    "nvfp4": (kv_fp4.layout(PAGE, HEADS, DIM), kv_fp4, {"scales": (0.01, 0.02)}),
    "mxfp4": (kv_fp4.layout(PAGE, HEADS, DIM, "mxfp4"), kv_fp4, {"kind": "mxfp4"}),
}
# Largest relative error per row, |x - x'| / amax(row): half a step of the coarsest part of each grid.
BOUND = {"bf16": 2**-8, "fp8": 2**-4, "fp8 permuted": 2**-4, "int8": 0.5 / 126, "nvfp4": 0.2, "mxfp4": 0.26}


def rows(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, HEADS, DIM, generator=g), torch.randn(tokens, HEADS, DIM, generator=g)


@pytest.mark.parametrize("name", TOKENWISE)
def test_rows_come_back_from_scattered_slots(name: str) -> None:
    layout, module, options = TOKENWISE[name]
    planes = layout.allocate(PAGES)
    k, v = rows(70)
    slots = torch.randperm(PAGES * PAGE)[:70]
    module.write(planes, slots, k, v, **options)
    for wrote, got in zip((k, v), module.read(planes, torch.arange(PAGES), **options), strict=True):
        assert got.shape == (PAGES, HEADS, PAGE, DIM)
        back = got.transpose(1, 2).reshape(-1, HEADS, DIM)
        error = (back[slots] - wrote).abs().amax(-1) / wrote.abs().amax(-1)
        assert float(error.max()) <= BOUND[name]
        untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
        untouched[slots] = False
        assert float(back[untouched].abs().max()) == 0


@pytest.mark.parametrize("name", TOKENWISE)
def test_bytes_do_not_depend_on_how_tokens_were_batched(name: str) -> None:
    layout, module, options = TOKENWISE[name]
    whole, single = layout.allocate(PAGES), layout.allocate(PAGES)
    k, v = rows(40)
    slots = torch.arange(7, 47)
    module.write(whole, slots, k, v, **options)
    for t in range(40):
        module.write(single, slots[t : t + 1], k[t : t + 1], v[t : t + 1], **options)
    for plane in layout.planes:
        assert torch.equal(raw(whole[plane.name]), raw(single[plane.name]))


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_pages_stay_within_half_a_step(bits: int) -> None:
    layout = kv_kivi.layout(PAGE, HEADS, DIM, bits=bits, group=16)
    planes = layout.allocate(PAGES)
    g = torch.Generator().manual_seed(1)
    k, v = (torch.randn(2, HEADS, PAGE, DIM, generator=g) for _ in range(2))
    where = torch.tensor([3, 1])
    kv_kivi.write(planes, where, k, v)
    got_k, got_v = kv_kivi.read(planes, where)
    k_step = planes["k_step"][where].float().repeat_interleave(16, 2).reshape(2, HEADS, PAGE, DIM)
    v_step = planes["v_step"][where].float().repeat_interleave(16, 4).reshape(2, HEADS, PAGE, DIM)
    # The grid covers the data, so the error is half a step, and a rounding of the decoded value.
    assert bool(((got_k - k).abs() <= k_step * 0.5001 + 1e-6).all())
    assert bool(((got_v - v).abs() <= v_step * 0.5001 + 1e-6).all())
    assert float(kv_kivi.read(planes, torch.tensor([0]))[0].abs().max()) == 0


@pytest.mark.parametrize("bits", [2, 4])
def test_the_engine_s_pages_are_the_kernels_pages(bits: int) -> None:
    """Planes of the engine's codecs can be handed to a kernel as they lie: same shapes, same bytes."""
    g = torch.Generator().manual_seed(2)
    k, v = rows(PAGE)
    pairs: list[tuple[Any, PageLayout, Callable[..., None], str]] = [
        (plain.PlainCodec(torch.bfloat16), kv_plain.layout(PAGE, HEADS, DIM), kv_plain.write, "token"),
        (engine_int8.Int8Codec(), kv_int8.layout(PAGE, HEADS, DIM), kv_int8.write, "token"),
        (
            kivi.KiviCodec(bits, 16, PAGE),
            kv_kivi.layout(PAGE, HEADS, DIM, bits=bits, group=16),
            kv_kivi.write,
            "page",
        ),
    ]
    for codec, layout, write, grain in pairs:
        geometry = PageGeometry(
            layers=1, kv_heads=HEADS, head_dim=DIM, page_size=PAGE, dtype=torch.bfloat16, pages=PAGES
        )
        assert [(p.name, p.dtype, tuple(p.shape)) for p in codec.planes(geometry)] == [
            (p.name, p.dtype, p.shape) for p in layout.planes
        ]
        theirs, ours = layout.allocate(PAGES), layout.allocate(PAGES)
        if grain == "token":
            where = torch.randperm(PAGES * PAGE, generator=g)[:PAGE]
            arguments = (where, k, v)
        else:
            where = torch.tensor([4])
            arguments = (where, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        codec.encode(theirs, *arguments)
        write(ours, *arguments)
        for plane in layout.planes:
            assert torch.equal(raw(theirs[plane.name]), raw(ours[plane.name])), plane.name


def test_the_permutation_is_the_accumulator_s() -> None:
    place = permute.columns()
    assert sorted(place) == list(range(16))
    for h in range(2):
        for t in range(4):
            for e in range(2):
                assert place[8 * h + 2 * t + e] == 4 * t + 2 * h + e
    x = torch.arange(48.0).reshape(3, 16)
    moved = permute.permute(x)
    for token, column in enumerate(place):
        assert torch.equal(moved[:, column], x[:, token])
    assert torch.equal(permute.restore(moved), x)
    with pytest.raises(UnsupportedInput, match="16"):
        permute.permute(torch.zeros(3, 24))


def test_bytes_per_token_count_scales() -> None:
    assert kv_plain.layout(16, 1, 128).bytes_per_token() == 512
    assert kv_fp4.layout(16, 1, 128).bytes_per_token() == 2 * 72
    assert kv_fp4.layout(16, 1, 128, "mxfp4").bytes_per_token() == 2 * 68
    assert kv_int8.layout(16, 1, 128).bytes_per_token() == 2 * 130
    assert kv_kivi.layout(128, 1, 128, bits=2, group=32).bytes_per_token() == 2 * 128 * 3 // 8
    layout = kv_kivi.layout(64, 2, 64, bits=4)
    held = sum(t.untyped_storage().nbytes() for t in layout.allocate(7).values())
    assert layout.bytes_per_token() * 64 * 7 == held


def test_wrong_planes_are_refused_by_name() -> None:
    layout = kv_int8.layout(PAGE, HEADS, DIM)
    planes = layout.allocate(PAGES)
    assert layout.check(planes) == PAGES
    assert layout.strides("k") == planes["k"].stride()
    with pytest.raises(UnsupportedInput, match="k_scale"):
        layout.check({**planes, "k_scale": planes["k_scale"].float()})
    with pytest.raises(UnsupportedInput, match="contiguous"):
        layout.check({**planes, "k": planes["k"].transpose(2, 3).contiguous().transpose(2, 3)})
    with pytest.raises(UnsupportedInput, match="numbers of pages"):
        layout.check({**planes, "k": planes["k"][:2]})
    with pytest.raises(UnsupportedInput, match="no plane"):
        layout.plane("q")
    for bad in (
        lambda: kv_fp8.layout(24, 1, 64),
        lambda: kv_fp4.layout(16, 1, 48),
        lambda: kv_kivi.layout(32, 1, 64, bits=3),
        lambda: kv_kivi.layout(32, 1, 64, group=12),
    ):
        with pytest.raises(UnsupportedInput):
            bad()
