"""Do the codes of neighbouring layers of a real cache agree beyond chance? XQuant's premise, pair by pair."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.core.build_kv import kv_codec
from workbench.core.quality import quality_plans
from workbench.core.quality_windows import QualitySettings
from workbench.kv.cached import CachedRows
from workbench.kv.xquant.agreement import Agreement, joint_counts, shuffled_tokens
from workbench.kv.xquant.codec import XQuantCodec
from workbench.kv.xquant.schedule import pairs_of
from workbench.spec.errors import InvariantError, OptionError
from workbench.spec.recipe import Recipe

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine

LEVELS = 4


@dataclass(frozen=True)
class CodeAgreement:
    """Of keys and of values: over all pairs of layers (``whole``), and by pair; ``tokens`` were coded."""

    model: str
    whole: tuple[Agreement, Agreement]
    pairs: dict[tuple[int, int], tuple[Agreement, Agreement]]
    tokens: int


def code_agreement(session: Session, rows: CachedRows) -> CodeAgreement:
    """The 2-bit codes of ``rows`` of the session's model, paired as XQuant pairs layers.

    Raises :class:`OptionError` for fewer rows than a page of it, or a model without pairs.
    """
    settings = QualitySettings(context=rows.tokens, score=1, greedy=0)
    recipe = Recipe.of("xquant:schedule=none")
    plan, _ = quality_plans(session.plan, recipe, session.facts, settings)
    pairs = pairs_of(g.layers for g in session.facts.config.kv_groups)
    size = plan.page_size
    pages = rows.tokens // size
    if not pages or not pairs:
        raise OptionError(
            f"{rows.tokens} tokens and {len(pairs)} pairs of layers leave nothing to compare.",
            hint=f"Give {size} tokens or more, of a model of two layers or more.",
        )

    def work(job: Job, _: Engine) -> Generator[None, None, list[tuple[Tensor, Tensor]]]:
        decoder = session.decoder(plan, lambda f, what: job.progress(f, 1.0, "", what), job.token)
        codec = kv_codec(plan, decoder)
        if not isinstance(codec, XQuantCodec):
            raise InvariantError("A plan with xquant has another KV format.")
        found = []
        for layer, sides in enumerate(zip(rows.k, rows.v, strict=True)):
            k, v = (x[: pages * size].view(pages, size, *x.shape[1:]).transpose(1, 2) for x in sides)
            with torch.inference_mode():
                found.append(codec.at(layer).codes(k, v))
            yield
        return found

    codes = session.task("coding layers", work).result()
    counts = torch.zeros(2, 2, len(pairs), LEVELS, LEVELS, dtype=torch.int64)  # side, shuffled, pair
    for i, (first, second) in enumerate(pairs):
        for side in (0, 1):
            a, b = codes[first][side], codes[second][side]
            counts[side, 0, i] = joint_counts(a, b, LEVELS)
            counts[side, 1, i] = joint_counts(a, shuffled_tokens(b, seed=second), LEVELS)

    def both(joint: Tensor) -> tuple[Agreement, Agreement]:
        return Agreement.of(joint[0, 0], joint[0, 1]), Agreement.of(joint[1, 0], joint[1, 1])

    apart = {pair: both(counts[:, :, i]) for i, pair in enumerate(pairs)}
    return CodeAgreement(str(session.plan.model), both(counts.sum(2)), apart, pages * size)
