"""R6, recursive rejection: siblings that were sampled without replacement from one draft law.

EAGLE (arXiv 2401.15077), Jeon et al., *Recursive Speculative Decoding* (arXiv 2402.14160), Yang et al.,
*Multi-Candidate Speculative Decoding* (arXiv 2401.06706). The first sibling is judged by R2; when it is
rejected the target goes on as norm((p - q)₊), and the drafter as q without that sibling, renormalised: the
law that the next sibling was really drawn from. Drawing with replacement wastes siblings on tokens that
were already rejected; without, k siblings are k chances.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.engine.draft_seams import Coin, DraftTree, Sampler, Verdict
from workbench.spec.errors import InvariantError
from workbench.speculative.rules import children, draft_laws, rejection


def recursive(tree: DraftTree, p: Tensor, sample: Sampler, coin: Coin) -> Verdict:
    """R2 along the path, R6 among siblings; arguments and outcome as of :func:`~.rules.rejection`.

    ``tree.q[i]`` is node i's law *given its elder siblings*, as :func:`conditional_laws` makes it. Raises
    :class:`InvariantError` where it still gives an elder sibling a chance: then it is not what it was drawn
    from.
    """
    q = draft_laws(tree, p.shape[1])
    for elder, younger in elders(tree):
        chance = float(q[younger, tree.tokens[elder]])
        if chance > 0:
            raise InvariantError(
                f"{tree.source} says siblings were drawn without replacement, but node {younger}'s law gives "
                f"token {tree.tokens[elder]} of node {elder} {chance:.3g}."
            )
    return rejection(tree, p, sample, coin)


def conditional_laws(law: Tensor, tokens: Sequence[int]) -> Tensor:
    """What each of ``tokens`` was drawn from, one after the other without replacement: [n, V].

    ``law`` [V] is the drafter's. Row i is the law without the tokens before i, renormalised. Raises
    :class:`InvariantError` when a token has no chance left there.
    """
    out = law.expand(len(tokens), -1).clone()
    for i, x in enumerate(tokens):
        out[i, list(tokens[:i])] = 0
        total = out[i].sum()
        if not float(out[i, x]) > 0:
            raise InvariantError(f"Token {x} cannot be draw {i + 1}: its law gives it no chance there.")
        out[i] /= total
    return out


def elders(tree: DraftTree) -> list[tuple[int, int]]:
    """Pairs (elder, younger) of siblings with different tokens."""
    out = []
    for parent in sorted(set(tree.parents)):
        below = children(tree, parent)
        out += [(a, b) for j, b in enumerate(below) for a in below[:j] if tree.tokens[a] != tree.tokens[b]]
    return out


def drawn_without_replacement(tree: DraftTree) -> bool:
    """Whether a sampled tree has siblings, all distinct, whose laws rule out their elders."""
    pairs = elders(tree)
    repeated = len(set(zip(tree.parents, tree.tokens, strict=True))) < len(tree.tokens)
    q = tree.q
    if q is None or not pairs or repeated:
        return False
    return all(
        float(q[younger, tree.tokens[elder]]) == 0
        for elder, younger in pairs
        if tree.tokens[elder] < q.shape[1]
    )
