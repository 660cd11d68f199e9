"""Walking a draft tree: which drafted tokens are kept, one program per sequence; see `spec_verify`.

Nodes of a sequence are ``first[b] .. first[b + 1]`` of the flat arrays, parents before children, numbers
within the sequence; rows of laws are one more per sequence, the root's first: node ``i`` has row ``first[b]
+ b + 1 + i``. A path ends at the first place none of whose drafted tokens is taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.decode.noise import AHEAD, COIN, uniform

_COIN = tl.constexpr(COIN)
_AHEAD = tl.constexpr(AHEAD)


@triton.jit
def _read_tree(tokens, parents, first, b, NP: tl.constexpr):
    """Tokens and parents [NP] of a sequence, its number of nodes, its first node and its root's row."""
    begin = tl.load(first + b)
    n = tl.load(first + b + 1) - begin
    i = tl.arange(0, NP)
    token = tl.load(tokens + begin + i, mask=i < n, other=-1)
    parent = tl.load(parents + begin + i, mask=i < n, other=-2)
    return i, token, parent, n, begin, begin + b


@triton.jit
def match_kernel(
    path, length, corrected, expected, tried, token_out, ids, law, tokens, parents, first, stride,
    NP: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """R1, R3 and R4: ``ids`` int64 [R] is what each row's own law chose; a draft is kept while it is that.

    Writes ``path`` int32 [B, NP] (-1 beyond ``length``), ``corrected``, ``expected`` float64 [B, NP] with
    ``tried`` entries, and the token after the path. LAW: chances are those of ``law`` [R, V], else 0 and 1.
    """
    b = tl.program_id(0).to(tl.int64)
    i, token, parent, n, _, root = _read_tree(tokens, parents, first, b, NP)
    tl.store(path + b * NP + i, tl.full([NP], -1, tl.int32))
    tl.debug_barrier()
    depth = n * 0
    judged = depth
    missed = depth
    at = depth - 1
    y = tl.load(ids + root)
    going = depth + 1
    while going == 1:
        row = root + 1 + at
        y = tl.load(ids + row)
        child = parent == at
        taken = tl.min(tl.where(child & (token == y), i, NP), 0)
        reached = child & (i <= taken)
        count = tl.sum(reached.to(tl.int32), 0)
        if LAW:
            chance = tl.load(law + row * stride + token, mask=reached, other=0.0).to(tl.float64)
            # A token drafted twice below one node has no chance left the second time.
            earlier = (i[None, :] < i[:, None]) & reached[None, :] & (token[None, :] == token[:, None])
            chance = tl.where(tl.sum(earlier.to(tl.int32), 1) > 0, 0.0, chance)
            left = 1.0 - (tl.cumsum(chance, 0) - chance)
            value = tl.where(left > 0.0, tl.minimum(chance / tl.where(left > 0.0, left, 1.0), 1.0), 0.0)
        else:
            value = (i == taken).to(tl.float64)
        order = judged + tl.cumsum(reached.to(tl.int32), 0) - 1
        tl.store(expected + b * NP + order, value, mask=reached)
        judged += count
        if taken < NP:
            tl.store(path + b * NP + depth, taken)
            depth += 1
            at = taken
        else:
            missed = tl.minimum(count, 1)
            going = 0
    tl.store(length + b, depth)
    tl.store(corrected + b, missed)
    tl.store(tried + b, judged)
    tl.store(token_out + b, y)


@triton.jit
def _overlap(p, q, V, VQ, BV: tl.constexpr):
    """``sum min(p, q)`` and ``sum (p - q)+`` of two rows, float64; ``q`` is 0 beyond VQ."""
    shared = tl.zeros([1], tl.float64)
    rest = tl.zeros([1], tl.float64)
    for start in tl.range(0, V, BV):
        v = start + tl.arange(0, BV)
        a = tl.load(p + v, mask=v < V, other=0.0)
        d = tl.load(q + v, mask=v < VQ, other=0.0)
        shared += tl.sum(tl.minimum(a, d).to(tl.float64), 0)
        rest += tl.sum(tl.maximum(a - d, 0.0).to(tl.float64), 0)
    return tl.sum(shared, 0), tl.sum(rest, 0)


@triton.jit
def rejection_kernel(
    path, length, corrected, expected, tried, status, rest, law, q, tokens, parents, first, seeds, samples,
    positions, V, VQ, NP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """R2: accept x with probability min(1, p(x) / q(x)), else go on with norm((p - q)+).

    ``law`` fp32 [R, V], ``q`` fp32 [N, VQ]; ``rest`` fp32 [B, V] receives the law that the token after the
    path is drawn from. ``status`` int32 [B]: 0, or 1 + the node whose token its own law q cannot have drawn.
    """
    b = tl.program_id(0).to(tl.int64)
    i, _, parent, n, begin, root = _read_tree(tokens, parents, first, b, NP)
    tl.store(path + b * NP + i, tl.full([NP], -1, tl.int32))
    seed, sample = tl.load(seeds + b).to(tl.uint64), tl.load(samples + b).to(tl.uint64)
    start_at = tl.load(positions + b)
    mine = rest + b * V
    depth = n * 0
    judged = depth
    wrong = depth
    missed = depth
    at = depth - 1
    going = depth + 1
    while going == 1:
        row = law + (root + 1 + at).to(tl.int64) * V
        for start in tl.range(0, V, BV):
            v = start + tl.arange(0, BV)
            tl.store(mine + v, tl.load(row + v, mask=v < V, other=0.0), mask=v < V)
        tl.debug_barrier()
        taken = depth * 0 + NP
        sibling = depth * 0
        node = tl.min(tl.where(parent == at, i, NP), 0)
        missed = (node < NP).to(tl.int32)
        while node < NP:
            x = tl.load(tokens + begin + node)
            qrow = q + (begin + node).to(tl.int64) * VQ
            drawn = tl.load(qrow + x, mask=x < VQ, other=0.0).to(tl.float64)
            p = tl.load(mine + x).to(tl.float64)
            wrong = tl.where((wrong == 0) & (drawn <= 0.0), node + 1, wrong)
            shared, total = _overlap(mine, qrow, V, VQ, BV)
            tl.store(expected + b * NP + judged, shared)
            judged += 1
            place = (depth * _AHEAD + _COIN).to(tl.uint64)
            coin = uniform(sibling, start_at.to(tl.uint64), place, sample, seed)
            following = tl.min(tl.where((parent == at) & (i > node), i, NP), 0)
            if coin < p / tl.where(drawn > 0.0, drawn, 1.0):
                taken = node
                following = taken * 0 + NP
            else:
                # What is left is renormalised; p itself stays where nothing is (only rounding rejected).
                norm = total.to(tl.float32)
                tl.debug_barrier()
                for start in tl.range(0, V, BV):
                    v = start + tl.arange(0, BV)
                    a = tl.load(mine + v, mask=v < V, other=0.0)
                    d = tl.load(qrow + v, mask=v < VQ, other=0.0)
                    over = tl.maximum(a - d, 0.0)
                    over = tl.div_rn(over, tl.zeros_like(over) + tl.where(norm > 0.0, norm, 1.0))
                    tl.store(mine + v, tl.where(norm > 0.0, over, a), mask=v < V)
                tl.debug_barrier()
            node = following
            sibling += 1
        if taken < NP:
            tl.store(path + b * NP + depth, taken)
            depth += 1
            at = taken
        else:
            going = 0
    tl.store(length + b, depth)
    tl.store(corrected + b, missed)
    tl.store(tried + b, judged)
    tl.store(status + b, wrong)
