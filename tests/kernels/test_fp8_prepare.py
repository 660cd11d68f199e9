"""Rotation and block quantization to FP8: codes equal to the plain form, and what they are good for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from workbench.kernels.attention.fp8_blocks import BLOCK, Fp8Blocks, packed_blocks, packed_table, restored
from workbench.kernels.attention.fp8_prepare import fp8_prepare, reference, rotated
from workbench.kernels.attention.fp8_simulate import simulated
from workbench.kernels.attention.problem import checked
from workbench.kernels.attention.problem import reference as attention
from workbench.kernels.layouts import permute
from workbench.numerics.hadamard import random_signs
from workbench.spec.errors import UnsupportedInput

Draw = Callable[..., Tensor]

pytestmark = pytest.mark.usefixtures("poisoned")  # a result that nobody wrote shows


def moved(x: Fp8Blocks) -> Fp8Blocks:
    return Fp8Blocks(
        *(v.cpu() if isinstance(v := getattr(x, f.name), Tensor) else v for f in fields(Fp8Blocks))
    )


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "kv_heads", "dim", "rotate", "dtype"),
    [
        ([200, 3], [300, 130], 2, 1, 128, True, torch.bfloat16),
        ([128], [128], 1, 1, 64, True, torch.float16),
        ([1, 17], [1, 129], 4, 2, 64, False, torch.bfloat16),
    ],
)
def test_codes_and_scales_are_those_of_the_plain_form(
    draw: Draw, q_lens: list[int], kv_lens: list[int], heads: int, kv_heads: int, dim: int, rotate: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Equal but for a code in a thousand, one step apart: the order of 128 additions may differ."""
    q = draw(sum(q_lens), heads, dim, dtype=dtype)
    k, v = (draw(sum(kv_lens), kv_heads, dim, dtype=dtype) for _ in range(2))
    signs = random_signs(dim, 3) if rotate else None
    found = moved(fp8_prepare(q, k, v, q_lens, kv_lens, signs))
    wanted = reference(q.cpu(), k.cpu(), v.cpu(), q_lens, kv_lens, signs)
    found.check()
    for field in fields(Fp8Blocks):
        a, b = getattr(found, field.name), getattr(wanted, field.name)
        if not isinstance(a, Tensor) or a.dtype == torch.int32:
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
        else:
            torch.testing.assert_close(a.float(), b.float(), rtol=0.13, atol=2**-9)
            assert (a.float() != b.float()).float().mean() < 1e-3
    _, _, value = restored(found)
    torch.testing.assert_close(value, v.cpu().float(), rtol=2**-4, atol=0.02)


def test_the_rotation_keeps_products_and_spreads_an_outlier() -> None:
    x, y = torch.randn(2, 50, 128).unbind()
    signs = random_signs(128, 1)
    torch.testing.assert_close(rotated(x, signs) @ rotated(y, signs).T, x @ y.T, rtol=1e-4, atol=1e-4)
    spike = torch.zeros(1, 128)
    spike[0, 17] = 50.0
    assert torch.allclose(rotated(spike, signs).abs(), torch.full((1, 128), 50.0 / 128**0.5))
    assert torch.equal(random_signs(128, 1), signs) and not torch.equal(random_signs(128, 2), signs)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_att_04_nothing_behind_the_end_is_read_and_it_becomes_zero(draw: Draw) -> None:
    """NaN in the neighbouring sequence, and slots of the last block that no token fills."""
    q, k, v = draw(150, 1, 64), draw(150, 1, 64), draw(150, 1, 64)
    signs = random_signs(64, 0)
    alone = fp8_prepare(q[:70], k[:70], v[:70], [70], [70], signs)
    for x in (q, k, v):
        x[70:] = float("nan")
    both = fp8_prepare(q, k, v, [70, 80], [70, 80], signs)
    for a, b in ((alone.q, both.q[:70]), (alone.k[0], both.k[0]), (alone.v[0], both.v[0])):
        assert torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))
    tail = permute.restore(alone.v.cpu()[0])[:, :, 70:]
    assert tail.view(torch.uint8).count_nonzero() == 0
    assert alone.k.cpu()[0, :, 70:].view(torch.uint8).count_nonzero() == 0


def test_all_zero_blocks_have_a_usable_scale(draw: Draw) -> None:
    zero = torch.zeros_like(draw(5, 1, 64))
    found = fp8_prepare(zero, zero, zero, [5], [5], random_signs(64, 0))
    assert found.q_scale.tolist() == [[1.0]] and found.v.float().count_nonzero() == 0


def test_blocks_and_tables_follow_the_sequences() -> None:
    assert packed_blocks([130, 0, 5]).tolist() == [[0, 128], [128, 2], [130, 5]]
    assert packed_table([130, 0, 5]).tolist() == [[0, 1], [0, 0], [2, 0]]
    assert packed_table([]).shape == (0, 1)


def test_bad_input_is_refused_with_the_way_out(draw: Draw) -> None:
    x, signs = draw(8, 1, 64), random_signs(64, 0)
    for call, match in (
        (lambda: fp8_prepare(*[draw(8, 1, 256)] * 3, [8], [8], None), "Head size 256"),
        (lambda: fp8_prepare(x.float(), x.float(), x.float(), [8], [8], signs), "float32"),
        (lambda: fp8_prepare(x, x, x, [8], [8], random_signs(128, 0)), "signs"),
        (lambda: fp8_prepare(x, x, x, [8], [8], signs * 2), "signs"),
        (lambda: fp8_prepare(x, x, x, [7], [8], signs), "Lengths"),
    ):
        with pytest.raises(UnsupportedInput, match=match) as caught:
            call()
        assert caught.value.hint


def outliers(generator: torch.Generator, *shape: int) -> Tensor:
    """The paper's distribution: N(0, 1) + N(0, 100) Bernoulli(0.001)."""
    rare = torch.rand(shape, generator=generator) < 0.001
    drawn = torch.randn(shape, generator=generator) + 10 * rare * torch.randn(shape, generator=generator)
    return drawn.bfloat16()


def gain(tokens: int, heads: int, dim: int, seeds: int) -> float:
    """Root mean square error of per-tensor FP8 over that of rotated blocks, pooled over seeds."""
    errors = torch.zeros(2)
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (outliers(generator, tokens, heads, dim) for _ in range(3))
        lens = [tokens], [tokens]
        exact, _ = attention(q, k, v, checked(q, k, v, *lens, causal=False), torch.float32)
        for i, (signs, per_tensor) in enumerate(((None, True), (random_signs(dim, seed), False))):
            blocks = reference(q, k, v, *lens, signs, per_tensor=per_tensor)
            errors[i] += (simulated(blocks, causal=False)[0] - exact).square().mean()
    return float((errors[0] / errors[1]).sqrt())


def test_rotation_lowers_the_error_on_outliers() -> None:
    assert gain(2048, 1, 64, seeds=2) >= 1.7


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_rotation_lowers_the_error_at_the_lengths_of_the_paper() -> None:
    assert gain(4096, 1, 128, seeds=3) >= 1.9
    assert gain(1024, 16, 128, seeds=2) >= 1.7


def test_blocks_hold_128_tokens() -> None:
    x = torch.randn(3, 1, 64).bfloat16()
    assert reference(x, x, x, [3], [3], None).k.shape == (1, 1, BLOCK, 64)
