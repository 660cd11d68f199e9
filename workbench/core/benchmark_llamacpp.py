"""The peer ``llamacpp``: llama.cpp's server engine inside this process, through the prebuilt ``xllamacpp``.

Each turn gets a server of its own, started and ended outside the clock. That keeps its OpenMP threads, which
are those of torch's runtime and in the ``bench`` profile spin when idle, out of the others' turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex
from time import perf_counter
from typing import Any

from workbench.core.benchmark_arrivals import Arrival, Prompts, Streaming
from workbench.core.benchmark_gguf import PeerFile, peer_file
from workbench.core.benchmark_peers import PeerSetup
from workbench.core.benchmark_timing import Contestant
from workbench.core.peers import Measure
from workbench.core.provenance import package_version
from workbench.spec.errors import JobFailed, UnsupportedModel

_DEFAULT_BATCH = 2048  # llama.cpp's n_batch


@dataclass
class LlamaCpp:
    """What every server is started with."""

    library: Any  # the module xllamacpp
    file: PeerFile
    threads: int
    vocab: int
    name: str
    note: str

    def contestant(self, which: str, measure: Measure, sizes: Mapping[str, Any]) -> Contestant:
        """Servers for one cell."""
        return Streaming(self.name, self.note, self.generate, self.vocab, measure, **sizes)

    def release(self) -> None:
        """A server ends with its turn."""

    def generate(self, prompts: Prompts, tokens: int) -> tuple[float, list[Arrival]]:
        """Greedy, end tokens ignored; see :data:`workbench.core.benchmark_arrivals.Generate`."""
        longest = max(len(ids) for ids in prompts)
        server = self.server(len(prompts), longest + tokens + 1, longest)
        request = {
            "prompt": [list(ids) for ids in prompts],
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
            "timings_per_token": True,
        }
        arrivals, complaints, listen = listener(len(prompts))
        start = perf_counter()
        server.handle_completions(request, listen)
        if complaints:
            raise JobFailed("llama.cpp", complaints[0])
        return start, arrivals

    def server(self, slots: int, context: int, prompt: int) -> Any:
        """A server with ``slots`` sequences of ``context`` tokens, all prompts in one batch.

        Raises :class:`UnsupportedModel` when llama.cpp does not start on the file.
        """
        params = self.library.CommonParams()
        params.model.path = str(self.file.path)
        params.n_parallel, params.n_ctx = slots, slots * context
        params.n_batch = max(_DEFAULT_BATCH, slots * prompt)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        params.cache_prompt, params.cache_ram_mib, params.n_ctx_checkpoints = False, 0, 0
        params.verbosity = 0
        # It also listens on a free port of the loopback interface: nobody else is served there.
        params.api_keys, params.ui = [token_hex(16)], False
        try:
            return self.library.Server(params)
        except RuntimeError as err:
            raise UnsupportedModel(f"llama.cpp cannot serve {self.file.path.name}: {err}") from None


def listener(batch: int) -> tuple[list[Arrival], list[str], Callable[[Any], None]]:
    """Arrivals and complaints, filled by the callback that takes the server's events.

    A token whose bytes are no whole character yet has no event; the count in the next one includes it.
    """
    arrivals: list[Arrival] = []
    complaints: list[str] = []
    so_far = [0] * batch

    def listen(event: Any) -> None:
        now = perf_counter()
        if not isinstance(event, Mapping):  # a sign of life
            return
        if "error" in event:
            complaints.append(str(event["error"].get("message", event["error"])))
            return
        made = int(event.get("timings", {}).get("predicted_n", 0))
        for choice in event.get("choices", ()):
            i = int(choice["index"])
            arrivals.append(Arrival(now, i, max(made - so_far[i], 0)))
            so_far[i] = max(made, so_far[i])

    return arrivals, complaints, listen


def load(setup: PeerSetup) -> LlamaCpp:
    """Find the model's GGUF file; servers read it turn by turn.

    Raises the errors of :func:`workbench.core.benchmark_gguf.peer_file`.
    """
    import xllamacpp

    file = peer_file(setup.model, setup.progress)
    vectors = [name for name in ("AVX512", "AVX2", "NEON") if _enabled(name, xllamacpp.get_system_info())]
    cache = xllamacpp.CommonParams().cache_type_k.name.removeprefix("GGML_TYPE_").lower()
    parts = [
        f"llama.cpp of xllamacpp {package_version('xllamacpp')}",
        f"built for {vectors[0]}" if vectors else "",
    ]
    parts += [str(file), f"{cache} KV cache", f"{setup.threads} threads", "prompts as ids"]
    name, note = f"llamacpp:{file.format}", ", ".join(filter(None, parts))
    return LlamaCpp(xllamacpp, file, setup.threads, setup.vocab, name, note)


def _enabled(feature: str, info: str) -> bool:
    return re.search(rf"\b{feature} = 1\b", info) is not None
