"""Everything a panel shows, as one small JSON value: model, recipe, prompt, sampling.

A panel is rebuilt from it after a kernel restart, in a script, or on another machine. It holds no result:
results are runs, kept by the record store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from workbench.engine.params import SamplingParams
from workbench.spec.errors import RecipeError
from workbench.spec.recipe import MAX_RECIPE_BYTES, Recipe

DEFAULT_PROMPT = "Why is the sky blue?"
_SAMPLING = frozenset(f.name for f in fields(SamplingParams))


@dataclass(frozen=True)
class PanelState:
    """One panel's state.

    ``sampling`` holds :class:`SamplingParams` fields that differ from their defaults. ``chat``: the prompt is
    a message for the model's chat template; otherwise it is continued as it stands. Raises
    :class:`SamplingError` for a value out of range.
    """

    model: str
    recipe: Recipe = field(default_factory=Recipe)
    prompt: str = DEFAULT_PROMPT
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True

    def __post_init__(self) -> None:
        unknown = set(self.sampling) - _SAMPLING
        if unknown:
            raise RecipeError(
                f"Sampling has no field {sorted(unknown)[0]!r}.",
                hint=f"Its fields: {', '.join(sorted(_SAMPLING))}.",
            )
        self.params()

    def params(self) -> SamplingParams:
        """The sampling settings of a run."""
        values = dict(self.sampling)
        if isinstance(values.get("stop"), list):
            values["stop"] = tuple(values["stop"])
        return SamplingParams(**values)

    def to_json(self) -> dict[str, Any]:
        """JSON form, read by :meth:`from_json`."""
        return {
            "model": self.model,
            "recipe": self.recipe.to_json(),
            "prompt": self.prompt,
            "sampling": {k: list(v) if isinstance(v, tuple) else v for k, v in sorted(self.sampling.items())},
            "chat": self.chat,
        }

    @classmethod
    def from_json(cls, data: object) -> PanelState:
        """Read a JSON text or mapping; raises :class:`RecipeError` when it is not a panel's state."""
        if isinstance(data, str | bytes):
            if len(data) > MAX_RECIPE_BYTES:
                raise RecipeError(
                    f"The state is {len(data):,} bytes long; at most {MAX_RECIPE_BYTES:,} are read."
                )
            try:
                data = json.loads(data)
            except ValueError as err:
                raise RecipeError(f"The panel's state is not JSON: {err}.") from None
        if not isinstance(data, Mapping) or not isinstance(data.get("model"), str):
            raise RecipeError(
                "This is not the state of a panel.", hint='It looks like {"model": "tiny", "recipe": [...]}.'
            )
        prompt, sampling, chat = (
            data.get("prompt", DEFAULT_PROMPT),
            data.get("sampling", {}),
            data.get("chat", True),
        )
        if not isinstance(prompt, str) or not isinstance(sampling, Mapping) or not isinstance(chat, bool):
            raise RecipeError("prompt is text, sampling an object, chat true or false.")
        return cls(data["model"], Recipe.from_json(data.get("recipe", [])), prompt, dict(sampling), chat)
