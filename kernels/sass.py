"""What can be read from the machine code of a kernel: opcodes, resources, what runs under a matrix product.

Text in, numbers out; no compiler and no GPU. The disassembly is that of ``nvdisasm -c``, resources those of
``cuobjdump --dump-resource-usage``, warnings those ptxas prints while it compiles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workbench.kernels.spec import Bound, Build

#: Shared memory a block may use on Hopper (227 KiB); the compiler does not check it.
SMEM_LIMIT = 232_448

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
# C75xx: wgmma serialized, for lack of registers or because an accumulator is touched while in flight.
_WARNING = re.compile(r"^.*\bC75\d\d\b.*$", re.MULTILINE)
_WGMMA = ("HGMMA", "QGMMA", "IGMMA")


@dataclass(frozen=True)
class Facts:
    """Facts of one compiled kernel.

    ``opcodes`` counts full opcodes (``HGMMA.64x128x16.F32.BF16``); ``regs`` per thread at entry; ``stack``
    bytes per thread; ``smem`` bytes per block; ``windows`` as :func:`windows` gives them; ``warnings`` are
    lines of ptxas.
    """

    opcodes: Mapping[str, int]
    regs: int
    stack: int
    smem: int
    warps: int
    windows: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    def value(self, name: str) -> float:
        """One fact by the name used in ``Build.sass``: a resource, a summary, or an opcode with modifiers."""
        summaries = {
            "regs": self.regs,
            "stack": self.stack,
            "smem": self.smem,
            "warps": self.warps,
            "overlap": self.overlap,
            "busy_windows": len(self._busy()),
            "warnings": len(self.warnings),
            "spills": self.count("LDL") + self.count("STL"),
            "instructions": sum(self.opcodes.values()),
        }
        return summaries[name] if name in summaries else self.count(name)

    def count(self, opcode: str) -> int:
        """Instructions of an opcode; ``LDS.U8`` counts those LDS that have the modifier U8 among theirs."""
        base, *modifiers = opcode.split(".")
        total = 0
        for full, number in self.opcodes.items():
            first, *has = full.split(".")
            if first == base and all(m in has for m in modifiers):
                total += number
        return total

    @property
    def overlap(self) -> int:
        """Exponentials under an in-flight matrix product, in the main loop's consumer that has fewest.

        The smallest of the busy windows, those with more than half of the largest count; 0 when nothing
        overlaps. ``busy_windows`` is their number: one per consumer.
        """
        return min(self._busy(), default=0)

    def _busy(self) -> list[int]:
        return [w for w in self.windows if w and 2 * w > max(self.windows)]

    def broken(self, build: Build) -> list[str]:
        """What lies outside the build's bounds, in words; also shared memory beyond the chip's limit."""
        found = [
            f"{name} is {self.value(name):g}, must be {bound}"
            for name, bound in {"smem": Bound(0, SMEM_LIMIT), **build.sass}.items()
            if not bound.holds(self.value(name))
        ]
        if self.warnings and "warnings" not in build.sass:
            found.append(f"ptxas warns: {self.warnings[0]}")
        return found


def instructions(disassembly: str) -> Iterator[tuple[str, str]]:
    """``(opcode, operands)`` of each instruction, in the order of the code."""
    for match in _INSTRUCTION.finditer(disassembly):
        yield match[1], match[2].strip()


def opcodes(disassembly: str) -> dict[str, int]:
    """How often each full opcode occurs."""
    return dict(Counter(opcode for opcode, _ in instructions(disassembly)))


def windows(disassembly: str) -> tuple[int, ...]:
    """``MUFU.EX2`` counted while a warpgroup matrix product is in flight, per window of the code.

    A product enters with its first instruction; groups end at an instruction that names the group barrier
    ``gsb0``; ``WARPGROUP.DEPBAR.LE gsb0, n`` retires all but ``n`` groups. A window lasts until none is left.
    The order is that of the code, so this says what may overlap, not for how long.
    """
    found: list[int] = []
    groups, open_group, count = 0, False, 0
    for opcode, operands in instructions(disassembly):
        if opcode.startswith(_WGMMA):
            open_group = True
            if "gsb0" in operands:
                groups, open_group = groups + 1, False
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.rsplit(",", 1)[1], 0)
            groups, open_group = min(groups, left), False
            if not groups:
                found.append(count)
                count = 0
        elif opcode.startswith("MUFU.EX2") and (groups or open_group):
            count += 1
    return tuple(found)


def resources(usage: str) -> dict[str, int]:
    """``REG``, ``STACK``, ``SHARED``, ``LOCAL`` of the largest function that cuobjdump lists."""
    found: dict[str, int] = {}
    for name, value in _RESOURCE.findall(usage):
        found[name] = max(found.get(name, 0), int(value))
    return found


def warnings(log: str) -> tuple[str, ...]:
    """Lines of ptxas about serialized warpgroup products (C75xx)."""
    return tuple(line.strip() for line in _WARNING.findall(log))
