"""What a kernel says about itself: configurations, the machine code each must become, and what it costs.

Plain data without triton, so that a command line, a panel or a test can list kernels on any machine. One
``Kernel`` stands in each kernel file as ``KERNEL`` (or several in ``KERNELS``); its ``builds`` are compiled
ahead of time for Hopper, and the facts counted in the machine code must lie within each build's bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Bound:
    """Inclusive range for one fact of the machine code."""

    low: float = 0
    high: float = math.inf

    def holds(self, value: float) -> bool:
        """Whether the value lies in the range."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.low == self.high:
            return f"= {self.low:g}"
        if math.isinf(self.high):
            return f">= {self.low:g}"
        return f"<= {self.high:g}" if self.low == 0 else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Build:
    """One named ahead-of-time configuration of a kernel.

    ``signature`` gives each run-time argument its type, in the compiler's words: ``"*bf16"``, ``"i32"``,
    ``"fp32"``, ``"tensordesc<bf16[128,64]>"`` (for Gluon with the layout's repr after a comma).
    ``aligned`` names arguments known to be divisible by 16 (pointers: 16-byte aligned).
    ``sass`` bounds facts of the sm_90a code: opcodes by their first word (``HGMMA``, ``UTMALDG``, ``LDL``),
    with modifiers where given (``LDS.U8``), and ``regs``, ``stack``, ``smem``, ``overlap``, ``warnings``.
    A build that ``fails`` is a negative control: it must break at least one of its own bounds.
    """

    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    aligned: tuple[str, ...] = ()
    sass: Mapping[str, Bound] = field(default_factory=dict)
    fails: bool = False


@dataclass(frozen=True)
class Cost:
    """Work of one call: floating-point (or integer multiply-add) operations, and bytes that must move."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """One kernel: what it is, the source it follows, its jitted function, configurations, and cost.

    ``cost`` takes problem sizes by name and returns the operations and the bytes that must cross the memory
    bus at least once.
    """

    name: str
    title: str
    language: Literal["gluon", "triton"]
    source: str
    function: Any
    builds: tuple[Build, ...]
    cost: Callable[..., Cost]
