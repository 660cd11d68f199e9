"""Logged texts: an engine continues prompts, and at every place every exit drafts as far as any policy may.

Nothing is committed but the model's own tokens. What a place says is then true for any exit and any length,
and policies can be compared on it without running the model again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from workbench.core.build_kv import build_kv
from workbench.core.kv_groups import kv_groups
from workbench.core.plan import plan, require
from workbench.engine.engine import Engine
from workbench.engine.executor import Executor
from workbench.engine.exit_runner import ExitRunner
from workbench.engine.params import SamplingParams
from workbench.engine.scheduler import Scheduler
from workbench.engine.sequence import Request
from workbench.models.config import ModelConfig
from workbench.models.datadir import data_dir
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.spec.errors import OptionError
from workbench.spec.plan import EngineLimits
from workbench.speculative.lede.rounds import Costs
from workbench.speculative.lede.state import Limits
from workbench.speculative.lede.walks import Place
from workbench.training.heads.target import Target
from workbench.training.lede.probe import Probe
from workbench.training.tiny.data import Windows

AT_ONCE = 8


def costs_of(config: ModelConfig, operations: int) -> Costs:
    """Costs in passes, by the weights that are read: what decoding one sequence waits for.

    ``operations``: weights of the network that decides.
    """
    queries, values = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + values + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    total = head + config.num_layers * layer
    return Costs(config.num_layers, head=head / total, choice=operations / total)


def prompts_of(target: Target, documents: str, count: int, length: int, seed: int) -> list[list[int]]:
    """Windows of the shipped evaluation text; ``documents``: how the names of those that are taken begin.

    Evenly spread over text of three times their length, no two of them share a token: what is learnt from,
    what chooses and what judges stay apart. Raises :class:`OptionError` where there is less.
    """
    ids = [i for p in _passages(data_dir() / "text", documents) for i in target.tokenizer.encode(p)]
    least = 3 * count * length
    if len(ids) < least:
        raise OptionError(
            f"Documents that begin with {documents!r} have {len(ids):,} tokens; {count} prompts of {length} "
            f"that share none take {least:,}.",
            hint="Take fewer or shorter prompts, or other documents.",
        )
    found: list[list[int]] = Windows(np.asarray(ids, np.int64), seed).batch(0, count, length).tolist()
    return found


def collect(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    places: int,
    sampling: SamplingParams,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> list[list[Place]]:
    """So many places of the continuation of each prompt."""
    most = len(limits.exits) * limits.longest
    tokens = places + most + 1  # what is drafted must have room behind the last place
    context = max(map(len, prompts)) + tokens + most + 1
    pool = AT_ONCE * (-(-context // 64) + 1) * 64
    settings = {n: getattr(target.plan, n) for n in ("dtype", "numerics", "device")}
    limits_here = EngineLimits(pool, 0, AT_ONCE, context)
    made = require(plan(target.plan.recipe, target.facts, limits=limits_here, **settings))
    params = replace(sampling, max_tokens=tokens, ignore_eos=True)
    out: list[list[Place]] = []
    with torch.inference_mode():
        kv = build_kv(made, target.decoder)
        op, groups = target.attention(), kv_groups(made, target.source.config)
        target.decoder.reserve(made.limits.max_context)
        for first in range(0, len(prompts), AT_ONCE):
            probe = Probe(limits)
            runner = ExitRunner(Executor(target.decoder, kv.stores, op, groups), limits.exits[0], reuse=False)
            probe.attach(runner)
            engine = Engine(
                Executor(target.decoder, kv.stores, target.attention(), groups),
                kv,
                Scheduler(kv, max_sequences=AT_ONCE, max_batch_tokens=0),
                context=context,
                drafter=probe,
                runner=runner,
                verify=probe,
            )
            batch = prompts[first : first + AT_ONCE]
            for i, prompt in enumerate(batch):
                engine.add(Request(f"p{first + i}", tuple(prompt), params))
            while engine.has_work:
                check_cancel(cancel, "Logging drafts")
                engine.step()
                logged = sum(map(len, probe.texts.values())) + sum(map(len, out))
                report(progress, logged / (len(prompts) * places), f"{logged} places logged")
                if sum(len(text) >= places for text in probe.texts.values()) == len(batch):
                    engine.reset()
            out += [text[:places] for _, text in sorted(probe.texts.items())]
    return out


def _passages(folder: Path, documents: str) -> Iterator[str]:
    raw = (folder / "eval.txt").read_bytes()
    for part in json.loads((folder / "MANIFEST.json").read_text())["parts"]:
        if part["document"].startswith(documents):
            yield raw[part["start"] : part["start"] + part["bytes"]].decode()
