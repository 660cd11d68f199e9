"""Every named benchmark at its full size, in the bench profile: ``pytest -m bench -s tests/bench``.

Times are printed, never asserted: what is checked is that each contestant did its turns and that ratios
have a spread. ``WORKBENCH_BENCH_MODEL`` names another model than the shipped one.
"""

from __future__ import annotations

import os

import pytest

from workbench.core.benchmark import BENCHES, BenchSettings
from workbench.core.benchmark_process import benchmark_in_fresh_process
from workbench.records.form import quantity, spread

MODEL = os.environ.get("WORKBENCH_BENCH_MODEL", "tiny")
PEERS = {
    "decode": ("transformers",),
    "prefill": ("transformers",),
    "batch": ("transformers", "transformers_cb"),
    "prefix": ("transformers",),
}


@pytest.mark.bench
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BENCHES)
def test_benchmark(name: str) -> None:
    settings = BenchSettings(name, MODEL, peers=PEERS.get(name, ()), rounds=5)
    run = benchmark_in_fresh_process(settings)
    for metric in run.metrics:
        if ":phase_" not in metric.name:
            print(f"{metric.name:48} {quantity(metric)}{spread(metric)}")
    ratios = [m for m in run.metrics if m.unit == "×"]
    assert all(m.n == settings.rounds and m.spread is not None for m in ratios)
    assert len(ratios) >= len(settings.peers)
