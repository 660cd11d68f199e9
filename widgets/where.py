"""What the model, device and number-format menus offer, and what stands against an entry.

A model that has not been fetched is listed with the command that fetches it: nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch

from workbench.models.registry import registry, resolve
from workbench.spec.errors import ModelError
from workbench.spec.plan import DType, Plan

Entry = list[str]  # [value, what stands against it; empty when nothing does]


def models(open_now: str) -> list[Entry]:
    """The registry's names, and the model that is open."""
    entries = [[name, _missing(name)] for name in registry()]
    known = {name for name, _ in entries}
    return entries if open_now in known else [[open_now, ""], *entries]


def devices(open_now: str) -> list[Entry]:
    """CPU and every CUDA device; without one, why not."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ["cpu", *(["cuda"] if count == 1 else [f"cuda:{i}" for i in range(count)])]
    entries = [[name, ""] for name in dict.fromkeys([*names, open_now])]
    return entries if count else [*entries, ["cuda", "no CUDA device here"]]


def dtypes() -> list[Entry]:
    """Number formats of the model's arithmetic."""
    return [[name, ""] for name in reversed(get_args(DType))]


def menus(plan: Plan, wanted: Mapping[str, str], message: str) -> dict[str, Any]:
    """What the head of the panel shows: three menus, what is being opened, and the numerics class."""
    return {
        "model": {"value": wanted.get("model", plan.model), "entries": models(plan.model)},
        "device": {"value": wanted.get("device", plan.device), "entries": devices(plan.device)},
        "dtype": {"value": wanted.get("dtype", plan.dtype), "entries": dtypes()},
        "message": message,
        "detail": f"{plan.numerics} numerics, pages of {plan.page_size} tokens",
    }


def _missing(name: str) -> str:
    try:
        resolve(name)
    except ModelError as error:
        return f"workbench fetch {name}" if "fetch" in error.hint else error.message
    return ""
