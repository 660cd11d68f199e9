"""The expert layer against a token-by-token loop in float64: empty experts, blocks, ranks, refusals."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from workbench.kernels.layouts.experts import interleave_gate_up, split_gate_up
from workbench.kernels.moe.moe_align import Aligned, moe_align
from workbench.kernels.moe.moe_grouped import cost, moe_grouped, reference
from workbench.spec.errors import UnsupportedInput, WrongShape


class Layer(NamedTuple):
    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, or a number that is no slot: what no program writes is seen."""
    empty, new_empty, like = torch.empty, Tensor.new_empty, torch.empty_like

    def fill(t: Tensor) -> Tensor:
        return t.fill_(float("nan") if t.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(like(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: fill(new_empty(*a, **k)))


def layer(
    tokens: int, k: int, experts: int, hidden: int, inner: int, generator: torch.Generator, device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Layer:  # fmt: skip
    gate, up = (torch.randn(experts, inner, hidden, generator=generator) / hidden**0.5 for _ in range(2))
    down = torch.randn(experts, hidden, inner, generator=generator) / inner**0.5
    ids = torch.rand(tokens, experts, generator=generator).topk(k, 1).indices.int()
    weights = torch.rand(tokens, k, generator=generator).softmax(1)
    x = torch.randn(tokens, hidden, generator=generator)
    return Layer(
        x.to(device, dtype), interleave_gate_up(gate, up).to(device, dtype), down.to(device, dtype),
        ids.to(device), weights.to(device),
    )  # fmt: skip


def check(y: Tensor, case: Layer, floor: float = 1e-6) -> None:
    """Finite, and at most twice as far from float64 as the loop in the same dtype."""
    exact = reference(*case)
    plain = reference(*case, dtype=case.x.dtype).double()
    assert y.shape == exact.shape and y.isfinite().all()
    error, baseline = (y.double() - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * baseline + floor * exact.abs().max(), (float(error), float(baseline))


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize(("tokens", "k", "experts", "hidden", "inner"), [
    (1, 1, 1, 64, 64), (7, 2, 4, 72, 40), (50, 2, 4, 128, 96), (12, 4, 8, 64, 136),
])  # fmt: skip
def test_equals_the_loop_in_every_block(
    block: int, tokens: int, k: int, experts: int, hidden: int, inner: int, device: str,
    generator: torch.Generator,
) -> None:  # fmt: skip
    case = layer(tokens, k, experts, hidden, inner, generator, device)
    check(moe_grouped(*case, block=block), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    case = layer(9, 2, 4, 64, 64, generator, device, dtype)
    check(moe_grouped(*case), case)


def test_the_block_does_not_change_the_result(device: str, generator: torch.Generator) -> None:
    """Float32 sums over the same tiles of K: equal to rounding, and equal to the bit when repeated."""
    case = layer(30, 2, 3, 128, 64, generator, device, torch.float32)
    results = [moe_grouped(*case, block=b) for b in (16, 64, 128)]
    assert all(torch.allclose(r, results[0], rtol=1e-5, atol=1e-6) for r in results)
    assert torch.equal(moe_grouped(*case, block=16), results[0])


@pytest.mark.parametrize("only", [0, 2])
def test_moe_01_all_tokens_to_one_expert_and_no_tokens_at_all(
    only: int, device: str, generator: torch.Generator
) -> None:
    """Experts without tokens may hold anything: their weights are never read."""
    case = layer(40, 1, 4, 64, 48, generator, device)
    case.ids.fill_(only)
    others = [e for e in range(4) if e != only]
    case.gate_up[others], case.down[others] = float("nan"), float("nan")
    check(moe_grouped(*case), case)
    none = Layer(case.x[:0], case.gate_up, case.down, case.ids[:0], case.weights[:0])
    assert moe_grouped(*none).shape == (0, 64)


def test_blocks_behind_the_true_length_are_never_touched(
    device: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unused end of the lists names a real slot and an expert that does not exist."""
    case = layer(9, 1, 4, 64, 64, generator, device)
    clean = moe_grouped(*case, block=16)

    def spoilt(ids: Tensor, experts: int, block: int, expert_map: Tensor | None = None) -> Aligned:
        found = moe_align(ids, experts, block, expert_map)
        used = int(found.total)
        assert used < found.slots.numel()
        found.slots[used:], found.experts[used // block :] = 0, 1 << 20
        return found

    monkeypatch.setattr("workbench.kernels.moe.moe_grouped.moe_align", spoilt)
    case.ids[:] = case.ids % 2  # experts 2 and 3 get nothing, so blocks are left over
    poisoned = moe_grouped(*case, block=16)
    check(poisoned, case)
    assert not torch.equal(poisoned, clean)


def test_ids_of_no_expert_contribute_nothing(device: str, generator: torch.Generator) -> None:
    case = layer(6, 2, 4, 64, 64, generator, device)
    case.ids[1, 0], case.ids[3, 1], case.ids[4] = -1, 4, -1
    y = moe_grouped(*case)
    check(y, case)
    assert not y[4].any()


def test_a_token_does_not_depend_on_its_neighbours(device: str, generator: torch.Generator) -> None:
    case = layer(12, 2, 4, 64, 64, generator, device)
    clean = moe_grouped(*case, block=16)
    case.x[:5], case.x[6:] = float("nan"), float("inf")
    assert torch.equal(moe_grouped(*case, block=16)[5], clean[5])


def test_ranks_add_up_to_the_whole(device: str, generator: torch.Generator) -> None:
    """Experts split over two ranks: partial outputs sum to the full one."""
    case = layer(25, 3, 6, 64, 64, generator, device, torch.float32)
    whole, total = moe_grouped(*case), torch.zeros_like(case.x)
    for rank in range(2):
        local = torch.full((6,), -1, dtype=torch.int32)
        local[3 * rank : 3 * rank + 3] = torch.arange(3, dtype=torch.int32)
        mine = slice(3 * rank, 3 * rank + 3)
        total += moe_grouped(
            case.x, case.gate_up[mine], case.down[mine], case.ids, case.weights, expert_map=local.to(device)
        )
    assert torch.allclose(total, whole, rtol=1e-5, atol=1e-6)


def test_rows_of_tokens_may_lie_apart(device: str, generator: torch.Generator) -> None:
    case = layer(5, 2, 4, 64, 64, generator, device)
    wide = torch.cat([case.x, case.x], 1)
    assert torch.equal(moe_grouped(wide[:, 64:], *case[1:]), moe_grouped(*case))


def test_refusals(device: str, generator: torch.Generator) -> None:
    case = layer(4, 2, 4, 64, 64, generator, device)
    for changed in (
        case._replace(x=case.x.double()),
        case._replace(down=case.down.float()),
        case._replace(down=case.down[:, :32]),
        case._replace(gate_up=case.gate_up.transpose(1, 2)),
        case._replace(weights=case.weights[:, :1].contiguous()),
        case._replace(ids=case.ids[:3], weights=case.weights[:3]),
    ):
        with pytest.raises(UnsupportedInput):
            moe_grouped(*changed)
    with pytest.raises(UnsupportedInput, match="block"):
        moe_grouped(*case, block=32)
    with pytest.raises(WrongShape):
        interleave_gate_up(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3))
    with pytest.raises(WrongShape):
        split_gate_up(torch.zeros(1, 3, 3))
    assert cost(T=2, k=2, E=8, H=64, I=32).flops == 6 * 4 * 64 * 32
