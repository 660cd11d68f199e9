"""From a distilled draft model to one that streams: f and P trained beside it, in the same file.

    from workbench.training.heads.train_streams import StreamShape, train_streams
    train_streams("tiny", DataSettings(tokens=20_000), StreamShape(streams=2), Schedule(steps=300))

The draft model stays what it is, bit for bit. Everything that was made is kept, whenever it is stopped; the
same call goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.models.coded_head import decoded, encoded
from workbench.models.heads import HeadFile, find_head
from workbench.models.progress import Cancel, Progress, check_cancel, part
from workbench.spec.errors import InvariantError, OptionError
from workbench.speculative.distilled import KIND, begun_layers, kept_config
from workbench.speculative.placement.messages import ROOT
from workbench.speculative.placement.mirror_stream import MirrorStream
from workbench.speculative.placement.placed import drafting_kv
from workbench.speculative.placement.streams import CARRY, MARKS, PREFIX
from workbench.training.heads.course import Course, Start, course
from workbench.training.heads.medusa import vocabulary_matrix
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.pruned import Pruned
from workbench.training.heads.rows import Shown
from workbench.training.heads.run import VOCAB_KEPT
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.stream_loss import StreamHeads, StreamLoss
from workbench.training.heads.target import Target, open_target

LOOKED = 16  # held-out conversations that a point of the curve is measured on
CHAIN = 8
"""Tokens of a draft model's chain that passes are counted for: a window and a branch behind it."""
MOST_STREAMS = 8


@dataclass(frozen=True)
class StreamShape:
    """``streams`` of a row, in the last ``layers`` layers (0: two thirds of them); ``vocab`` of the loss."""

    streams: int = 2
    layers: int = 0
    vocab: int = VOCAB_KEPT

    def passed(self, total: int) -> int:
        """Layers with streams, of a draft model's ``total``. Raises :class:`OptionError`."""
        if not 1 <= self.streams <= MOST_STREAMS:
            raise OptionError(
                f"{self.streams!r} streams are not to be had.", hint=f"Choose 1 to {MOST_STREAMS}."
            )
        layers = self.layers or max(1, round(total * 2 / 3))
        if not 1 <= layers <= total:
            raise OptionError(
                f"Streams cannot pass through {layers} layers of {total}.", hint=f"Choose 1 to {total}."
            )
        return layers


def train_streams(
    model: str | Path,
    data: DataSettings | None = None,
    shape: StreamShape | None = None,
    schedule: Schedule | None = None,
    *,
    start: Path | None = None,
    out: Path | None = None,
    prompts: int = 12,
    target: Target | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> HeadFile:
    """Train, measure and write the streams of a draft model, in a copy of its file in the cache folder.

    ``start``: the draft model's file; without one, that which the ``draft_model`` technique finds. ``out``: a
    folder of heads that gets a copy. ``prompts``: held-out prompts that passes are counted on.

    Raises :class:`MissingHead` where nothing was distilled, :class:`HeadMismatch`, :class:`OptionError`,
    other :class:`ModelError` s, :class:`TrainingError` and ``Cancelled``.
    """
    shape = shape or StreamShape()
    target = target or open_target(model, progress=part(progress, 0.0, 0.02), cancel=cancel)
    found = start or find_head(model, KIND, target.source.fingerprint).path
    with course(
        model,
        KIND,
        data,
        shape,
        schedule or Schedule(),
        start=Start(found, "draft model", lambda head, _: True),
        target=target,
        progress=progress,
        cancel=cancel,
    ) as way:
        return way.run.copied(_train(way, shape, prompts), out)


def _train(way: Course, shape: StreamShape, prompts: int) -> HeadFile:
    target, source, draft = way.target, way.target.source, way.before
    if draft is None:
        raise InvariantError("Streams are trained for no draft model.")
    begun = begun_layers(draft, source.config.num_layers)
    layers, stored = shape.passed(len(begun)), draft.tensors()
    trained, held = way.load((source.config.num_layers,), 0.3)
    layer_tensors = {n: t.float() for n, t in decoded(stored).items() if n.startswith("model.")}
    pruned = Pruned(kept_config(source.config, begun), layer_tensors, way.half)
    heads = StreamHeads(source.config.hidden_size, shape.streams)
    kept = stored["ids"][: shape.vocab].long()
    loss = StreamLoss(heads, pruned, layers, target.decoder, vocabulary_matrix(source), kept, trained)

    def look() -> dict[str, float]:
        found = loss.agreement(held[:LOOKED])
        return {f"right_{j}": round(share, 4) for j, share in enumerate(found, 1)}

    made = way.optimise(heads, loss, trained, look, 0.3, 0.9)
    own = encoded({CARRY: heads.carry.detach(), MARKS: heads.marks.detach()})
    for name, value in decoded(own).items():  # what the file holds is what is measured
        getattr(heads, name.removeprefix(PREFIX)).data.copy_(value)
    facts: dict[str, Any] = {
        "layers": layers,
        "count": shape.streams,
        "conversations": len(held),
        "right": _agreement(loss, held, way.cancel),
        **{name: value for name, value in made.items() if name in ("recipe", "trained", "curve")},
    }
    written = way.write({**draft.facts, "streams": facts}, {**stored, **own})
    facts["passes"] = _per_pass(written, target, shape, held[:prompts], way.cancel)
    return way.write({**draft.facts, "streams": facts}, {**stored, **own})


def _agreement(loss: StreamLoss, held: Sequence[Shown], cancel: Cancel | None) -> list[float]:
    """Shares by stream, weighted by conversations."""
    total = torch.zeros(loss.model.marks.shape[0], dtype=torch.float64)
    for begin in range(0, len(held), LOOKED):
        check_cancel(cancel, "Measuring the streams")
        some = held[begin : begin + LOOKED]
        total += torch.tensor(loss.agreement(some), dtype=torch.float64) * len(some)
    return [round(float(share), 4) for share in total / len(held)]


def _per_pass(
    head: HeadFile, target: Target, shape: StreamShape, held: Sequence[Shown], cancel: Cancel | None
) -> dict[str, float]:
    """Tokens of the draft model's own chain that a pass makes, by streams used, behind held-out prompts."""
    out = {}
    with torch.inference_mode():
        for streams in range(shape.streams + 1):
            kv = drafting_kv(target.decoder, (), head, shape.vocab, streams)
            levels = 0
            for shown in held:
                check_cancel(cancel, "Counting passes")
                stream = MirrorStream(kv, shown.conversation.prompt, CHAIN, 1)
                levels += stream.extend([ROOT], CHAIN)[1]
                stream.close()
            out[str(streams)] = round(CHAIN * len(held) / max(levels, 1), 3)
    return out
