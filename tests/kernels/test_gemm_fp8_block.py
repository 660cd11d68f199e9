"""Block-scaled FP8 GEMM against float64 on the stored values: ragged tiles, short groups, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.kernels.layouts.w8 import FP8Blocks, quantize_fp8_blocks
from workbench.kernels.linear.gemm_fp8_block import cost, gemm_fp8_block, reference
from workbench.kernels.linear.quantize_rows import quantize_groups
from workbench.numerics.e4m3 import from_e4m3
from workbench.spec.errors import UnsupportedInput, WrongShape


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN: an element that no program writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def operands(
    m: int, n: int, k: int, generator: torch.Generator, device: str
) -> tuple[Tensor, Tensor, FP8Blocks]:
    """Values whose size differs by powers of ten from group to group: a scale off by one group is seen."""
    x = torch.randn(m, k, generator=generator)
    w = torch.randn(n, k, generator=generator)
    for g in range(0, k, 128):
        x[:, g : g + 128] *= 10.0 ** (g // 128 % 3 - 1)
        w[:, g : g + 128] *= 10.0 ** (1 - g // 128 % 3)
    w[128:] *= 5
    codes, scales = quantize_groups(x.to(device))
    packed = quantize_fp8_blocks(w)
    return codes, scales, FP8Blocks(packed.codes.to(device), packed.scales.to(device))


def check(y: Tensor, codes: Tensor, scales: Tensor, weight: FP8Blocks) -> None:
    """Finite, and at most twice as far from float64 as dequantise-then-multiply in the same dtype."""
    exact = reference(codes, scales, weight)
    x = from_e4m3(codes) * scales.t().repeat_interleave(128, 1)[:, : codes.shape[1]]
    plain = (x.to(y.dtype) @ weight.values().to(y.dtype).t()).double()
    assert y.shape == exact.shape and y.isfinite().all()
    error, baseline = (y.double() - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * baseline + 1e-6 * exact.abs().max(), (float(error), float(baseline))


@pytest.mark.parametrize("m", [1, 64, 70, 200])
@pytest.mark.parametrize(("n", "k"), [(192, 576), (136, 256), (8, 16)])
def test_ragged_tiles_and_short_groups(
    m: int, n: int, k: int, device: str, generator: torch.Generator
) -> None:
    codes, scales, weight = operands(m, n, k, generator, device)
    check(gemm_fp8_block(codes, scales, weight), codes, scales, weight)


def test_more_tiles_than_programs_and_bands(device: str, generator: torch.Generator) -> None:
    """5 x 5 tiles for a handful of programs: each tile is computed exactly once."""
    codes, scales, weight = operands(300, 320, 128, generator, device)
    check(gemm_fp8_block(codes, scales, weight, dtype=torch.float16), codes, scales, weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_the_batch(
    dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """Each group of 128 inputs is summed from zero, then groups are added in order, whatever the tile's size.

    The order within a group is the tensor core's, or, in the interpreter, the host library's, which follows
    the shape. There inputs are whole numbers, whose sums are exact in any order: what is left to be seen is
    the kernel's own order.
    """

    def inputs(rows: int) -> Tensor:
        x = torch.randint(-4, 5, (rows, 640), generator=generator).float()
        x += torch.randn(rows, 640, generator=generator) * (device == "cuda")
        return x.to(torch.float8_e4m3fn).to(device)

    codes, scales = inputs(300), torch.randn(5, 300, generator=generator).exp().to(device)
    weight = FP8Blocks(inputs(320), torch.randn(3, 5, generator=generator).exp().to(device))
    whole = gemm_fp8_block(codes, scales, weight, dtype=dtype)
    for rows in (slice(60), slice(64, 71), slice(299, 300), slice(130, 300)):
        alone = gemm_fp8_block(codes[rows], scales[:, rows].contiguous(), weight, dtype=dtype)
        assert torch.equal(whole[rows], alone)
    if device == "cpu":  # a GPU adds and multiplies at once
        forward, backward = (in_order(codes, scales, weight, order) for order in (range(5), range(5)[::-1]))
        assert torch.equal(whole, forward.to(dtype)) and not torch.equal(forward, backward)


def in_order(codes: Tensor, scales: Tensor, weight: FP8Blocks, groups: range) -> Tensor:
    """The product in float32, one group of 128 inputs added after another."""
    factors = weight.scales.repeat_interleave(128, 0)[: len(weight.codes)]
    total = torch.zeros(len(codes), len(weight.codes))
    for g in groups:
        x, w = (from_e4m3(c[:, 128 * g : 128 * g + 128].contiguous()) for c in (codes, weight.codes))
        total += x @ w.t() * (scales[g][:, None] * factors[:, g])
    return total


def test_qnt_05_blocks_and_rows_of_zeros_are_exact(device: str, generator: torch.Generator) -> None:
    x = torch.randn(3, 256, generator=generator)
    x[1] = 0
    w = torch.randn(128, 256, generator=generator)
    w[:, 128:] = 0
    codes, scales = quantize_groups(x.to(device))
    packed = quantize_fp8_blocks(w)
    weight = FP8Blocks(packed.codes.to(device), packed.scales.to(device))
    y = gemm_fp8_block(codes, scales, weight)
    assert not y[1].any()
    check(y, codes, scales, weight)


def test_a_row_with_a_nan_scale_harms_only_itself(device: str, generator: torch.Generator) -> None:
    codes, scales, weight = operands(5, 64, 256, generator, device)
    clean = gemm_fp8_block(codes, scales, weight)
    scales[0, 2] = float("nan")
    y = gemm_fp8_block(codes, scales, weight)
    assert y[2].isnan().all() and torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_refusals(device: str, generator: torch.Generator) -> None:
    codes, scales, weight = operands(4, 64, 256, generator, device)
    for bad in (codes[:, :128], codes.float(), codes.t(), codes[:, 8:]):
        with pytest.raises(UnsupportedInput):
            gemm_fp8_block(bad, scales, weight)
    with pytest.raises(UnsupportedInput, match="scales"):
        gemm_fp8_block(codes, scales.t().contiguous(), weight)
    with pytest.raises(UnsupportedInput, match="contiguous"):
        gemm_fp8_block(codes[:2], scales[:, :2], weight)
    with pytest.raises(WrongShape, match="128 x 128"):
        FP8Blocks(weight.codes, weight.scales[:, :1])
    assert gemm_fp8_block(codes[:0], scales[:, :0].contiguous(), weight).shape == (0, 64)
    assert cost(M=1, N=128, K=128).bytes == 129 * 128 + 256 + 8
