"""What a panel tells a front end while it opens: little, and nothing that a slow front end would miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comm
import pytest

Messages = list[tuple[str, str, dict[str, Any]]]
ENOUGH = 600  # a message queue of Jupyter holds 1,000; what does not fit is thrown away


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Messages:
    """(comm, kind, state) of every message, oldest first."""
    out: Messages = []

    def publish(self: Any, msg_type: str, data: Any = None, *args: Any, **keys: Any) -> None:
        out.append((self.comm_id, msg_type, (data or {}).get("state", {})))

    monkeypatch.setattr(comm.DummyComm, "publish_msg", publish)
    return out


@pytest.fixture
def opened(sent: Messages, make_panel: Callable[[], Any]) -> Any:
    """A panel whose opening is in ``sent``."""
    return make_panel()


def test_a_panel_opens_with_a_few_hundred_messages(opened: Any, sent: Messages) -> None:
    assert opened.widget is not None
    assert 100 < len(sent) < ENOUGH


def test_what_our_scripts_draw_comes_with_its_picture(opened: Any, sent: Messages) -> None:
    """The front end drops what it is told between a model and its script, if that takes it two seconds."""
    live, head = opened._gui.live, opened._gui.head
    first = {ident: state for ident, kind, state in sent if kind == "comm_open"}
    shown = first[live.comm.comm_id]
    assert shown["status"]["state"] == "idle"
    assert shown["inputs"]["prompt"] == "why"
    assert shown["meters"]["phases"] and shown["tables"]["code"]
    assert first[head.comm.comm_id]["where"]["model"]["value"] == opened.session.plan.model
    later = [ident for ident, kind, _ in sent if kind != "comm_open"]
    assert live.comm.comm_id not in later and head.comm.comm_id not in later


def test_what_our_scripts_draw_is_opened_before_the_controls(opened: Any, sent: Messages) -> None:
    order = [ident for ident, kind, _ in sent if kind == "comm_open"]
    rows = opened._gui.controls.rows.values()
    drawn = max(order.index(widget.comm.comm_id) for widget in (opened._gui.live, opened._gui.head))
    assert drawn < min(order.index(row.on.comm.comm_id) for row in rows)


def test_option_controls_are_made_when_the_gear_is_pressed(opened: Any, sent: Messages) -> None:
    row = opened._gui.controls.rows["ngram"]
    opened.set("ngram", k=7)
    assert opened.flush()
    assert row.box is None
    before = len(sent)
    row.gear.value = True
    assert len(sent) > before
    assert row.box in row.widget.children and row.box.layout.display is None
    assert row.options["k"].main.value == 7
    opened.set("ngram", k=3)
    assert opened.flush()
    assert row.options["k"].main.value == 3
    row.gear.value = False
    assert row.box.layout.display == "none"


def test_options_of_what_cannot_be_switched_on_are_made_disabled(opened: Any) -> None:
    opened.set("kivi")
    assert opened.flush()
    row = next(
        r
        for r in opened._gui.controls.rows.values()
        if r.spec.seam == "kv_codec" and r.gear and r.id != "kivi"
    )
    row.gear.value = True
    assert row.on.disabled
    assert all(control._inputs[0].disabled for control in row.options.values())
    opened.set("kivi", False)
    assert opened.flush()
    assert not any(control._inputs[0].disabled for control in row.options.values())


def test_a_script_knows_its_own_model(opened: Any, sent: Messages) -> None:
    """With it a model that loaded too late for its host hears again, and asks for what it missed."""
    live = opened._gui.live
    assert live.ident == live.model_id == live.comm.comm_id
    opened.prompt = "what else"
    assert opened.flush()
    before = len(sent)
    live._handle_msg({"content": {"data": {"method": "request_state"}}})
    ident, kind, state = sent[before]
    assert (ident, kind) == (live.comm.comm_id, "comm_msg")
    assert state["inputs"]["prompt"] == "what else" and state["status"]["state"] == "idle"
