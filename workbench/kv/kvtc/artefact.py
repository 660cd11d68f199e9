"""What encoder and decoder share per model: bases, plans, and the identity of what they were made from.

A :class:`Calibration` is measured once per model and serves every ratio. An :class:`Artefact` is what one
pair of ratios needs of it: bases cut behind the last component kept. No payload holds its bytes, so they are
reported beside every ratio, with the number of tokens after which they have paid for themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from workbench.kv.kvtc.basis import Basis
from workbench.kv.kvtc.cross import Cross
from workbench.kv.kvtc.distortion import Distortion
from workbench.kv.kvtc.plan import BitPlan, best_plan
from workbench.spec.errors import OptionError

Planner = Callable[[Distortion, int], BitPlan]


@dataclass(frozen=True)
class Side:
    """Keys or values: a basis, and the plan for its coefficients."""

    basis: Basis
    plan: BitPlan

    @property
    def nbytes(self) -> int:
        """Bytes of mean, components and plan (8 per group)."""
        b = self.basis
        return b.mean.nbytes + b.components.nbytes + 8 * len(self.plan.groups)

    @property
    def copies(self) -> int:
        """Bytes of the copies of the components that were made to work with."""
        made = (vars(self).get(name) for name in ("by_feature", "by_component"))
        return sum(t.nbytes for t in made if t is not None)

    @cached_property
    def by_feature(self) -> Tensor:
        """The components as bfloat16 [p, r], made once: how a layer's share of them is multiplied fastest."""
        return self.basis.components.T.to(torch.bfloat16).contiguous()

    @cached_property
    def by_component(self) -> Tensor:
        """The components as float32 [r, p], made once, for coding."""
        return self.basis.components.float()


@dataclass(frozen=True)
class Artefact:
    """``model`` and ``phases`` name the weights and the joint rows (:attr:`JointRows.key`) it belongs to."""

    k: Side
    v: Side
    model: str
    phases: str
    cross: Cross

    @property
    def nbytes(self) -> int:
        """Bytes a process needs once per model, whatever it decodes; the range coder needs ``cross`` too."""
        return self.k.nbytes + self.v.nbytes

    @property
    def bits(self) -> int:
        """Bits per coded token before entropy coding, keys and values."""
        return self.k.plan.bits + self.v.plan.bits

    @cached_property
    def key(self) -> str:
        """A digest of every number that shapes a payload, and of the model."""
        digest = hashlib.blake2b(f"{self.model}/{self.phases}".encode(), digest_size=16)
        for side in (self.k, self.v):
            digest.update(side.basis.mean.numpy().tobytes())
            digest.update(side.basis.components.numpy().tobytes())
            digest.update(repr([(g.start, g.size, g.kind) for g in side.plan.groups]).encode())
        for part in (self.cross.weights, self.cross.k_scale, self.cross.v_scale):
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def break_even(self, bytes_per_token: float) -> float:
        """Tokens after which the bytes saved against 16-bit KV exceed the artefact's own."""
        plain = 2 * (len(self.k.basis.mean) + len(self.v.basis.mean))
        return self.nbytes / (plain - bytes_per_token) if bytes_per_token < plain else float("inf")


@dataclass(frozen=True)
class Calibration:
    """Bases up to a rank that serves every ratio, and the errors of every group in every format.

    ``origin`` says on what it was measured, ``tokens`` on how many positions.
    """

    k: tuple[Basis, Distortion]
    v: tuple[Basis, Distortion]
    cross: Cross
    model: str
    phases: str
    origin: str
    tokens: int

    def artefact(self, k_ratio: float, v_ratio: float, plan: Planner = best_plan) -> Artefact:
        """Plan both sides: ``16 * features / ratio`` bits per token each, before entropy coding.

        ``plan`` may remember what :func:`best_plan` finds.
        Raises :class:`OptionError` for a ratio below 2.
        """
        if min(k_ratio, v_ratio) < 2:
            raise OptionError(
                f"kvtc cannot plan for ratios {k_ratio:g} (keys) and {v_ratio:g} (values).",
                hint="Choose ratios of at least 2; 8 to 64 are usual.",
            )
        k, v = _side(*self.k, k_ratio, plan), _side(*self.v, v_ratio, plan)
        cross = self.cross.cut(k.plan.rank, v.plan.rank)
        return Artefact(k, v, self.model, self.phases, cross)


def _side(basis: Basis, distortion: Distortion, ratio: float, planner: Planner) -> Side:
    plan = planner(distortion, int(16 * len(basis.mean) / ratio))
    cut = replace(
        basis,
        components=basis.components[: plan.rank].clone(),
        variance=basis.variance[: plan.rank].clone(),
    )
    return Side(cut, plan)
