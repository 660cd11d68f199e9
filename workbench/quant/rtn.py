"""Round to nearest: 4- or 8-bit weights, 16-bit activations, no calibration.

The baseline every weight method is measured against. Groups of consecutive inputs share a step (and, at
4 bits, a float centre); codes and parameters are stored once, and every kernel of a weight set computes
with the same values (:mod:`workbench.quant.grid`). Norm gains are not folded, and the embedding table is
never touched: a quantized head is a copy of its own, and its bytes are counted.
"""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.models.compiled import compiled_pack
from workbench.models.packed import PackedLinear
from workbench.models.plain import plain_pack
from workbench.models.weightset import HEAD
from workbench.quant.compiled import coded_linear, fits
from workbench.quant.dequantized import dequantized_dense, dequantizing
from workbench.quant.grid import WHOLE_ROW, round_to_nearest
from workbench.quant.int4 import int4pack, kernel_group
from workbench.quant.int8 import int8_rows, int8pack
from workbench.quant.kernel import kernel_linear
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """Width, group and head."""

    bits: int = option(4, unit="bit", choices=(4, 8), help="Width of a weight code.")
    group: int = option(
        0,
        unit="inputs",
        choices=(0, -1, 16, 32, 64, 128),
        help="Inputs that share a step. 0: 32 at 4 bits, the whole row at 8. -1: the whole row. A last group "
        "may be shorter, but such layers (and groups of 16) have no packed kernel: they are dequantized per "
        "call.",
    )
    head: bool = option(
        False,
        help="Also run the output head in int8 (weights per channel, activations per token). A tied "
        "embedding keeps its own table.",
    )


SPEC = TechniqueSpec(
    id="rtn",
    title="Round-to-nearest weights",
    family="quant",
    seam="weights",
    kind="lossy",
    summary=(
        "4- or 8-bit weights without calibration, activations in 16 bits. A GGUF Q4_1 checkpoint lies "
        "on a 4-bit grid of groups of 32 with a float minimum: at 4 bits and group 32 it comes back almost "
        "unchanged, which is no evidence of quality. Judge 4 bits there by groups of 64 or whole rows. On a "
        "CPU 4 bits are for decoding: a long prompt takes longer than with 16-bit weights."
    ),
    paper="https://arxiv.org/abs/2210.17323",  # GPTQ, whose tables use RTN as the baseline
    claims_slot=("weights",),
    claims=(
        Claim(
            "4-bit per-channel RTN raises WikiText-2 perplexity from 6.1 to 7.8.",
            "Llama-3-8B, W4A16 per channel",
            "https://arxiv.org/abs/2405.16406",
        ),
    ),
)


@dataclass(frozen=True)
class RoundToNearest:
    """The weight method bound to one configuration, and to the compiled kernels where the plan has them."""

    config: Config
    kernels: CDLL | None = field(default=None, compare=False, repr=False)
    activation: str = ""  # of the MLP, which those kernels apply

    @property
    def name(self) -> str:
        """The technique's id."""
        return SPEC.id

    @property
    def key(self) -> str:
        """Everything that shapes the weights: id, version and options."""
        return f"{SPEC.id}/1/" + ",".join(f"{k}={v}" for k, v in sorted(asdict(self.config).items()))

    def pack(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        numerics: Literal["pinned", "fast"] = "fast",
        device: torch.device | str = "cpu",
    ) -> PackedLinear:
        """Quantize one (fused) linear ``weight`` [n, k] and choose its kernel.

        The head stays unquantized unless asked for. Raises :class:`workbench.spec.errors.OptionError`
        naming the layer when its weight cannot be quantized.
        """
        if name == HEAD and not self.config.head:
            if self.kernels is not None:
                return compiled_pack(self.kernels, self.activation)(name, weight, bias)
            return plain_pack(dtype, numerics, device)(name, weight, bias)
        pinned, wide = numerics == "pinned", torch.float64 if dtype is torch.float64 else torch.float32
        weight = weight.to(device)
        bias = None if bias is None else bias.to(device, wide)
        if name == HEAD:
            return int8_rows(round_to_nearest(weight, 8, WHOLE_ROW, name), bias, dtype, pinned=pinned)
        grid = round_to_nearest(weight, self.config.bits, self._group(), name)
        if dtype is not torch.bfloat16:
            return dequantized_dense(grid, bias, wide, pinned=pinned)
        if self.kernels is not None and fits(grid):
            return coded_linear(self.kernels, grid, bias, name, self.activation)
        if weight.device.type == "cpu":
            if (group := kernel_group(grid)) is not None:
                return int4pack(grid, group, bias)
            if grid.bits == 8 and grid.step.shape[1] == 1:
                return int8pack(grid, bias, pinned=pinned)
        elif (linear := kernel_linear(grid, bias, pinned=pinned)) is not None:
            return linear
        return dequantizing(grid, bias, pinned=pinned)

    def _group(self) -> int:
        if self.config.group:
            return self.config.group
        return 32 if self.config.bits == 4 else WHOLE_ROW


def bind(config: Config, context: Any) -> RoundToNearest:
    """The weight method, with the plan's compiled kernels if it has them."""
    if context is None or context.kernels is None:
        return RoundToNearest(config)
    return RoundToNearest(config, context.kernels, context.config.activation)
