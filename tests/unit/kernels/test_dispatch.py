"""Which form of a kernel runs, on machines that need not be here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from workbench.kernels import CATALOGUE
from workbench.kernels.dispatch import NEEDS, choose
from workbench.kernels.target import Target
from workbench.spec.errors import OptionError

CPU = Target("cpu", "CPU", None, "3.7.1", False)
H200 = Target("cuda", "NVIDIA H200", (9, 0), "3.6.0", False)
A100 = replace(H200, name="NVIDIA A100", capability=(8, 0))
T4 = replace(H200, name="Tesla T4", capability=(7, 5))


def test_hopper_gets_the_flagship_and_others_its_twin() -> None:
    on_hopper = choose("fa3_fwd", H200, dtype=torch.bfloat16, head_dim=128)
    assert (on_hopper.kernel, on_hopper.path) == ("fa3_fwd", "gluon")
    assert "3.6.0" in on_hopper.reason and "H200" in on_hopper.reason
    for target, options, why in (
        (A100, {"dtype": torch.bfloat16}, "has 8.0"),
        (H200, {"head_dim": 96}, "not 96"),
        (H200, {"dtype": torch.float32}, "not float32"),
    ):
        found = choose("fa3_fwd", target, **options)
        assert (found.kernel, found.path) == ("fa_fwd", "triton")
        assert why in found.reason


def test_without_a_gpu_torch_runs_unless_the_interpreter_was_asked_for() -> None:
    found = choose("fa3_fwd", CPU)
    assert (found.kernel, found.path, found.runs) == ("", "torch", False)
    assert "no GPU" in found.reason
    asked = choose("fa3_fwd", replace(CPU, interpreted=True))
    assert (asked.kernel, asked.path) == ("fa_fwd", "interpreter")
    assert "not interpreted" in asked.reason


def test_compilers_and_chips_that_do_not_fit_are_named() -> None:
    assert "not installed" in choose("fa_fwd", replace(H200, triton="")).reason
    assert "3.5.1" in choose("fa_fwd", replace(H200, triton="3.5.1")).reason
    assert "has 7.5" in choose("fa_fwd", T4).reason
    assert "float64" in choose("fa_fwd", H200, dtype=torch.float64).reason
    with pytest.raises(OptionError, match="nope"):
        choose("nope", CPU)


def test_needs_name_kernels_that_exist() -> None:
    assert set(NEEDS) <= set(CATALOGUE)
    assert {n.instead for n in NEEDS.values() if n.instead} <= set(CATALOGUE)


def test_choosing_on_a_machine_without_a_gpu_loads_no_triton() -> None:
    code = (
        "import os, sys; os.environ.pop('TRITON_INTERPRET', None);"
        "from workbench.kernels import CATALOGUE, target, dispatch;"
        "print({dispatch.choose(n, target.probe()).path for n in CATALOGUE} <= {'torch'});"
        "print([m for m in sys.modules if m.partition('.')[0] == 'triton'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["True", "[]"]
