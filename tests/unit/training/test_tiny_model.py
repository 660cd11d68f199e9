"""The shipped tiny model: complete, what its manifest says, and really trained."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from workbench.training.corpus.chat import chatml
from workbench.training.tiny.evaluate import score, token_losses

DATA = Path(__file__).resolve().parents[3] / "data"
TINY = DATA / "models/tiny"


@cache
def model() -> Any:
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@cache
def tokenizer() -> Tokenizer:
    """The bare tokenizer."""
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def passage(document: str, limit: int = 8000) -> str:
    """The start of one held-out document."""
    parts = json.loads((DATA / "text/MANIFEST.json").read_text())["parts"]
    part = next(part for part in parts if part["document"] == document)
    raw = (DATA / "text/eval.txt").read_bytes()[part["start"] :]
    return raw[: min(limit, part["bytes"])].decode("utf-8", errors="ignore")


def test_the_folder_is_complete_small_and_matches_its_hash() -> None:
    weights = (TINY / "model.safetensors").read_bytes()
    manifest = json.loads((TINY / "MANIFEST.json").read_text())
    assert hashlib.sha256(weights).hexdigest() == manifest["weights_sha256"]
    assert len(weights) <= 7_000_000
    assert f"{manifest['scores']['all']['perplexity']:.2f}" in (TINY / "README.md").read_text("utf-8")
    assert len((TINY / "curve.csv").read_text().splitlines()) > 10


def test_weights_are_bfloat16_and_finite() -> None:
    with safe_open(TINY / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16
            assert torch.isfinite(tensor).all()


def test_shape_suits_codecs_and_rotations() -> None:
    config = model().config
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    for width in (config.hidden_size, config.intermediate_size, config.head_dim):
        assert width & (width - 1) == 0
        assert width % 32 == 0


@pytest.mark.parametrize(
    ("document", "most"), [("docs/library/csv", 1.9), ("stdlib/csv.py", 1.9), ("plays/macbeth", 2.5)]
)
def test_it_predicts_text_it_never_saw(document: str, most: float) -> None:
    found = score(model(), tokenizer(), passage(document), window=512)
    assert found.bits_per_byte < most  # 8 is no model, about 4.5 the frequencies of letters


def test_it_needs_the_order_of_the_words() -> None:
    text = passage("docs/library/csv")
    ids = tokenizer().encode(text).ids
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = tokenizer().decode([ids[i] for i in order], skip_special_tokens=False)
    plain, scrambled = (score(model(), tokenizer(), t).bits_per_byte for t in (text, shuffled))
    assert scrambled > 1.5 * plain


def test_late_positions_profit_from_context() -> None:
    text = passage("docs/tutorial/controlflow", 16_000)
    long = token_losses(model(), tokenizer(), text, 2048)[0]
    short = token_losses(model(), tokenizer(), text, 64)[16:32]  # the same tokens, little before them
    same = [long[64 * (16 + i) + j] for i in range(16) for j in range(63)]
    assert sum(same) < 0.97 * sum(loss for losses in short for loss in losses)


def test_a_passage_costs_less_the_second_time() -> None:
    lines = (DATA / "prompts/copy_heavy.jsonl").read_text("utf-8").splitlines()[:12]
    first = second = 0.0
    for passage_text in (json.loads(line)["reference"] + "\n\n" for line in lines):
        cut = len(tokenizer().encode(passage_text).ids)
        losses = token_losses(model(), tokenizer(), passage_text * 2, 2048)[0]
        first += sum(losses[: cut - 1]) / (cut - 1)
        second += sum(losses[cut:]) / len(losses[cut:])
    assert second < 0.85 * first  # copying is partial in a model this small: it measured about 0.72


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens() -> None:
    assert tokenizer().encode("2024x31").tokens == ["2", "0", "2", "4", "x", "3", "1"]


def test_the_chat_template_is_what_was_trained_on() -> None:
    fast = AutoTokenizer.from_pretrained(TINY)
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]
    messages = [{"role": role, "content": content} for role, content in turns]
    shown = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert shown == chatml(turns) + "<|im_start|>assistant\n"
    ids = fast.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids.count(fast.convert_tokens_to_ids("<|im_start|>")) == 4


def test_generation_stops_at_the_end_of_a_turn_or_text() -> None:
    generation, fast = GenerationConfig.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    assert generation.eos_token_id == fast.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert fast.eos_token_id == generation.eos_token_id[0]
    assert fast.model_max_length == model().config.max_position_embeddings == 2048
