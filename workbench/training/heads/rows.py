"""What heads learn from: per conversation the states they are shown, and the tokens that followed.

Row j of a conversation is the state at its prompt's last token plus j, ``following[j]`` the token behind it.
The engine has that token already when it drafts: head k (from 1) answers for ``following[j + k]``. The first
row counts: a first draft comes right behind the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.models.progress import Cancel, Progress, part
from workbench.training.errors import TrainingError
from workbench.training.heads.conversations import Conversation, opening
from workbench.training.heads.shards import HELD_OUT, Shards


@dataclass(frozen=True)
class Rows:
    """One conversation: ``stream`` [m, H] bfloat16, ``following`` int64 [m], -1 behind the last token."""

    conversation: Conversation
    stream: Tensor
    following: Tensor

    @classmethod
    def of(cls, conversation: Conversation, stream: Tensor, begin: int | None = None) -> Rows:
        """From the stream at all tokens of a conversation: those from ``begin`` on stay (None: the answer),
        and the one before."""
        begin = conversation.answer if begin is None else begin
        return cls(conversation, stream[begin - 1 :], torch.tensor([*conversation.ids[begin:], -1]))


def targets(batch: Sequence[Rows], heads: int) -> Tensor:
    """Tokens [rows, heads] that each head should say at each row of a batch, -1 where nothing is left."""
    columns = []
    for rows in batch:
        m = len(rows.following)
        padded = torch.cat((rows.following, rows.following.new_full((heads,), -1)))
        columns.append(torch.stack([padded[k : k + m] for k in range(1, heads + 1)], 1))
    return torch.cat(columns)


def frequent(conversations: Iterable[Conversation], vocab: int, most: int) -> Tensor:
    """Ids int32 [n] of the tokens that the model said, the most frequent first, at most ``most``."""
    said = torch.tensor([i for c in conversations for i in c.ids[c.answer :]])
    counts = torch.bincount(said, minlength=vocab)
    order = counts.argsort(descending=True, stable=True)
    return order[: min(most, int((counts > 0).sum()))].to(torch.int32)


@dataclass(frozen=True)
class Shown:
    """One conversation as a model saw it: ``streams``, each [n, H] bfloat16, at all of its tokens.

    ``best`` int32 [n], where it was asked for: the model's likeliest next token (-1 within the prompt).
    ``since``: where what is learnt begins, if it is not the answer alone.
    """

    conversation: Conversation
    streams: tuple[Tensor, ...]
    best: Tensor | None = None
    since: int | None = None

    @property
    def begin(self) -> int:
        """The first token whose follower is learnt."""
        return self.conversation.answer if self.since is None else self.since

    def whole(self, since: int) -> Shown:
        """The question is learnt from too, which begins at ``since``.

        Its tokens were drawn, so what counts as the likeliest behind one, where that is asked, is what came.
        """
        if self.best is None:
            return replace(self, since=since)
        ids, answer = torch.tensor(self.conversation.ids, dtype=torch.int32), self.conversation.answer
        best = self.best.clone()
        best[since:answer] = ids[since + 1 : answer + 1]
        return replace(self, best=best, since=since)


def load(
    shards: Shards,
    layers: Sequence[int],
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    *,
    best: bool = False,
) -> tuple[list[Shown], list[Shown]]:
    """What to train on and what is held out, made where it is not on disk; no prompt is in both.

    ``best`` wants the last of ``layers`` to be what leaves the last one. Raises :class:`TrainingError` when
    the model says nothing that can be learnt from, and what :meth:`Shards.conversations` raises.
    """
    made = shards.conversations(part(progress, 0.0, 0.6), cancel)
    trained: list[Shown] = []
    held: list[Shown] = []
    for number, shard in enumerate(made):
        if not shard:
            continue  # none of its answers was long enough
        share = part(progress, 0.6 + 0.4 * number / len(made), 0.6 + 0.4 * (number + 1) / len(made))
        streams = shards.streams(number, shard, layers, share, cancel)
        lengths = [len(c.ids) for c in shard]
        likeliest = torch.split(shards.best(number, shard, streams[-1]), lengths) if best else None
        split = zip(*(torch.split(stream, lengths) for stream in streams), strict=True)
        shown = [
            Shown(c, pieces, None if likeliest is None else likeliest[i])
            for i, (c, pieces) in enumerate(zip(shard, split, strict=True))
        ]
        (held if number < HELD_OUT else trained).extend(shown)
    secret = {s.conversation.prompt for s in held}
    trained = [s for s in trained if s.conversation.prompt not in secret]
    if shards.settings.whole:
        since = len(opening(shards.target.tokenizer))
        trained = [s.whole(since) for s in trained]
    if not trained or not held:
        raise TrainingError(
            "The model made no conversation that a head could learn from.",
            hint="Its answers are empty or run in circles; train on a model that talks.",
        )
    return trained, held
