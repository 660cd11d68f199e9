"""Points of protocol P1 for a page: methods by name or as functions of rows, and with a few rows kept exact.

The measurement itself is :mod:`workbench.core.kv_p1`: a coded context is read by tokens whose own keys and
values are exact.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from workbench.core.build import standalone_engine
from workbench.core.kv_methods import method
from workbench.core.kv_p1 import submit_p1
from workbench.core.kv_prepared import Prepared
from workbench.core.kv_result import MethodResult
from workbench.core.kv_runs import RatePoint
from workbench.core.quality import quality_plans
from workbench.core.quality_windows import QualitySettings
from workbench.kv.cached import CachedRows, Reconstructed, RoundTrip
from workbench.kv.selection.baseline import RandomConfig, random_selector
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine


def measure_points(
    session: Session, methods: Mapping[str, str | RoundTrip | Prepared], settings: QualitySettings
) -> list[RatePoint]:
    """P1 of several methods, in order: texts such as ``"kivi:bits=2"``, functions of rows, or prepared ones.

    What stands before a colon or comma in a name is its technique. Raises what ``submit_p1`` raises, and
    :class:`OptionError` without methods.
    """
    if not methods:
        raise OptionError("There is no method to measure.", hint='For example {"kivi": "kivi:bits=4"}.')
    given = {name: method(m) if isinstance(m, str) else m for name, m in methods.items()}
    found: dict[str, MethodResult] = submit_p1(session, given, settings=settings).result()
    return [point(name, result) for name, result in found.items()]


def point(name: str, result: MethodResult) -> RatePoint:
    """A method's numbers as a point; a method that codes nothing has its whole ratio as codec ratio."""
    got = {m.name: m for m in result.metrics()}
    kl, whole = got["kl"], got["whole_ratio"].value
    return RatePoint(
        technique=name.split(":")[0].split(",")[0],
        method=name,
        codec=got["codec_ratio"].value if "codec_ratio" in got else whole,
        whole=whole,
        kl=kl.value,
        spread=kl.spread or (kl.value, kl.value),
        change=got["perplexity_change"].value,
        top1=got["top1"].value,
        windows=kl.n,
    )


def keep_exact(trip: RoundTrip, first: int) -> RoundTrip:
    """The same with the ``first`` tokens in 16 bits instead; the payload changes by their bytes.

    Coded tokens are taken to share the payload evenly, as they do in formats of tokens or of pages.
    """

    def run(rows: CachedRows) -> Reconstructed:
        back = trip(rows)
        n = min(first, rows.tokens)
        k, v = (
            tuple(torch.cat([a[:n], b[n:]]) for a, b in zip(exact, coded, strict=True))
            for exact, coded in ((rows.k, back.rows.k), (rows.v, back.rows.v))
        )
        sixteen = rows.nbytes_16bit() // rows.tokens
        coded = rows.tokens - back.exempt
        each = (back.payload - sixteen * back.exempt) / max(coded, 1)
        n = min(n, coded)
        payload = round(back.payload - n * each) + n * sixteen
        return replace(back, rows=CachedRows(k, v, rows.positions), payload=payload, exempt=back.exempt + n)

    return run


def keep_random(
    session: Session, settings: QualitySettings, *, keep: float = 0.5, recent: int = 0, seed: int = 0
) -> Prepared:
    """Tokens kept at random, 4 sinks and the ``recent`` last ones always: what every selector has to beat."""
    config = RandomConfig(keep=keep, recent=recent, seed=seed)
    _, plain = quality_plans(session.plan, Recipe(), session.facts, settings)
    plan = replace(plain, provides=(*plain.provides, "paged"))  # what is dropped is freed by pages

    def work(job: Job, _: Engine) -> Generator[None, None, Prepared]:
        decoder = session.decoder(plain, lambda f, what: job.progress(f, 1.0, "", what), job.token)
        yield
        selector = random_selector(config)
        key = f"{selector.key}/engine"
        return Prepared(None, key, engine=lambda: standalone_engine(plan, decoder, selector))

    made: Prepared = session.task("preparing random selection", work).result()
    return made
