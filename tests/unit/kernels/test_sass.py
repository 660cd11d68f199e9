"""Reading machine code: opcodes with modifiers and predicates, resources, warnings, windows of overlap."""

from __future__ import annotations

from workbench.kernels import sass
from workbench.kernels.spec import Bound, Build

CODE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   UTMALDG.4D [UR8], [UR4], desc[UR10] ;
        /*0020*/              @P0  LDS.U8 R2, [R3] ;
        /*0030*/             @!UP0 LDS.U8.S8 R2, [R3] ;
        /*0040*/             @!PT  LDS R2, [R3] ;
.L_x_1:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR4], R88, gsb0 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0090*/                   MUFU.EX2 R2, R3 ;
        /*00a0*/                   MUFU.EX2.F16 R2, R3 ;
        /*00b0*/                   MUFU.RCP R2, R3 ;
        /*00c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00d0*/                   MUFU.EX2 R2, R3 ;
        /*00e0*/                   STL [R1], R2 ;
        /*10000*/                  EXIT ;
"""


def facts(code: str = CODE, **changes: object) -> sass.Facts:
    base = {"regs": 168, "stack": 0, "smem": 1000, "warps": 4, "windows": sass.windows(code)}
    return sass.Facts(opcodes=sass.opcodes(code), **{**base, **changes})  # type: ignore[arg-type]


def test_opcodes_are_counted_with_and_without_modifiers() -> None:
    found = facts()
    assert found.value("HGMMA") == 3
    assert found.value("LDS") == 3
    assert found.value("LDS.U8") == 2
    assert found.value("LDS.S8") == 1
    assert found.value("UTMALDG") == 1
    assert found.value("STL") == 1
    assert found.value("spills") == 1
    assert found.value("MUFU.EX2") == 3
    assert found.value("HMMA") == 0
    assert found.value("instructions") == 16


def test_exponentials_count_only_while_a_product_is_in_flight() -> None:
    assert sass.windows(CODE) == (2,)
    assert facts().overlap == 2
    waited = CODE.replace("gsb0, 0x1", "gsb0, 0x0")
    assert sass.windows(waited) == (0, 0)
    assert facts(waited).overlap == 0


def test_overlap_is_that_of_the_worst_consumer() -> None:
    assert facts(windows=(0, 66, 0, 66, 2)).overlap == 66
    assert facts(windows=(66, 40)).overlap == 40
    assert facts(windows=()).overlap == 0
    assert [facts(windows=w).value("busy_windows") for w in ((0, 66, 0, 66, 2), (0, 66, 0, 0), (0, 0))] == [
        2,
        1,
        0,
    ]


def test_bounds_speak_when_broken() -> None:
    build = Build("b", {}, {}, sass={"HGMMA": Bound(3, 3), "LDS.U8": Bound(0, 0), "regs": Bound(0, 100)})
    assert facts().broken(build) == ["LDS.U8 is 2, must be = 0", "regs is 168, must be <= 100"]
    assert facts(smem=240_000).broken(Build("b", {}, {})) == ["smem is 240000, must be <= 232448"]
    warned = facts(warnings=("ptxas info : (C7512) Potential Performance Loss: wgmma serialized",))
    assert len(warned.broken(Build("b", {}, {}))) == 1
    assert warned.broken(Build("b", {}, {}, sass={"warnings": Bound(1)})) == []


def test_resources_are_those_of_the_largest_function() -> None:
    usage = (
        " Function a:\n  REG:168 STACK:0 SHARED:0 LOCAL:0\n Function b:\n  REG:40 STACK:16 SHARED:8 LOCAL:0"
    )
    assert sass.resources(usage) == {"REG": 168, "STACK": 16, "SHARED": 8, "LOCAL": 0}


def test_only_warpgroup_warnings_are_kept() -> None:
    log = "ptxas info    : (C7512) wgmma serialized\nptxas info    : Used 168 registers, 12 C750 x\n"
    assert sass.warnings(log) == ("ptxas info    : (C7512) wgmma serialized",)


def test_bounds_print_as_people_write_them() -> None:
    shown = [str(Bound(8, 8)), str(Bound(4)), str(Bound(0, 96)), str(Bound(2, 5))]
    assert shown == ["= 8", ">= 4", "<= 96", "2 to 5"]
