"""How OpenMP's threads wait for each other; libgomp reads it once, when torch is loaded.

By default they spin for long. That is fastest on an idle machine, and can collapse when other processes want
the same cores: the thread that has work waits for a core on which another one only spins. A short spin keeps
nearly all of the speed where nobody else computes, and does not collapse where somebody does.
"""

from __future__ import annotations

import os
import sys

SPINS = "2000"
"""Rounds that a thread spins before it sleeps."""

_ASKED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def wait_briefly() -> None:
    """Choose a short spin, unless the user chose how to wait or torch is there already."""
    if "torch" not in sys.modules and not any(name in os.environ for name in _ASKED):
        os.environ["GOMP_SPINCOUNT"] = SPINS
