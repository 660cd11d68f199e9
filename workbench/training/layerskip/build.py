"""The whole recipe: training, its twin without the recipe, measuring every exit, folder and card."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.training.checkpoint import Progress
from workbench.training.layerskip.card import card
from workbench.training.layerskip.evaluate import accepted
from workbench.training.layerskip.export import rounded, write_weights
from workbench.training.layerskip.model import by_layer, llama_config
from workbench.training.layerskip.schedule import PLAIN, Recipe
from workbench.training.layerskip.train import train
from workbench.training.mtp.export import code_score, write_tokenizer
from workbench.training.mtp.prepare import prepare
from workbench.training.tiny.data import Windows
from workbench.training.tiny.train import Settings

NAME, TWIN = "tiny-exit", "twin"
PROMPTS, PROMPT_TOKENS = 24, 128


@dataclass(frozen=True)
class Plan:
    """``steps`` of the optimizer; ``twin``: steps of the same model without the recipe, which is compared as
    far as it goes, and measured like the model if that is to the end; ``note`` is printed on the card."""

    steps: int = 1000
    twin: int = 0
    seed: int = 0
    note: str = ""
    recipe: Recipe = field(default_factory=Recipe)


def build(
    plan: Plan, work: Path, data: Path, on_point: Callable[[dict[str, float]], None] = lambda point: None
) -> dict[str, Any]:
    """Everything, from whatever checkpoints ``work`` holds; returns the manifest that the folder has."""
    corpus = prepare(work, plan.seed)
    settings = Settings(steps=plan.steps, seed=plan.seed, save_every_s=30.0)
    prompts = Windows(corpus.held_out, seed=2).batch(0, PROMPTS, PROMPT_TOKENS).tolist()
    held_out, folder = corpus.held_out_windows(), data / "models" / NAME
    recipes = {NAME: plan.recipe, **({TWIN: PLAIN} if plan.twin else {})}
    until = {NAME: 0, TWIN: min(plan.twin, plan.steps)}
    exits: dict[str, Any] = {}
    curves: dict[str, Progress] = {}
    for name, recipe in recipes.items():
        model, curves[name] = train(
            settings,
            recipe,
            llama_config(),
            corpus.windows,
            held_out,
            work / name,
            corpus.fingerprint,
            on_point,
            until[name],
        )
        if curves[name].step < plan.steps:
            continue
        place, kept = folder if name == NAME else work / "variants" / name, rounded(model)
        write_weights(place, kept)
        write_tokenizer(place, corpus.tokenizer, kept.main.config.max_position_embeddings)
        found = code_score(place, corpus.tokenizer, data / "text")
        exits[name] = {
            "layers": by_layer(kept, held_out),
            "acceptance": accepted(place, prompts),
            "score": {**asdict(found), "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte},
            "parameters": sum(p.numel() for p in kept.parameters()),
        }
    progress = curves[NAME]
    manifest = {
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "settings": asdict(settings),
        "recipe": asdict(plan.recipe),
        "note": plan.note,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "corpus": corpus.facts,
        "corpus_fingerprint": corpus.fingerprint,
        "sources": [asdict(source) for source in corpus.sources],
        "exits": exits,
        "twin": compare(progress.curve, curves[TWIN].curve) if plan.twin else [],
    }
    (folder / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    _write_curve(folder / "curve.csv", progress)
    (folder / "README.md").write_text(card(manifest), "utf-8")
    return manifest


def compare(own: Sequence[Mapping[str, float]], twin: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """At the steps that both learning curves have: the last layer's loss, and how often each layer's
    likeliest token is the last one's, with the recipe and without."""
    known = {point["step"]: point for point in own}
    out = []
    for without in twin:
        point = known.get(without["step"])
        if point is not None:
            layers = sorted(name for name in point if name.startswith("same"))
            out.append(
                {
                    "step": int(without["step"]),
                    "loss": [point["held_out_loss"], without["held_out_loss"]],
                    "same": [[point[n] for n in layers], [without[n] for n in layers]],
                }
            )
    return out


def _write_curve(path: Path, progress: Progress) -> None:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(progress.curve[0]) if progress.curve else ["step"])
        writer.writeheader()
        writer.writerows(progress.curve)
