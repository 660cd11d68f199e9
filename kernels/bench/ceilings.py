"""What this chip reaches at best, measured here and now: a copy, and square products of 8192 by torch.

The data sheet is not a ceiling: clocks, power and cooling decide. Every fraction in a report is of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench.timing import measure

SIDE = 8192
COPY_BYTES = 4 * 2**30


def measured(device: torch.device) -> dict[str, dict[str, Any]]:
    """Per ceiling (``bytes``, ``bf16``, ``fp8``, ``int8``): ``rate`` a second, seconds, what was run; or
    ``error`` where this chip or torch cannot."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(COPY_BYTES, free // 4)
    work: dict[str, tuple[float, str, Callable[[], Callable[[], object]]]] = {
        "bytes": (
            2.0 * size,
            f"copy of {size / 2**30:.2g} GiB, read and written",
            lambda: _copy(size, device),
        ),
        "bf16": (2.0 * SIDE**3, f"torch.mm {SIDE}^3", lambda: _bf16(device)),
        "fp8": (2.0 * SIDE**3, f"torch._scaled_mm {SIDE}^3, fast accumulation", lambda: _fp8(device)),
        "int8": (2.0 * SIDE**3, f"torch._int_mm {SIDE}^3", lambda: _int8(device)),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (amount, what, make) in work.items():
        try:
            timed = measure([make()])
            found[name] = {"rate": amount / timed.median, "what": what, **timed.to_dict()}
        except (RuntimeError, AttributeError) as error:
            found[name] = {"error": str(error).splitlines()[0], "what": what}
    return found


def scaled_mm(x: Tensor, w: Tensor) -> Tensor:
    """E4M3 [M, K] times E4M3 [N, K] transposed by cuBLAS, scales of 1, in bf16."""
    one = torch.ones((), device=x.device)
    return torch._scaled_mm(  # the public functional form takes no plain per-tensor call before torch 2.10
        x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _copy(size: int, device: torch.device) -> Callable[[], object]:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _bf16(device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(SIDE, SIDE, device=device).bfloat16() for _ in range(2))
    return lambda: torch.mm(a, b.t())


def _fp8(device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(SIDE, SIDE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    return lambda: scaled_mm(a, b)


def _int8(device: torch.device) -> Callable[[], object]:
    a, b = (torch.randint(-127, 128, (SIDE, SIDE), device=device).to(torch.int8) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())
