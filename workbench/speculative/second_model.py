"""A model of the registry as drafter: weights, KV and perhaps a vocabulary of its own.

With the target's own vocabulary it drafts as it is. With another, it gives all its chance to the tokens both
have (exact at every temperature: q is the law that was drawn from), or it says its likeliest text, and the
target's tokenizer cuts that into a draft, judged as any copied text is (:mod:`.vocabularies`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.models.tokenizer import load_tokenizer
from workbench.models.weightset import Pack, build_weight_set
from workbench.spec.errors import InvariantError, OptionError
from workbench.speculative.drafted_chain import ChainOptions, draft_chains
from workbench.speculative.own_kv import OwnKV
from workbench.speculative.vocabularies import Vocabularies

NAME = "draft_model"


class SecondOptions(ChainOptions, Protocol):
    """``model``: its name or folder; ``bits`` per weight; ``across``: what it drafts where it has another
    vocabulary."""

    @property
    def model(self) -> str:
        """A name of the registry, or a folder."""
        ...

    @property
    def bits(self) -> int:
        """16, 8 or 4."""
        ...

    @property
    def across(self) -> str:
        """``shared`` or ``text``."""
        ...


def opened(model: str, target: Decoder, pack: Callable[[ModelConfig], Pack]) -> Decoder:
    """The model, in the target's dtype, numerics and place."""
    source, like = open_source(model), target.weights
    held = build_weight_set(source, pack(source.config), like.dtype, like.numerics, device=like.device)
    return Decoder(source.config, held)


class SecondModel:
    """The ``drafter`` seam; ``target_model``: the model it drafts for, whose tokenizer it reads."""

    name = NAME
    kv_layers = 0  # in the target's pages

    def __init__(self, config: SecondOptions, target_model: str) -> None:
        self.config = config
        self.max_draft = config.k
        self.bits = config.bits
        self._pack: Callable[[ModelConfig], Pack] | None = None
        self._target_model = target_model
        self._kv: OwnKV | None = None
        self._words: Vocabularies | None = None
        self._ids: Tensor | None = None  # the target's ids of its logits, and where it has them
        self._places = torch.empty(0)
        self._text = False
        self._contexts: dict[int, list[int]] = {}

    def pack_with(self, pack: Callable[[ModelConfig], Pack]) -> None:
        """How its weights are held."""
        self._pack = pack

    def attach_target(self, target: Decoder) -> None:
        """Load it. Raises :class:`ModelError` s, and :class:`OptionError` where the two share no token."""
        words = Vocabularies.of(load_tokenizer(self._target_model), load_tokenizer(self.config.model))
        self._text = self.config.across == "text" and words.relation != "same"
        if words.relation == "disjoint" and not self._text:
            raise OptionError(
                f"{NAME}.model = {self.config.model!r} shares no token with the model it should draft for.",
                hint="Set across to text, or choose a draft model with a vocabulary more alike.",
            )
        if words.relation == "overlapping" and not self._text:
            device = target.weights.device
            self._ids, self._places = words.shared.to(device), words.places.to(device)
        self._words = words
        if self._pack is None:
            raise InvariantError(f"{NAME} does not know how weights are held.")
        self._kv = OwnKV(opened(self.config.model, target, self._pack))

    @property
    def shared(self) -> int | None:
        """Tokens that it drafts from; None: all of its own."""
        return None if self._ids is None else len(self._ids)

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """A sequence starts."""
        words, _ = self._parts()
        self._contexts[seq] = [*words.second.encode(""), *words.translated(tokens)]

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """Chains of at most ``min(k, room)`` tokens; none where its own context would end."""
        _, kv = self._parts()
        out: list[DraftTree | None] = [None] * len(contexts)
        fitting = [
            i
            for i, c in enumerate(contexts)
            if self._contexts[c.seq] and len(self._contexts[c.seq]) + self.config.k < kv.limit
        ]
        chosen = [contexts[i] for i in fitting]
        if self._text:
            made = [self._said(c) for c in chosen]
        else:
            made = draft_chains(chosen, self, self.config, self.name, self._ids)
        for i, tree in zip(fitting, made, strict=True):
            out[i] = tree
        return out

    def feed(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Logits [n, V] behind the committed tokens and, of a draft, the given one that follows."""
        words, kv = self._parts()
        fresh = []
        for seq, tokens in rows:
            if tokens:
                fresh.append((seq, words.translated(tokens)))
            else:
                ids = self._contexts[seq]
                fresh.append((seq, ids[kv.keep(seq, ids) :]))
        logits = kv.feed(fresh)
        return logits if self._ids is None else logits.index_select(1, self._places)

    def _said(self, context: DraftContext) -> DraftTree | None:
        """Its likeliest text, in the target's tokens."""
        words, kv = self._parts()
        most = min(self.config.k, context.room)
        ids = self._contexts[context.seq]
        logits = kv.feed([(context.seq, ids[kv.keep(context.seq, ids) :])])
        said: list[int] = []
        for _ in range(self.config.k):
            said.append(int(logits[0].argmax()))
            if said[-1] in words.second.eos_ids or len(said) == self.config.k:
                break
            logits = kv.feed([(context.seq, said[-1:])])
        draft = words.retold(ids, said)[:most]
        return DraftTree.chain(draft, self.name) if draft else None

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Tokens that came."""
        words, _ = self._parts()
        self._contexts[seq] += words.translated(tokens)

    def forget(self, seq: int) -> None:
        """The sequence ended."""
        self._contexts.pop(seq, None)
        self._parts()[1].forget(seq)

    def nbytes(self) -> int:
        """Bytes of its weights, tables and KV."""
        if self._kv is None:
            return 0
        decoder = self._kv.decoder
        return decoder.weights.nbytes() + decoder.table_nbytes + self._kv.nbytes()

    def _parts(self) -> tuple[Vocabularies, OwnKV]:
        if self._words is None or self._kv is None:
            raise InvariantError(f"{NAME} drafts before it has a target.")
        return self._words, self._kv
