"""FlashAttention-3 in Gluon: shapes and masks against float64, then the paper's sizes."""

from __future__ import annotations

import functools
from typing import Any

from workbench.kernels.attention.fa3_fwd import fa3_fwd
from workbench.kernels.bench import prefill
from workbench.kernels.bench.case import Lab, Outputs, Trial
from workbench.kernels.emulator import Emulator

NAME = "fa3_fwd"
#: The kernel's two switches, each the other way, and both: overlap inside and between consumers.
SWITCHES = {
    "no ping-pong": {"pingpong": False},
    "overlap trick off": {"early_wait": False},
    "neither": {"pingpong": False, "early_wait": False},
}


def _run(emulated: bool, **arguments: Any) -> Outputs:
    return prefill.named(fa3_fwd(**arguments, emulator=Emulator() if emulated else None))


def make(lab: Lab, **sizes: Any) -> Trial:
    """On a CPU the emulator runs the kernel."""
    return prefill.trial(lab, functools.partial(_run, not lab.on_gpu), **sizes)


_check = functools.partial(prefill.check, NAME)
_timed = functools.partial(prefill.timed, NAME, make)

CASES = (
    _check("one tile", make, q_lens=[64], kv_lens=[128], heads=1, kv_heads=1, dim=64, causal=False),
    _check("one token", make, q_lens=[1], kv_lens=[1], heads=2, kv_heads=1, dim=128),
    _check("ragged", make, q_lens=[130, 5, 1], kv_lens=[130, 700, 129], heads=4, kv_heads=1, dim=64),
    _check("rows without keys", make, q_lens=[300, 64], kv_lens=[100, 64], heads=2, kv_heads=2, dim=64),
    _check("hd128", make, q_lens=[512] * 2, kv_lens=[512] * 2, heads=4, kv_heads=4, dim=128, causal=False),
    _check("hd128 GQA 8", make, q_lens=[777, 1024], kv_lens=[1500, 1024], heads=16, kv_heads=2, dim=128),
    _check("hd256", make, q_lens=[500, 77], kv_lens=[500, 600], heads=4, kv_heads=2, dim=256),
    _check("window", make, q_lens=[900], kv_lens=[1800], heads=4, kv_heads=1, dim=128, window=300),
    _check("soft-cap", make, q_lens=[900], kv_lens=[900], heads=4, kv_heads=1, dim=128, softcap=20.0),
    _check(
        "pages of 128", make, q_lens=[70, 300], kv_lens=[517, 300], heads=8, kv_heads=2, dim=128, page=128
    ),
    _check("pages of 64", make, q_lens=[70, 300], kv_lens=[517, 300], heads=8, kv_heads=2, dim=64, page=64),
    _check("many tiles", make, q_lens=[4000], kv_lens=[4000], heads=16, kv_heads=4, dim=128),
    _timed(128, 16384, 560, 660, 720, variants=SWITCHES),
    _timed(128, 8192, 560, 660, 720),
    _timed(128, 16384, 480, 600, 660, causal=True, variants=SWITCHES),
    _timed(128, 8192, 480, 600, 660, causal=True),
    _timed(64, 16384, 380, 450, 500),
    _timed(256, 16384, 480, 580, 680),
    _timed(128, 2048),
)
