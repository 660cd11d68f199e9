"""OpenVINO GenAI and llama.cpp as peers: fakes of their two interfaces, and the real ones where installed."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from workbench.core import benchmark_llamacpp, benchmark_openvino
from workbench.core.benchmark import BenchSettings, run_benchmark
from workbench.core.benchmark_engine import random_prompts
from workbench.core.benchmark_gguf import PeerFile
from workbench.core.benchmark_peers import PeerSetup, load_peers
from workbench.core.peers import PEERS
from workbench.models.cache import cache_dir
from workbench.models.registry import WheelSource, registry
from workbench.spec.errors import JobFailed, UnsupportedModel

FILE = PeerFile(Path("m.gguf"), ("Q4_1",), True)
SETUP = PeerSetup("m", "float32", "cpu", vocab=61, threads=2)
SIZES = {"batch": 2, "context": 9, "tokens": 3}


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> Any:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Pipeline:
    """OpenVINO's continuous batching: every step gives every running request a token."""

    def __init__(self, path: str, scheduler: Any, device: str, properties: dict[str, Any]) -> None:
        if path == "broken.gguf":
            raise RuntimeError("unsupported architecture")
        self.made = (path, vars(scheduler), device, properties)
        self.prompts: list[list[int]] = []
        self.running: list[SimpleNamespace] = []

    def add_request(self, number: int, ids: Any, config: Any) -> Any:
        assert number == len(self.running) and config.ignore_eos
        self.prompts += ids.tolist()
        state = SimpleNamespace(left=config.max_new_tokens, unread=0)
        self.running.append(state)

        def read() -> dict[int, Any]:
            state.unread -= 1
            return {0: SimpleNamespace(generated_ids=[7])}

        return SimpleNamespace(can_read=lambda: state.unread > 0, read=read)

    def has_non_finished_requests(self) -> bool:
        self.running = [r for r in self.running if r.left]
        return bool(self.running)

    def step(self) -> None:
        for request in self.running:
            request.left -= 1
            request.unread += 1


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fakes of ``openvino`` and ``openvino_genai``."""
    kinds = {"KV_CACHE_PRECISION": "u8", "INFERENCE_PRECISION_HINT": "bf16"}
    core = SimpleNamespace(get_property=lambda device, key: SimpleNamespace(to_string=lambda: kinds[key]))
    module(monkeypatch, "openvino", Core=lambda: core, Tensor=lambda array: array)
    monkeypatch.setattr(benchmark_openvino, "peer_file", lambda model, progress: FILE)
    return module(
        monkeypatch,
        "openvino_genai",
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=Pipeline,
    )


class Params(SimpleNamespace):
    """``CommonParams`` as far as it is used."""

    def __init__(self) -> None:
        names = SimpleNamespace(name="GGML_TYPE_F16")
        super().__init__(model=SimpleNamespace(), cache_type_k=names)
        self.cpuparams, self.cpuparams_batch = SimpleNamespace(), SimpleNamespace()


class Server:
    """llama.cpp's server: a sign of life, one event per token, one at the end of each prompt."""

    made: ClassVar[list[Any]] = []
    asked: ClassVar[dict[str, Any]]
    script: Callable[[dict[str, Any], Callable[[Any], Any]], None]

    def __init__(self, params: Params) -> None:
        if params.model.path == "broken.gguf":
            raise RuntimeError("Failed to init server")
        Server.made.append((params, weakref.ref(self)))

    def handle_completions(self, request: dict[str, Any], listen: Callable[[Any], Any]) -> None:
        Server.script(request, listen)


def event(sequence: int, made: int, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": sequence, "text": "x", **more}], "timings": {"predicted_n": made}}


def plain_script(request: dict[str, Any], listen: Callable[[Any], Any]) -> None:
    Server.asked = request
    listen(None)
    for made in range(1, request["max_tokens"] + 1):
        for sequence in range(len(request["prompt"])):
            # A token that is half a character has no event of its own.
            if (made, sequence) != (2, 1):
                listen(event(sequence, made))
    for sequence in range(len(request["prompt"])):
        listen(event(sequence, request["max_tokens"], finish_reason="length"))


@pytest.fixture
def llamacpp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake of ``xllamacpp``."""
    monkeypatch.setattr(Server, "made", [])
    monkeypatch.setattr(Server, "script", staticmethod(plain_script), raising=False)
    monkeypatch.setattr(benchmark_llamacpp, "peer_file", lambda model, progress: FILE)
    info = "CPU : AVX = 1 | AVX2 = 1 | FMA = 1 |"
    return module(monkeypatch, "xllamacpp", Server=Server, CommonParams=Params, get_system_info=lambda: info)


# -- OpenVINO -------------------------------------------------------------------------------------------


def test_openvino_gets_the_same_ids_without_its_prefix_cache(openvino: Any) -> None:
    peers = load_peers(["openvino"], "decode", SETUP)
    (contestant,) = peers.contestants(SIZES)
    pipeline = peers.engines[PEERS["openvino"].adapter].pipeline  # type: ignore[attr-defined]
    turn = contestant.turn(4)
    assert pipeline.prompts == random_prompts(61, 2, 9, 4)
    assert turn.amount == 2 * 3 and turn.seconds > 0
    path, scheduler, device, properties = pipeline.made
    assert (path, device, properties) == ("m.gguf", "CPU", {"INFERENCE_NUM_THREADS": 2})
    assert scheduler["enable_prefix_caching"] is False and scheduler["max_num_batched_tokens"] >= 32 * 4096
    assert contestant.name == "openvino:Q4_1"
    assert all(word in contestant.note for word in ("m.gguf (Q4_1)", "bf16", "u8 KV cache", "2 threads"))


def test_openvino_prefill_and_batches_and_what_is_not_comparable(openvino: Any) -> None:
    assert load_peers(["openvino"], "prefill", SETUP).contestants({"context": 9})[0].turn(1).amount == 9
    assert load_peers(["openvino"], "batch", SETUP).contestants(SIZES)[0].turn(1).amount == 6
    nothing = load_peers(["openvino", "openvino"], "overhead", SETUP)
    assert nothing.contestants(SIZES) == [] and nothing.left_out == ("openvino",) and not nothing.engines


def test_a_file_that_openvino_cannot_read_is_a_typed_error(
    openvino: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = PeerFile(Path("broken.gguf"), ("Q4_1",), True)
    monkeypatch.setattr(benchmark_openvino, "peer_file", lambda model, progress: broken)
    with pytest.raises(UnsupportedModel, match=r"broken\.gguf: unsupported architecture"):
        load_peers(["openvino"], "decode", SETUP)


# -- llama.cpp ------------------------------------------------------------------------------------------


def test_llamacpp_gets_the_same_ids_on_a_server_of_the_turns_own(llamacpp: Any) -> None:
    (contestant,) = load_peers(["llamacpp"], "decode", SETUP).contestants(SIZES)
    assert contestant.turn(4).amount == 2 * 3  # with the token that came late
    asked = Server.asked
    assert asked["prompt"] == random_prompts(61, 2, 9, 4)
    assert asked["max_tokens"] == 4 and asked["ignore_eos"] and not asked["cache_prompt"]
    contestant.turn(5)
    gc.collect()
    (params, first), (_, second) = Server.made
    assert first() is None and second() is None, "a server outlived its turn"
    assert params.n_parallel == 2 and params.n_ctx >= 2 * (9 + 4) and params.n_batch >= 18
    assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 2
    assert params.api_keys[0] and not params.cache_prompt
    assert contestant.name == "llamacpp:Q4_1"
    assert all(w in contestant.note for w in ("built for AVX2", "m.gguf (Q4_1)", "f16 KV cache", "as ids"))


def test_llamacpp_prefill_and_batches(llamacpp: Any) -> None:
    assert load_peers(["llamacpp"], "prefill", SETUP).contestants({"context": 9})[0].turn(1).amount == 9
    assert load_peers(["llamacpp"], "batch", SETUP).contestants(SIZES)[0].turn(1).amount == 6


def test_llamacpps_complaints_are_typed(llamacpp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Any, listen: Callable[[Any], Any]) -> None:
        listen({"error": {"code": 400, "message": "Prompt contains invalid tokens"}})

    monkeypatch.setattr(Server, "script", staticmethod(refuse))
    (contestant,) = load_peers(["llamacpp"], "decode", SETUP).contestants(SIZES)
    with pytest.raises(JobFailed, match="invalid tokens"):
        contestant.turn(0)
    broken = PeerFile(Path("broken.gguf"), ("Q4_1",), True)
    monkeypatch.setattr(benchmark_llamacpp, "peer_file", lambda model, progress: broken)
    (contestant,) = load_peers(["llamacpp"], "decode", SETUP).contestants(SIZES)
    with pytest.raises(UnsupportedModel, match="Failed to init"):
        contestant.turn(0)


# -- side by side ---------------------------------------------------------------------------------------


def test_peers_stand_beside_ours_with_their_precision(
    openvino: Any, llamacpp: Any, model_folder: Callable[[str], Path]
) -> None:
    def settings(name: str, *peers: str, cells: tuple[str, ...] = ()) -> BenchSettings:
        model = str(model_folder("llama"))
        return BenchSettings(name, model, (), peers, 1, cells, SIZES, dtype="float32")

    run = run_benchmark(settings("batch", "openvino", "llamacpp"))
    assert run.contestants == ("plain", "openvino:Q4_1", "llamacpp:Q4_1")
    found = {m.name: m for m in run.metrics}
    ratio, own = found["b2_c9:llamacpp:Q4_1/plain"], found["b2_c9:openvino:Q4_1"]
    assert ratio.unit == "×" and ratio.of == "plain" and "f16 KV cache" in found["b2_c9:llamacpp:Q4_1"].note
    assert own.tag == "measured" and own.n == 1 and "u8 KV cache" in own.note
    run = run_benchmark(settings("overhead", "openvino", cells=("b1",)))
    assert run.contestants == ("plain",) and "openvino has nothing comparable to overhead" in run.notes


# -- the real ones ----------------------------------------------------------------------------------------


def gguf_in_cache() -> Path | None:
    for source in registry()["smollm2-135m"].sources:
        if isinstance(source, WheelSource) and (path := cache_dir() / "gguf" / source.file).is_file():
            return path
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openvino", "llamacpp"])
def test_the_real_peer_decodes_prefills_and_batches(name: str) -> None:
    if find_spec(PEERS[name].module) is None:
        pytest.skip(f"needs {PEERS[name].package}: pip install -e '.[peers]'")
    path = gguf_in_cache()
    if path is None:
        pytest.skip("needs the GGUF file: workbench bench prefill -m smollm2-135m --peer llamacpp")
    setup = PeerSetup(str(path), "bfloat16", "cpu", vocab=49152, threads=2)
    engine = import_module(PEERS[name].adapter).load(setup)
    for measure, sizes, amount in (
        ("decode", SIZES, 6),
        ("decode", {**SIZES, "batch": 1}, 3),
        ("prefill", {"context": 9}, 9),
        ("whole", SIZES, 6),
    ):
        contestant = engine.contestant(name, measure, sizes)
        for seed in (0, 1):
            turn = contestant.turn(seed)
            assert turn.amount == amount and turn.seconds > 0
        assert contestant.name == f"{name}:Q4_1"


def test_the_process_survives_a_signal_after_the_real_openvino() -> None:
    if find_spec("openvino_genai") is None or (path := gguf_in_cache()) is None:
        pytest.skip("needs openvino-genai and the GGUF file")
    code = (
        "import gc, signal, sys\n"
        "from workbench.core.benchmark_openvino import load\n"
        "from workbench.core.benchmark_peers import PeerSetup\n"
        "engine = load(PeerSetup(sys.argv[1], 'bfloat16', 'cpu', 49152, 1))\n"
        "del engine\n"
        "gc.collect()\n"
        "signal.signal(signal.SIGINT, lambda *_: print('survived'))\n"
        "signal.raise_signal(signal.SIGINT)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout.strip()) == (0, "survived"), done.stderr[-500:]
