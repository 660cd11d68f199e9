"""Coded pages decoded by compiled kernels: the bits of torch, whatever the format, the pages, the codes."""

from __future__ import annotations

import platform
from ctypes import CDLL
from dataclasses import replace

import pytest
import torch

from workbench.engine.seams import PageGeometry
from workbench.kernels.cpu import compiler, library
from workbench.kv import compiled
from workbench.kv.kivi import KiviCodec
from workbench.kv.kv_fp4 import Fp4Codec
from workbench.kv.kv_fp8 import Fp8Codec
from workbench.kv.kv_int8 import Int8Codec
from workbench.kv.ranges import VARIANTS, KVRanges
from workbench.kv.xquant.codec import XQuantCodec
from workbench.kv.xquant.schedule import Schedule, Side
from workbench.models.cache import cache_dir

FORMS = {"native": compiler.NATIVE, "portable": ("-march=x86-64-v3",)}
HEADS, PAGES = 3, 5
AMAX = torch.tensor([5.0, 3.0]).view(2, 1, 1).expand(2, 1, HEADS).contiguous()
RANGES = KVRanges(torch.zeros(2, 1, HEADS, 64), dict.fromkeys(VARIANTS, AMAX), "test", 1)
ONE = Schedule((Side(1),), (Side(2),))
CODECS = {
    "int8": Int8Codec(),
    "fp8": Fp8Codec(),
    "fp8 unit": Fp8Codec("unit"),
    "fp8 head": Fp8Codec("head", RANGES).at(0),
    "fp8 layer": Fp8Codec("layer", RANGES).at(0),
    "nvfp4": Fp4Codec(ranges=RANGES).at(0),
    "nvfp4 unit": Fp4Codec(calibrated=False),
    "mxfp4": Fp4Codec("mxfp4"),
    "nvfp4 rotated": Fp4Codec(rotate=True, affine=True, ranges=RANGES).at(0),
    "kivi 4": KiviCodec(4, 32, 128),
    "kivi 2": KiviCodec(2, 16, 64),
    "xquant": XQuantCodec(ONE, ONE, group=32, residual=64).at(0),
}


@pytest.fixture(scope="session", params=FORMS)
def kernels(request: pytest.FixtureRequest) -> CDLL:
    """The library of one form, from the cache or compiled now."""
    if not compiler.supported() or compiler.find() is None:
        pytest.skip("needs 64-bit Linux and a C++ compiler")
    if request.param == "portable" and platform.machine() != "x86_64":
        pytest.skip("the native form is the portable one here")
    return library.load(compiler.build(cache_dir() / "kernels" / "cpu", FORMS[request.param]))


def pages_of(codec, dim: int = 64) -> tuple[dict[str, torch.Tensor], int]:
    """Planes with every code there is, and with rows that were coded."""
    sizes = codec.page_sizes(dim)
    size = sizes[0] if sizes else 16
    g = PageGeometry(1, HEADS, dim, size, PAGES, torch.bfloat16)
    planes = {p.name: torch.zeros(PAGES, *p.shape, dtype=p.dtype) for p in codec.planes(g)}
    draw = torch.Generator().manual_seed(0)
    magnitude = torch.tensor([1e-6, 1e-3, 1.0, 30.0, 1e4]).view(PAGES, 1, 1, 1)
    k, v = torch.randn(2, PAGES, HEADS, size, dim, generator=draw) * magnitude
    if codec.grain == "page":
        codec.encode(planes, torch.arange(PAGES), k, v)
    else:
        codec.encode(planes, torch.arange(PAGES * size), *(x.transpose(1, 2).flatten(0, 1) for x in (k, v)))
    for name, plane in planes.items():
        if name in ("k", "v"):  # page 0: all 256 bytes
            flat = plane.view(torch.uint8)[0].flatten()
            plane.view(torch.uint8)[0] = torch.arange(len(flat)).to(torch.uint8).view(plane[0].shape)
    return planes, size


def decoded(codec, planes, pages, size: int, dtype=torch.bfloat16, dim: int = 64) -> torch.Tensor:
    out = torch.full((2, len(pages), HEADS, size, dim), 7.0, dtype=dtype)
    codec.decode(planes, pages, out[0], out[1])
    return out


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("pages", [(0,), (3, 0, 4), (4, 3, 2, 1, 0)])
def test_the_bits_are_those_of_torch(kernels, name, pages) -> None:
    codec = CODECS[name]
    planes, size = pages_of(codec)
    where = torch.tensor(pages, dtype=torch.int64)
    want = decoded(codec, planes, where, size)
    got = decoded(replace(codec, kernels=kernels), planes, where, size)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("name", CODECS)
def test_many_pages_on_several_threads(kernels, name) -> None:
    codec = CODECS[name]
    planes, size = pages_of(codec)
    where = torch.arange(60) % PAGES
    fast = replace(codec, kernels=kernels)
    want, got = decoded(codec, planes, where, size), decoded(fast, planes, where, size)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert fast == codec and fast.key == codec.key  # kernels are no part of what a format is


@pytest.mark.parametrize("name", CODECS)
def test_kernels_are_really_called_and_only_where_they_can_be(kernels, name, monkeypatch) -> None:
    codec = replace(CODECS[name], kernels=kernels)
    planes, size = pages_of(codec)
    calls: list[str] = []
    for module in ("workbench.kv.kv_int8", "workbench.kv.kv_fp8", "workbench.kv.kv_fp4"):
        for what in ("decode_bytes", "decode_nibbles"):
            note = getattr(compiled, what)
            wrapped = lambda *a, n=note: (calls.append("fast"), n(*a))[1]  # noqa: E731
            monkeypatch.setattr(f"{module}.{what}", wrapped, raising=False)
    for module in ("workbench.kv.kivi", "workbench.kv.xquant.codec"):
        note = compiled.decode_groups
        monkeypatch.setattr(f"{module}.decode_groups", lambda *a, n=note: (calls.append("fast"), n(*a))[1])
    decoded(codec, planes, torch.tensor([1]), size)
    assert len(calls) == (0 if name == "nvfp4 rotated" else 2)
    decoded(codec, planes, torch.tensor([1]), size, torch.float32)
    assert len(calls) == (0 if name == "nvfp4 rotated" else 2)


def test_heads_wider_than_a_kernel_takes_are_decoded_by_torch(kernels) -> None:
    codec = KiviCodec(4, 32, 32)
    planes, size = pages_of(codec, 1024)
    where = torch.arange(PAGES)
    want = decoded(codec, planes, where, size, dim=1024)
    assert torch.equal(decoded(replace(codec, kernels=kernels), planes, where, size, dim=1024), want)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_coded_to_the_bytes_of_torch(kernels, name, tokens, dtype) -> None:
    codec = CODECS[name]
    g = PageGeometry(1, HEADS, 64, 64, PAGES, torch.bfloat16)
    draw = torch.Generator().manual_seed(tokens)
    magnitude = 10.0 ** torch.randint(-9, 6, (tokens, HEADS, 1), generator=draw)
    both = torch.randn(tokens, 5 * HEADS, 64, generator=draw)
    both[:, HEADS : 2 * HEADS] *= magnitude
    both[0, HEADS], both[-1, HEADS + 1] = 0, torch.arange(-32, 32).float()  # zeros, and ties
    both[:, 3 * HEADS] = torch.randint(-3, 3, (tokens, 64), generator=draw) * 3e38
    both = both.to(dtype)
    k, v = both[:, HEADS : 2 * HEADS], both[:, 3 * HEADS : 4 * HEADS]  # as views of the rows of a layer
    where = torch.randperm(PAGES * 64, generator=draw)[:tokens]
    stored = []
    for made in (codec, replace(codec, kernels=kernels)):
        planes = {p.name: torch.zeros(PAGES, *p.shape, dtype=p.dtype) for p in made.planes(g)}
        made.encode(planes, where, k, v)
        stored.append(planes)
    for plane, bytes_of in stored[0].items():
        assert torch.equal(bytes_of.view(torch.uint8), stored[1][plane].view(torch.uint8))
