"""Parts of a report that have a picture or a text: memory, phases, acceptance, outputs, provenance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from workbench.records.drawings import columns, stacked_bar, stacked_columns
from workbench.records.form import number
from workbench.spec.events import PHASES
from workbench.spec.run import Run

_MEMORY = ("weights", "kv_payload", "kv_meta", "fragmentation", "kv_cached", "kv_free", "workspace", "draft")
_COLOURED = (*_MEMORY, *PHASES)
_SOURCES = {
    "plain": "sampled without a draft",
    "accepted": "drafted and kept",
    "corrected": "sampled where a draft was rejected",
    "bonus": "sampled after a fully accepted draft",
}


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = (), keys: bool = False
) -> str:
    """An HTML table of escaped cells; columns in ``right`` hold numbers, ``keys`` shows a name's colour."""

    def cells(row: Sequence[str], tag: str) -> str:
        key = f"<span class=key style='background:var(--{escape(row[0], quote=True)})'></span>"
        first = key if keys and tag == "td" and row[0] in _COLOURED else ""
        return "".join(
            f"<{tag}{' class=n' if i in right else ''}>{first if i == 0 else ''}{escape(c)}</{tag}>"
            for i, c in enumerate(row)
        )

    body = "".join(f"<tr>{cells(r, 'td')}</tr>" for r in rows)
    head = f"<thead><tr>{cells(heads, 'th')}</tr></thead>"
    return f"<div class='scroll'><table>{head}<tbody>{body}</tbody></table></div>"


def memory(run: Run) -> str:
    """Bytes by category, from storages held; the categories add up."""
    held = {name: value for name, value in run.memory.items() if value}
    if not held:
        return ""
    words = {name: f"{name} {number(value, 'B')}" for name, value in held.items()}
    rows = [(name, number(v, "B"), f"{v:,}", "measured") for name, v in run.memory.items()]
    rows.append(("all", number(sum(run.memory.values()), "B"), f"{sum(run.memory.values()):,}", "measured"))
    picture = stacked_bar(held, words, "Memory by category")
    kv = {name: value for name, value in held.items() if name != "weights"}
    rest = stacked_bar(kv, words, "Memory by category, without weights") if "weights" in held else ""
    shown = table(("category", "size", "bytes", "tag"), rows, right=(1, 2), keys=True)
    return f"<h3>Memory</h3>{picture}{rest}{shown}"


def phases(run: Run) -> str:
    """Where each engine step spent its time."""
    rows = [s.get("phase_ms", {}) for s in run.steps]
    if not rows:
        return ""
    picture = stacked_columns(rows, PHASES, "Milliseconds of each engine step by phase", "ms")
    total = sum(sum(r.values()) for r in rows) or 1.0
    cells = []
    for name in PHASES:
        spent = sum(r.get(name, 0.0) for r in rows)
        cells.append((name, number(spent), number(spent / len(rows)), f"{spent / total:.1%}", "measured"))
    heads = ("phase", "ms in all", "ms per step", "share", "tag")
    return f"<h3>Engine steps ({len(rows)})</h3>{picture}{table(heads, cells, right=(1, 2, 3), keys=True)}"


def acceptance(run: Run) -> str:
    """How much of the drafts was kept, by position."""
    a = run.acceptance
    if not a:
        return ""
    survival = [float(v) for v in a.get("survival") or ()]
    conditional = [float(v) for v in a.get("conditional") or ()]
    picture = columns(survival, [str(i + 1) for i in range(len(survival))], "Acceptance by draft position")
    rows = [
        (str(i + 1), number(s), number(conditional[i]) if i < len(conditional) else "–", "measured")
        for i, s in enumerate(survival)
    ]
    names = (
        "tau",
        "rate",
        "tokens_per_forward",
        "alpha",
        "steps",
        "drafted",
        "accepted",
        "emitted",
        "plain",
        "cut",
    )
    facts = [(n, number(a[n]), "measured") for n in names if isinstance(a.get(n), int | float)]
    by_depth = table(("position", "accepted", "given the one before", "tag"), rows, right=(0, 1, 2))
    by_source = [
        (source, *(number(own[n]) for n in ("steps", "drafted", "accepted", "tau")), "measured")
        for source, own in (a.get("sources") or {}).items()
    ]
    heads = ("source", "drafts", "drafted", "accepted", "tau", "tag")
    sources = table(heads, by_source, right=(1, 2, 3, 4)) if by_source else ""
    told = table(("number", "value", "tag"), facts, right=(1,))
    return f"<h3>Acceptance</h3>{picture}{told}{sources}{by_depth}"


def outputs(run: Run) -> str:
    """Prompts and texts; tokens are marked by where they came from."""
    if not run.outputs:
        return ""
    used = {t.get("source") for o in run.outputs for t in o.get("tokens") or ()}
    legend = " ".join(
        f"<span class='chip'><span class='{s}'>{s}</span> {escape(words)}</span>"
        for s, words in _SOURCES.items()
        if s in used
    )
    parts = [f"<h3>Outputs</h3><p>{legend}</p>"]
    for output in run.outputs:
        facts = (
            f"sample {output.get('sample', 0)}, {output.get('prompt_tokens', 0)} prompt tokens "
            f"({output.get('cached_tokens', 0)} cached), {len(output.get('token_ids', ()))} tokens, "
            f"ended by {output.get('finish')}"
        )
        prompt = f"<div class='text'>{escape(str(output.get('prompt', '')))}</div>"
        parts.append(
            f"<details><summary>Prompt</summary>{prompt}</details>"
            f"<div class='text'>{_coloured(output)}</div><p class='soft'>{escape(facts)}</p>"
        )
        if output.get("error"):
            parts.append(f"<p class='bad'>{escape(str(output['error'].get('message', '')))}</p>")
    return "".join(parts)


def provenance(run: Run) -> str:
    """Where the numbers come from."""
    p = run.provenance
    rows = [("weights", run.weight_hash), ("recipe key", run.recipe_key), ("code path", ", ".join(run.path))]
    if p is not None:
        rows += [
            ("made", p.created),
            ("profile", p.profile),
            ("device", p.device),
            ("processor", p.cpu),
            ("threads", str(p.threads)),
            ("system", p.platform),
            ("versions", ", ".join(f"{k} {v}" for k, v in _versions(p).items())),
            ("environment", ", ".join(f"{k}={v}" for k, v in p.environment.items()) or "–"),
        ]
    rows += [(name, str(value)) for name, value in _plan(run.plan).items()]
    notes = "".join(f"<li>{escape(n)}</li>" for n in run.notes)
    return f"<h3>Where this comes from</h3>{table(('', ''), rows)}{f'<ul>{notes}</ul>' if notes else ''}"


def _versions(p: Any) -> dict[str, str]:
    return {"workbench": p.workbench, "python": p.python, **p.versions, "torch": p.torch}


def _plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    shown = {k: plan[k] for k in ("page_size", "kind", "provides") if plan.get(k)}
    return {**shown, **dict(plan.get("limits") or {}), **dict(plan.get("quality") or {})}


def _coloured(output: Mapping[str, Any]) -> str:
    """Token by token when the pieces are known, else the text as it is."""
    tokens, pieces = output.get("tokens") or (), output.get("pieces") or ()
    if not tokens or len(tokens) != len(pieces):
        return escape(str(output.get("text", "")))
    return "".join(_token(t, str(piece)) for t, piece in zip(tokens, pieces, strict=True))


def _token(token: Mapping[str, Any], piece: str) -> str:
    source = token.get("source")
    known = source if source in _SOURCES else "plain"
    return f"<span class='{known}' title='{escape(_hover(token), quote=True)}'>{escape(piece)}</span>"


def _hover(token: Mapping[str, Any]) -> str:
    logprob = token.get("logprob")
    scored = f", log-probability {logprob:.3g} nats" if isinstance(logprob, int | float) else ""
    return f"token {token.get('id')}, {token.get('source')}, step {token.get('step')}{scored}"
