"""Sorting by expert: the published vector, every shape against the loop, empty experts, foreign ids."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.kernels.moe.moe_align import Aligned, bound, cost, moe_align, reference
from workbench.spec.errors import UnsupportedInput


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds a number that is no slot: an element that no program writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(-77))


def same(found: Aligned, wanted: Aligned) -> bool:
    pairs = ((found.slots, wanted.slots), (found.experts, wanted.experts), (found.total, wanted.total))
    return all(torch.equal(a.cpu(), b) for a, b in pairs)


def test_slots_of_a_small_example(device: str) -> None:
    """Two tokens an expert: [[0, 2], [2, 1], [0, 1]], as in vLLM's documentation, with blocks of 16."""
    found = moe_align(torch.tensor([[0, 2], [2, 1], [0, 1]], device=device), 3, 16)
    lists = found.slots[:48].view(3, 16)
    assert found.total.tolist() == [48] and found.experts.tolist()[:3] == [0, 1, 2]
    assert lists[:, :2].tolist() == [[0, 4], [3, 5], [1, 2]] and (lists[:, 2:] == 6).all()


@pytest.mark.parametrize(("tokens", "k", "experts", "block"), [
    (1, 1, 1, 16), (1, 2, 8, 16), (40, 2, 4, 16), (33, 3, 7, 32), (700, 2, 5, 64), (5, 8, 256, 16),
])  # fmt: skip
def test_equals_the_loop(
    tokens: int, k: int, experts: int, block: int, device: str, generator: torch.Generator
) -> None:
    """700 tokens of 2 take more than one chunk of 1024 slots."""
    ids = torch.randint(0, experts, (tokens, k), generator=generator)
    found = moe_align(ids.to(device, torch.int32), experts, block)
    assert same(found, reference(ids, experts, block))
    assert found.slots.numel() == bound(tokens * k, experts, block)


@pytest.mark.parametrize("only", [0, 2, 3])
def test_moe_01_all_tokens_to_one_expert(only: int, device: str) -> None:
    ids = torch.full((50, 1), only, device=device)
    found = moe_align(ids, 4, 16)
    assert same(found, reference(ids, 4, 16))
    assert found.experts[:4].tolist() == [only] * 4 and int(found.total) == 64


def test_ids_of_no_expert_are_left_out(device: str, generator: torch.Generator) -> None:
    ids = torch.randint(-2, 9, (30, 3), generator=generator, dtype=torch.int32)
    found = moe_align(ids.to(device), 6, 16)
    assert same(found, reference(ids, 6, 16))
    listed = found.slots[: int(found.total)]
    kept: Tensor = ((ids >= 0) & (ids < 6)).flatten().nonzero().flatten()
    assert torch.equal(listed[listed < 90].sort().values.cpu().long(), kept)


def test_expert_maps_split_the_work(device: str, generator: torch.Generator) -> None:
    """Two ranks: every block is owned by exactly one of them, under its local name."""
    ids = torch.randint(0, 6, (40, 2), generator=generator).to(device)
    maps = [torch.tensor([0, 1, 2, -1, -1, -1]), torch.tensor([-1, -1, -1, 0, 1, 2])]
    plain = moe_align(ids, 6, 16)
    ranks = [moe_align(ids, 6, 16, m.to(device, torch.int32)) for m in maps]
    used = int(plain.total) // 16
    owned = torch.stack([r.experts[:used] for r in ranks])
    assert ((owned >= 0).sum(0) == 1).all()
    assert torch.equal(owned.amax(0) + 3 * (owned[1] >= 0), plain.experts[:used])
    assert all(same(r, reference(ids, 6, 16, m)) for r, m in zip(ranks, maps, strict=True))


def test_no_tokens(device: str) -> None:
    found = moe_align(torch.zeros(0, 2, dtype=torch.int32, device=device), 4, 16)
    assert found.slots.numel() == 0 and int(found.total) == 0


def test_refusals(device: str) -> None:
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    for bad in (ids.float(), ids.t(), ids.flatten()):
        with pytest.raises(UnsupportedInput):
            moe_align(bad, 4, 16)
    for experts, block in ((0, 16), (4, 8), (4, 48)):
        with pytest.raises(UnsupportedInput):
            moe_align(ids, experts, block)
    with pytest.raises(UnsupportedInput, match="expert_map"):
        moe_align(ids, 4, 16, torch.zeros(3, dtype=torch.int32, device=device))
    assert cost(T=4, k=2, E=4).flops == 64
