"""A recipe: the immutable, ordered, JSON-able set of techniques that is switched on.

It is the whole state of a panel. Equal recipes hash equally, whatever the order in which
their options were written; defaults are left out of the stored form by whoever knows them
(the catalogue), so that ``kivi`` and ``kivi:bits=4`` are the same recipe when 4 is the default.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from workbench.spec.errors import RecipeError
from workbench.spec.technique import Scalar

MAX_RECIPE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Use:
    """One technique switched on, with the options that differ from its defaults (sorted by name)."""

    id: str
    options: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, id: str, /, **options: Scalar) -> Use:
        """``Use.of("kivi", bits=2)``."""
        return cls(id, tuple(sorted(options.items())))

    @classmethod
    def parse(cls, text: str) -> Use:
        """Read ``id``, ``id:k=v,k=v`` or a JSON object with an ``id`` key."""
        text = text.strip()
        if text.startswith("{"):
            return cls.from_json(_loads(text))
        id_, _, rest = text.partition(":")
        if not id_:
            raise RecipeError(
                f"{text!r} names no technique.", hint="Write ID or ID:option=value,option=value."
            )
        options: dict[str, Scalar] = {}
        for item in filter(None, rest.split(",")):
            name, sep, value = item.partition("=")
            if not sep or not name.strip():
                raise RecipeError(f"{item!r} in {text!r} is not option=value.")
            if name.strip() in options:
                raise RecipeError(f"{text!r} gives {name.strip()} twice.", hint="Keep one value per option.")
            options[name.strip()] = _scalar(value.strip())
        return cls(id_.strip(), tuple(sorted(options.items())))

    @classmethod
    def from_json(cls, data: object) -> Use:
        """Read ``{"id": ..., option: value, ...}`` or a bare id string."""
        if isinstance(data, str):
            return cls(data)
        if not isinstance(data, Mapping) or not isinstance(data.get("id"), str):
            raise RecipeError(
                f"{data!r} is not a technique entry.", hint='Write {"id": "...", "option": value}.'
            )
        options = {str(k): v for k, v in data.items() if k != "id"}
        for name, value in options.items():
            if not isinstance(value, bool | int | float | str):
                raise RecipeError(f"{data['id']}.{name} = {value!r} is not a plain value.")
        return cls(data["id"], tuple(sorted(options.items())))

    def to_json(self) -> dict[str, Scalar]:
        """The JSON form read by :meth:`from_json`."""
        return {"id": self.id, **dict(self.options)}

    def to_text(self) -> str:
        """The command-line form read by :meth:`parse`."""
        opts = ",".join(f"{k}={json.dumps(v) if isinstance(v, bool) else v}" for k, v in self.options)
        return f"{self.id}:{opts}" if opts else self.id


@dataclass(frozen=True)
class RecipeDiff:
    """What changes from one recipe to another, by technique id."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclass(frozen=True)
class Recipe:
    """An ordered set of :class:`Use`. Immutable; every edit returns a new recipe."""

    uses: tuple[Use, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for use in self.uses:
            if use.id in seen:
                raise RecipeError(
                    f"{use.id!r} appears twice in the recipe.", hint="Keep one entry per technique."
                )
            seen.add(use.id)

    @classmethod
    def of(cls, *uses: Use | str) -> Recipe:
        """``Recipe.of("paged", Use.of("kivi", bits=2), "ngram:k=4")``."""
        return cls(tuple(u if isinstance(u, Use) else Use.parse(u) for u in uses))

    @classmethod
    def from_json(cls, data: object) -> Recipe:
        """Read a JSON text, a list of entries, or ``{"uses": [...]}``; raises :class:`RecipeError`."""
        if isinstance(data, str | bytes):
            data = _loads(data)
        if isinstance(data, Mapping):
            data = data.get("uses")
        if not isinstance(data, Iterable) or isinstance(data, str):
            raise RecipeError(
                "A recipe is a list of techniques.", hint='For example ["paged", {"id": "kivi"}].'
            )
        return cls(tuple(Use.from_json(item) for item in data))

    def to_json(self) -> list[dict[str, Scalar]]:
        """A list of entries, stable under a round trip."""
        return [u.to_json() for u in self.uses]

    def get(self, id: str) -> Use | None:
        """The entry of a technique, or None when it is off."""
        return next((u for u in self.uses if u.id == id), None)

    def with_(self, use: Use | str) -> Recipe:
        """This recipe with a technique switched on, or its options replaced in place."""
        use = use if isinstance(use, Use) else Use.parse(use)
        if self.get(use.id) is None:
            return Recipe((*self.uses, use))
        return Recipe(tuple(use if u.id == use.id else u for u in self.uses))

    def without(self, *ids: str) -> Recipe:
        """This recipe with techniques switched off; ids that are off already are ignored."""
        return Recipe(tuple(u for u in self.uses if u.id not in ids))

    def diff(self, other: Recipe) -> RecipeDiff:
        """What changes from this recipe to ``other``."""
        mine, theirs = {u.id: u for u in self.uses}, {u.id: u for u in other.uses}
        return RecipeDiff(
            added=tuple(i for i in theirs if i not in mine),
            removed=tuple(i for i in mine if i not in theirs),
            changed=tuple(i for i, u in mine.items() if i in theirs and theirs[i] != u),
        )

    @property
    def key(self) -> str:
        """Hex digest of the recipe; independent of the order of its techniques and options."""
        text = json.dumps(
            sorted((u.to_json() for u in self.uses), key=lambda d: str(d["id"])), sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[Use]:
        return iter(self.uses)

    def __contains__(self, id: object) -> bool:
        return any(u.id == id for u in self.uses)

    def __len__(self) -> int:
        return len(self.uses)

    def __str__(self) -> str:
        return " + ".join(u.to_text() for u in self.uses) or "plain"


_BARE_POINT = re.compile(r"(?<![\w.])\.(?=\d+(e[+-]?\d+)?$)", re.IGNORECASE)


def _scalar(text: str) -> Scalar:
    """A command-line value: JSON literal if it is one (``.5`` is 0.5), else text."""
    try:
        value = json.loads(_BARE_POINT.sub("0.", text))
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str) else text


def _loads(text: str | bytes) -> object:
    if len(text) > MAX_RECIPE_BYTES:
        raise RecipeError(f"The recipe is {len(text):,} bytes long; at most {MAX_RECIPE_BYTES:,} are read.")
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as err:
        raise RecipeError(f"The recipe is not JSON: {err}.") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) < len(pairs):  # JSON would keep the last one in silence
        raise RecipeError(
            f"A name appears twice among {', '.join(k for k, _ in pairs[:8])}.",
            hint="Keep one value per name.",
        )
    return out
