"""A drafter run over whole conversations, and on what it gave itself: training-time test.

Step 0 sees the target's states everywhere. At step j the row of token x_s is as far from them as it would be
as the j-th drafted token: its state is what row s - 1 gave at step j - 1, and it attends step 0 up to row
s - j, then row s - j + i of step i for i = 1 … j (Li et al., *EAGLE-3*, arXiv 2503.01840, fig. 6). The tokens
are always the right ones. Only the rows of an answer are run in full; a prompt's are there to be attended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.models.rope import RopeTable, apply_rope
from workbench.training.heads.drafter import Drafter
from workbench.training.heads.rows import Shown


@dataclass(frozen=True)
class Batch:
    """Conversations laid end to end, all but their last tokens: C rows, N of them of answers (or of what is
    learnt from: :attr:`Shown.begin`).

    ``ids``, ``conversation`` and ``positions`` [C]; ``answers`` [N]: which rows those are; ``ahead`` [N]: how
    many rows of its answer come before each; ``longest`` and ``widest``: most rows of a conversation, and of
    an answer.
    """

    shown: Sequence[Shown]
    ids: Tensor
    conversation: Tensor
    positions: Tensor
    answers: Tensor
    ahead: Tensor
    longest: int
    widest: int

    @classmethod
    def of(cls, shown: Sequence[Shown]) -> Batch:
        """Lay out."""
        lengths = [len(s.conversation.ids) - 1 for s in shown]
        begins = [s.begin for s in shown]
        positions = torch.cat([torch.arange(n) for n in lengths])
        conversation = torch.arange(len(shown)).repeat_interleave(torch.tensor(lengths))
        after = positions - torch.tensor(begins)[conversation]
        answers = (after >= 0).nonzero()[:, 0]
        return cls(
            shown,
            torch.cat([torch.tensor(s.conversation.ids[:-1]) for s in shown]),
            conversation,
            positions,
            answers,
            after[answers],
            max(lengths),
            max(n - b for n, b in zip(lengths, begins, strict=True)),
        )

    def streams(self, dtype: torch.dtype) -> list[Tensor]:
        """[C, H] per layer: at row s the stream at position s - 1, zeros where there is none."""
        return [
            torch.cat([torch.cat((s[:1] * 0, s[:-2])) for s in layer]).to(dtype)
            for layer in zip(*(s.streams for s in self.shown), strict=True)
        ]

    def last(self, dtype: torch.dtype) -> Tensor:
        """[N, H]: the last of the streams at the answers' own positions."""
        return torch.cat([s.streams[-1][s.begin : -1] for s in self.shown]).to(dtype)

    def following(self) -> Tensor:
        """int64 [N]: the token behind each row of an answer."""
        return torch.cat([torch.tensor(s.conversation.ids[s.begin + 1 :]) for s in self.shown])

    def best(self) -> Tensor:
        """int64 [N]: the target's likeliest token behind each row of an answer."""
        pieces = [s.best[s.begin : -1] for s in self.shown if s.best is not None]
        return torch.cat(pieces).long()


def unroll(
    drafter: Drafter, batch: Batch, embedded: Tensor, states: Tensor, table: RopeTable, steps: int
) -> list[Tensor]:
    """What the drafter gives [N, H] at each of ``steps``; step j means nothing where ``ahead`` < j.

    ``embedded`` and ``states`` [C, H]: of each row's token, and known of the position before.
    """
    form = drafter.form
    cos, sin = (t[:, None] for t in table.gather(batch.positions, int(batch.positions.max())))
    at, ahead = batch.answers, batch.ahead
    own_cos, own_sin, own = cos[at], sin[at], embedded[at]
    read, residual = drafter.enter(embedded, states)
    keys = apply_rope(drafter.heads(read, "k"), cos, sin)
    values = drafter.heads(read, "v")
    layout = _Layout(batch, form.kv_heads, form.heads // form.kv_heads)
    first = layout.context(keys), layout.context(values)
    read, residual = read[at], residual[at]
    queries = apply_rope(drafter.heads(read, "q"), own_cos, own_sin) * form.scale
    given = [drafter.leave(layout.attend(queries, first, [], 0), residual)]
    diagonal: list[tuple[Tensor, Tensor]] = []
    for step in range(1, steps):
        state = before(given[-1], 1) * (ahead > 0).to(given[-1].dtype)[:, None]
        read, residual = drafter.enter(own, state)
        queries = apply_rope(drafter.heads(read, "q"), own_cos, own_sin) * form.scale
        diagonal.append((apply_rope(drafter.heads(read, "k"), own_cos, own_sin), drafter.heads(read, "v")))
        given.append(drafter.leave(layout.attend(queries, first, diagonal, step), residual))
    return given


def before(rows: Tensor, by: int) -> Tensor:
    """Row n - ``by`` at row n; zeros before the first."""
    if not by:
        return rows
    return torch.cat((torch.zeros_like(rows[:by]), rows[:-by]))


class _Layout:
    """Attention of a batch: rows end to end outside, conversations side by side inside."""

    def __init__(self, batch: Batch, kv_heads: int, group: int) -> None:
        self._kv, self._group = kv_heads, group
        self._count = len(batch.shown)
        self._context = batch.conversation * batch.longest + batch.positions
        self._longest, self._widest = batch.longest, batch.widest
        self._own = batch.conversation[batch.answers] * batch.widest + batch.ahead
        rows = torch.full((self._count, batch.widest), -1)
        rows.view(-1)[self._own] = batch.positions[batch.answers]
        self._ahead = batch.ahead
        self._last = rows  # position of each row; -1 where there is none

    def context(self, rows: Tensor) -> Tensor:
        """[C, Hkv, D] as [B, Hkv, L, D]."""
        laid = rows.new_zeros(self._count * self._longest, *rows.shape[1:])
        laid = laid.index_copy(0, self._context, rows)
        return laid.view(self._count, self._longest, *rows.shape[1:]).transpose(1, 2)

    def attend(
        self, queries: Tensor, first: tuple[Tensor, Tensor], diagonal: list[tuple[Tensor, Tensor]], step: int
    ) -> Tensor:
        """[N, Hq * D] of scaled queries [N, Hq, D]: over step 0 and a row of each later one."""
        n, _, dim = queries.shape
        keys, values = first
        q = self._wide(queries).view(self._count, self._widest, self._kv, self._group, dim)
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, group * R, D]
        scores = (q @ keys.transpose(-1, -2)).unflatten(2, (self._group, self._widest))
        hidden = torch.arange(self._longest) > (self._last - step)[..., None]
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        extra, moved = [], []
        mine = queries.view(n, self._kv, self._group, dim)
        for i, (k, v) in enumerate(diagonal, 1):
            by = step - i
            score = torch.einsum("nkgd,nkd->nkg", mine, before(k, by))
            extra.append(score.masked_fill((self._ahead < by)[:, None, None], float("-inf")))
            moved.append(before(v, by))
        if extra:
            wide = self._wide(torch.stack(extra, -1))  # [B * R, Hkv, group, step]
            wide = wide.view(self._count, self._widest, self._kv, self._group, step).permute(0, 2, 3, 1, 4)
            scores = torch.cat((scores, wide), -1)
        else:  # rows that are none see something all the same
            scores = scores.masked_fill((self._last < 0)[:, None, None, :, None], 0.0)
        law = scores.softmax(-1)
        out = law[..., : self._longest].flatten(2, 3) @ values
        out = out.unflatten(2, (self._group, self._widest)).permute(0, 3, 1, 2, 4).flatten(0, 1)[self._own]
        if moved:
            share = law[..., self._longest :].permute(0, 3, 1, 2, 4).flatten(0, 1)[self._own]
            out = out + torch.einsum("nkgs,nkds->nkgd", share, torch.stack(moved, -1))
        return out.flatten(1)

    def _wide(self, rows: Tensor) -> Tensor:
        """[N, …] as [B * R, …], zeros where a conversation has no row."""
        laid = rows.new_zeros(self._count * self._widest, *rows.shape[1:])
        return laid.index_copy(0, self._own, rows)
