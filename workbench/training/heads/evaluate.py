"""What a head is worth on text it was not trained on: ranks of the right tokens, then the engine itself.

Ranks are teacher-forced and decide the tree; τ is what a real engine with that tree really accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.spec.events import Event
from workbench.spec.plan import EngineLimits
from workbench.speculative.rank_tree import best_paths, count_paths
from workbench.speculative.stats import from_events
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.rows import Rows, targets
from workbench.training.heads.target import Target

WIDTH = 10
NODES = 64
GREEDY = SamplingParams(max_tokens=96)
SAMPLED = SamplingParams(max_tokens=96, temperature=1.0, seed=1)
"""How held-out prompts are answered."""


@dataclass(frozen=True)
class Ranks:
    """``ranks`` int64 [n, K]: where each head has the right token; -1 not among its first, -2: none came."""

    ranks: Tensor

    def accuracy(self, first: int = 1) -> list[float]:
        """By head: share of the rows where the right token is among its ``first`` ones."""
        came = self.ranks > -2
        hit = (self.ranks >= 0) & (self.ranks < first)
        return [
            float(h[c].float().mean()) if bool(c.any()) else 0.0 for h, c in zip(hit.T, came.T, strict=True)
        ]

    def paths(self, nodes: int = NODES) -> tuple[list[list[int]], list[float]]:
        """The best tree's paths, parents first, and how often each was right."""
        rows = self.ranks[self.ranks[:, 0] > -2]
        counts = count_paths(rows.tolist())
        best = best_paths(counts, nodes)
        return [list(p) for p in best], [round(counts[p] / max(1, len(rows)), 5) for p in best]


def rank(
    candidates: Callable[[Tensor], Tensor], rows: Sequence[Rows], heads: int, cancel: Cancel | None = None
) -> Ranks:
    """Ranks on every row; ``candidates(stream [n, H])`` gives the heads' likeliest tokens [n, K, width]."""
    out = []
    for i in range(0, len(rows), 8):
        check_cancel(cancel, "Measuring the head")
        batch = rows[i : i + 8]
        wanted = targets(batch, heads)
        found = candidates(torch.cat([r.stream for r in batch])) == wanted[..., None]
        ranks = torch.where(found.any(-1), found.int().argmax(-1), -1)
        out.append(torch.where(wanted < 0, -2, ranks))
    return Ranks(torch.cat(out))


def in_engine(
    target: Target,
    use: str | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    cancel: Cancel | None = None,
) -> tuple[dict[str, Any], list[list[int]]]:
    """What an engine with a drafter (None: without) did with prompts, and its output.

    ``tau``, ``rate``, ``survival`` and ``alpha`` are those of :mod:`workbench.speculative.stats`;
    ``rejected``: share of the drafts of which nothing was accepted.
    """
    longest = max(map(len, prompts)) + params.max_tokens + 64
    longest = min(longest, target.source.config.max_position)
    pool = len(prompts) * (-(-longest // 64) + 2) * 64
    limits = EngineLimits(kv_pool_tokens=pool, max_sequences=len(prompts), max_context=longest)
    events: list[Event] = []
    out: dict[str, list[int]] = {f"p{i}": [] for i in range(len(prompts))}
    with target.engine(*([use] if use else []), limits=limits) as engine:
        for name, prompt in zip(out, prompts, strict=True):
            engine.add(Request(name, tuple(prompt), params))
        while engine.has_work:
            check_cancel(cancel, "Measuring the head")
            step, said = engine.step()
            events += [step, *said]
            for event in said:
                out[event.request_id].extend(t.id for t in event.tokens)
    found = from_events(events)
    drafts = [d for e in events for d in getattr(e, "drafts", ())]
    facts = {
        "tau": found.tau,
        "rate": found.rate,
        "survival": [round(s, 4) for s in found.survival],
        "alpha": found.alpha,
        "tokens_per_forward": found.tokens_per_forward,
        "rejected": sum(not d.accepted for d in drafts) / len(drafts) if drafts else None,
        "tokens": sum(map(len, out.values())),
        "prompts": len(prompts),
    }
    return facts, list(out.values())


def asked_of(conversations: Iterable[Conversation], most: int) -> list[tuple[int, ...]]:
    """Prompts of held-out conversations, each once."""
    return list(dict.fromkeys(c.prompt for c in conversations))[:most]


def measured(
    target: Target,
    runs: Mapping[str, tuple[str, SamplingParams]],
    prompts: Sequence[Sequence[int]],
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> dict[str, Any]:
    """What each of ``runs`` (a drafter, how to answer) did in the engine, by its name.

    Greedy ones say for how many prompts the output was that of the engine alone.
    """
    out: dict[str, Any] = {}
    _, plain = in_engine(target, None, prompts, GREEDY, cancel)
    for n, (name, (use, params)) in enumerate(runs.items()):
        found, said = in_engine(target, use, prompts, params, cancel)
        if params == GREEDY:
            found["same_output"] = sum(a == b for a, b in zip(said, plain, strict=True))
        out[name] = found
        report(progress, (n + 1) / len(runs), f"{name}: {found['tau'] or 0:.2f} tokens per step")
    return out
