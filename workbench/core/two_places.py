"""Draft and target in two processes: the drafter's is started here, the target's engine is this one's.

The drafter is a model cut out of the target, on a core (or a device) of its own, that never stops growing
its tree; the engine verifies what has come. Output is the plain run's, whatever the drafter does: at
temperature 0 and, seeded, above it. Two processes on two cores of one machine share its memory and caches.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import torch

from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.core.room import present
from workbench.models.decoder import Decoder
from workbench.models.heads import find_head
from workbench.models.progress import Cancel
from workbench.models.registry import open_source
from workbench.spec.errors import OptionError
from workbench.spec.plan import DType, Numerics
from workbench.spec.recipe import Recipe
from workbench.speculative.distilled import KIND
from workbench.speculative.placement.mirror_worker import Windows
from workbench.speculative.placement.placed import drafting_kv, worker_of
from workbench.speculative.placement.process_inbox import Inbox
from workbench.speculative.placement.process_link import Delay, ProcessLink, pinned_cores
from workbench.speculative.placement.serve import serve
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.speculative.placement.worker import Growth

# The pipe is watched before torch is imported, which takes seconds.
_CODE = """
from workbench.speculative.placement.process_inbox import Inbox
inbox = Inbox()
from workbench.core.two_places import main
main(inbox)
"""


@dataclass(frozen=True)
class DraftSetup:
    """The drafter's process: ``layers`` of the target it has (empty: all), or distilled ones, which draft
    ``vocab`` tokens, of the file with the digest ``head`` (empty: none); ``cores`` it is bound to.

    ``device`` may be another than the target's: then the two are two devices indeed. ``windows``: it drafts
    windows and their branches, not a tree that grows freely.
    """

    model: str
    layers: tuple[int, ...] = ()
    dtype: DType = "float32"
    numerics: Numerics = "fast"
    device: str = "cpu"
    threads: int = 1
    cores: tuple[int, ...] = ()
    growth: Growth = field(default_factory=Growth)
    windows: Windows | None = None
    head: str = ""
    vocab: int = 0


def start_drafter(
    setup: DraftSetup,
    *,
    timeout: float = 120.0,
    to_drafter: Delay | None = None,
    to_target: Delay | None = None,
    cancel: Cancel = lambda: False,
) -> ProcessLink:
    """Start the drafter's process and wait until its model is there; close the link when done.

    Raises :class:`OptionError` for layers the model lacks or a device that is not there, and
    :class:`JobFailed` with what the process said last when it does not get that far.
    """
    have = open_source(setup.model).config.num_layers
    if not all(0 <= layer < have for layer in setup.layers):
        raise OptionError(
            f"layers = {list(setup.layers)}, but {setup.model} has {have}.",
            hint=f"Choose numbers from 0 to {have - 1}.",
        )
    if not present(setup.device):
        raise OptionError(f"device = {setup.device!r}, but there is no such device here.", hint="Choose cpu.")
    threads = {name: str(setup.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    link = ProcessLink(
        _CODE, json.dumps(asdict(setup)), to_drafter=to_drafter, to_target=to_target, environment=threads
    )
    link.wait_ready(timeout, cancel)
    return link


def main(inbox: Inbox) -> None:
    """The drafter's process."""
    data = json.loads(inbox.setup)
    lists = {name: tuple(data[name]) for name in ("layers", "cores")}
    windows = Windows(**data["windows"]) if data["windows"] else None
    setup = DraftSetup(**{**data, **lists, "growth": Growth(**data["growth"]), "windows": windows})
    cores = pinned_cores(setup.cores)
    torch.set_num_threads(setup.threads)
    with torch.inference_mode():
        serve(worker_of(_model(setup), setup.windows or setup.growth), inbox, cores)


def _model(setup: DraftSetup) -> TreeKV:
    source = open_source(setup.model)
    facts = ModelFacts(setup.model, source.config, source.fingerprint)
    made = require(plan(Recipe(), facts, dtype=setup.dtype, numerics=setup.numerics, device=setup.device))
    whole = Decoder(source.config, build_weights(made, source))
    head = find_head(setup.model, KIND, source.fingerprint) if setup.head else None
    layers = setup.layers or tuple(range(source.config.num_layers))
    return drafting_kv(whole, layers, head, setup.vocab, setup.windows.streams if setup.windows else 0)
