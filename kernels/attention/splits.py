"""How many splits a decode step needs so that every multiprocessor has something to read.

FlashAttention-3's rule (``hopper/heuristics.h``): no split when the tiles fill 80 % of the multiprocessors,
unless one KV head alone exceeds the L2 cache, or when there are at most four KV blocks; else the smallest
count whose last wave is within 85 % of the best reachable efficiency.
"""

from __future__ import annotations

import math

import torch

#: Multiprocessors and L2 bytes of an H200, used where there is no device to ask.
H200_SMS = 132
_L2_BYTES = 50 * 2**20
MOST_SPLITS = 128


def split_count(
    programs: int, blocks: int, *, head_bytes: int = 0, sms: int = H200_SMS, most: int = MOST_SPLITS
) -> int:
    """Splits per sequence and KV head.

    ``programs`` sequences times KV heads; ``blocks`` KV tiles of the longest sequence; ``head_bytes`` K and V
    bytes of one KV head of it.
    """
    if programs >= 0.8 * sms:
        over = head_bytes > _L2_BYTES and blocks > 4
        # A head that does not fit L2 is cut so that each piece does.
        return min(-(-head_bytes // _L2_BYTES), most, blocks) if over else 1
    if blocks <= 4:
        return 1
    counts = range(1, min(most, sms, blocks) + 1)
    waves = {n: programs * n / sms for n in counts}
    efficiency = {n: waves[n] / math.ceil(waves[n]) for n in counts}
    best = max(efficiency.values())
    return next(n for n in counts if efficiency[n] >= 0.85 * best)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU, those of an H200 elsewhere: a CPU then plans what a GPU would."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return H200_SMS


def chunk_tokens(longest: int, splits: int, unit: int) -> int:
    """Tokens of a split: a multiple of ``unit``, so that ``splits`` of them cover ``longest`` tokens."""
    return max(1, math.ceil(longest / splits / unit)) * unit
