"""Activations to eight bits on their way into a linear: INT8 per token, or E4M3 per token and 128 inputs.

    INT8:  scale[m] = max_k |x[m, k] * factor[k]| / 127,    code = round(x * factor * (1 / scale))
    E4M3:  scale[g, m] = max_{k in g} |x[m, k]| / 448,      code = e4m3(x * (1 / scale))

Rounding is to nearest even; there is one division per scale and none per element. ``factors`` are the inverse
of SmoothQuant's per-channel divisors (arXiv 2211.10438), where no norm could absorb them. Scales of E4M3 lie
[groups, M], as the block-scaled GEMM reads them. A row of zeros gives codes 0 and scale 0; a row that is not
finite gets the scale NaN, so that it cannot pass for a number. FLOPs ~ 3 M K. Bytes 3 M K and the scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.kernels.linear.operands import FLOATS, check_dense, check_device, check_shape
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.numerics.e4m3 import LARGEST, to_e4m3
from workbench.spec.errors import UnsupportedInput

GROUP = 128
LONGEST = 32768
TINY = 2.0**-120  # the inverse of a smaller scale is not taken: such rows are zeros


def reference(x: Tensor, factors: Tensor | None = None, *, groups: bool = False) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scales, in float32: :func:`quantize_rows`, or :func:`quantize_groups`."""
    v = x.float() if factors is None else x.float() * factors
    if not groups:
        scale = v.abs().amax(1) / 127
        return (v * _inverse(scale)[:, None]).round().to(torch.int8), scale
    blocks = torch.nn.functional.pad(v, (0, -v.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scale = blocks.abs().amax(2) / LARGEST
    codes = to_e4m3(blocks * _inverse(scale)[..., None])
    return codes.view(torch.uint8).flatten(1)[:, : v.shape[1]].contiguous().view(codes.dtype), scale.t()


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > TINY, 1 / scale, 0.0)


@triton.jit
def quantize_rows_kernel(x, factors, codes, scales, M, K, stride, FP8: tl.constexpr, FACTORS: tl.constexpr,
                         COUNT: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """One row, as COUNT groups of GROUP inputs."""
    m = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, COUNT)
    ks = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    v = tl.load(x + m * stride + ks, mask=ks < K, other=0.0).to(tl.float32)
    if FACTORS:
        v *= tl.load(factors + ks, mask=ks < K, other=1.0)
    LIMIT: tl.constexpr = 448.0 if FP8 else 127.0
    # 0 * x is NaN where x is not finite; a maximum would lose that.
    scale = tl.div_rn(tl.max(tl.abs(v), 1), tl.full((COUNT,), LIMIT, tl.float32)) + tl.sum(v * 0.0, 1)
    large = scale > 2.0**-120
    inverse = tl.div_rn(tl.full((COUNT,), 1.0, tl.float32), tl.where(large, scale, 1.0))
    q = v * tl.where(large, inverse, 0.0)[:, None]
    if FP8:
        tl.store(scales + groups * M + m, scale, mask=groups * GROUP < K)
        tl.store(codes + m * K + ks, q.to(tl.float8e4nv), mask=ks < K)
    else:
        tl.store(scales + groups * M + m, scale)
        # Adding and taking away 1.5 * 2^23 rounds to the nearest even integer.
        tl.store(codes + m * K + ks, ((q + 12582912.0) - 12582912.0).to(tl.int8), mask=ks < K)


def _build(name: str, fp8: bool, factors: bool, count: int, group: int, warps: int) -> Build:
    signature = {"x": "*bf16", "factors": "*fp32", "codes": "*fp8e4nv" if fp8 else "*i8", "scales": "*fp32"}
    signature |= dict.fromkeys(("M", "K", "stride"), "i32")
    # A row is read once and stays in registers: a division per element would show as MUFU.
    sass = {
        "MUFU": Bound(0, 16),
        "LDL": Bound(0, 0),
        "STL": Bound(0, 0),
        "stack": Bound(0, 0),
        "regs": Bound(0, 128),
    }
    return Build(name, signature, {"FP8": fp8, "FACTORS": factors, "COUNT": count, "GROUP": group}, warps, 1,
                 ("x", "factors", "codes", "scales", "K", "stride"), sass)  # fmt: skip


BUILDS = (
    _build("int8, 4096 inputs", False, False, 1, 4096, 4),
    _build("int8 smoothed, 4096 inputs", False, True, 1, 4096, 4),
    _build("e4m3 groups, 4096 inputs", True, False, 32, GROUP, 4),
)


def cost(M: int, K: int, **_: object) -> Cost:
    """Work of one call: 16-bit rows in, bytes out, one scale a row."""
    return Cost(3 * M * K, 3 * M * K + 4 * M)


KERNEL = Kernel(
    "quantize_rows", "Activations to INT8 or E4M3", "triton",
    "SmoothQuant (arXiv 2211.10438), DeepSeek-V3 (arXiv 2412.19437)", quantize_rows_kernel, BUILDS, cost,
)  # fmt: skip


def quantize_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """INT8 codes [M, K] and float32 scales [M] of ``x`` [M, K] (bf16, fp16 or fp32, rows dense).

    ``factors``: float32 [K], multiplied first. Raises :class:`UnsupportedInput` for another dtype or layout,
    or rows longer than 32,768.
    """
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    return _launch(x, factors, codes, scales, 1, max(16, triton.next_power_of_2(x.shape[-1])))


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [M, K] and float32 scales [ceil(K / 128), M] of ``x`` [M, K]; refusals as above."""
    groups = triton.cdiv(x.shape[-1], GROUP)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, x.shape[0], dtype=torch.float32, device=x.device)
    return _launch(x, None, codes, scales, triton.next_power_of_2(groups), GROUP)


def _launch(
    x: Tensor, factors: Tensor | None, codes: Tensor, scales: Tensor, count: int, group: int
) -> tuple[Tensor, Tensor]:
    check_device("quantize_rows", x, factors)
    if x.ndim != 2 or x.dtype not in (*FLOATS, torch.float32) or x.stride(1) != 1 or count * group > LONGEST:
        raise UnsupportedInput(
            f"quantize_rows: x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}.",
            hint=f"It takes a matrix of bf16, fp16 or fp32 with dense rows of at most {LONGEST}.",
        )
    if factors is not None:
        check_dense("quantize_rows", "factors", factors, (torch.float32,))
        check_shape("quantize_rows", "factors", factors, (x.shape[1],))
    if x.numel():
        quantize_rows_kernel[(x.shape[0],)](
            x, x if factors is None else factors, codes, scales, x.shape[0], x.shape[1], x.stride(0),
            FP8=codes.dtype == torch.float8_e4m3fn, FACTORS=factors is not None, COUNT=count, GROUP=group,
            num_warps=4 if count * group <= 4096 else 8, num_stages=1,
        )  # fmt: skip
    return codes, scales
