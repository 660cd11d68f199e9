"""What FP8 attention costs in accuracy, and what block scales and incoherent processing give back, in torch.

FlashAttention-3 (arXiv 2407.08608, section 3.3): queries and keys are multiplied by one random orthogonal
matrix (signs times Hadamard / sqrt(d)), which leaves Q K^T as it was and spreads outliers over the head;
scales are kept per block of rows instead of per tensor. The arithmetic is that of the FP8 kernel: E4M3
operands, float32 scores, running maximum tile by tile from the last to the first, P cast as 2^8 P, float32
output. The tensor core's narrower accumulator is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.numerics.e4m3 import LARGEST, to_e4m3
from workbench.numerics.hadamard import hadamard
from workbench.spec.errors import UnsupportedInput

TILE = 128
LOG2_E = 1.4426950408889634
LIFT = 8.0  # P is cast as 2^8 P


@dataclass(frozen=True)
class Form:
    """One way to prepare the inputs: a scale per ``TILE`` rows or per tensor; rotated or not."""

    blocks: bool
    rotated: bool

    @property
    def name(self) -> str:
        """In words."""
        return f"{'block' if self.blocks else 'per-tensor'} scales" + (", Hadamard" if self.rotated else "")


FORMS = (Form(False, False), Form(True, False), Form(False, True), Form(True, True))


def outliers(n: int, dim: int, generator: torch.Generator) -> Tensor:
    """The paper's test data, float32 [n, dim]: N(0, 1) + N(0, 100) Bernoulli(0.001); 100 is a variance."""
    rare = torch.rand(n, dim, generator=generator) < 1e-3
    wide = 10.0 * torch.randn(n, dim, generator=generator)
    return torch.randn(n, dim, generator=generator) + torch.where(rare, wide, torch.zeros(()))


def rotation(dim: int, generator: torch.Generator) -> Tensor:
    """Random signs times Hadamard / sqrt(dim): orthogonal, float32 [dim, dim]; a row vector times it."""
    signs = 2.0 * torch.randint(0, 2, (dim, 1), generator=generator) - 1.0
    return signs * hadamard(dim).float() / dim**0.5


def quantised(x: Tensor, blocks: bool) -> Tensor:
    """``x`` [n, d] rounded to E4M3 with the scale amax / 448 per ``TILE`` rows or per tensor; float32."""
    groups = x.split(TILE) if blocks else (x,)
    rounded = []
    for group in groups:
        scale = group.abs().max().clamp(min=1e-30) / LARGEST
        rounded.append(to_e4m3(group / scale).float() * scale)
    return torch.cat(rounded)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v in float64 for q, k, v [n, d]."""
    return torch.cat(
        [
            torch.softmax(part.double() @ k.double().T / q.shape[1] ** 0.5, -1) @ v.double()
            for part in q.split(512)
        ]
    )


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, form: Form, turn: Tensor | None = None) -> Tensor:
    """The same in the arithmetic of the FP8 kernel, float32 [n, d]; ``turn`` [d, d] is the rotation.

    Raises ``UnsupportedInput`` for shapes that differ, or a form that rotates without a rotation.
    """
    if q.ndim != 2 or not q.shape == k.shape == v.shape or form.rotated != (turn is not None):
        raise UnsupportedInput(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, {form.name}.",
            hint="Give q, k, v [n, d] of one shape, and a rotation exactly when the form rotates.",
        )
    if turn is not None:
        q, k = q @ turn, k @ turn
    q, k, v = (quantised(x, form.blocks) for x in (q, k, v))
    q = q * (LOG2_E / q.shape[1] ** 0.5)
    top = torch.full((len(q), 1), float("-inf"))
    total, out = torch.zeros(len(q), 1), torch.zeros_like(q)
    for part, values in zip(reversed(k.split(TILE)), reversed(v.split(TILE)), strict=True):
        s = q @ part.T
        new = torch.maximum(top, s.amax(1, keepdim=True))
        p = torch.exp2(s - (new - LIFT))
        rescale = torch.exp2(top - new)
        total = total * rescale + p.sum(1, keepdim=True)
        out = out * rescale + to_e4m3(p).float() @ values
        top = new
    return out / total


@dataclass(frozen=True)
class FP8Errors:
    """Root mean square errors against float64, one per head, by form; ``bf16``: of inputs only rounded."""

    n: int
    dim: int
    by_form: Mapping[str, tuple[float, ...]]
    bf16: tuple[float, ...]

    def gains(self, name: str) -> tuple[float, ...]:
        """Error of per-tensor FP8 over that of a form, head by head: larger is better."""
        return tuple(a / b for a, b in zip(self.by_form[FORMS[0].name], self.by_form[name], strict=True))


def fp8_errors(n: int = 4096, dim: int = 128, heads: int = 3, seed: int = 0) -> FP8Errors:
    """Measure every form on fresh outlier data, ``heads`` times."""
    generator = torch.Generator().manual_seed(seed)
    by_form: dict[str, list[float]] = {form.name: [] for form in FORMS}
    plain = []
    for _ in range(heads):
        q, k, v = (outliers(n, dim, generator) for _ in range(3))
        turn = rotation(dim, generator)
        truth = exact(q, k, v)
        for form in FORMS:
            found = fp8_attention(q, k, v, form, turn if form.rotated else None)
            by_form[form.name].append(_rms(found.double() - truth))
        rounded = (x.bfloat16().float() for x in (q, k, v))
        plain.append(_rms(exact(*rounded) - truth))
    return FP8Errors(n, dim, {name: tuple(found) for name, found in by_form.items()}, tuple(plain))


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
