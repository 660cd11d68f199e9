"""The page codec of XQuant: KIVI's codes on grids moved inward, some layers without codes of their own.

A layer that shares codes stores only its own minimum and step, of its own data, and reads its partner's
codes with them. The planes of a layer are named by width (``k2``, ``v1``), so that layers of different widths
live in one KV group.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.kv.compiled import decode_groups, usable
from workbench.kv.grouped import GroupedPages
from workbench.kv.kivi import decode_keys, decode_values, encode_keys, encode_values
from workbench.kv.xquant.harm import SharingHarm
from workbench.kv.xquant.schedule import Schedule, Side
from workbench.numerics.packing import unpack
from workbench.spec.errors import InvariantError

_SMALLEST = 2.0**-24  # step of a group that is constant
_LARGEST = 65504.0
_WIDEST = Side(2)


def inward(low: Tensor, step: Tensor, bits: int, eta: float) -> tuple[Tensor, Tensor]:
    """Minimum and step (float16) of the grid that the same codes are read with.

    Its ends are moved inward by ``eta`` of the range: ``low + eta * step * (2^bits - 1)`` and
    ``(1 - 2 * eta) * step`` (section 3.2, data-free calibration). A constant group stays exact.
    """
    if eta == 0:
        return low, step
    spread = step > _SMALLEST
    moved = (low.float() + eta * (2**bits - 1) * step.float()).clamp(max=_LARGEST).half()
    return torch.where(spread, moved, low), torch.where(spread, ((1 - 2 * eta) * step.float()).half(), step)


def fitted(x: Tensor, codes: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Minimum and step (float16) with which another layer's ``codes`` are nearest to ``x``.

    Least squares over groups along ``dim``, which is kept with size 1.

    In float64, so that the order of summing does not reach float16. Codes that say nothing about ``x`` get a
    step near 0 and are read as the group's mean.
    """
    x, c = x.double(), codes.double()
    c_mean, x_mean = c.mean(dim, keepdim=True), x.mean(dim, keepdim=True)
    spread = (c - c_mean).square().sum(dim, keepdim=True)
    slope = ((c - c_mean) * x).sum(dim, keepdim=True) / spread.clamp(min=0.1)  # below 0.9 only when all equal
    low, step = (t.clamp(-_LARGEST, _LARGEST).half() for t in (x_mean - slope * c_mean, slope))
    return low, step


@dataclass(frozen=True)
class XQuantCodec(GroupedPages):
    """Codes ``k1``/``k2``, ``v1``/``v2`` of layers that own them; ``k_min``, ``k_step``, ``v_min``,
    ``v_step`` of every layer.

    ``base`` holds the widths with nothing shared; ``schedule`` None: not calibrated yet; ``harm`` is what it
    was made from, if that was measured. ``at`` gives the codec of a layer; a drafter's layers (-1) take no
    part in the schedule: 2 bits, codes of their own.
    """

    technique: ClassVar[str] = "xquant"
    base: Schedule
    schedule: Schedule | None
    eta1: float = 1 / 6
    eta2: float = 0.045
    group: int = 32
    residual: int = 128
    parameters: Literal["range", "fit"] = "range"
    k: Side = _WIDEST
    v: Side = _WIDEST
    grain: Literal["token", "page"] = "page"
    in_place: bool = False
    harm: SharingHarm | None = field(default=None, compare=False, repr=False)
    kernels: CDLL | None = field(default=None, compare=False, repr=False)

    @property
    def calibration(self) -> Literal["none", "ranges", "sharing"]:
        """What must be measured before it can run."""
        return "none" if self.schedule is not None else "sharing"

    @property
    def nbytes(self) -> int:
        """Bytes of the measurements."""
        return self.harm.nbytes if self.harm is not None else 0

    @property
    def key(self) -> str:
        """Format, version, grid, sizes, and digest of the schedule."""
        schedule = self.schedule.key if self.schedule is not None else "none"
        return (
            f"xquant/1/{self.eta1!r}/{self.eta2!r}/{self.group}/{self.residual}/{self.parameters}/{schedule}"
        )

    def at(self, layer: int) -> XQuantCodec:
        """The codec of a model layer; raises :class:`InvariantError` before it is calibrated."""
        if self.schedule is None:
            raise InvariantError("xquant is used before it was calibrated.")
        if layer < 0:
            return replace(self, k=_WIDEST, v=_WIDEST)
        return replace(self, k=self.schedule.keys[layer], v=self.schedule.values[layer])

    def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        """Codes, owned or a partner's, and float16 parameters; raises :class:`OptionError` where sizes do
        not divide."""
        parameters = self.parameter_planes(geometry)
        heads, slots, dim = geometry.kv_heads, geometry.page_size, geometry.head_dim
        k, v = self.k, self.v
        k_shape = (heads, slots // self.group, self.group * k.bits // 8, dim)
        v_shape = (heads, slots * v.bits // 8, dim)
        byte = torch.uint8
        return (
            PlaneSpec(f"k{k.bits}", byte, k_shape, ("head", "group", "byte", "dim"), owner=k.owner),
            PlaneSpec(f"v{v.bits}", byte, v_shape, ("head", "byte", "dim"), owner=v.owner),
            *parameters,
        )

    def encode(self, planes: Mapping[str, Tensor], where: Tensor, k: Tensor, v: Tensor) -> None:
        """Encode whole pages ``k``, ``v`` [n, Hkv, P, D] into pages ``where`` int64 [n]."""
        for name, side, encode, x in (("k", self.k, encode_keys, k), ("v", self.v, encode_values, v)):
            plane = planes[f"{name}{side.bits}"]
            if side.owner is not None and self.parameters == "fit":
                low, step = self._fit(name, side, plane[where], x)
            else:
                codes, low, step = encode(x, side.bits, self.group)
                low, step = inward(low, step, side.bits, self._eta(side))
                if side.owner is None:
                    plane[where] = codes
                else:  # a constant group stays constant under anyone's codes
                    step = step.masked_fill(step <= _SMALLEST, 0)
            planes[f"{name}_min"][where], planes[f"{name}_step"][where] = low, step

    def decode(self, planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
        """Decode pages (int64 [n]) into ``k`` and ``v`` [n, Hkv, P, D]."""
        for name, side, decode, out in (("k", self.k, decode_keys, k), ("v", self.v, decode_values, v)):
            names = (f"{name}{side.bits}", f"{name}_min", f"{name}_step")
            if usable(self.kernels, out):
                decode_groups(self.kernels, planes, (names[0], name), side.bits, pages, out)
                continue
            codes, low, step = (planes[n].index_select(0, pages) for n in names)
            decode(codes, low, step, side.bits, out)

    def codes(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's own codes of whole pages [n, Hkv, P, D], unpacked: uint8 of the same shape."""
        packed_k, _, _ = encode_keys(k, self.k.bits, self.group)
        packed_v, _, _ = encode_values(v, self.v.bits, self.group)
        return unpack(packed_k, self.k.bits, self.group, 3).view(k.shape), unpack(
            packed_v, self.v.bits, v.shape[2], 2
        )

    def _fit(self, name: str, side: Side, packed: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        n, heads, slots, dim = x.shape
        if name == "k":
            codes = unpack(packed, side.bits, self.group, 3)
            return fitted(x.reshape(codes.shape), codes, 3)
        shape = (n, heads, slots, dim // self.group, self.group)
        return fitted(x.reshape(shape), unpack(packed, side.bits, slots, 2).view(shape), 4)

    def _eta(self, side: Side) -> float:
        return self.eta1 if side.bits == 1 else self.eta2
