"""The whole recipe on a toy: folders that open, every exit measured in the engine, a card that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from workbench.models.registry import open_source
from workbench.training.corpus import Source
from workbench.training.layerskip import build as recipe
from workbench.training.layerskip.export import rounded, write_weights
from workbench.training.layerskip.model import ExitModel
from workbench.training.layerskip.schedule import Recipe
from workbench.training.tiny import train as loop
from workbench.training.tiny.data import Windows, encode_stream
from workbench.training.tiny.prepare import Corpus
from workbench.training.tiny.tokenizer import SPECIALS, train_tokenizer

TEXTS = [f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(150)]
VOCAB = 300
TOY = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=64,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """A language of one-line functions, in place of the standard library."""
    tokenizer = train_tokenizer(TEXTS, VOCAB, SPECIALS[:1])
    stream = encode_stream(tokenizer, TEXTS)
    made = Corpus(tokenizer, Windows(stream, 0), stream, (Source("toy", "toy", "1", "PSF", "0" * 8, 9),), {})
    monkeypatch.setattr(recipe, "prepare", lambda work, seed: made)
    monkeypatch.setattr(recipe, "llama_config", lambda: TOY)
    monkeypatch.setattr(recipe, "PROMPTS", 2)
    monkeypatch.setattr(recipe, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(loop, "WINDOWS", ((0.0, 32),))
    return made


def test_everything_from_text_to_card(tmp_path: Path, corpus: Corpus) -> None:
    text = tmp_path / "data" / "text"
    text.mkdir(parents=True)
    passage = "".join(TEXTS[:5]).encode()
    (text / "eval.txt").write_bytes(passage)
    part = {"document": "stdlib/toy.py", "start": 0, "bytes": len(passage)}
    (text / "MANIFEST.json").write_text(json.dumps({"parts": [part]}))
    plan = recipe.Plan(steps=2, twin=2, recipe=Recipe(dropout=0.2))
    manifest = recipe.build(plan, tmp_path / "work", tmp_path / "data")
    folder = tmp_path / "data" / "models" / "tiny-exit"
    assert json.loads((folder / "MANIFEST.json").read_text())["steps"] == 2
    for name in ("tiny-exit", "twin"):
        found = manifest["exits"][name]
        assert len(found["layers"]) == 3 and found["layers"][-1]["same"] == 1
        for mode in ("greedy", "sampled"):
            assert list(found["acceptance"][mode]) == ["1", "2"]
            for row in found["acceptance"][mode].values():
                assert row["tokens"] == 2 * 64 and 1 <= row["tau"] <= 5 and 0 <= row["rate"] <= 1
    said = (folder / "README.md").read_text()
    assert f"{manifest['exits']['twin']['layers'][0]['loss']:.3f}" in said
    assert f"{manifest['exits']['tiny-exit']['acceptance']['greedy']['2']['tau']:.2f}" in said
    (point,) = manifest["twin"]
    assert point["step"] == 2 and f"{point['loss'][1]:.3f}" in said and "--twin 2" in said
    assert "Layer dropout up to 0.2" in said and manifest["weights_sha256"] in said
    assert open_source(folder).config.num_layers == 3


def test_a_folder_holds_what_is_measured(tmp_path: Path) -> None:
    model = ExitModel(TOY, 3)
    write_weights(tmp_path, model)
    source, kept = open_source(tmp_path), rounded(model)
    for name, tensor in kept.main.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(source.tensor(name).float(), tensor)
    assert source.config.tie_embeddings
