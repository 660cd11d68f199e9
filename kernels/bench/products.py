"""Problems of linear kernels: activations times stored weights, against the very weights that are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench.baselines import cublas
from workbench.kernels.bench.case import Case, Goal, Lab, Outputs, Trial
from workbench.kernels.spec import Cost

Product = Callable[..., Tensor]


def trial(lab: Lab, kernel: Product, weight: Any, x: Tensor) -> Trial:
    """``kernel(x, weight)`` of a layout with ``values(dtype)``, next to cuBLAS on the same values."""
    arguments = {"x": x, "weight": weight, "dense": weight.values(x.dtype)}

    def call(x: Tensor, weight: Any, dense: Tensor, **options: Any) -> Outputs:
        return {"y": kernel(x, weight, **options)}

    return Trial(
        arguments,
        call,
        exact=lambda: {"y": x.double() @ weight.values(torch.float64).t()},
        plain=lambda: {"y": x @ arguments["dense"].t()},
        baselines={"cuBLAS bf16": cublas},
    )


def rounded(exact: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], Outputs]:
    """The exact result rounded once: what a kernel is held against where torch has no path of its dtype."""
    return lambda: {"y": exact().to(dtype)}


def case(
    kernel: str,
    make: Callable[..., Trial],
    cost: Callable[..., Cost],
    m: int,
    n: int,
    k: int,
    *goals: Goal,
    note: str = "",
    timed: bool = False,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    unit: Any = "bf16",
    **options: Any,
) -> Case:
    """M tokens through a layer of K inputs and N outputs."""
    shape = f"{n}^2" if n == k else f"{n} x {k}"
    return Case(
        kernel,
        f"M={m}, {shape}" + (f", {note}" if note else ""),
        make,
        {"M": m, "N": n, "K": k, **options},
        cost(M=m, N=n, K=k, **options),
        timed=timed,
        unit=unit,
        variants=variants or {},
        goals=goals,
    )
