"""What codecs of whole pages in groups have in common: their sizes, and planes of minimum and step.

Keys are grouped per channel over ``group`` tokens, values per token over ``group`` channels; a page is
``residual`` tokens, exact until it is full.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.spec.errors import OptionError
from workbench.spec.technique import option


def group_option() -> Any:
    """The field ``group``."""
    return option(
        32,
        choices=(16, 32, 64),
        help="Tokens of a key group and channels of a value group; each group has its own minimum and step.",
    )


def residual_option() -> Any:
    """The field ``residual``."""
    return option(
        128,
        unit="tokens",
        choices=(32, 64, 128),
        help="Page size: the newest tokens stay exact up to a full page.",
    )


class GroupedPages:
    """A codec's fields ``group`` and ``residual``, checked. ``technique`` is the id that errors name."""

    technique: ClassVar[str]
    group: int
    residual: int

    def __post_init__(self) -> None:
        if self.group < 8 or self.residual % self.group:
            name = self.technique
            raise OptionError(
                f"{name}.residual = {self.residual} is no multiple of {name}.group = {self.group} "
                "(at least 8).",
                hint="A page must hold whole key groups: raise residual or lower group.",
            )

    def page_sizes(self, head_dim: int) -> tuple[int, ...]:
        """Exactly the residual length; raises :class:`OptionError` for head sizes that do not divide."""
        if head_dim % self.group:
            raise OptionError(
                f"{self.technique}.group = {self.group} does not divide the head size {head_dim}.",
                hint="Choose a group that divides it, or another KV format.",
            )
        return (self.residual,)

    def parameter_planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        """Float16 ``k_min``, ``k_step``, ``v_min``, ``v_step`` of a layer's page.

        Raises :class:`OptionError` for a page size or head size that does not fit.
        """
        heads, slots, dim = geometry.kv_heads, geometry.page_size, geometry.head_dim
        if slots != self.residual:
            name = self.technique
            raise OptionError(
                f"{name} encodes pages of {self.residual} tokens, but the page size is {slots}.",
                hint=f"Use page size {self.residual}, or set {name}.residual to {slots}.",
            )
        self.page_sizes(dim)
        k_shape, k_axes = (heads, slots // self.group, 1, dim), ("head", "group", "slot", "dim")
        v_shape, v_axes = (heads, slots, dim // self.group, 1), ("head", "slot", "group", "dim")
        return (
            *(PlaneSpec(n, torch.float16, k_shape, k_axes, "kv_meta") for n in ("k_min", "k_step")),
            *(PlaneSpec(n, torch.float16, v_shape, v_axes, "kv_meta") for n in ("v_min", "v_step")),
        )
