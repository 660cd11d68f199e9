"""What a launch on a Hopper GPU would compile: the wrappers' own arguments through triton's specialization.

Ahead-of-time builds name their argument types themselves; a launch derives them from tensors, descriptors and
numbers (1 and multiples of 16 are special). A driver that only names the target stands in for the GPU, in a
process that does not interpret; nothing is loaded or run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


driver.set_active(Hopper())
from workbench.kernels import sass
from workbench.kernels.aot_worker import _dump
from workbench.kernels.attention.fa3_fwd import fa3_fwd
from workbench.kernels.attention.fa3_fwd_fp8 import fa3_fwd_fp8
from workbench.kernels.attention.fp8_prepare import reference
from workbench.numerics.hadamard import random_signs

found = []


class Compile:
    blocks = 1

    def launch(self, kernel, blocks, arguments):
        compiled = kernel.warmup(**arguments, grid=(blocks,), num_warps=4)
        other = arguments | {"n_items": 16, "n_tiles": 16, "lse_row": 1}
        again = kernel.warmup(**other, grid=(blocks,), num_warps=4)
        code, usage = _dump(compiled.asm["cubin"])
        counts = {}
        for opcode, number in sass.opcodes(code).items():
            counts[opcode.split(".")[0]] = counts.get(opcode.split(".")[0], 0) + number
        found.append({
            "kernel": kernel.__name__, "regs": sass.resources(usage)["REG"], "smem": compiled.metadata.shared,
            "overlap": max(sass.windows(code)), "compiled_once": compiled is again, **counts,
        })


for heads, lens in ((1, [1]), (2, [128, 64])):
    q, k, v = (torch.zeros(sum(lens), h, 64, dtype=torch.bfloat16) for h in (heads, 1, 1))
    fa3_fwd(q, k, v, lens, lens, emulator=Compile())
    fa3_fwd_fp8(reference(q, k, v, lens, lens, random_signs(64, 0)), emulator=Compile())
print(json.dumps(found))
"""


@pytest.mark.timeout(600)
def test_a_launch_compiles_to_the_promised_code_once_for_all_sizes() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert [f["kernel"] for f in found] == ["fa3_fwd_kernel", "fa3_fwd_fp8_kernel"] * 2
    for facts in found:
        assert facts["regs"] == 168 and facts["smem"] <= 232_448
        assert "LDL" not in facts and "STL" not in facts
        assert facts["overlap"] >= 60
        assert facts["compiled_once"]
        product = "QGMMA" if "fp8" in facts["kernel"] else "HGMMA"
        assert facts[product] >= 16
