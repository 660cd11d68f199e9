"""What was measured, with provenance: :class:`Metric` and :class:`Run`.

Every number carries a tag that travels with it to the plot: *measured* (on this machine),
*predicted* (analytic), *simulated* (real tokens, virtual clock or topology) or *claimed*
(a source says so). A run is JSON-able both ways and is what the record store keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from workbench.spec.recipe import Recipe

Tag = Literal["measured", "predicted", "simulated", "claimed"]


@dataclass(frozen=True)
class Metric:
    """A number that knows what it is.

    ``spread`` is (low, high) over ``n`` repetitions when it was repeated; ``of`` says what a
    ratio is relative to; ``better`` says which direction is an improvement, if either is.
    """

    name: str
    value: float
    unit: str
    tag: Tag = "measured"
    n: int = 1
    spread: tuple[float, float] | None = None
    of: str = ""
    better: Literal["lower", "higher", ""] = ""
    note: str = ""


@dataclass(frozen=True)
class Provenance:
    """Where a run's numbers come from; captured by allow-list, never the whole environment."""

    workbench: str
    python: str
    torch: str
    platform: str
    cpu: str
    device: str
    threads: int
    profile: Literal["interactive", "bench"]
    created: str
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One measured run of one recipe on one model.

    ``memory`` is bytes by category from storages really held. ``tokens`` is one row per
    committed token of each output (``workbench.spec.events.TokenInfo`` as a dict), ``steps`` one
    row per engine step, so that any number on screen leads back to its events.
    """

    id: str
    kind: str  # generate | measure | bench
    model: str
    weight_hash: str
    recipe: list[dict[str, Any]]
    recipe_key: str
    plan: dict[str, Any]
    numerics: str
    dtype: str
    seed: int
    state: Literal["done", "cancelled", "failed"]
    prompts: tuple[str, ...] = ()
    outputs: tuple[dict[str, Any], ...] = ()  # text, token_ids, finish, sample, cached_tokens, tokens
    metrics: tuple[Metric, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    steps: tuple[dict[str, Any], ...] = ()
    provenance: Provenance | None = None
    notes: tuple[str, ...] = ()
    error: Mapping[str, str] | None = None

    @property
    def text(self) -> str:
        """Text of the first output."""
        return str(self.outputs[0]["text"]) if self.outputs else ""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first output."""
        return list(self.outputs[0]["token_ids"]) if self.outputs else []

    @property
    def contestants(self) -> tuple[str, ...]:
        """All that a bench run measured side by side, recipes and other engines; empty for other runs."""
        bench = self.plan.get("bench")
        return tuple(map(str, bench.get("contestants", ()))) if isinstance(bench, Mapping) else ()

    @property
    def subject(self) -> str:
        """What was run, in words: the recipe, or a benchmark and all that competed in it."""
        if self.contestants:
            return f"{self.plan['bench']['name']}: {' vs '.join(self.contestants)}"
        return str(Recipe.from_json(self.recipe))

    def metric(self, name: str) -> Metric | None:
        """The metric of that name, if it was measured."""
        return next((m for m in self.metrics if m.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON form: lists for tuples, text for keys."""
        data: dict[str, Any] = plain(asdict(self))
        return data


def plain(value: Any) -> Any:
    """Plain JSON data: tuples become lists, mapping keys text; nothing else changes."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, tuple | list) else value
