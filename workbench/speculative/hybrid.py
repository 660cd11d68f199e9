"""Suffix decoding and a trained head together: copy where text repeats, draft where it does not.

Oliaro et al., *SuffixDecoding* (arXiv 2411.04975): each step takes the suffix draft when its score, the
number of tokens that it is expected to have accepted, reaches what the other drafter gets; else that one
drafts. What a head gets is a moving average of what was accepted of its drafts; the score, made of counts, is
held against what came of earlier copies in the same way. A copied draft costs no pass of the head, whose
layers catch up with what was committed when they are asked again: the choice weighs tokens per time.
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
from workbench.speculative.head_options import least_confidence
from workbench.speculative.paths import along_paths
from workbench.speculative.without_effect import refuse_changed

HEADS: dict[str, ModuleType] = {m.SPEC.id: m for m in (eagle3, fasteagle, eagle, medusa)}
AVERAGE = 0.05
"""Weight of the newest draft in the moving averages."""


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
        help="Copy when that is expected to give so many times the tokens per time; 0: whenever it can.",
    )
    cost: float = option(
        0.1, low=0.0, high=4.0, step=0.01, unit="target steps", help="What a draft of the head takes."
    )
    depth: int = option(0, low=0, high=16, unit="tokens", help="Tokens the head drafts ahead; 0: its own.")
    confidence: float = least_confidence()


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

    def __init__(self, copying: suffix.SuffixDrafter, head: Any, lead: float, cost: float = 0.0) -> None:
        self.copying, self.head, self.lead, self.cost = copying, head, lead, cost
        self.features: tuple[int, ...] = head.features
        self.kv_layers: int = getattr(head, "kv_layers", 0)
        self.bits: int = getattr(head, "bits", 16)
        self.max_draft = max(copying.max_draft, head.max_draft)
        self.expected = 1.0  # tokens accepted of a draft of the head, moving average
        self.came = self.scored = 1.0  # tokens accepted of copies, and their scores, moving averages
        self._asked: dict[int, float | None] = {}  # by sequence: score of its last draft, None: the head's

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

    def fork(self, seq: int, child: int) -> None:
        """The head's."""
        self.head.fork(seq, child)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """Copies where they promise as much as the head gives, its drafts for the rest, all in one call."""
        out = self.copying.propose(contexts)
        scores = [_score(tree) for tree in out]
        rest = [i for i, tree in enumerate(out) if tree is None or not self._copied(scores[i])]
        for context, tree, score in zip(contexts, out, scores, strict=True):
            self._asked.pop(context.seq, None)
            if tree is not None:
                self._asked[context.seq] = score
        if rest:
            for i, tree in zip(rest, self.head.propose([contexts[i] for i in rest]), strict=True):
                if tree is not None:  # else a copy, if there is one
                    out[i] = tree
                    self._asked[contexts[i].seq] = None
        return out

    def _copied(self, score: float) -> bool:
        """Whether a copy of this score is expected to give more tokens per time than the head."""
        copied = (1 + score * self.came / self.scored) * (1 + self.cost)
        return copied >= self.lead * (1 + self.expected)

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """What came of a draft counts for the next choice."""
        for drafter in self.drafters:
            drafter.commit(seq, tokens)
        if seq not in self._asked:
            return
        score, came = self._asked.pop(seq), len(tokens) - 1
        if score is None:
            self.expected += AVERAGE * (came - self.expected)
        else:
            self.came += AVERAGE * (came - self.came)
            self.scored += AVERAGE * (score - self.scored)

    def forget(self, seq: int) -> None:
        """The sequence ended, for both."""
        self._asked.pop(seq, None)
        for drafter in self.drafters:
            drafter.forget(seq)

    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(drafter.nbytes() for drafter in self.drafters)


def _score(tree: DraftTree | None) -> float:
    """Tokens expected to be accepted of a draft: the sum of what it gives the path of each node."""
    return 0.0 if tree is None else sum(along_paths(tree.confidence, tree.parents))


def bind(config: Config, context: Any) -> Hybrid:
    """Both drafters; raises :class:`MissingHead` or :class:`HeadMismatch` as the head alone would, and
    :class:`OptionError` for an option that the head lacks."""
    module = HEADS[config.head]
    chosen = module.Config()
    asked = {"bits": config.bits, "confidence": config.confidence}
    if config.depth:
        asked["depth"] = config.depth
    lacking = [n for n in ("bits", "depth", "confidence") if not hasattr(chosen, n)]
    refuse_changed(SPEC.id, config, lacking, f"{config.head} has none", "choose another head")
    if module is eagle:
        refuse_changed(SPEC.id, config, ("confidence",), "eagle drafts trees", "choose another head")
    chosen = replace(chosen, **{n: v for n, v in asked.items() if n not in lacking})
    return Hybrid(suffix.bind(suffix.Config()), module.bind(chosen, context), config.lead, config.cost)
