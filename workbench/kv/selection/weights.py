"""Attention weights of a few queries over a layer's cached keys, summed over the queries."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kv.selection.exact import widened


def column_sums(queries: Tensor, keys: Tensor) -> Tensor:
    """What each key receives, float64 [Hkv, S]: summed over the rows, mean over a KV head's query heads.

    ``queries`` [n, Hq, D], rotated and scaled, belong to the last n of ``keys`` [Hkv, S, D]: a query sees
    its own slot and those before it. Softmax in float32 (float64 for float64 keys); peak n x Hq x S elements.
    """
    n, heads, dim = queries.shape
    kv_heads, slots, _ = keys.shape
    group = heads // kv_heads
    k = widened(keys)
    q = queries.to(k.dtype).transpose(0, 1).reshape(kv_heads, group * n, dim)
    logits = (q @ k.transpose(1, 2)).view(kv_heads, group, n, slots)
    hidden = torch.ones(n, n, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., slots - n :].masked_fill_(hidden, float("-inf"))
    return logits.softmax(-1).sum(2, dtype=torch.float64).mean(1)
