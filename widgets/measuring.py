"""Quality of the recipe on screen, measured on held-out text: one task of the session at a time.

The numbers are those of ``workbench.core.quality``: perplexity, KL and top-1 agreement against the plain
engine of the same weights. Prompts may run meanwhile; the measurement goes on between them.
"""

from __future__ import annotations

from typing import Any

from workbench.core.quality import submit_quality
from workbench.core.quality_windows import QualitySettings
from workbench.spec.events import JobEvent
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

_CONTEXT = 512  # tokens before the first one scored: long enough for coded pages, seconds on a small model
_ROUNDING = 1e-6  # nats: below, the last bits of two sums that were added in another order


def settings_for(longest: int, **changes: Any) -> QualitySettings:
    """What a panel measures, within a model's ``longest`` context; ``changes``: fields of QualitySettings."""
    context = min(_CONTEXT, longest // 2)
    mine = {"context": context, "score": min(128, context), "windows": 3, "greedy": 0}
    return QualitySettings(**{**mine, **changes})


class Measuring:
    """The measurement in flight, if there is one. Called under the controller's lock."""

    def __init__(self) -> None:
        self.job: Any = None
        self.done = self.total = 0.0
        self.message = ""

    def start(self, session: Any, recipe: Recipe, **changes: Any) -> Any:
        """Queue a measurement; one in flight is cancelled. Returns the session's task."""
        settings = settings_for(session.facts.config.max_position, **changes)
        job = submit_quality(session, recipe, settings=settings)
        self.cancel()
        self.job, self.done, self.total, self.message = job, 0.0, 0.0, "queued"
        return job

    def cancel(self) -> bool:
        """Stop within one forward pass; True if there was something to stop."""
        job, self.job = self.job, None
        if job is not None:
            job.cancel()
        return job is not None

    def take(self, event: JobEvent) -> Any:
        """Progress of the measurement in flight; its job once it has ended."""
        if self.job is None or event.job_id != self.job.id:
            return None
        self.message = event.message or event.state
        if event.unit:  # without one it is a weight set being built
            self.done, self.total = event.done, event.total
        if event.state in ("queued", "running"):
            return None
        job, self.job = self.job, None
        return job

    def shown(self) -> dict[str, Any] | None:
        """Progress for the front end."""
        if self.job is None:
            return None
        return {"done": self.done, "total": self.total, "message": self.message}


def in_words(run: Run) -> list[str]:
    """A measurement's results: KL, top-1, perplexity, each with its spread, and how they were measured."""
    from workbench.widgets.words import describe  # here: words knows nothing of measuring

    out = []
    for name, title in (("kl", "KL"), ("top1", "top-1 same"), ("perplexity", "perplexity")):
        metric = run.metric(name)
        if metric is not None:
            tiny = name == "kl" and metric.value < _ROUNDING
            out.append(f"{title} below {_ROUNDING:g} nats" if tiny else f"{title} {describe(metric)}")
    change = run.metric("perplexity_change")
    if change is not None and out:
        out[-1] += f", {change.value:+.2g} % against plain"
    kl = run.metric("kl")
    if kl is not None:
        out.append(f"{kl.tag} on {kl.n} windows of held-out text (lowest–highest)")
    return out
