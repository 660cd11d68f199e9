"""Views of kernels: what a tile walk keeps, what may overlap, what FP8 costs, what the machine code holds.

Each module answers one question: a function finds the numbers, and what it returns has ``figure`` and
``table``. Numbers come from the model, the emulator, torch or the compiler at the moment of asking; a tag
says which.
"""

from __future__ import annotations

from workbench.widgets.lazy import names_in

_WHERE = {
    "attention_row": "row",
    "compare_fp8": "fp8_error",
    "draw_roofline": "roofline",
    "fp8_paths": "machine_code",
    "optional": "missing",
    "read_fp8_builds": "machine_code",
    "read_machine_code": "machine_code",
    "record_overlap": "overlap",
    "walk_row": "tile_walk",
}

__all__ = list(_WHERE)

__getattr__ = names_in(__name__, _WHERE)
