"""The expert layer: against float64, idle experts included; then prefill and decode of a DeepSeek-V2-Lite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.kernels.bench.case import Case, Goal, Lab, Outputs, Trial
from workbench.kernels.layouts.experts import split_gate_up
from workbench.kernels.moe.moe_grouped import cost, moe_grouped

#: Hidden size and expert width of DeepSeek-V2-Lite (64 experts, 6 a token).
HIDDEN, WIDTH = 2048, 1408


def make(lab: Lab, *, T: int, k: int, E: int, H: int, I: int, one: bool = False) -> Trial:  # noqa: E741
    """Experts dealt in turn from a shuffled deck, so that loads are even; or all tokens to the first k."""
    x = lab.normal(T, H)
    gate_up, down = lab.normal(E, 2 * I, H) / H**0.5, lab.normal(E, H, I) / I**0.5
    turn = torch.arange(T * k, device=lab.device).view(T, k)
    ids = (turn % k if one else lab.order(E)[turn % E]).int()
    weights = torch.softmax(lab.normal(T, k, dtype=torch.float32), -1)

    def call(**arguments: Any) -> Outputs:
        return {"y": moe_grouped(**arguments)}

    def of(dtype: torch.dtype) -> Outputs:
        return {"y": _by_expert(x, gate_up, down, ids, weights, dtype)}

    arguments = {"x": x, "gate_up": gate_up, "down": down, "ids": ids, "weights": weights}
    return Trial(
        arguments,
        call,
        exact=lambda: of(torch.float64),
        plain=lambda: of(torch.bfloat16),
        baselines={"torch._grouped_mm": _grouped_mm},
    )


def _by_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """The layer expert by expert in ``dtype``."""
    gate, up = split_gate_up(gate_up)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for e in range(len(down)):
        token, place = (ids == e).nonzero(as_tuple=True)
        rows = x[token].to(dtype)
        hidden = F.silu(rows @ gate[e].to(dtype).t()) * (rows @ up[e].to(dtype).t())
        parts = weights[token, place].to(dtype)[:, None] * (hidden @ down[e].to(dtype).t())
        out.index_add_(0, token, parts)
    return out


def _grouped_mm(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Outputs:
    """The same through torch's grouped product: sort, two products, weighted sum."""
    flat, k = ids.flatten(), ids.shape[1]
    order = flat.argsort(stable=True)
    ends = (flat[:, None] == torch.arange(len(down), device=x.device)).sum(0).cumsum(0).int()
    both = torch._grouped_mm(x[order // k], gate_up.mT, offs=ends)
    hidden = F.silu(both[:, 0::2]) * both[:, 1::2]
    parts = torch._grouped_mm(hidden, down.mT, offs=ends) * weights.flatten()[order, None]
    sums = torch.zeros_like(x, dtype=torch.float32).index_add_(0, order // k, parts.float())
    return {"y": sums.to(x.dtype)}


def _case(name: str, *goals: Goal, timed: bool = False, **sizes: Any) -> Case:
    work = cost(**{n: sizes[n] for n in ("T", "k", "E", "H", "I")})
    blocks = {f"blocks of {b}": {"block": b} for b in (16, 64, 128)} if timed else {}
    return Case("moe_grouped", name, make, sizes, work, timed=timed, goals=goals, variants=blocks)


CASES = (
    _case("one token", T=1, k=2, E=4, H=64, I=32),
    _case("ragged", T=50, k=2, E=8, H=136, I=72),
    _case("all to two experts", T=100, k=2, E=16, H=256, I=128, one=True),
    _case("T=512", T=512, k=6, E=64, H=HIDDEN, I=WIDTH),
    _case("T=16, 64 experts top-6", Goal(2.8, 3.5, 3.9), timed=True, T=16, k=6, E=64, H=HIDDEN, I=WIDTH),
    _case("T=8192, 64 experts top-6", Goal(430, 540, 620), timed=True, T=8192, k=6, E=64, H=HIDDEN, I=WIDTH),
)
