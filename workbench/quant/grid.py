"""A weight matrix on a grid: integer codes and two 16-bit numbers per group of inputs.

One value per weight, whoever multiplies with it: ``value = (code - offset) * step + centre``, in float32.
``step`` and ``centre`` are bfloat16 and are rounded *before* the codes are computed. Four-bit codes are
asymmetric with a float centre (any group may lie off zero), eight-bit codes symmetric with centre 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.spec.errors import OptionError

WHOLE_ROW = -1


@dataclass(frozen=True)
class Grid:
    """``codes`` [n, k] uint8 (4 bits, 0..15) or int8 (8 bits, -127..127); ``step`` [n, groups] bfloat16.

    ``centre`` [n, groups] bfloat16, or None when it is 0. The last group of a row may be shorter.
    """

    bits: int
    group: int
    codes: Tensor
    step: Tensor
    centre: Tensor | None

    @property
    def offset(self) -> int:
        """The code that stands for the centre."""
        return 8 if self.centre is not None else 0

    def per_weight(self, parameter: Tensor) -> Tensor:
        """A group parameter [n, groups] repeated over its inputs, [n, k]."""
        return parameter.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [n, k] these codes stand for: computed in float32, then cast."""
        step = self.per_weight(self.step.float())
        out = (self.codes.float() - self.offset) * step
        if self.centre is not None:
            out += self.per_weight(self.centre.float())
        return out.to(dtype)


def round_to_nearest(weight: Tensor, bits: int, group: int, layer: str = "weight") -> Grid:
    """Quantize ``weight`` [n, k] in groups of ``group`` consecutive inputs (-1: the whole row).

    4 bits: ``step = (max - min) / 15``, ``centre = min + 8 step``. 8 bits: ``step = amax / 127``. All-zero
    groups are exact. Raises :class:`OptionError` for another width, a group below 1, a weight that is not a
    matrix, or weights that are not finite.
    """
    if bits not in (4, 8) or (group < 1 and group != WHOLE_ROW):
        raise OptionError(
            f"{layer}: {bits} bits in groups of {group} is not offered.",
            hint="Choose 4 or 8 bits, and a group of at least 1 input, or -1 for whole rows.",
        )
    if weight.ndim != 2 or not weight.isfinite().all():
        raise OptionError(
            f"{layer}: only finite matrices can be quantized; this is {tuple(weight.shape)}.",
            hint="Check the checkpoint for NaN or infinite weights.",
        )
    k = weight.shape[1]
    group = k if group == WHOLE_ROW else min(group, k)
    # The last group is filled up with its own last input, which widens no range.
    padded = F.pad(weight.float()[:, None], (0, -k % group), mode="replicate")[:, 0]
    grouped = padded.view(weight.shape[0], -1, group)
    if bits == 8:
        step = (grouped.abs().amax(2) / 127).bfloat16()
        codes = (grouped / _divisor(step)).round_().clamp_(-127, 127).to(torch.int8)
        return Grid(bits, group, codes.flatten(1)[:, :k].contiguous(), step, None)
    low, high = grouped.aminmax(dim=2)
    step = ((high - low) / 15).bfloat16()
    centre = (low + 8 * step.float()).bfloat16()
    codes = ((grouped - centre.float()[..., None]) / _divisor(step)).round_().add_(8).clamp_(0, 15)
    return Grid(bits, group, codes.to(torch.uint8).flatten(1)[:, :k].contiguous(), step, centre)


def _divisor(step: Tensor) -> Tensor:
    """``step`` [n, groups, 1] in float32, with 1 where it is 0 (constant groups, whose codes are 0)."""
    step = step.float()[..., None]
    return torch.where(step == 0, 1.0, step)
