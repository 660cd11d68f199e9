"""Peers of the benchmarks: the table, what is refused, and what the arrivals of tokens are read as."""

from __future__ import annotations

import ctypes
import os
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.core import benchmark_gguf, benchmark_openmp, peers
from workbench.core.benchmark import BENCHES, BenchSettings
from workbench.core.benchmark_arrivals import Arrival, Streaming, decode_turn
from workbench.core.benchmark_engine import random_prompts
from workbench.core.benchmark_gguf import PeerFile, peer_file
from workbench.core.benchmark_signals import SignalStack, exchange_signal_stack, same_signal_stack
from workbench.core.peers import PEERS, check_peers, peers_of_extra
from workbench.spec.errors import JobFailed, MissingExtra, ModelNotFound, OptionError

# -- the table ------------------------------------------------------------------------------------------


def test_every_peer_has_an_adapter_and_measures_what_exists() -> None:
    for peer in PEERS.values():
        assert callable(import_module(peer.adapter).load)  # without the package being there
        assert set(peer.measures) <= set(BENCHES)


def test_the_extra_brings_the_packages_of_its_peers(repo_root: Path) -> None:
    extras = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert peers_of_extra("peers") == ("openvino", "llamacpp")
    named = {requirement.partition(">=")[0] for requirement in extras["peers"]}
    assert named == {PEERS[name].package for name in peers_of_extra("peers")}


def test_an_absent_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    check_peers(["transformers"], "cuda:1")
    with pytest.raises(MissingExtra, match=r"'openvino-genai'.*\[peers\]"):
        check_peers(["transformers", "openvino"], "cpu")
    with pytest.raises(MissingExtra, match="xllamacpp"):  # before a process is started
        BenchSettings("decode", "tiny", peers=("llamacpp",)).chosen()


def test_unknown_peers_and_devices_are_refused() -> None:
    with pytest.raises(OptionError, match=r"Peers are transformers, .*llamacpp"):
        check_peers(["ollama"], "cpu")
    with pytest.raises(OptionError, match="not on cuda"):
        check_peers(["openvino"], "cuda")


# -- the file -------------------------------------------------------------------------------------------


def test_the_file_says_what_it_holds_and_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    digest = benchmark_gguf.remembered_sha256(path)
    monkeypatch.setattr(benchmark_gguf, "fetch_gguf", lambda model, progress: path)
    note = {"file_sha256": digest, "weight_grid": "Q4_1, Q6_K"}
    monkeypatch.setattr(benchmark_gguf, "origin", lambda model: note)
    file = peer_file("m")
    assert file == PeerFile(path, ("Q4_1", "Q6_K"), True) and file.format == "Q4_1"
    assert str(file) == "m.gguf (Q4_1, Q6_K)"

    formats = {f"{layer}.q_proj.weight": "F16" for layer in "ab"} | {"c.v_proj.weight": "F32", "norm": "Q8_0"}
    monkeypatch.setattr(benchmark_gguf, "GGUFSource", lambda path: SimpleNamespace(formats=formats))
    note["file_sha256"] = "0" * 64  # ours came from elsewhere
    assert peer_file("m") == PeerFile(path, ("F16", "F32"), False)
    assert "another source" in str(peer_file("m"))

    def not_converted(model: str) -> Any:
        raise ModelNotFound("not converted")

    monkeypatch.setattr(benchmark_gguf, "origin", not_converted)
    assert peer_file(str(path)) == PeerFile(path, ("F16", "F32"), True)


# -- arrivals -------------------------------------------------------------------------------------------


def stream(*steps: tuple[float, str]) -> list[Arrival]:
    """``(1.0, "001")``: at 1.0 two tokens of sequence 0 together, then one of sequence 1."""
    return [
        Arrival(at + i * 1e-4, int(s), which.count(s))
        for at, which in steps
        for i, s in enumerate(sorted(set(which)))
    ]


def test_only_steps_of_the_whole_batch_are_decode_steps() -> None:
    steps = stream((1.0, "01"), (1.5, "01"), (2.0, "01"))
    even = decode_turn([*steps, Arrival(2.5, 0, 0)], 2)  # an end without a token
    assert even.amount == 4 and even.seconds == pytest.approx(1.0)
    # 0 starts early and ends early: between 1's first token and 0's last, two steps of both, one with three
    staggered = stream((1.0, "0"), (2.0, "01"), (3.0, "01"), (4.0, "001"), (9.0, "1"))
    turn = decode_turn(staggered, 2)
    assert turn.amount == 5 and turn.seconds == pytest.approx(2.0)


def test_a_batch_that_never_ran_together_is_no_measurement() -> None:
    for apart in (stream((1.0, "0"), (2.0, "0"), (3.0, "1"), (4.0, "1")), stream((1.0, "0"), (2.0, "0")), []):
        with pytest.raises(JobFailed, match="all together"):
            decode_turn(apart, 2)


@pytest.mark.parametrize(
    ("measure", "made", "amount"), [("prefill", 1, 14), ("whole", 3, 6), ("first", 1, 1)]
)
def test_what_is_asked_and_counted(measure: Any, made: int, amount: int) -> None:
    asked: list[Any] = []

    def generate(prompts: Any, tokens: int) -> Any:
        asked.append((prompts, tokens))
        return 10.0, stream(*((12.0 + i, "01") for i in range(tokens)))

    turn = Streaming("x", "", generate, 61, measure, batch=2, context=7, tokens=3).turn(5)
    assert asked == [(random_prompts(61, 2, 7, 5), made)]
    assert turn.amount == amount and turn.seconds == pytest.approx(1 + made, abs=1e-3)


def test_tokens_that_never_came_are_no_measurement() -> None:
    short = Streaming("x", "", lambda p, n: (0.0, stream((1.0, "01"))), 61, "decode", batch=2, context=3)
    with pytest.raises(JobFailed, match="2 tokens came of 17"):
        short.turn(0)


# -- signals --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signal stacks are those of Linux")
def test_a_library_leaves_no_signal_stack_of_its_own() -> None:
    room = ctypes.create_string_buffer(1 << 16)
    before = exchange_signal_stack()
    with pytest.raises(RuntimeError), same_signal_stack():
        exchange_signal_stack(SignalStack(ctypes.addressof(room), 0, len(room)))
        assert exchange_signal_stack().pointer == ctypes.addressof(room)
        raise RuntimeError("the library failed to load")
    after = exchange_signal_stack()
    assert (after.pointer, after.flags, after.size) == (before.pointer, before.flags, before.size)


# -- threads --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="loaded libraries can be listed on Linux")
def test_idle_threads_of_torch_end_and_come_back() -> None:
    a = torch.randn(600, 600)
    before = a @ a
    if torch.get_num_threads() < 2:
        pytest.skip("torch has no second thread here")
    busy = len(os.listdir("/proc/self/task"))
    assert benchmark_openmp.end_idle_threads() == len(benchmark_openmp.loaded_runtimes()) >= 1
    assert len(os.listdir("/proc/self/task")) < busy
    assert torch.equal(a @ a, before) and len(os.listdir("/proc/self/task")) >= busy


def test_where_libraries_cannot_be_listed_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark_openmp, "_MAPS", tmp_path / "absent")
    assert benchmark_openmp.end_idle_threads() == 0
    (tmp_path / "maps").write_text(
        f"0-1 r-xp 0 00:00 7    {tmp_path}/libgomp.so.1 (deleted)\n2-3 rw-p 0 00:00 0\n"
    )
    monkeypatch.setattr(benchmark_openmp, "_MAPS", tmp_path / "maps")
    assert len(benchmark_openmp.loaded_runtimes()) == 1 and benchmark_openmp.end_idle_threads() == 0
