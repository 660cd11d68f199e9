"""Runs made by hand, with everything in them that a stored run may hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workbench.spec.run import Metric, Provenance, Run, plain

PHASES = ("schedule", "draft", "prepare", "forward", "verify", "sample", "commit", "emit")


def _step(i: int) -> dict[str, Any]:
    draft = {
        "request_id": "request-1/0", "tokens": [5, 6], "parents": [-1, 0], "accepted": [0], "emitted": 2,
        "source": "ngram", "rule": "exact", "expected": [1.0, 0.25],
    }  # fmt: skip
    return {
        "step": i + 1,
        "time": 1000.0 + 0.0123457 * i,
        "rows": 1 + i % 3,
        "prefill": 0,
        "decode": 1,
        "draft": i % 3,
        "running": 1,
        "waiting": 0,
        "phase_ms": {p: round(0.1234 * (i + 1) * (k + 1) % 9, 4) for k, p in enumerate(PHASES)},
        "pages_used": 3,
        "pages_cached": 0,
        "pages_free": 13,
        "bytes": {"weights": 1 << 20, "kv_payload": 1024 * (i + 1), "kv_meta": 16, "fragmentation": 512},
        "drafts": [draft] if i % 2 else [],
        "preempted": [],
    }


def _output(tokens: list[int], prompt: str) -> dict[str, Any]:
    infos = [
        {
            "id": t, "position": 7 + i, "step": i + 1,
            "source": ("plain", "accepted", "corrected", "bonus")[i % 4],
            "logprob": -0.5 - i / 16, "top_logprobs": [[t, -0.5 - i / 16], [t + 1, -1.5 - i / 16]],
        }
        for i, t in enumerate(tokens)
    ]  # fmt: skip
    return {
        "prompt": prompt, "prompt_tokens": 7, "sample": 0, "sampling": {"temperature": 0.0, "max_tokens": 8},
        "text": "".join(chr(97 + t % 26) for t in tokens), "token_ids": tokens, "tokens": infos,
        "pieces": [chr(97 + t % 26) for t in tokens], "finish": "length", "cached_tokens": 0,
        "prompt_logprobs": {}, "error": None,
    }  # fmt: skip


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """``make_run(id="…", steps=500, tokens=[…], **changes)``."""

    def make(
        id: str = "a" * 32,
        *,
        steps: int = 3,
        tokens: list[int] | None = None,
        prompt: str = "Once",
        **changes: Any,
    ) -> Run:
        run = Run(
            id=id,
            kind="generate",
            model="tiny",
            weight_hash="f00d" * 16,
            recipe=[{"id": "paged"}, {"bits": 2, "id": "kivi"}],
            recipe_key="0123456789abcdef",
            plan={"kind": "exact", "page_size": 64, "limits": {"kv_pool_tokens": 8192}},
            numerics="fast",
            dtype="bfloat16",
            seed=3,
            state="done",
            prompts=(prompt,),
            outputs=(_output(tokens or [1, 2, 3, 4], prompt),),
            metrics=(
                Metric("decode_speed", 100.0, "tok/s", n=3, spread=(95.0, 104.0), better="higher"),
                Metric("ttft", 20.0, "ms", better="lower"),
                Metric("kl", 0.0, "nats", tag="predicted", better="lower", note="by definition"),
            ),
            memory={"weights": 1 << 20, "kv_payload": 4096, "kv_meta": 64, "fragmentation": 512},
            acceptance={"steps": 4, "tau": 2.5, "rate": 0.5, "alpha": None, "survival": [0.75, 0.25]},
            path=("attention:torch-pages",),
            steps=tuple(_step(i) for i in range(steps)),
            provenance=Provenance(
                workbench="0.1.0", python="3.11", torch="2.13.0", platform="Linux", device="cpu",
                cpu="a processor",
                threads=2, profile="bench", created="2026-01-02T03:04:05+00:00", versions={"numpy": "2"},
                environment={"OMP_NUM_THREADS": "2"},
            ),
            notes=("a note",),
        )  # fmt: skip
        changes = {k: v if k in ("metrics", "provenance") else plain(v) for k, v in changes.items()}
        for name in ("outputs", "prompts", "steps", "notes", "path"):
            if name in changes:
                changes[name] = tuple(changes[name])
        return replace(run, **changes)

    return make


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Where a store may be made."""
    return tmp_path / "kept" / "runs.db"
