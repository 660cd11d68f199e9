"""Coefficients to codes by a bit plan, and back.

Groups of one size and format are handled together; nothing crosses a token, so coding tokens one chunk at a
time or all at once gives the same codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kv.kvtc.formats import KINDS, Kind, dequantize, quantize
from workbench.kv.kvtc.plan import BitPlan
from workbench.numerics.e4m3 import from_e4m3


@dataclass(frozen=True)
class Codes:
    """Of T tokens: ``shift``, ``scale`` float16 [T, groups]; ``symbols[kind]`` uint8 [T, its components]."""

    shift: Tensor
    scale: Tensor
    symbols: dict[Kind, Tensor]

    @property
    def tokens(self) -> int:
        """Tokens coded (T)."""
        return len(self.shift)


def join(parts: Sequence[Codes]) -> Codes:
    """Codes of consecutive tokens, at least one part, as one."""
    kinds = parts[0].symbols
    return Codes(
        torch.cat([p.shift for p in parts]),
        torch.cat([p.scale for p in parts]),
        {kind: torch.cat([p.symbols[kind] for p in parts]) for kind in kinds},
    )


@dataclass(frozen=True)
class _Class:
    """Groups of one size and format: which they are, their components, their columns among the symbols."""

    kind: Kind
    groups: Tensor  # int64 [n]
    components: Tensor  # int64 [n, size]
    columns: Tensor  # int64 [n, size]


class Coder:
    """Codes coefficients by one plan."""

    def __init__(self, plan: BitPlan) -> None:
        self.plan = plan
        self.widths: dict[Kind, int] = {
            kind: sum(g.size for g in plan.groups if g.kind == kind) for kind in KINDS
        }
        """Components stored in each format."""
        self._classes = _classes(plan)

    def encode(self, coefficients: Tensor) -> Codes:
        """Codes of coefficients float32 [T, plan.rank]."""
        tokens = len(coefficients)
        shift = torch.zeros(tokens, len(self.plan.groups), dtype=torch.float16)
        scale = torch.zeros_like(shift)
        symbols = {k: torch.zeros(tokens, n, dtype=torch.uint8) for k, n in self.widths.items()}
        for part in self._classes:
            codes, low, step = quantize(coefficients[:, part.components], part.kind)
            shift[:, part.groups], scale[:, part.groups] = low.squeeze(-1), step.squeeze(-1)
            symbols[part.kind][:, part.columns] = codes
        return Codes(shift, scale, symbols)

    def decode(self, codes: Codes) -> Tensor:
        """Coefficients float32 [T, plan.rank]; dropped ones are zero."""
        out = torch.zeros(codes.tokens, self.plan.rank, dtype=torch.float32)
        for part in self._classes:
            shift, scale = (x[:, part.groups, None] for x in (codes.shift, codes.scale))
            out[:, part.components] = dequantize(
                codes.symbols[part.kind][:, part.columns], shift, scale, part.kind
            )
        return out

    def exact(self, codes: Codes) -> Tensor:
        """As :meth:`decode` in float64, with one rounding per element: the same bits on every machine."""
        out = torch.zeros(codes.tokens, self.plan.rank, dtype=torch.float64)
        for part in self._classes:
            shift, scale = (x[:, part.groups, None].double() for x in (codes.shift, codes.scale))
            symbols = codes.symbols[part.kind][:, part.columns]
            values = from_e4m3(symbols.view(torch.float8_e4m3fn)) if part.kind == "fp8" else symbols
            step = values.double() * scale  # exact: at most 8 by 11 bits
            out[:, part.components] = step + shift
        return out


def _classes(plan: BitPlan) -> list[_Class]:
    found: dict[tuple[Kind, int], tuple[list[int], list[int], list[int]]] = {}
    used = dict.fromkeys(KINDS, 0)
    for number, group in enumerate(plan.groups):
        groups, starts, columns = found.setdefault((group.kind, group.size), ([], [], []))
        groups.append(number)
        starts.append(group.start)
        columns.append(used[group.kind])
        used[group.kind] += group.size
    return [
        _Class(
            kind,
            torch.tensor(groups),
            torch.tensor(starts)[:, None] + torch.arange(size),
            torch.tensor(columns)[:, None] + torch.arange(size),
        )
        for (kind, size), (groups, starts, columns) in found.items()
    ]
