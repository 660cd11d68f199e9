"""What the GPU check would launch compiles for Hopper, and no tensor is on a wrong device; without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from workbench.kernels.bench import roster

SCRIPT = Path(__file__).with_name("pretend_gpu.py")
SMALLEST = tuple(roster.cases_of(kernel)[0].key for kernel in roster.covered())
CHECKS = tuple(case.key for case in roster.chosen() if not case.timed)


@cache
def answers(keys: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """One process: it must not be interpreting, and has a driver that is not there."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *keys]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {a["case"]: a for a in map(json.loads, done.stdout.splitlines())}


def agree(keys: Sequence[str], found: dict[str, dict[str, Any]]) -> None:
    assert set(found) == set(keys)
    wrong = {k: a for k, a in found.items() if a.get("error") or a["misplaced"] or a["too_large"]}
    assert wrong == {}
    assert all(a["launches"] > 0 for a in found.values())


def test_the_smallest_case_of_each_kernel_would_be_launched_as_compiled() -> None:
    agree(SMALLEST, answers(SMALLEST))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_every_proof_would_be_launched_as_compiled() -> None:
    agree(CHECKS, answers(CHECKS))


def test_tensors_on_two_devices_are_refused() -> None:
    import torch

    spec = importlib.util.spec_from_file_location("pretend_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    pretend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pretend)
    with pretend.Factories():
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert there.device.type == "cuda" and (there + 1).is_cuda and not here.is_cuda
        assert here.to("cuda:0").is_cuda and not there.cpu().is_cuda and there.to(torch.float64).is_cuda
        assert there[torch.arange(2)].is_cuda and torch.zeros_like(there).is_cuda
        for mixed in (lambda: there + here, lambda: torch.cat([here, there]), lambda: here[there.long()]):
            with pytest.raises(RuntimeError, match="device"):
                mixed()
