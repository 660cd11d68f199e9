"""Write the trained model as a Hugging Face folder, with its curve, manifest and card.

Weights are rounded to bfloat16; every number of the card is measured on the rounded
weights, read back from the folder.
"""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from workbench.training.checkpoint import Progress
from workbench.training.tiny.card import card
from workbench.training.tiny.evaluate import TextScore, score
from workbench.training.tiny.prepare import Corpus
from workbench.training.tiny.tokenizer import END_OF_TEXT, IM_END, wrap
from workbench.training.tiny.train import Settings


def write_model(
    folder: Path,
    model: LlamaForCausalLM,
    corpus: Corpus,
    progress: Progress,
    settings: Settings,
    text: Path,
    note: str = "",
) -> dict[str, TextScore]:
    """Write the folder; returns the scores by source on the evaluation text in ``text``."""
    folder.mkdir(parents=True, exist_ok=True)
    context = model.config.max_position_embeddings
    rounded = LlamaForCausalLM(model.config).to(dtype=torch.bfloat16)
    rounded.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    rounded.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT, eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=END_OF_TEXT
    )
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer = wrap(corpus.tokenizer, context)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _write_curve(folder / "curve.csv", progress)
    scores = evaluate_folder(folder, corpus, text)
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    manifest = {
        "weights_sha256": weights,
        "parameters": sum(parameter.numel() for parameter in rounded.parameters()),
        "settings": asdict(settings),
        "note": note,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "corpus": corpus.facts,
        "corpus_fingerprint": corpus.fingerprint,
        "sources": [asdict(source) for source in corpus.sources],
        "scores": {
            name: {**asdict(found), "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
            for name, found in scores.items()
        },
    }
    (folder / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / "README.md").write_text(card(manifest, progress.curve), "utf-8")
    return scores


def evaluate_folder(folder: Path, corpus: Corpus, text: Path) -> dict[str, TextScore]:
    """Scores of the exported weights (float32 arithmetic) per source of ``eval.txt``, and of all."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    raw = (text / "eval.txt").read_bytes()
    parts: list[dict[str, Any]] = json.loads((text / "MANIFEST.json").read_text())["parts"]
    scores: dict[str, TextScore] = {}
    for part in parts:
        source = part["document"].split("/")[0]
        passage = raw[part["start"] : part["start"] + part["bytes"]].decode()
        found = score(model, corpus.tokenizer, passage)
        scores[source] = scores[source] + found if source in scores else found
    total = TextScore(0.0, 0, 0)
    for found in scores.values():
        total = total + found
    return {**scores, "all": total}


def _write_curve(path: Path, progress: Progress) -> None:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(progress.curve[0]) if progress.curve else ["step"])
        writer.writeheader()
        writer.writerows(progress.curve)
