"""KV in four bits: E2M1 floats in blocks along the head, NVFP4 or MXFP4 scales.

NVFP4: 16 elements share an E4M3 scale, under one float32 scale per layer for K and one for V that calibration
fixed beforehand: without it, small layers fall into E4M3's subnormals. MXFP4: 32 elements share a power of
two. Encoding is a function of a token alone, so paging, prefix sharing, chunking and rollback of drafts stay
exact in the codes. Pages are laid out as the kernels read them (:mod:`workbench.kernels.layouts.kv_fp4`).
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.kernels.layouts.kv_fp4 import BLOCK, Kind, layout, quantize
from workbench.kernels.layouts.pages import PageLayout
from workbench.kv.compiled import decode_nibbles, kernels_of, usable
from workbench.kv.ranges import KVRanges, rotation, variant
from workbench.kv.rows import RowIndex
from workbench.numerics.e4m3 import LARGEST, e4m3_as_half
from workbench.spec.errors import InvariantError, OptionError, UnsupportedInput
from workbench.spec.technique import Claim, TechniqueSpec, option

_E2M1_LARGEST = 6.0


@dataclass(frozen=True)
class Config:
    """Format and transforms."""

    format: str = option(
        "nvfp4",
        choices=("nvfp4", "mxfp4"),
        help="nvfp4: blocks of 16, E4M3 scales, 4.5 bits. mxfp4: blocks of 32, powers of two, 4.25 bits.",
    )
    scale: str = option(
        "calibrated",
        choices=("calibrated", "unit"),
        help="nvfp4's scale per layer: from calibration text, or 1.0 (worse where values are small).",
    )
    rotate: bool = option(
        False, help="Rotate heads by a Hadamard matrix before coding: outliers spread over the block."
    )
    affine: bool = option(
        False, help="Take off the calibrated mean of each channel before coding, and add it when reading."
    )


SPEC = TechniqueSpec(
    id="kv_fp4",
    title="FP4 KV cache (NVFP4, MXFP4)",
    family="kv",
    seam="kv_codec",
    kind="lossy",
    summary=(
        "Keys and values as E2M1 floats with a scale per block: 3.56 (NVFP4) or 3.76 (MXFP4) times fewer "
        "bytes than 16 bits, scales counted. Decoded to attention's dtype before attention on a CPU."
    ),
    paper="https://arxiv.org/abs/2310.10537",
    claims_slot=("kv_format",),
    sweep=("", "rotate=true", "affine=true", "affine=true,rotate=true", "scale=unit", "format=mxfp4"),
    claims=(
        Claim(
            "Less than 1% below BF16 and FP8 KV; up to 2x the context or batch of FP8.",
            "code, MMLU-Pro and RULER-64K class tests, Blackwell, TensorRT-LLM",
            "https://developer.nvidia.com/blog/optimizing-inference-for-long-context-and-large-batch-sizes-with-"
            "nvfp4-kv-cache/",
        ),
    ),
)


def decode(codes: Tensor, scale: Tensor, kind: Kind, factor: float | Tensor) -> Tensor:
    """Values float32 [..., D] of packed codes [..., D/2] and block scales [..., D/block]; exact products.

    ``factor`` is NVFP4's scale of the layer; a tensor is float32 and broadcast to the block scales. A code's
    three low bits, moved under float16's exponent, are its value times 2^-14: two integer operations instead
    of a table, and the power joins the scale.
    """
    half = torch.empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=torch.int16, device=codes.device)
    low, high = half.chunk(2, -1)
    wide = codes.to(torch.int16)
    torch.bitwise_or((wide & 7) << 9, (wide & 8) << 12, out=low)
    torch.bitwise_or((wide & 0x70) << 5, (wide & 0x80) << 8, out=high)
    values = half.view(torch.float16).float()
    if kind == "nvfp4":
        step = e4m3_as_half(scale).float().mul_(factor * (256.0 * 2.0**14))
    else:
        step = torch.exp2(scale.float() - (127 - 14))
    values.unflatten(-1, (-1, BLOCK[kind])).mul_(step.unsqueeze(-1))
    return values


@dataclass(frozen=True)
class Fp4Codec:
    """Planes ``k``, ``v`` uint8 [Hkv, P, D/2]; ``k_scale``, ``v_scale`` [Hkv, P, D/block].

    ``ranges`` are wanted by calibrated NVFP4 and by ``affine``; ``at`` turns them into one layer's constants:
    ``factors`` (K, V) and ``means`` float32 [2, Hkv, D].
    """

    kind: Kind = "nvfp4"
    calibrated: bool = True
    rotate: bool = False
    affine: bool = False
    ranges: KVRanges | None = field(default=None, compare=False, repr=False)
    factors: tuple[float, float] = (1.0, 1.0)
    means: Tensor | None = field(default=None, compare=False, repr=False)
    kernels: CDLL | None = field(default=None, compare=False, repr=False)
    grain: Literal["token", "page"] = "token"
    in_place: bool = False
    _rows: RowIndex = field(default_factory=RowIndex, compare=False, repr=False)

    @property
    def calibration(self) -> Literal["none", "ranges", "sharing"]:
        """What must be measured before it can run."""
        return "ranges" if self.affine or (self.calibrated and self.kind == "nvfp4") else "none"

    @property
    def nbytes(self) -> int:
        """Bytes of the ranges."""
        return self.ranges.nbytes if self.ranges is not None else 0

    @property
    def key(self) -> str:
        """Format, version, transforms and calibration."""
        ranges = self.ranges.key if self.calibration == "ranges" and self.ranges is not None else "none"
        return f"kv_fp4/1/{self.kind}/{variant(affine=self.affine, rotate=self.rotate)}/{ranges}"

    def at(self, layer: int) -> Fp4Codec:
        """The codec of one layer; of a drafter's (-1) with the widest range of all layers and no mean."""
        if self.calibration == "none":
            return self
        if self.ranges is None:
            raise InvariantError("kv_fp4 is used before it was calibrated.")
        amax = self.ranges.amax[variant(affine=self.affine and layer >= 0, rotate=self.rotate)]
        top = amax[:, layer].amax(1) if layer >= 0 else amax.amax((1, 2))
        smallest = torch.finfo(torch.float32).tiny
        scale = (
            (top / (_E2M1_LARGEST * LARGEST)).clamp(min=smallest).tolist() if self.kind == "nvfp4" else None
        )
        factors = (scale[0], scale[1]) if scale is not None and self.calibrated else (1.0, 1.0)
        means = self.ranges.mean[:, layer] if self.affine and layer >= 0 else None
        return replace(self, factors=factors, means=means)

    def page_sizes(self, head_dim: int) -> None:
        """Any page size works; raises :class:`OptionError` for a head size that has no whole blocks."""
        self._layout(1, 1, head_dim)
        return None

    def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        """Codes and block scales; raises :class:`OptionError` for a head size that has no whole blocks."""
        made = self._layout(geometry.page_size, geometry.kv_heads, geometry.head_dim)
        meta: Literal["kv_meta"] = "kv_meta"
        return tuple(
            PlaneSpec(p.name, p.dtype, p.shape, ("head", "slot", "byte"))
            if p.name in ("k", "v")
            else PlaneSpec(p.name, p.dtype, p.shape, ("head", "slot", "group"), meta)
            for p in made.planes
        )

    def _layout(self, page_size: int, heads: int, head_dim: int) -> PageLayout:
        try:
            if self.rotate:
                rotation(head_dim)
            return layout(page_size, heads, head_dim, self.kind)
        except UnsupportedInput as err:
            raise OptionError(err.message, hint="Choose kv_fp8 or kv_int8 for this model.") from None

    def encode(self, planes: Mapping[str, Tensor], where: Tensor, k: Tensor, v: Tensor) -> None:
        """Round rows ``k``, ``v`` [T, Hkv, D] into slots ``where`` int64 [T]."""
        _, heads, size, half = planes["k"].shape
        rows = self._rows(where, heads, size)
        both = torch.cat([k, v], 1).float()  # one pass: at a few rows the calls cost more than the arithmetic
        if self.means is not None:
            both = both - self.means.to(both.device).flatten(0, 1)
        if self.rotate:
            both = both @ rotation(2 * half).to(both.device)
        codes, scale = quantize(both, self.kind, self._factors(both.device, heads))
        scale = scale.view(torch.uint8)
        for name, part in (("k", slice(0, heads)), ("v", slice(heads, 2 * heads))):
            planes[name].view(-1, half).index_copy_(0, rows, codes[:, part].reshape(-1, half))
            plane = planes[f"{name}_scale"].view(torch.uint8)
            wide = plane.shape[-1]
            plane.view(-1, wide).index_copy_(0, rows, scale[:, part].reshape(-1, wide))

    def _factors(self, device: torch.device, heads: int) -> float | Tensor:
        """The layer's scale: one number, or float32 [2 Hkv, 1, 1], first those of keys."""
        if self.factors[0] == self.factors[1]:
            return self.factors[0]
        return torch.tensor(self.factors, dtype=torch.float32, device=device).repeat_interleave(heads)[
            :, None, None
        ]

    def decode(self, planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
        """Decode pages (int64 [n]) into ``k`` and ``v`` [n, Hkv, P, D]; float32 inside, rounded once."""
        if usable(self.kernels, k) and usable(self.kernels, v) and not self.rotate and self.means is None:
            for name, out, factor in (("k", k, self.factors[0]), ("v", v, self.factors[1])):
                table = _steps_of_bytes(self.kind, factor)
                decode_nibbles(self.kernels, planes[name], planes[f"{name}_scale"], table, pages, out)
            return
        codes = _pages_of(planes, ("k", "v"), pages)
        scale = _pages_of(planes, ("k_scale", "v_scale"), pages)
        factors = self._factors(k.device, 1)
        if isinstance(factors, Tensor):
            factors = factors[..., None, None]
        x = decode(codes, scale, self.kind, factors)
        if self.rotate:
            x = x @ rotation(x.shape[-1]).to(x.device).T
        if self.means is not None:
            x += self.means.to(x.device)[:, None, :, None]
        k.copy_(x[0])
        v.copy_(x[1])


def _pages_of(planes: Mapping[str, Tensor], names: tuple[str, str], pages: Tensor) -> Tensor:
    """Pages of a plane of keys and of one of values, [2, n, *shape]: decoded in one pass."""
    dtype = planes[names[0]].dtype
    first, second = (planes[n].view(torch.uint8) for n in names)
    out = torch.empty((2, len(pages), *first.shape[1:]), dtype=torch.uint8, device=first.device)
    torch.index_select(first, 0, pages, out=out[0])
    torch.index_select(second, 0, pages, out=out[1])
    return out.view(dtype)


@lru_cache(maxsize=1024)
def _steps_of_bytes(kind: Kind, factor: float) -> Tensor:
    """What each byte of a block scale stands for, float32 [256]."""
    every = torch.arange(256, dtype=torch.uint8)
    if kind == "nvfp4":
        return e4m3_as_half(every).float().mul_(factor * 256.0)
    return torch.exp2(every.float() - 127)


def bind(config: Config, context: Any) -> Fp4Codec:
    """The codec, with the context's ranges once those were measured."""
    return Fp4Codec(
        "nvfp4" if config.format == "nvfp4" else "mxfp4",
        config.scale == "calibrated",
        config.rotate,
        config.affine,
        ranges=context.kv_ranges,
        kernels=kernels_of(context),
    )
