"""FlashAttention-2 in plain Triton: the contract of ``fa3_fwd``, and the yardstick of what that brings."""

from __future__ import annotations

import functools
from typing import Any

from workbench.kernels.attention.fa_fwd import fa_fwd
from workbench.kernels.bench import prefill
from workbench.kernels.bench.case import Lab, Outputs, Trial

NAME = "fa_fwd"


def _run(**arguments: Any) -> Outputs:
    return prefill.named(fa_fwd(**arguments))


def make(lab: Lab, **sizes: Any) -> Trial:
    """Runs on any GPU, and in the interpreter."""
    return prefill.trial(lab, _run, **sizes)


_check = functools.partial(prefill.check, NAME)
_timed = functools.partial(prefill.timed, NAME, make)

CASES = (
    _check("one token", make, q_lens=[1], kv_lens=[1], heads=2, kv_heads=1, dim=128),
    _check("ragged, pages of 16", make, q_lens=[70, 3], kv_lens=[70, 99], heads=2, kv_heads=1, dim=64,
           page=16),
    _check("rows without keys", make, q_lens=[300, 64], kv_lens=[100, 64], heads=2, kv_heads=2, dim=64),
    _check("hd80", make, q_lens=[300], kv_lens=[777], heads=4, kv_heads=2, dim=80),
    _check("hd128 GQA 8", make, q_lens=[777, 1024], kv_lens=[1500, 1024], heads=16, kv_heads=2, dim=128),
    _check("window and soft-cap", make, q_lens=[900], kv_lens=[1800], heads=4, kv_heads=1, dim=128,
           window=300, softcap=20.0),
    _check("hd256", make, q_lens=[500, 77], kv_lens=[500, 600], heads=4, kv_heads=2, dim=256),
    _timed(128, 16384),
    _timed(128, 16384, causal=True),
)  # fmt: skip
