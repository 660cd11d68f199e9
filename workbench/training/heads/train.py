"""From a model's name to a head that drafts for it: data, training, measuring, one file.

    from workbench.training.heads.train import train_medusa
    train_medusa("tiny", DataSettings(tokens=20_000), Shape(), Schedule(steps=300))

Needs no session. Everything that was made is kept, whenever it is stopped; the same call goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.models.heads import HeadFile, read_head, write_head
from workbench.models.progress import Cancel, Progress, part, report
from workbench.training.heads.evaluate import (
    GREEDY,
    NODES,
    SAMPLED,
    WIDTH,
    Ranks,
    asked_of,
    measured,
    rank,
)
from workbench.training.heads.medusa import MedusaHeads, MedusaLoss, Shape, normed, vocabulary_matrix
from workbench.training.heads.optimise import Schedule, optimise
from workbench.training.heads.rows import Rows, frequent, load
from workbench.training.heads.run import VOCAB_LISTED, Run, shards_of
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.target import Target

RUNS = {
    "chain": ("medusa:branches=false", GREEDY),
    "tree": ("medusa:nodes=24", GREEDY),
    "tree, 64 nodes": (f"medusa:nodes={NODES}", GREEDY),
    "tree, temperature 1": ("medusa:nodes=24", SAMPLED),
}
"""What the engine does with finished heads."""
LOOKED = 8  # held-out conversations that a point of the curve is measured on


def train_medusa(
    model: str | Path,
    data: DataSettings | None = None,
    shape: Shape | None = None,
    schedule: Schedule | None = None,
    *,
    out: Path | None = None,
    prompts: int = 12,
    target: Target | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> HeadFile:
    """Train, measure and write the heads of a model; gives the file that the ``medusa`` technique finds.

    ``out``: a folder of heads that gets a copy of the file in the cache folder. ``prompts``: held-out prompts
    that the engine answers with the finished head.

    Raises :class:`ModelError` s, :class:`TrainingError` and ``Cancelled``.
    """
    data, shape, schedule = data or DataSettings(), shape or Shape(), schedule or Schedule()
    with shards_of(model, data, target, progress, cancel) as shards:
        run = Run(model, "medusa", shards, shape, schedule)
        return run.copied(_train(run, shape, prompts, progress, cancel), out)


def _train(
    run: Run, shape: Shape, prompts: int, progress: Progress | None, cancel: Cancel | None
) -> HeadFile:
    target, schedule = run.shards.target, run.schedule
    config = target.source.config
    shown = load(run.shards, (config.num_layers,), part(progress, 0.02, 0.55), cancel)
    trained, held = ([Rows.of(s.conversation, s.streams[0]) for s in side] for side in shown)
    ids = frequent((r.conversation for r in trained), config.vocab_size, VOCAB_LISTED)
    heads = MedusaHeads(shape, config.hidden_size, schedule.seed)
    loss = MedusaLoss(heads, shape, target.decoder, vocabulary_matrix(target.source), ids, trained)

    def look() -> dict[str, float]:
        found = rank(lambda s: _trained_candidates(loss, s), held[:LOOKED], shape.heads)
        return {f"top1_{k + 1}": round(a, 4) for k, a in enumerate(found.accuracy())}

    count = len(trained)
    state = optimise(
        heads,
        loss,
        count,
        schedule,
        run.folder(count),
        run.key(count),
        look,
        part(progress, 0.55, 0.85),
        cancel,
    )
    facts = {"heads": shape.heads, **run.facts([r.conversation for r in trained], state)}
    return finish(target, heads, ids, held, run.path, facts, prompts, part(progress, 0.85, 1.0), cancel)


def finish(
    target: Target,
    heads: MedusaHeads,
    ids: Tensor,
    held: Sequence[Rows],
    path: Path,
    facts: dict[str, Any],
    prompts: int,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> HeadFile:
    """Count the tree on one half of the held-out conversations, run the engine on the other; the file."""
    half = max(1, len(held) // 2)
    ranks = rank(lambda s: _candidates(target, heads, s), held[:half], heads.down.shape[0], cancel)
    paths, shares = ranks.paths()
    if not paths:  # nothing was ever right: draft one token all the same, and let the numbers say so
        paths, shares = [[0]], [0.0]
    report(progress, 0.4, "ranks measured")
    facts = {**facts, "paths": paths, "path_shares": shares, "held_out": _accuracies(ranks, half)}
    tensors = {
        "down": heads.down.detach().to(torch.bfloat16),
        "up": heads.up.detach().to(torch.bfloat16),
        "ids": ids,
    }
    fingerprint = target.source.fingerprint
    write_head(path, "medusa", fingerprint, facts, tensors)
    asked = asked_of((r.conversation for r in held[half:]), prompts)
    if asked:
        facts["engine"] = measured(target, RUNS, asked, part(progress, 0.4, 1.0), cancel)
        write_head(path, "medusa", fingerprint, facts, tensors)
    return read_head(path)


def _accuracies(ranks: Ranks, conversations: int) -> dict[str, Any]:
    accuracy = {f"top{n}": [round(a, 4) for a in ranks.accuracy(n)] for n in (1, 2, 5, WIDTH)}
    return {"conversations": conversations, "rows": len(ranks.ranks), **accuracy}


def _candidates(target: Target, heads: MedusaHeads, stream: Tensor) -> Tensor:
    """Likeliest tokens [n, K, width] of the whole vocabulary, by the target's own head."""
    with torch.inference_mode():
        states = heads(normed(target.decoder, stream))
        logits = target.decoder.logits(states.flatten(0, 1).to(target.decoder.weights.residual_dtype))
        best: Tensor = logits.topk(min(WIDTH, logits.shape[-1]), -1).indices
        return best.view(*states.shape[:2], -1)


def _trained_candidates(loss: MedusaLoss, stream: Tensor) -> Tensor:
    """The same among the tokens that the loss is over, which costs less."""
    with torch.inference_mode():
        found = loss.likeliest(normed(loss.decoder, stream), 1)
    return found
