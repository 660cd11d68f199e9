"""The model that a head is trained for, opened once: weights, tokenizer, an engine on demand."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.core.bound import attention_op
from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.engine.engine import Engine
from workbench.engine.seams import AttentionOp
from workbench.models.decoder import Decoder
from workbench.models.progress import Cancel, Progress
from workbench.models.registry import open_source
from workbench.models.source import Source
from workbench.models.tokenizer import Tokenizer, load_tokenizer
from workbench.spec.plan import DType, EngineLimits, Numerics, Plan
from workbench.spec.recipe import Recipe


@dataclass(frozen=True)
class Target:
    """A model and its plain plan, with compiled kernels where they can be had."""

    source: Source
    tokenizer: Tokenizer
    decoder: Decoder
    plan: Plan

    @property
    def facts(self) -> ModelFacts:
        """What planning knows of it."""
        return ModelFacts(self.plan.model, self.source.config, self.source.fingerprint)

    def attention(self) -> AttentionOp:
        """The plain plan's attention."""
        return attention_op(self.plan, self.source.config)

    @contextmanager
    def engine(self, *uses: str, limits: EngineLimits, eos: Sequence[int] | None = None) -> Iterator[Engine]:
        """An engine of the plain plan and ``uses``, with a KV pool of its own.

        It ends texts at the tokenizer's end tokens, or at ``eos``.
        """
        gc.collect()  # one before this, whose parts know each other, may still hold its pool
        made = require(
            plan(
                Recipe.of(*(u.id for u in self.plan.recipe), *uses),
                self.facts,
                dtype=self.plan.dtype,
                numerics=self.plan.numerics,
                device=self.plan.device,
                limits=limits,
            )
        )
        with torch.inference_mode():
            kv = build_kv(made, self.decoder)
            ends = self.tokenizer.eos_ids if eos is None else tuple(eos)
            yield build_engine(made, self.decoder, kv, None, ends)


def open_target(
    model: str | Path,
    *,
    dtype: DType = "bfloat16",
    numerics: Numerics = "fast",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Target:
    """Open a model by name or folder; raises :class:`ModelError` s, and ``Cancelled`` between layers."""
    source, tokenizer = open_source(model), load_tokenizer(model)
    facts = ModelFacts(str(model), source.config, source.fingerprint)
    made = plan(Recipe.of("paged", "compiled"), facts, dtype=dtype, numerics=numerics)
    if not isinstance(made, Plan):  # other settings, or no compiler: slower, the same otherwise
        made = require(plan(Recipe.of("paged"), facts, dtype=dtype, numerics=numerics))
    weights = build_weights(made, source, progress, cancel)
    return Target(source, tokenizer, Decoder(source.config, weights), made)
