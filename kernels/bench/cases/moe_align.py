"""Tokens sorted by expert: the very lists of the reference, also with experts that nobody wants."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.kernels.bench.case import Case, Lab, Outputs, Trial
from workbench.kernels.moe.moe_align import Aligned, cost, moe_align, reference


def make(lab: Lab, *, T: int, k: int, E: int, block: int = 64, used: int = 0) -> Trial:
    """Random experts among the first ``used`` (0: all) of E."""
    ids = lab.integers(0, used or E, T, k)

    def named(found: Aligned) -> Outputs:
        return {n: getattr(found, n).to(lab.device) for n in ("slots", "experts", "total")}

    def call(ids: Tensor) -> Outputs:
        return named(moe_align(ids, E, block))

    same = dict.fromkeys(("slots", "experts", "total"), 0.0)
    return Trial({"ids": ids}, call, lambda: named(reference(ids, E, block)), within=same)


def _case(name: str, timed: bool = False, **sizes: Any) -> Case:
    return Case("moe_align", name, make, sizes, cost(**{n: sizes[n] for n in ("T", "k", "E")}), timed=timed)


CASES = (
    _case("one token", T=1, k=2, E=4, block=16),
    _case("ragged", T=50, k=2, E=8, block=16),
    _case("most experts idle", T=300, k=2, E=64, used=3),
    _case("T=4096, 64 experts", T=4096, k=6, E=64),
    _case("T=16, 64 experts top-6", T=16, k=6, E=64, timed=True),
    _case("T=8192, 64 experts top-6", T=8192, k=6, E=64, timed=True),
)
