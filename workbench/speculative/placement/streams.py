"""Speculative streams: a drafter that says more than one token a pass, and checks itself in the next one.

"Speculative Streaming: Fast LLM Inference without Auxiliary Models" (arXiv 2402.11131), which Mirror
Speculative Decoding uses in its drafter: stream j of a row enters the last layers as f(x) + P_j, x being what
the row itself brings there (eq. 3), and attends what the row attends and the streams before it (eq. 2). The
row says the next token as ever; stream j guesses the one j places behind it. Nothing attends a stream but
later streams of its row, so the drafter's own law is what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.coded_head import decoded
from workbench.models.decoder import Decoder
from workbench.models.heads import HeadFile
from workbench.spec.errors import HeadMismatch, OptionError
from workbench.speculative.placement.tree_kv import Fed, TreeKV

PREFIX = "streams."
CARRY, MARKS = f"{PREFIX}carry", f"{PREFIX}marks"
"""Names in a draft model's file."""


@dataclass(frozen=True)
class Streams:
    """f as ``carry`` [H, H] (out, in), P as ``marks`` [S, H], for the last ``layers`` layers."""

    carry: Tensor
    marks: Tensor
    layers: int

    @property
    def count(self) -> int:
        """Streams of a row."""
        return len(self.marks)

    def begin(self, stream: Tensor) -> Tensor:
        """[n, S, H] of what rows [n, H] bring to the first of those layers."""
        return F.linear(stream, self.carry)[:, None] + self.marks


def streams_of(head: HeadFile | None, count: int, decoder: Decoder) -> Streams:
    """The first ``count`` streams of a draft model's file, in its ``decoder``'s precision.

    Raises :class:`OptionError` where there are not so many, :class:`HeadMismatch` where they do not fit.
    """
    again = "'workbench train streams' makes them"
    stored = {} if head is None else head.tensors()
    tensors = decoded({name: value for name, value in stored.items() if name.startswith(PREFIX)})
    if head is None or CARRY not in tensors or MARKS not in tensors:
        raise OptionError(
            f"streams = {count}, but the drafter has none: "
            + ("it is cut out of the model." if head is None else f"{head.path} holds no streams."),
            hint=f"Set streams to 0; {again} for a draft model that was distilled.",
        )
    config = decoder.config
    carry, marks = tensors[CARRY], tensors[MARKS]
    facts = head.facts.get("streams")
    layers = facts.get("layers") if isinstance(facts, dict) else None
    fits = carry.shape == (config.hidden_size,) * 2 and marks.shape[1:] == (config.hidden_size,)
    if not fits or not isinstance(layers, int) or not 1 <= layers <= config.num_layers:
        raise HeadMismatch(f"The streams of {head.path} do not fit its layers.", hint=f"{again} anew.")
    if count > len(marks):
        raise OptionError(
            f"streams = {count}, but {head.path} holds {len(marks)}.", hint=f"Choose 0 to {len(marks)}."
        )
    weights = decoder.weights

    def placed(value: Tensor) -> Tensor:
        return value.to(weights.device, weights.residual_dtype)

    return Streams(placed(carry), placed(marks[:count]), layers)


def passes_of(head: HeadFile | None) -> dict[int, float]:
    """Tokens that a pass added to a draft model's chain, by streams used, as its file tells; empty if it has
    none."""
    facts = head.facts.get("streams") if head is not None else None
    found = facts.get("passes") if isinstance(facts, dict) else None
    if not isinstance(found, dict):
        return {}
    return {int(n): float(made) for n, made in found.items() if str(n).isdigit() and _number(made)}


def _number(value: object) -> bool:
    return isinstance(value, int | float)


class StreamedKV(TreeKV):
    """Rows that logits are asked of have streams, which leave nothing behind."""

    def __init__(self, decoder: Decoder, ids: Tensor | None, streams: Streams) -> None:
        super().__init__(decoder, ids)
        self.streams = streams
        self._below = decoder.config.num_layers - streams.layers

    def weights_nbytes(self) -> int:
        """Bytes of its weights, tables and streams."""
        held = self.streams.carry, self.streams.marks
        return super().weights_nbytes() + sum(t.untyped_storage().nbytes() for t in held)

    def feed(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        sees: Sequence[Sequence[int]],
        asked: int,
    ) -> Fed:
        """As ever, and what the streams of the last ``asked`` rows guess; nothing where positions end."""
        count, n = self.streams.count, len(tokens)
        if max(positions) + count >= self.limit:
            return super().feed(tokens, positions, slots, sees, asked)
        scratch = self.take(asked * count)
        try:
            places, seen = list(positions), [list(s) for s in sees]
            for row in range(n - asked, n):
                first = (row - n + asked) * count
                for j in range(count):
                    places.append(positions[row] + 1 + j)
                    seen.append([*sees[row], *scratch[first : first + j + 1]])
            brought = self._enter(tokens, positions, slots, sees)
            states = torch.cat((brought, self.streams.begin(brought[n - asked :]).flatten(0, 1)))
            attend, at = self._attends(places, [*slots, *scratch], seen)
            rows = torch.arange(n - asked, len(states), device=at.device)
            layers = range(self._below, self.decoder.config.num_layers)
            out = self.decoder.forward(at, at, attend, logits_rows=rows, states=states, layers=layers)
        finally:
            self.give(scratch)
        guessed = out.logits[asked:].view(asked, count, -1).argmax(-1)
        guessed = guessed if self._ids is None else self._ids[guessed]
        return Fed(out.logits[:asked], tuple(map(tuple, guessed.tolist())))

    def _enter(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        sees: Sequence[Sequence[int]],
    ) -> Tensor:
        """What the rows bring to the first layer with streams [T, H]."""
        attend, at = self._attends(positions, slots, sees)
        ids = torch.tensor(tokens, device=at.device)
        if not self._below:
            return self.decoder.embed(ids)
        layers, none = range(self._below), at[:0]
        out = self.decoder.forward(ids, at, attend, logits_rows=none, capture=(self._below,), layers=layers)
        return out.captured[self._below]
