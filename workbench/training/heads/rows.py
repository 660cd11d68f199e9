"""What heads learn from: per conversation the states they are shown, and the tokens that followed.

Row j of a conversation is the state at its prompt's last token plus j, ``following[j]`` the token behind it.
The engine has that token already when it drafts: head k (from 1) answers for ``following[j + k]``. The first
row counts: a first draft comes right behind the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.models.progress import Cancel, Progress, part
from workbench.training.errors import TrainingError
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.shards import HELD_OUT, Shards


@dataclass(frozen=True)
class Rows:
    """One conversation: ``stream`` [m, H] bfloat16, ``following`` int64 [m], -1 behind the last token."""

    conversation: Conversation
    stream: Tensor
    following: Tensor

    @classmethod
    def of(cls, conversation: Conversation, stream: Tensor) -> Rows:
        """From the stream at the prompt's last token and at the answer."""
        answer = conversation.ids[conversation.answer :]
        return cls(conversation, stream, torch.tensor([*answer, -1]))


def targets(batch: Sequence[Rows], heads: int) -> Tensor:
    """Tokens [rows, heads] that each head should say at each row of a batch, -1 where nothing is left."""
    columns = []
    for rows in batch:
        m = len(rows.following)
        padded = torch.cat((rows.following, rows.following.new_full((heads,), -1)))
        columns.append(torch.stack([padded[k : k + m] for k in range(1, heads + 1)], 1))
    return torch.cat(columns)


def frequent(rows: Sequence[Rows], vocab: int, most: int) -> Tensor:
    """Ids int32 [n] of the tokens that the model said, the most frequent first, at most ``most``."""
    said = torch.cat([r.following for r in rows])
    counts = torch.bincount(said[said >= 0], minlength=vocab)
    order = counts.argsort(descending=True, stable=True)
    return order[: min(most, int((counts > 0).sum()))].to(torch.int32)


def load(
    shards: Shards, layer: int, progress: Progress | None = None, cancel: Cancel | None = None
) -> tuple[list[Rows], list[Rows]]:
    """Rows to train on and rows held out, made where they are not on disk; no prompt is in both.

    Raises :class:`TrainingError` when the model says nothing that can be learnt from, and what
    :meth:`Shards.conversations` raises.
    """
    made = shards.conversations(part(progress, 0.0, 0.8), cancel)
    trained: list[Rows] = []
    held: list[Rows] = []
    for number, shard in enumerate(made):
        if not shard:
            continue  # none of its answers was long enough
        share = part(progress, 0.8 + 0.2 * number / len(made), 0.8 + 0.2 * (number + 1) / len(made))
        stream = shards.features(number, shard, layer, share, cancel)
        pieces = torch.split(stream, [len(c.ids) - c.answer + 1 for c in shard])
        rows = [Rows.of(c, piece) for c, piece in zip(shard, pieces, strict=True)]
        (held if number < HELD_OUT else trained).extend(rows)
    secret = {r.conversation.prompt for r in held}
    trained = [r for r in trained if r.conversation.prompt not in secret]
    if not trained or not held:
        raise TrainingError(
            "The model made no conversation that a head could learn from.",
            hint="Its answers are empty or run in circles; train on a model that talks.",
        )
    return trained, held
