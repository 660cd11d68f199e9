"""NBW-05 in a real kernel: an interrupt ends the run, not the session; one worker is left."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic, sleep
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]
SETUP = """
import threading
from workbench.widgets import Panel
panel = Panel("tiny", prompt="def", sampling={"max_tokens": 1900, "ignore_eos": True})
panel.run(max_tokens=2).result(60)
"""
CHECK = """
from time import monotonic, sleep
run = panel.last
assert run.state == "cancelled", run.state
assert 0 < len(run.token_ids) < 1900
assert panel.session.memory()["kv_payload"] == 0
assert panel.run(max_tokens=4).result(60).state == "done"
print(sum(t.name == "workbench-session" and t.is_alive() for t in threading.enumerate()), "worker")
"""


@pytest.fixture
def kernel() -> Iterator[Any]:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def output(client: Any, code: str, timeout: float = 120) -> tuple[str, str]:
    """(status, printed text) of a cell."""
    said: list[str] = []

    def hook(message: Any) -> None:
        if message["msg_type"] == "stream":
            said.append(message["content"]["text"])
        if message["msg_type"] == "error":
            said.append(f"{message['content']['ename']}: {message['content']['evalue']}")

    reply = client.execute_interactive(code, output_hook=hook, timeout=timeout)
    return reply["content"]["status"], "".join(said)


def test_nbw_05_a_kernel_interrupt_stops_the_run_that_a_cell_waits_for(kernel: Any) -> None:
    manager, client = kernel
    status, text = output(client, SETUP)
    assert status == "ok", text
    sent = client.execute("panel.run(max_tokens=1900).wait()")
    sleep(0.5)
    manager.interrupt_kernel()
    start = monotonic()
    while True:
        reply = client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == sent:
            break
    assert reply["content"]["status"] == "error"
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert monotonic() - start < 60
    status, text = output(client, CHECK)
    assert (status, text) == ("ok", "1 worker\n"), text
