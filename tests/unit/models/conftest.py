"""Toy checkpoints: random models as Hugging Face folders and as GGUF files, with a real tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. 0123456789 naïve café, 안녕하세요 👋 hello world",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i, add(i, 1))\n",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("WORKBENCH_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level BPE with single digits, as SmolLM2's, of 320 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer


def llama_config(**changes: Any) -> dict[str, Any]:
    """A one-layer Llama: 4 query heads, 2 key/value heads, head_dim 4."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | changes


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 tensors of the checkpoint that ``config`` describes."""
    from workbench.models.config import ModelConfig
    from workbench.models.layout import expected_shapes

    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(ModelConfig.from_hf(config))
    return {n: torch.randn(s, generator=generator) * 0.2 for n, s in shapes.items()}


@pytest.fixture
def hf_folder(tmp_path: Path, byte_level: Tokenizer) -> Callable[..., Path]:
    """``hf_folder(config, tensors, name=)``: a folder with config, weights and tokenizer."""

    def make(config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        byte_level.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "chat_template": CHATML,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return make


@pytest.fixture
def write_gguf(byte_level: Tokenizer) -> Callable[..., Path]:
    """``write_gguf(path, architecture, metadata, tensors, formats=)``: a GGUF file with SmolLM2's tokenizer.

    ``tensors`` carry GGUF names and layouts; ``formats`` maps a name to a quantization (default float32).
    """

    def write(
        path: Path,
        architecture: str,
        metadata: dict[str, Any],
        tensors: dict[str, np.ndarray],
        formats: dict[str, gguf.GGMLQuantizationType] | None = None,
        pre: str = "smollm",
    ) -> Path:
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in metadata.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{key}", value)
        model = json.loads(byte_level.to_str())["model"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if t in SPECIALS else 1 for t in tokens])
        writer.add_token_merges([" ".join(m) for m in model["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(CHATML)
        for name, values in tensors.items():
            kind = (formats or {}).get(name)
            data = values if kind is None else gguf.quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


LLAMA_META = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 16,
    "feed_forward_length": 32,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 4,
}


@pytest.fixture
def toy() -> Any:
    """The helpers above, for tests that build their own variants."""

    class Toy:
        config = staticmethod(llama_config)
        weights = staticmethod(random_weights)
        gguf_meta = LLAMA_META

    return Toy
