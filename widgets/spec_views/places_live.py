"""Two processes to play with: a slider holds every message back, a button kills the drafter.

The text is the plain run's, whatever is done to the drafter; the picture of who waits for whom follows when
the run has ended. Buttons only ask; the session's thread does the work.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from workbench.core.placed_live import PlacedText, Watched, watch_two_places
from workbench.spec.errors import MissingExtra, WorkbenchError
from workbench.widgets.publisher import Publisher
from workbench.widgets.spec_views.two_lanes import TwoLanes

if TYPE_CHECKING:
    from workbench.core.session import Session

try:
    import ipywidgets as w
except ImportError:
    raise MissingExtra("ipywidgets", "lab", "A live view") from None


class PlacesLive(w.VBox):  # type: ignore[misc]
    """Start, a delay for each message, kill; below, the text and the state of the drafter's process.

    Everything a click does is a method, and works from Python: :meth:`start`, :meth:`hold`, :meth:`kill`.
    """

    def __init__(self, session: Session, use: str, prompt: str, tokens: int = 64) -> None:
        self._session, self._use, self._prompt, self._tokens = session, use, prompt, tokens
        self.run: Watched | None = None
        self._start = w.Button(description="Start", tooltip=f"Run {use} in two processes")
        self._kill = w.Button(
            description="Kill the drafter", tooltip="End its process, as an accident would", disabled=True
        )
        self._delay = w.FloatSlider(
            value=0.0, min=0.0, max=50.0, step=1.0, description="delay, ms", readout_format=".0f",
            style={"description_width": "80px"}, layout={"width": "360px"},
        )  # fmt: skip
        self._said = w.HTML(value=_page("Nothing runs yet.", ""))
        super().__init__([w.HBox([self._start, self._kill, self._delay]), self._said])
        self._publisher = Publisher(self._show)
        self._start.on_click(lambda _: self.start())
        self._kill.on_click(lambda _: self.kill())
        self._delay.observe(lambda change: self.hold(change["new"]), names="value")

    def start(self) -> Watched | None:
        """Start a run; one that goes on is left alone. None where it does not fit, which is then shown."""
        if self.run is not None and self.run.job is not None and not self.run.job.ended:
            return self.run
        try:
            self.run = watch_two_places(
                self._session, self._use, self._prompt, tokens=self._tokens,
                delay=self._delay.value / 1e3, changed=self._publisher.mark,
            )  # fmt: skip
        except WorkbenchError as err:
            self._said.value = _page(f"{err.message} {err.hint}", "")
            return None
        self._kill.disabled = False
        self._publisher.mark()
        return self.run

    def hold(self, ms: float) -> None:
        """Hold every message back for so long, from now on."""
        if self._delay.value != ms:
            self._delay.value = ms
        if self.run is not None:
            self.run.delay = ms / 1e3

    def kill(self) -> None:
        """End the drafter's process."""
        if self.run is not None:
            self.run.kill()
            self._publisher.mark()

    def result(self, timeout: float | None = None) -> PlacedText:
        """Wait for the run's end; starts one if none was."""
        run = self.run or self.start()
        if run is None:
            raise WorkbenchError("The run did not start.", hint="The box says why.")
        done = run.result(timeout)
        self._kill.disabled = True
        self._publisher.mark()
        self._publisher.flush()
        return done

    def lanes(self, **more: Any) -> TwoLanes:
        """Who waited for whom, of the run that has ended."""
        return TwoLanes(self.result().trace, **more)

    def _show(self) -> None:
        if self.run is not None:
            self._said.value = _page(self.run.state, self.run.text)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        return {**data, "text/plain": f"{self._use} in two processes: start, delay, kill"}


def _page(state: str, text: str) -> str:
    said = f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre>'
    return f'<p role="status">{html.escape(state)}</p>{said}'
