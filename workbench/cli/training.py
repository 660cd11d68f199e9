"""``workbench train``: a draft head for a model, from the model's own text.

Steps aside for whatever else runs (lowest priority), keeps all it made when it is stopped, and goes on from
there when it is started again with the same options.
"""

from __future__ import annotations

import contextlib
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli import options as o
from workbench.cli.output import Meter, interruptible, out, print_json

if TYPE_CHECKING:
    from workbench.models.heads import HeadFile

_DATA, _TRAINING = "Data", "Training"


class HeadName(StrEnum):
    """Heads that can be trained."""

    medusa = "medusa"
    eagle3 = "eagle3"
    eagle = "eagle"
    fasteagle = "fasteagle"
    draft = "draft"
    streams = "streams"
    exit_adapter = "exit_adapter"
    lede = "lede"


EAGLE_RATE, MEDUSA_RATE, DRAFT_RATE = 2e-3, 3e-3, 1e-3
EAGLE_VOCAB, DRAFT_VOCAB = 4096, 8192
_RATES = {HeadName.medusa: MEDUSA_RATE, HeadName.draft: DRAFT_RATE}
_LAYERS = {HeadName.draft: 6, HeadName.streams: 0}
_VOCABS = {HeadName.draft: DRAFT_VOCAB, HeadName.streams: DRAFT_VOCAB}


class LossOption(StrEnum):
    """Losses."""

    kl = "kl"
    ce = "ce"
    hybrid = "hybrid"


def train(
    head: Annotated[
        HeadName,
        typer.Argument(
            metavar="WHAT",
            help="The head: medusa, eagle3, eagle or fasteagle; a draft model: draft, and its streams; "
            "exit_adapter; or lede.",
        ),
    ],
    target: Annotated[
        str,
        typer.Option("--target", "--model", "-m", help="The model it will draft for: a name or a folder."),
    ] = o.DEFAULT_MODEL,
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Answer tokens that the model makes to train on.", rich_help_panel=_DATA),
    ] = 100_000,
    questions: Annotated[
        int, typer.Option(min=2, max=4096, help="Questions made at once.", rich_help_panel=_DATA)
    ] = 48,
    opened: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of questions whose first words are given: sums, summaries, passages …",
            rich_help_panel=_DATA,
        ),
    ] = 0.0,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole/--answers",
            help="Learn from the questions too, which the model made as well.",
            rich_help_panel=_DATA,
        ),
    ] = False,
    salt: Annotated[
        int,
        typer.Option(
            min=0, help="Another number makes other questions, and data of its own.", rich_help_panel=_DATA
        ),
    ] = 0,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of the optimizer.", rich_help_panel=_TRAINING)
    ] = 600,
    batch: Annotated[
        int, typer.Option(min=1, max=256, help="Conversations per step.", rich_help_panel=_TRAINING)
    ] = 8,
    lr: Annotated[
        float | None,
        typer.Option(
            help=f"Learning rate; when not given, {MEDUSA_RATE:g}, for EAGLE {EAGLE_RATE:g}, "
            f"for a draft model {DRAFT_RATE:g}.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=8, help="medusa: heads.", rich_help_panel=_TRAINING)] = 4,
    rank: Annotated[
        int,
        typer.Option(
            min=0,
            help="medusa: width of a head's inner layer; 0: half the model's.",
            rich_help_panel=_TRAINING,
        ),
    ] = 0,
    own_rows: Annotated[
        bool,
        typer.Option(
            "--own-rows/--tied",
            help="medusa: each head has rows of its own for the tokens that the loss is over.",
            rich_help_panel=_TRAINING,
        ),
    ] = False,
    joint: Annotated[
        Path | None,
        typer.Option(
            help="medusa: train the model too (Medusa-2), which changes it: the new model's folder.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    streams: Annotated[
        int, typer.Option(min=1, max=8, help="streams: of a row.", rich_help_panel=_TRAINING)
    ] = 2,
    unroll: Annotated[
        int,
        typer.Option(
            min=1, max=7, help="eagle3: steps that it drafts on from itself.", rich_help_panel=_TRAINING
        ),
    ] = 3,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Its layers: fasteagle 4 when not given, draft 6; streams: those they pass through, two "
            "thirds of the draft model's.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    layer: Annotated[
        int,
        typer.Option(
            min=0, help="exit_adapter: layers before the exit; 0: two thirds.", rich_help_panel=_TRAINING
        ),
    ] = 0,
    vocab: Annotated[
        int | None,
        typer.Option(
            min=16,
            help=f"Most frequent tokens the loss is over; when not given {EAGLE_VOCAB}, draft {DRAFT_VOCAB}.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    loss: Annotated[
        LossOption,
        typer.Option(
            help="kl: the model's law; ce: its tokens; hybrid: kl, then acceptance.",
            rich_help_panel=_TRAINING,
        ),
    ] = LossOption.kl,
    documents: Annotated[
        str,
        typer.Option(
            help="lede: how the names of the evaluation documents begin whose text it drafts, e.g. stdlib/.",
            rich_help_panel=_DATA,
        ),
    ] = "",
    seed: o.Seed = 0,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="medusa, EAGLE, draft: the file of a head to go on from; streams: the draft model's.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--out", "-o", help="A folder of heads that gets a copy, e.g. data/heads.")
    ] = None,
    dtype: o.DType = o.DTypeName.bfloat16,
    threads: o.Threads = None,
    background: Annotated[
        bool, typer.Option("--background/--foreground", help="Whether other programs come first.")
    ] = True,
    json: o.Json = False,
) -> None:
    """Train a draft head; stopped at any time, the same command goes on."""
    o.set_threads(threads)
    if background:
        _step_aside()
    if head is HeadName.lede:
        from workbench.cli.exits import learn_exits

        learn_exits(target, documents, seed=seed, to=to, dtype=dtype.value, json=json)
        return
    from workbench.training.heads.conversations import Making
    from workbench.training.heads.eagle import EagleShape
    from workbench.training.heads.medusa import Shape
    from workbench.training.heads.optimise import Schedule
    from workbench.training.heads.run import summary
    from workbench.training.heads.shards import DataSettings
    from workbench.training.heads.target import open_target
    from workbench.training.heads.train import train_medusa
    from workbench.training.heads.train_draft import DraftShape, train_draft
    from workbench.training.heads.train_eagle import train_eagle
    from workbench.training.heads.train_exit import ExitShape, train_exit
    from workbench.training.heads.train_joint import JointShape, train_joint
    from workbench.training.heads.train_streams import StreamShape, train_streams

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with Meter(f"training {head.value}") as meter, interruptible() as cancel:
        data = DataSettings(
            tokens=tokens, questions=questions, making=Making(opened=opened, salt=salt), whole=whole
        )
        rate = lr if lr is not None else _RATES.get(head, EAGLE_RATE)
        words = vocab if vocab is not None else _VOCABS.get(head, EAGLE_VOCAB)
        deep = layers if layers is not None else _LAYERS.get(head, 4)
        schedule = Schedule(steps=steps, batch=batch, lr=rate, seed=seed)
        opened = open_target(target, dtype=dtype.value, cancel=cancel.is_set)
        common: Any = {"out": to, "target": opened, "progress": meter, "cancel": cancel.is_set}
        if head is HeadName.medusa and joint is not None:
            del common["out"]  # a head for a model that has just been made goes nowhere else
            joint_shape = JointShape(heads, rank, words)
            made = train_joint(target, joint, data, joint_shape, schedule, **common)[1]
        elif head is HeadName.medusa:
            heads_shape = Shape(heads=heads, rank=rank, vocab=words, loss=loss.value, own_rows=own_rows)
            made = train_medusa(target, data, heads_shape, schedule, start=start, **common)
        elif head is HeadName.draft:
            draft_shape = DraftShape(layers=deep, vocab=words, loss=loss.value)
            made = train_draft(target, data, draft_shape, schedule, start=start, **common)
        elif head is HeadName.streams:
            made = train_streams(
                target, data, StreamShape(streams, deep, words), schedule, start=start, **common
            )
        elif head is HeadName.exit_adapter:
            made = train_exit(target, data, ExitShape(layer, words), schedule, **common)
        else:
            deep = deep if head is HeadName.fasteagle else unroll
            shape = EagleShape(steps=deep, vocab=words, loss=loss.value)
            made = train_eagle(head.value, target, data, shape, schedule, start=start, **common)
    if json:
        print_json(summary(made))
    else:
        _show(head, made)


def _step_aside() -> None:
    """Everything else on the machine comes first, where the system knows such a thing."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)


def _show(name: HeadName, head: HeadFile) -> None:
    from rich.table import Table

    facts: dict[str, Any] = dict(head.facts)
    held = facts["held_out"]
    if head.kind == "exit_adapter":
        _show_exit(held)
        print(f"written to {head.path}")
        return
    if name is HeadName.streams:
        _show_streams(facts["streams"])
        print(f"written to {head.path}")
        return
    if head.kind == "medusa":
        columns = {"right": "top1", "among 2": "top2", "among 5": "top5", "among 10": "top10"}
        first = "head"
    else:
        columns = {"right": "full", "right if those before were": "conditional", "overlap": "alpha"}
        first = "drafted token"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (first, *columns):
        table.add_column(column)
    for k in range(len(held[next(iter(columns.values()))])):
        table.add_row(str(k + 1), *(f"{held[n][k]:.3f}" for n in columns.values()))
    out().print(table)
    for way, run in facts.get("engine", {}).items():
        tau = run["tau"]
        if tau is not None:
            print(f"{way}: {tau:.2f} tokens per step on {run['prompts']} held-out prompts")
    print(f"written to {head.path}")
    if "made_of" in facts:
        made_of = facts["made_of"]
        print(
            f"{facts['target']} is another model than {made_of['target']}: {made_of['divergence']:.3f} nats "
            f"away from it, with the same likeliest token in {made_of['same']:.1%} of cases."
        )


def _show_streams(facts: dict[str, Any]) -> None:
    """How often each stream guesses what the draft model then says, and what a pass makes of its chain."""
    for number, share in enumerate(facts["right"], 1):
        print(f"stream {number}: right in {share:.1%} of cases")
    for streams, tokens in facts["passes"].items():
        print(f"{streams} streams: {tokens:.2f} tokens of the draft model's chain per pass")


def _show_exit(held: dict[str, Any]) -> None:
    """How often the model's own next token is among the first of the exit, without and with the adapter."""
    from rich.table import Table

    ranks = [name for name in held["adapter"] if name.startswith("top")]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("exit", *(f"among {name.removeprefix('top')}" for name in ranks), "KL"):
        table.add_column(column)
    for name in ("lens", "adapter"):
        table.add_row(name, *(f"{held[name][rank]:.3f}" for rank in ranks), f"{held[name]['kl']:.3f}")
    out().print(table)
