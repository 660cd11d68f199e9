"""FP4 pages: codes and scales as specified, calibration that matters, layers told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from workbench.engine.seams import PageGeometry
from workbench.kernels.layouts import kv_fp4 as layouts
from workbench.kv.kv_fp4 import Fp4Codec, decode
from workbench.kv.ranges import VARIANTS, KVRanges, RangeRecorder, rotation, variant
from workbench.numerics import e2m1
from workbench.spec.errors import InvariantError, OptionError

LAYERS, HEADS, DIM, PAGE = 3, 2, 64, 16
GEOMETRY = PageGeometry(LAYERS, HEADS, DIM, PAGE, 4, torch.float32)
KINDS = [
    Fp4Codec(k, affine=a, rotate=r) for k in ("nvfp4", "mxfp4") for a in (False, True) for r in (False, True)
]


def rows(tokens: int = 40, scale: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, tokens, HEADS, DIM, generator=draw) * scale
    return k + 2 * scale, v


def ranges_of(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> KVRanges:
    recorder = RangeRecorder(len(layers), HEADS, DIM)
    for _ in range(2):
        for i, (k, v) in enumerate(layers):
            recorder.add(i, k, v)
        if recorder._mean is None:
            recorder.means_done()
    return recorder.ranges("test")


def round_trip(codec: Fp4Codec, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write rows to pages 1 … and read them back, [T, Hkv, D]."""
    planes = {p.name: torch.zeros(4, *p.shape, dtype=p.dtype) for p in codec.planes(GEOMETRY)}
    slots = torch.arange(len(k)) + PAGE
    codec.encode(planes, slots, k, v)
    out = torch.empty(2, 4, HEADS, PAGE, DIM)
    codec.decode(planes, torch.arange(4), out[0], out[1])
    flat = out.transpose(2, 3).reshape(2, 4 * PAGE, HEADS, DIM)[:, PAGE : PAGE + len(k)]
    return flat[0], flat[1]


def test_decoding_is_the_table_for_every_code_and_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(256, 8)
    for kind, block, scales in (
        ("nvfp4", 16, torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)),
        ("mxfp4", 32, torch.arange(1, 240, dtype=torch.uint8)),
    ):
        wide = codes.repeat(1, block // 16)
        for scale in scales.view(torch.uint8)[:: 7 if kind == "nvfp4" else 13]:
            column = scale.expand(256, 1).contiguous()
            column = column.view(torch.float8_e4m3fn) if kind == "nvfp4" else column
            got = decode(wide, column, kind, 0.75)
            assert torch.equal(got, layouts.dequantize(wide, column, kind, 0.75))


def test_planes_are_those_the_kernels_read() -> None:
    for kind, bits in (("nvfp4", 4.5), ("mxfp4", 4.25)):
        planes = Fp4Codec(kind).planes(GEOMETRY)
        expected = layouts.layout(PAGE, HEADS, DIM, kind).planes
        assert [(p.name, p.dtype, p.shape) for p in planes] == [(p.name, p.dtype, p.shape) for p in expected]
        stored = sum(torch.empty(p.shape, dtype=p.dtype).nbytes for p in planes)
        assert stored * 8 / (2 * PAGE * HEADS * DIM) == bits


@pytest.mark.parametrize("codec", KINDS, ids=lambda c: c.key)
def test_the_error_is_at_most_a_third_step_of_the_largest_in_the_block(codec: Fp4Codec) -> None:
    """Codes 4 and 6 are two apart; a rounded scale cuts off at most a sixteenth (a power: a quarter)."""
    k, v = rows()
    codec = replace(codec, ranges=ranges_of([(k, v)] * LAYERS)).at(1)
    block = layouts.BLOCK[codec.kind]
    worst = 1 / 6 * (17 / 16) if codec.kind == "nvfp4" else 0.25
    for i, (x, back) in enumerate(zip((k, v), round_trip(codec, k, v), strict=True)):
        mean = codec.means[i] if codec.means is not None else torch.zeros(HEADS, DIM)
        turn = rotation(DIM) if codec.rotate else torch.eye(DIM)
        coded, seen = (x - mean) @ turn, (back - mean) @ turn
        top = coded.unflatten(-1, (-1, block)).abs().amax(-1, keepdim=True)
        error = (coded - seen).unflatten(-1, (-1, block)).abs()
        assert (error <= worst * top + 1e-5).all()


def test_a_layer_of_small_values_loses_nothing_with_calibration_and_much_without() -> None:
    """Without a tensor scale the block scales of a small layer are E4M3 subnormals."""
    k, v = rows()
    errors = {}
    for power in (0, -8, -11, -14):
        small = k * 2.0**power, v * 2.0**power
        calibrated = Fp4Codec(ranges=ranges_of([small])).at(0)
        for name, codec in (("calibrated", calibrated), ("unit", Fp4Codec(calibrated=False).at(0))):
            back = round_trip(codec, *small)[1]
            errors[name, power] = float((back - small[1]).norm() / small[1].norm())
    assert errors["calibrated", -8] == pytest.approx(errors["calibrated", 0], rel=1e-4)
    assert errors["calibrated", -14] == pytest.approx(errors["calibrated", 0], rel=1e-4)
    assert errors["unit", -8] > 1.1 * errors["unit", 0]
    assert errors["unit", -11] > 2 * errors["unit", 0]
    assert errors["unit", -14] > 4 * errors["unit", 0]


def test_layers_have_their_own_scales_and_a_drafter_the_widest() -> None:
    codec = Fp4Codec(ranges=ranges_of([rows(scale=s) for s in (1.0, 4.0, 0.25)]))
    factors = [codec.at(i).factors[0] for i in range(3)]
    assert factors[1] == pytest.approx(4 * factors[0]) and factors[2] == pytest.approx(factors[0] / 4)
    assert codec.at(-1).factors[0] == factors[1]
    affine = replace(codec, affine=True)
    assert affine.at(-1).means is None and affine.at(0).means is not None


def test_what_lies_beyond_the_range_saturates() -> None:
    k, v = rows()
    codec = Fp4Codec(ranges=ranges_of([(k, v)])).at(0)
    back = round_trip(codec, 1000 * k, v)[0]
    largest = codec.factors[0] * 448 * e2m1.LARGEST
    assert back.abs().max() <= largest * (1 + 1e-6)
    assert back.isfinite().all()


def test_keys_tell_format_transform_and_calibration_apart() -> None:
    a, b = ranges_of([rows()]), ranges_of([rows(seed=1)])
    keys = {replace(c, ranges=r).key for c in KINDS for r in (a, b)}
    # MXFP4 without a mean has nothing from calibration.
    assert len(keys) == 2 * len(KINDS) - 2
    with pytest.raises(InvariantError, match="calibrated"):
        Fp4Codec().at(0)
    assert Fp4Codec("mxfp4").at(0).factors == (1.0, 1.0)


def test_a_head_without_whole_blocks_is_refused_with_a_way_out() -> None:
    with pytest.raises(OptionError, match="kv_fp8"):
        Fp4Codec().planes(replace(GEOMETRY, head_dim=40))


def test_ranges_are_those_of_the_rows() -> None:
    layers = [rows(seed=i) for i in range(2)]
    found = ranges_of(layers)
    for i, pair in enumerate(layers):
        for j, x in enumerate(pair):
            mean = x.double().mean(0)
            assert torch.allclose(found.mean[j, i].double(), mean, atol=1e-6)
            for name in VARIANTS:
                y = x - found.mean[j, i] if "affine" in name else x
                y = y @ rotation(DIM) if "rotate" in name else y
                assert torch.allclose(found.amax[name][j, i], y.abs().amax((0, 2)))
    assert {variant(affine=a, rotate=r) for a in (0, 1) for r in (0, 1)} == set(VARIANTS)
