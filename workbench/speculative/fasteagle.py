"""FastEagle: a cascade of layers drafts every position in one pass.

Huang et al., "FastEagle: Cascaded Drafting for Accelerating Speculative Decoding" (arXiv 2509.20416). Where
EAGLE runs one layer again and again, N layers of their own follow one another: layer i's output goes through
the target's head and proposes the i-th token ahead. Depth takes the place of time, so a round has one draft
pass, and no position knows what was drafted before it: deep positions are less often right. Every layer keeps
K and V of committed tokens. Reads what EAGLE-3 reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.models.decoder import Decoder
from workbench.models.feature_decoder import Entrance, FeatureDecoder
from workbench.models.head_layers import HeadTensors, head_config, head_weights
from workbench.models.heads import HeadFile, find_head
from workbench.models.weightset import Pack
from workbench.spec.errors import HeadMismatch
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.backbone import backbone
from workbench.speculative.feature_head import Chain, Drafts, FeatureHead, Net
from workbench.speculative.head_facts import drafted_ids, require_weights, shown_layers
from workbench.speculative.head_options import drafted_vocab, drawn_chains, head_bits, least_confidence

MOST_LAYERS = 32


@dataclass(frozen=True)
class Config:
    """How far and how wide it drafts, and from how many tokens."""

    depth: int = option(
        0,
        low=0,
        high=MOST_LAYERS,
        unit="tokens",
        help="Tokens ahead, one per layer; 0: as many as it has layers.",
    )
    width: int = option(
        1,
        low=1,
        high=16,
        unit="tokens",
        help="Candidates per position: the first goes on, others are leaves.",
    )
    vocab: int = drafted_vocab()
    confidence: float = least_confidence()
    bits: int = head_bits()
    draws: bool = drawn_chains()


SPEC = TechniqueSpec(
    id="fasteagle",
    title="FastEagle",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "A cascade of trained layers drafts all positions in a single pass, one per layer, as a chain or "
        "with side leaves. A head is trained for one model: workbench train fasteagle."
    ),
    paper="https://arxiv.org/abs/2509.20416",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter",),
    keeps_kv=True,
    trained=True,
    claims=(
        Claim(
            "faster than EAGLE-3, greedy and sampled",
            "Vicuna-13B, Llama-3.x and DeepSeek-R1-Distill on five tasks",
            "https://arxiv.org/abs/2509.20416",
        ),
    ),
)


class FastEagle(FeatureHead):
    """The ``drafter`` seam: one pass per round."""

    def __init__(
        self, config: Config, drafts: Drafts, features: tuple[int, ...], layers: int, head: HeadFile
    ) -> None:
        super().__init__("fasteagle", drafts, features, layers, self._made, config.bits)
        self.width = config.width
        self.passes = 0  # draft passes, for whoever counts them
        self._head, self._vocab = head, config.vocab
        self._norms = torch.empty(0)
        self._logits: Any = None

    def _made(self, target: Decoder, pack: Pack) -> Net:
        """The cascade on its target. Raises :class:`HeadMismatch`."""
        require_weights(self._head, target)
        model, weights = target.config, target.weights
        config, hidden = head_config(model, self.kv_layers), model.hidden_size
        tensors = HeadTensors(self._head.tensors(), str(self._head.path), weights)
        whole = tensors.get("fuse.weight", hidden, 4 * hidden)  # of streams and embedding, side by side
        of_streams = pack("fuse.streams", whole[:, : 3 * hidden].contiguous(), None)
        of_embedding = pack("fuse.embedding", whole[:, 3 * hidden :].contiguous(), None)
        norms = [tensors.gain(g, config, weights.numerics) for g in tensors.wide("fuse.norms", 4, hidden)]
        layers = tuple(tensors.layer(i, config, pack) for i in range(self.kv_layers))
        ids = drafted_ids(tensors, self._vocab, target)
        outs = [
            tensors.gain(g, config, weights.numerics) for g in tensors.wide("norms", self.kv_layers, hidden)
        ]

        def fused(streams: Sequence[Tensor]) -> Tensor:
            normed = [norm(s) for norm, s in zip(norms, streams, strict=False)]
            return of_streams(torch.cat(normed, -1)).to(tensors.dtype)

        def stream(embedded: Tensor, states: Tensor) -> Tensor:
            return states + of_embedding(norms[3](embedded)).to(tensors.dtype)

        entrance = Entrance(stream, held=(of_streams, of_embedding))
        made = FeatureDecoder(config, head_weights(target, layers, None, ids, pack), entrance, normed=False)

        def logits(streams: Tensor) -> Tensor:
            rows = [norm(streams[:, i]) for i, norm in enumerate(outs[: self.drafts.depth])]
            found = made.logits(torch.stack(rows, 1).flatten(0, 1))
            return found.view(len(streams), self.drafts.depth, -1)

        self._logits = logits
        return Net(made, fused, ids)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """All positions of all sequences in one pass."""
        out: list[DraftTree | None] = [None] * len(contexts)
        asked = [i for i, c in enumerate(contexts) if c.room > 0 and c.law is not None]
        if not asked:
            return out
        net, runner = self._parts()
        streams = torch.stack(runner.levels([contexts[i].seq for i in asked]))
        self.passes += 1
        for i, logits in zip(asked, self._logits(streams), strict=True):
            out[i] = self._tree(contexts[i], logits, net.ids)
        return out

    def _tree(self, context: DraftContext, logits: Tensor, ids: Tensor | None) -> DraftTree | None:
        if self.width > 1:
            return backbone(context, logits, self.width, ids, self.name)
        chain = Chain()
        for row in logits:
            if not self._extend(context, row, chain, ids):
                break
        return chain.tree(self.name)


def bind(config: Config, context: Any) -> FastEagle:
    """The drafter; raises :class:`MissingHead` or :class:`HeadMismatch`."""
    head = find_head(context.model, "fasteagle", context.fingerprint)
    features = shown_layers(head, 3, context.config.num_layers)
    layers = head.facts.get("layers")
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise HeadMismatch(f"The head {head.path} has {layers!r} layers.", hint="Train it again.")
    depth = min(config.depth or layers, layers)
    drafts = Drafts(depth, depth * config.width, config.draws, confidence=config.confidence)
    return FastEagle(config, drafts, features, layers, head)
