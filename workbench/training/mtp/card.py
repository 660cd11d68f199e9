"""The model card, filled from the manifest: no number is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MODES = {
    "greedy": "greedy (R1)",
    "sampled": "temperature 1, drawn drafts (R2)",
    "likeliest": "temperature 1, likeliest tokens (R3)",
}


def card(manifest: Mapping[str, Any], curve: Sequence[Mapping[str, float]]) -> str:
    """Markdown of ``README.md``."""
    joint, score = manifest["joint"], manifest["score"]
    return _CARD.format(
        parameters=manifest["parameters"],
        module=manifest["module_parameters"],
        megabytes=2 * manifest["parameters"] / 1e6,
        note=f" {manifest['note']}" if manifest["note"] else "",
        tokens=score["tokens"],
        nats=score["nats"] / score["tokens"],
        perplexity=score["perplexity"],
        bits=score["bits_per_byte"],
        steps=joint["steps"],
        trained=joint["tokens"] / 1e6,
        minutes=joint["seconds"] / 60,
        batch=manifest["settings"]["batch_tokens"],
        peak=manifest["settings"]["peak_lr"],
        floor=manifest["settings"]["floor_lr"],
        seed=manifest["settings"]["seed"],
        corpus_tokens=manifest["corpus"]["train_tokens"] / 1e6,
        high=manifest["lambda"]["high"],
        low=manifest["lambda"]["low"],
        fall=100 * manifest["lambda"]["fall"],
        recursive=_stage(manifest["recursive"]),
        betas=" / ".join(f"{b:g}" for b in manifest["betas"]),
        loss=manifest["loss"],
        twin=_twin(manifest.get("twin")),
        acceptance="\n\n".join(_acceptance(mode, manifest["acceptance"]) for mode in _MODES),
        variants="\n".join(f"- *{name}*: {text}" for name, text in manifest["variants"].items()),
        entropy="\n".join(
            f"| {row['from']:g} to {_end(row['to'])} | {row['rows']} | {row['same']:.3f} | {row['r2']:.3f} "
            f"| {row['r3']:.3f} |"
            for row in manifest["entropy"]
        ),
        curve="\n".join(
            f"| {p['step']} | {p['tokens'] / 1e6:.2f} | {p['window']} | {p['held_out_loss']:.3f} "
            f"| {p['mtp1_loss']:.3f} | {p['mtp1_same']:.3f} |"
            for p in curve
        ),
        sources="\n".join(
            f"| {row['package']} {row['version']} | {row['licence']} | {row['bytes'] / 1e6:.1f} "
            f"| `{row['sha256']}` |"
            for row in manifest["sources"]
        ),
        sha256=manifest["weights_sha256"],
    )


def _end(high: float | None) -> str:
    return "more" if high is None else f"{high:g}"


def _stage(stage: Mapping[str, Any]) -> str:
    return f"{stage['steps']:,} steps ({stage['tokens'] / 1e6:.2f} M tokens)"


def _twin(twin: Mapping[str, Any] | None) -> str:
    if twin is None:
        return "No twin was trained."
    rows = "\n".join(
        f"| {p['step']} | {p['with']:.4f} | {p['without']:.4f} "
        f"| {100 * (p['with'] / p['without'] - 1):+.2f} % |"
        for p in twin["points"]
    )
    return (
        "Main loss in nats on the held-out windows, with the module's loss and without it (same initial "
        "weights, windows and schedule):\n\n| step | with | without | difference |\n|---|---|---|---|\n"
        + rows
    )


def _acceptance(mode: str, acceptance: Mapping[str, Any]) -> str:
    lines = [f"**{_MODES[mode]}**", "", "| K | " + " | ".join(f"τ {name}" for name in acceptance) + " |"]
    lines[-1] += " conditional acceptance by depth, " + next(reversed(acceptance)) + " |"
    lines.append("|---" * (len(acceptance) + 2) + "|")
    depths = next(iter(acceptance.values()))[mode]
    for k in depths:
        taus = " | ".join(f"{found[mode][k]['tau']:.2f}" for found in acceptance.values())
        last = next(reversed(acceptance.values()))[mode][k]["conditional"]
        lines.append(f"| {k} | {taus} | {', '.join(f'{c:.2f}' for c in last)} |")
    return "\n".join(lines)


_CARD = """# tiny-mtp

A Llama small enough to ship with the repository that was trained together with a module of multi-token
prediction, in the layout of DeepSeek-V3 and GLM-4.x. It has read the Python standard library and continues
Python code; it knows nothing else and must not be used for anything else.

{parameters:,} parameters ({megabytes:.2f} MB in bfloat16), {module:,} of them the module's: 4 layers, width
256, 4 query and 2 key/value heads of 64, gated MLP of 640, tied embedding, RoPE (theta 10,000), 2,048
positions. Byte-level BPE of 4,096 entries, digits split singly; `<|endoftext|>` separates documents. No chat
template.

The module is layer 4 of the checkpoint: `enorm`, `hnorm`, `eh_proj` on [enorm(embedding), hnorm(state)], a
decoder layer, `shared_head.norm`; embedding and head are the model's. The state is the model's behind its
final norm; in recursion, what leaves the module's layer. Without the module the model's logits are the same
bits.

## Held-out score

On the held-out modules of `data/text/eval.txt`, with the shipped bfloat16 weights and float32 arithmetic in
windows of 1,024 tokens: {nats:.3f} nats per token over {tokens:,} tokens, perplexity {perplexity:.2f},
{bits:.3f} bits per byte.

{twin}

It was trained for minutes: look at its module, not at its code.

## Acceptance

Continuations of held-out code, measured in the engine. τ is the number of tokens per forward pass of the
model; K tokens are drafted, behind the first by recursion. Greedy continuations soon run in circles, which
are easy to draft; at temperature 1 the model is rarely sure, which drafts that are drawn do not mind.

{variants}

{acceptance}

By entropy of the model at the position (nats), on the held-out text itself, one token ahead: how often both
have the same likeliest token, Σ min(p, q) (acceptance of drawn drafts, R2), p of the likeliest draft (R3).

| entropy | positions | same | R2 | R3 |
|---|---|---|---|---|
{entropy}

## Training

Jointly: {steps:,} steps of {batch:,} tokens, {trained:.2f} M in all, from a stream of {corpus_tokens:.2f} M.
Loss of the model + λ times the module's, λ {high:g}, from {fall:.0f} % of the steps on {low:g}. Muon for the
matrices (weight decay 0.1), AdamW (0.9, 0.98) for embedding and norms, warm-up 2 %, cosine from {peak:g} to
{floor:g}; {minutes:.1f} minutes of CPU time of the training thread, seed {seed}.{note}

Recursively (FastMTP): {recursive} with the model frozen; the module is fed with its
own states, its passes weigh {betas}, and learn from {loss}.

| step | M tokens | window | held-out loss | module's loss | same likeliest token |
|---|---|---|---|---|---|
{curve}

## Rebuild

    python -m workbench.training.mtp

needs no download: the text is the standard library of the running interpreter. A stopped run goes on from its
last checkpoint.

## Data and licence

| source | licence | MB read | sha256 of the texts |
|---|---|---|---|
{sources}

Copyright © 2001-2023 Python Software Foundation, used under the PSF License Agreement. The weights are
released under the repository's licence. SHA-256 of `model.safetensors`: `{sha256}`.
"""
