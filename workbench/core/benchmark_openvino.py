"""The peer ``openvino``: OpenVINO GenAI's continuous batching, which reads the GGUF file itself.

It is stepped as our engine is: requests go in as token ids, each ``step()`` is one forward pass of all of
them. Its prefix cache is off, and a prompt is one step, as in its ``LLMPipeline``; all else is its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from workbench.core.benchmark_arrivals import Arrival, Prompts, Streaming
from workbench.core.benchmark_gguf import peer_file
from workbench.core.benchmark_peers import PeerSetup
from workbench.core.benchmark_signals import same_signal_stack
from workbench.core.benchmark_timing import Contestant
from workbench.core.peers import Measure
from workbench.core.provenance import package_version
from workbench.models.progress import report
from workbench.spec.errors import UnsupportedModel

_MAX_BATCHED_TOKENS = 1 << 20


@dataclass
class OpenVINO:
    """One pipeline for all cells: its KV cache grows as it is needed."""

    pipeline: Any
    config: Any  # openvino_genai.GenerationConfig
    tensor: Any  # openvino.Tensor
    vocab: int
    name: str
    note: str

    def contestant(self, which: str, measure: Measure, sizes: Mapping[str, Any]) -> Contestant:
        """The pipeline in one cell."""
        return Streaming(self.name, self.note, self.generate, self.vocab, measure, **sizes)

    def release(self) -> None:
        """Nothing runs between steps."""

    def generate(self, prompts: Prompts, tokens: int) -> tuple[float, list[Arrival]]:
        """Greedy, end tokens ignored; see :data:`workbench.core.benchmark_arrivals.Generate`."""
        config = self.config()
        config.max_new_tokens, config.ignore_eos = tokens, True
        tensors = [self.tensor(np.asarray([ids], dtype=np.int64)) for ids in prompts]
        arrivals: list[Arrival] = []
        start = perf_counter()
        handles = [self.pipeline.add_request(i, ids, config) for i, ids in enumerate(tensors)]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = perf_counter()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    arrivals += [Arrival(now, i, len(o.generated_ids)) for o in handle.read().values()]
        return start, arrivals


def load(setup: PeerSetup) -> OpenVINO:
    """Compile the model's GGUF file for the CPU.

    Raises :class:`UnsupportedModel` for a file that OpenVINO cannot read, and the errors of
    :func:`workbench.core.benchmark_gguf.peer_file`.
    """
    import openvino
    import openvino_genai as genai

    file = peer_file(setup.model, setup.progress)
    report(setup.progress, 1.0, f"compiling {file.path.name} for OpenVINO")
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = _MAX_BATCHED_TOKENS
    properties = {"INFERENCE_NUM_THREADS": setup.threads}
    with same_signal_stack():
        try:
            pipeline = genai.ContinuousBatchingPipeline(str(file.path), scheduler, "CPU", properties)
        except RuntimeError as err:
            raise UnsupportedModel(f"OpenVINO cannot load {file.path.name}: {err}") from None
        cpu, keys = openvino.Core(), ("KV_CACHE_PRECISION", "INFERENCE_PRECISION_HINT")
        cache, arithmetic = (cpu.get_property("CPU", key).to_string() for key in keys)
    parts = (
        f"openvino-genai {package_version('openvino-genai')}",
        f"{file}, {arithmetic} arithmetic, {cache} KV cache",
        f"{setup.threads} threads, prompts as ids",
    )
    name, note = f"openvino:{file.format}", ", ".join(parts)
    return OpenVINO(pipeline, genai.GenerationConfig, openvino.Tensor, setup.vocab, name, note)
