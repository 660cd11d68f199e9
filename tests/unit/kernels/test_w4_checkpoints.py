"""Checkpoint layouts of four-bit weights: the values a reader of that format would compute come out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.kernels.layouts.w4_checkpoints import (
    AWQ_ORDER,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    pack_words,
    unpack_words,
)
from workbench.spec.errors import UnsupportedInput, WrongShape

N, K, GROUP = 24, 256, 64
G = K // GROUP


@pytest.fixture
def grid() -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], zeros [N, G] in 1..15, scales fp16 [N, G]."""
    g = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (N, K), generator=g)
    zeros = torch.randint(1, 16, (N, G), generator=g)
    return codes, zeros, (torch.rand(N, G, generator=g) * 0.1 + 0.01).half()


def values(codes: Tensor, zeros: Tensor | int, scales: Tensor, group: Tensor) -> Tensor:
    zero = zeros[:, group] if isinstance(zeros, Tensor) else zeros
    return (codes - zero).float() * scales.float()[:, group]


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_words(grid: tuple[Tensor, Tensor, Tensor], version: int) -> None:
    codes, zeros, scales = grid
    stored = pack_words((zeros - int(version == 1)).T.contiguous(), 1)
    weight, order = from_gptq(pack_words(codes.T.contiguous(), 0), scales.T, stored, version=version)
    assert order is None
    assert weight.group == GROUP
    assert torch.equal(weight.values(), values(codes, zeros, scales, torch.arange(K) // GROUP))


def test_gptq_with_activation_order_sorts_the_inputs(grid: tuple[Tensor, Tensor, Tensor]) -> None:
    codes, zeros, scales = grid
    g_idx = (torch.arange(K) // GROUP)[torch.randperm(K, generator=torch.Generator().manual_seed(1))]
    words, stored = pack_words(codes.T.contiguous(), 0), pack_words((zeros - 1).T.contiguous(), 1)
    weight, order = from_gptq(words, scales.T, stored, g_idx=g_idx.int())
    assert order is not None
    dense = values(codes, zeros, scales, g_idx)
    assert torch.equal(weight.values(), dense[:, order])
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(x[:, order] @ weight.values().T, x @ dense.T)
    with pytest.raises(UnsupportedInput, match="g_idx"):
        from_gptq(words, scales.T, stored, g_idx=torch.zeros(K, dtype=torch.int32))


def test_awq_words_are_interleaved_along_the_outputs(grid: tuple[Tensor, Tensor, Tensor]) -> None:
    codes, zeros, scales = grid
    weight = from_awq(pack_words(codes.T, 1, AWQ_ORDER), scales.T, pack_words(zeros.T, 1, AWQ_ORDER))
    assert torch.equal(weight.values(), values(codes, zeros, scales, torch.arange(K) // GROUP))
    # The word of outputs 0..7 as AutoAWQ writes it: nibble 1 is output 2, nibble 4 is output 1.
    word = int(pack_words(torch.arange(8)[None], 1, AWQ_ORDER)[0, 0]) & 0xFFFFFFFF
    assert f"{word:08x}" == "75316420"


def test_compressed_tensors_symmetric_and_not(grid: tuple[Tensor, Tensor, Tensor]) -> None:
    codes, zeros, scales = grid
    group = torch.arange(K) // GROUP
    symmetric = from_compressed_tensors(pack_words(codes, 1), scales)
    assert torch.equal(symmetric.values(), values(codes, 8, scales, group))
    zeroed = from_compressed_tensors(pack_words(codes, 1), scales, pack_words(zeros, 0))
    assert torch.equal(zeroed.values(), values(codes, zeros, scales, group))


def test_words_are_undone_in_any_order() -> None:
    codes = torch.randint(0, 16, (16, 40), generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    for dim, order in ((0, AWQ_ORDER), (1, AWQ_ORDER), (1, tuple(range(8)))):
        assert torch.equal(unpack_words(pack_words(codes, dim, order), dim, order), codes)


def test_other_widths_and_shapes_are_refused(grid: tuple[Tensor, Tensor, Tensor]) -> None:
    codes, zeros, scales = grid
    with pytest.raises(WrongShape, match="int32 words"):
        from_awq(codes.to(torch.uint8), scales.T, zeros)
    with pytest.raises(WrongShape, match="groups"):
        from_compressed_tensors(pack_words(codes, 1), scales[:, :3])
