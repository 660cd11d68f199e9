"""Recipes to start from, by what they are for. One that the catalogue cannot build is not offered."""

from __future__ import annotations

from workbench.core import catalog
from workbench.spec.recipe import Recipe

_PRESETS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "serving: pages, prefixes, chunks": ("paged", "prefix_cache", "chunked_prefill"),
    "memory: pages, 4-bit KV": ("paged", "kivi"),
    "speed: pages, n-gram drafts": ("paged", "ngram"),
    "together: pages, 4-bit KV, drafts": ("paged", "kivi", "ngram"),
}


def presets() -> dict[str, Recipe]:
    """Recipes by name, in the order of the menu."""
    return {name: Recipe.of(*ids) for name, ids in _PRESETS.items() if all(i in catalog.MODULES for i in ids)}
