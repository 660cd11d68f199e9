"""Weights as the kernels read them mean what was packed, for random sizes; the engine's own grids fit in."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.kernels.layouts.e8p import pack_e8p
from workbench.kernels.layouts.experts import interleave_gate_up, split_gate_up
from workbench.kernels.layouts.fp4 import pack_fp4
from workbench.kernels.layouts.w4 import pack_w4
from workbench.kernels.layouts.w8 import W8, quantize_fp8_blocks, quantize_w8
from workbench.numerics import e2m1, e8m0, e8p, hadamard
from workbench.numerics.e4m3 import from_e4m3
from workbench.quant.grid import WHOLE_ROW, round_to_nearest

SIZES = {"n": st.integers(1, 9), "k": st.integers(1, 400), "seed": st.integers(0, 2**31)}


@given(
    **SIZES, group=st.integers(1, 20).map(lambda g: 16 * g), offset=st.sampled_from(["", "zeros", "centres"])
)
@settings(deadline=None, max_examples=60)
def test_four_bit_groups_mean_what_was_packed(n: int, k: int, seed: int, group: int, offset: str) -> None:
    g = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    codes = torch.randint(0, 16, (n, k), generator=g)
    scales = torch.rand(n, groups, generator=g)
    zeros = torch.randint(0, 17, (n, groups), generator=g) if offset == "zeros" else None
    centres = torch.randn(n, groups, generator=g) if offset == "centres" else None

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t.repeat_interleave(group, 1)[:, :k]

    wanted = (codes - (8 if zeros is None else spread(zeros))) * spread(scales)
    wanted = wanted if centres is None else wanted + spread(centres)
    packed = pack_w4(codes, scales, zeros=zeros, centres=centres, group=group)
    assert torch.equal(packed.values(), wanted)
    assert packed.codes.shape[1] % 16 == 0  # a row is a whole number of 16-byte units: TMA reads it


@given(n=st.integers(1, 6), k=st.integers(1, 6).map(lambda b: 64 * b), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_the_engines_rounding_runs_on_the_kernels_layouts(n: int, k: int, seed: int) -> None:
    """A kernel is never another set of weights: the values are those of the grid, bit for bit."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    for group in (32, 64):
        grid = round_to_nearest(weight, 4, group)
        packed = pack_w4(grid.codes, grid.step, centres=grid.centre, group=group)
        assert torch.equal(packed.values(), grid.values())
    rows = round_to_nearest(weight, 8, WHOLE_ROW)
    assert torch.equal(W8(rows.codes, rows.step[:, 0].float()).values(), rows.values())


@given(**SIZES, form=st.sampled_from(["nvfp4", "mxfp4"]))
@settings(deadline=None, max_examples=50)
def test_fp4_blocks_mean_what_was_packed(n: int, k: int, seed: int, form: str) -> None:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    block = 16 if form == "nvfp4" else 32
    if form == "nvfp4":
        scales = (torch.rand(n, -(-k // block), generator=g) * 448).to(torch.float8_e4m3fn)
        factors, rows = from_e4m3(scales), torch.rand(n, generator=g)
    else:
        scales = torch.randint(40, 160, (n, -(-k // block)), generator=g, dtype=torch.uint8)
        factors, rows = e8m0.from_e8m0(scales), torch.ones(n)
    values = e2m1.from_e2m1(codes).double() * factors.double().repeat_interleave(block, 1)[:, :k]
    assert torch.equal(pack_fp4(codes, scales, rows).values(torch.float64), values * rows.double()[:, None])


@given(n=st.integers(1, 5), words=st.integers(1, 40), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_lattice_codes_mean_what_was_packed(n: int, words: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 65536, (n, words), generator=g)
    scales = torch.randn(n, generator=g)
    packed = pack_e8p(codes, scales)
    assert torch.equal(packed.values(), e8p.decode(codes).flatten(1) * scales[:, None])
    assert torch.equal(e8p.nearest(e8p.decode(codes)).long(), codes)


@given(n=st.integers(1, 300), k=st.integers(1, 300), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_eight_bit_weights_are_near_the_floats(n: int, k: int, seed: int) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    rows = quantize_w8(weight)
    assert ((rows.values() - weight).abs() <= rows.scales[:, None] * 0.5001).all()
    blocks = quantize_fp8_blocks(weight)
    largest = blocks.scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] * 448
    assert ((blocks.values() - weight).abs() <= weight.abs() * 2**-4 + largest * 2**-18).all()


@given(experts=st.integers(1, 4), inner=st.integers(1, 9), hidden=st.integers(1, 9))
def test_gate_and_up_come_apart_again(experts: int, inner: int, hidden: int) -> None:
    gate, up = torch.randn(2, experts, inner, hidden)
    both = interleave_gate_up(gate, up)
    assert torch.equal(both[:, 0], gate[:, 0]) and torch.equal(both[:, 1], up[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(split_gate_up(both), (gate, up), strict=True))


@given(m=st.sampled_from([1, 12, 20, 24, 28, 36, 44, 60]), power=st.integers(0, 4))
@settings(deadline=None, max_examples=30)
def test_hadamard_matrices_are_kronecker_products_with_powers_of_two(m: int, power: int) -> None:
    """What lets a kernel split one: every factorisation into a left matrix and 2^j is the same matrix."""
    n = m * 2**power
    whole = hadamard.hadamard(n)
    for j in range(power + 1):
        left = hadamard.hadamard(n // 2**j)
        assert torch.equal(torch.kron(left, hadamard.hadamard(2**j)), whole)
