"""Two processes to play with: delays and a kill change nothing that is said, and leave nothing behind."""

from __future__ import annotations

import time

import psutil
import pytest

from workbench.core.session import Session
from workbench.spec.errors import OptionError
from workbench.spec.plan import EngineLimits
from workbench.widgets.spec_views import PlacesLive

TEXT = "def area(width, height):\n    return width"


def test_a_run_is_delayed_killed_and_says_the_same() -> None:
    limits = EngineLimits(kv_pool_tokens=512, max_context=192)
    with Session("tiny", limits=limits, dtype="float32", numerics="pinned") as session:
        plain = session.generate(TEXT, max_tokens=40, ignore_eos=True)
        live = PlacesLive(session, "mirror_sd:layers=3,k=2", TEXT, tokens=40)
        buttons = {c.description: c for c in live.children[0].children}
        assert buttons["Kill the drafter"].disabled
        live.hold(20.0)
        buttons["Start"].click()
        assert live.start() is live.run and live.run is not None  # one at a time
        until = time.monotonic() + 120
        while not live.run.text and time.monotonic() < until:
            time.sleep(0.02)
        assert live.run.link is not None and live.run.delay == 0.02
        pid = live.run.link.pid
        assert f"process {pid} drafts" in live.run.state
        buttons["delay, ms"].value = 5.0
        assert live.run.delay == 0.005
        buttons["Kill the drafter"].click()
        done = live.result(120)
        assert done.token_ids == tuple(plain.token_ids) and done.text == plain.text
        assert any("without drafts" in w for w in done.warnings)
        assert "is gone" in live.children[1].value and plain.text[-5:].split()[-1] in live.children[1].value
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        lanes = live.lanes()
        assert "(measured)" in lanes.lanes().title and lanes.trace.emitted <= 40
        wrong = PlacesLive(session, "mirror_sd:exit=9", TEXT)
        assert wrong.start() is None and "exit" in wrong.children[1].value
        here = PlacesLive(session, "mirror_sd:layers=3,place=here", TEXT)
        with pytest.raises(OptionError, match="no process"):
            here.result(60)
    assert "start, delay, kill" in str(live._repr_mimebundle_())
