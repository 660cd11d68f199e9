"""The whole recipe: joint training, its twin, the module's recursive training, measuring, folder and card."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.training.checkpoint import Progress
from workbench.training.mtp.card import card
from workbench.training.mtp.evaluate import accepted, by_entropy
from workbench.training.mtp.export import code_score, rounded, write_tokenizer, write_weights
from workbench.training.mtp.model import BETAS, MTPModel, llama_config
from workbench.training.mtp.prepare import prepare
from workbench.training.mtp.train import Joint, OnPoint, Recursive, train_joint, train_recursive
from workbench.training.tiny.data import Windows
from workbench.training.tiny.prepare import Corpus
from workbench.training.tiny.train import Settings

NAME = "tiny-mtp"
RECURSIVE_LR = 1e-3
PROMPTS, PROMPT_TOKENS = 24, 128
JOINTLY, ONCE, RECURSIVELY = "joint", "one pass", "recursive"
_VARIANTS = {
    JOINTLY: "the module as the joint training left it.",
    ONCE: "learnt from the same teacher with one pass, {steps} steps: what is due to the teacher alone.",
    RECURSIVELY: "fed with its own states in training; this is the module that ships.",
}
_TEACHERS = {"kl": "the model's own law (KL divergence)", "ce": "the tokens that came"}


@dataclass(frozen=True)
class Plan:
    """How long each part is trained, in optimizer steps; ``note`` is printed on the card."""

    steps: int = 1000
    recursive: int = 300
    twin: int = 0
    control: int = 0
    seed: int = 0
    note: str = ""


def build(plan: Plan, work: Path, data: Path, on_point: OnPoint = lambda point: None) -> dict[str, Any]:
    """Everything, from whatever checkpoints ``work`` holds; returns the manifest that the folder has."""
    corpus = prepare(work, plan.seed)
    settings, joint = Settings(steps=plan.steps, seed=plan.seed, save_every_s=30.0), Joint()
    common = (llama_config(), corpus.windows, corpus.held_out_windows())
    model, progress = train_joint(settings, joint, *common, work / JOINTLY, corpus.fingerprint, on_point)
    twin = None
    if plan.twin:
        alone = Settings(steps=plan.steps, seed=plan.seed, save_every_s=30.0)
        _, without = train_joint(
            alone,
            Joint(modules=0),
            *common,
            work / "twin",
            corpus.fingerprint,
            on_point,
            until=plan.twin,
        )
        twin = compare(progress, without)
    kept = {JOINTLY: rounded(model)}
    shipped = Recursive(BETAS)
    stages = {ONCE: (Recursive((1.0,)), plan.control)} if plan.control else {}
    spent = {}
    further = Settings(steps=plan.recursive, seed=plan.seed + 1, peak_lr=RECURSIVE_LR, save_every_s=30.0)
    for name, (recursive, until) in (*stages.items(), (RECURSIVELY, (shipped, 0))):
        trained = _copy(model)
        folder = work / name.replace(" ", "-")
        spent[name] = train_recursive(
            trained, further, recursive, *common[1:], folder, corpus.fingerprint, on_point, until
        )
        kept[name] = rounded(trained)
    folder = data / "models" / NAME
    acceptance = {}
    prompts = Windows(corpus.held_out, seed=2).batch(0, PROMPTS, PROMPT_TOKENS).tolist()
    for name, found in kept.items():
        place = folder if name == RECURSIVELY else work / "variants" / name.replace(" ", "-")
        write_weights(place, found)
        write_tokenizer(place, corpus.tokenizer, found.main.config.max_position_embeddings)
        acceptance[name] = _measured(work / "acceptance", place, prompts)
    manifest = _manifest(plan, settings, corpus, kept[RECURSIVELY], folder, data / "text")
    manifest |= {
        "joint": _spent(progress),
        "recursive": _spent(spent[RECURSIVELY]),
        "lambda": asdict(joint),
        "betas": shipped.betas,
        "loss": _TEACHERS[shipped.loss],
        "twin": twin,
        "acceptance": acceptance,
        "variants": {
            name: _VARIANTS[name].format(steps=spent[name].step if name in spent else 0) for name in kept
        },
        "entropy": by_entropy(kept[RECURSIVELY], corpus.held_out_windows()),
    }
    (folder / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    _write_curve(folder / "curve.csv", progress)
    (folder / "README.md").write_text(card(manifest, progress.curve), "utf-8")
    return manifest


def _measured(cache: Path, folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Acceptance of a folder's module, from the last time where these weights were measured already."""
    key = hashlib.sha256((folder / "model.safetensors").read_bytes() + json.dumps(prompts).encode())
    path = cache / f"{key.hexdigest()[:16]}.json"
    if path.is_file():
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept
    found = accepted(folder, prompts)
    cache.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return found


def compare(joint: Progress, twin: Progress) -> dict[str, Any]:
    """Main losses at the steps that both curves have."""
    found = {p["step"]: p["held_out_loss"] for p in joint.curve}
    points = [
        {"step": p["step"], "with": found[p["step"]], "without": p["held_out_loss"]}
        for p in twin.curve
        if p["step"] in found
    ]
    return {**_spent(twin), "points": points}


def _spent(progress: Progress) -> dict[str, float]:
    return {"steps": progress.step, "tokens": progress.tokens, "seconds": round(progress.seconds, 1)}


def _copy(model: MTPModel) -> MTPModel:
    copy = MTPModel(model.main.config, len(model.mtp), 0)
    copy.load_state_dict(model.state_dict())
    return copy


def _manifest(
    plan: Plan, settings: Settings, corpus: Corpus, model: MTPModel, folder: Path, text: Path
) -> dict[str, Any]:
    found = code_score(folder, corpus.tokenizer, text)
    return {
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "module_parameters": sum(p.numel() for p in model.mtp.parameters()),
        "settings": asdict(settings),
        "note": plan.note,
        "corpus": corpus.facts,
        "corpus_fingerprint": corpus.fingerprint,
        "sources": [asdict(source) for source in corpus.sources],
        "score": {**asdict(found), "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte},
    }


def _write_curve(path: Path, progress: Progress) -> None:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(progress.curve[0]) if progress.curve else ["step"])
        writer.writeheader()
        writer.writerows(progress.curve)
