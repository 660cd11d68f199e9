"""The model card, filled from the manifest: no number is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def card(manifest: Mapping[str, Any]) -> str:
    """Markdown of ``README.md``."""
    exits = manifest["exits"]
    own, settings, recipe = next(iter(exits.values())), manifest["settings"], manifest["recipe"]
    return _CARD.format(
        parameters=own["parameters"],
        megabytes=2 * own["parameters"] / 1e6,
        layers=len(own["layers"]),
        third=max(1, len(own["layers"]) // 3),
        note=f" {manifest['note']}" if manifest["note"] else "",
        steps=manifest["steps"],
        batch=settings["batch_tokens"],
        trained=manifest["tokens"] / 1e6,
        minutes=manifest["seconds"] / 60,
        seed=settings["seed"],
        dropout=recipe["dropout"],
        ramp="growing over the training" if recipe["ramp"] else "the same throughout",
        scale=recipe["scale"],
        curriculum=recipe["curriculum"],
        rotation=f" (every {recipe['rotation']} layers)" if recipe["curriculum"] == "rotating" else "",
        measured="\n\n".join(_measured(name, found) for name, found in exits.items()),
        twin=_twin(manifest["twin"]),
        steps_of_twin=f" --twin {manifest['twin'][-1]['step']}" if manifest["twin"] else "",
        sources="\n".join(
            f"| {row['package']} {row['version']} | {row['licence']} | {row['bytes'] / 1e6:.1f} "
            f"| `{row['sha256']}` |"
            for row in manifest["sources"]
        ),
        sha256=manifest["weights_sha256"],
    )


def _twin(points: Sequence[Mapping[str, Any]]) -> str:
    """What the recipe changes, at the steps that a twin without it has seen."""
    if not points:
        return ""
    layers = len(points[0]["same"][0])
    head = "".join(f" layer {i} |" for i in range(1, layers + 1))
    rows = []
    for point in points:
        (own, other), (same, plain) = point["loss"], point["same"]
        cells = "".join(f" {a:.2f} / {b:.2f} |" for a, b in zip(same, plain, strict=True))
        rows.append(f"| {point['step']} | {own:.3f} | {other:.3f} | {own / other - 1:+.1%} |{cells}")
    return _TWIN.format(head=head, rule="---|" * layers, rows="\n".join(rows))


def _measured(name: str, found: Mapping[str, Any]) -> str:
    score, rows = found["score"], []
    for layer, row in enumerate(found["layers"], 1):
        drafts = [
            f"{mode[str(layer)]['rate']:.3f} | {mode[str(layer)]['tau']:.2f}"
            if str(layer) in mode and mode[str(layer)]["rate"] is not None
            else "– | –"
            for mode in found["acceptance"].values()
        ]
        rows.append(
            f"| {layer} | {row['loss']:.3f} | {row['right']:.3f} | {row['same']:.3f} | {row['r2']:.3f} "
            f"| {' | '.join(drafts)} |"
        )
    return (
        f"**{name}**: {score['nats'] / score['tokens']:.3f} nats per token over {score['tokens']:,} tokens, "
        f"perplexity {score['perplexity']:.2f}, {score['bits_per_byte']:.3f} bits per byte.\n\n"
        "| layer | loss | right | same as last | Σ min(p, q) | greedy: accepted | τ "
        "| temperature 1: accepted | τ |\n|---|---|---|---|---|---|---|---|---|\n" + "\n".join(rows)
    )


_TWIN = """
## What the recipe changes

A twin with the same initial weights, windows and schedule, without layer dropout and early losses: the
last layer's loss on held-out windows, and how often each layer's likeliest token is the last one's (with /
without).

| step | loss with | without | difference |{head}
|---|---|---|---|{rule}
{rows}
"""

_CARD = """# tiny-exit

A Llama small enough to ship with the repository that was trained to be left early (LayerSkip): its first
layers draft for it. It has read the Python standard library and continues Python code; it knows nothing else
and must not be used for anything else.

{parameters:,} parameters ({megabytes:.2f} MB in bfloat16), {layers} layers. Byte-level BPE of 4,096 entries,
digits split singly; `<|endoftext|>` separates documents. No chat template. An ordinary Llama folder: what
differs is what its layers mean to its final norm and head. The drafter `layerskip` leaves it behind
{third} layers by default.

## What each layer says

On held-out modules of the standard library, with the shipped bfloat16 weights: loss in nats, how often the
likeliest token came and is the last layer's, Σ min(p, q) with the last layer's law. Accepted drafts and τ
(tokens per pass of the model) are the engine's, 4 tokens drafted, on continuations of held-out code.

{measured}
{twin}
## Training

{steps:,} steps of {batch:,} tokens, {trained:.2f} M in all; {minutes:.1f} minutes of CPU time of the training
thread, seed {seed}. Layer dropout up to {dropout:g} at the last layer, exponential in the depth, {ramp};
early losses scaled by {scale:g}, curriculum {curriculum}{rotation}.{note}

## Rebuild

    python -m workbench.training.layerskip --steps {steps}{steps_of_twin}

needs no download: the text is the standard library of the running interpreter. A stopped run goes on from its
last checkpoint.

## Data and licence

| source | licence | MB read | sha256 of the texts |
|---|---|---|---|
{sources}

Copyright © 2001-2023 Python Software Foundation, used under the PSF License Agreement. The weights are
released under the repository's licence. SHA-256 of `model.safetensors`: `{sha256}`.
"""
