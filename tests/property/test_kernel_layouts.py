"""Layouts of the kernels on random sizes: exact inverses, errors within the format, no stray writes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workbench.kernels.layouts import halves, kv_fp4, kv_fp8, kv_int8, kv_kivi, kv_plain, permute
from workbench.numerics import e2m1

sizes = st.fixed_dictionaries(
    {
        "pages": st.integers(1, 4),
        "page": st.sampled_from([16, 32, 64]),
        "heads": st.integers(1, 3),
        "dim": st.sampled_from([64, 128]),
        "seed": st.integers(0, 2**31),
        "log_scale": st.integers(-12, 6),
    }
)


def problem(size: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Slots (distinct) and rows of K and V whose magnitudes differ by rows."""
    g = torch.Generator().manual_seed(size["seed"])
    slots = size["pages"] * size["page"]
    count = int(torch.randint(0, slots + 1, (), generator=g))
    where = torch.randperm(slots, generator=g)[:count]
    shape = (count, size["heads"], size["dim"])
    spread = torch.exp2(torch.randint(-3, 4, (count, size["heads"], 1), generator=g) + size["log_scale"])
    k, v = (torch.randn(shape, generator=g) * spread for _ in range(2))
    return where, k, v


def at(read: Tensor, where: Tensor) -> Tensor:
    """Rows [T, H, D] that stand at the slots of pages read back [N, H, P, D]."""
    return read.transpose(1, 2).flatten(0, 1)[where]


@given(sizes)
def test_plain_pages_hold_what_was_written_and_zeros_elsewhere(size: dict[str, int]) -> None:
    where, k, v = problem(size)
    planes = kv_plain.layout(size["page"], size["heads"], size["dim"]).allocate(size["pages"])
    kv_plain.write(planes, where, k, v)
    read = kv_plain.read(planes, torch.arange(size["pages"]))
    for rows, got in zip((k, v), read, strict=True):
        assert torch.equal(at(got, where), rows.bfloat16().float())
        assert got.count_nonzero() == rows.bfloat16().count_nonzero()


@given(sizes)
def test_int8_rows_are_within_half_a_stored_step(size: dict[str, int]) -> None:
    where, k, v = problem(size)
    planes = kv_int8.layout(size["page"], size["heads"], size["dim"]).allocate(size["pages"])
    kv_int8.write(planes, where, k, v)
    for name, rows, got in zip("kv", (k, v), kv_int8.read(planes, torch.arange(size["pages"])), strict=True):
        step = planes[f"{name}_scale"].transpose(1, 2).flatten(0, 1)[where].float()[..., None]
        assert bool(((at(got, where) - rows).abs() <= step * 0.5001).all())


@given(sizes)
def test_permuted_fp8_pages_mean_the_same(size: dict[str, int]) -> None:
    where, k, v = problem(size)
    found = []
    for permuted in (False, True):
        layout = kv_fp8.layout(size["page"], size["heads"], size["dim"], permuted=permuted)
        planes = layout.allocate(size["pages"])
        kv_fp8.write(planes, where, k, v, permuted=permuted)
        found.append(kv_fp8.read(planes, torch.arange(size["pages"]), permuted=permuted))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for rows, got in zip((k, v), found[0], strict=True):
        error = (at(got, where) - rows).abs()
        # Half an E4M3 step of the value, or of the subnormals where the row's largest is far above it.
        assert bool(
            (error <= rows.abs() * 2.0**-4 + rows.abs().amax(-1, keepdim=True) * 2.0**-18 + 2e-7).all()
        )


@given(sizes, st.sampled_from(["nvfp4", "mxfp4"]))
def test_fp4_rows_are_within_half_a_step_of_their_block(size: dict[str, int], kind: str) -> None:
    where, k, v = problem(size)
    scales = (2.0 ** (size["log_scale"] - 6),) * 2
    layout = kv_fp4.layout(size["page"], size["heads"], size["dim"], kind)
    planes = layout.allocate(size["pages"])
    kv_fp4.write(planes, where, k, v, kind, scales)
    for rows, got in zip((k, v), kv_fp4.read(planes, torch.arange(size["pages"]), kind, scales), strict=True):
        blocks = rows.unflatten(-1, (-1, kv_fp4.BLOCK[kind]))
        amax = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).flatten(-2)
        # The coarsest step is 2 of 6; MXFP4 may scale by up to 2 too little and saturate at 6 of 8.
        bound = amax * (1 / 6 * 1.07 if kind == "nvfp4" else 0.25) + 1e-30
        assert bool(((at(got, where) - rows).abs() <= bound).all())


@given(sizes, st.sampled_from([2, 4]), st.sampled_from([16, 32]))
def test_kivi_pages_are_within_half_a_step(size: dict[str, int], bits: int, group: int) -> None:
    page = max(size["page"], group)
    g = torch.Generator().manual_seed(size["seed"])
    shape = (size["pages"], size["heads"], page, size["dim"])
    k, v = (torch.randn(shape, generator=g) * 2.0 ** size["log_scale"] for _ in range(2))
    planes = kv_kivi.layout(page, size["heads"], size["dim"], bits=bits, group=group).allocate(size["pages"])
    where = torch.randperm(size["pages"], generator=g)
    kv_kivi.write(planes, where, k, v)
    got_k, got_v = kv_kivi.read(planes, where)
    for rows, got, step, dim in ((k, got_k, planes["k_step"], 2), (v, got_v, planes["v_step"], 4)):
        spread = step[where].float().repeat_interleave(group, dim).reshape(shape)
        assert bool(((got - rows).abs() <= spread * 0.51 + rows.abs().max() * 1e-6).all())


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31))
def test_permuting_is_undone(rows: int, blocks: int, seed: int) -> None:
    x = torch.randn(rows, 16 * blocks, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(permute.restore(permute.permute(x)), x)
    assert torch.equal(permute.permute(x.T, 0), permute.permute(x).T)


@given(st.integers(1, 4), st.integers(1, 300), st.sampled_from([16, 32, 64]), st.integers(0, 2**31))
def test_halves_are_unpacked_to_what_was_packed(n: int, k: int, half: int, seed: int) -> None:
    codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = halves.pack_halves(codes, half)
    assert packed.shape[1] * 2 == halves.padded(k, half)
    assert torch.equal(halves.unpack_halves(packed, half, k), codes)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40))
def test_rounding_to_e2m1_keeps_the_order(values: list[float]) -> None:
    x = torch.tensor(sorted(values))
    got = e2m1.from_e2m1(e2m1.to_e2m1(x))
    assert bool((got[1:] >= got[:-1]).all())
    assert torch.equal(e2m1.from_e2m1(e2m1.to_e2m1(got)), got)
