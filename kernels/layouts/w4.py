"""Four-bit weights in groups of inputs, as the W4A16 kernel reads them.

``value = (code - zero) * scale + centre``: ``zero`` is 8 (symmetric), an integer per group (AWQ, GPTQ), or 8
with a float centre per group (HQQ, GGUF Q4_1, the workbench's round-to-nearest). Group parameters lie
[groups, N], so that a tile of output rows reads them in one run; codes lie [N, K/2], packed in halves of a
tile (:mod:`workbench.kernels.layouts.halves`) so that a half never holds more than one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.kernels.layouts.halves import pack_halves, padded, unpack_halves
from workbench.spec.errors import OptionError, WrongShape

GROUPS = (128, 64, 32, 16)


@dataclass(frozen=True)
class W4:
    """``codes`` uint8 [N, padded(K) / 2]; ``scales`` (bf16, fp16, fp32), ``zeros`` uint8, ``centres`` [G, N].

    ``group`` is the kernel's group (128, 64, 32 or 16), ``k`` the true number of inputs. G covers the padded
    inputs. At most one of ``zeros`` and ``centres`` is given; with neither the zero is 8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    centres: Tensor | None
    group: int
    k: int

    @property
    def half(self) -> int:
        """Inputs per nibble run: half a tile, and never more than a group."""
        return min(self.group, 64)

    @property
    def n(self) -> int:
        """Output rows."""
        return self.codes.shape[0]

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K] these codes stand for: computed in float32, then cast."""
        kp = padded(self.k, self.half)
        codes = unpack_halves(self.codes, self.half, kp).float()

        def spread(parameter: Tensor) -> Tensor:
            return parameter.float().t().repeat_interleave(self.group, 1)[:, :kp]

        zeros = 8 if self.zeros is None else spread(self.zeros)
        out = (codes - zeros) * spread(self.scales)
        if self.centres is not None:
            out += spread(self.centres)
        return out[:, : self.k].to(dtype).contiguous()


def pack_w4(
    codes: Tensor,
    scales: Tensor,
    *,
    zeros: Tensor | None = None,
    centres: Tensor | None = None,
    group: int,
) -> W4:
    """Pack ``codes`` [N, K] in 0..15 with group parameters [N, ceil(K / group)].

    A group that is a larger multiple of 16 runs as several kernel groups of equal parameters; a last group
    may be short. Raises :class:`OptionError` for a group that is no multiple of 16, for zeros beyond 0..127
    or both kinds of offset, :class:`WrongShape` when parameters and codes disagree.
    """
    if codes.ndim != 2 or scales.ndim != 2:
        raise WrongShape(f"Codes {tuple(codes.shape)} and scales {tuple(scales.shape)} must be matrices.")
    if group < 16 or group % 16:
        raise OptionError(f"Groups of {group} inputs cannot be packed.", hint="Use a multiple of 16.")
    if zeros is not None and centres is not None:
        raise OptionError("A grid has integer zeros or float centres, not both.", hint="Drop one of them.")
    if zeros is not None and zeros.numel() and not 0 <= int(zeros.min()) <= int(zeros.max()) <= 127:
        raise OptionError("Zero points must lie in 0..127.", hint="They are codes, 0..16 at four bits.")
    n, k = codes.shape
    for name, parameter in (("scales", scales), ("zeros", zeros), ("centres", centres)):
        if parameter is not None and tuple(parameter.shape) != (n, -(-k // group)):
            raise WrongShape(
                f"{name} {tuple(parameter.shape)} do not fit codes {tuple(codes.shape)} per {group}.",
                hint=f"Expected {(n, -(-k // group))}.",
            )
    kernel_group = next(g for g in GROUPS if group % g == 0)
    half = min(kernel_group, 64)
    groups = -(-padded(k, half) // kernel_group)

    def spread(parameter: Tensor) -> Tensor:
        fine = parameter.repeat_interleave(group // kernel_group, 1)[:, :groups]
        # Padded inputs meet zeros of the activations; their parameters only have to be finite.
        return F.pad(fine, (0, groups - fine.shape[1])).t().contiguous()

    return W4(
        codes=pack_halves(codes, half),
        scales=spread(scales),
        zeros=None if zeros is None else spread(zeros.to(torch.uint8)),
        centres=None if centres is None else spread(centres),
        group=kernel_group,
        k=k,
    )
