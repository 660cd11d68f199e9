"""W8A16 on torch's int8pack kernel, and a W8A8 output head on FBGEMM.

int8pack sums bfloat16 activations times integer codes in float32, applies the output channel's step and
rounds to bfloat16. From ``LONG`` rows on the same codes, widened to float32 per call, go through oneDNN
in float32. The head needs float32 logits (bfloat16 ones tie) at M = 1 speed, which int8 activations give:
one scale per token, so that no row depends on another, and exact integer sums for every row count.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.packed import PackedLinear, tiled
from workbench.quant.dequantized import rounded
from workbench.quant.grid import Grid

LONG = 64
"""Rows from which widening the codes pays: 1.1 to 1.2 times at 64 rows, 1.4 times at 512."""
_TINY = 1e-30


def int8pack(grid: Grid, bias: Tensor | None, *, pinned: bool) -> PackedLinear:
    """The linear of an 8-bit grid with one group per row."""
    n, k = grid.codes.shape
    codes, step = grid.codes, grid.step.flatten()
    multiply, low, high = torch.ops.aten._weight_int8pack_mm.default, torch.bfloat16, torch.float32

    def short(x: Tensor) -> Tensor:
        out: Tensor = multiply(x.to(low), codes, step).to(high)
        return out if bias is None else out.add_(bias)

    held = tuple(t for t in (codes, step, bias) if t is not None)
    if pinned or not torch._C._has_mkldnn:
        return PackedLinear(short, n, k, "int8pack", held)
    pointwise, wide = torch.ops.mkldnn._linear_pointwise.default, step.float()

    def dense(x: Tensor) -> Tensor:
        out: Tensor = pointwise(x, codes.to(high), None, "none", [], "")
        return out.mul_(wide)

    long = rounded(dense, bias)

    def fn(x: Tensor) -> Tensor:
        return short(x) if x.shape[0] < LONG else long(x)

    return PackedLinear(fn, n, k, f"int8pack, from {LONG} rows oneDNN fp32 on the codes", (*held, wide))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``x`` [M, k] scaled to ±127 (not yet rounded) and what they were divided by, [M, 1]."""
    amax = x.abs().amax(1, keepdim=True).clamp_(min=_TINY)
    return x * (127.0 / amax), amax / 127.0


def int8_rows(grid: Grid, bias: Tensor | None, dtype: torch.dtype, *, pinned: bool) -> PackedLinear:
    """W8A8 with a scale per token. FBGEMM for 16-bit sets on CPUs with VNNI, else the same in ``dtype``."""
    n, k = grid.codes.shape
    step = grid.step.flatten()
    if dtype is torch.bfloat16 and grid.codes.device.type == "cpu" and _has_vnni():
        packed = _fbgemm_pack(grid.codes, step)
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

        def fn(x: Tensor) -> Tensor:
            scaled, scale = quantize_rows(x)
            out: Tensor = multiply(scaled, 1.0, 128, packed).mul_(scale)
            return out if bias is None else out.add_(bias)

        objects = (packed,) if bias is None else (packed, bias)
        return PackedLinear(fn, n, k, "FBGEMM W8A8 per token", objects, fbgemm_int8_nbytes(n, k))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    codes, factor = grid.codes.to(wide), step.to(wide)

    def reference(x: Tensor) -> Tensor:
        scaled, scale = quantize_rows(x)
        out = F.linear(scaled.round_(), codes).mul_(factor).mul_(scale)
        return out if bias is None else out.add_(bias)

    held = tuple(t for t in (codes, factor, bias) if t is not None)
    name = f"W8A8 per token, F.linear {'fp64' if wide is torch.float64 else 'fp32'} on the codes"
    return PackedLinear(tiled(reference) if pinned else reference, n, k, name, held)


def fbgemm_int8_nbytes(n: int, k: int) -> int:
    """Bytes of FBGEMM's packed int8 matrix: k in blocks of 512, padded, and 12 bytes per output.

    The 12 are scale, zero point and column sum. At k = 576 padding nearly doubles the matrix.
    """
    return -(-k // 512) * 512 * n + 12 * n


def _has_vnni() -> bool:
    """Without VNNI FBGEMM adds pairs of products in 16 bits, which full-range codes overflow."""
    return "fbgemm" in torch.backends.quantized.supported_engines and torch.cpu._is_vnni_supported()


def _fbgemm_pack(codes: Tensor, step: Tensor) -> object:
    with warnings.catch_warnings():  # the only packing entry point takes the deprecated quantized tensors
        warnings.simplefilter("ignore")
        zeros = torch.zeros(len(step), dtype=torch.int64)
        tensor = torch._make_per_channel_quantized_tensor(codes, step.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(tensor, None)
