"""W4A16 against float64 on the stored weights; groups, offsets, ragged sizes, splits, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.kernels import checks
from workbench.kernels.layouts.w4 import W4, pack_w4
from workbench.kernels.linear.split import choose_split
from workbench.kernels.linear.w4a16 import cost, reference, w4a16
from workbench.spec.errors import OptionError, UnsupportedInput, WrongShape


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN: an element that no program writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def weights(n: int, k: int, group: int, offset: str, generator: torch.Generator, device: str) -> W4:
    groups = -(-k // group)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    scales = (torch.rand(n, groups, generator=generator) * 0.02 + 0.01).bfloat16()
    zeros = torch.randint(0, 17, (n, groups), generator=generator) if offset == "zeros" else None
    centres = torch.randn(n, groups, generator=generator).bfloat16() / 50 if offset == "centres" else None
    w = pack_w4(codes, scales, zeros=zeros, centres=centres, group=group)
    parts = [None if t is None else t.to(device) for t in (w.codes, w.scales, w.zeros, w.centres)]
    return W4(parts[0], parts[1], parts[2], parts[3], w.group, w.k)  # type: ignore[arg-type]


def check(y: Tensor, x: Tensor, weight: W4) -> None:
    """Finite, and at most twice as far from float64 as torch's product in the same dtype."""
    exact = reference(x, weight)
    plain = (x @ weight.values(x.dtype).t()).double()
    assert y.shape == exact.shape and y.isfinite().all()
    error, baseline = (y.double() - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * baseline + 1e-6 * exact.abs().max(), (float(error), float(baseline))


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("offset", ["eight", "zeros", "centres"])
def test_qnt_16_every_group_equals_dequantise_then_multiply(
    group: int, offset: str, device: str, generator: torch.Generator
) -> None:
    weight = weights(72, 256, group, offset, generator, device)
    x = torch.randn(5, 256, generator=generator).to(device, torch.bfloat16)
    check(w4a16(x, weight, split=1), x, weight)


@pytest.mark.parametrize("m", [1, 16, 17, 50, 130])
@pytest.mark.parametrize(("n", "k", "group"), [(192, 576, 64), (64, 1152, 128), (104, 72, 32), (64, 64, 128)])
def test_ragged_tokens_rows_and_inputs(
    m: int, n: int, k: int, group: int, device: str, generator: torch.Generator
) -> None:
    """Sizes that fill no tile: 576 is 4.5 tiles of 128; a group larger than the input acts as one."""
    weight = weights(n, k, group, "zeros", generator, device)
    x = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
    check(w4a16(x, weight, split=1), x, weight)


def test_groups_of_rows_and_of_multiples_run_as_kernel_groups(
    device: str, generator: torch.Generator
) -> None:
    for k, group, kernel_group in ((256, 256, 128), (192, 96, 32), (200, 200, 0)):
        if kernel_group == 0:
            with pytest.raises(OptionError):
                weights(64, k, group, "eight", generator, device)
            continue
        weight = weights(64, k, group, "centres", generator, device)
        assert weight.group == kernel_group
        x = torch.randn(3, k, generator=generator).to(device, torch.bfloat16)
        check(w4a16(x, weight), x, weight)


def test_float16_activations(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 320, 64, "zeros", generator, device)
    x = torch.randn(4, 320, generator=generator).to(device, torch.float16)
    check(w4a16(x, weight, split=2), x, weight)


@pytest.mark.parametrize("split", [2, 3, 8])
def test_a_split_sum_is_right_and_repeats_bit_for_bit(
    split: int, device: str, generator: torch.Generator
) -> None:
    """9 tiles of K in 2, 3 and 8 parts; with 8 the last parts are empty and must add exact zeros."""
    weight = weights(64, 1152, 128, "zeros", generator, device)
    x = torch.randn(18, 1152, generator=generator).to(device, torch.bfloat16)
    first = w4a16(x, weight, split=split)
    check(first, x, weight)
    assert torch.equal(first, w4a16(x, weight, split=split))


def test_the_atomic_option_adds_the_same_parts(device: str, generator: torch.Generator) -> None:
    weight = weights(72, 576, 64, "centres", generator, device)
    x = torch.randn(3, 576, generator=generator).to(device, torch.bfloat16)
    check(w4a16(x, weight, split=4, atomic=True), x, weight)


def test_a_row_does_not_depend_on_its_neighbours(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 256, 64, "zeros", generator, device)
    x = torch.randn(9, 256, generator=generator).to(device, torch.bfloat16)
    alone = w4a16(x[4:5], weight, split=1)
    x[:4], x[5:] = float("nan"), float("inf")
    assert torch.equal(w4a16(x, weight, split=1)[4:5], alone)


def test_what_pads_rows_and_groups_never_reaches_an_output(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 72, 32, "zeros", generator, device)
    x = torch.randn(2, 72, generator=generator).to(device, torch.bfloat16)
    clean = w4a16(x, weight)
    weight.codes[:, -24:] |= 0xF0  # inputs 104 and above
    weight.scales[-1] = 1e30  # the group that holds only padding
    assert torch.equal(w4a16(x, weight), clean)


def test_zero_groups_are_exactly_zero(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 128, 64, "zeros", generator, device)
    weight.scales[0] = 0
    x = torch.zeros(2, 128, device=device, dtype=torch.bfloat16)
    x[:, :64] = 1.0
    assert torch.equal(w4a16(x, weight), torch.zeros(2, 64, device=device, dtype=torch.bfloat16))


def test_views_equal_their_copies_or_are_refused(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 128, 64, "eight", generator, device)
    fused = torch.randn(4, 384, generator=generator).to(device, torch.bfloat16)
    view = fused[:, 128:256]
    assert torch.equal(w4a16(view, weight), w4a16(view.contiguous(), weight))
    for bad in (fused[:, 1:129], fused[:, ::3], fused.view(128, 12)[:, :4].t(), fused[:, :128].float()):
        with pytest.raises(UnsupportedInput):
            w4a16(bad, weight)


def test_a_cpu_is_refused_unless_triton_is_interpreted(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weights(64, 128, 64, "eight", generator, "cpu")
    monkeypatch.setattr(checks.interpreter, "wanted", lambda: False)
    with pytest.raises(UnsupportedInput, match="reference"):
        w4a16(torch.zeros(1, 128, dtype=torch.bfloat16), weight)


def test_sizes_that_do_not_match_are_refused(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 128, 64, "eight", generator, device)
    with pytest.raises(UnsupportedInput, match="columns"):
        w4a16(torch.zeros(2, 64, device=device, dtype=torch.bfloat16), weight)
    with pytest.raises(WrongShape, match="scales"):
        pack_w4(torch.zeros(4, 128, dtype=torch.int64), torch.ones(4, 3), group=64)
    with pytest.raises(OptionError, match="four bits"):
        pack_w4(torch.full((4, 128), 16), torch.ones(4, 2), group=64)
    with pytest.raises(OptionError, match="not both"):
        pack_w4(
            torch.zeros(4, 64), torch.ones(4, 1), zeros=torch.ones(4, 1), centres=torch.ones(4, 1), group=64
        )


def test_no_tokens_give_an_empty_result(device: str, generator: torch.Generator) -> None:
    weight = weights(64, 128, 64, "eight", generator, device)
    assert w4a16(torch.zeros(0, 128, device=device, dtype=torch.bfloat16), weight).shape == (0, 64)


def test_splits_fill_the_device_and_stay_long() -> None:
    assert choose_split(tiles=64, k=4096, processors=132) == 4
    assert choose_split(tiles=768, k=576, processors=132) == 1
    assert choose_split(tiles=8, k=2048, processors=132) == 4
    assert choose_split(tiles=1, k=32768, processors=132) == 8
    assert cost(M=1, N=8192, K=8192).bytes == 8192 * 4096 + 8192 * 64 * 3 + 2 * 16384
