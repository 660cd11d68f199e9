"""What every KV codec promises: error bounds, exact zeros, bytes, axes, and refusal of sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from workbench.engine.seams import KVCodec, PageGeometry
from workbench.kv import kivi, kv_fp8, kv_int8
from workbench.kv.bytes import bytes_per_token, compression_ratio, page_bytes
from workbench.kv.ranges import VARIANTS, KVRanges
from workbench.spec.errors import InvariantError, OptionError
from workbench.spec.technique import make_config

RoundTrip = Callable[..., tuple[torch.Tensor, torch.Tensor]]
NewPlanes = Callable[[KVCodec], dict[str, torch.Tensor]]


def sqnr(x: torch.Tensor, back: torch.Tensor) -> float:
    """Signal over quantization noise, dB."""
    return float(10 * torch.log10(x.square().sum() / (x - back).square().sum()))


def test_int8_error_is_at_most_half_a_step(round_trip: RoundTrip, seeded: None) -> None:
    k, v = torch.randn(2, 2, 3, 32, 64) * torch.tensor([1e-3, 50.0]).view(2, 1, 1, 1, 1)
    for x, back in zip((k, v), round_trip(kv_int8.Int8Codec(), k, v), strict=True):
        bound = x.abs().amax(-1, keepdim=True) / 127 * (1 + 1.5 * 2**-10) + 1.5 * 2**-24
        assert ((back - x).abs() <= bound / 2 * (1 + 2**-20)).all()


def test_fp8_error_is_at_most_a_sixteenth_or_half_a_subnormal(round_trip: RoundTrip, seeded: None) -> None:
    k, v = torch.randn(2, 2, 3, 32, 64) * torch.tensor([1e-3, 50.0]).view(2, 1, 1, 1, 1)
    for x, back in zip((k, v), round_trip(kv_fp8.Fp8Codec(), k, v), strict=True):
        scale = x.abs().amax(-1, keepdim=True) / 448 * (1 + 1.5 * 2**-10) + 1.5 * 2**-24
        assert ((back - x).abs() <= torch.maximum(x.abs() / 16, scale * 2**-10) * (1 + 2**-20)).all()


@pytest.mark.parametrize("bits", [4, 2])
def test_kivi_error_is_at_most_half_a_group_step(bits: int, round_trip: RoundTrip, seeded: None) -> None:
    k, v = torch.randn(2, 2, 3, 32, 64) + 20
    back_k, back_v = round_trip(kivi.KiviCodec(bits, 16, 32), k, v)
    for x, back, dim in (
        (k.view(2, 3, 2, 16, 64), back_k.view(2, 3, 2, 16, 64), 3),  # a channel over 16 tokens
        (v.view(2, 3, 32, 4, 16), back_v.view(2, 3, 32, 4, 16), 4),  # 16 channels of a token
    ):
        spread = x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True) + 2**-6  # float16's step at 20
        assert ((back - x).abs() <= spread / (2**bits - 1) / 2 * (1 + 2**-9) + 1e-5).all()


# Uniform noise of half a step against a normal row whose largest of 64 elements is near 2.5 sigma; the group
# formats see 16 elements with a spread near 3.5 sigma. A bar is the derived figure less 1 dB.
@pytest.mark.parametrize(
    ("codec", "bar"),
    [
        (kv_int8.Int8Codec(), 44),
        (kv_fp8.Fp8Codec(), 30),
        (kivi.KiviCodec(4, 16, 32), 22),
        (kivi.KiviCodec(2, 16, 32), 8),
    ],
    ids=lambda c: getattr(c, "key", None),
)
def test_sqnr_on_normal_rows(codec: KVCodec, bar: float, round_trip: RoundTrip, seeded: None) -> None:
    k, v = torch.randn(2, 2, 3, 32, 64)
    for x, back in zip((k, v), round_trip(codec, k, v), strict=True):
        assert sqnr(x, back) > bar


def test_two_bits_are_worse_than_four(round_trip: RoundTrip, seeded: None) -> None:
    k, v = torch.randn(2, 2, 3, 32, 64)
    four, two = (sqnr(k, round_trip(kivi.KiviCodec(b, 16, 32), k, v)[0]) for b in (4, 2))
    assert four - two > 10  # two bits are worth 12 dB, plus what the grid's ends cost


def test_qnt_05_zero_rows_are_exact_and_leave_others_alone(
    codec: KVCodec, round_trip: RoundTrip, seeded: None
) -> None:
    k, v = torch.randn(2, 2, 3, 32, 64)
    before_k, before_v = round_trip(codec, k, v)
    k[1], v[1] = 0, 0
    after_k, after_v = round_trip(codec, k, v)
    assert (after_k[1] == 0).all() and (after_v[1] == 0).all()
    assert torch.equal(after_k[0], before_k[0]) and torch.equal(after_v[0], before_v[0])


def test_one_zero_token_among_others(token_codec: KVCodec, round_trip: RoundTrip, seeded: None) -> None:
    k, v = torch.randn(2, 2, 3, 32, 64)
    before, _ = round_trip(token_codec, k, v)
    k[0, 1, 5] = 0
    after, _ = round_trip(token_codec, k, v)
    assert (after[0, 1, 5] == 0).all()
    after[0, 1, 5] = before[0, 1, 5]
    assert torch.equal(after, before)


def test_huge_rows_saturate_and_stay_finite(codec: KVCodec, round_trip: RoundTrip) -> None:
    k = torch.full((2, 3, 32, 64), 1e30)
    k[..., ::2] = -1e30
    for back in round_trip(codec, k, k):
        assert torch.isfinite(back).all() and ((back > 0) == (k > 0)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_decoding_to_another_dtype_rounds_the_same_values_once(
    codec: KVCodec, dtype: torch.dtype, round_trip: RoundTrip, seeded: None
) -> None:
    k, v = torch.randn(2, 2, 3, 32, 64)
    for exact, other in zip(round_trip(codec, k, v), round_trip(codec, k, v, dtype), strict=True):
        eps = 2**-8 if dtype == torch.bfloat16 else 2**-22
        assert ((other.double() - exact.double()).abs() <= exact.abs().double() * eps + 2**-22).all()


def test_bytes_are_those_of_the_storages(
    codec: KVCodec, geometry: PageGeometry, new_planes: NewPlanes
) -> None:
    held = sum(t.untyped_storage().nbytes() for t in new_planes(codec).values())
    tokens = geometry.pages * geometry.page_size
    assert tokens * bytes_per_token(codec, geometry) == geometry.layers * held
    planes = codec.planes(geometry)
    assert page_bytes(planes) == page_bytes(planes, "kv_payload") + page_bytes(planes, "kv_meta")


def test_axes_name_every_dimension(codec: KVCodec, geometry: PageGeometry) -> None:
    for plane in codec.planes(geometry):
        assert len(plane.axes) == len(plane.shape) and plane.axes[0] == "head"
        assert plane.shape[0] == geometry.kv_heads


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (kv_int8.Int8Codec(), 8 + 16 / 64),
        (kv_fp8.Fp8Codec(), 8 + 16 / 64),
        (kv_fp8.Fp8Codec("unit"), 8),
        (kivi.KiviCodec(4, 32, 128), 5),
        (kivi.KiviCodec(2, 32, 128), 3),
    ],
    ids=lambda c: getattr(c, "key", None),
)
def test_real_bits_per_element(codec: KVCodec, bits: float, geometry: PageGeometry) -> None:
    sizes = codec.page_sizes(64)
    g = replace(geometry, page_size=sizes[0] if sizes else 16)
    assert compression_ratio(codec, g) == pytest.approx(16 / bits, rel=1e-12)


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_kvc_13_any_number_of_layers_keeps_shape_and_order(
    layers: int, codec: KVCodec, geometry: PageGeometry, round_trip: RoundTrip, seeded: None
) -> None:
    g = replace(geometry, layers=layers)
    pool = {p.name: torch.zeros(g.layers, g.pages, *p.shape, dtype=p.dtype) for p in codec.planes(g)}
    rows = [torch.randn(2, 2, 3, 32, 64) for _ in range(layers)]
    pages = torch.tensor([3, 1])
    slots = (pages[:, None] * 32 + torch.arange(32)).flatten()
    for layer, (k, v) in enumerate(rows):
        planes = {n: t[layer] for n, t in pool.items()}
        if codec.grain == "page":
            codec.encode(planes, pages, k, v)
        else:
            codec.encode(planes, slots, *(x.transpose(1, 2).flatten(0, 1) for x in (k, v)))
    for layer, (k, v) in enumerate(rows):
        out = torch.empty(2, 2, 3, 32, 64)
        codec.decode({n: t[layer] for n, t in pool.items()}, pages, out[0], out[1])
        want = round_trip(codec, k, v)
        assert torch.equal(out[0], want[0]) and torch.equal(out[1], want[1])
    assert bytes_per_token(codec, g) == layers * bytes_per_token(codec, replace(g, layers=1))


def test_kvc_09_open_page_is_exact_and_a_large_channel_ruins_no_other(seeded: None) -> None:
    codec = kivi.KiviCodec(bits=4, group=8, residual=24)
    g = PageGeometry(layers=1, kv_heads=1, head_dim=8, page_size=24, pages=2, dtype=torch.float32)
    k, v = torch.randn(1, 32, 8), torch.randn(1, 32, 8)
    k[..., 0] *= 100
    full = codec.page_sizes(8)[0] * (32 // codec.page_sizes(8)[0])  # type: ignore[index]
    planes = {p.name: torch.zeros(2, *p.shape, dtype=p.dtype) for p in codec.planes(g)}
    codec.encode(planes, torch.tensor([1]), k[None, :, :full], v[None, :, :full])
    read = k.clone()
    out_k, out_v = torch.empty(2, 1, 1, 24, 8)
    codec.decode(planes, torch.tensor([1]), out_k, out_v)
    read[:, :full] = out_k[0]
    assert full == 24 and torch.equal(read[:, 24:], k[:, 24:])
    for channel in range(1, 8):
        x = k[0, :, channel]
        error = (read[0, :, channel] - x).abs().max()
        assert 0 < error <= (x.max() - x.min()) / 30


def test_unit_scale_counts_what_saturates(new_planes: NewPlanes) -> None:
    codec = kv_fp8.Fp8Codec("unit")
    planes = new_planes(codec)
    k = torch.ones(4, 3, 64)
    codec.encode(planes, torch.arange(4), k, k)
    assert kv_fp8.saturated(planes) == 0
    k[2, 1, 7], k[0, 0, 0] = 1000.0, -449.0
    codec.encode(planes, torch.arange(4), k, torch.zeros_like(k))
    assert kv_fp8.saturated(planes) == 2


def test_sizes_that_do_not_divide_are_refused(geometry: PageGeometry) -> None:
    with pytest.raises(OptionError, match=r"no multiple of kivi\.group = 64"):
        kivi.bind(make_config(kivi.Config, {"group": 64, "residual": 32}, "kivi"), None)
    with pytest.raises(OptionError, match="head size 20"):
        kivi.KiviCodec(4, 16, 32).planes(replace(geometry, head_dim=20))
    with pytest.raises(OptionError, match="page size is 64"):
        kivi.KiviCodec(4, 16, 32).planes(replace(geometry, page_size=64))
    with pytest.raises(OptionError, match="bits = 3"):
        kivi.KiviCodec(3)
    with pytest.raises(OptionError, match="choices"):
        make_config(kivi.Config, {"bits": 8}, "kivi")


def test_keys_tell_formats_apart() -> None:
    codecs = [
        kv_int8.bind(kv_int8.Config(), None),
        *(kv_fp8.bind(make_config(kv_fp8.Config, {"scale": s}, "kv_fp8"), None) for s in ("token", "unit")),
        *(
            kivi.bind(make_config(kivi.Config, {"bits": b, "group": g, "residual": r}, "kivi"), None)
            for b in (2, 4)
            for g in (16, 32)
            for r in (32, 64)
        ),
    ]
    assert len({c.key for c in codecs}) == len(codecs)


@pytest.mark.parametrize("scaling", ["head", "layer"])
def test_calibrated_fp8_scales_are_those_of_the_text_and_saturate_beyond(scaling: str, seeded: None) -> None:
    amax = torch.tensor([[[4.0, 1.0, 2.0]], [[3.0, 8.0, 0.5]]])
    measured = KVRanges(torch.zeros(2, 1, 3, 64), dict.fromkeys(VARIANTS, amax), "test", 1)
    codec = kv_fp8.Fp8Codec(scaling, measured)  # type: ignore[arg-type]
    bound = codec.at(0)
    top = amax[:, 0] if scaling == "head" else amax[:, 0].amax(1, keepdim=True).expand(2, 3)
    assert bound.steps is not None and torch.equal(bound.steps, top / 448)
    geometry = PageGeometry(layers=1, kv_heads=3, head_dim=64, page_size=4, pages=1, dtype=torch.float32)
    planes = {p.name: torch.zeros(1, *p.shape, dtype=p.dtype) for p in bound.planes(geometry)}
    assert set(planes) == {"k", "v"}
    k = torch.randn(4, 3, 64)
    k[0, 0, 0] = 1000.0
    bound.encode(planes, torch.arange(4), k, -k)
    out = torch.empty(2, 1, 3, 4, 64)
    bound.decode(planes, torch.tensor([0]), out[0], out[1])
    back = out[:, 0].transpose(1, 2)
    assert back[0, 0, 0, 0] == top[0, 0] and back[1, 0, 0, 0] == -top[1, 0]
    inside = k.abs() <= top[0][:, None]
    error = (back[0] - k).abs()[inside]
    assert (error <= torch.maximum(k.abs() / 16, top[0][:, None] / 448 * 2**-10)[inside] * (1 + 2**-20)).all()
    assert bound.key != codec.key.replace(measured.key, "") and measured.key in bound.key
    with pytest.raises(InvariantError, match="calibrated"):
        kv_fp8.Fp8Codec(scaling).at(0)  # type: ignore[arg-type]
