"""The view of machine code: what it draws is what was compiled, and the answer about FP8 is not a guess."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workbench.kernels.aot import Compiled
from workbench.kernels.listing import Instruction
from workbench.kernels.sass import Facts
from workbench.spec.errors import CompilerError, MissingExtra, OptionError
from workbench.widgets.kernel_views.machine_code import (
    LANES,
    MachineCode,
    fp8_answer,
    fp8_paths,
    read_fp8_builds,
    read_machine_code,
)
from workbench.widgets.kernel_views.source_view import SourceView


@pytest.fixture(scope="module")
def code() -> MachineCode:
    (found,) = read_machine_code("fa3_fwd", "hd64 causal")
    return found


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_the_strip_draws_every_telling_instruction_once(code: MachineCode, theme: Any) -> None:
    facts = code.compiled.facts
    assert facts is not None
    figure = code.figure(theme)
    drawn = {t.name: len(t.x) for t in figure.data}
    assert list(drawn) == [lane for lane, _ in LANES]
    assert drawn["matrix product"] == facts.count("HGMMA")
    assert drawn["exponential under a product"] == sum(facts.windows)
    both = drawn["exponential under a product"] + drawn["exponential alone"]
    assert both == facts.count("MUFU.EX2")
    assert drawn["copy (TMA)"] == facts.count("UTMALDG") + facts.count("UTMASTG")
    assert drawn["spill"] == facts.value("spills") == 0
    bands = [(s.x0, s.x1) for s in figure.layout.shapes]
    for trace in figure.data:
        if trace.name.startswith("exponential"):
            inside = [any(low <= x < high for low, high in bands) for x in trace.x]
            assert set(inside) <= {trace.name.endswith("under a product")}
    assert f"{sum(facts.windows)} of {both}" in figure.layout.title.text
    assert "measured" in figure.layout.title.text


def test_the_table_holds_facts_against_promises(code: MachineCode) -> None:
    rows = {r["fact"]: r for r in code.table().to_dicts()}
    facts, build = code.compiled.facts, code.compiled.request.build
    assert facts is not None and set(build.sass) <= set(rows)
    for name, bound in build.sass.items():
        assert rows[name]["value"] == facts.value(name)
        assert rows[name][""] == ("kept" if bound.holds(facts.value(name)) else "broken")
    worse = replace(code.compiled, facts=replace(facts, opcodes={**facts.opcodes, "STL": 3}))
    assert {r["fact"]: r[""] for r in replace(code, compiled=worse).table().to_dicts()}["STL"] == "broken"


def test_source_lines_stand_beside_what_they_became(code: MachineCode) -> None:
    page = code.page()
    lines = page.by_line()
    assert sum(len(found) for file in lines.values() for found in file.values()) == len(code.code)
    text = (Path(page.root) / "attention/fa3_kernel.py").read_text("utf-8").splitlines()
    products = [
        n for n, found in lines["attention/fa3_kernel.py"].items() if any(i.kind == "product" for i in found)
    ]
    assert any("warpgroup_mma(" in text[n - 1] for n in products)
    exponentials = [
        n
        for n, found in lines["attention/fa3_kernel.py"].items()
        if any(i.kind == "exponential" for i in found)
    ]
    assert exponentials and all("exp2" in text[n - 1] for n in exponentials)
    shown = page.to_html()
    assert shown.count("<details") == shown.count("</details>") > 50 and "<script" not in shown
    assert "MUFU.EX2 under a product" in shown and "attention/fa3_kernel.py" in page.to_text()
    assert str(page.root) not in shown


def test_a_long_line_lists_its_telling_instructions_and_counts_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(x):\n    return x\n")
    many = [Instruction(16 * i, "MOV", "MOV R1, R2", "a.py", 2, False) for i in range(99)]
    product = Instruction(16 * 99, "HGMMA.64x8x16", "HGMMA.64x8x16 R24, gdesc[UR4]", "a.py", 2, True)
    shown = SourceView("k", [*many, product], tmp_path).to_html()
    assert "R24, gdesc[UR4]" in shown and "and 40 others" in shown and shown.count("MOV R1") == 59


def test_source_and_operands_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('def f(x):\n    """Doc."""\n    return x < "<b>"\n')
    one = Instruction(0, "MOV", "MOV R1, `(<script>)", "a.py", 3, False)
    shown = SourceView("<k>", [one, replace(one, file="gone.py")], tmp_path).to_html()
    assert (
        "&lt;script&gt;" in shown and "x &lt; &quot;&lt;b&gt;" in shown and 'aria-label="&lt;k&gt;"' in shown
    )
    assert not re.search(r"<script|<k>", shown)
    assert "the compiler&#x27;s own library" in shown or "the compiler's own library" in shown


@pytest.mark.parametrize(
    ("opcodes", "signature", "says"),
    [
        ({"QGMMA.64x128x32.F32.E4M3.E4M3": 4}, "*fp8e4nv", "FP8 is on the FP8 path: 4 QGMMA."),
        ({"QGMMA": 4, "HGMMA": 2}, "*fp8e4nv", "Partly"),
        ({"HMMA.16816.F32.BF16": 8}, "*fp8e4nv", "FP8 in memory only, multiplied in 16 bits: 8 HMMA."),
        ({"HGMMA": 8}, "*bf16", "No FP8 here: 8 HGMMA."),
        ({"FADD": 8}, "tensordesc<fp8e4nv[64, 128]>", "but not multiplied: no matrix instruction"),
    ],
)
def test_the_answer_about_fp8(code: MachineCode, opcodes: dict[str, int], signature: str, says: str) -> None:
    request = code.compiled.request
    build = replace(request.build, signature={"x": signature})
    compiled = Compiled(replace(request, build=build), facts=Facts(opcodes, 1, 0, 0, 4))
    assert says in fp8_answer(compiled)
    assert "Does not compile: no" in fp8_answer(Compiled(request, error="no\nmore"))


def test_the_answer_for_several_builds_is_a_table(code: MachineCode) -> None:
    rows = fp8_paths([code]).to_dicts()
    assert Counter(r["tag"] for r in rows) == {"measured": 1} and rows[0]["build"] == "hd64 causal"


def test_what_cannot_be_shown_says_why(code: MachineCode, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="hd64 causal"):
        read_machine_code("fa3_fwd", "nothing")
    with pytest.raises(CompilerError, match="does not compile"):
        replace(code, compiled=Compiled(code.compiled.request, error="no")).table()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="triton"):
        read_machine_code("fa3_fwd")


def test_one_fp8_build_of_each_kernel_that_has_one() -> None:
    (found,) = read_fp8_builds(["fa3_fwd", "gemm_fp8_block", "no such kernel"])
    assert found.compiled.request.kernel.name == "gemm_fp8_block"
    assert found.answer().startswith("FP8 is on the FP8 path: ")
    assert read_fp8_builds(["fa3_fwd"]) == []
