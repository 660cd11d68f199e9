"""Which layers of a session's model share codes, and what that was decided by: as a task, as tables."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.build_kv import kv_codec
from workbench.core.plan import plan, require
from workbench.kv.xquant.harm import SharingHarm
from workbench.kv.xquant.schedule import Schedule
from workbench.spec.errors import RecipeError
from workbench.spec.recipe import Recipe

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine


@dataclass(frozen=True)
class SharingReport:
    """The schedule of a model's layers, the measurements behind it (None: it needed none), bits per element.

    ``metadata_bits`` are those of minimum and step, which every layer pays, sharing or not.
    """

    model: str
    schedule: Schedule
    harm: SharingHarm | None
    metadata_bits: float

    def rows(self) -> list[dict[str, int | None]]:
        """One row per layer: widths, and whose codes are read."""
        return self.schedule.table()

    def pairs(self) -> list[dict[str, object]]:
        """One row per side and pair: harm of sharing, and agreement of codes beside its controls."""
        return self.harm.table() if self.harm is not None else []

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "model": self.model,
            "code_bits": float(self.schedule.code_bits),
            "metadata_bits": self.metadata_bits,
            "schedule": asdict(self.schedule),
            "origin": self.harm.origin if self.harm is not None else "",
            "pairs": self.pairs(),
        }


def submit_sharing(session: Session, recipe: Recipe) -> Job:
    """Queue the making of the schedule of a recipe with ``xquant``; the job's result is a
    :class:`SharingReport`.

    About a minute when it is measured and was not before, with progress and cancel. Raises
    :class:`RecipeError` for another recipe and :class:`PlanError` for one that does not fit, at once.
    """
    if "xquant" not in {use.id for use in recipe}:
        raise RecipeError("This recipe shares no codes between layers.", hint="Add xquant to it.")
    here = session.plan
    made = require(
        plan(
            recipe,
            session.facts,
            device=here.device,
            dtype=here.dtype,
            numerics=here.numerics,
            limits=here.limits,
        )
    )

    def work(job: Job, _: Engine) -> Generator[None, None, SharingReport]:
        def told(done: float, what: str) -> None:
            job.progress(done, 1.0, "", what)

        decoder = session.decoder(made, told, job.token)
        yield
        codec: Any = kv_codec(made, decoder, told, job.token)
        return SharingReport(made.model, codec.schedule, codec.harm, 32 / codec.group)

    return session.task("which layers share codes", work)
