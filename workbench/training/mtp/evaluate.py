"""What the module is worth: accepted by the engine on held-out code, and by how sure the model is of itself.

The engine decides τ and survival, greedy and at temperature 1, for drafts of 1 to 4 tokens. Acceptance by
entropy is computed on the held-out text itself, where both laws are known at every position: Σ min(p, q) for
a token drawn from q (R2), p of q's likeliest token for a deterministic draft (R3).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.engine.params import SamplingParams
from workbench.models.progress import Cancel
from workbench.training.heads.evaluate import in_engine
from workbench.training.heads.target import open_target
from workbench.training.mtp.model import MTPModel

DEPTHS = (1, 2, 3, 4)
EDGES = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, float("inf"))
"""Edges of the buckets of the main model's entropy, in nats."""

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("", {}),
    "sampled": ("", {"temperature": 1.0, "seed": 7}),
    "likeliest": (",draws=false", {"temperature": 1.0, "seed": 7}),
}
"""Options of the technique and of sampling: R1; R2 at temperature 1; R3 at temperature 1."""


def accepted(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    depths: Sequence[int] = DEPTHS,
    modes: Sequence[str] = tuple(MODES),
    max_tokens: int = 64,
    cancel: Cancel | None = None,
) -> dict[str, dict[str, Any]]:
    """By mode and number of drafted tokens: τ, survival and conditional acceptance at each depth."""
    target = open_target(folder, cancel=cancel)
    out: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for mode in modes:
            options, sampling = MODES[mode]
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
            for k in depths:
                facts, _ = in_engine(target, f"mtp:k={k}{options}", prompts, params, cancel)
                survival = facts["survival"]
                given = [s / b if b else 0.0 for b, s in pairwise([1.0, *survival])]
                out.setdefault(mode, {})[str(k)] = {
                    "tau": round(facts["tau"], 4),
                    "survival": survival,
                    "conditional": [round(c, 4) for c in given],
                    "tokens": facts["tokens"],
                }
    return out


def by_entropy(
    model: MTPModel, windows: Tensor, edges: Sequence[float] = EDGES
) -> list[dict[str, float | None]]:
    """Acceptance of the token behind the next one, in buckets of the main model's entropy there.

    ``windows`` int64 [N, T] of held-out text. ``r2``: mean Σ min(p, q); ``r3``: mean p(argmax q); ``same``:
    how often both have the same likeliest token; ``rows``: positions in the bucket.
    """
    columns: dict[str, list[Tensor]] = {"entropy": [], "r2": [], "r3": [], "same": []}
    with torch.inference_mode():
        for rows in torch.split(windows, 2):
            passes = model.recursion(rows, 1)
            p, q = (x.flatten(0, 1).float().softmax(-1) for x in (passes.main, passes.drafts[0]))
            best = q.argmax(-1, keepdim=True)
            columns["entropy"].append(-(p * p.clamp_min(1e-30).log()).sum(-1))
            columns["r2"].append(torch.minimum(p, q).sum(-1))
            columns["r3"].append(p.gather(-1, best)[:, 0])
            columns["same"].append((best[:, 0] == p.argmax(-1)).float())
    found = {name: torch.cat(parts) for name, parts in columns.items()}
    out: list[dict[str, float | None]] = []
    for low, high in pairwise(edges):
        inside = (found["entropy"] >= low) & (found["entropy"] < high)
        if bool(inside.any()):
            means = {name: round(float(found[name][inside].mean()), 4) for name in ("r2", "r3", "same")}
            end = None if high == float("inf") else high
            out.append({"from": low, "to": end, "rows": int(inside.sum()), **means})
    return out
