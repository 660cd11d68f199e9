"""KV in FP8 E4M3, with a scale per token and head, a calibrated one per layer or per head, or none at all.

E4M3 is ``float8_e4m3fn``: largest value 448, three mantissa bits. Scales per layer or per head, as vLLM and
TensorRT-LLM use them, are fixed by calibration: a scale that followed the data at run time would change bytes
with the batching. Encoding is a function of a token alone, so paging, prefix sharing, chunking and rollback
of drafts stay exact in the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.kv.compiled import decode_bytes, encode_bytes, kernels_of, rows_usable, usable
from workbench.kv.ranges import KVRanges
from workbench.kv.rows import RowIndex
from workbench.numerics.affine import symmetric_scale
from workbench.numerics.e4m3 import LARGEST, e4m3_as_half, to_e4m3
from workbench.spec.errors import InvariantError
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """Where the scale comes from."""

    scale: str = option(
        "token",
        choices=("token", "head", "layer", "unit"),
        help="token: amax/448 of each token and head. head, layer: amax/448 on calibration text, nothing "
        "stored per token; what lies beyond saturates. unit: 1.0, the default of vLLM without calibration; "
        "what lies beyond 448 saturates and what lies below 2^-6 loses precision.",
    )


SPEC = TechniqueSpec(
    id="kv_fp8",
    title="FP8 KV cache",
    family="kv",
    seam="kv_codec",
    kind="lossy",
    summary=(
        "Keys and values as E4M3 floats: half the bytes (less one float16 scale per token and head, unless "
        "the scale is 1.0). Decoded to attention's dtype before attention: bytes are saved, arithmetic is "
        "not. With scale 1.0 small values fall into subnormals, so it is a different, worse format."
    ),
    paper="https://arxiv.org/abs/2209.05433",
    claims_slot=("kv_format",),
    sweep=("", "scale=head", "scale=layer", "scale=unit"),
    claims=(
        Claim(
            "KV in FP8 instead of 16 bits: GSM8K 55.2 against 56.8, MMLU 60.1 against 60.5.",
            "Llama-3.1-8B, 2x compression, baseline row of the KVTC paper",
            "https://arxiv.org/abs/2511.01815",
        ),
    ),
)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [..., D] and scales float16 [...] of rows ``x`` [..., D].

    ``scale = amax / 448`` rounded up to float16, so no finite row saturates. An element's error is at most
    2^-4 of it, or 2^-10 scales where the code is subnormal. Zero rows are exact.
    """
    x = x.float()
    scale = symmetric_scale(x.abs().amax(-1, keepdim=True), LARGEST)
    return to_e4m3(x / scale.float()), scale.squeeze(-1)


def dequantize(codes: Tensor, scale: Tensor | None, out: Tensor) -> None:
    """Write codes times scale (1.0 for None; else broadcast to [..., 1]) to ``out`` [..., D].

    Computed in float32 and rounded once.
    """
    factor = 256.0 if scale is None else scale.float().mul(256.0)
    torch.mul(e4m3_as_half(codes).float(), factor, out=out)


def saturated(planes: Mapping[str, Tensor]) -> int:
    """How many stored elements sit at ±448, the end of the range, in planes ``k`` and ``v``.

    With scale 1.0 that counts saturation (and the rare value that is exactly 448). With a scale per token
    nothing saturates, and the count is that of the rows' own largest elements.
    """
    return sum(int(((planes[n].view(torch.uint8) & 0x7F) == 0x7E).sum()) for n in ("k", "v"))


Scaling = Literal["token", "head", "layer", "unit"]


@dataclass(frozen=True)
class Fp8Codec:
    """Planes ``k``, ``v`` E4M3 [Hkv, P, D]; scaled by token also ``k_scale``, ``v_scale`` float16 [Hkv, P].

    Scaled by head or layer, ``ranges`` are wanted, and ``at`` makes one layer's ``steps`` float32 [2, Hkv].
    """

    scaling: Scaling = "token"
    ranges: KVRanges | None = field(default=None, compare=False, repr=False)
    steps: Tensor | None = field(default=None, compare=False, repr=False)
    kernels: CDLL | None = field(default=None, compare=False, repr=False)
    grain: Literal["token", "page"] = "token"
    in_place: bool = False
    _rows: RowIndex = field(default_factory=RowIndex, compare=False, repr=False)

    @property
    def calibration(self) -> Literal["none", "ranges", "sharing"]:
        """What must be measured before it can run."""
        return "ranges" if self.scaling in ("head", "layer") else "none"

    @property
    def nbytes(self) -> int:
        """Bytes of the ranges."""
        return self.ranges.nbytes if self.ranges is not None else 0

    @property
    def key(self) -> str:
        """Format, version, where the scale comes from, and calibration."""
        ranges = f"/{self.ranges.key}" if self.calibration == "ranges" and self.ranges is not None else ""
        return f"kv_fp8/1/{self.scaling}{ranges}"

    def at(self, layer: int) -> Fp8Codec:
        """The codec of one layer; of a drafter's (-1) with the widest range of all layers."""
        if self.calibration == "none":
            return self
        if self.ranges is None:
            raise InvariantError("kv_fp8 is used before it was calibrated.")
        amax = self.ranges.amax["raw"]
        top = amax[:, layer] if layer >= 0 else amax.amax(1)
        if self.scaling == "layer":
            top = top.amax(1, keepdim=True).expand_as(top)
        steps = (top / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        return replace(self, steps=steps)

    def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        """One byte per element and, scaled by token, two per row; any geometry fits."""
        rows = (geometry.kv_heads, geometry.page_size)
        shape, axes = (*rows, geometry.head_dim), ("head", "slot", "dim")
        payload = tuple(PlaneSpec(n, torch.float8_e4m3fn, shape, axes) for n in ("k", "v"))
        if self.scaling != "token":
            return payload
        names = ("k_scale", "v_scale")
        return payload + tuple(PlaneSpec(n, torch.float16, rows, axes[:2], "kv_meta") for n in names)

    def page_sizes(self, head_dim: int) -> None:
        """Any page size works."""
        return None

    def encode(self, planes: Mapping[str, Tensor], where: Tensor, k: Tensor, v: Tensor) -> None:
        """Round rows ``k``, ``v`` [T, Hkv, D] into slots ``where`` int64 [T]."""
        if self.scaling == "token" and rows_usable(self.kernels, k, v):
            for name, x in (("k", k), ("v", v)):
                encode_bytes(self.kernels, x, where, planes[name], planes[f"{name}_scale"])
            return
        _, heads, size, dim = planes["k"].shape
        rows = self._rows(where, heads, size)
        both = torch.cat([k, v], 1)  # one pass: at a few rows the calls cost more than the arithmetic
        codes, scale = self._codes(both)
        codes = codes.view(torch.uint8)
        for name, part in (("k", slice(0, heads)), ("v", slice(heads, 2 * heads))):
            plane = planes[name].view(torch.uint8).view(-1, dim)
            plane.index_copy_(0, rows, codes[:, part].reshape(-1, dim))
            if scale is not None:
                planes[f"{name}_scale"].view(-1).index_copy_(0, rows, scale[:, part].flatten())

    def _codes(self, both: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes of rows [T, 2 Hkv, D], keys then values, and the scales that are stored, if any."""
        if self.scaling == "token":
            return quantize(both)
        if self.steps is None:
            return to_e4m3(both), None
        return to_e4m3(both.float() / self.steps.to(both.device).view(-1, 1)), None

    def decode(self, planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
        """Decode pages (int64 [n]) into ``k`` and ``v`` [n, Hkv, P, D]."""
        for i, (name, out) in enumerate((("k", k), ("v", v))):
            if usable(self.kernels, out):
                steps = self.steps[i].contiguous() if self.steps is not None else None
                decode_bytes(self.kernels, planes[name], planes.get(f"{name}_scale"), steps, pages, out)
                continue
            codes = planes[name].view(torch.uint8).index_select(0, pages)
            scale = None
            if self.scaling == "token":
                scale = planes[f"{name}_scale"].index_select(0, pages).unsqueeze(-1)
            elif self.steps is not None:
                scale = self.steps[i].to(out.device).view(-1, 1, 1)
            dequantize(codes, scale, out)


def bind(config: Config, context: Any) -> Fp8Codec:
    """The codec, with the context's ranges once those were measured."""
    scaling = next(s for s in get_args(Scaling) if s == config.scale)
    ranges = context.kv_ranges if scaling in ("head", "layer") else None
    return Fp8Codec(scaling, ranges, kernels=kernels_of(context))
