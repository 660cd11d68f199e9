"""KV codecs under test, and planes for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from workbench.engine.seams import KVCodec, PageGeometry
from workbench.kv.kivi import KiviCodec
from workbench.kv.kv_fp4 import Fp4Codec
from workbench.kv.kv_fp8 import Fp8Codec
from workbench.kv.kv_int8 import Int8Codec
from workbench.kv.plain import PlainCodec
from workbench.kv.ranges import VARIANTS, KVRanges
from workbench.kv.xquant.codec import XQuantCodec
from workbench.kv.xquant.schedule import Schedule, Side


def ranges(heads: int, dim: int) -> KVRanges:
    """As if one layer's largest key were 5 and its largest value 4, around small means."""
    mean = torch.linspace(-0.2, 0.2, 2 * heads * dim).view(2, 1, heads, dim)
    amax = torch.tensor([5.0, 4.0]).view(2, 1, 1).expand(2, 1, heads).contiguous()
    return KVRanges(mean, dict.fromkeys(VARIANTS, amax), "test", 1)


CALIBRATED = ranges(3, 64)
TOKEN = {
    "plain": PlainCodec(torch.float32),
    "kv_int8": Int8Codec(),
    "kv_fp8": Fp8Codec(),
    "kv_fp8-unit": Fp8Codec("unit"),
    "kv_fp8-head": Fp8Codec("head", CALIBRATED).at(0),
    "kv_fp8-layer": Fp8Codec("layer", CALIBRATED).at(0),
    "kv_fp4": Fp4Codec(ranges=CALIBRATED).at(0),
    "kv_fp4-mx": Fp4Codec("mxfp4"),
}
TWO_BITS = Schedule((Side(2),), (Side(2),))
PAGE: dict[str, KVCodec] = {f"kivi-{bits}": KiviCodec(bits, 16, 32) for bits in (4, 2)}
PAGE["xquant"] = XQuantCodec(TWO_BITS, TWO_BITS, group=16, residual=32)


@pytest.fixture(params=[*TOKEN, *PAGE])
def codec(request: pytest.FixtureRequest) -> KVCodec:
    return (TOKEN | PAGE)[request.param]


@pytest.fixture(params=TOKEN)
def token_codec(request: pytest.FixtureRequest) -> KVCodec:
    return TOKEN[request.param]


@pytest.fixture
def geometry() -> PageGeometry:
    return PageGeometry(layers=3, kv_heads=3, head_dim=64, page_size=32, pages=5, dtype=torch.float32)


Planes = dict[str, torch.Tensor]


@pytest.fixture
def new_planes(geometry: PageGeometry) -> Callable[[KVCodec], Planes]:
    """One layer's zeroed planes, as a pool would hold them."""
    return lambda codec: {
        p.name: torch.zeros(geometry.pages, *p.shape, dtype=p.dtype) for p in codec.planes(geometry)
    }


@pytest.fixture
def round_trip(new_planes: Callable[[KVCodec], Planes]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Encode k, v [2, Hkv, P, D] into pages 3 and 1, decode into ``dtype``."""

    def run(
        codec: KVCodec, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        planes, pages = new_planes(codec), torch.tensor([3, 1])
        if codec.grain == "page":
            codec.encode(planes, pages, k, v)
        else:
            slots = (pages[:, None] * k.shape[2] + torch.arange(k.shape[2])).flatten()
            codec.encode(planes, slots, *(x.transpose(1, 2).flatten(0, 1) for x in (k, v)))
        out = torch.empty(2, *k.shape, dtype=dtype)
        codec.decode(planes, pages, out[0], out[1])
        return out[0], out[1]

    return run
