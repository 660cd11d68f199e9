"""Machine code as a list: what an instruction is for, where it comes from, and what it runs under.

Text in (``nvdisasm -c -g``), plain data out. Lines are those of the source a kernel was written in; what the
compiler's own library wrote (reductions) belongs to its file. The order is that of the code, not of time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["product", "product 16-bit", "copy", "exponential", "wait", "spill", "conversion", "other"]

_WGMMA = ("HGMMA", "QGMMA", "IGMMA")
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(_WGMMA, "product"),
    **dict.fromkeys(("HMMA", "IMMA", "QMMA"), "product 16-bit"),
    **dict.fromkeys(("UTMALDG", "UTMASTG", "LDGSTS"), "copy"),
    **dict.fromkeys(("SYNCS", "WARPGROUP", "BAR", "DEPBAR"), "wait"),
    **dict.fromkeys(("LDL", "STL"), "spill"),
    **dict.fromkeys(("I2F", "I2FP", "F2F", "F2FP", "PRMT"), "conversion"),
}
_LINE = re.compile(
    r"//## File \"(?P<file>[^\"]+)\", line (?P<line>\d+)"
    r"|/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P[T0-9]+\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)(?P<rest>[^;]*);"
)


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``file`` is shortened to folder and name, "" when the compiler names no line.

    ``under``: a warpgroup product is in flight when it is reached in the order of the code.
    """

    address: int
    opcode: str
    text: str
    file: str
    line: int
    under: bool

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def kind(self) -> Kind:
        """What it is for."""
        if self.opcode.startswith("MUFU.EX2"):
            return "exponential"
        return _KINDS.get(self.base, "other")


def listing(disassembly: str) -> list[Instruction]:
    """All instructions in the order of the code."""
    return list(_read(disassembly))


def _read(disassembly: str) -> Iterator[Instruction]:
    file, line = "", 0
    groups, is_open = 0, False
    for match in _LINE.finditer(disassembly):
        if match["file"]:
            file, line = short(match["file"]), int(match["line"])
            continue
        opcode, rest = match["opcode"], match["rest"].strip()
        # As `sass.windows` counts: a product enters with its first instruction, a group ends at gsb0.
        if opcode.startswith(_WGMMA):
            is_open = True
            if "gsb0" in rest:
                groups, is_open = groups + 1, False
        text = " ".join(part for part in ((match["guard"] or "").strip(), opcode, rest) if part)
        yield Instruction(int(match["at"], 16), opcode, text, file, line, bool(groups or is_open))
        if opcode.startswith("WARPGROUP.DEPBAR"):
            groups, is_open = min(groups, int(rest.rsplit(",", 1)[1], 0)), False


def short(path: str) -> str:
    """``attention/fa3_kernel.py`` for a file of the kernels, the last two parts for any other."""
    parts = path.replace("\\", "/").split("/")
    if "kernels" in parts[:-1]:
        return "/".join(parts[len(parts) - parts[::-1].index("kernels") :])
    return "/".join(parts[-2:])
