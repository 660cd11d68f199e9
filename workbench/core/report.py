"""From collected events to a :class:`Run`: latency as defined below, memory, acceptance, provenance.

Definitions. TTFT: submission to the first token of an output. TPOT: (last token − first token) / (tokens − 1)
of an output. ITL: time between two deliveries of an output (a delivery may hold several tokens). Decode
tokens/s: tokens after each output's first, over the time from the first to the last of them all.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import torch

from workbench.spec.errors import WorkbenchError
from workbench.spec.events import PHASES, FinishReason, JobState, RequestEvent, StepEvent, TokenInfo
from workbench.spec.plan import Plan
from workbench.spec.run import Metric, Provenance, Run
from workbench.speculative.stats import Acceptance, acceptance

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "jupyterlab")
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GLIBC_TUNABLES", "MKL_NUM_THREADS")


@dataclass
class Output:
    """One sample of one prompt as it grows."""

    prompt: str
    prompt_ids: tuple[int, ...]
    sample: int
    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    deliveries: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens so far)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)
    error: Mapping[str, str] | None = None

    def take(self, event: RequestEvent) -> None:
        """Add what one event delivers."""
        self.text += event.text
        self.tokens.extend(event.tokens)
        if event.tokens:
            self.deliveries.append((event.time, len(self.tokens)))
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        self.finish = event.finish or self.finish
        self.error = event.error or self.error

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "prompt": self.prompt,
            "prompt_tokens": len(self.prompt_ids),
            "sample": self.sample,
            "text": self.text,
            "token_ids": [t.id for t in self.tokens],
            "tokens": [asdict(t) for t in self.tokens],
            "finish": self.finish,
            "cached_tokens": self.cached_tokens,
            "prompt_logprobs": {str(k): v for k, v in self.prompt_logprobs.items()},
            "error": self.error,
        }


@dataclass
class Collected:
    """Everything a request job saw."""

    outputs: list[Output]
    steps: list[StepEvent]
    submitted: float
    seed: int = 0
    notices: tuple[str, ...] = ()


def build_run(
    collected: Collected,
    plan: Plan | None,
    state: JobState,
    profile: str,
    memory: Mapping[str, int],
    error: WorkbenchError | None = None,
) -> Run:
    """The run of a request job, complete or partial."""
    drafts = [d for s in collected.steps for d in s.drafts]
    plain = sum(t.source == "plain" for o in collected.outputs for t in o.tokens)
    # What was held while it ran, at its fullest; an idle engine holds no live tokens.
    fullest = max(collected.steps, key=lambda s: s.bytes.get("kv_payload", 0), default=None)
    return Run(
        id=uuid4().hex,
        kind="generate",
        model=plan.model if plan else "",
        weight_hash=plan.model_fingerprint if plan else "",
        recipe=[dict(u) for u in plan.recipe.to_json()] if plan else [],
        recipe_key=plan.recipe.key if plan else "",
        plan=plan.to_dict() if plan else {},
        numerics=plan.numerics if plan else "",
        dtype=plan.dtype if plan else "",
        seed=collected.seed,
        state="done" if state == "done" else "failed" if state == "failed" else "cancelled",
        prompts=tuple(dict.fromkeys(o.prompt for o in collected.outputs)),
        outputs=tuple(o.to_dict() for o in collected.outputs),
        metrics=latency(collected),
        memory=dict(fullest.bytes) if fullest is not None else dict(memory),
        acceptance=_acceptance(acceptance(drafts, plain)),
        path=collected.steps[-1].path if collected.steps else (),
        steps=tuple(_step_row(s) for s in collected.steps),
        provenance=provenance(plan.device if plan else "cpu", profile),
        notes=(*(plan.notes if plan else ()), *collected.notices),
        error=error.to_dict() if error is not None else None,
    )


def latency(collected: Collected) -> tuple[Metric, ...]:
    """TTFT, TPOT, ITL, throughput, and the mean split of a step by phase."""
    out: list[Metric] = []
    started = [o for o in collected.outputs if o.deliveries]
    ttft = [(o.deliveries[0][0] - collected.submitted) * 1e3 for o in started]
    tpot = [
        (o.deliveries[-1][0] - o.deliveries[0][0]) * 1e3 / (len(o.tokens) - o.deliveries[0][1])
        for o in started
        if len(o.tokens) > o.deliveries[0][1]
    ]
    itl = [(b[0] - a[0]) * 1e3 for o in started for a, b in zip(o.deliveries, o.deliveries[1:], strict=False)]
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        if values:
            spread = (min(values), max(values))
            out.append(Metric(name, median(values), "ms", n=len(values), spread=spread, better="lower"))
    later = sum(len(o.tokens) - o.deliveries[0][1] for o in started)
    if later:
        seconds = max(o.deliveries[-1][0] for o in started) - min(o.deliveries[0][0] for o in started)
        out.append(Metric("decode_speed", later / max(seconds, 1e-9), "tok/s", better="higher"))
    steps = collected.steps
    if steps:
        total = sum(s.total_ms for s in steps)
        for phase in PHASES:
            spent = sum(s.phase_ms.get(phase, 0.0) for s in steps)
            out.append(Metric(f"phase_{phase}", spent / len(steps), "ms", n=len(steps), note="mean per step"))
        forward = sum(s.phase_ms.get("forward", 0.0) for s in steps)
        out.append(
            Metric("overhead", 100 * (1 - forward / max(total, 1e-9)), "%", of="step time", better="lower")
        )
    return tuple(out)


def provenance(device: str, profile: str) -> Provenance:
    """Where numbers of this process come from; nothing is captured but what is listed here."""
    import os

    return Provenance(
        workbench=_version("inference-workbench"),
        python=sys.version.split()[0],
        torch=torch.__version__,
        platform=platform.platform(),
        cpu=_cpu(),
        device=device,
        threads=torch.get_num_threads(),
        profile="bench" if profile == "bench" else "interactive",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={p: v for p in _PACKAGES if (v := _version(p))},
        environment={k: os.environ[k] for k in _VARIABLES if k in os.environ},
    )


def _acceptance(a: Acceptance) -> dict[str, Any]:
    """The statistics and the ratios derived from them, as plain data; empty when nothing was drafted."""
    if not a.steps:
        return {}
    names = ("tau", "rate", "tokens_per_forward", "survival", "conditional", "alpha")
    return {**asdict(a), **{name: getattr(a, name) for name in names}}


def _step_row(step: StepEvent) -> dict[str, Any]:
    row = asdict(step)
    row.pop("path")
    return row


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
