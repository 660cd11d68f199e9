"""Suffix decoding and a trained head together: copy where text repeats, draft where it does not.

Oliaro et al., *SuffixDecoding* (arXiv 2411.04975): each step takes the suffix draft when its score, the
number of tokens that it is expected to have accepted, reaches what the other drafter gets; else that one
drafts. What a head gets is a moving average of what was accepted of its drafts. A copied draft costs no pass
of the head, whose layers catch up with what was committed when they are asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torch import Tensor

from workbench.engine.draft_seams import DraftContext, Drafter, DraftTree
from workbench.models.decoder import Decoder
from workbench.models.weightset import Pack
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative import eagle, eagle3, fasteagle, medusa, suffix

HEADS: dict[str, ModuleType] = {m.SPEC.id: m for m in (eagle3, fasteagle, eagle, medusa)}
AVERAGE = 0.05
"""Weight of the newest draft in the moving average."""


@dataclass(frozen=True)
class Config:
    """Which head, as it is by default, and when copying is preferred."""

    head: str = option("eagle3", choices=tuple(HEADS), help="The head that drafts where nothing repeats.")
    bits: int = option(
        16, unit="bit", choices=(4, 8, 16), help="Bits per weight of a head with layers of its own."
    )
    lead: float = option(
        1.0,
        low=0.0,
        high=16.0,
        step=0.1,
        help="Copy when that is expected to give so many times what the head gives; 0: whenever it can.",
    )


SPEC = TechniqueSpec(
    id="hybrid",
    title="Suffix decoding with a head",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "Drafts what followed earlier where the text repeats, and lets a trained head draft where it does "
        "not: whichever is expected to have more accepted."
    ),
    paper="https://arxiv.org/abs/2411.04975",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter",),
    keeps_kv=True,
    trained=True,
    claims=(
        Claim(
            "ShareGPT 76 to 179, HumanEval 77 to 217, SWE-bench 76 to 302 tokens/s",
            "vLLM 0.8.4 without drafts against suffix decoding with Arctic's speculator, its documentation",
            "https://github.com/snowflakedb/ArcticInference",
        ),
    ),
)


class Hybrid:
    """The ``drafter`` seam of a head, with a suffix drafter before it."""

    name = "hybrid"

    def __init__(self, copying: suffix.SuffixDrafter, head: Any, lead: float) -> None:
        self.copying, self.head, self.lead = copying, head, lead
        self.features: tuple[int, ...] = head.features
        self.kv_layers: int = getattr(head, "kv_layers", 0)
        self.bits: int = getattr(head, "bits", 16)
        self.max_draft = max(copying.max_draft, head.max_draft)
        self.expected = 1.0  # tokens accepted of a draft of the head, moving average
        self._asked: set[int] = set()  # sequences whose last draft was the head's

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Both."""
        return self.copying, self.head

    def decoder(self, target: Decoder, pack: Pack) -> Decoder:
        """The head's layers."""
        made: Decoder = self.head.decoder(target, pack)
        return made

    def attach(self, runner: Any) -> None:
        """How the head runs them."""
        self.head.attach(runner)

    def attach_target(self, target: Decoder) -> None:
        """For a head without layers of its own."""
        if hasattr(self.head, "attach_target"):
            self.head.attach_target(target)

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """A sequence starts, for both."""
        for drafter in self.drafters:
            drafter.begin(seq, tokens)

    def observe(self, seq: int, start: int, features: Sequence[Tensor]) -> None:
        """Streams for the head."""
        self.head.observe(seq, start, features)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """Copies where they promise as much as the head gives, its drafts for the rest, all in one call."""
        out = self.copying.propose(contexts)
        rest = [i for i, tree in enumerate(out) if _score(tree) < self.lead * self.expected]
        self._asked -= {c.seq for c in contexts}
        if rest:
            for i, tree in zip(rest, self.head.propose([contexts[i] for i in rest]), strict=True):
                if tree is not None or out[i] is None:
                    out[i] = tree
                    self._asked.add(contexts[i].seq)
        return out

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """What came of a draft of the head counts for the next choice."""
        for drafter in self.drafters:
            drafter.commit(seq, tokens)
        if seq in self._asked:
            self._asked.discard(seq)
            self.expected += AVERAGE * (len(tokens) - 1 - self.expected)

    def forget(self, seq: int) -> None:
        """The sequence ended, for both."""
        self._asked.discard(seq)
        for drafter in self.drafters:
            drafter.forget(seq)

    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(drafter.nbytes() for drafter in self.drafters)


def _score(tree: DraftTree | None) -> float:
    """Tokens expected to be accepted of a draft: the sum of what it gives the path of each node."""
    if tree is None:
        return -1.0
    paths: list[float] = []
    for chance, parent in zip(tree.confidence, tree.parents, strict=True):
        paths.append(chance * (paths[parent] if parent >= 0 else 1.0))
    return sum(paths)


def bind(config: Config, context: Any) -> Hybrid:
    """Both drafters; raises :class:`MissingHead` or :class:`HeadMismatch` as the head alone would."""
    module = HEADS[config.head]
    chosen = module.Config()
    if hasattr(chosen, "bits"):
        chosen = replace(chosen, bits=config.bits)
    return Hybrid(suffix.bind(suffix.Config()), module.bind(chosen, context), config.lead)
