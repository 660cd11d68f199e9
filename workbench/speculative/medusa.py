"""Medusa: small heads on the target's last hidden state propose the tokens behind the next one, all at once.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv
2401.10774). Head k reads z, the normed state that the last committed token was predicted from, and proposes
the k-th token behind it: W_k (z + U_k SiLU(D_k z)). The paper gives every head a vocabulary matrix W_k of its
own that begins as the target's: 85% of a small model for four. Here a head has rows of its own for the tokens
that the model says often, and drafts no other, or else the target's matrix (tied). Rank H/2 has as many
parameters as one H × H matrix, and unlike the paper's z + SiLU(W z), it can take from z as well as add to it
(SiLU is never below -0.28). U_k starts at zero. The candidates form a tree that was counted on held-out text.
Trained with the target frozen (Medusa-1), and exact under R1 and R3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.models.coded_head import decoded
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.heads import HeadFile, find_head
from workbench.models.packed import PackedLinear, held_nbytes
from workbench.models.weightset import HEAD, Pack
from workbench.spec.errors import HeadMismatch, InvariantError, OptionError
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.head_options import head_bits
from workbench.speculative.rank_tree import RankTree, chain, tree_of
from workbench.speculative.without_effect import refuse_changed


@dataclass(frozen=True)
class Config:
    """How much of the tree is drafted, and from how many tokens."""

    nodes: int = option(
        24, low=1, high=64, unit="tokens", help="Nodes of the draft tree: those right most often."
    )
    branches: bool = option(True, help="Draft a tree; off: a chain of each head's likeliest token.")
    vocab: int = option(
        0,
        low=0,
        high=1 << 20,
        unit="tokens",
        help="Draft only tokens that the model says often, so many of them (FR-Spec); 0: all that the heads "
        "have.",
    )
    bits: int = head_bits()


SPEC = TechniqueSpec(
    id="medusa",
    title="Medusa heads",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "Small trained heads on the last hidden state propose the next tokens all at once, as a tree. A head "
        "is trained for one model: workbench train medusa."
    ),
    paper="https://arxiv.org/abs/2401.10774",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter",),
    trained=True,
    claims=(
        Claim(
            "more than 2.2 times faster decoding",
            "Medusa-1 heads, Vicuna-7B, 13B and 33B, batch 1, typical acceptance of a tree of drafts",
            "https://arxiv.org/abs/2401.10774",
        ),
    ),
)


def head_states(z: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """z + U_k SiLU(D_k z) for every head: [B, K, H] of ``z`` [B, H], ``down`` [K, R, H], ``up`` [K, H, R]."""
    heads, rank, _ = down.shape
    inner = F.silu(F.linear(z, down.flatten(0, 1))).unflatten(1, (heads, rank))
    return z[:, None] + torch.einsum("bkr,khr->bkh", inner, up)


class MedusaDrafter:
    """The ``drafter`` seam; needs the target before the first sequence."""

    name = "medusa"

    def __init__(self, config: Config, head: HeadFile, layers: int) -> None:
        self.config = config
        self.features = (layers,)
        self._head = head
        self._tree = _tree(config, head)
        self.max_draft = len(self._tree)
        self._width = 1 + max(self._tree.ranks)
        self._target: Decoder | None = None
        self._down = self._up = torch.empty(0)
        self.bits = config.bits
        self._pack: Callable[[ModelConfig], Pack] | None = None
        self._own: list[PackedLinear] = []  # by head: its own rows of the drafted vocabulary
        self._ids: Tensor | None = None  # drafted vocabulary, and its rows of the head
        self._rows = torch.empty(0)
        self._seen: dict[int, tuple[int, Tensor]] = {}  # position and stream [H] of the newest shown token

    def pack_with(self, pack: Callable[[ModelConfig], Pack]) -> None:
        """How rows of the heads' own are held."""
        self._pack = pack

    def attach_target(self, target: Decoder) -> None:
        """Load the head. Raises :class:`HeadMismatch` for other weights, sizes or vocabulary."""
        weights, config = target.weights, target.config
        if self._head.fingerprint != weights.fingerprint:
            raise HeadMismatch(
                f"The head {self._head.path} was trained for other weights.",
                hint="Train it again for this model: 'workbench train medusa'",
            )
        tensors = decoded(self._head.tensors())
        down, up, ids = _checked(self._head, tensors, config.hidden_size, config.vocab_size)
        used = 1 + max(self._tree.heads)
        if down.shape[0] < used:
            raise HeadMismatch(f"The head {self._head.path} has fewer heads than its tree is deep.")
        self._down, self._up = (
            t[:used].to(weights.device, weights.residual_dtype).clone() for t in (down, up)
        )
        own = tensors.get("rows")
        if own is not None or 0 < self.config.vocab < config.vocab_size:
            self._ids = ids[: self.config.vocab or None].to(weights.device, torch.int64)
            if own is None:
                self._rows = weights.embed.index_select(0, self._ids)
            else:
                if self._pack is None:
                    raise InvariantError("medusa has no way to hold rows of its own.")
                pack = self._pack(config)
                self._own = [pack(HEAD, rows[: len(self._ids)], None) for rows in own[:used]]
        # A rank needs as many tokens to choose from; a tree without any such rank leaves the likeliest token.
        choice = config.vocab_size if self._ids is None else len(self._ids)
        narrowed = self._tree.among(choice)
        self._tree = narrowed if len(narrowed) else chain(1)
        self._width = 1 + max(self._tree.ranks)
        self._target = target

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """Nothing to begin: what it needs it is shown."""

    def observe(self, seq: int, start: int, features: Sequence[Tensor]) -> None:
        """Only the newest state counts."""
        (stream,) = features
        self._seen[seq] = (start + stream.shape[0] - 1, stream[-1].clone())

    def fork(self, seq: int, child: int) -> None:
        """The newest state is that of both."""
        if seq in self._seen:
            self._seen[child] = self._seen[seq]

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """The first ``room`` nodes of the tree for each sequence that was shown the state before its root."""
        out: list[DraftTree | None] = [None] * len(contexts)
        known = [i for i, c in enumerate(contexts) if c.room > 0 and self._is_current(c)]
        if not known:
            return out
        best = self._candidates(torch.stack([self._seen[contexts[i].seq][1] for i in known])).tolist()
        for i, ids in zip(known, best, strict=True):
            tree = self._tree.first(contexts[i].room)
            tokens = tuple(ids[head][rank] for head, rank in zip(tree.heads, tree.ranks, strict=True))
            out[i] = DraftTree(tokens, tree.parents, self.name)
        return out

    def _is_current(self, context: DraftContext) -> bool:
        """Whether the newest state shown is that of the last token whose K and V are committed."""
        return context.seq in self._seen and self._seen[context.seq][0] == len(context.tokens) - 2

    def _candidates(self, streams: Tensor) -> Tensor:
        """Likeliest tokens [B, K, width] of every head, from streams [B, H]."""
        if self._target is None:
            raise InvariantError("medusa drafts before it has a target.")
        states = head_states(self._target.final_norm(streams), self._down, self._up)
        flat = states.flatten(0, 1)
        if self._ids is None:
            best = self._target.logits(flat).topk(self._width, dim=-1).indices
        else:
            if self._own:
                by_head = states.transpose(0, 1).contiguous()
                rows = torch.stack([say(x) for say, x in zip(self._own, by_head, strict=True)], 1).flatten(
                    0, 1
                )
            else:
                rows = F.linear(flat.to(self._rows.dtype), self._rows)
            best = self._ids[rows.topk(self._width, dim=-1).indices]
        return best.view(*states.shape[:2], -1)

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """The state of what was committed follows, by ``observe``."""

    def forget(self, seq: int) -> None:
        """The sequence ended."""
        self._seen.pop(seq, None)

    def nbytes(self) -> int:
        """Bytes of the heads, the rows of a drafted vocabulary, and the states kept."""
        tensors = [self._down, self._up, self._rows, *(stream for _, stream in self._seen.values())]
        if self._ids is not None:
            tensors.append(self._ids)
        return held_nbytes(self._own, tensors)


def _tree(config: Config, head: HeadFile) -> RankTree:
    try:
        paths = [tuple(int(r) for r in path) for path in head.facts["paths"]]
        tree = tree_of(paths)
        if not paths or min(tree.ranks) < 0 or max(tree.ranks) > 1024 or len(paths) > 1024:
            raise ValueError("its tree is empty or absurd")
        return (
            tree.first(config.nodes)
            if config.branches
            else chain(int(head.facts["heads"])).first(config.nodes)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise HeadMismatch(f"The head {head.path} has no tree: {error}.", hint="Train it again.") from None


def _checked(
    head: HeadFile, tensors: dict[str, Tensor], hidden: int, vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``down``, ``up`` and ``ids`` of sizes that fit the target."""
    try:
        down, up, ids = tensors["down"], tensors["up"], tensors["ids"]
        heads, rank, width = down.shape
        fits = width == hidden and up.shape == (heads, hidden, rank) and ids.ndim == 1 and len(ids) > 0
    except (KeyError, ValueError):
        raise HeadMismatch(f"The head {head.path} lacks tensors.", hint="Train it again.") from None
    rows = tensors.get("rows")
    if rows is not None and rows.shape != (heads, len(ids), width):
        raise HeadMismatch(
            f"The head {head.path} has own rows {tuple(rows.shape)} for {heads} heads and {len(ids)} tokens.",
            hint="Train it again.",
        )
    if not fits:
        raise HeadMismatch(
            f"The head {head.path} is of {width} dimensions; the model has {hidden}.",
            hint="Train one for this model: 'workbench train medusa'",
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise HeadMismatch(
            f"The head {head.path} drafts token {int(ids.max())}; the model has {vocab}.",
            hint="Train one for this model: 'workbench train medusa'",
        )
    return down, up, ids


def bind(config: Config, context: Any) -> MedusaDrafter:
    """The drafter.

    Raises :class:`MissingHead` or :class:`HeadMismatch`, and :class:`OptionError` where a drafted vocabulary
    would need rows of a head that is no embedding.
    """
    model = context.config
    head = find_head(context.model, "medusa", context.fingerprint)
    if config.vocab and not model.tie_embeddings and not head.facts.get("own_rows"):
        raise OptionError(
            f"medusa.vocab = {config.vocab} takes rows of the embedding; the model has a head of its own.",
            hint="Set vocab to 0.",
        )
    if not head.facts.get("own_rows"):
        refuse_changed(SPEC.id, config, ("bits",), "tied heads have no rows", "train some with rows")
    return MedusaDrafter(config, head, model.num_layers)
