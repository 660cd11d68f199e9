"""How OpenMP's threads wait: short spins where nobody chose otherwise, never in a benchmark's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROBE = """
import os, sys
{before}
import workbench
from workbench.core.benchmark_process import bench_environment
env = bench_environment()
print(os.environ.get("GOMP_SPINCOUNT"), env.get("GOMP_SPINCOUNT"), env["OMP_WAIT_POLICY"])
"""


def told(before: str = "", **environment: str) -> list[str]:
    """What a fresh process sees: its spin count, and spin count and wait policy of a benchmark's process."""
    plain = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(before=before)],
        env={**plain, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize(
    ("before", "environment", "expected"),
    [
        ("", {}, ["2000", "None", "active"]),
        ("", {"OMP_WAIT_POLICY": "passive"}, ["None", "None", "active"]),
        ("", {"GOMP_SPINCOUNT": "7"}, ["7", "None", "active"]),
        ("import torch", {}, ["None", "None", "active"]),  # libgomp has read its settings by then
    ],
)
def test_short_spins_unless_somebody_chose(
    before: str, environment: dict[str, str], expected: list[str]
) -> None:
    assert told(before, **environment) == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libgomp")
def test_libgomp_reads_it_and_a_run_says_so() -> None:
    plain = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import workbench, torch; from workbench.core.provenance import provenance as p; "
    code += "print(p('cpu', 'interactive').environment['GOMP_SPINCOUNT'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**plain, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "2000"
    assert "GOMP_SPINCOUNT" not in done.stderr or "GOMP_SPINCOUNT = '2000'" in done.stderr
