"""Everything a panel shows, as one small JSON value: model, where it runs, recipe, prompt, sampling.

A panel is rebuilt from it after a kernel restart, in a script, or on another machine. It holds no result:
results are runs, kept by the record store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from workbench.engine.params import SamplingParams
from workbench.spec.errors import RecipeError
from workbench.spec.plan import DType, Numerics
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
    dtype: str = "bfloat16"
    device: str = "cpu"
    numerics: str = "fast"

    def __post_init__(self) -> None:
        unknown = set(self.sampling) - _SAMPLING
        if unknown:
            raise RecipeError(
                f"Sampling has no field {sorted(unknown)[0]!r}.",
                hint=f"Its fields: {', '.join(sorted(_SAMPLING))}.",
            )
        for name, known in (("dtype", get_args(DType)), ("numerics", get_args(Numerics))):
            if getattr(self, name) not in known:
                raise RecipeError(
                    f"{name} = {getattr(self, name)!r} is unknown.", hint=f"Choose one of {', '.join(known)}."
                )
        self.params()

    @property
    def place(self) -> str:
        """What a number was measured with: model, number format, device, numerics class, recipe."""
        return " ".join((self.model, self.dtype, self.device, self.numerics, self.recipe.key))

    def of_session(self, session: Any, before: Any = None) -> PanelState:
        """The state with what a session decides. ``before``: the session it replaces; a prompt that went
        through its model's chat template, or did not for want of one, does as the new model allows."""
        plan, chat = session.plan, self.chat
        if before is not None and chat == (before.tokenizer.chat_template is not None):
            chat = session.tokenizer.chat_template is not None
        return replace(
            self, model=plan.model, recipe=session.recipe, dtype=plan.dtype, device=plan.device,
            numerics=plan.numerics, chat=chat,
        )  # fmt: skip

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
            "dtype": self.dtype,
            "device": self.device,
            "numerics": self.numerics,
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
        places = {k: data[k] for k in ("dtype", "device", "numerics") if k in data}
        if not all(isinstance(v, str) for v in places.values()):
            raise RecipeError("dtype, device and numerics are text.")
        recipe = Recipe.from_json(data.get("recipe", []))
        return cls(data["model"], recipe, prompt, dict(sampling), chat, **places)
