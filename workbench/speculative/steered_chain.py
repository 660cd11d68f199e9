"""Chains that the target's first layers draft while a control looks on: where to leave, how far to go.

The sequences of a step are looked at together, layer by layer, until the control leaves; then they draft
behind that layer, each as far as the control lets it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.engine.exit_control import ExitControl
from workbench.engine.exit_runner import ExitRunner


def steered_chains(
    contexts: Sequence[DraftContext], runner: ExitRunner, control: ExitControl, *, draws: bool, source: str
) -> list[DraftTree | None]:
    """Chains of at most ``min(control.longest, room)`` tokens; None where nothing is drafted."""
    out: list[DraftTree | None] = [None] * len(contexts)
    live = [i for i, context in enumerate(contexts) if context.room > 0]
    asked, exits = control.exits([contexts[i] for i in live]) if live else ((), ())
    live = [live[i] for i in asked]
    logits = _left([contexts[i] for i in live], exits, runner, control) if live and exits else None
    if logits is None:
        return out
    paths: dict[int, list[int]] = {i: [] for i in live}
    laws: dict[int, list[Tensor]] = {i: [] for i in live}
    while live:
        further = []
        for i, row in zip(live, logits, strict=True):
            context, path = contexts[i], paths[i]
            pick = context.law.pick(row, path, draws=draws) if context.law is not None else None
            if pick is None:
                continue
            path.append(pick.token)
            if pick.q is not None:
                laws[i].append(pick.q)
            most = min(control.longest, context.room)
            if len(path) < most and control.go_on(context, row, len(path)):
                further.append(i)
        live = further
        if live:
            logits = runner.feed([(contexts[i].seq, [paths[i][-1]]) for i in live])
    for i, path in paths.items():
        if path:
            q = torch.stack(laws[i]) if laws[i] else None
            out[i] = DraftTree.chain(path, source, q, runner.layers)
    return out


def _left(
    contexts: Sequence[DraftContext], exits: Sequence[int], runner: ExitRunner, control: ExitControl
) -> Tensor | None:
    """Logits [n, V] of the layer that the control leaves behind; None where it wants no draft."""
    runner.layers = exits[0]
    logits = runner.feed([(context.seq, ()) for context in contexts])
    for layers, deeper in zip(exits, [*exits[1:], 0], strict=True):
        if control.leave(contexts, logits, layers):
            return logits
        if deeper:
            logits = runner.deeper(deeper)
    return None
