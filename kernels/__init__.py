"""Kernels of the workbench, imported as `workbench.kernels`.

A kernel is one file: the maths, a plain reference, the Triton or Gluon form, the configurations it is
compiled in and the machine code they must become. Kernels know tensors and number formats only; nothing above
`workbench.numerics` is imported here. Importing this package loads neither triton nor a driver; `load` does.
The folder lies at the top of the tree and is reached through a link, because `kernels` is also the name of a
package on PyPI and must not be shadowed.
"""

from __future__ import annotations

import importlib
import importlib.util

from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import MissingExtra, OptionError

__all__ = ["CATALOGUE", "Bound", "Build", "Cost", "Kernel", "load", "names"]

# Kernel files by folder; the name of a file is the name of its kernel.
_FILES = {
    "attention": (
        "fa3_fwd fa_fwd fa3_fwd_fp8 fp8_prepare paged_decode decode_combine kv_append tree_attention"
    ),
    "linear": "w4a16 w8a8 gemm_fp8_block quantize_rows fp4_gemm e8p hadamard",
    "moe": "moe_align moe_grouped",
    "decode": "spec_verify sample",
}

#: Kernel file by name: ``{"paged_decode": "workbench.kernels.attention.paged_decode", ...}``.
CATALOGUE: dict[str, str] = {
    name: f"workbench.kernels.{folder}.{name}" for folder, files in _FILES.items() for name in files.split()
}


def names() -> list[str]:
    """Names of all kernel files, in the order of the catalogue."""
    return list(CATALOGUE)


def load(name: str) -> tuple[Kernel, ...]:
    """Import one kernel file and return what it defines: one kernel, or several that belong together.

    Raises ``OptionError`` for a name the catalogue does not have, ``MissingExtra`` without triton.
    """
    if name not in CATALOGUE:
        raise OptionError(f"There is no kernel {name!r}.", hint=f"Kernels: {', '.join(CATALOGUE)}.")
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("triton", "gpu", f"The kernel {name!r}")
    module = importlib.import_module(CATALOGUE[name])
    found = getattr(module, "KERNELS", None) or (module.KERNEL,)
    return tuple(found)
