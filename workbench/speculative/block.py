"""R5, block verification: a sampled chain is judged as a whole, and at least as much of it is kept as by R2.

Sun et al., *Block Verification Accelerates Speculative Decoding* (arXiv 2403.10444, algorithm 2). R2 stops at
the first token whose coin fails; here a weak token may still be carried by strong ones behind it, because
P(at least i tokens are kept) is the largest it can be for an exact rule: P_i = min(1, P_{i-1} p(x_i)/q(x_i)).
The paper's example (p = 1/3, 2/3; q = 2/3, 1/3; two drafts) keeps 11/9 tokens on average, R2 10/9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.engine.draft_seams import Coin, DraftTree, Sampler, Verdict
from workbench.spec.errors import InvariantError
from workbench.speculative.rules import check, draft_laws, drawn_chance, residual


def block(tree: DraftTree, p: Tensor, sample: Sampler, coin: Coin) -> Verdict:
    """Keep the longest prefix i whose own coin is below h_i, then draw from norm((P_i p - q)₊).

    ``p`` [n+1, V] the processed laws, ``tree.q`` [n, V'] the law each token was really drawn from. With
    S_i = Σ (P_i p - q)₊ over the vocabulary at the place behind i tokens: h_i = S_i / (S_i + 1 - P_i) for
    i < n, h_n = P_n. Where p = q and P_i = 1 this is 0/0: then the tokens behind i are kept with certainty,
    and any h_i will do. Raises :class:`InvariantError` for a tree with siblings and for a token that its law
    cannot give.

    ``expected`` is Σ min(p, q) at each place up to the first token that was not kept, as under R2.
    """
    check(tree, p.shape[0], p.shape[1])
    if not tree.is_chain:
        raise InvariantError(f"{tree.source} drafted a tree with branches; block verification judges chains.")
    q = draft_laws(tree, p.shape[1]).to(p)
    n, kept = len(tree.tokens), 0
    reach = [1.0, *reach_chances(tree, p)]
    for i in range(n):
        if coin(i, 0) < (_chance(reach[i + 1], p[i + 1], q[i + 1]) if i + 1 < n else reach[n]):
            kept = i + 1
    expected = tuple(float(torch.minimum(p[i], q[i]).sum()) for i in range(min(kept + 1, n)))
    law = p[n] if kept == n else residual(p[kept], q[kept], reach[kept])
    return Verdict(tuple(range(kept)), sample(law, kept), kept < n, expected)


def reach_chances(tree: DraftTree, p: Tensor) -> list[float]:
    """P_1 … P_n of a chain: the chance that at least i of its tokens are kept, given the tokens.

    Their mean over drafts is the survival by position, and 1 + their sum the expected length of a step.
    """
    q = draft_laws(tree, p.shape[1]).to(p)
    out, last = [], 1.0
    for i, x in enumerate(tree.tokens):
        last = min(1.0, last * float(p[i, x]) / drawn_chance(tree, q, i))
        out.append(last)
    return out


def _chance(reach: float, p: Tensor, q: Tensor) -> float:
    left = float((reach * p - q).clamp_min(0).sum())
    whole = left + 1 - reach
    return left / whole if whole > 0 else 1.0
