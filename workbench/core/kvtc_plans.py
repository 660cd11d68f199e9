"""Bit plans of KVTC, remembered on disk: the dynamic program takes longer than decoding a conversation."""

from __future__ import annotations

import hashlib
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from workbench.core.artefacts import kept
from workbench.kv.kvtc.distortion import Distortion
from workbench.kv.kvtc.formats import KINDS, SIZES
from workbench.kv.kvtc.plan import BitPlan, Group, best_plan

_VERSION = 1


def remembered_plan(distortion: Distortion, budget: int) -> BitPlan:
    """:func:`best_plan`, from disk if it was found before."""
    digest = hashlib.blake2b(f"{_VERSION}/{budget}/{distortion.sizes}".encode(), digest_size=16)
    for tensor in (distortion.energy, distortion.error):
        digest.update(tensor.contiguous().numpy().tobytes())
    rank = len(distortion.energy)
    return kept(
        f"kvtc-plan-{digest.hexdigest()}",
        lambda path: _read(path, rank, budget),
        lambda: best_plan(distortion, budget),
        _write,
    )


def _read(path: Path, rank: int, budget: int) -> BitPlan | None:
    """The plan, or None when there is none that can be used."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            rows, error = file.get_tensor("groups").tolist(), float(file.get_tensor("error"))
        groups = tuple(Group(start, size, KINDS[kind]) for start, size, kind in rows)
    except (OSError, KeyError, ValueError, TypeError, IndexError, safetensors.SafetensorError):
        return None
    end = 0
    for group in groups:
        if group.size not in SIZES or group.start < end:
            return None
        end = group.start + group.size
    plan = BitPlan(groups, error, budget)
    return plan if end <= rank and plan.bits <= budget else None


def _write(path: Path, plan: BitPlan) -> None:
    rows = [[g.start, g.size, KINDS.index(g.kind)] for g in plan.groups]
    save_file(
        {
            "groups": torch.tensor(rows, dtype=torch.int64).view(-1, 3),
            "error": torch.tensor(plan.error, dtype=torch.float64),
        },
        path,
    )
