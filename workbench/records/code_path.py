"""The code path of a run in words: the technique and its options in place of the engine's keys.

A key names everything that decides a cached page's bits, calibration included, by digests of many digits. A
run keeps it whole; on a screen the names do, and a few digits where two paths read alike but are not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.core import catalog

DIGITS = 7
_SEAMS = {
    "attention": "attention",
    "kv": "KV",
    "linear": "linear",
    "rest": "KV at rest",
    "select": "KV selection",
    "decoded": "decoded copy",
    "draft": "drafting",
    "round": "round",
}
_PLAIN = "plain/"
_DIGEST = re.compile(r"[0-9a-f]{12,}")


def in_words(
    path: Sequence[str], recipe: Iterable[Mapping[str, Any]] = (), beside: Sequence[str] = ()
) -> tuple[str, ...]:
    """Each part of ``path`` as ``what: technique option=value``; parts of the same seam stand together.

    ``recipe`` (entries as in a run) has the options; those at their default are left out. ``beside`` is the
    path shown next to this one: where a part of it reads alike and has another key, digits tell them apart.
    """
    uses = {str(u.get("id")): u for u in recipe}
    theirs = {p: _part(p, {}) for p in beside}
    found: dict[str, list[str]] = {}
    for part in path:
        seam, text = _part(part, uses)
        plain = _part(part, {})
        if part not in theirs and plain in theirs.values():
            text += f" #{_digest(part)}"
        found.setdefault(seam, []).append(text)
    return tuple(f"{seam}: {' + '.join(texts)}" for seam, texts in found.items())


def _part(part: str, uses: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """(seam, name) of one part in words."""
    seam, _, key = part.partition(":")
    name, _, rest = key.partition("/")
    if key.startswith(_PLAIN):
        text = rest
    elif name.partition(":")[0] in catalog.MODULES:
        text = _technique(name.partition(":")[0], uses)
        if seam == "attention":
            text += f" on {rest.rpartition('/')[2]}"
    else:
        text = _DIGEST.sub(lambda m: m[0][:DIGITS], key)
    return _SEAMS.get(seam, seam), text


def _technique(id: str, uses: Mapping[str, Mapping[str, Any]]) -> str:
    """A technique's title, without what the seam says already, and the options that are not its defaults."""
    technique = catalog.get(id)
    usual = {o.name: o.default for o in technique.options}
    given = {k: v for k, v in uses.get(id, {}).items() if k in usual and v != usual[k]}
    title = technique.spec.title.removesuffix(" (KV at rest)")
    return " ".join((title, *(f"{k}={v}" for k, v in given.items())))


def _digest(part: str) -> str:
    """The first digits of the key's own digest, or of one over the key when it has none."""
    own = _DIGEST.findall(part)
    return (own[-1] if own else hashlib.sha256(part.encode()).hexdigest())[:DIGITS]
