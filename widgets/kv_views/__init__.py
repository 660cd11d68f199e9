"""Views of the KV cache: pages, bytes, what formats lose, where codecs spend bits, what selection keeps.

Each module answers one question: a function finds the numbers, and what it returns has ``figure`` and
``table``; where turning a knob teaches something, also ``live``, which works with the keyboard. Numbers come
from the engine, a calibration or a simulated link at the moment of asking; a tag says which.
"""

from __future__ import annotations

from workbench.widgets.lazy import names_in

_WHERE = {
    "compare_codes": "code_agreement",
    "compare_formats": "format_error",
    "draw_bytes": "byte_time",
    "draw_rates": "rate_distortion",
    "keep_exact": "p1_points",
    "keep_random": "p1_points",
    "measure_hits": "page_use",
    "measure_points": "p1_points",
    "measure_use": "page_use",
    "kept_tokens": "kept_map",
    "ratios_by_length": "length_ratio",
    "read_cache": "cache_rows",
    "read_spectrum": "spectrum",
    "round_trips": "format_error",
    "stream_context": "transfer_view",
    "watch_pages": "page_film",
}

__all__ = list(_WHERE)

__getattr__ = names_in(__name__, _WHERE)
