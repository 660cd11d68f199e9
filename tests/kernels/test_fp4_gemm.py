"""FP4 weights against float64 on the stored values: both formats, every code, ragged sizes, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from workbench.kernels.layouts.fp4 import FP4, pack_fp4
from workbench.kernels.linear.fp4_gemm import cost, fp4_gemm, reference
from workbench.spec.errors import OptionError, UnsupportedInput, WrongShape


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN: an element that no program writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def weights(n: int, k: int, form: str, generator: torch.Generator, device: str) -> FP4:
    """Random codes and every kind of scale, subnormal and zero ones included."""
    codes = torch.randint(0, 16, (n, k), generator=generator)
    if form == "nvfp4":
        scales = torch.rand(n, -(-k // 16), generator=generator).mul(3).to(torch.float8_e4m3fn)
        rows = torch.rand(n, generator=generator) / 100
        packed = pack_fp4(codes, scales, rows)
    else:
        packed = pack_fp4(
            codes, torch.randint(110, 124, (n, -(-k // 32)), generator=generator, dtype=torch.uint8)
        )
    return on(packed, device)


def on(weight: FP4, device: str) -> FP4:
    return FP4(weight.codes.to(device), weight.scales.to(device), weight.row_scale.to(device), weight.k)


def check(y: Tensor, x: Tensor, weight: FP4) -> None:
    """Finite, and at most twice as far from float64 as torch's product in the same dtype."""
    exact = reference(x, weight)
    plain = (x @ weight.values(x.dtype).t()).double()
    assert y.shape == exact.shape and y.isfinite().all()
    error, baseline = (y.double() - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * baseline + 1e-6 * exact.abs().max(), (float(error), float(baseline))


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_every_code_under_every_scale_is_exact(form: str, device: str) -> None:
    """One-hot rows read single weights: bit-equal to the stored value, for all codes and finite scales."""
    block = 16 if form == "nvfp4" else 32
    scales = [b for b in range(256) if b & 127 != 127] if form == "nvfp4" else list(range(90, 160))
    codes = torch.arange(16).repeat(len(scales), block // 16 * 128 // block)
    raw = torch.tensor(scales, dtype=torch.uint8)[:, None].repeat(1, 128 // block)
    extra = -len(scales) % 8
    codes, raw = torch.cat([codes, codes[:extra]]), torch.cat([raw, raw[:extra]])
    stored = raw.view(torch.float8_e4m3fn) if form == "nvfp4" else raw
    weight = on(pack_fp4(codes, stored), device)
    x = torch.eye(128, dtype=torch.bfloat16, device=device)[[0, *range(1, 16), 70, 127]]
    assert torch.equal(
        fp4_gemm(x, weight, split=1).t(), weight.values(torch.bfloat16)[:, [*range(16), 70, 127]]
    )


def test_mxfp4_blocks_may_lie_far_apart(device: str) -> None:
    """2^120 below the largest block every bit is kept; the scale of a block of zeros is of no account."""
    raw = torch.tensor([[200, 80, 0]], dtype=torch.uint8).repeat(8, 1)
    codes = torch.full((8, 96), 1)
    codes[:, 64:] = 8
    weight = on(pack_fp4(codes, raw), device)
    x = torch.zeros(1, 96, dtype=torch.bfloat16, device=device)
    x[:, 40] = x[:, 70] = 1.0
    assert torch.equal(fp4_gemm(x, weight), weight.values(torch.bfloat16)[:, 40][None])
    assert float(weight.values()[0, 40]) == 0.5 * 2.0**-47 and float(weight.values()[0, 70]) == 0


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 64, 128), (5, 72, 576), (16, 128, 96), (40, 64, 256), (70, 136, 160)]
)
def test_ragged_sizes(form: str, m: int, n: int, k: int, device: str, generator: torch.Generator) -> None:
    weight = weights(n, k, form, generator, device)
    x = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
    check(fp4_gemm(x, weight, split=1), x, weight)


@pytest.mark.parametrize("split", [2, 5])
def test_a_split_sum_is_right_and_repeats_bit_for_bit(
    split: int, device: str, generator: torch.Generator
) -> None:
    weight = weights(64, 576, "nvfp4", generator, device)
    x = torch.randn(17, 576, generator=generator).to(device, torch.bfloat16)
    first = fp4_gemm(x, weight, split=split)
    check(first, x, weight)
    assert torch.equal(first, fp4_gemm(x, weight, split=split))


def test_float16_with_nvfp4_only(device: str, generator: torch.Generator) -> None:
    x = torch.randn(3, 128, generator=generator).to(device, torch.float16)
    weight = weights(64, 128, "nvfp4", generator, device)
    check(fp4_gemm(x, weight), x, weight)
    with pytest.raises(UnsupportedInput, match="bfloat16"):
        fp4_gemm(x, weights(64, 128, "mxfp4", generator, device))


def test_padding_and_neighbours_never_reach_an_output(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 72, "nvfp4", generator, device)
    x = torch.randn(6, 72, generator=generator).to(device, torch.bfloat16)
    clean = fp4_gemm(x, weight)
    dirty = replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone())
    dirty.codes[:, 8:] |= 0xF0  # inputs 72 and above
    dirty.scales.view(torch.uint8)[:, 5:] = 0x7E  # 448, the largest
    assert torch.equal(fp4_gemm(x, dirty), clean)
    x[:2], x[3:] = float("nan"), float("inf")
    assert torch.equal(fp4_gemm(x, weight)[2], clean[2])


def test_refusals(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 128, "nvfp4", generator, device)
    with pytest.raises(UnsupportedInput, match="columns"):
        fp4_gemm(torch.zeros(2, 64, device=device, dtype=torch.bfloat16), weight)
    with pytest.raises(UnsupportedInput, match="strides"):
        fp4_gemm(torch.zeros(2, 136, device=device, dtype=torch.bfloat16)[:, 1:129], weight)
    codes = torch.ones(2, 32, dtype=torch.uint8)
    with pytest.raises(OptionError, match="NaN"):
        pack_fp4(codes, torch.tensor([[127, 1], [1, 1]], dtype=torch.uint8).view(torch.float8_e4m3fn))
    with pytest.raises(OptionError, match="NaN"):
        pack_fp4(codes, torch.tensor([[255], [1]], dtype=torch.uint8))
    with pytest.raises(OptionError, match="differ"):
        pack_fp4(codes, torch.tensor([[254], [0]], dtype=torch.uint8))
    with pytest.raises(WrongShape):
        pack_fp4(codes, torch.ones(2, 3, dtype=torch.uint8))


def test_cost_counts_what_must_move() -> None:
    assert cost(M=1, N=64, K=128).bytes == 64 * 64 + 64 * 8 + 256 + 2 * 192
