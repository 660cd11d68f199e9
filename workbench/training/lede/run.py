"""From a model's name to what LEDE knows of it: logged texts, two ways of drafting, one file.

    from workbench.training.lede.run import Settings, train_lede
    train_lede("tiny-exit", Settings(documents="stdlib/"))

Takes minutes on a small model, since nothing of the model itself is trained.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.cache import cache_dir
from workbench.models.heads import HeadFile, read_head, target_name, write_head
from workbench.models.progress import Cancel, Progress, check_cancel, part, report
from workbench.spec.events import DraftRecord
from workbench.spec.plan import EngineLimits
from workbench.speculative.lede.learnt import KIND, KINDS, Learnt, write
from workbench.speculative.lede.q_learning import QNetwork
from workbench.speculative.lede.state import Limits
from workbench.speculative.stats import acceptance
from workbench.training.heads.target import Target, open_target
from workbench.training.lede.collect import collect, costs_of, prompts_of
from workbench.training.lede.fit import Fitted, Fitting, fit, split

MOST_EXITS = 8
"""Exits that are looked at in a deep model, evenly spread: every one costs a chain at every place."""
SAMPLING = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=1.0, seed=7)}
"""How the texts of each way go on."""


@dataclass(frozen=True)
class Settings:
    """``prompts`` of ``length`` tokens from documents whose names begin with ``documents``; ``places`` logged
    in the continuation of each; at most ``longest`` drafts."""

    prompts: int = 60
    length: int = 96
    places: int = 96
    longest: int = 8
    documents: str = ""
    seed: int = 0
    fitting: Fitting = field(default_factory=Fitting)


def limits_for(layers: int, longest: int) -> Limits:
    """All exits of a model, or :data:`MOST_EXITS` of them. Raises :class:`OptionError` for one layer."""
    most = min(layers - 1, MOST_EXITS)
    return Limits(layers, longest, tuple(round((i + 1) * (layers - 1) / most) for i in range(most)))


def train_lede(
    model: str | Path,
    settings: Settings | None = None,
    *,
    out: Path | None = None,
    target: Target | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> HeadFile:
    """Log, learn, judge and write; gives the file that the technique ``lede`` finds.

    ``out``: a folder of heads that gets a copy of the file in the cache folder. Raises :class:`ModelError` s,
    :class:`OptionError` for a model of one layer or too little text, and ``Cancelled``.
    """
    settings = settings or Settings()
    target = target or open_target(model, progress=part(progress, 0.0, 0.05), cancel=cancel)
    config, started = target.source.config, time.process_time()
    limits = limits_for(config.num_layers, settings.longest)
    costs = costs_of(config, QNetwork(settings.fitting.learning.hidden).values().operations)
    prompts = prompts_of(target, settings.documents, settings.prompts, settings.length, settings.seed)
    fitted: dict[str, Fitted] = {}
    for i, kind in enumerate(KINDS):
        here = 0.05 + 0.4 * i
        texts = collect(
            target, prompts, limits, settings.places, SAMPLING[kind], part(progress, here, here + 0.3), cancel
        )
        fitted[kind] = fit(
            texts, limits, costs, settings.fitting, part(progress, here + 0.3, here + 0.4), cancel
        )
    learnt = Learnt({kind: found.way for kind, found in fitted.items()})
    path = cache_dir() / "heads" / target_name(model) / f"{KIND}.safetensors"
    facts: dict[str, Any] = {
        "target": target_name(model),
        "recipe": asdict(settings),
        "trained": {
            "prompts": len(prompts),
            "places": len(prompts) * settings.places,
            "cpu_seconds": round(time.process_time() - started, 1),
            "dtype": target.plan.dtype,
        },
        "costs": asdict(costs),
        "held_out": {kind: found.facts for kind, found in fitted.items()},
        "curve": {kind: found.curve for kind, found in fitted.items()},
        "engine": {},
    }
    write(path, target.source.fingerprint, learnt, facts)
    judging = split(prompts, settings.fitting)[2]
    engine: dict[str, Any] = {}
    for kind in KINDS:
        for policy in ("auto", "fixed", "learnt"):
            report(progress, 0.9, f"{kind} decoding in the engine, {policy}")
            uses = ("layerskip", f"lede:policy={policy}")
            records = drafted(target, uses, judging, SAMPLING[kind], settings.places, cancel)
            engine[f"{kind}, {policy}"] = in_engine(records, len(judging))
    write(path, target.source.fingerprint, learnt, facts | {"engine": engine})
    made = read_head(path)
    if out is None:
        return made
    copy = out / target_name(model) / path.name
    write_head(copy, made.kind, made.fingerprint, made.facts, made.tensors())
    return read_head(copy)


def drafted(
    target: Target,
    uses: Sequence[str],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    tokens: int,
    cancel: Cancel | None = None,
) -> list[DraftRecord]:
    """Drafts of an engine that answers one prompt after the other with so many tokens."""
    context = max(map(len, prompts)) + tokens + 64
    limits = EngineLimits(kv_pool_tokens=(context // 64 + 2) * 64, max_sequences=1, max_context=context)
    params = SamplingParams(**{**asdict(sampling), "max_tokens": tokens, "ignore_eos": True})
    out: list[DraftRecord] = []
    with target.engine(*uses, limits=limits) as engine:
        for i, prompt in enumerate(prompts):
            engine.add(Request(f"p{i}", tuple(prompt), params))
        while engine.has_work:
            check_cancel(cancel, "Drafting in the engine")
            step, _ = engine.step()
            out.extend(step.drafts)
    return out


def in_engine(records: Sequence[DraftRecord], prompts: int) -> dict[str, Any]:
    """Rounds that drafted, their exits and lengths, and how many tokens they gained."""
    found, rounds = acceptance(records), max(1, len(records))
    return {
        "prompts": prompts,
        "rounds": found.steps,
        "tau": round(found.tau, 4) if found.tau is not None else None,
        "rate": round(found.rate, 4) if found.rate is not None else None,
        "mean_exit": round(sum(r.exit for r in records) / rounds, 3) if records else None,
        "mean_drafts": round(found.drafted / rounds, 3) if records else None,
        "exits": {str(e): n for e, n in sorted(Counter(r.exit for r in records).items())},
    }


def summary(made: HeadFile) -> Mapping[str, Any]:
    """What a command shows: rates on held-out text, in tokens per pass, of both ways."""
    return {"file": str(made.path), "fingerprint": made.fingerprint, "held_out": made.facts["held_out"]}
