"""The measurement itself: two engines over the same windows, one forward at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor

from workbench.core.provenance import process_memory
from workbench.core.quality_scores import WindowScores, quality_metrics
from workbench.core.quality_windows import QualitySettings, Window
from workbench.core.run_of import run_of
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.score import score
from workbench.engine.sequence import Request
from workbench.spec.plan import Plan
from workbench.spec.run import Metric, Run

Tell = Callable[[float, float, str], None]


@dataclass
class Measured:
    """What came of one window; ``parted`` is the first greedy token that differs, None if none does."""

    scores: WindowScores
    parted: int | None = None
    greedy: tuple[int, ...] = ()


def quality_steps(
    recipe: Engine,
    plain: Engine,
    windows: Sequence[Window],
    settings: QualitySettings,
    tell: Tell,
    scored_bytes: Sequence[int] = (),
) -> Generator[None, None, tuple[list[Metric], dict[str, int], list[Measured]]]:
    """Score every window on both engines, one forward per ``yield``.

    Returns the metrics, the recipe's bytes by category with one window in the cache, and each window.
    """
    found: list[Measured] = []
    held: dict[str, dict[str, int]] = {}
    for i, window in enumerate(windows):
        tell(i, len(windows), "the plain engine's logits")
        reference: list[Tensor] = []
        for block in score(plain, window.ids, window.start, settings.chunk):
            held["plain"] = plain.kv.nbytes([block.sequence])
            if block.logits is not None:
                reference.append(block.logits)
            yield
        expected = torch.cat(reference)
        out = Measured(WindowScores(scored_bytes[i] if scored_bytes else 0))
        tell(i + 0.5, len(windows), "the recipe's logits")
        for block in score(recipe, window.ids, window.start, settings.chunk):
            held["recipe"] = recipe.kv.nbytes([block.sequence])
            if block.logits is not None:
                first = block.begin + 1 - window.start
                with torch.inference_mode():
                    out.scores.add(block.logits, expected[first : first + block.n], block.targets)
            yield
        if settings.greedy:
            context = window.ids[: window.start]
            out.greedy = yield from _greedy(recipe, context, settings.greedy)
            out.parted = _parted(out.greedy, (yield from _greedy(plain, context, settings.greedy)))
        found.append(out)
    metrics = quality_metrics([m.scores for m in found])
    if settings.greedy:
        metrics += _divergence([m.parted for m in found], settings.greedy)
    metrics += _cache(held["recipe"], held["plain"], len(windows[-1].ids) - 1)
    return metrics, {**recipe.static_bytes, **held["recipe"]}, found


def quality_run(
    plan: Plan,
    engine: Engine,
    settings: QualitySettings,
    result: tuple[list[Metric], dict[str, int], list[Measured]],
    notes: tuple[str, ...] = (),
) -> Run:
    """The run of a finished measurement, without provenance."""
    metrics, memory, _ = result
    return run_of(
        plan,
        "measure",
        (*metrics, *process_memory(plan.device)),
        {"quality": asdict(settings)},
        memory=memory,
        path=engine.path,
        notes=(*plan.notes, *notes),
    )


def _greedy(engine: Engine, prompt: Sequence[int], n: int) -> Generator[None, None, tuple[int, ...]]:
    """``n`` greedy tokens, by the engine's own steps: scheduler, drafts and verification included."""
    ids: list[int] = []
    engine.add(Request("greedy", tuple(prompt), SamplingParams(max_tokens=n, ignore_eos=True), salt="greedy"))
    try:
        while engine.has_work:
            with torch.inference_mode():
                _, events = engine.step()
            ids += [t.id for e in events for t in e.tokens]
            yield
    finally:
        engine.abort("greedy")
    return tuple(ids)


def _parted(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)


def _divergence(parted: Sequence[int | None], limit: int) -> list[Metric]:
    n, same = len(parted), sum(p is None for p in parted)
    at = [limit if p is None else p for p in parted]
    note = f"{same} of {n} windows did not part within {limit} tokens" if same else ""
    spread = (float(min(at)), float(max(at)))
    return [
        Metric("first_divergence", median(at), "tok", n=n, spread=spread, better="higher", note=note),
        Metric(
            "greedy_same", 100 * same / n, "%", n=n, better="higher", note=f"windows alike for {limit} tokens"
        ),
    ]


def _cache(recipe: dict[str, int], plain: dict[str, int], tokens: int) -> list[Metric]:
    """Bytes of live tokens, scales and tables included, at the end of a window."""
    mine, theirs = (held["kv_payload"] + held["kv_meta"] for held in (recipe, plain))
    return [
        Metric(
            "kv_bytes_per_token", mine / tokens, "B", better="lower", note=f"{tokens} tokens in the cache"
        ),
        Metric("kv_ratio", theirs / mine, "×", of="the plain cache", better="higher", note="whole cache"),
    ]
