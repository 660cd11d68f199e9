"""Eight-bit weights: INT8 with one scale per output row, E4M3 with one scale per 128 x 128 block.

Both keep the matrix as it is in the checkpoint, [N, K] with inputs last, which is what 8-bit tensor-core
products want of both operands. Scales are float32. INT8 is SmoothQuant's weight format (arXiv 2211.10438),
the blocks are DeepSeek-V3's (arXiv 2412.19437, section 3.3.2); a last block of rows or inputs may be short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.numerics.e4m3 import LARGEST, from_e4m3, to_e4m3
from workbench.spec.errors import WrongShape

BLOCK = 128


@dataclass(frozen=True)
class W8:
    """``codes`` int8 [N, K] in -127..127 and ``scales`` float32 [N]: ``value = code * scale``."""

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or tuple(self.scales.shape) != (self.codes.shape[0],):
            raise WrongShape(
                f"INT8 codes {tuple(self.codes.shape)} with scales {tuple(self.scales.shape)}.",
                hint="Codes are [N, K], scales [N].",
            )

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K], computed in ``dtype``."""
        return self.codes.to(dtype) * self.scales.to(dtype)[:, None]


@dataclass(frozen=True)
class FP8Blocks:
    """``codes`` float8_e4m3fn [N, K] and ``scales`` float32 [ceil(N / 128), ceil(K / 128)]."""

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        wanted = tuple(-(-size // BLOCK) for size in self.codes.shape)
        if self.codes.ndim != 2 or tuple(self.scales.shape) != wanted:
            raise WrongShape(
                f"FP8 codes {tuple(self.codes.shape)} with block scales {tuple(self.scales.shape)}.",
                hint=f"Expected one scale per 128 x 128 block: {wanted}.",
            )

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K], computed in ``dtype``."""
        n, k = self.codes.shape
        scales = self.scales.to(dtype).repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        return from_e4m3(self.codes).to(dtype) * scales


def quantize_w8(weight: Tensor) -> W8:
    """Round to nearest, symmetric, one scale ``amax / 127`` per row; a row of zeros gets scale 0."""
    scales = weight.float().abs().amax(1) / 127
    codes = (weight.float() / torch.where(scales == 0, 1.0, scales)[:, None]).round().to(torch.int8)
    return W8(codes, scales)


def quantize_fp8_blocks(weight: Tensor) -> FP8Blocks:
    """E4M3 with ``scale = amax / 448`` per 128 x 128 block; a block of zeros gets scale 0."""
    n, k = weight.shape
    padded = F.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / LARGEST
    divisor = torch.where(scales == 0, 1.0, scales)[:, None, :, None]
    codes = to_e4m3((blocks / divisor).flatten(2).flatten(0, 1)[:n, :k].contiguous())
    return FP8Blocks(codes, scales)
