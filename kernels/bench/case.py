"""What a kernel is proven and measured on: cases, the trial a case makes, and the goals it is held against.

Plain data and functions; no GPU is touched until a trial is made. A check case is proven against its
reference in float32 or above, a timed case is measured, with options and other implementations beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.kernels.spec import Cost

Outputs = Mapping[str, Tensor]
Unit = Literal["bf16", "fp8", "int8"]
LEVELS = ("below must", "must", "target", "stretch")


@dataclass(frozen=True)
class Goal:
    """Three marks for one number, larger is better.

    ``of`` names the number: "" the case's rate (TFLOP/s when compute-bound by ``unit``, else TB/s), the name
    of a baseline (times as fast as it), or a figure that the trial works out.
    """

    must: float
    target: float
    stretch: float
    of: str = ""

    def level(self, value: float) -> str:
        """How far ``value`` gets: one of ``LEVELS``."""
        return LEVELS[sum(value >= mark for mark in (self.must, self.target, self.stretch))]


@dataclass(frozen=True)
class Trial:
    """One problem, ready to run.

    ``call(**arguments, **options)`` runs the kernel's public function; ``outputs`` names what it returned.
    (Only ``outputs`` may look into it: when kernels are merely compiled, nothing is there.) ``exact`` gives
    the same names in float32 or above. ``plain`` is the same computation in torch operations of the inputs'
    dtype: its error is what the kernel may at most double. An output that ``plain`` lacks must be ``within``
    a relative error, 0 for the very same bits. ``baselines`` take the arguments as ``call`` does; what they
    name like an output is compared with it. ``launches`` says that the time of the launches alone counts:
    the call also prepares work on the CPU that a server would do once a step for all layers.
    """

    arguments: dict[str, Any]
    call: Callable[..., Any]
    exact: Callable[[], Outputs]
    plain: Callable[[], Outputs] = dict
    outputs: Callable[[Any], Outputs] = dict
    within: Mapping[str, float] = field(default_factory=dict)
    baselines: Mapping[str, Callable[..., Outputs]] = field(default_factory=dict)
    figures: Callable[[], Mapping[str, float]] = dict
    launches: bool = False


@dataclass(frozen=True)
class Lab:
    """Where a trial is made: the device and the source of fresh data."""

    device: torch.device
    seed: int

    @cached_property
    def random(self) -> torch.Generator:
        """The one source of its data."""
        return torch.Generator(self.device).manual_seed(self.seed)

    @property
    def on_gpu(self) -> bool:
        """Whether kernels really run; else they are interpreted or emulated."""
        return self.device.type == "cuda"

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Standard normal numbers, drawn in float32 and rounded to ``dtype``."""
        return torch.randn(shape, generator=self.random, device=self.device).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers in ``low .. high - 1``."""
        drawn = torch.randint(low, high, shape, generator=self.random, device=self.device)
        return drawn.to(dtype)

    def order(self, count: int) -> Tensor:
        """A random permutation of ``0 .. count - 1``, int64."""
        return torch.randperm(count, generator=self.random, device=self.device)


@dataclass(frozen=True)
class Case:
    """One problem of one kernel file.

    ``make(lab, **sizes)`` makes its trial. A timed case has a ``cost`` (operations and bytes that must move),
    the ``unit`` whose measured ceiling its operations are held against, ``variants`` (options by name: the
    design choice switched the other way), and ``goals``.
    """

    kernel: str
    name: str
    make: Callable[..., Trial]
    sizes: Mapping[str, Any]
    cost: Cost
    timed: bool = False
    unit: Unit = "bf16"
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()

    @property
    def key(self) -> str:
        """Unique name: kernel and case."""
        return f"{self.kernel}: {self.name}"


@dataclass(frozen=True)
class Relation:
    """Two timed cases of which the first must be so much faster than the second, per ``what``.

    ``scale`` multiplies the ratio of the times: how much more work the first case does.
    """

    what: str
    first: str
    second: str
    goal: Goal | None = None
    scale: float = 1.0


def check(kernel: str, name: str, make: Callable[..., Trial], cost: Cost, **sizes: Any) -> Case:
    """A case to be proven."""
    return Case(kernel, name, make, sizes, cost)
