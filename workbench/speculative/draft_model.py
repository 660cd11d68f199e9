"""Draft model: a smaller model proposes a chain, token by token; the target judges it in one pass.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), and Chen et
al., "Accelerating Large Language Model Decoding with Speculative Sampling" (arXiv 2302.01318). The drafter
is a few layers of the target, distilled from it (``workbench train draft``) or as they are, with the target's
embedding, and their KV are further layers in the target's pages; or it is a second model. Drafts are sampled
from the request's own law with the q of every draw kept (R2), or are the likeliest tokens (R3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from workbench.engine.draft_runner import DraftRunner
from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.models.decoder import Decoder
from workbench.models.heads import HeadFile
from workbench.models.registry import resolve
from workbench.models.weightset import Pack
from workbench.spec.errors import InvariantError, ModelNotFound, OptionError
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.distilled import (
    begun_layers,
    distilled_decoder,
    find_distilled,
    kept_config,
    own_nbytes,
)
from workbench.speculative.drafted_chain import draft_chains
from workbench.speculative.fused.program import FusedChain
from workbench.speculative.head_options import drafted_vocab, head_bits
from workbench.speculative.layer_options import layer_count, layer_source
from workbench.speculative.second_model import SecondModel
from workbench.speculative.sought import Sought, sought
from workbench.speculative.without_effect import refuse_changed


@dataclass(frozen=True)
class Config:
    """Which layers the drafter has, and how far and how it drafts."""

    k: int = option(4, low=1, high=32, unit="tokens", help="Tokens drafted at most per step.")
    source: str = layer_source()
    layers: int = layer_count()
    model: str = option(
        "",
        help="A second model, by name or folder, in place of layers of the target; none when empty. The "
        "target itself, in fewer bits, is often right and seldom quick.",
    )
    across: str = option(
        "shared",
        choices=("shared", "text"),
        help="A second model with other tokens drafts those that both have, or its likeliest text.",
    )
    vocab: int = drafted_vocab()
    bits: int = head_bits()
    draws: bool = option(
        True, help="Sample drafts above temperature 0 and keep their law; off: the likeliest tokens."
    )
    confidence: float = option(
        0.0, low=0.0, high=1.0, help="Draft no further behind a token that was less likely than this."
    )


SPEC = TechniqueSpec(
    id="draft_model",
    title="Draft model",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "A model of a few layers of the target drafts a chain. Distilled from it (workbench train draft) it "
        "is often right; as the layers are, hardly ever: that shows what a draft costs."
    ),
    paper="https://arxiv.org/abs/2211.17192",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter", "fixed_chain"),
    keeps_kv=True,
    claims=(
        Claim(
            "2 to 2.5 times faster decoding without changing the distribution",
            "Chinchilla 70B in a distributed setup, benchmark tasks, K = 4",
            "https://arxiv.org/abs/2302.01318",
        ),
    ),
)


def layers_kept(target: int, layers: int, owner: str = SPEC.id) -> tuple[int, ...]:
    """Numbers of the target's layers that the drafter ``owner`` of ``layers`` has (0: one more than a fifth).

    Raises :class:`OptionError` for as many as the target has.
    """
    layers = layers or max(1, min(target - 1, target // 5 + 1))
    if layers >= target:
        raise OptionError(
            f"{owner}.layers = {layers} is too many: the target has {target}.",
            hint=f"Choose {target - 1} at most." if target > 1 else "Choose another drafter.",
        )
    return (*range(max(1, layers - 1)), *range(target - 1, target))[:layers]


def cut_out(target: Decoder, kept: Sequence[int]) -> Decoder:
    """A decoder of some layers of the target, on the same storages."""
    weights = target.weights
    return Decoder(
        kept_config(target.config, kept), replace(weights, layers=tuple(weights.layers[i] for i in kept))
    )


class ModelDrafter:
    """The ``drafter`` seam for a model of its own; needs a runner before the first draft.

    ``head``: its distilled layers; without, it has layers of the target. ``notes``: what whoever runs it
    should know. Raises :class:`OptionError` when the target has too few layers, :class:`HeadMismatch` for a
    head of another model.
    """

    name = "draft_model"

    def __init__(
        self, config: Config, layers: int, head: HeadFile | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        self.config = config
        self.max_draft = config.k
        self.bits = config.bits if head is not None else 16  # of weights of its own
        self._head = head
        self._notes = notes
        self._kept = layers_kept(layers, config.layers) if head is None else begun_layers(head, layers)
        self._ids: Tensor | None = None
        self._runner: DraftRunner | None = None
        self._own = 0

    @property
    def kv_layers(self) -> int:
        """KV layers it keeps in the pages."""
        return len(self._kept)

    def decoder(self, target: Decoder, pack: Pack) -> Decoder:
        """Its model: distilled layers packed now, or some of the target's that are packed already.

        Raises :class:`HeadMismatch` for layers that were distilled from other weights.
        """
        if self._head is None:
            made = cut_out(target, self._kept)
            self._own = made.table_nbytes
        else:
            made, self._ids = distilled_decoder(self._head, self.config.vocab, target, pack)
            self._own = own_nbytes(made, target)
        return made

    def attach(self, runner: DraftRunner) -> None:
        """How it runs its model."""
        self._runner = runner

    @property
    def chain_obstacle(self) -> str:
        """Why its drafts are no chains of one length, as a remedy; empty where they are."""
        if self.config.confidence:
            return "Set confidence to 0: all chains of the program are of one length."
        return ""

    def fused_chain(self) -> FusedChain:
        """What a round is made of that is one program."""
        if self._runner is None:
            raise InvariantError("draft_model drafts before it has a runner.")
        decoder = self._runner.executor.decoder
        return FusedChain(self.name, decoder, self.config.k, self.config.draws, self._ids)

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """Nothing of its own to begin: the runner knows what is written."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """Chains of at most ``min(k, room)`` tokens, all sequences together, one pass per depth."""
        if self._runner is None:
            raise InvariantError("draft_model drafts before it has a runner.")
        return draft_chains(contexts, self._runner, self.config, self.name, self._ids)

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """The runner is told by the engine."""

    def forget(self, seq: int) -> None:
        """Nothing of its own to forget."""

    def warnings(self) -> tuple[str, ...]:
        """What was found when it was made; said once."""
        notes, self._notes = self._notes, ()
        return notes

    def nbytes(self) -> int:
        """Bytes beside the target's weights: layers of its own, tables; its KV is counted with the pages."""
        return self._own


def distilled_head(
    owner: str, source: str, layers: int, context: Any
) -> tuple[HeadFile | None, tuple[str, ...]]:
    """Distilled layers, as far as they are asked for: ``auto`` does where no number of layers is given.

    With them what is to be said where it goes without a file that is there. Raises :class:`OptionError` for
    ``layers`` beside them, and :class:`MissingHead` or :class:`HeadMismatch` where they are insisted on.
    """
    if source == "cut" or (source == "auto" and layers):
        return None, ()
    if layers:
        raise OptionError(
            f"{owner}.layers = {layers} counts layers that are cut out of the model.",
            hint="Leave it at 0, or set source to cut.",
        )
    asked = context.model, context.fingerprint, context.config.num_layers
    head = Sought(find_distilled(*asked)) if source == "trained" else sought(lambda: find_distilled(*asked))
    instead = f"{owner} drafts with layers of the model as they are, not with distilled ones. {head.trouble}"
    return head.found, (instead,) if head.trouble else ()


def _second(config: Config, context: Any) -> SecondModel:
    """A second model. Raises :class:`OptionError` when there is none, or for options of layers beside it."""
    of_layers = ("source", "layers", "vocab")
    other = f"it is for layers of the model itself, and {config.model!r} is another"
    refuse_changed(SPEC.id, config, of_layers, other, "model empty")
    try:
        resolve(config.model)
    except ModelNotFound as error:
        raise OptionError(f"draft_model.model: {error.message}", hint=error.hint) from None
    return SecondModel(config, context.model)


def bind(config: Config, context: Any) -> ModelDrafter | SecondModel:
    """The drafter; raises :class:`OptionError` when the model has too few layers, the second one is none or
    an option that was set has no effect, and where distilled layers are insisted on :class:`MissingHead` or
    :class:`HeadMismatch`."""
    if config.model:
        return _second(config, context)
    refuse_changed(SPEC.id, config, ("across",), "it is for a second model", "name one in model")
    head, notes = distilled_head(SPEC.id, config.source, config.layers, context)
    # Distilled layers that are not there are told of; these were not wanted.
    if head is None and (config.source == "cut" or config.layers):
        cut = "layers that are cut out of the model have its weights and draft any of its tokens"
        refuse_changed(SPEC.id, config, ("vocab", "bits"), cut, "draft with distilled layers")
    return ModelDrafter(config, context.config.num_layers, head, notes)
