"""Cost is a price that was entered times a time that was measured, and nothing else."""

from __future__ import annotations

import json

import pytest

from workbench.cli.main import main
from workbench.core.cost import cost_metric, cost_of
from workbench.spec.errors import OptionError
from workbench.spec.run import Metric


def test_the_arithmetic():
    # 3.6 per hour are 0.001 per second; 1,000 tokens at 20 ms each take 20 s.
    assert cost_of(3.6, 20.0) == pytest.approx(0.02)
    assert cost_of(3.6, 20.0, tokens=2.5) == pytest.approx(0.008)
    assert cost_of(3.6, 20.0, tokens=2.0, outputs=4) == pytest.approx(0.0025)
    assert cost_of(0.0, 20.0) == 0.0


@pytest.mark.parametrize(
    ("price", "itl", "tokens"),
    [(-1.0, 20.0, 1.0), (float("nan"), 20.0, 1.0), (1.0, 0.0, 1.0), (1.0, 5.0, 0.0)],
)
def test_what_is_no_price_or_no_time_is_refused(price, itl, tokens):
    with pytest.raises(OptionError):
        cost_of(price, itl, tokens)


def test_a_cost_follows_the_measured_speed_alone():
    """Twice the speed is half the cost; without a speed there is none."""
    slow, fast = ([Metric("decode_speed", v, "tok/s"), Metric("ttft", 900.0, "ms")] for v in (50.0, 100.0))
    first, second = cost_metric(slow, 3.6), cost_metric(fast, 3.6)
    assert first is not None and second is not None
    assert first.value == pytest.approx(2 * second.value) == pytest.approx(0.02)
    assert first.tag == "predicted" and "3.6 per hour" in first.note
    assert cost_metric([Metric("ttft", 900.0, "ms")], 3.6) is None


def test_the_command_shows_it_when_a_price_is_given(capsys):
    command = ["run", "-m", "tiny", "-p", "a", "--max-tokens", "4", "--ignore-eos", "--no-save", "--json"]
    assert main([*command, "--price", "1.2"]) == 0
    metrics = {m["name"]: m for m in json.loads(capsys.readouterr().out)["metrics"]}
    speed = metrics["decode_speed"]["value"]
    assert metrics["cost"]["value"] == pytest.approx(1.2 / 3600 / speed * 1000)
    assert main(command) == 0
    assert "cost" not in {m["name"] for m in json.loads(capsys.readouterr().out)["metrics"]}
