"""E8P: the codebook against brute force and the published errors, the kernel against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.kernels.layouts.e8p import E8P, pack_e8p
from workbench.kernels.linear.e8p import cost, e8p, reference
from workbench.numerics.e8p import decode, nearest, patterns
from workbench.spec.errors import UnsupportedInput, WrongShape


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN: an element that no program writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def weights(n: int, k: int, generator: torch.Generator, device: str) -> E8P:
    codes = torch.randint(0, 65536, (n, k // 8), generator=generator)
    scales = torch.randn(n, generator=generator)  # of either sign: an output sign vector may be folded in
    packed = pack_e8p(codes, scales)
    return E8P(packed.codes.to(device), packed.row_scale.to(device), packed.k)


def check(y: Tensor, x: Tensor, weight: E8P) -> None:
    """Finite, and at most twice as far from float64 as torch's product in the same dtype."""
    exact = reference(x, weight)
    plain = (x @ weight.values(x.dtype).t()).double()
    assert y.shape == exact.shape and y.isfinite().all()
    error, baseline = (y.double() - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * baseline + 1e-6 * exact.abs().max(), (float(error), float(baseline))


def test_the_codebook_is_the_papers() -> None:
    """227 patterns of squared norm at most 10 and 29 of 12; 65,536 distinct words of E8 + 1/4."""
    norms = patterns().long().square().sum(1)
    assert int((norms <= 40).sum()) == 227 and int((norms == 48).sum()) == 29
    codes = torch.arange(65536)
    words = decode(codes, torch.float64)
    assert len(words.unique(dim=0)) == 65536
    quarters = words * 4
    assert (quarters % 2 == 1).all() and float(quarters.abs().max()) == 11
    lattice = words - 0.25 * (2 * (codes & 1) - 1)[:, None]
    assert (lattice * 2 % 2 == 1).all() and (lattice.sum(1) % 2 == 0).all()


def test_nearest_equals_brute_force_over_all_words(generator: torch.Generator) -> None:
    x = torch.randn(1000, 8, generator=generator) * 1.3
    words = decode(torch.arange(65536), torch.float64)
    best = torch.cdist(x.double(), words).amin(1)
    found = (x.double() - decode(nearest(x), torch.float64)).norm(dim=1)
    assert torch.allclose(found, best, rtol=0, atol=1e-6)
    assert torch.equal(nearest(decode(torch.arange(256))), torch.arange(256, dtype=torch.int32))


@pytest.mark.parametrize(("scale", "low", "high"), [(1.03, 0.089, 0.094), (0.9, 0.096, 0.102)])
def test_error_on_normal_weights_is_the_papers(
    scale: float, low: float, high: float, generator: torch.Generator
) -> None:
    """Below the best scalar quantizer of 2 bits (0.1175), above the rate-distortion bound (0.0625)."""
    x = torch.randn(16384, 8, generator=generator)
    error = (decode(nearest(x * scale)) / scale - x).square().mean()
    assert low < float(error) < high


def test_the_kernel_decodes_every_code_exactly(device: str) -> None:
    """Rows of x read two weights of all 65,536 words, one 32 times the other: exact in float16."""
    weight = pack_e8p(torch.arange(65536).view(4096, 16), 1.0)
    weight = E8P(weight.codes.to(device), weight.row_scale.to(device), weight.k)
    x = torch.cat([torch.eye(64), 32 * torch.eye(64)], 1).to(device, torch.float16)
    values = weight.values()
    assert torch.equal(e8p(x, weight, split=1).t().float(), values[:, :64] + 32 * values[:, 64:])


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (5, 72, 576), (17, 64, 192), (70, 136, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ragged_sizes(
    m: int, n: int, k: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    weight = weights(n, k, generator, device)
    x = torch.randn(m, k, generator=generator).to(device, dtype)
    check(e8p(x, weight, split=1), x, weight)


@pytest.mark.parametrize("split", [2, 9])
def test_a_split_sum_is_right_and_repeats_bit_for_bit(
    split: int, device: str, generator: torch.Generator
) -> None:
    weight = weights(64, 576, generator, device)
    x = torch.randn(3, 576, generator=generator).to(device, torch.bfloat16)
    first = e8p(x, weight, split=split)
    check(first, x, weight)
    assert torch.equal(first, e8p(x, weight, split=split))


def test_padding_and_neighbours_never_reach_an_output(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 72, generator, device)
    x = torch.randn(4, 72, generator=generator).to(device, torch.bfloat16)
    clean = e8p(x, weight)
    weight.codes[:, 9:] = -1
    assert torch.equal(e8p(x, weight), clean)
    x[0], x[2:] = float("nan"), float("inf")
    assert torch.equal(e8p(x, weight)[1], clean[1])


def test_refusals(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 128, generator, device)
    x = torch.zeros(2, 128, device=device, dtype=torch.bfloat16)
    for bad in (x[:, :64], x.float(), x.repeat(1, 2)[:, 1:129]):
        with pytest.raises(UnsupportedInput):
            e8p(bad, weight)
    with pytest.raises(WrongShape, match="vectors of 8"):
        nearest(torch.zeros(3, 7))
    with pytest.raises(WrongShape, match="scales"):
        pack_e8p(torch.zeros(4, 2), torch.ones(3))
    assert e8p(x[:0], weight).shape == (0, 64)
    assert cost(M=1, N=64, K=128).bytes == 64 * 32 + 256 + 384
