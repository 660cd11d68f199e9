"""KV in 8-bit integers: symmetric, one float16 scale per token and head.

A row of K or V of one head becomes ``head_dim`` int8 codes and one scale, so a token's bytes are a
function of that token alone: nothing is calibrated, appending never touches old data, and paging,
prefix sharing, chunking and rollback of drafts stay exact in the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.kv.compiled import decode_bytes, encode_bytes, kernels_of, rows_usable, usable
from workbench.kv.constants import NoConstants
from workbench.kv.rows import RowIndex
from workbench.numerics.affine import symmetric_scale
from workbench.spec.technique import TechniqueSpec


@dataclass(frozen=True)
class Config:
    """No options: rounding, range and scale follow from the format."""


SPEC = TechniqueSpec(
    id="kv_int8",
    title="INT8 KV cache",
    family="kv",
    seam="kv_codec",
    kind="lossy",
    summary=(
        "Keys and values as 8-bit integers with a scale per token and head. Half the bytes less scales "
        "(1.94x at head size 64). One large channel of a key costs every channel of that row precision: "
        "keys have such channels, which is why lower widths group keys per channel (see kivi)."
    ),
    paper="https://arxiv.org/abs/2402.02750",  # measures per-token against per-channel groups, section 3
    claims_slot=("kv_format",),
)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., D] and scales float16 [...] of rows ``x`` [..., D].

    ``scale = amax / 127`` rounded up to float16 and ``code = round(x / scale)``, so the error of an
    element is at most half its row's stored scale. Zero rows are exact.
    """
    x = x.float()
    scale = symmetric_scale(x.abs().amax(-1, keepdim=True), 127.0)
    codes = (x / scale.float()).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scale.squeeze(-1)


def dequantize(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write ``codes * scale`` to ``out`` [..., D], computed in float32 and rounded once."""
    torch.mul(codes, scale.float().unsqueeze(-1), out=out)


@dataclass(frozen=True)
class Int8Codec(NoConstants):
    """Planes ``k``, ``v`` int8 [Hkv, P, D] and ``k_scale``, ``v_scale`` float16 [Hkv, P]."""

    grain: Literal["token", "page"] = "token"
    in_place: bool = False
    key: str = "kv_int8/1"
    kernels: CDLL | None = field(default=None, compare=False, repr=False)
    _rows: RowIndex = field(default_factory=RowIndex, compare=False, repr=False)

    def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        """One byte per element and two per row; any geometry fits."""
        rows = (geometry.kv_heads, geometry.page_size)
        shape = (*rows, geometry.head_dim)
        return (
            PlaneSpec("k", torch.int8, shape, ("head", "slot", "dim")),
            PlaneSpec("v", torch.int8, shape, ("head", "slot", "dim")),
            PlaneSpec("k_scale", torch.float16, rows, ("head", "slot"), "kv_meta"),
            PlaneSpec("v_scale", torch.float16, rows, ("head", "slot"), "kv_meta"),
        )

    def page_sizes(self, head_dim: int) -> None:
        """Any page size works."""
        return None

    def encode(self, planes: Mapping[str, Tensor], where: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize rows ``k``, ``v`` [T, Hkv, D] into slots ``where`` int64 [T]."""
        if rows_usable(self.kernels, k, v):
            for name, x in (("k", k), ("v", v)):
                encode_bytes(self.kernels, x, where, planes[name], planes[f"{name}_scale"])
            return
        _, heads, size, dim = planes["k"].shape
        rows = self._rows(where, heads, size)
        # K and V in one pass: at a few rows the calls cost more than the arithmetic.
        codes, scale = quantize(torch.cat([k, v], 1))
        for name, part in (("k", slice(0, heads)), ("v", slice(heads, 2 * heads))):
            planes[name].view(-1, dim).index_copy_(0, rows, codes[:, part].reshape(-1, dim))
            planes[f"{name}_scale"].view(-1).index_copy_(0, rows, scale[:, part].flatten())

    def decode(self, planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
        """Dequantize pages (int64 [n]) into ``k`` and ``v`` [n, Hkv, P, D]."""
        for name, out in (("k", k), ("v", v)):
            codes, scale = planes[name], planes[f"{name}_scale"]
            if usable(self.kernels, out):
                decode_bytes(self.kernels, codes, scale, None, pages, out)
                continue
            dequantize(codes.index_select(0, pages), scale.index_select(0, pages), out)


def bind(config: Config, context: Any) -> Int8Codec:
    """The codec, with the compiled kernels where there are some."""
    return Int8Codec(kernels=kernels_of(context))
