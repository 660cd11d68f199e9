"""EAGLE-3: one trained layer drafts from the target's hidden states at three depths.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(arXiv 2503.01840). The streams entering an early, a middle and a late layer are fused into one state; the
layer reads it beside the embedding of the token that followed, and what leaves it takes the state's place for
the tokens drafted next, as it did in training. Drafts are trees that grow where the head is confident
(EAGLE-2), or chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench.models.decoder import Decoder
from workbench.models.feature_decoder import Entrance, FeatureDecoder, Joined
from workbench.models.head_layers import HeadTensors, head_config, head_weights
from workbench.models.heads import HeadFile, find_head
from workbench.models.join import Join, joined_linear
from workbench.models.weightset import Pack
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.feature_head import Drafts, FeatureHead, Net
from workbench.speculative.growth import Dynamic
from workbench.speculative.head_facts import drafted_ids, require_weights, shown_layers
from workbench.speculative.head_options import drafted_vocab, drawn_chains, head_bits, least_confidence


@dataclass(frozen=True)
class Config:
    """How far and how wide it drafts, and from how many tokens."""

    depth: int = option(4, low=1, high=16, unit="tokens", help="Tokens drafted ahead.")
    width: int = option(
        1,
        low=1,
        high=16,
        unit="tokens",
        help="Nodes expanded per level of a draft tree; 1: drafts are chains.",
    )
    nodes: int = option(
        16,
        low=1,
        high=64,
        unit="tokens",
        help="Nodes kept of a tree: those likeliest to be accepted; a chain has all of its own.",
    )
    vocab: int = drafted_vocab()
    confidence: float = least_confidence()
    bits: int = head_bits()
    draws: bool = drawn_chains()


SPEC = TechniqueSpec(
    id="eagle3",
    title="EAGLE-3",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "One trained layer reads hidden states from three depths of the model and drafts chains, or trees "
        "that grow where it is confident. A head is trained for one model: workbench train eagle3."
    ),
    paper="https://arxiv.org/abs/2503.01840",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter", "fixed_chain"),
    keeps_kv=True,
    trained=True,
    claims=(
        Claim(
            "up to 6.5 times faster decoding",
            "Vicuna-13B on HumanEval, batch 1, greedy, in the authors' own runtime",
            "https://arxiv.org/abs/2503.01840",
        ),
        Claim(
            "1.38 times the throughput at batch 64",
            "SGLang on an H100, one setup",
            "https://arxiv.org/abs/2503.01840",
        ),
    ),
)


def build(head: HeadFile, vocab: int, target: Decoder, pack: Pack) -> Net:
    """The head on its target. Raises :class:`HeadMismatch`."""
    require_weights(head, target)
    model, weights = target.config, target.weights
    config, hidden = head_config(model, 1), model.hidden_size
    tensors = HeadTensors(head.tensors(), str(head.path), weights)
    fuse = pack("fuse", tensors.get("fuse.weight", hidden, 3 * hidden), None)
    gains = tuple(tensors.wide("fuse.norms", 3, hidden)) if tensors.has("fuse.norms") else (None,) * 3
    fused = joined_linear(Join.of(gains, config.norm_eps, weights.numerics), fuse, tensors.dtype)
    base = "layers.0"
    both = (tensors.wide(f"{base}.{n}_norm.weight", hidden) for n in ("embed", "state"))
    join = Join.of(tuple(both), config.norm_eps, weights.numerics)
    layer = tensors.layer(0, config, pack, width=2 * hidden)
    ids = drafted_ids(tensors, vocab, target)

    entrance = Entrance.of(Joined(join), tensors.dtype, fuse)
    gain = tensors.wide("norm.weight", hidden)
    made = FeatureDecoder(config, head_weights(target, (layer,), gain, ids, pack), entrance)
    return Net(made, lambda streams: fused(*streams), ids)


def bind(config: Config, context: Any) -> FeatureHead:
    """The drafter; raises :class:`MissingHead` or :class:`HeadMismatch`."""
    head = find_head(context.model, "eagle3", context.fingerprint)
    features = shown_layers(head, 3, context.config.num_layers)
    drafts = Drafts(config.depth, config.depth, config.draws, confidence=config.confidence)
    if config.width > 1:
        grow = partial(Dynamic, width=config.width, nodes=config.nodes)
        drafts = Drafts(config.depth, config.nodes, grow=grow)

    def made(target: Decoder, pack: Pack) -> Net:
        return build(head, config.vocab, target, pack)

    return FeatureHead("eagle3", drafts, features, 1, made, config.bits)
