"""Packed codes: every width, every axis, and refusal of codes that do not fit."""

from __future__ import annotations

import pytest
import torch

from workbench.numerics.affine import affine_codes, affine_parameters, affine_values
from workbench.numerics.packing import pack, packed_size, unpack
from workbench.spec.errors import OptionError


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("n", "dim"), [(1, 0), (7, 0), (8, 1), (33, -1), (64, 1)])
def test_unpack_inverts_pack_at_every_width(bits: int, n: int, dim: int) -> None:
    shape = [3, 2, 4]
    shape[dim] = n
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    packed = pack(codes, bits, dim)
    assert packed.dtype == torch.uint8 and packed.shape[dim] == packed_size(n, bits)
    assert torch.equal(unpack(packed, bits, n, dim), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_no_byte_is_wasted_on_multiples_of_eight(bits: int) -> None:
    assert packed_size(4096, bits) == 4096 * bits // 8


def test_layout_is_planar() -> None:
    assert pack(torch.tensor([1, 2, 3, 4]), 4).tolist() == [1 | 3 << 4, 2 | 4 << 4]
    assert pack(torch.arange(4), 2).tolist() == [0 | 1 << 2 | 2 << 4 | 3 << 6]
    assert pack(torch.tensor([7, 0, 0, 0, 0, 0, 0, 4]), 3).tolist() == [3, 0, 1 | 1 << 7]


@pytest.mark.parametrize("codes", [[16], [-1], [0, 300]])
def test_codes_that_do_not_fit_are_refused(codes: list[int]) -> None:
    with pytest.raises(OptionError, match="do not fit 4 bits"):
        pack(torch.tensor(codes), 4)


@pytest.mark.parametrize("bits", [0, 9, -2])
def test_widths_outside_one_to_eight_are_refused(bits: int) -> None:
    with pytest.raises(OptionError, match="from 1 to 8"):
        pack(torch.tensor([0]), bits)


def test_wrong_length_is_refused() -> None:
    with pytest.raises(OptionError, match="take 4 bytes"):
        unpack(torch.zeros(5, dtype=torch.uint8), 4, 8)


def test_kvc_11_every_width_is_really_used_and_really_packed(seeded: None) -> None:
    x = torch.randn(4096)
    errors = []
    for bits in (2, 3, 4, 8):
        groups = x.view(-1, 64)
        low, step = affine_parameters(groups.amin(1, keepdim=True), groups.amax(1, keepdim=True), bits)
        codes = affine_codes(groups, low, step, bits)
        assert max(len(row.unique()) for row in codes) <= 2**bits
        assert len(codes.unique()) > 2 ** (bits - 1)
        packed = pack(codes.flatten(), bits)
        assert packed.untyped_storage().nbytes() == -(-4096 * bits // 8)
        back = affine_values(unpack(packed, bits, 4096).view_as(groups), low, step)
        errors.append(float((back - groups).square().mean()))
    assert errors == sorted(errors, reverse=True) and len(set(errors)) == 4
