"""Round-to-nearest linears: every kernel computes from the same values, bias once, bytes really held."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from workbench.models.packed import PackedLinear, held_nbytes
from workbench.models.weightset import HEAD
from workbench.numerics.packing import pack, unpack
from workbench.quant import int8, rtn
from workbench.quant.grid import Grid, round_to_nearest
from workbench.spec.technique import make_config

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def method(**options: object) -> rtn.RoundToNearest:
    return rtn.bind(make_config(rtn.Config, options, "rtn"), None)


def linear(
    weight: Tensor,
    bias: Tensor | None = None,
    name: str = "o_proj",
    dtype: torch.dtype = BF16,
    numerics: str = "fast",
    **options: object,
) -> PackedLinear:
    return method(**options).pack(name, weight, bias, dtype=dtype, numerics=numerics)  # type: ignore[arg-type]


def oracle(grid: Grid, x: Tensor) -> Tensor:
    """The sum in float64 of bfloat16 activations with the grid's float32 values, before any rounding."""
    return x.bfloat16().double() @ grid.values().double().T


def close_to_one_rounding(out: Tensor, want: Tensor, x: Tensor, grid: Grid) -> bool:
    """Half a bfloat16 step of the sum, and float32 accumulation."""
    size = x.bfloat16().double().abs() @ grid.values().double().abs().T
    bound = want.abs() * 2**-8 + size * grid.codes.shape[1] * 2**-24
    return bool(((out.double() - want).abs() <= bound).all())


CASES = [
    (4, 0, 64, 96),  # int4pack
    (4, 64, 128, 192),
    (4, -1, 32, 160),  # whole row: one pair of parameters, run as equal groups of 32
    (4, 16, 16, 64),  # no packed kernel: group
    (4, 32, 24, 64),  # no packed kernel: outputs
    (4, 32, 16, 80),  # no packed kernel: short last group
    (8, 0, 48, 96),  # int8pack
    (8, 32, 48, 96),  # no packed kernel: groups
]


@pytest.mark.parametrize(("bits", "group", "n", "k"), CASES)
@pytest.mark.parametrize("numerics", ["fast", "pinned"])
def test_every_kernel_and_row_count_multiplies_with_the_grids_values(
    bits: int, group: int, n: int, k: int, numerics: str, seeded: None
) -> None:
    weight = torch.randn(n, k) * 0.05 + 0.01
    lin = linear(weight, numerics=numerics, bits=bits, group=group)
    grid = round_to_nearest(weight, bits, group or (32 if bits == 4 else -1))
    for rows in (1, 3, 8, 64, 130):
        x = torch.randn(rows, k)
        out = lin(x)
        assert out.dtype == FP32 and close_to_one_rounding(out, oracle(grid, x), x, grid), (lin.kernel, rows)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_qnt_16_every_group_size_equals_dequantise_then_multiply(group: int, seeded: None) -> None:
    weight, x = torch.randn(32, 64), torch.randn(5, 64)
    grid = round_to_nearest(weight, 4, group)
    exact = linear(weight, dtype=FP32, group=group)(x)
    torch.testing.assert_close(exact, x @ grid.values().T, atol=1e-4, rtol=1e-4)
    assert close_to_one_rounding(linear(weight, group=group)(x), oracle(grid, x), x, grid)


def test_qnt_01_ten_inputs_in_groups_of_four_run_through_every_stage(seeded: None) -> None:
    weight, x = torch.randn(3, 10), torch.randn(2, 10)
    bound = rtn.RoundToNearest(rtn.Config(bits=4, group=4))
    grid = round_to_nearest(weight, 4, 4)
    exact = bound.pack("l", weight, None, dtype=FP64)
    assert (exact.n, exact.k) == (3, 10)
    torch.testing.assert_close(exact(x.double()), x.double() @ grid.values(FP64).T, atol=1e-6, rtol=0)
    assert close_to_one_rounding(bound.pack("l", weight, None, dtype=BF16)(x), oracle(grid, x), x, grid)


@pytest.mark.parametrize(("bits", "group", "n", "k"), CASES)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_pinned_rows_never_depend_on_their_company(
    bits: int, group: int, n: int, k: int, dtype: torch.dtype, seeded: None
) -> None:
    lin = linear(torch.randn(n, k), dtype=dtype, numerics="pinned", bits=bits, group=group)
    x = torch.randn(140, k, dtype=FP64 if dtype is FP64 else FP32)
    whole = lin(x)
    for rows in (1, 2, 7, 8, 9, 40, 129):
        assert torch.equal(lin(x[:rows]), whole[:rows]), lin.kernel


@pytest.mark.parametrize(
    ("dtype", "name", "case"), list(product([BF16, FP32, FP64], ["o_proj", HEAD], CASES)), ids=str
)
def test_qnt_11_bias_is_added_once_and_never_invented(
    dtype: torch.dtype, name: str, case: tuple[int, int, int, int]
) -> None:
    bits, group, _, k = case
    for n in (3, 64):
        bias = torch.arange(1.0, n + 1)
        options = {"bits": bits, "group": group, "head": True}
        for rows in (1, 9, 130):
            x = torch.zeros(rows, k, dtype=FP64 if dtype is FP64 else FP32)
            with_bias = linear(torch.ones(n, k), bias, name, dtype, **options)
            without = linear(torch.ones(n, k), None, name, dtype, **options)
            assert torch.equal(with_bias(x), bias.to(x.dtype).expand(rows, n))
            assert (without(x) == 0).all()
    assert torch.equal(bias, torch.arange(1.0, n + 1)), "the caller's bias is not written to"


def test_bytes_are_those_of_packed_codes_and_parameters() -> None:
    weight = torch.randn(64, 96)
    assert held_nbytes([linear(weight)]) == 64 * 96 // 2 + 64 * 3 * 4
    assert held_nbytes([linear(weight, bits=8, numerics="pinned")]) == 64 * 96 + 64 * 2
    assert held_nbytes([linear(weight, group=16)]) == 64 * 96 // 2 + 64 * 6 * 4
    assert held_nbytes([linear(weight, dtype=FP32)]) == 64 * 96 * 4, "float32 sets save nothing"


def test_qnt_09_a_tied_embedding_is_untouched_by_a_quantised_head(seeded: None) -> None:
    table = torch.randn(16, 8)
    before, x = table.clone(), torch.randn(4, 8)
    for dtype in (BF16, FP32):
        head = linear(table, name=HEAD, dtype=dtype, head=True)
        assert torch.equal(table, before)
        storages = {t.untyped_storage().data_ptr() for t in head.held if isinstance(t, Tensor)}
        assert table.untyped_storage().data_ptr() not in storages, "a copy of its own"
        assert held_nbytes([head]) >= 16 * 8
        kept = linear(table, name=HEAD, dtype=dtype, head=False)
        assert "W8A8" in head.kernel and "W8A8" not in kept.kernel
        assert (head(x) - x @ table.T).abs().max() < 0.2
    torch.testing.assert_close(linear(table, name=HEAD, dtype=FP32)(x), x @ table.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_int8_head_follows_one_rule_and_rows_are_independent(dtype: torch.dtype, seeded: None) -> None:
    weight = torch.randn(48, 96)
    head = linear(weight, name=HEAD, dtype=dtype, head=True)
    grid = round_to_nearest(weight, 8, -1)
    x = torch.randn(33, 96, dtype=FP64 if dtype is FP64 else FP32) * 10.0 ** torch.arange(-16, 17).view(-1, 1)
    x[5] = 0
    out = head(x)
    scaled, scale = int8.quantize_rows(x)
    want = (scaled.round().double() @ grid.codes.double().T) * grid.step.double().T * scale.double()
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=0)
    assert (out[5] == 0).all() and out.dtype == x.dtype
    if dtype is BF16:
        for rows in (1, 2, 9):
            assert torch.equal(head(x[:rows]), out[:rows])


def test_four_bit_codes_survive_their_packing() -> None:
    codes = round_to_nearest(torch.randn(5, 33), 4, 16).codes
    assert torch.equal(unpack(pack(codes, 4), 4, 33), codes)


def test_keys_name_every_option() -> None:
    keys = {
        method(bits=b, group=g, head=h).key for b, g, h in product((4, 8), (0, -1, 16, 32), (False, True))
    }
    assert len(keys) == 16
