"""Native multi-token prediction: a module that was trained with the model drafts what it will say next.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437, section 2.2); GLM-4.5 and its successors ship
one such module. The module's row of token x_s reads [enorm(emb(x_s)), hnorm(h_{s-1})], with h the model's
last state behind its final norm, and predicts x_{s+1} through the model's own head. Further tokens are
drafted by feeding what leaves the module's layer back as the state (recursion), which FastMTP (arXiv
2509.18362) trains for; of several modules each reads the states of the one before, and step j of a draft is
module j mod D's. The module's K and V are a further layer in the target's pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from workbench.models.decoder import Decoder
from workbench.models.feature_decoder import Entrance, FeatureDecoder, Joined
from workbench.models.join import Join
from workbench.models.mtp import MTPWeights, mtp_config, read_mtp
from workbench.models.mtp_chain import ChainDecoder
from workbench.models.norms import Norm, fast_norm, pinned_norm
from workbench.models.registry import open_source
from workbench.models.source import Source
from workbench.models.weightset import Pack
from workbench.spec.errors import HeadMismatch, MissingHead
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.feature_head import Drafts, FeatureHead, Net


@dataclass(frozen=True)
class Config:
    """How far it drafts, and how."""

    k: int = option(
        2, low=1, high=16, unit="tokens", help="Tokens drafted ahead; behind the first by recursion."
    )
    draws: bool = option(
        True, help="Sample drafts above temperature 0 and keep their law; off: the likeliest tokens."
    )


SPEC = TechniqueSpec(
    id="mtp",
    title="Multi-token prediction",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "A module that was trained together with the model, and ships with it, predicts one token further; "
        "fed with its own output it drafts chains. For checkpoints that have one, such as tiny-mtp."
    ),
    paper="https://arxiv.org/abs/2412.19437",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter", "fixed_chain"),
    keeps_kv=True,
    claims=(
        Claim(
            "the second token is accepted 85 to 90% of the time: 1.8 times the tokens per second",
            "DeepSeek-V3 on its authors' topics of evaluation, one token drafted",
            "https://arxiv.org/abs/2412.19437",
        ),
        Claim(
            "2.03 times faster on average",
            "one module trained for recursion of 3 steps, with a compressed vocabulary, on MiMo-7B",
            "https://arxiv.org/abs/2509.18362",
        ),
    ),
)


def build(source: Source, target: Decoder, pack: Pack) -> Net:
    """The modules on their target: they share embedding and head. Raises :class:`HeadMismatch`."""
    weights, config = target.weights, mtp_config(target.config)
    if source.fingerprint != weights.fingerprint:
        raise HeadMismatch(
            "The checkpoint changed since the model was loaded: its module belongs to other weights.",
            hint="Load the model again.",
        )
    modules = [read_mtp(source, k, pack, weights) for k in range(config.num_layers)]
    entrances = [entrance(module, target) for module in modules]
    own = replace(
        weights,
        layers=tuple(module.layer for module in modules),
        final_gain=modules[0].head_gain,
        method="plain",
    )
    if len(modules) == 1:
        made = FeatureDecoder(config, own, entrances[0])
    else:
        norm = _norm_of(target)
        made = ChainDecoder(config, own, entrances, [norm(m.head_gain, config.norm_eps) for m in modules])
    return Net(made, lambda streams: target.final_norm(streams[0]), None)


def entrance(module: MTPWeights, target: Decoder) -> Entrance:
    """eh_proj [enorm(embedding), hnorm(state)], the embedding first."""
    join = Join.of((module.embed_gain, module.state_gain), target.config.norm_eps, target.weights.numerics)
    return Entrance.of(Joined(join, module.project), target.weights.residual_dtype)


def _norm_of(target: Decoder) -> Callable[[Tensor, float], Norm]:
    return pinned_norm if target.weights.numerics == "pinned" else fast_norm


def bind(config: Config, context: Any) -> FeatureHead:
    """The drafter; raises :class:`MissingHead` for a model without a module."""
    model = context.config
    if not model.mtp_modules:
        raise MissingHead(
            f"{context.model or 'This model'} has no module of multi-token prediction.",
            hint="Choose a model that was trained with one, such as tiny-mtp.",
        )

    def made(target: Decoder, pack: Pack) -> Net:
        return build(open_source(context.model), target, pack)

    drafts = Drafts(config.k, config.k, config.draws)
    return FeatureHead("mtp", drafts, (model.num_layers,), model.mtp_modules, made)
