"""FP4 weights as the W4A16-style kernel reads them: E2M1 codes, block scales, one float32 scale per row.

``value = code * block_scale * row_scale``. NVFP4 has E4M3 scales per 16 inputs and one float32 scale per
tensor (checkpoints of compressed-tensors store its inverse; fused matrices have several, hence one per row).
MXFP4 has a power of two per 32 (E8M0), stored here against the tensor's largest block so that the kernel
needs one multiplication: byte ``b`` stands for 2^(b - 253), and the largest power moves to ``row_scale``.
Codes are packed in halves of a tile (:mod:`workbench.kernels.layouts.halves`), scales lie [N, K / block].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.kernels.layouts.halves import pack_halves, padded, unpack_halves
from workbench.numerics import e2m1, e8m0
from workbench.numerics.e4m3 import from_e4m3
from workbench.spec.errors import OptionError, WrongShape

HALF = 64
#: The byte of the largest block of an MXFP4 tensor: as bfloat16 exponent it is 2^126, and a code's bits are
#: its value times 2^-126.
TOP = 253
#: How far below the largest block another may lie: code times scale is then a normal bfloat16.
SPAN = 120


@dataclass(frozen=True)
class FP4:
    """``codes`` uint8 [N, Kp / 2]; ``scales`` E4M3 [N, Kp / 16] or uint8 [N, Kp / 32]; ``row_scale`` [N].

    ``k`` is the true number of inputs, Kp that number in whole tiles of 128.
    """

    codes: Tensor
    scales: Tensor
    row_scale: Tensor
    k: int

    @property
    def n(self) -> int:
        """Output rows."""
        return self.codes.shape[0]

    @property
    def block(self) -> int:
        """Inputs per scale: 16 (NVFP4) or 32 (MXFP4)."""
        return 16 if self.scales.dtype == torch.float8_e4m3fn else 32

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K]: exact in float64, rounded once to any other dtype."""
        codes = e2m1.from_e2m1(unpack_halves(self.codes, HALF, padded(self.k, HALF))).double()
        if self.block == 16:
            scales = from_e4m3(self.scales).double()
        else:
            scales = torch.exp2(self.scales.double() - TOP)
        out = codes * scales.repeat_interleave(self.block, 1) * self.row_scale.double()[:, None]
        return out[:, : self.k].to(dtype).contiguous()


def pack_fp4(codes: Tensor, scales: Tensor, row_scale: float | Tensor = 1.0) -> FP4:
    """Pack E2M1 ``codes`` [N, K] (0..15) with ``scales`` [N, ceil(K / block)].

    E4M3 scales make NVFP4, with ``row_scale`` the float32 tensor scale (a number, or [N] for fused
    matrices); uint8 E8M0 scales make MXFP4. Raises :class:`OptionError` for another scale dtype, NaN scales,
    or powers of two further apart than ``SPAN``; :class:`WrongShape` when sizes disagree.
    """
    if codes.ndim != 2 or scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise OptionError(
            f"FP4 codes {tuple(codes.shape)} with {scales.dtype} scales.",
            hint="Codes form a matrix; scales are float8_e4m3fn (NVFP4) or uint8 E8M0 (MXFP4).",
        )
    n, k = codes.shape
    block = 16 if scales.dtype == torch.float8_e4m3fn else 32
    if tuple(scales.shape) != (n, -(-k // block)):
        raise WrongShape(f"Scales {tuple(scales.shape)} do not fit codes {(n, k)} in blocks of {block}.")
    rows = torch.as_tensor(row_scale, dtype=torch.float32, device=codes.device).expand(n)
    raw = scales.view(torch.uint8)
    if bool(((raw & 127) == 127).any() if block == 16 else (raw == e8m0.NAN).any()):
        raise OptionError("A block scale is NaN.", hint="The weights held NaN or infinity when quantized.")
    if block == 32:
        live = F.pad(codes & 7 > 0, (0, -k % block)).unflatten(1, (-1, block)).any(2)
        used = raw[live].int()
        top, low = (int(used.max()), int(used.min())) if used.numel() else (e8m0.BIAS, e8m0.BIAS)
        if top - low > SPAN:
            raise OptionError(
                f"Block scales differ by 2^{top - low} within one tensor; the kernel's range is 2^{SPAN}.",
                hint="Flush the smallest blocks to zero.",
            )
        raw = torch.where(live, raw.int() + (TOP - top), TOP)  # the scale of zeros is free
        rows = rows * 2.0 ** (top - e8m0.BIAS)
    width = padded(k, HALF) // block
    raw = F.pad(raw.to(torch.uint8), (0, width - raw.shape[1]))
    stored = raw.view(torch.float8_e4m3fn) if block == 16 else raw
    return FP4(pack_halves(codes, HALF), stored.contiguous(), rows.contiguous(), k)
