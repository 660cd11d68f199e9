"""Whether a kernel's numbers are right: against float32 or above, and against torch in the same dtype.

An output passes when it is finite wherever the exact one is, its relative error over the whole tensor is at
most twice that of the plain torch path, and no single row is off by more than ``ROW_FACTOR`` times the plain
path's worst row: one wrong row of thousands would drown in the total.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench.case import Outputs

FACTOR, ROW_FACTOR = 2.0, 6.0
#: Relative errors below this are rounding of the comparison itself (float32 inputs, sums of a few thousand).
FLOOR, ROW_FLOOR = 2e-6, 1e-4


def judged(found: Outputs, exact: Outputs, plain: Outputs, within: Mapping[str, float]) -> dict[str, Any]:
    """One verdict per output: ``error``, ``plain`` (None without), ``allowed``, ``worst_row``, ``wrong``.

    ``wrong`` is empty for a right output, else says why in words.
    """
    missing = sorted(set(exact) - set(found))
    if missing:
        return {name: {"wrong": "the kernel does not return it"} for name in missing}
    return {name: _output(found[name], exact[name], plain.get(name), within.get(name)) for name in exact}


def passes(verdicts: Mapping[str, Any]) -> bool:
    """Whether all outputs are right, of at least one."""
    return bool(verdicts) and not any(v["wrong"] for v in verdicts.values())


def _output(found: Tensor, exact: Tensor, plain: Tensor | None, within: float | None) -> dict[str, Any]:
    if found.shape != exact.shape:
        return {"wrong": f"its shape is {tuple(found.shape)}, not {tuple(exact.shape)}"}
    if within == 0:
        different = int((_values(found) != _values(exact)).sum())
        return {
            "error": different / max(1, exact.numel()), "plain": None, "allowed": 0.0, "worst_row": None,
            "wrong": f"{different} of {exact.numel()} elements differ" if different else "",
        }  # fmt: skip
    x, y = _values(found), _values(exact)
    # An exact -inf, the log-sum-exp of a row that sees nothing, must be met as such.
    bad = int(torch.where(y.isfinite(), ~x.isfinite(), x != y).sum())
    if bad:
        return {"wrong": f"{bad} of {x.numel()} elements are not finite, or not infinite where they must be"}
    error, row = errors(x, y)
    if plain is None:
        allowed, row_allowed, of_plain = (within or 0.0), ROW_FACTOR * (within or 0.0), None
    else:
        of_plain, worst = errors(_values(plain), y)
        allowed, row_allowed = FACTOR * of_plain + FLOOR, ROW_FACTOR * worst + ROW_FLOOR
    wrong = ""
    if error > allowed:
        wrong = f"its error is {error:.2e}, at most {allowed:.2e} is allowed"
    elif row > row_allowed:
        wrong = f"a row is off by {row:.2e}, at most {row_allowed:.2e} is allowed"
    return {"error": error, "plain": of_plain, "allowed": allowed, "worst_row": row, "wrong": wrong}


def errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Relative error of the whole, and of the worst row (against at least a tenth of the mean row's norm).

    Where both are infinite they agree.
    """
    exact = exact.nan_to_num(0.0, 0.0, 0.0)
    difference = torch.where(found == exact, 0.0, found.nan_to_num(0.0, 0.0, 0.0) - exact)
    if not exact.numel():
        return 0.0, 0.0
    rows, sizes = (t.flatten(0, -2).norm(dim=-1) if t.ndim > 1 else t.abs() for t in (difference, exact))
    scale = sizes.norm().item() or 1.0
    floor = sizes.mean().item() / 10 or 1.0
    return rows.norm().item() / scale, float((rows / sizes.clamp(min=floor)).max())


def _values(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return x
    if x.dtype.is_floating_point:
        return x.float().double()
    return x.double()
