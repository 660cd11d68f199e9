"""FP8 FlashAttention-3 in Gluon against the values of its codes, and a simulation of its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from workbench.kernels.attention import fa3_fp8_kernel as kernel
from workbench.kernels.attention.fa3_fwd_fp8 import BUILDS, LONG, cost, fa3_fwd_fp8, reference
from workbench.kernels.attention.fp8_blocks import Fp8Blocks, blocks_of, restored
from workbench.kernels.attention.fp8_prepare import reference as prepared
from workbench.kernels.attention.fp8_simulate import simulated
from workbench.kernels.attention.problem import checked
from workbench.kernels.attention.problem import reference as attention
from workbench.kernels.emulator import SCHEDULES, Emulator, EmulatorError
from workbench.kernels.layouts import permute
from workbench.numerics.e4m3 import to_e4m3
from workbench.numerics.hadamard import random_signs
from workbench.spec.errors import UnsupportedInput

FP16 = torch.float16
LIFT = 8.0  # P is cast as 2^8 P
#: What float32 may cost a score, in bits of exponent, and a sum of P V, as a share of P |V|.
FLOAT32 = 2.0**-14


def blocks(
    generator: torch.Generator, q_lens: Any, kv_lens: Any, heads: int = 1, kv_heads: int = 1, dim: int = 64
) -> Fp8Blocks:
    """Inputs whose blocks differ in scale by up to 8, so that a wrong scale cannot pass."""
    q = torch.randn(sum(q_lens), heads, dim, generator=generator)
    k, v = (torch.randn(sum(kv_lens), kv_heads, dim, generator=generator) for _ in range(2))
    steps = 2.0 ** (torch.arange(sum(kv_lens)) // 100 % 4)[:, None, None]
    q, k, v = q.bfloat16(), (k / steps).bfloat16(), (v * steps).bfloat16()
    return prepared(q, k, v, q_lens, kv_lens, random_signs(dim, 0))


pytestmark = pytest.mark.usefixtures("poisoned")  # a result that nobody wrote shows


def error(x: Tensor, of: Tensor) -> float:
    return float((x.double() - of.double()).norm() / of.double().norm())


class Rounded(NamedTuple):
    """Float64 [Tq, Hq, D]: attention whose only error is the cast of P; how far float32 may be from it, where
    a P is next to a tie; and P |V|, which any rounding of P is a share of."""

    out: Tensor
    radius: Tensor
    mass: Tensor


def rounded(
    x: Fp8Blocks,
    bn: int,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
) -> Rounded:
    """Section 3.3 by hand: 2^8 P against the running maximum of tiles of ``bn`` keys, last first, as E4M3."""
    q, k, v = (y.double().transpose(0, 1) for y in restored(x))
    k, v = (y.repeat_interleave(len(q) // len(k), 0) for y in (k, v))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    parts = []
    for rows, keys, values in zip(
        q.split(x.q_lens, 1), k.split(x.kv_lens, 1), v.split(x.kv_lens, 1), strict=True
    ):
        n, at = keys.shape[1], torch.arange(keys.shape[1])
        s = rows @ keys.mT * scale
        s = (softcap * torch.tanh(s / softcap) if softcap else s) / math.log(2)
        ahead = at - (torch.arange(rows.shape[1])[:, None] + n - rows.shape[1])
        seen = ((ahead <= 0) | (not causal)) & ((ahead > -window) | (not window))
        s = s.masked_fill(~seen, -math.inf)
        tops = (
            torch.stack([tile.amax(-1) for tile in s.split(bn, -1)], -1).flip(-1).cummax(-1).values.flip(-1)
        )
        top = tops[..., at // bn].clamp(min=-1e30)
        p = torch.exp2(s - top + LIFT)
        low, high = (to_e4m3(p * (1 + off)).double() for off in (-FLOAT32, FLOAT32))
        past = torch.exp2(
            top - top[..., :1] - LIFT
        )  # what later maxima make of it; the first tile comes last
        total = (p * past).sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        of = [
            (y * past / total) @ z
            for y, z in ((low + high, values), (high - low, values.abs()), (p, values.abs()))
        ]
        parts.append((of[0] / 2, of[1] / 2, of[2]))
    out, tie, mass = (torch.cat(list(y), 1).transpose(0, 1) for y in zip(*parts, strict=True))
    return Rounded(out, tie + FLOAT32 * mass, mass)


def tile_keys(dim: int, two_level: bool = False, wide: bool = False) -> int:
    return 64 if dim == 128 and two_level and not wide else 128


def is_the_rounded(found: Tensor, x: Fp8Blocks, bn: int, **mask: Any) -> bool:
    """Whether every number is what E4M3 makes of P, but for float32 and the last bit of float16."""
    by_hand = rounded(x, bn, **mask)
    allowed = by_hand.radius + by_hand.out.abs() * 2**-11 + 2.0**-24
    return bool(((found.double() - by_hand.out).abs() <= allowed).all())


def check(x: Fp8Blocks, **options: Any) -> None:
    mask = {n: v for n, v in options.items() if n in ("causal", "window", "softcap", "scale")}
    found = fa3_fwd_fp8(x, emulator=options.pop("emulator", Emulator()), dtype=FP16, **options)
    form = {n: v for n, v in options.items() if n in ("two_level", "wide")}
    assert is_the_rounded(found.out, x, tile_keys(x.q.shape[2], **form), **mask)
    torch.testing.assert_close(found.lse, reference(x, **mask)[1].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", [1, 20, 150, 900])
def test_rounding_p_costs_what_the_format_says(generator: torch.Generator, keys: int) -> None:
    """E4M3 has 3 bits behind the point: 2^-4 of a P at most, and 2^-10 in all below its normal numbers."""
    x = blocks(generator, [keys], [keys], 2, 1)
    by_hand, exact = rounded(x, 128), reference(x)[0]
    unit = restored(x)[2].abs().max().double() * keys * 2.0 ** -(LIFT + 10)
    off = (by_hand.out - exact).abs()
    assert (off <= by_hand.mass * (2**-4 + FLOAT32) + unit).all()
    assert off.sum() > by_hand.radius.sum() or keys == 1  # the cast is seen, and not what float32 may cost


FORMS = [(64, {}), (64, {"two_level": True}), (128, {}), (128, {"two_level": True})]
FORMS += [(128, {"two_level": True, "wide": True})]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("dim", "form"), FORMS[:1] + FORMS[3:], ids=str)
def test_numbers_hold_under_every_schedule(
    generator: torch.Generator, schedule: Any, dim: int, form: dict[str, Any]
) -> None:
    check(blocks(generator, [200, 20], [430, 20], 2, 1, dim), emulator=Emulator(schedule), **form)


@pytest.mark.parametrize(("dim", "form"), FORMS, ids=str)
def test_the_arithmetic_is_the_simulated_one(
    generator: torch.Generator, dim: int, form: dict[str, Any]
) -> None:
    x = blocks(generator, [200, 3], [300, 130], 2, 1, dim)
    found = fa3_fwd_fp8(x, emulator=Emulator(), dtype=FP16, **form)
    bn = tile_keys(dim, **form)
    out, lse = simulated(x, bn=bn)
    assert is_the_rounded(found.out, x, bn) and is_the_rounded(out, x, bn)
    torch.testing.assert_close(found.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "kv_heads", "options"),
    [
        ([256], [256], 1, 1, {"causal": False}),
        ([1, 17, 65], [1, 17, 65], 1, 1, {}),
        ([5, 1, 128], [500, 129, 128], 4, 1, {}),
        ([64], [128], 8, 1, {"two_level": True}),
        ([200], [500], 1, 1, {"window": 150}),
        ([200], [300], 1, 1, {"softcap": 5.0, "scale": 0.4}),
    ],
)
def test_shapes_and_masks(
    generator: torch.Generator, q_lens: Any, kv_lens: Any, heads: int, kv_heads: int, options: dict[str, Any]
) -> None:
    check(blocks(generator, q_lens, kv_lens, heads, kv_heads), **options)


def test_att_03_rows_without_a_key_are_zero(generator: torch.Generator) -> None:
    x = blocks(generator, [300], [100])
    found = fa3_fwd_fp8(x, emulator=Emulator())
    assert found.out[:200].count_nonzero() == 0 and found.lse[:, :200].isneginf().all()
    check(x)


def test_pages_may_lie_anywhere(generator: torch.Generator) -> None:
    x = blocks(generator, [40, 100], [300, 140], 2, 2)
    order = torch.randperm(len(x.k), generator=generator)
    where = torch.argsort(order)

    def moved(y: Tensor) -> Tensor:
        return y.view(torch.uint8)[order].view(y.dtype) if y.dtype.itemsize == 1 else y[order]

    scattered = replace(
        x, table=where[x.table.long()].to(torch.int32),
        **{n: moved(getattr(x, n)) for n in ("k", "v", "k_scale", "v_scale")},
    )  # fmt: skip
    first, second = (fa3_fwd_fp8(y, emulator=Emulator()).out for y in (x, scattered))
    assert torch.equal(first, second)


def test_the_cast_of_p_does_not_flush_a_long_tail(generator: torch.Generator) -> None:
    """One strong key and hundreds of weak ones, each below E4M3's smallest number without the 2^8."""
    q, k = torch.zeros(64, 1, 64), torch.zeros(640, 1, 64)
    q[..., 0], k[0, 0, 0], k[1:, 0, 0] = 8.0, 7.0, 0.0
    v = torch.randn(640, 1, 64, generator=generator) * 0.1 + 1.0
    x = prepared(q.bfloat16(), k.bfloat16(), v.bfloat16(), [64], [640], None)
    found = fa3_fwd_fp8(x, causal=False, emulator=Emulator(), dtype=FP16)
    exact, _ = reference(x, causal=False)
    assert error(found.out, exact) < 0.02


def test_two_level_is_the_default_for_long_sequences(generator: torch.Generator, monkeypatch: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Emulator, "launch", lambda self, k, n, a: seen.append(a["TWO_LEVEL"]))
    x = blocks(generator, [1], [128])
    long = replace(x, kv_lens=(LONG + 1,), table=torch.zeros(1, blocks_of(LONG + 1), dtype=torch.int32))
    for y in (x, long):
        fa3_fwd_fp8(y, emulator=Emulator())
    fa3_fwd_fp8(long, two_level=False, emulator=Emulator())
    assert seen == [False, True, False]


def test_bad_input_is_refused_with_the_way_out(generator: torch.Generator) -> None:
    x = blocks(generator, [8], [8])
    for call, match in (
        (lambda: fa3_fwd_fp8(x), "Hopper"),
        (lambda: fa3_fwd_fp8(x, dtype=torch.float32, emulator=Emulator()), "writes bf16"),
        (lambda: fa3_fwd_fp8(x, causal=False, window=3, emulator=Emulator()), "window"),
        (lambda: fa3_fwd_fp8(x, scale=-1.0, emulator=Emulator()), "scale"),
        (lambda: fa3_fwd_fp8(replace(x, v=x.k), emulator=Emulator()), "v is"),
        (lambda: fa3_fwd_fp8(replace(x, kv_lens=(129,)), emulator=Emulator()), "narrow"),
        (lambda: fa3_fwd_fp8(replace(x, q_lens=(9,)), emulator=Emulator()), "q is"),
        (lambda: fa3_fwd_fp8(replace(x, k_scale=x.k_scale.double()), emulator=Emulator()), "k_scale is"),
    ):
        with pytest.raises(UnsupportedInput, match=match) as caught:
            call()
        assert caught.value.hint


def test_rotation_pays_in_the_kernel_as_it_does_in_the_simulation() -> None:
    """The emulated kernel on outliers: its gain over per-tensor FP8 is the simulation's."""
    generator = torch.Generator().manual_seed(5)
    rare = torch.rand(3, 256, 1, 64, generator=generator) < 0.001
    q, k, v = (
        torch.randn(rare.shape, generator=generator)
        + 10 * rare * torch.randn(rare.shape, generator=generator)
    ).bfloat16()
    exact, _ = attention(q, k, v, checked(q, k, v, [256], [256], causal=False))
    forms = [
        prepared(q, k, v, [256], [256], None, per_tensor=True),
        prepared(q, k, v, [256], [256], random_signs(64, 0)),
    ]
    ran = [error(fa3_fwd_fp8(x, causal=False, emulator=Emulator(), dtype=FP16).out, exact) for x in forms]
    predicted = [error(simulated(x, causal=False)[0], exact) for x in forms]
    assert ran == pytest.approx(predicted, rel=0.02)
    assert ran[0] > ran[1]


def test_cost_counts_one_byte_inputs() -> None:
    found = cost(q_lens=[4], kv_lens=[4], heads=2, kv_heads=1, dim=64, causal=False)
    assert found.flops == 4 * 64 * 2 * 16
    assert found.bytes == 64 * (8 + 8) + (128 + 4) * 8


def test_controls_are_declared() -> None:
    assert [b.name for b in BUILDS if b.fails] == ["hd128 two-level with overlap and KV tile 128"]
    assert all(b.sass["PRMT"].high == 100 for b in BUILDS)


# -- mutants ---------------------------------------------------------------------------------

CONSUMER, OPERAND = kernel.consume_fp8, kernel.as_operand
FREE_V = "part, p = warpgroup_mma_wait(0, deps=[part, p_new])"
ARRIVE_V = "mbarrier.arrive(v_empty.index(v_slot), count=1)"
NEXT = "\n" + " " * 20
#: name: (function, edits, schedules of nine that must notice)
MUTANTS: dict[str, tuple[Any, list[tuple[str, str]], int]] = {
    "tokens of 16 not permuted": (OPERAND, [(".permute([0, 1, 3, 2, 4])", "")], 9),
    "P not lifted": (CONSUMER, [("(m_new - LIFT)", "m_new")], 9),
    "lift left in the LSE": (CONSUMER, [("* unit, m - LIFT,", "* unit, m,")], 9),
    "unit of V upside down": (CONSUMER, [("unit / next_unit", "next_unit / unit")], 9),
    "scale of the wrong block": (CONSUMER, [("k_at + j * BN // PAGE", "k_at + last * BN // PAGE")], 9),
    "V freed before its product retires": (
        CONSUMER,
        [(FREE_V + NEXT + ARRIVE_V, ARRIVE_V + NEXT + FREE_V)],
        2,
    ),
    "one product too many in flight": (CONSUMER, [("mma_wait(1, deps=[s])", "mma_wait(2, deps=[s])")], 9),
    "wrong ping-pong parity": (CONSUMER, [("n + 1 + c & 1", "n & 1")], 9),
    "no early wait for K": (CONSUMER, [("pred=step + 1 < tiles", "pred=False")], 3),
}


def outcome(x: Fp8Blocks, emulator: Emulator) -> str:
    try:
        found = fa3_fwd_fp8(x, emulator=emulator, dtype=FP16, two_level=True)
    except EmulatorError as problem:
        return type(problem).__name__
    lse = reference(x)[1].float()
    close = is_the_rounded(found.out, x, tile_keys(128, True)) and torch.allclose(found.lse, lse, atol=1e-4)
    return "ok" if close else "wrong numbers"


def test_the_mutants_problem_is_solved_without_a_mutation(generator: torch.Generator) -> None:
    x = blocks(generator, [256], [900], 2, 1, 128)
    assert {outcome(x, Emulator(s, blocks=1)) for s in SCHEDULES} == {"ok"}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(generator: torch.Generator, mutant: Callable[..., Any], name: str) -> None:
    function, edits, least = MUTANTS[name]
    swaps = {function.fn.__name__: mutant(function, *edits)}
    x = blocks(generator, [256], [900], 2, 1, 128)
    found = [outcome(x, Emulator(s, swaps=swaps, blocks=1)) for s in SCHEDULES]
    assert sum(result != "ok" for result in found) >= least, found


def test_v_left_unpermuted_is_far_off(generator: torch.Generator) -> None:
    """The layout is part of the contract: with tokens in order the result is unrelated."""
    x = blocks(generator, [128], [256])
    found = fa3_fwd_fp8(replace(x, v=permute.restore(x.v)), causal=False, emulator=Emulator())
    exact, _ = reference(x, causal=False)
    assert error(found.out, exact) > 0.5


@pytest.mark.cuda
@pytest.mark.hopper
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("dim", "form"), FORMS, ids=str)
def test_numbers_on_a_gpu(generator: torch.Generator, dim: int, form: dict[str, Any]) -> None:
    x = blocks(generator, [700, 1, 129], [1500, 300, 129], 8, 2, dim)
    there = replace(x, **{n: v.cuda() for n, v in vars(x).items() if isinstance(v, Tensor)})
    found = fa3_fwd_fp8(there, dtype=FP16, **form)
    exact, lse = reference(x)
    assert found.path == "gluon"
    # The tensor core sums FP8 products in fewer bits than float32: another hundredth.
    assert error(found.out.cpu(), exact) <= error(rounded(x, tile_keys(dim, **form)).out, exact) + 0.01
    torch.testing.assert_close(found.lse.cpu(), lse.float(), rtol=1e-4, atol=1e-4)
