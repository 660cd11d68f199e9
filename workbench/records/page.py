"""A report as one HTML page: every number with its tag, unit, spread and n; text escaped; no script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from workbench.records.compare import compare
from workbench.records.form import number, quantity
from workbench.records.sections import acceptance, memory, outputs, phases, provenance, table
from workbench.records.style import STYLE
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run

_TILES = ("decode_speed", "ttft", "tpot", "perplexity", "kl", "top1", "kv_ratio")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[Run], title: str = "") -> str:
    """The whole page; the first run is the reference of every comparison."""
    title = title or f"{runs[0].model}: {', '.join(r.subject for r in runs)}"
    body = [f"<h1>{escape(title)}</h1>"]
    if len(runs) > 1:
        body.append("<p class='soft'>The first run is A, the one each other is compared with.</p>")
        for other in runs[1:]:
            body.append(f"<section class='scroll'>{compare(runs[0], other)._repr_html_()}</section>")
    body += [section(run) for run in runs]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\">"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def section(run: Run) -> str:
    """Everything about one run."""
    kind = "" if run.contestants else str(run.plan.get("kind", ""))  # each of them has its own
    chips = run.contestants or [u.to_text() for u in Recipe.from_json(run.recipe)] or ["plain"]
    facts = [run.kind, kind, f"numerics {run.numerics}", run.dtype, f"seed {run.seed}", run.state]
    parts = [
        f"<section><h2>{escape(run.model)}: {escape(run.subject)}</h2>",
        f"<p>{''.join(f'<span class=chip>{escape(c)}</span>' for c in chips)}</p>",
        f"<p class='soft'>{escape(' · '.join(f for f in facts if f))} · run {escape(run.id[:12])}</p>",
    ]
    if run.state != "done":
        parts.append(f"<p class='warn'>This run was {escape(run.state)}; numbers cover what it did.</p>")
    if run.error:
        parts.append(
            f"<p class='bad'>{escape(run.error.get('message', ''))} {escape(run.error.get('hint', ''))}</p>"
        )
    if kind == "simulated":
        parts.append("<p class='warn'>Simulated: real tokens, virtual clock or topology.</p>")
    parts += [tiles(run), metrics(run.metrics), memory(run), phases(run), acceptance(run), outputs(run)]
    if not run.contestants:
        parts.append(f"<h3>Recipe</h3><pre>{escape(code(run))}</pre>")
    parts.append(provenance(run))
    return "".join(parts) + "</section>"


def tiles(run: Run) -> str:
    """The few numbers people look for first."""
    found = [(m.name, quantity(m), m.tag) for name in _TILES if (m := run.metric(name)) is not None]
    kv = sum(run.memory.get(k, 0) for k in ("kv_payload", "kv_meta"))
    if kv:
        found.append(("KV memory in use", number(kv, "B"), "measured"))
    tau = run.acceptance.get("tau")
    if isinstance(tau, int | float):
        found.append(("τ, tokens per verified draft", number(tau), "measured"))
    items = (
        f"<li><strong>{escape(v)}</strong>{escape(n)} <span class='soft'>{t}</span></li>" for n, v, t in found
    )
    return f"<ul class='tiles'>{''.join(items)}</ul>"


def metrics(found: Sequence[Metric]) -> str:
    """The table of numbers."""
    if not found:
        return "<p class='soft'>No numbers were measured.</p>"
    rows = [
        (
            m.name,
            number(m.value, m.unit),
            "" if m.unit == "B" else m.unit,
            f"{number(m.spread[0], m.unit)} – {number(m.spread[1], m.unit)}" if m.spread else "",
            str(m.n),
            m.tag,
            "; ".join(filter(None, (f"of {m.of}" if m.of else "", m.note))),
        )
        for m in found
    ]
    heads = ("number", "value", "unit", "range", "n", "tag", "what it is")
    return f"<h3>Numbers</h3>{table(heads, rows, right=(1, 3, 4))}"


def code(run: Run) -> str:
    """Python that makes the same session and recipe."""
    uses = ", ".join(json.dumps(u.to_text(), ensure_ascii=False) for u in Recipe.from_json(run.recipe))
    options = "".join(
        f", {name}={value!r}"
        for name, value, default in (("dtype", run.dtype, "bfloat16"), ("numerics", run.numerics, "fast"))
        if value and value != default
    )
    return (
        "import workbench as wb\n\n"
        f"recipe = wb.Recipe.of({uses})\n"
        f"session = wb.Session({run.model!r}, recipe{options})\n"
    )
