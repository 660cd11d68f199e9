"""The models that commands and notebooks take when none is named."""

from __future__ import annotations

DEFAULT_MODEL = "smollm2-135m"
"""The real one: it must have been fetched."""

SHIPPED_MODEL = "tiny"
"""Comes with the repository, so it is always there."""

SHIPPED_MODELS = (SHIPPED_MODEL, "tiny-mtp", "tiny-exit")
"""All that come with it; the others have what some technique needs."""
