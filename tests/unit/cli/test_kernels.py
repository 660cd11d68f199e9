"""``workbench kernels``: configurations, machine-code facts, bytes and operations, as data and as a table."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.cli.kernels import cost_row, kernel_rows
from workbench.kernels import CATALOGUE, aot, load
from workbench.kernels.sass import Facts
from workbench.kernels.spec import Bound, Build, Cost, Kernel

Command = Callable[..., Any]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
NAME = "w8a8"


@needs_triton
def test_one_kernel_is_compiled_and_its_facts_are_those_of_the_code(workbench: Command) -> None:
    done = workbench("kernels", NAME, "--json", "--size", "M=1", "--size", "N=128", "--size", "K=256")
    assert done.status == 0, done.err
    (row,) = done.json["kernels"]
    (kernel,) = load(NAME)
    assert [b["name"] for b in row["builds"]] == [b.name for b in kernel.builds]
    expected = kernel.cost(M=1, N=128, K=256)
    assert (row["cost"]["flops"], row["cost"]["bytes"]) == (expected.flops, expected.bytes)
    for build in row["builds"]:
        assert build["as_promised"]
        text = Path(build["sass"]).read_text()
        assert build["facts"]["IGMMA"] == text.count(" IGMMA.") > 0
    shown = workbench("kernels", NAME, "--sass").out
    assert "IGMMA" in shown and row["builds"][0]["sass"] in shown.replace("\n", "")


@needs_triton
def test_names_targets_and_compilers_are_checked(workbench: Command, tmp_path: Path) -> None:
    done = workbench("kernels", "nope", "--json")
    assert done.status == 2 and NAME in done.json["hint"]
    assert workbench("kernels", NAME, "--arch", "75", "--json").json["error"] == "OptionError"
    unknown = workbench("kernels", NAME, "--size", "ZZ=4", "--json")
    assert unknown.status == 2 and "'ZZ'" in unknown.json["message"] and "K, M, N" in unknown.json["hint"]
    assert workbench("kernels", NAME, "--size", f"M={'9' * 400}", "--json").status == 2
    empty = workbench("kernels", NAME, "--triton", str(tmp_path), "--json")
    assert empty.status == 6 and "pip install" in empty.json["hint"]


def fake(build: Build, facts: Facts | None) -> aot.Compiled:
    kernel = Kernel("k", "t", "triton", "s", None, (build,), lambda M, m=2: Cost(2 * M * m, M))
    return aot.Compiled(aot.Request("m", kernel, build), facts=facts, error="" if facts else "no\nway")


def test_a_broken_promise_and_a_tripping_control_are_told_apart() -> None:
    facts = Facts({"HGMMA.64x8x16": 2, "LDL": 1}, regs=32, stack=8, smem=0, warps=4)
    clean = Build("good", {}, {}, sass={"HGMMA": Bound(2, 2)})
    broken = Build("bad", {}, {}, sass={"LDL": Bound(0, 0)})
    control = Build("control", {}, {}, sass={"LDL": Bound(0, 0)}, fails=True)
    harmless = Build("harmless", {}, {}, sass={"HGMMA": Bound(2, 2)}, fails=True)
    pairs = [(clean, facts), (broken, facts), (control, facts), (harmless, facts), (clean, None)]
    pairs.append((control, None))  # a compiler that fails has shown nothing
    (row,) = kernel_rows([fake(*pair) for pair in pairs], {})
    assert [b["as_promised"] for b in row["builds"]] == [True, False, True, False, False, False]
    assert row["builds"][1]["broken"] == ["LDL is 1, must be = 0"]
    assert row["cost"] == {"sizes": {"M": 16}, "flops": 64, "bytes": 16, "flops_per_byte": 4.0}


def test_sizes_replace_typical_ones_and_missing_ones_are_named() -> None:
    kernel = Kernel("k", "", "triton", "", None, (), lambda M, m, **_: Cost(M, m))
    assert cost_row(kernel, {"other": 3}) == {"sizes": {"M": 16}, "missing": ["m"]}
    assert cost_row(kernel, {"m": 4, "M": 32}) == {
        "sizes": {"M": 32, "m": 4},
        "flops": 32,
        "bytes": 4,
        "flops_per_byte": 8.0,
    }
    lengths = Kernel("k", "", "triton", "", None, (), lambda q_lens: Cost(sum(q_lens), 1))
    assert cost_row(lengths, {"q_lens": 5})["flops"] == 5


@needs_triton
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_kernel_says_what_it_costs(name: str) -> None:
    for kernel in load(name):
        row = cost_row(kernel, {})
        assert row.get("missing", []) == [], kernel.name
        assert row["bytes"] > 0
        assert row["flops"] >= 0
