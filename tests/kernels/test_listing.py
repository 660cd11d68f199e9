"""Machine code as a list: lines, kinds, and what runs under a product, on text whose answer is known."""

from __future__ import annotations

from collections import Counter

import pytest

from workbench.kernels import aot, sass
from workbench.kernels.listing import listing, short

TEXT = """
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED"
	//## File "/a/workbench/kernels/attention/fa3_kernel.py", line 64
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
	//## File "/a/workbench/kernels/attention/fa3_kernel.py", line 90
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/                   MUFU.EX2 R1, R1 ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0050*/               @P1 MUFU.EX2 R2, R2 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
	//## File "/b/site-packages/triton/language/standard.py", line 263
        /*0070*/                   MUFU.EX2 R3, R3 ;
        /*0080*/                   STL [R1], R2 ;
        /*0090*/                   UTMALDG.2D [UR8], [UR4] ;
        /*00a0*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*00b0*/                   PRMT R4, R8, 0x5410, R4 ;
"""


def test_lines_kinds_and_what_is_in_flight() -> None:
    found = listing(TEXT)
    assert [i.address for i in found] == list(range(0, 0xC0, 16))
    assert [(i.file, i.line) for i in found[1:3]] == [
        ("attention/fa3_kernel.py", 64),
        ("attention/fa3_kernel.py", 90),
    ]
    assert found[7].file == "language/standard.py"
    assert found[1].text == "@!P0 BRA `(.L_x_3)" and found[1].base == "BRA"
    assert [i.kind for i in found] == [
        "other", "other", "product", "exponential", "product", "exponential", "wait",
        "exponential", "spill", "copy", "product 16-bit", "conversion",
    ]  # fmt: skip
    assert [i.address for i in found if i.under] == [0x20, 0x30, 0x40, 0x50, 0x60]


def test_it_agrees_with_what_is_counted() -> None:
    found = listing(TEXT)
    assert Counter(i.opcode for i in found) == sass.opcodes(TEXT)
    assert sum(i.under and i.kind == "exponential" for i in found) == sum(sass.windows(TEXT)) == 2


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/x/workbench/kernels/linear/w4a16.py", "linear/w4a16.py"),
        ("/x/kernels/y/kernels/moe/a.py", "moe/a.py"),
        ("C:\\\\x\\\\triton\\\\language\\\\standard.py", "language/standard.py"),
        ("a.py", "a.py"),
    ],
)
def test_files_are_told_without_the_machine(path: str, told: str) -> None:
    assert short(path.replace("\\\\", "\\")) == told


def test_a_real_kernel_is_read_whole_with_its_lines() -> None:
    request = next(r for r in aot.requests(["fa3_fwd"]) if r.build.name == "hd64 causal")
    (compiled,) = aot.compile_builds([request])
    assert compiled.facts is not None, compiled.error
    with open(compiled.sass, encoding="utf-8") as file:
        found = listing(file.read())
    assert Counter(i.opcode for i in found) == compiled.facts.opcodes
    assert sum(i.under and i.kind == "exponential" for i in found) == sum(compiled.facts.windows)
    files = Counter(i.file for i in found)
    assert files["attention/fa3_kernel.py"] > 500 and files["attention/fa3_schedule.py"] > 20
