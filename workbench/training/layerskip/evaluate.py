"""What each exit layer is worth: drafted with and judged by the engine, on continuations of held-out code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.engine.params import SamplingParams
from workbench.models.progress import Cancel
from workbench.training.heads.evaluate import in_engine
from workbench.training.heads.target import open_target

DRAFTS = 4
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 7}}
"""Greedy (R1), and drawn drafts at temperature 1 (R2)."""


def accepted(
    folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int = 64, cancel: Cancel | None = None
) -> dict[str, dict[str, Any]]:
    """By mode and exit layer: ``tau``, tokens per pass; ``rate``, share of the drafts that are accepted."""
    target = open_target(folder, cancel=cancel)
    out: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for mode, sampling in MODES.items():
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
            for exit in range(1, target.source.config.num_layers):
                facts, _ = in_engine(target, f"layerskip:k={DRAFTS},exit={exit}", prompts, params, cancel)
                out.setdefault(mode, {})[str(exit)] = {
                    name: facts[name] for name in ("tau", "rate", "survival", "tokens")
                }
    return out
