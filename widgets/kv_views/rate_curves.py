"""Which points of a rate-distortion plane belong to one curve: a method at several values of one option.

Two points that differ in more are not joined: nothing lies between them. An option counts when its values
have an order, as numbers do and lists of numbers (``32/16/16``); what always goes together, as the ratios of
keys and values, is one option.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workbench.core import catalog
from workbench.core.kv_runs import RatePoint
from workbench.core.kv_storage_methods import STORAGE
from workbench.spec.errors import WorkbenchError
from workbench.spec.recipe import Use
from workbench.spec.technique import Scalar, options_of

Options = dict[str, Scalar]


def curves(points: Sequence[RatePoint]) -> list[list[RatePoint]]:
    """Points to be joined, two or more each, in the order of the option that varies."""
    known = [(p, found) for p in points if (found := options(p.method)) is not None]
    out: list[list[RatePoint]] = []
    for name in dict.fromkeys(n for _, found in known for n in found):
        groups: dict[object, list[tuple[tuple[float, ...], RatePoint]]] = {}
        for p, found in known:
            if (at := _order(found.get(name))) is not None:
                rest = tuple(sorted((k, repr(v)) for k, v in found.items() if k != name))
                groups.setdefault((p.technique, rest), []).append((at, p))
        for group in groups.values():
            group.sort(key=lambda pair: pair[0])
            if len({at for at, _ in group}) > 1:
                out.append([p for _, p in group])
    return out


def options(method: str) -> Options | None:
    """Every option of a method in full, as ``technique.option``; None for a name that is no method's text."""
    try:
        uses = [Use.parse(part) for part in method.split("+")]
        return dict(item for use in uses for item in _of(use))
    except WorkbenchError:
        return None


def _of(use: Use) -> Iterator[tuple[str, Scalar]]:
    if use.id in STORAGE:
        config, together = STORAGE[use.id].configure(use.id, dict(use.options)), STORAGE[use.id].aliases
        names = [o.name for o in options_of(STORAGE[use.id].config)]
    else:
        technique = catalog.get(use.id)
        config, together, names = (
            technique.configure(dict(use.options)),
            {},
            [o.name for o in technique.options],
        )
    values: Options = {n: getattr(config, n) for n in names}
    for short, full in together.items():
        if len({values[n] for n in full}) == 1:
            values[short] = values[full[0]]
            for n in full:
                del values[n]
    return ((f"{use.id}.{n}", v) for n, v in values.items())


def _order(value: Scalar | None) -> tuple[float, ...] | None:
    """What a value is sorted by; None when it has no order."""
    if isinstance(value, str):
        parts = value.split("/")
        return tuple(map(float, parts)) if len(parts) > 1 and all(p.isdecimal() for p in parts) else None
    return None if value is None or isinstance(value, bool) else (float(value),)
