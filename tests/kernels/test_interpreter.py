"""The repaired interpreter computes what the device computes: casts, arithmetic and dots of bf16 and fp8."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from workbench.kernels import interpreter

pytestmark = pytest.mark.cpu

N = 4096


@triton.jit
def _copy(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def _ops(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    left, right = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, left + right)
    tl.store(out + N + at, left * right)
    tl.store(out + 2 * N + at, left - right)
    tl.store(out + 3 * N + at, tl.maximum(left, right))
    tl.store(out + 4 * N + at, tl.where(left < right, left, right))
    tl.store(out + 5 * N + at, tl.abs(left))
    tl.store(out + 6 * N + at, -left)


@triton.jit
def _dot(a, b, out, M: tl.constexpr, K: tl.constexpr):
    i, k = tl.arange(0, M)[:, None], tl.arange(0, K)[None, :]
    left = tl.load(a + i * K + k)
    right = tl.load(b + i * K + k)
    acc = tl.dot(left, tl.trans(right))
    tl.store(out + i * M + tl.arange(0, M)[None, :], acc)


@triton.jit
def _sum(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N))))


@triton.jit
def _add(x, out):
    tl.atomic_add(out, tl.load(x))


@triton.jit
def _described(x, y, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BM, BN])
    target = tl.make_tensor_descriptor(y, [rows, columns], [columns, 1], [BM, BN])
    for row in range(0, rows, BM):
        for column in range(0, columns, BN):
            target.store([row, column], source.load([row, column]) * 2)


def spread(generator: torch.Generator, device: str) -> torch.Tensor:
    """Values over the whole range of the small formats: normal, subnormal, too large, zero, ties."""
    values = torch.randn(N, generator=generator) * torch.exp2(
        torch.randint(-14, 12, (N,), generator=generator)
    )
    values[:8] = torch.tensor([0.0, -0.0, 500.0, -500.0, 464.0, 1e-3, 17.0, 19.0])
    return values.to(device)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_casts_round_to_nearest_even_and_fp8_saturates(
    source: torch.dtype, target: torch.dtype, generator: torch.Generator, device: str
) -> None:
    values = spread(generator, device)
    values = values.clamp(-6e4, 6e4).to(source)
    out = torch.empty(N, dtype=target, device=device)
    _copy[(1,)](values, out, N)
    limit = torch.finfo(target).max
    expected = values.double().clamp(-limit, limit) if target.itemsize == 1 else values
    wrong = out.double() != expected.to(torch.float32).to(target).double()
    assert int(wrong.sum()) == 0


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_widening_is_exact_for_every_bit_pattern(source: torch.dtype, device: str) -> None:
    kind = torch.int16 if source.itemsize == 2 else torch.uint8
    count = 1 << (8 * source.itemsize)
    bits = torch.arange(count).to(kind).view(source).to(device)
    out = torch.empty(count, dtype=torch.float32, device=device)
    _copy[(1,)](bits, out, count)
    assert torch.equal(out.isnan(), bits.float().isnan())
    assert torch.equal(out.nan_to_num(7.0), bits.float().nan_to_num(7.0))


def test_a_nan_stays_nan_in_every_format(device: str) -> None:
    values = torch.full((N,), float("nan"), device=device)
    for target in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        out = torch.zeros(N, dtype=target, device=device)
        _copy[(1,)](values, out, N)
        assert bool(out.float().isnan().all())


def test_integers_and_bf16_convert_both_ways(device: str) -> None:
    whole = torch.arange(-128, 128, dtype=torch.int32, device=device)
    out = torch.empty(256, dtype=torch.bfloat16, device=device)
    _copy[(1,)](whole, out, 256)
    assert torch.equal(out, whole.to(torch.bfloat16))
    back = torch.empty(256, dtype=torch.int32, device=device)
    _copy[(1,)](out, back, 256)
    assert torch.equal(back, whole)


def test_bf16_arithmetic_is_rounded_once(generator: torch.Generator, device: str) -> None:
    a, b = (torch.randn(N, generator=generator).bfloat16().to(device) for _ in range(2))
    out = torch.full((7, N), float("nan"), dtype=torch.bfloat16, device=device)
    _ops[(1,)](a, b, out, N)
    expected = torch.stack([a + b, a * b, a - b, torch.maximum(a, b), torch.minimum(a, b), a.abs(), -a])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dots_accumulate_in_float32(dtype: torch.dtype, generator: torch.Generator, device: str) -> None:
    if device == "cuda" and dtype.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 dots need compute capability 8.9")
    a, b = (torch.randn(32, 64, generator=generator).to(dtype).to(device) for _ in range(2))
    out = torch.full((32, 32), float("nan"), device=device)
    _dot[(1,)](a, b, out, 32, 64)
    exact = a.double() @ b.double().T
    assert float((out - exact).norm() / exact.norm()) < (1e-3 if device == "cuda" else 1e-6)


def test_int8_dots_are_exact(generator: torch.Generator, device: str) -> None:
    a, b = (torch.randint(-128, 128, (32, 64), generator=generator).to(torch.int8) for _ in range(2))
    out = torch.zeros(32, 32, dtype=torch.int32, device=device)
    _dot[(1,)](a.to(device), b.to(device), out, 32, 64)
    assert torch.equal(out.cpu().long(), a.long() @ b.long().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensor_descriptors_keep_to_the_ragged_edge(dtype: torch.dtype, device: str) -> None:
    x = torch.arange(50 * 40, device=device).reshape(50, 40).remainder(97).to(dtype)
    y = torch.full((51, 40), -1.0, dtype=dtype, device=device)

    def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(scratch)
    _described[(1,)](x, y, 50, 40, 16, 16)
    assert torch.equal(y[:50], x * 2)
    assert bool((y[50] == -1).all())


@pytest.mark.skipif(not interpreter.wanted(), reason="about the interpreter")
def test_bf16_sums_and_atomics_are_refused_instead_of_taken_over_bits() -> None:
    x, out = torch.ones(64, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="Convert to float32"):
        _sum[(1,)](x, out, 64)
    with pytest.raises(Exception, match="Convert to float32"):
        _add[(1,)](x, out)


def test_without_the_variable_nothing_is_patched_and_no_driver_is_loaded() -> None:
    code = (
        "import os, sys; os.environ.pop('TRITON_INTERPRET', None);"
        "from workbench.kernels import interpreter; print(interpreter.repair(), 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
