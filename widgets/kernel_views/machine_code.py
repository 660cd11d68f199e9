"""What did the compiler make of it? A kernel's source beside its Hopper machine code, and the facts in it.

Compiled ahead of time, here, without a GPU (from the cache when the source did not change). A strip shows
the instructions that matter in the order of the code: exponentials that stand while a matrix product is in
flight can run beside it, others cannot. The code is measured; how fast it runs only a GPU can say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import kernels
from workbench.kernels.aot import Compiled, compile_builds, requests
from workbench.kernels.listing import Instruction, listing
from workbench.spec.errors import CompilerError, OptionError
from workbench.widgets import figures
from workbench.widgets.kernel_views import source_view
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table

#: Kernel files that read FP8: attention, a linear layer, and a cache that is decoded.
FP8_KERNELS = ("fa3_fwd_fp8", "gemm_fp8_block", "paged_decode")
_IN_FLIGHT = "rgba(47,127,209,0.13)"
#: Lanes of the strip, top down: name and colour.
LANES: tuple[tuple[str, str], ...] = (
    ("matrix product", "#2f7fd1"),
    ("exponential under a product", "#12908e"),
    ("exponential alone", "#d9822b"),
    ("copy (TMA)", "#8a63c9"),
    ("wait or barrier", "#9aa3ad"),
    ("spill", "#c8443c"),
)
#: Facts shown even where a build promises nothing about them.
_FACTS = (
    "HGMMA", "QGMMA", "IGMMA", "HMMA", "UTMALDG", "UTMASTG", "LDGSTS", "USETMAXREG", "spills", "PRMT", "I2F",
    "regs", "smem",
)  # fmt: skip


@dataclass(frozen=True)
class MachineCode:
    """One build, compiled and read."""

    compiled: Compiled
    code: tuple[Instruction, ...]

    @property
    def name(self) -> str:
        """Kernel, build and target."""
        return self.compiled.request.label

    @property
    def title(self) -> str:
        """Kernel and build."""
        return f"{self.compiled.request.kernel.name}, {self.compiled.request.build.name}"

    def lane(self, one: Instruction) -> str:
        """The lane of the strip that an instruction is drawn in; "" for none."""
        if one.kind == "exponential":
            return LANES[1][0] if one.under else LANES[2][0]
        kinds = {
            "product": LANES[0][0], "product 16-bit": LANES[0][0], "copy": LANES[3][0], "wait": LANES[4][0],
            "spill": LANES[5][0],
        }  # fmt: skip
        return kinds.get(one.kind, "")

    def figure(self, theme: Theme = "auto") -> Any:
        """The strip: one mark per instruction, grey bands while a warpgroup product is in flight."""
        beneath = sum(i.kind == "exponential" and i.under for i in self.code)
        every = sum(i.kind == "exponential" for i in self.code)
        out = figures.new(
            f"{self.title}: {beneath} of {every} exponentials under a product (measured)",
            theme=theme, x="instruction, in the order of the code",
        )  # fmt: skip
        for start, end in self._bands():
            out.add_vrect(x0=start, x1=end, fillcolor=_IN_FLIGHT, line={"width": 0}, layer="below")
        for lane, colour in LANES:
            mine = [(n, i) for n, i in enumerate(self.code) if self.lane(i) == lane]
            out.add_scatter(
                x=[n for n, _ in mine], y=[lane] * len(mine), mode="markers", name=lane, showlegend=False,
                marker={"symbol": "line-ns-open", "size": 16, "color": colour, "line": {"width": 1.2}},
                customdata=[f"{i.opcode}<br>{i.file}:{i.line}" for _, i in mine],
                hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip
        out.update_yaxes(
            categoryorder="array", categoryarray=[lane for lane, _ in LANES][::-1], showgrid=False
        )
        out.update_xaxes(range=[0, len(self.code)])
        out.update_layout(height=304, margin={"l": 190})
        return out

    def table(self) -> Table:
        """Facts of the machine code beside the bounds that the build promises."""
        facts, build = self.compiled.facts, self.compiled.request.build
        if facts is None:
            raise CompilerError(f"{self.name} does not compile: {self.compiled.error}")
        names = dict.fromkeys((*(n for n in _FACTS if facts.value(n)), *build.sass))
        rows = []
        for name in names:
            bound = build.sass.get(name)
            verdict = "" if bound is None else "kept" if bound.holds(facts.value(name)) else "broken"
            rows.append((name, facts.value(name), str(bound or "–"), verdict, "measured"))
        kind = " A negative control: it must break a bound." if build.fails else ""
        note = (
            f"Triton {self.compiled.triton}, {len(self.code)} instructions; overlap: exponentials under an "
            f"in-flight product in the main loop, per consumer.{kind} {self.answer()}"
        )
        return Table.of(("fact", "value", "promise", "", "tag"), rows, note=note)

    def answer(self) -> str:
        """Is FP8 really on the FP8 path?"""
        return fp8_answer(self.compiled)

    def page(self) -> source_view.SourceView:
        """Source and machine code side by side, for a cell."""
        return source_view.SourceView(self.name, self.code, Path(kernels.__file__).parent)

    def _bands(self) -> list[tuple[int, int]]:
        bands: list[tuple[int, int]] = []
        start = None
        for n, one in enumerate((*self.code, None)):
            under = one is not None and one.under
            if under and start is None:
                start = n
            elif not under and start is not None:
                bands.append((start, n))
                start = None
        return bands


def read_machine_code(kernel: str = "fa3_fwd", *builds: str) -> list[MachineCode]:
    """Compile builds of a kernel file (its first one by default) and read them, in the order given.

    Raises ``OptionError`` for a build that is none of the kernel's, ``MissingExtra`` without triton, and
    ``CompilerError`` when one does not compile.
    """
    offered = requests([kernel])
    wanted = []
    for name in builds or (offered[0].build.name,):
        found = [r for r in offered if name in (r.build.name, f"{r.kernel.name}: {r.build.name}")]
        if not found:
            raise OptionError(
                f"{kernel} has no build {name!r}.",
                hint=f"Builds: {', '.join(r.build.name for r in offered)}.",
            )
        wanted.append(found[0])
    return [_read(compiled) for compiled in compile_builds(wanted)]


def read_fp8_builds(names: Sequence[str] = FP8_KERNELS) -> list[MachineCode]:
    """The first build with FP8 inputs of each named kernel file that is there and has one."""
    first: dict[str, Any] = {}
    for request in requests([n for n in names if n in kernels.CATALOGUE]):
        takes_fp8 = any("fp8" in kind for kind in request.build.signature.values())
        if takes_fp8 and not request.build.fails:
            first.setdefault(request.module, request)
    return [_read(compiled) for compiled in compile_builds(list(first.values()))]


def fp8_answer(compiled: Compiled) -> str:
    """One sentence: which matrix instructions a build uses, and whether FP8 inputs reach them as FP8."""
    facts, build = compiled.facts, compiled.request.build
    if facts is None:
        return f"Does not compile: {compiled.error.splitlines()[0] if compiled.error else 'no reason given'}"
    counts = {name: facts.count(name) for name in ("QGMMA", "HGMMA", "IGMMA", "HMMA", "IMMA")}
    used = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "no matrix instruction"
    has_fp8 = any("fp8" in kind for kind in build.signature.values())
    sixteen = counts["HGMMA"] + counts["HMMA"]
    if not has_fp8:
        return f"No FP8 here: {used}."
    if counts["QGMMA"] and not sixteen:
        return f"FP8 is on the FP8 path: {used}."
    if counts["QGMMA"]:
        return f"Partly on the FP8 path: {used}."
    if sixteen:
        return f"FP8 in memory only, multiplied in 16 bits: {used}."
    return f"FP8 is read or written, but not multiplied: {used}."


def fp8_paths(codes: Sequence[MachineCode]) -> Table:
    """The answer for several builds."""
    asked = [(c.compiled.request, c.answer()) for c in codes]
    rows = [(r.kernel.name, r.build.name, answer, "measured") for r, answer in asked]
    return Table.of(("kernel", "build", "is FP8 really on the FP8 path?", "tag"), rows)


def _read(compiled: Compiled) -> MachineCode:
    if compiled.facts is None:
        raise CompilerError(
            f"{compiled.request.label} does not compile: {compiled.error}",
            hint="Compare the installed triton with the versions the kernels are tested with.",
        )
    return MachineCode(compiled, tuple(listing(Path(compiled.sass).read_text(encoding="utf-8"))))
