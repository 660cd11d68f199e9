"""Ctrl-C before, while and after the one object of ``--json`` is written: there is always exactly one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from workbench.cli.output import interruptible

SCRIPT = """
import os, signal, sys
from workbench.cli import output, start

when = sys.argv[1]
sys.argv = ["workbench", "--json"]
signal.signal(signal.SIGINT, start._leave)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


class Stdout:
    def write(self, text):
        global when
        half = len(text) // 2
        sys.__stdout__.write(text[:half])
        if when == "while":
            when = "done"
            interrupt()
        sys.__stdout__.write(text[half:])

    def flush(self):
        sys.__stdout__.flush()


if when == "before":
    interrupt()
sys.stdout = Stdout()
output.print_json({"result": [1] * 1000})
if when == "after":
    interrupt()
os._exit(0 if when == "never" else 1)
"""


@pytest.mark.parametrize(
    ("when", "status", "key"),
    [("never", 0, "result"), ("before", 130, "error"), ("while", 130, "result"), ("after", 130, "result")],
)
def test_an_interrupt_leaves_one_json_object(when: str, status: int, key: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, when], capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert key in json.loads(done.stdout)
    assert done.stderr == ""


FULL = """
from workbench.cli.output import interruptible, print_json

with interruptible():
    print_json({"result": [1] * 50000})
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_interrupt_while_the_reader_is_slow_loses_nothing(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen([sys.executable, "-c", FULL], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        waiting, before = 0, -1
        while waiting == 0 or waiting != before:  # until the pipe is full
            time.sleep(0.2)
            before = waiting
            (waiting,) = struct.unpack("i", fcntl.ioctl(process.stdout, termios.FIONREAD, b"    "))
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # it is in the write by now, and back in it
        found = json.loads(process.stdout.read())
    assert len(found["result"]) == 50000
    assert process.returncode == 0


def test_interrupts_that_are_ignored_stay_ignored() -> None:
    """As under nohup: the parent decided."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as wanted:
            signal.raise_signal(signal.SIGINT)
            assert not wanted.is_set()
    finally:
        signal.signal(signal.SIGINT, before)
