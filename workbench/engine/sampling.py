"""What sampling needs to know of a draft's nodes: their noise, their paths and their masks.

All three follow from the sequence's committed ids and the node's own path, never from the step, the
batch or other branches, so that a drafted token is judged exactly as if its path had been committed.
Tokens have the noise of their position, coins and drafts that of their place in the round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from workbench.engine.draft_seams import DraftTree
from workbench.engine.noise import Key, Stream, sample, several, uniform
from workbench.engine.seams import LogitsMask
from workbench.spec.errors import MaskError


@dataclass(frozen=True)
class PositionNoise:
    """The noise of one sample of a request: the ``Sampler`` and ``Coin`` that ``Verify`` is given.

    ``index`` is the sample's number; ``start`` the absolute position of the next token, that is the number
    of committed ids. Depth 0 is the token drawn from the root's row.
    """

    seed: int
    index: int
    start: int

    def token(self, law: Tensor, depth: int) -> int:
        """Draw from ``law`` [V] what follows ``depth`` accepted tokens."""
        return sample(law, self.key(depth, Stream.TOKEN))

    def coin(self, depth: int, i: int) -> float:
        """The ``i``-th acceptance coin, in [0, 1), of that place in this round."""
        return uniform(self.key(depth, Stream.COIN), i)

    def draft(self, law: Tensor, depth: int) -> int:
        """What a drafter draws from its ``law`` [V] there: another stream than the target's."""
        return sample(law, self.key(depth, Stream.DRAFT))

    def drafts(self, law: Tensor, depth: int, k: int) -> list[int]:
        """``k`` such draws without replacement, in order; fewer where the law has fewer tokens."""
        return several(law, self.key(depth, Stream.DRAFT), k)

    def key(self, depth: int, stream: Stream) -> Key:
        """Name of that noise: the next round has the same for a token, and fresh coins and drafts."""
        if stream is Stream.TOKEN:
            return Key(self.seed, self.index, self.start + depth)
        return Key(self.seed, self.index, self.start, stream, depth)


def row_paths(tree: DraftTree | None) -> list[tuple[int, ...]]:
    """Drafted ids from the root to each row, its own included: n + 1 rows, the root (no ids) first."""
    out: list[tuple[int, ...]] = [()]
    if tree is not None:
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            out.append((*out[parent + 1], token))
    return out


def row_masks(
    mask: LogitsMask, tree: DraftTree | None, generated: Sequence[int]
) -> tuple[list[Tensor | None], set[int]]:
    """The mask of each row, and the *dead* rows at which nothing is allowed.

    A node that its parent's mask forbids can never be accepted: neither it nor what hangs below it is
    asked about, so a mask is never moved along ids its language lacks. A dead row is an error only once
    the output gets there (:func:`check_alive`): a rejected draft may well run into one.
    """
    parents = (-1, *(p + 1 for p in tree.parents)) if tree is not None else (-1,)
    masks: list[Tensor | None] = []
    closed: set[int] = set()
    dead: set[int] = set()
    for row, (path, parent) in enumerate(zip(row_paths(tree), parents, strict=True)):
        if row and (parent in closed or parent in dead or _forbids(masks[parent], path[-1])):
            closed.add(row)
            masks.append(None)
            continue
        allowed = mask.allowed(generated, path)
        if allowed is not None and not bool(allowed.any()):
            dead.add(row)
            allowed = None
        masks.append(allowed)
    return masks, dead


def within(mask: LogitsMask, tree: DraftTree, generated: Sequence[int]) -> DraftTree:
    """``tree`` without the nodes that ``mask`` forbids, nor what hangs below them.

    Sampled drafts come back as they are: they were drawn within it, and a drawn token may not be dropped.
    """
    if tree.q is not None:
        return tree
    paths, kept = row_paths(tree), {-1}
    masks: dict[int, Tensor | None] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent not in kept:
            continue
        if parent not in masks:
            masks[parent] = mask.allowed(generated, paths[parent + 1])
        if not _forbids(masks[parent], token):
            kept.add(node)
    return _only(tree, kept)


def until_end(tree: DraftTree, ends: Collection[int]) -> DraftTree:
    """``tree`` without what hangs below a node of one of the tokens ``ends``: none of it can be emitted.

    Sampled drafts are cut as well: a drafter may stop because of what it drew, as long as all that it drew is
    judged. Under R2 and R6 nothing above a node depends on what is below it; under R5 the coin of the last
    token makes up for those that are missing. Where only a chain would be left of sampled branches all stays:
    another rule might judge it, because of what was drawn.
    """
    kept = {-1}
    for node, parent in enumerate(tree.parents):
        if parent in kept and (parent < 0 or tree.tokens[parent] not in ends):
            kept.add(node)
    out = _only(tree, kept)
    return tree if out.is_chain and not tree.is_chain and tree.q is not None else out


def _only(tree: DraftTree, kept: Collection[int]) -> DraftTree:
    """``tree`` with those nodes alone; -1, the root, is not one of them."""
    nodes = [n for n in range(len(tree.tokens)) if n in kept]
    if len(nodes) == len(tree.tokens):
        return tree
    place = {-1: -1, **{n: i for i, n in enumerate(nodes)}}
    return replace(
        tree,
        tokens=tuple(tree.tokens[n] for n in nodes),
        parents=tuple(place[tree.parents[n]] for n in nodes),
        q=tree.q[nodes] if tree.q is not None else None,
        confidence=tuple(tree.confidence[n] for n in nodes) if tree.confidence else (),
    )


def check_alive(dead: Collection[int], path: Sequence[int] = ()) -> None:
    """Raise :class:`MaskError` when the root or a node of the accepted ``path`` is a dead row."""
    if any(row in dead for row in (0, *(node + 1 for node in path))):
        raise MaskError(
            "The mask allows no token at all at this position.",
            hint="Let the mask allow an end token where its language ends.",
        )


def _forbids(mask: Tensor | None, token: int) -> bool:
    return mask is not None and not bool(mask[token])
