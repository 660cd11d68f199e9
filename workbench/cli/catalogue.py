"""``workbench list`` and ``workbench plan``: what there is, and whether a choice of it fits.

Both show what the catalogue and the planner say, as data or as tables; neither knows a technique.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench.cli import options as o
from workbench.cli.output import out, print_json

_KINDS = {
    "exact": "exact: proven to leave the output law unchanged",
    "lossy": "lossy: changes results; `workbench measure` says by how much",
    "simulated": "simulated: real tokens, a simulated clock or device",
}


def list_techniques(
    ids: Annotated[list[str] | None, typer.Argument(help="Only these ids, with every option.")] = None,
    family: Annotated[str, typer.Option(help="Only this family.")] = "",
    json: o.Json = False,
) -> None:
    """The catalogue: every technique with its seam, kind, backends and options."""
    from workbench.core import catalog

    techniques = [catalog.get(i) for i in ids or catalog.MODULES]
    rows = [technique_row(t) for t in techniques if family in ("", t.spec.family)]
    if json:
        print_json({"techniques": rows})
    elif ids:
        for row in rows:
            _show_one(row)
    else:
        _show_all(rows)


def technique_row(technique: Any) -> dict[str, Any]:
    """One technique as plain data: its spec, its options, and whether it can be used here."""
    spec = technique.spec
    return {
        "id": spec.id,
        "title": spec.title,
        "family": spec.family,
        "seam": spec.seam,
        "kind": spec.kind,
        "summary": spec.summary,
        "paper": spec.paper,
        "backends": list(spec.backends),
        "needs": list(spec.needs),
        "needed": [needed(need) for need in spec.needs],
        "provides": list(spec.provides),
        "instead": {name: list(names) for name, names in spec.method_only.items()},
        "conflicts": dict(spec.conflicts),
        "installed": technique.installed,
        "install": "" if technique.installed else technique.install_line,
        "claims": [
            {"text": c.text, "conditions": c.conditions, "source": c.source, "tag": "claimed"}
            for c in spec.claims
        ],
        "options": [
            {
                "name": x.name,
                "type": x.type.__name__,
                "default": x.default,
                "unit": x.unit,
                "choices": list(x.choices),
                "low": x.low,
                "high": x.high,
                "help": x.help,
            }
            for x in technique.options
        ],
    }


def needed(need: str) -> str:
    """Who fills a need: ids of the techniques that provide it."""
    from workbench.core import catalog

    ids = [t.id for t in catalog.all_techniques() if need in t.spec.provides]
    return " or ".join(ids) or need


def option_range(option: dict[str, Any]) -> str:
    """What an option takes, in a few signs: ``2|4|8`` or ``1–64 tokens``."""
    unit = f" {option['unit']}" if option["unit"] else ""
    if option["choices"]:
        return "|".join(str(c) for c in option["choices"]) + unit
    if option["type"] == "bool":
        return "true|false"
    low, high = option["low"], option["high"]
    if low is not None and high is not None:
        return f"{_short(low)}–{_short(high)}{unit}"
    return (f"≥ {_short(low)}" if low is not None else option["type"]) + unit


def _short(value: Any) -> str:
    """A default or a bound: fractions to four digits, whole numbers in full."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _show_all(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("id", "title", "family", "seam", "kind", "backends", "options", ""):
        table.add_column(column, no_wrap=column in ("id", "kind"))
    for row in rows:
        shown = ", ".join(f"{x['name']}={_short(x['default'])}" for x in row["options"]) or "–"
        table.add_row(
            row["id"],
            row["title"],
            row["family"],
            row["seam"],
            row["kind"],
            " ".join(row["backends"]),
            shown,
            "" if row["installed"] else "not installed",
        )
    out().print(table)
    out().print("\nOptions with range and help: workbench list ID", markup=False)


def _show_one(row: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out()
    console.print(row["id"], style="bold", end="")
    console.print(f": {row['title']} ({row['family']}, seam {row['seam']})", markup=False)
    console.print(f"\n{row['summary']}\n", markup=False)
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, text in _facts(row):
        facts.add_row(name, Text(text))
    console.print(facts)
    _show_options(row)


def _facts(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What is known of a technique, in sentences; a claim is its source's, under the source's conditions."""
    facts = [("results", _KINDS[row["kind"]]), ("source", row["paper"])]
    facts += [("needs", need) for need in row["needed"]]
    if row["provides"]:
        facts.append(("provides", f"{', '.join(row['provides'])}, to techniques that need it"))
    facts += [(f"not with {other}", remedy) for other, remedy in row["conflicts"].items()]
    for claim in row["claims"]:
        facts.append(("claimed", f"{claim['text'].rstrip('.')}. Conditions: {claim['conditions']}."))
    if not row["installed"]:
        facts.append(("not installed", row["install"]))
    return facts


def _show_options(row: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out()
    if not row["options"]:
        console.print("\nIt has no options.", markup=False)
        return
    first = next((x for x in row["options"] if x["type"] != "str"), row["options"][0])
    example = f"{row['id']}:{first['name']}={_short(first['default'])}"
    console.print(f"\nOptions, as in --use {example}:", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("option", "default", "takes", "meaning"):
        table.add_column(column)
    for x in row["options"]:
        table.add_row(*map(Text, (x["name"], _short(x["default"]), option_range(x), x["help"])))
    console.print(table)
    for name, names in row["instead"].items():
        console.print(
            f"{name} is an option of the method that `workbench measure --method {row['id']}` measures; a "
            f"recipe has {' and '.join(names)} instead.",
            markup=False,
        )


def plan_recipe(
    use: o.Uses = [],  # noqa: B006 - the command-line library copies it
    recipe: o.RecipeFile = None,
    model: o.Model = o.DEFAULT_MODEL,
    dtype: o.DType = o.DTypeName.bfloat16,
    numerics: o.Numerics = o.NumericsName.fast,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    kv_pool_tokens: o.PoolTokens = o.DEFAULT_POOL,
    max_context: o.MaxContext = 0,
    json: o.Json = False,
) -> None:
    """Whether a recipe fits together, the model and the device; conflicts come with remedies (status 2)."""
    wanted = o.recipe_of(use, recipe)
    o.set_threads(threads)
    from workbench.core.build_kv import require_memory
    from workbench.core.plan import ModelFacts, plan, require
    from workbench.core.room import present
    from workbench.models.registry import open_source

    source = open_source(model)
    made = require(
        plan(
            wanted,
            ModelFacts(model, source.config, source.fingerprint),
            device=device,
            dtype=dtype.value,
            numerics=numerics.value,
            limits=o.limits_of(kv_pool_tokens, max_context),
        )
    )
    if present(device):  # a plan may be for another machine
        require_memory(made, source.config)
    if json:
        print_json({"plan": made.to_dict(), "recipe_key": made.recipe.key})
    else:
        _show_plan(made)


def _show_plan(made: Any) -> None:
    from rich.table import Table

    from workbench.core import catalog

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "recipe": str(made.recipe),
        "kind": made.kind,
        "model": f"{made.model} ({made.dtype}, {made.numerics}, {made.device})",
        "page size": f"{made.page_size} tokens",
        "KV pool": f"{made.limits.kv_pool_tokens} tokens per group of layers",
        "context": f"{made.limits.max_context} tokens",
    }
    for use in made.recipe:
        technique, config = catalog.get(use.id), made.configs[use.id]
        values = ", ".join(f"{x.name}={getattr(config, x.name)}" for x in technique.options)
        rows[use.id] = f"{technique.spec.title} [{technique.spec.kind}] {values}".rstrip()
    for name, value in rows.items():
        table.add_row(name, value.replace("[", "\\["))
    console = out()
    console.print(table)
    for line in made.notes:
        console.print(f"· {line}", markup=False)
