"""From a model's name to an exit adapter: streams of two layers, training, hits before and after, one file.

    from workbench.training.heads.train_exit import ExitShape, train_exit
    train_exit("tiny", DataSettings(tokens=20_000), ExitShape(), Schedule(steps=300))

Needs no session. Everything that was made is kept, whenever it is stopped; the same call goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.decoder import Decoder
from workbench.models.heads import HeadFile
from workbench.models.progress import Cancel, Progress, check_cancel
from workbench.spec.errors import OptionError
from workbench.speculative.placement.trained_exit import KIND
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.course import Course, course
from workbench.training.heads.exit_adapter import ExitHead, ExitLoss
from workbench.training.heads.medusa import vocabulary_matrix
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.rows import Shown, frequent
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.target import Target

LOOKED = 8  # held-out conversations that a point of the curve is measured on
RANKS = (1, 2, 4, 8)
_ROWS = 512


@dataclass(frozen=True)
class ExitShape:
    """``layer``: layers that run before the exit (0: two thirds). The loss is over ``vocab`` tokens that the
    model says most often, and ``others`` drawn from the rest: tokens that are never pushed down crowd the
    first ranks of the whole vocabulary."""

    layer: int = 0
    vocab: int = 4096
    others: int = 2048

    def tokens(self, conversations: Iterable[Conversation], size: int, seed: int) -> Tensor:
        """Ids int64 of the loss, of a vocabulary of ``size``."""
        said = frequent(conversations, size, self.vocab).long()
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        rest = order[~torch.isin(order, said)]
        return torch.cat((said, rest[: self.others]))

    def exits(self, total: int) -> int:
        """The layer whose input it reads, of ``total``. Raises :class:`OptionError` for none or all."""
        layer = self.layer or max(1, round(total * 2 / 3))
        if not 1 <= layer < total:
            raise OptionError(
                f"An exit behind layer {layer} leaves nothing behind it: the model has {total}.",
                hint=f"Choose 1 to {total - 1}.",
            )
        return layer


def train_exit(
    model: str | Path,
    data: DataSettings | None = None,
    shape: ExitShape | None = None,
    schedule: Schedule | None = None,
    *,
    out: Path | None = None,
    target: Target | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> HeadFile:
    """Train, measure and write the exit adapter of a model, where what foresees a verdict looks for it.

    ``out``: a folder of heads that gets a copy of the file in the cache folder.
    Raises :class:`ModelError` s, :class:`OptionError`, :class:`TrainingError` and ``Cancelled``.
    """
    shape, schedule = shape or ExitShape(), schedule or Schedule()
    with course(model, KIND, data, shape, schedule, target=target, progress=progress, cancel=cancel) as way:
        return way.run.copied(_train(way, shape), out)


def _train(way: Course, shape: ExitShape) -> HeadFile:
    target, source = way.target, way.target.source
    config, layer = source.config, shape.exits(source.config.num_layers)
    trained, held = way.load((layer, config.num_layers), 0.5)
    ids = shape.tokens((s.conversation for s in trained), config.vocab_size, way.run.schedule.seed)
    model = ExitHead(config.hidden_size, config.norm_eps)
    loss = ExitLoss(model, target.decoder, vocabulary_matrix(source), ids, trained)

    def look() -> dict[str, float]:
        found = loss.hits(held[:LOOKED], (1, 8))
        return {f"top{k}": round(share, 4) for k, share in found.items()}

    facts = way.optimise(model, loss, trained, look, 0.5, 0.9)
    tensors = {"gain": model.gain.detach().bfloat16(), "matrix": model.matrix.detach().bfloat16()}
    served = ExitHead(config.hidden_size, config.norm_eps)
    served.load_state_dict(tensors)  # what the file holds is what is measured
    lens = ExitHead(config.hidden_size, config.norm_eps)
    facts |= {
        "layer": layer,
        "features": [layer],
        "vocab": len(ids),
        "held_out": {
            "conversations": len(held),
            "lens": hit_rates(target.decoder, lens, held, way.cancel),
            "adapter": hit_rates(target.decoder, served, held, way.cancel),
        },
    }
    return way.write(facts, tensors)


@torch.inference_mode()
def hit_rates(
    decoder: Decoder, model: ExitHead, shown: Sequence[Shown], cancel: Cancel | None = None
) -> dict[str, Any]:
    """How often the model's likeliest token is among the first k of the exit, of the whole vocabulary.

    ``shown``: the exit's stream and the last one. Also the mean KL of the two laws in nats, and the rows.
    """
    hits, kl, rows = dict.fromkeys(RANKS, 0), 0.0, 0
    dtype = decoder.weights.residual_dtype

    def law(stream: Tensor) -> Tensor:
        return decoder.logits(decoder.final_norm(stream))

    for each in shown:
        check_cancel(cancel, "Measuring the exit")
        early, last = (s[each.conversation.answer - 1 :].to(dtype) for s in each.streams)
        for a, b in zip(torch.split(early, _ROWS), torch.split(last, _ROWS), strict=True):
            said, wanted = law(model(a)), law(b)
            best = wanted.argmax(-1, keepdim=True)
            place = (said > said.gather(-1, best)).sum(-1)
            for k in RANKS:
                hits[k] += int((place < k).sum())
            target = wanted.log_softmax(-1)
            kl += float(F.kl_div(said.log_softmax(-1), target, reduction="sum", log_target=True))
            rows += len(a)
    return {
        "rows": rows,
        "kl": round(kl / rows, 4),
        **{f"top{k}": round(n / rows, 4) for k, n in hits.items()},
    }
