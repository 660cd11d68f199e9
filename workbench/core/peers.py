"""The engines that ``workbench bench --peer`` can put beside ours: one table, without importing any of them.

The benchmark, the command line's help and the doctor read it. ``measures`` says for each benchmark what is
timed of the peer; a benchmark that is not there has nothing comparable. A further peer is one line here and
one module with ``load``, see :mod:`workbench.core.benchmark_peers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from workbench.spec.errors import MissingExtra, OptionError

Measure = Literal["decode", "prefill", "whole", "first"]
"""Between first and last token; prompt tokens to the first; submission to the last; one first token."""

_ALONE: Mapping[str, Measure] = {"decode": "decode", "prefill": "prefill", "batch": "whole"}


@dataclass(frozen=True)
class Peer:
    """One peer: its package, what imports it, the extra that brings it ("": always there), its devices."""

    title: str
    package: str
    module: str
    adapter: str
    measures: Mapping[str, Measure]
    extra: str = ""
    devices: tuple[str, ...] = ("cpu",)


PEERS: Mapping[str, Peer] = {
    "transformers": Peer(
        title="transformers, generate as it comes",
        package="transformers",
        module="transformers",
        adapter="workbench.core.benchmark_transformers",
        measures={**_ALONE, "prefix": "first"},
        devices=("cpu", "cuda"),
    ),
    "transformers_cb": Peer(
        title="transformers, continuous batching",
        package="transformers",
        module="transformers",
        adapter="workbench.core.benchmark_transformers",
        measures={"batch": "whole"},
        devices=("cpu", "cuda"),
    ),
    "openvino": Peer(
        title="OpenVINO GenAI on the model's GGUF file",
        package="openvino-genai",
        module="openvino_genai",
        adapter="workbench.core.benchmark_openvino",
        measures=_ALONE,
        extra="peers",
    ),
    "llamacpp": Peer(
        title="llama.cpp (xllamacpp) on the model's GGUF file",
        package="xllamacpp",
        module="xllamacpp",
        adapter="workbench.core.benchmark_llamacpp",
        measures=_ALONE,
        extra="peers",
    ),
}


def check_peers(names: Iterable[str], device: str) -> None:
    """Refuse what cannot compete here, before anything is loaded.

    Raises :class:`OptionError` for an unknown peer and for a device it does not run on,
    :class:`MissingExtra` with the install line for one that is not installed.
    """
    for name in names:
        if name not in PEERS:
            raise OptionError(f"{name!r} is no known peer.", hint=f"Peers are {', '.join(PEERS)}.")
        peer = PEERS[name]
        if device.partition(":")[0] not in peer.devices:
            raise OptionError(
                f"The peer {name!r} runs on {' and '.join(peer.devices)} here, not on {device}.",
                hint="Leave it out, or benchmark with --device cpu.",
            )
        if peer.extra and find_spec(peer.module) is None:
            raise MissingExtra(peer.package, peer.extra, f"The peer {name!r}")


def peers_of_extra(extra: str) -> tuple[str, ...]:
    """Names of the peers that an extra brings."""
    return tuple(name for name, peer in PEERS.items() if peer.extra == extra)
