"""The pack of unquantised weight sets: float64, float32 and 16-bit.

A 16-bit weight set stores one value per weight, exact in bfloat16 and in float16 alike, so that the
kernels may be mixed. Layer linears take bfloat16 activations and return sums rounded to bfloat16, the
gated half of the MLP its activated product (``gated_linear``); the head returns float32, because logits
rounded to bfloat16 tie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.models import packed
from workbench.models.gated_linear import ONEDNN, fbgemm_gated, onednn_gated
from workbench.models.packed import PackedLinear
from workbench.models.weightset import GATE_UP, HEAD, Numerics, Pack
from workbench.spec.errors import OptionError

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_HALF_MAX = 65_504.0


def plain_pack(
    dtype: torch.dtype,
    numerics: Numerics = "fast",
    device: torch.device | str = "cpu",
    *,
    activation: str | None = None,
) -> Pack:
    """The pack for one dtype and numerics class; ``activation`` allows the MLP's to be fused into a kernel.

    Raises ``OptionError`` for any other dtype.
    """
    if dtype not in DTYPES:
        raise OptionError(f"Weights cannot be held as {dtype}.", hint="Use float64, float32 or bfloat16.")
    pinned, target = numerics == "pinned", torch.device(device)
    onednn = target.type == "cpu" and torch._C._has_mkldnn
    onednn16 = onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def pack(name: str, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        if dtype is not torch.bfloat16:
            weight, bias = weight.to(target, dtype), None if bias is None else bias.to(target, dtype)
            # The head stays dense: it then shares the storage of a tied embedding.
            if dtype is torch.float32 and onednn and name != HEAD:
                return packed.onednn_float32(weight, bias, pinned=pinned)
            return packed.dense(weight, bias, pinned=pinned)
        weight = sixteen_bit(weight).to(target)
        bias = None if bias is None else bias.to(target, torch.bfloat16)
        # FBGEMM sums each row alone, which the pinned class needs; oneDNN is faster from a dozen rows on.
        alone = target.type == "cpu" and _fbgemm() and fits_float16(weight)
        if activation in ONEDNN and onednn16 and name.endswith(GATE_UP):
            if pinned and alone:
                return fbgemm_gated(weight, bias, activation)
            return onednn_gated(weight, bias, activation, pinned=pinned)
        if alone and (pinned or name == HEAD):
            return packed.fbgemm_float16(weight, bias, rounded=name != HEAD)
        if onednn16:
            return packed.onednn_bfloat16(weight, bias, pinned=pinned)
        return packed.bfloat16_dense(weight, bias, pinned=pinned)

    return pack


def sixteen_bit(weight: Tensor) -> Tensor:
    """Round to bfloat16 values that float16 holds too; float16 only drops bits of |w| < 6.1e-5.

    Weights beyond float16's range keep their bfloat16 value.
    """
    rounded = weight.to(torch.bfloat16)
    if not fits_float16(rounded):
        return rounded
    return rounded.to(torch.float16).to(torch.bfloat16)


def fits_float16(weight: Tensor) -> bool:
    """Whether every |w| is at most 65504."""
    return weight.numel() == 0 or bool(weight.abs().max() <= _HALF_MAX)


def _fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines
