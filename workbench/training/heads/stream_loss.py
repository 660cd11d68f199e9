"""Training speculative streams: rows beside a draft model's own that learn to guess what it will say.

"Speculative Streaming" (arXiv 2402.11131) trains a model and its streams together, or the streams alone,
which leaves the model's output what it is; the second is done here. Its loss is on the tokens that follow;
here a stream learns the draft model's own law at the row it guesses for, since it is the draft model that
bears out a guess or does not. Only f and P (eq. 3) are trained; the layers they pass through stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.models.decoder import Decoder
from workbench.training.heads.distil import distilled
from workbench.training.heads.pruned import Pruned, attended
from workbench.training.heads.rows import Shown
from workbench.training.heads.unroll import Batch, before


class StreamHeads(nn.Module):
    """f begins as the identity and P as nothing: a stream begins as its row, a place further on."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.carry = nn.Parameter(torch.eye(width))
        self.marks = nn.Parameter(torch.zeros(count, width))

    def begin(self, stream: Tensor) -> Tensor:
        """[n, S, H] of what rows [n, H] bring to the first layer with streams."""
        return F.linear(stream, self.carry)[:, None] + self.marks


class StreamLoss:
    """The loss of batches of conversations: ``draft`` as it is, ``model``'s streams in its last ``layers``.

    ``matrix`` [V', H] and ``kept`` int64 [V']: rows of the drafted tokens, and which these are.
    """

    def __init__(
        self,
        model: StreamHeads,
        draft: Pruned,
        layers: int,
        decoder: Decoder,
        matrix: Tensor,
        kept: Tensor,
        shown: Sequence[Shown],
    ) -> None:
        self.model, self.draft, self.decoder, self.shown = model, draft.requires_grad_(False), decoder, shown
        self.below = draft.config.num_layers - layers
        self.kept = kept
        self.matrix = matrix.index_select(0, kept).to(draft.precision or decoder.weights.residual_dtype)

    def __call__(self, numbers: Sequence[int], share: float) -> tuple[Tensor, int]:
        """Mean divergence over streams and the rows they guess for, and the number of these guesses."""
        batch = Batch.of([self.shown[i] for i in numbers])
        guessed, own = self.run(batch)
        counted = torch.stack([batch.ahead >= j for j in range(1, len(guessed) + 1)])
        weights = counted / counted.sum().clamp_min(1)
        none = torch.zeros(len(own), dtype=torch.int64)
        total = distilled(guessed, own, self.matrix, none, weights.to(own), "kl", share)
        return total, int(counted.sum())

    def run(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """By stream what guesses for each answer's row [N, H], and what that row itself says [N, H].

        Stream j's guess for a row was made j rows before it; it means nothing where ``ahead`` < j.
        """
        draft, rows = self.draft, batch.answers
        blocks = list(draft.blocks())
        kept: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            hidden = self.decoder.embed(batch.ids)
            brought = hidden
            for index, block in enumerate(blocks):
                brought = hidden if index == self.below else brought
                q, k, v = block.enter(hidden, draft.rotation(index, batch.positions))
                out = attended(q * draft.config.query_scale, k, v, batch, draft.config.window(index))
                hidden = block.leave(out, hidden, None)
                if index >= self.below:
                    kept.append((k, v))
            own = draft.norm(hidden[rows])
        begun = self.model.begin(brought[rows])
        count = begun.shape[1]
        ahead = torch.arange(1, count + 1)
        positions = (batch.positions[rows, None] + ahead).flatten()
        streams = begun.flatten(0, 1)
        for index, (k, v) in enumerate(kept, self.below):
            q, own_k, own_v = blocks[index].enter(streams, draft.rotation(index, positions))
            window = draft.config.window(index)
            out = _beside(q * draft.config.query_scale, (k, v), (own_k, own_v), batch, count, window)
            streams = blocks[index].leave(out, streams, None)
        given = draft.norm(streams).view(len(rows), count, -1)
        return [before(given[:, j - 1], j) for j in range(1, count + 1)], own

    def agreement(self, shown: Sequence[Shown]) -> list[float]:
        """By stream, how often its likeliest token is the draft model's own, where the text went its way.

        Counted where the tokens between row and guess are what the draft model says: its own chain has no
        others.
        """
        batch = Batch.of(shown)
        with torch.no_grad():
            guessed, own = self.run(batch)
            said = self._likeliest(own)
            way = self.kept[said] == batch.following()
            out = []
            counted = torch.ones_like(way)
            for j, rows in enumerate(guessed, 1):
                counted = counted & before(way, j) & (batch.ahead >= j)
                right = self._likeliest(rows) == said
                out.append(float((right & counted).sum() / counted.sum().clamp_min(1)))
        return out

    def _likeliest(self, rows: Tensor) -> Tensor:
        return F.linear(rows.to(self.matrix.dtype), self.matrix).argmax(-1)


def _beside(
    q: Tensor,
    rows: tuple[Tensor, Tensor],
    streams: tuple[Tensor, Tensor],
    batch: Batch,
    count: int,
    window: int | None,
) -> Tensor:
    """[N * S, Hq * D] of scaled queries [N * S, Hq, D]: a stream sees its row's context, the row, and the
    streams of that row up to itself (eq. 2). ``rows``: K, V [C, Hkv, D]; ``streams``: [N * S, Hkv, D]."""
    conversations, longest, wide = len(batch.shown), batch.longest, batch.widest
    at = batch.conversation * longest + batch.positions
    own = batch.conversation[batch.answers] * wide + batch.ahead
    own = (own[:, None] * count + torch.arange(count)).flatten()

    def laid(value: Tensor, places: Tensor, each: int) -> Tensor:
        out = value.new_zeros(conversations * each, *value.shape[1:]).index_copy(0, places, value)
        return out.view(conversations, each, *value.shape[1:]).transpose(1, 2)

    position = torch.full((conversations * wide,), -1)
    position[own[::count] // count] = batch.positions[batch.answers]
    last = position.view(conversations, wide).repeat_interleave(count, 1)  # of each stream's row
    stream = torch.arange(wide * count)
    key = torch.arange(longest)
    seen = key <= last[..., None]
    same = stream[:, None] // count == stream // count
    beside = (same & (stream <= stream[:, None])).expand(conversations, -1, -1)
    if window is not None:
        here = last + 1 + stream % count
        seen = seen & (key > here[..., None] - window)
        beside = beside & (stream[:, None] - stream < window)
    k, v = (
        torch.cat((laid(row, at, longest), laid(made, own, wide * count)), 2)
        for row, made in zip(rows, streams, strict=True)
    )
    mask = torch.cat((seen, beside), -1)[:, None]
    mixed = F.scaled_dot_product_attention(
        laid(q, own, wide * count), k, v, attn_mask=mask, scale=1.0, enable_gqa=True
    )
    return mixed.transpose(1, 2).flatten(0, 1)[own].flatten(1)
