"""EAGLE: one trained layer predicts the target's next hidden state, and the target's own head the token.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv 2401.15077). The state
is the vector that enters the target's head; beside it the layer reads the embedding of the token that was
sampled from it, which takes the uncertainty out. Its output goes through the target's head, and back in as
the next state. A fixed tree is EAGLE-1's form, a dynamic one EAGLE-2's (arXiv 2406.16858), on the same
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from workbench.models.decoder import Decoder
from workbench.models.feature_decoder import Entrance, FeatureDecoder, Joined
from workbench.models.head_layers import HeadTensors, head_config, head_weights
from workbench.models.heads import HeadFile, find_head
from workbench.models.join import Join
from workbench.models.weightset import Pack
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.feature_head import Drafts, FeatureHead, Net
from workbench.speculative.growth import EAGLE_1, Dynamic, Static
from workbench.speculative.head_facts import drafted_ids, require_weights, shown_layers
from workbench.speculative.head_options import drafted_vocab, head_bits, least_confidence


@dataclass(frozen=True)
class Config:
    """The form of its drafts, how far they go, and from how many tokens they are."""

    tree: str = option(
        "dynamic",
        choices=("chain", "static", "dynamic"),
        help="chain; static: the 25 nodes of EAGLE-1; dynamic: grows where it is confident (EAGLE-2).",
    )
    depth: int = option(4, low=1, high=16, unit="tokens", help="Tokens ahead of a chain or a dynamic tree.")
    width: int = option(4, low=1, high=16, unit="tokens", help="Nodes a dynamic tree expands per level.")
    nodes: int = option(
        16,
        low=1,
        high=64,
        unit="tokens",
        help="Nodes kept of a dynamic tree: the likeliest to be accepted.",
    )
    vocab: int = drafted_vocab()
    confidence: float = least_confidence()
    bits: int = head_bits()
    draws: bool = option(
        True,
        help="Above temperature 0 sample chains, and siblings of the static tree without replacement, and "
        "keep their laws; off: the likeliest tokens, as in a dynamic tree.",
    )


SPEC = TechniqueSpec(
    id="eagle",
    title="EAGLE",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "One trained layer continues the model's last hidden states; the model's own head turns them into "
        "drafts: chains, EAGLE-1's fixed tree or EAGLE-2's dynamic one. Trained by workbench train eagle."
    ),
    paper="https://arxiv.org/abs/2401.15077",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter",),
    keeps_kv=True,
    trained=True,
    claims=(
        Claim(
            "3 times faster decoding, 1.6 times Medusa",
            "a 13B model, greedy, batch 1, two RTX 3090",
            "https://arxiv.org/abs/2401.15077",
        ),
        Claim(
            "3.05 to 4.26 times faster decoding with dynamic trees",
            "EAGLE-2: Vicuna and LLaMA2-Chat models, six tasks, batch 1",
            "https://arxiv.org/abs/2406.16858",
        ),
    ),
)


def build(head: HeadFile, vocab: int, target: Decoder, pack: Pack) -> Net:
    """The head on its target. Raises :class:`HeadMismatch`."""
    require_weights(head, target)
    model = target.config
    config, hidden = head_config(model, 1), model.hidden_size
    tensors = HeadTensors(head.tensors(), str(head.path), target.weights)
    bias = tensors.get("fuse.bias", hidden)
    fuse = pack("fuse", tensors.get("fuse.weight", hidden, 2 * hidden), bias)
    layer = tensors.layer(0, config, pack)
    ids = drafted_ids(tensors, vocab, target)

    def bare(parts: int) -> Join:
        return Join.of((None,) * parts, config.norm_eps, target.weights.numerics)

    def seen(streams: Sequence[Tensor]) -> Tensor:
        return target.final_norm(streams[0])

    weights = head_weights(target, (layer,), None, ids, pack)
    # The released layer has no norm before its attention, and none behind.
    entrance = Entrance.of(Joined(bare(2), fuse, first=bare(1)), tensors.dtype)
    made = FeatureDecoder(config, weights, entrance, normed=False)
    return Net(made, seen, ids)


def bind(config: Config, context: Any) -> FeatureHead:
    """The drafter; raises :class:`MissingHead` or :class:`HeadMismatch`."""
    head = find_head(context.model, "eagle", context.fingerprint)
    features = shown_layers(head, 1, context.config.num_layers)
    if config.tree == "chain":
        drafts = Drafts(config.depth, config.depth, config.draws, confidence=config.confidence)
    elif config.tree == "static":
        grow = partial(Static, form=EAGLE_1, draws=config.draws)
        drafts = Drafts(1 + max(EAGLE_1.heads), len(EAGLE_1), grow=grow)
    else:
        drafts = Drafts(
            config.depth, config.nodes, grow=partial(Dynamic, width=config.width, nodes=config.nodes)
        )

    def made(target: Decoder, pack: Pack) -> Net:
        return build(head, config.vocab, target, pack)

    return FeatureHead("eagle", drafts, features, 1, made, config.bits)
