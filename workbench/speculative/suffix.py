"""Suffix decoding: draft what most often followed the current suffix, here and in earlier outputs.

Oliaro et al., *SuffixDecoding* (arXiv 2411.04975); scores and defaults as in Arctic Inference and vLLM. For
every length at which the end of the sequence occurred before, the draft follows the likeliest continuation
by counts until its probability falls below a bar, or it is ``factor`` times as long as the match: long
matches are trusted further. The draft with the largest sum of probabilities, its expected accepted length,
wins; so where nothing repeats next to nothing is drafted. Deterministic: judged by R1 or R3, exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.spec.errors import InvariantError
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.occurrences import Occurrences


@dataclass(frozen=True)
class Config:
    """Options of ``suffix``; length, depth, factor and bar are vLLM's by default."""

    k: int = option(32, low=1, high=64, unit="tokens", help="Tokens drafted at most per step.")
    depth: int = option(24, low=1, high=128, unit="tokens", help="Longest suffix that is matched.")
    factor: float = option(
        1.0, low=0.0, high=8.0, step=0.1, help="Drafted tokens per matched token, at most."
    )
    offset: float = option(0.0, low=-8.0, high=32.0, step=0.5, help="Drafted tokens on top of that.")
    min_prob: float = option(
        0.1, low=0.0, high=1.0, step=0.05, help="A draft ends where its probability falls below this."
    )
    tree: bool = option(False, help="Draft a tree of the likeliest continuations instead of one chain.")
    past_tokens: int = option(
        65536,
        low=0,
        high=1 << 24,
        unit="tokens",
        help="Tokens of earlier outputs that are kept for all requests, oldest dropped first; 0 for none.",
    )


SPEC = TechniqueSpec(
    id="suffix",
    title="Suffix decoding",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary="Drafts the likeliest continuation of suffixes that occurred before, in this request or in "
    "earlier outputs; the longer the match, the longer the draft.",
    paper="https://arxiv.org/abs/2411.04975",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter",),
    claims=(
        Claim(
            "ShareGPT 76 to 113, HumanEval 77 to 148, SWE-bench 76 to 286 tokens/s",
            "vLLM 0.8.4 without drafts against suffix decoding, documentation of Arctic Inference",
            "https://github.com/snowflakedb/ArcticInference",
        ),
    ),
)


@dataclass(frozen=True)
class Proposal:
    """A draft with its score, the sum of ``probs``: the expected number of accepted tokens."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()
    matched: int = 0

    @property
    def score(self) -> float:
        """Expected number of accepted tokens, if what follows is drawn as often as it was."""
        return sum(self.probs)


def propose(seen: Occurrences, suffix: Sequence[int], config: Config, room: int, here: int = 0) -> Proposal:
    """The best draft over all matched lengths; of equal scores the longer match wins. Empty without one.

    The suffix itself counts as an occurrence: ``here`` is 1 when it is not among those ``seen``. So what
    followed once is expected with probability 1/2, what followed n times with n / (n + 1).
    """
    grow = grow_tree if config.tree else grow_chain
    best = Proposal()
    for matched, ends in seen.nodes(suffix, config.depth):
        most = min(room, config.k, int(matched * config.factor + config.offset + 1e-6))
        if most > 0:
            draft = grow(seen, ends, most, config.min_prob, len(ends) / (len(ends) + here))
            if draft.tokens and not _below(draft.score, best.score):
                best = Proposal(draft.tokens, draft.parents, draft.probs, matched)
    return best


def grow_chain(seen: Occurrences, ends: list[int], most: int, min_prob: float, prob: float = 1.0) -> Proposal:
    """Follow the most frequent child, of equals the one seen last, while the path's probability lasts.

    A step multiplies ``prob`` with child count / node count. A node also counts where its string ends a text.
    """
    tokens: list[int] = []
    probs: list[float] = []
    while len(tokens) < most and not _below(prob, min_prob):
        if len(ends) == 1:  # no choice is left
            rest = seen.copy(ends[0], most - len(tokens))
            tokens += rest
            probs += [prob] * len(rest)
            break
        below = seen.followers(ends)
        if not below:
            break
        token, behind = max(below.items(), key=lambda item: (len(item[1]), item[1][-1]))
        prob *= len(behind) / len(ends)
        if _below(prob, min_prob):
            break
        tokens.append(token)
        probs.append(prob)
        ends = behind
    return Proposal(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(probs))


def _below(prob: float, bar: float) -> bool:
    """Whether a product of counts is below a bar; rounding alone does not put it there."""
    return prob < bar * (1 - 1e-9)


def grow_tree(seen: Occurrences, ends: list[int], most: int, min_prob: float, prob: float = 1.0) -> Proposal:
    """The ``most`` likeliest nodes below a node, best first; a child is never likelier than its parent."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    waiting: list[tuple[float, int, int, int, list[int]]] = []

    def push(prob: float, node: int, places: list[int]) -> None:
        for token, behind in seen.followers(places).items():
            chance = prob * len(behind) / len(places)
            if not _below(chance, min_prob):
                heapq.heappush(waiting, (-chance, -behind[-1], node, token, behind))

    push(prob, -1, ends)
    while waiting and len(tokens) < most:
        chance, _, parent, token, behind = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        probs.append(-chance)
        push(-chance, len(tokens) - 1, behind)
    return Proposal(tuple(tokens), tuple(parents), tuple(probs))


class SuffixDrafter:
    """The ``drafter`` seam: a text per live sequence, and one of earlier outputs for all of them.

    A draft from earlier outputs names its source ``suffix:past``. Requests share nothing but speed.
    """

    name = "suffix"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.max_draft = config.k
        self._own: dict[int, Occurrences] = {}
        self._said: dict[int, list[int]] = {}
        self._past = Occurrences()

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """Enter the prompt, or after a preemption everything committed, from scratch."""
        own = self._own[seq] = Occurrences()
        own.extend(tokens)
        self._said[seq] = list(tokens[-1:])

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """A chain, or a tree, of at most ``room`` ids per context, None where nothing likely follows."""
        return [self._one(c) for c in contexts]

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Enter what the step committed."""
        self._of(seq).extend(tokens)
        self._said[seq] += tokens

    def forget(self, seq: int) -> None:
        """Free the sequence's text; what it said since it began joins the earlier outputs."""
        if self._own.pop(seq, None) is None:
            return
        said = self._said.pop(seq)[-self.config.past_tokens :] if self.config.past_tokens else []
        if len(said) < 2:
            return
        self._past.extend(said)
        self._past.close()
        while len(self._past) > self.config.past_tokens + 1:
            self._past.forget_oldest()

    def nbytes(self) -> int:
        """Bytes of all texts and their places."""
        return self._past.nbytes() + sum(own.nbytes() for own in self._own.values())

    def _one(self, context: DraftContext) -> DraftTree | None:
        own = self._of(context.seq)
        if len(own) != len(context.tokens):
            seen = f"{len(own)} of {len(context.tokens)} committed ids"
            raise InvariantError(f"suffix has seen {seen} of sequence {context.seq}.")
        suffix = context.tokens[-self.config.depth :]
        draft, source = propose(own, suffix, self.config, context.room), self.name
        past = propose(self._past, suffix, self.config, context.room, here=1)
        if past.score > draft.score:
            draft, source = past, f"{self.name}:past"
        if not draft.tokens:
            return None
        paths = (*draft.probs, 1.0)  # index -1: the root
        own_chances = tuple(p / paths[parent] for p, parent in zip(draft.probs, draft.parents, strict=True))
        return DraftTree(draft.tokens, draft.parents, source, confidence=own_chances)

    def _of(self, seq: int) -> Occurrences:
        if seq not in self._own:
            raise InvariantError(f"suffix was never told that sequence {seq} began.")
        return self._own[seq]


def bind(config: Config, context: Any = None) -> SuffixDrafter:
    """The drafter; nothing of the engine's context is needed."""
    return SuffixDrafter(config)
