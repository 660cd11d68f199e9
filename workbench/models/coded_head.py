"""Matrices of a head file in eight bits: a code for every weight, a step for every row.

A draft model of several layers is twice as large as a draft head may be in 16 bits. What it proposes is
judged anyway, and rounding its rows to 255 values changes hardly any proposal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

STEP = ".step"
TOP = 127


def encoded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, every floating matrix [.., n, k] as int8 codes, beside it its steps, float32 [.., n].

    The steps are called ``NAME.step``. Tensors of one dimension stay as they are.
    """
    out = {}
    for name, value in tensors.items():
        if value.ndim < 2 or not value.is_floating_point():
            out[name] = value
            continue
        wide = value.float()
        step = wide.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / TOP
        out[name] = (wide / step[..., None]).round().to(torch.int8)
        out[name + STEP] = step
    return out


def decoded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What :func:`encoded` was given, but for the rounding: at most half a step of its row."""
    return {
        name: value.float() * tensors[name + STEP][..., None] if name + STEP in tensors else value
        for name, value in tensors.items()
        if not name.endswith(STEP)
    }
