"""A run as JSON text and back: compact, strict JSON, validated, bounded.

Steps and tokens are stored by column (:mod:`workbench.records.columns`). Numbers that JSON lacks are
written as ``{"$float": "inf"}``. Reading trusts nothing: size, depth, row counts and every field's type are
checked, so a run file from elsewhere is either a :class:`Run` or a :class:`RecordError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from workbench.records.columns import expand, shrink
from workbench.spec.errors import RecordError
from workbench.spec.run import Run

FORMAT = 1
MAX_BYTES = 64 * 1024 * 1024
MAX_RUNS = 10_000

_FIELDS = frozenset(Run.__dataclass_fields__)
_RUN: TypeAdapter[Run] = TypeAdapter(Run)


def run_from_dict(data: object) -> Run:
    """The run of ``Run.to_dict()``; raises :class:`RecordError` naming the field that is wrong."""
    if not isinstance(data, Mapping):
        raise RecordError("A run is a JSON object.", hint="Export it with `workbench export`.")
    unknown = sorted(str(k) for k in set(data) - _FIELDS)
    if unknown:
        raise RecordError(
            f"The run has fields this version does not know: {', '.join(unknown[:5])}.",
            hint="It was written by a newer version; update inference-workbench.",
        )
    try:
        return _RUN.validate_python(data)
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise RecordError(f"The run's field {where!r} is wrong: {first['msg']}.") from None


def dumps(run: Run) -> str:
    """One run as strict, compact JSON."""
    data = run.to_dict()
    data["steps"] = {"rows": len(data["steps"]), "columns": shrink(data["steps"])}
    for output in data["outputs"]:
        if isinstance(output.get("tokens"), list):
            output["tokens"] = {"rows": len(output["tokens"]), "columns": shrink(output["tokens"])}
    return json.dumps({"format": FORMAT, **_encode(data)}, separators=(",", ":"), allow_nan=False)


def loads(text: str | bytes) -> Run:
    """The run of :func:`dumps`."""
    return _from_packed(_parse(text))


def dump_many(runs: Sequence[Run]) -> str:
    """Several runs as one JSON document, one run per line."""
    return '{"runs":[\n' + ",\n".join(dumps(r) for r in runs) + "\n]}\n"


def load_many(text: str | bytes) -> list[Run]:
    """Runs of a file written by :func:`dump_many` or :func:`dumps`; raises :class:`RecordError`."""
    data = _parse(text)
    items = data.get("runs") if isinstance(data, Mapping) and "runs" in data else [data]
    if not isinstance(items, list) or len(items) > MAX_RUNS:
        raise RecordError(f"A run file holds a list of at most {MAX_RUNS:,} runs under 'runs'.")
    return [_from_packed(item) for item in items]


def _parse(text: str | bytes) -> Any:
    if len(text) > MAX_BYTES:
        raise RecordError(f"The run file has {len(text):,} bytes; at most {MAX_BYTES:,} are read.")
    try:
        return json.loads(text, object_hook=_decode)
    except (ValueError, RecursionError) as err:
        raise RecordError(f"The run file is not JSON: {str(err)[:200]}.") from None


def _from_packed(data: Any) -> Run:
    if not isinstance(data, Mapping):
        raise RecordError("A run is a JSON object.", hint="Export it with `workbench export`.")
    data = dict(data)
    version = data.pop("format", FORMAT)
    if version != FORMAT:
        raise RecordError(
            f"The run is stored in format {version!r}; this version reads format {FORMAT}.",
            hint="Update inference-workbench.",
        )
    data["steps"] = _rows(data.get("steps", []))
    outputs = data.get("outputs", [])
    if isinstance(outputs, list):
        data["outputs"] = [
            {**o, "tokens": _rows(o["tokens"])} if isinstance(o, Mapping) and "tokens" in o else o
            for o in outputs
        ]
    return run_from_dict(data)


def _rows(value: Any) -> Any:
    if isinstance(value, Mapping):
        return expand(value.get("columns"), value.get("rows", -1))
    return value


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, dict):
        return {k: _encode(v) for k, v in value.items()}
    return [_encode(v) for v in value] if isinstance(value, list) else value


def _decode(item: dict[str, Any]) -> Any:
    if len(item) == 1 and item.get("$float") in ("inf", "-inf", "nan"):
        return float(item["$float"])
    return item
