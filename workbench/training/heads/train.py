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

from workbench.models.coded_head import decoded
from workbench.models.heads import HeadFile
from workbench.models.progress import Cancel, Progress, report
from workbench.training.heads.course import Course, Start, course
from workbench.training.heads.evaluate import (
    GREEDY,
    NODES,
    SAMPLED,
    WIDTH,
    Ranks,
    rank,
)
from workbench.training.heads.medusa import MedusaHeads, MedusaLoss, Shape, normed, vocabulary_matrix
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.rows import Rows, frequent
from workbench.training.heads.run import VOCAB_LISTED
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
    start: Path | None = None,
    out: Path | None = None,
    prompts: int = 12,
    target: Target | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> HeadFile:
    """Train, measure and write the heads of a model; gives the file that the ``medusa`` technique finds.

    ``start``: the file of heads to go on from; without one they begin as nothing beside the model. ``out``: a
    folder of heads that gets a copy of the file in the cache folder. ``prompts``: held-out prompts
    that the engine answers with the finished head.

    Raises :class:`ModelError` s, :class:`TrainingError` and ``Cancelled``.
    """
    shape = shape or Shape()

    def fits(head: HeadFile, target: Target) -> bool:
        hidden = target.source.config.hidden_size
        tensors = head.tensors()
        found, rows = tensors.get("down"), tensors.get("rows")
        same = found is not None and found.shape == (shape.heads, shape.width(hidden), hidden)
        return same and (rows is None or (shape.own_rows and rows.shape[1] <= shape.vocab))

    with course(
        model,
        "medusa",
        data,
        shape,
        schedule or Schedule(),
        start=Start(start, f"{shape.heads} Medusa heads of that rank", fits),
        target=target,
        progress=progress,
        cancel=cancel,
    ) as way:
        return way.run.copied(_train(way, shape, prompts), out)


def _train(way: Course, shape: Shape, prompts: int) -> HeadFile:
    target, config = way.target, way.target.source.config
    shown = way.load((config.num_layers,), 0.55)
    trained, held = ([Rows.of(s.conversation, s.streams[0], s.begin) for s in side] for side in shown)
    ids = frequent((r.conversation for r in trained), config.vocab_size, VOCAB_LISTED)
    matrix = vocabulary_matrix(target.source)
    own = None
    if shape.own_rows:
        ids = ids[: shape.vocab]
        own = matrix.index_select(0, ids.long())
    heads = MedusaHeads(shape, config.hidden_size, way.run.schedule.seed, own)
    if way.before is not None:
        begun = decoded(way.before.tensors())
        ids = begun["ids"] if "rows" in begun else ids
        heads.load_state_dict(
            {n: begun[n].float() for n in ("down", "up", "rows") if n in begun}, strict=False
        )
    loss = MedusaLoss(heads, shape, target.decoder, matrix, ids, trained)

    def look() -> dict[str, float]:
        found = rank(lambda s: _trained_candidates(loss, s), held[:LOOKED], shape.heads)
        return {f"top1_{k + 1}": round(a, 4) for k, a in enumerate(found.accuracy())}

    facts = {"heads": shape.heads, **way.optimise(heads, loss, trained, look, 0.55, 0.85)}
    if own is not None:
        facts["own_rows"] = len(own)
    return finish(way, heads, ids, held, facts, prompts)


def finish(
    way: Course, heads: MedusaHeads, ids: Tensor, held: Sequence[Rows], facts: dict[str, Any], prompts: int
) -> HeadFile:
    """Count the tree on one half of the held-out conversations, run the engine on the other; the file."""
    half = max(1, len(held) // 2)
    tensors = heads.stored()
    heads.load_state_dict(decoded(tensors))  # what is measured is what is stored
    listed = ids.long() if heads.rows is not None else None
    ranks = rank(
        lambda s: _candidates(way.target, heads, listed, s), held[:half], heads.down.shape[0], way.cancel
    )
    paths, shares = ranks.paths()
    if not paths:  # nothing was ever right: draft one token all the same, and let the numbers say so
        paths, shares = [[0]], [0.0]
    report(way.progress, 0.91, "ranks measured")
    facts = {**facts, "paths": paths, "path_shares": shares, "held_out": _accuracies(ranks, half)}
    return way.write(facts, {**tensors, "ids": ids}, RUNS, held[half:], prompts)


def _accuracies(ranks: Ranks, conversations: int) -> dict[str, Any]:
    accuracy = {f"top{n}": [round(a, 4) for a in ranks.accuracy(n)] for n in (1, 2, 5, WIDTH)}
    return {"conversations": conversations, "rows": len(ranks.ranks), **accuracy}


def _candidates(target: Target, heads: MedusaHeads, listed: Tensor | None, stream: Tensor) -> Tensor:
    """Likeliest tokens [n, K, width]: of all, by the target's head, or of those ``listed``, by own rows."""
    with torch.inference_mode():
        z = normed(target.decoder, stream)
        if listed is not None:
            best = heads.logits(z, target.decoder.weights.embed).topk(min(WIDTH, len(listed)), -1).indices
            return listed[best]
        states = heads(z)
        logits = target.decoder.logits(states.flatten(0, 1).to(target.decoder.weights.residual_dtype))
        found: Tensor = logits.topk(min(WIDTH, logits.shape[-1]), -1).indices
        return found.view(*states.shape[:2], -1)


def _trained_candidates(loss: MedusaLoss, stream: Tensor) -> Tensor:
    """The same among the tokens that the loss is over, which costs less."""
    with torch.inference_mode():
        found = loss.likeliest(normed(loss.decoder, stream), 1)
    return found
