"""KIVI: 4- or 2-bit KV, keys grouped per channel and values per token.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (arXiv 2402.02750, ICML
2024), section 3 and algorithm 1. A few key channels are large for all tokens, so a key group is one
channel over ``group`` tokens; values have no such channels, so a value group is ``group`` channels of
one token. Recent tokens stay at full precision. *Deviation*: the paper quantizes keys ``residual`` at a
time but slides values by one token per step. Here a page is ``residual`` tokens, and both leave it
together when it is full, so what a query sees is a function of absolute positions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.kv.compiled import decode_groups, kernels_of, usable
from workbench.kv.constants import NoConstants
from workbench.kv.grouped import GroupedPages, group_option, residual_option
from workbench.numerics.affine import affine_codes, affine_parameters
from workbench.numerics.packing import pack
from workbench.spec.errors import OptionError
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """Width and sizes; one element costs ``bits + 32 / group`` bits once its page is full."""

    bits: int = option(4, unit="bit", choices=(4, 2), help="Width of a code.")
    group: int = group_option()
    residual: int = residual_option()


SPEC = TechniqueSpec(
    id="kivi",
    title="KIVI",
    family="kv",
    seam="kv_codec",
    kind="lossy",
    summary=(
        "Asymmetric 4- or 2-bit codes, packed, with float16 minimum and step per group: keys per channel, "
        "values per token. A page is encoded when it is full; before that it is exact. Two bits cost 3 real "
        "bits at group 32, and models as small as 135M do not take them well."
    ),
    paper="https://arxiv.org/abs/2402.02750",
    claims_slot=("kv_format",),
    sweep=("", "bits=2"),
    claims=(
        Claim(
            "2.6x less peak memory, weights included, and 2.35x to 3.47x throughput.",
            "2 bits, Llama-2 / Falcon / Mistral 7B, batch up to 4x larger, own CUDA kernels",
            "https://arxiv.org/abs/2402.02750",
        ),
    ),
)


def encode_keys(k: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [n, H, P, D] per channel over ``group`` tokens.

    Returns codes uint8 [n, H, P/group, group*bits/8, D] packed along tokens, minimum and step float16
    [n, H, P/group, 1, D]. The error of an element is at most half its group's stored step.
    """
    n, heads, slots, dim = k.shape
    x = k.float().reshape(n, heads, slots // group, group, dim)
    low, step = affine_parameters(x.amin(3, keepdim=True), x.amax(3, keepdim=True), bits)
    return pack(affine_codes(x, low, step, bits), bits, 3), low, step


def encode_values(v: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values [n, H, P, D] per token over ``group`` channels.

    Returns codes uint8 [n, H, P*bits/8, D] packed along tokens (parameters are per token either way, and
    whole rows unpack faster than parts of rows), minimum and step float16 [n, H, P, D/group, 1].
    """
    n, heads, slots, dim = v.shape
    x = v.float().reshape(n, heads, slots, dim // group, group)
    low, step = affine_parameters(x.amin(4, keepdim=True), x.amax(4, keepdim=True), bits)
    return pack(affine_codes(x, low, step, bits).view(n, heads, slots, dim), bits, 2), low, step


def decode_keys(codes: Tensor, low: Tensor, step: Tensor, bits: int, out: Tensor) -> None:
    """Write what :func:`encode_keys` stored to ``out`` [n, H, P, D]; float32 inside, rounded once."""
    parts, mask = 8 // bits, 2**bits - 1
    n, heads, groups, size, dim = codes.shape
    low, step = low.float(), step.float()
    grouped = out.view(n, heads, groups, parts, size, dim)
    for p in range(parts):
        field = codes >> (p * bits) if p == parts - 1 else (codes >> (p * bits)) & mask
        torch.addcmul(low, field, step, out=grouped[:, :, :, p])


def decode_values(codes: Tensor, low: Tensor, step: Tensor, bits: int, out: Tensor) -> None:
    """Write what :func:`encode_values` stored to ``out`` [n, H, P, D]; float32 inside, rounded once."""
    parts, mask = 8 // bits, 2**bits - 1
    n, heads, size, dim = codes.shape
    exact = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    split = exact.view(n, heads, parts, size, dim)
    for p in range(parts):
        split[:, :, p] = codes >> (p * bits) if p == parts - 1 else (codes >> (p * bits)) & mask
    exact.view(*low.shape[:4], -1).mul_(step.float()).add_(low.float())
    if exact is not out:
        out.copy_(exact)


@dataclass(frozen=True)
class KiviCodec(GroupedPages, NoConstants):
    """Page-grain codec: codes in planes ``k`` and ``v``, parameters in ``k_min``, ``k_step`` and so on."""

    technique: ClassVar[str] = "kivi"
    bits: int = 4
    group: int = 32
    residual: int = 128
    grain: Literal["token", "page"] = "page"
    in_place: bool = False
    kernels: CDLL | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise OptionError(f"kivi.bits = {self.bits} is not a width it packs.", hint="Choose 4 or 2 bits.")
        super().__post_init__()

    @property
    def key(self) -> str:
        """Format, version, width and sizes."""
        return f"kivi/1/{self.bits}/{self.group}/{self.residual}"

    def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        """Packed codes and float16 parameters; raises :class:`OptionError` for sizes that do not divide."""
        parameters = self.parameter_planes(geometry)
        heads, slots, dim = geometry.kv_heads, geometry.page_size, geometry.head_dim
        k_shape = (heads, slots // self.group, self.group * self.bits // 8, dim)
        return (
            PlaneSpec("k", torch.uint8, k_shape, ("head", "group", "byte", "dim")),
            PlaneSpec("v", torch.uint8, (heads, slots * self.bits // 8, dim), ("head", "byte", "dim")),
            *parameters,
        )

    def encode(self, planes: Mapping[str, Tensor], where: Tensor, k: Tensor, v: Tensor) -> None:
        """Encode whole pages ``k``, ``v`` [n, Hkv, P, D] into pages ``where`` int64 [n]."""
        for name, parts in (
            ("k", encode_keys(k, self.bits, self.group)),
            ("v", encode_values(v, self.bits, self.group)),
        ):
            for plane, part in zip((name, f"{name}_min", f"{name}_step"), parts, strict=True):
                planes[plane][where] = part

    def decode(self, planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
        """Decode pages (int64 [n]) into ``k`` and ``v`` [n, Hkv, P, D]."""
        for name, decode, out in (("k", decode_keys, k), ("v", decode_values, v)):
            if usable(self.kernels, out):
                decode_groups(self.kernels, planes, (name, name), self.bits, pages, out)
                continue
            codes, low, step = (planes[f"{name}{p}"].index_select(0, pages) for p in ("", "_min", "_step"))
            decode(codes, low, step, self.bits, out)


def bind(config: Config, context: Any) -> KiviCodec:
    """The codec; sizes are checked here, so that a bad pair never reaches a page."""
    return KiviCodec(config.bits, config.group, config.residual, kernels=kernels_of(context))
