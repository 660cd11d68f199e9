"""Names that Gluon changed between triton 3.6 and 3.9, under one name each.

The TMA copies ``async_copy_global_to_shared`` and ``async_copy_shared_to_global`` became ``async_load`` and
``async_store``; 3.9 dropped the old ones. Kernels import from here; the emulator knows both spellings.
"""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
