"""Verification of drafts, once per step for all sequences: which drafted path is kept, and the next token.

The exact rules of `workbench.speculative.rules`, on chains and trees, with the noise of each position: R1
(greedy), R3/R4 (draw from the row's own law, keep the draft that matches) and R2 (accept x with probability
min(1, p(x) / q(x)), go on with norm((p - q)+); Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318; siblings as in SpecInfer, arXiv 2305.09781). R1 and R3 choose a token for every row in parallel
and then walk; R2 walks with sums over the vocabulary, since what a sibling meets depends on those before it.

R1/R3: bytes of the laws once. R2: per judged node two reads of p and q and, when it is rejected, two more.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workbench.kernels.checks import (
    require,
    require_contiguous,
    require_device,
    require_dtype,
    require_runnable,
    require_shape,
)
from workbench.kernels.decode.noise import TOKEN
from workbench.kernels.decode.sample import Noise, best, draw
from workbench.kernels.decode.verify_kernels import match_kernel, rejection_kernel
from workbench.kernels.layouts.verdict import Drafts, Verdicts
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import InvariantError

_BLOCK = 2048
_MOST_NODES = 128


def reference(
    tokens: list[int], parents: list[int], p: Tensor, coins: list[list[float]], q: Tensor | None = None
) -> tuple[list[int], Tensor]:
    """One sequence, from the definition in float64: the kept path and the law [V] of the token after it.

    ``p`` [n + 1, V]; with ``q`` [n, V] rule R2, without it R3 (q is one-hot); ``coins[depth][i]`` is the coin
    of the i-th sibling there. The kernels share R2's coins; for R3 they draw instead, which has the same law.
    """
    path: list[int] = []
    at = -1
    while True:
        law, hit = p[at + 1].double(), None
        for i, node in enumerate(n for n, parent in enumerate(parents) if parent == at):
            x = tokens[node]
            drawn = torch.zeros_like(law)
            if q is None:
                drawn[x] = 1
            else:
                drawn[: q.shape[1]] = q[node].double()
            if coins[len(path)][i] < float(law[x] / drawn[x]):
                hit = node
                break
            left = (law - drawn).clamp_min(0)
            law = left / left.sum() if float(left.sum()) > 0 else law
        if hit is None:
            return path, law
        path.append(hit)
        at = hit


def verify_greedy(drafts: Drafts, scores: Tensor) -> Verdicts:
    """R1: keep drafted tokens while they are the highest score of their row; ``scores`` [R, V], any float."""
    _check(drafts, scores, "scores")
    return _walk(drafts, best(scores), None)


def verify_match(drafts: Drafts, p: Tensor, noise: Noise) -> Verdicts:
    """R3 for deterministic drafts, R4 for any: draw from each row's law, keep the draft while it is that.

    ``p`` float32 [R, V] the processed law of each row; ``noise`` per sequence, at the position of the token
    after the root. The token chosen at every place is the one a plain run draws there.
    """
    _check(drafts, p, "p")
    require_dtype("p", p, (torch.float32,))
    return _walk(drafts, draw(p, _of_rows(drafts, noise), TOKEN), p)


def verify_rejection(drafts: Drafts, p: Tensor, q: Tensor, noise: Noise, *, check: bool = True) -> Verdicts:
    """R2 for sampled drafts: ``q`` float32 [N, V'] is the law each node was really drawn from, V' <= V.

    With ``check`` a token that its own q cannot have drawn raises ``InvariantError``, as the torch rule does.
    Other arguments as in :func:`verify_match`.
    """
    _check(drafts, p, "p")
    for name, x in (("p", p), ("q", q)):
        require_dtype(name, x, (torch.float32,))
        require_contiguous(name, x)
    nodes, sequences, vocabulary = len(drafts.tokens), len(drafts.first) - 1, p.shape[1]
    require_shape("q", q, (nodes, q.shape[-1]))
    require(q.shape[1] <= vocabulary, f"q has {q.shape[1]} ids, the target {vocabulary}.", "Map them first.")
    require_device(p, q=q)
    _check_noise(noise, sequences, p)
    out, status = _empty(drafts, p.device), torch.zeros(sequences, dtype=torch.int32, device=p.device)
    if not sequences:
        return out
    rest = torch.empty((sequences, vocabulary), dtype=torch.float32, device=p.device)
    rejection_kernel[(sequences,)](
        out.path, out.length, out.corrected, out.expected, out.tried, status, rest, p, q, drafts.tokens,
        drafts.parents, drafts.first, noise.seed, noise.sample, noise.position, vocabulary, q.shape[1],
        NP=out.path.shape[1], BV=min(_BLOCK, max(16, triton.next_power_of_2(vocabulary))), num_warps=8,
    )  # fmt: skip
    if check and bool(status.any()):
        b = int(status.cpu().nonzero()[0])
        raise InvariantError(
            f"Node {int(status[b]) - 1} of sequence {b} has a token that its own law q gives no chance.",
            hint="Give the law each token was really drawn from, filters included.",
        )
    there = Noise(noise.seed, noise.sample, noise.position + out.length)
    return Verdicts(out.path, out.length, draw(rest, there, TOKEN), out.corrected, out.expected, out.tried)


def _of_rows(drafts: Drafts, noise: Noise) -> Noise:
    """The noise of every row: its sequence's, ``depth`` positions on."""
    _check_noise(noise, len(drafts.first) - 1, drafts.tokens)
    seed, index, position = (x[drafts.owner] for x in (noise.seed, noise.sample, noise.position))
    return Noise(seed, index, position + drafts.depth)


def _check_noise(noise: Noise, sequences: int, like: Tensor) -> None:
    for name, x in vars(noise).items():
        require_dtype(name, x, (torch.int64,))
        require_shape(name, x, (sequences,))
    require_device(like, **vars(noise))


def _empty(drafts: Drafts, device: torch.device) -> Verdicts:
    sequences, width = len(drafts.first) - 1, max(16, triton.next_power_of_2(drafts.most))
    whole = [torch.zeros(sequences, dtype=torch.int32, device=device) for _ in range(3)]
    path = torch.empty((sequences, width), dtype=torch.int32, device=device)
    expected = torch.zeros((sequences, width), dtype=torch.float64, device=device)
    token = torch.empty(sequences, dtype=torch.int64, device=device)
    return Verdicts(path, whole[0], token, whole[1], expected, whole[2])


def _walk(drafts: Drafts, ids: Tensor, p: Tensor | None) -> Verdicts:
    out = _empty(drafts, ids.device)
    if len(out.length):
        match_kernel[(len(out.length),)](
            out.path, out.length, out.corrected, out.expected, out.tried, out.token, ids, p, drafts.tokens,
            drafts.parents, drafts.first, 0 if p is None else p.stride(0),
            NP=out.path.shape[1], LAW=p is not None, num_warps=max(1, out.path.shape[1] // 32),
        )  # fmt: skip
    return out


def _check(drafts: Drafts, x: Tensor, name: str) -> None:
    require_runnable("spec_verify", x)
    rows = len(drafts.tokens) + len(drafts.first) - 1
    require(x.dim() == 2 and len(x) == rows, f"{name} is {tuple(x.shape)}.", f"It takes [{rows}, V].")
    require(
        drafts.most <= _MOST_NODES, f"A draft of {drafts.most} nodes is too large.", f"Up to {_MOST_NODES}."
    )
    require_device(x, tokens=drafts.tokens, parents=drafts.parents, first=drafts.first)


def _match_cost(sequences: int, nodes: int) -> Cost:
    """Of the walk alone: ``nodes`` per sequence; the choice of the rows is the cost of a draw."""
    return Cost(sequences * nodes * nodes, sequences * nodes * (8 + 8 + 4 + 4 + 8))


def _rejection_cost(judged: int, vocabulary: int, rejected: int = 1) -> Cost:
    """Of ``judged`` nodes in all, ``rejected`` of them; the residual stays in L2."""
    return Cost(4 * judged * vocabulary + 2 * rejected * vocabulary, (judged + rejected) * 8 * vocabulary)


_OUT = {"path": "*i32", "length": "*i32", "corrected": "*i32", "expected": "*fp64", "tried": "*i32"}
_TREE = {"law": "*fp32", "tokens": "*i32", "parents": "*i32", "first": "*i32"}
_MATCH = {**_OUT, "token_out": "*i64", "ids": "*i64", **_TREE, "stride": "i32"}
_REJECT = {**_OUT, "status": "*i32", "rest": "*fp32", "q": "*fp32", **_TREE}
_REJECT |= {"seeds": "*i64", "samples": "*i64", "positions": "*i64", "V": "i32", "VQ": "i32"}
_QUIET = {"spills": Bound(0, 0), "stack": Bound(0, 0)}

# The walk is a warp or few of small integers; rejection streams rows through eight warps.
KERNELS = (
    Kernel(
        "spec_match", "Draft verification by matching: R1, R3, R4", "triton",
        "workbench.speculative.rules.greedy and match", match_kernel,
        (
            Build("64 nodes", _MATCH, {"NP": 64, "LAW": True}, num_warps=2, sass=_QUIET),
            Build("16 nodes, greedy", {k: v for k, v in _MATCH.items() if k != "law"},
                  {"NP": 16, "LAW": False, "law": None}, num_warps=1, sass=_QUIET),
        ),
        _match_cost,
    ),
    Kernel(
        "spec_rejection", "Draft verification by rejection sampling: R2, chains and siblings", "triton",
        "arXiv 2211.17192, algorithm 1; SpecInfer, arXiv 2305.09781", rejection_kernel,
        (
            Build("16 nodes", _REJECT, {"NP": 16, "BV": _BLOCK}, num_warps=8,
                  aligned=("law", "rest", "q", "V", "VQ"), sass=_QUIET),
        ),
        _rejection_cost,
    ),
)  # fmt: skip
