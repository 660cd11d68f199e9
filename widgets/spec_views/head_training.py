"""A draft head that is being trained: progress, a learning curve that grows, stop and go on.

Training runs on a thread of its own, so that the notebook stays usable; what was made is kept, and going on
ends with the same bits as never having stopped. ``own_cache`` gives a notebook a cache folder of its own, so
that a head made for show does not take the place of a better one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from workbench.models.cache import cache_dir
from workbench.models.heads import HeadFile
from workbench.spec.errors import Cancelled, WorkbenchError
from workbench.training.heads.eagle import EagleShape
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.target import Target
from workbench.training.heads.train_eagle import train_eagle
from workbench.widgets import figures
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table
from workbench.widgets.waiting import wait_or_cancel

State = Literal["idle", "running", "stopped", "done", "failed"]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_SHARED = ("kernels", "models", "gguf")  # of the user's own cache: dear to make, and the same for all
_KEY = "WORKBENCH_CACHE"


def own_cache() -> Path:
    """A fresh folder that is this process's cache from now on; kernels and models are still the user's.

    Whoever asks for it removes it: :func:`drop_cache`.
    """
    real, folder = cache_dir(), Path(tempfile.mkdtemp(prefix="workbench-"))
    for name in _SHARED:
        (real / name).mkdir(exist_ok=True)
        (folder / name).symlink_to(real / name)
    (folder / "before").write_text(os.environ.get(_KEY, ""), encoding="utf-8")
    os.environ[_KEY] = str(folder)
    return folder


def drop_cache(folder: Path) -> None:
    """Remove a folder of :func:`own_cache`, and take the cache that was there before."""
    before = (folder / "before").read_text(encoding="utf-8")
    for name in _SHARED:
        (folder / name).unlink()  # the link, not what it leads to
    shutil.rmtree(folder)
    os.environ.pop(_KEY, None)
    if before:
        os.environ[_KEY] = before


class HeadTraining:
    """One training of an EAGLE head for ``target``; :meth:`start` begins it or goes on, :meth:`stop` stops.

    ``shape``, ``data`` and ``schedule`` as in :func:`workbench.training.heads.train_eagle.train_eagle`, whose
    errors :meth:`result` raises.
    """

    def __init__(
        self,
        target: Target,
        data: DataSettings,
        shape: EagleShape,
        schedule: Schedule,
        *,
        kind: Literal["eagle", "eagle3"] = "eagle3",
        prompts: int = 12,
    ) -> None:
        self.target, self.data, self.shape, self.schedule = target, data, shape, schedule
        self.kind, self.prompts = kind, prompts
        self.state: State = "idle"
        self.fraction, self.message = 0.0, ""
        self.curve: tuple[Mapping[str, float], ...] = ()
        self.stops: list[int] = []  # steps at which it was stopped
        self.head: HeadFile | None = None
        self.error: WorkbenchError | None = None
        self._cancel, self._ended = threading.Event(), threading.Event()
        self._listeners: list[Any] = []
        self._until = 0
        self._thread: threading.Thread | None = None

    # -- what a notebook calls ---------------------------------------------------------------------------

    def start(self, until: int = 0) -> HeadTraining:
        """Begin, or go on where it was stopped; ``until``: stop by itself once that step is on the curve."""
        if self.state in ("running", "done"):
            return self
        self._cancel.clear()
        self._ended.clear()
        self._until, self.state, self.error = until, "running", None
        self._thread = threading.Thread(target=self._work, name="workbench-training", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> HeadTraining:
        """Stop between two steps; what was made is kept."""
        self._cancel.set()
        return self

    def wait(self, timeout: float | None = None) -> HeadTraining:
        """Wait until it is done or stopped. An interrupt stops it; raises ``TimeoutError``."""
        if self.state != "idle" and not wait_or_cancel(self._ended, self._cancel.set, timeout):
            raise TimeoutError(f"Training is still at {self.fraction:.0%} after {timeout} s.")
        return self

    def result(self, timeout: float | None = None) -> HeadFile:
        """The finished head. Raises what training ended with, and ``Cancelled`` where it was stopped."""
        self.wait(timeout)
        if self.error is not None:
            raise self.error
        if self.head is None:
            raise Cancelled("Training was stopped.", hint="start() goes on from there.")
        return self.head

    def listen(self, listener: Any) -> None:
        """Call ``listener()`` on every change, on the training's thread."""
        self._listeners.append(listener)

    def live(self) -> Any:
        """Progress, the curve as it grows, and buttons to stop and to go on."""
        from workbench.widgets.spec_views.head_training_live import watching

        return watching(self)

    # -- what it shows -----------------------------------------------------------------------------------

    @property
    def words(self) -> str:
        """Where it is, in a line."""
        said = {
            "idle": "not begun",
            "stopped": f"stopped at step {self.stops[-1] if self.stops else 0} of {self.schedule.steps}",
            "failed": str(self.error) if self.error is not None else "failed",
            "done": f"done: {self.schedule.steps} steps",
        }
        return said.get(self.state, f"{self.fraction:.0%} {self.message}")

    def figure(self, theme: Theme = "auto") -> Any:
        """The learning curve on held-out text, and where it was stopped."""
        return curve_figure(f"Learning, {self.kind} for {self.target.plan.model} (measured)", self.curve,
                            self.stops, theme)  # fmt: skip

    def table(self) -> Table:
        """The curve's points."""
        names = [n for n in (self.curve[-1] if self.curve else {}) if n.startswith("right_")]
        rows = [(p["step"], p["tokens"], p["loss"], *(p[n] for n in names), "measured") for p in self.curve]
        columns = ("step", "predictions learnt from", "loss", *(f"first {n[6:]} right" for n in names), "tag")
        return Table.of(columns, rows)

    # -- on the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        state: State = "done"
        try:
            self.head = train_eagle(
                self.kind,
                self.target.plan.model,
                self.data,
                self.shape,
                self.schedule,
                prompts=self.prompts,
                target=self.target,
                progress=self._tell,
                cancel=self._cancel.is_set,
                watch=self._watch,
            )
        except Cancelled:
            state = "stopped"
            self.stops.append(self._step)
        except WorkbenchError as error:
            state, self.error = "failed", error
        self.state = state
        self._ended.set()
        self._changed()

    _step = 0

    def _tell(self, fraction: float, message: str) -> None:
        self.fraction, self.message = fraction, message
        word, _, rest = message.partition(" ")
        if word == "step":
            self._step = int(rest.partition(",")[0])
            if self._until and self._step >= self._until:
                self._cancel.set()
        self._changed()

    def _watch(self, curve: Sequence[Mapping[str, float]]) -> None:
        self.curve = tuple(curve)
        self._changed()

    def _changed(self) -> None:
        for listener in self._listeners:
            with suppress(Exception):  # nobody who looks on may end a training
                listener()


def lineage(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The facts of a head and of those it goes on from, the oldest first."""
    return [*(lineage(facts["before"]) if "before" in facts else []), facts]


def recorded_curve(facts: Mapping[str, Any]) -> tuple[list[dict[str, float]], list[int]]:
    """The learning curve in a head's file, those of earlier heads before it; where it was gone on with.

    ``tokens`` and ``step`` count on from one head to the next.
    """
    out: list[dict[str, float]] = []
    joints: list[int] = []
    tokens = steps = 0
    for one in lineage(facts):
        joints += [steps] if steps else []
        out += [{**p, "tokens": p["tokens"] + tokens, "step": p["step"] + steps} for p in one["curve"]]
        tokens += one["trained"]["predictions"]
        steps = int(out[-1]["step"]) if out else 0
    return out, joints


def curve_figure(
    title: str, curve: Sequence[Mapping[str, float]], stops: Sequence[int] = (), theme: Theme = "auto"
) -> Any:
    """Shares of right drafts over the predictions learnt from; dotted lines where it was stopped."""
    out = figures.new(title, theme=theme, x="predictions learnt from", y="first k drafts all right")
    names = [n for n in (curve[-1] if curve else {}) if n.startswith("right_")]
    for name, colour in zip(names, COLOURS, strict=False):
        out.add_scatter(
            x=[p["tokens"] for p in curve], y=[p[name] for p in curve], mode="lines+markers",
            name=f"k = {name[6:]}", line={"color": colour, "width": 2}, marker={"size": 6},
            hovertemplate=f"{name[6:]} right: %{{y:.0%}} after %{{x:,}}<extra></extra>",
        )  # fmt: skip
    for step in stops:
        behind = [p["tokens"] for p in curve if p["step"] >= step]
        if behind:
            out.add_vline(x=behind[0], line={"dash": "dot", "width": 1, "color": "#7c8796"})
    out.update_yaxes(rangemode="tozero", tickformat=".0%")
    return out
