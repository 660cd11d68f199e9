"""What planning decides: either a :class:`Plan`, or the :class:`Conflict` s that prevent one.

Both are plain data. A panel greys a toggle and shows ``Conflict.remedy``; the command
line prints the same sentence; ``workbench.core.plan`` is the only place that makes them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe

Numerics = Literal["pinned", "fast"]
DType = Literal["float64", "float32", "bfloat16"]


@dataclass(frozen=True)
class Conflict:
    """Two parties that cannot share ``resource``; ``remedy`` is one sentence for a person.

    ``first`` is the technique in question, ``second`` the other technique, or what else
    stands against it: ``model``, ``device``, ``install``, ``engine``.
    """

    first: str
    second: str
    resource: str
    remedy: str

    def to_dict(self) -> dict[str, str]:
        """JSON form."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.first} × {self.second} ({self.resource}): {self.remedy}"


@dataclass(frozen=True)
class EngineLimits:
    """Sizes the engine is planned for.

    ``kv_pool_tokens`` slots per KV group are allocated once; ``max_batch_tokens`` is the token
    budget of one step (a prefill chunk shares it with all decodes), 0 means unlimited.
    """

    kv_pool_tokens: int = 8192
    max_batch_tokens: int = 0
    max_sequences: int = 64
    max_context: int = 0  # 0: the model's own


MAX_THREADS = 1024  # beyond it thread libraries abort the process instead of refusing


def check_threads(threads: object) -> None:
    """Raise :class:`OptionError` unless ``threads`` is None or a number of CPU threads that can be had."""
    if threads is None:
        return
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MAX_THREADS:
        raise OptionError(
            f"threads = {threads!r} must be a whole number from 1 to {MAX_THREADS}.",
            hint="The number of physical cores is the best choice.",
        )


@dataclass(frozen=True)
class Plan:
    """A recipe that fits, and everything that was negotiated for it."""

    recipe: Recipe
    model: str
    model_fingerprint: str
    device: str
    dtype: DType
    numerics: Numerics
    page_size: int
    limits: EngineLimits
    kind: Literal["exact", "lossy", "simulated"]
    provides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    configs: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, without the config objects (the recipe holds their values)."""
        data = asdict(self)
        data.pop("configs")
        data["recipe"] = self.recipe.to_json()
        return data
