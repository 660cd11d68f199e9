"""Problems of prefill attention, for the kernels that share its contract: packed or paged, ragged, masked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.attention.problem import checked, reference
from workbench.kernels.attention.work import cost
from workbench.kernels.bench.baselines import ATTENTION
from workbench.kernels.bench.case import Case, Goal, Lab, Outputs, Trial

Attend = Callable[..., Outputs]


def trial(
    lab: Lab,
    call: Attend,
    *,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    dim: int,
    page: int = 0,
    **options: Any,
) -> Trial:
    """Fresh q, k, v in bf16; with ``page`` K and V lie in scattered pages whose unused slots hold NaN."""
    q = lab.normal(sum(q_lens), heads, dim)
    where: dict[str, Any] = {}
    if page:
        counts = [-(-n // page) for n in kv_lens]
        table = torch.zeros(len(kv_lens), max(counts), dtype=torch.int32, device=lab.device)
        order = lab.order(sum(counts) + 2).int()
        k, v = (lab.normal(len(order), kv_heads, page, dim) for _ in range(2))
        used = 0
        for b, (n, count) in enumerate(zip(kv_lens, counts, strict=True)):
            table[b, :count] = order[used : used + count]
            used += count
            if n % page:
                for x in (k, v):
                    x[table[b, count - 1], :, n % page :] = torch.nan
        for x in (k, v):
            x[order[used:].long()] = torch.nan
        where["table"] = table
    else:
        k, v = (lab.normal(sum(kv_lens), kv_heads, dim) for _ in range(2))
    problem = checked(q, k, v, q_lens, kv_lens, **where, **options)

    def of(dtype: torch.dtype) -> Outputs:
        return dict(zip(("out", "lse"), reference(q, k, v, problem, dtype), strict=True))

    arguments = dict(q=q, k=k, v=v, q_lens=list(q_lens), kv_lens=list(kv_lens), **where, **options)
    return Trial(
        arguments,
        call,
        exact=lambda: of(torch.float64),
        plain=lambda: {"out": of(q.dtype)["out"]},
        within={"lse": 1e-5},
        baselines=ATTENTION if set(q_lens) == set(kv_lens) and len(set(q_lens)) == 1 and not page else {},
        launches=True,
    )


def check(kernel: str, name: str, make: Callable[..., Trial], **sizes: Any) -> Case:
    """A case to be proven."""
    return Case(kernel, name, make, sizes, _cost(sizes))


def timed(
    kernel: str,
    make: Callable[..., Trial],
    dim: int,
    length: int,
    *marks: float,
    causal: bool = False,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,
) -> Case:
    """A timed case in the papers' setting: 16,384 tokens in all, a hidden size of 2,048, no grouping."""
    lens, heads = [length] * max(1, 16384 // length), 2048 // dim
    sizes = {"q_lens": lens, "kv_lens": lens, "heads": heads, "kv_heads": heads, "dim": dim}
    sizes["causal"] = causal
    return Case(
        kernel,
        f"hd{dim}{' causal' if causal else ''} {length // 1024}k",
        make,
        sizes,
        _cost(sizes),
        timed=True,
        variants=variants or {},
        goals=(Goal(*marks),) if marks else (),
        **more,
    )


def named(found: Any) -> dict[str, Tensor]:
    """Outputs of an attention kernel's result."""
    return {"out": found.out, "lse": found.lse}


def _cost(sizes: Mapping[str, Any]) -> Any:
    names = ("q_lens", "kv_lens", "heads", "kv_heads", "dim", "causal", "window")
    return cost(**{n: sizes[n] for n in names if n in sizes})
