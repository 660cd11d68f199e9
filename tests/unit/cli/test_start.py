"""Ctrl-C before, while and after the one object of ``--json`` is written: there is always exactly one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
        half = len(text) // 2
        sys.__stdout__.write(text[:half])
        if when == "while":
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
